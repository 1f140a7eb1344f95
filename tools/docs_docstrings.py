"""For the reference pages: docstrings as they are written in this library, as Markdown."""

import ast
import re
from typing import Any

import griffe

# What is said to doctest only.
_FOR_DOCTEST = re.compile(r" *# doctest: .*$|^ *<BLANKLINE>$", re.MULTILINE)
_EXAMPLE = re.compile(r"^(?P<indent> *)>>> .*(?:\n(?! *$).+)*", re.MULTILINE)


def as_markdown(text: str) -> str:
    """The same with fences around examples; in Markdown `>>>` is a quotation of a quotation of a quotation."""

    def fenced(match: re.Match[str]) -> str:
        indent = match["indent"]
        return f"{indent}```pycon\n{_FOR_DOCTEST.sub('', match[0])}\n{indent}```"

    return _EXAMPLE.sub(fenced, text)


class Docstrings(griffe.Extension):
    """Examples as code, comments above fields as their documentation, and names that are imported later."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Marks examples."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_attribute_instance(self, *, node: Any, attr: griffe.Attribute, agent: Any, **_: Any) -> None:
        """A field of a class is documented by the comment above it."""
        if attr.docstring is not None or not isinstance(attr.parent, griffe.Class) or not hasattr(node, "lineno"):
            return
        lines = agent.code.splitlines()[: node.lineno - 1]
        words: list[str] = []
        while lines and lines[-1].strip().startswith("# "):
            words.insert(0, lines.pop().strip()[2:])
        if words and not words[0].startswith("---"):
            attr.docstring = griffe.Docstring("\n".join(words), parent=attr)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """`fakequant.prepare` and others are there when they are asked for."""
        if pkg.path == "fakequant":
            places = ast.literal_eval(str(pkg["_WHOLE_MODELS"].value))
            for name, place in places.items():
                pkg.set_member(name, griffe.Alias(name, f"fakequant.{place}.{name}", parent=pkg))
