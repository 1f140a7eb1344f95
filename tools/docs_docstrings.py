"""A griffe extension for the reference pages: converts this library's docstrings to Markdown."""

import ast
import re
from typing import Any

import griffe

# Directives for doctest, which readers do not need.
_FOR_DOCTEST = re.compile(r" *# doctest: .*$|^ *<BLANKLINE>$", re.MULTILINE)
_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).+)*", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Returns the docstring with code fences around its examples, because `>>>` is a nested quotation in Markdown."""

    def fenced(match: re.Match[str]) -> str:
        indent = match["indent"]
        return f"{indent}```pycon\n{_FOR_DOCTEST.sub('', match[0])}\n{indent}```"

    return _EXAMPLE.sub(fenced, text)


class Docstrings(griffe.Extension):
    """Fences examples, documents fields by the comments above them, and adds the names that are imported lazily."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Puts fences around examples."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, agent: Any, **_: Any) -> None:
        """Makes the comment above a field of a class its documentation."""
        if attr.docstring is not None or not isinstance(attr.parent, griffe.Class) or not hasattr(node, "lineno"):
            return
        lines = agent.code.splitlines()[: node.lineno - 1]
        words: list[str] = []
        while lines and lines[-1].strip().startswith("# "):
            words.insert(0, lines.pop().strip()[2:])
        if words and not words[0].startswith("---"):
            attr.docstring = griffe.Docstring("\n".join(words), parent=attr)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Adds aliases for `fakequant.prepare` and the other names that the package imports on first use."""
        if pkg.path == "fakequant":
            places = ast.literal_eval(str(pkg["_WHOLE_MODELS"].value))
            for name, place in places.items():
                pkg.set_member(name, griffe.Alias(name, f"fakequant.{place}.{name}", parent=pkg))
