"""Warnings of `prepare` about rules that match nothing and specs that do not fit their layers."""

import warnings
from collections.abc import Iterable
from difflib import get_close_matches

from torch import nn

from fakequant.config import QuantConfig, Rule

# Longer patterns are not compared with names: it would be slow, and nothing would be similar.
_LONGEST = 200


def near_names(rule: Rule, modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    """Returns types that are similar to the type of a rule if no module has it, otherwise paths similar to its path."""
    named = list(modules)
    if rule.type is not None:
        types = {cls.__name__ for _, module in named for cls in type(module).__mro__ if issubclass(cls, nn.Module)}
        if rule.type not in types:
            return _near(rule.type, sorted(types), 0.6)
    return _near(rule.path, [path for path, _ in named], 0.3)


def warn_about_rules(
    modules: Iterable[tuple[str, nn.Module]], config: QuantConfig, ignored: tuple[str, str | None]
) -> None:
    """Warns once about rules that match no module, and suggests similar names.

    Args:
        modules: The modules that a rule can match, by path.
        config: The rules.
        ignored: The path and type of a rule that need not match, because recipes contain it for all models.
    """
    named = list(modules)
    unmatched = [
        rule
        for rule in config.rules
        if (rule.path, rule.type) != ignored and not any(rule.matches(path, module) for path, module in named)
    ]
    if not unmatched:
        return
    lines = "".join(
        f"\n  {_words(rule)}; near: {', '.join(near_names(rule, named)) or 'nothing'}" for rule in unmatched
    )
    warnings.warn(
        f"Rules of the config match no module of the model:{lines}\nCorrect or remove them.",
        UserWarning,
        stacklevel=3,
    )


def warn_about_refused(refused: dict[str, str]) -> None:
    """Warns once about layers that stay in float because the spec does not fit them."""
    if not refused:
        return
    shown = "".join(f"\n  {path or 'the model'}: {reason}" for path, reason in list(refused.items())[:3])
    more = f"\n  and {len(refused) - 3} more" if len(refused) > 3 else ""
    warnings.warn(
        f"Layers stay in float because their spec does not fit them:{shown}{more}\n"
        "Use another spec for them in a rule, or leave them out with skip(...).",
        UserWarning,
        stacklevel=3,
    )


def _words(rule: Rule) -> str:
    verb = "skip" if rule.use is None else "rule"
    return f"{verb}({rule.path[:_LONGEST]!r}{'' if rule.type is None else f', type={rule.type!r}'})"


def _near(name: str, names: list[str], cutoff: float) -> list[str]:
    return get_close_matches(name, names, n=3, cutoff=cutoff) if len(name) <= _LONGEST else []
