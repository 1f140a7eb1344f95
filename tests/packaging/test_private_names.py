"""Names with an underscore are imported only within their package."""

import ast
from pathlib import Path

import fakequant

ROOT = Path(fakequant.__file__).parent


def borrowed(file):
    """Yields the private names that a file imports from other packages, except the compiled module."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fakequant."):
            place = ROOT.joinpath(*node.module.split(".")[1:])
            if file.parent not in (place, place.parent):
                yield from (
                    f"{node.module}.{x.name}" for x in node.names if x.name.startswith("_") and x.name != "_native"
                )


def test_no_package_imports_private_names_of_another():
    found = {str(file.relative_to(ROOT)): list(borrowed(file)) for file in ROOT.rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == {}
