"""Private names of torch are used in one file only, so a new release can be checked against one list."""

import re
from pathlib import Path

import fakequant

SOURCES = Path(fakequant.__file__).parent
HOME = SOURCES / "_backends" / "torch" / "torch_private.py"
# `import torch._x`, `from torch.x._y import z`, `from torch.x import _y` and `torch.x._y`, but not dunder names.
PRIVATE = re.compile(
    r"^\s*(?:from|import) torch(?:\.\w+)*\._\w+|^\s*from torch[.\w]* import [^#\n]*\b_[a-z]\w*"
    r"|\btorch(?:\.\w+)*\._(?!_)\w+|\bforward_ad\._\w+|\blibrary\._destroy",
    re.MULTILINE,
)
# Named in messages, or looked up by name only.
ALLOWED = {"torch.utils._pytree", "torch._dynamo", "torch.onnx._internal.exporter._registration"}


def names_in(path):
    return {found.strip() for found in PRIVATE.findall(path.read_text())}


def test_pattern_finds_private_names_of_torch():
    assert len(names_in(HOME)) >= 12


def test_only_one_file_uses_private_names_of_torch():
    found = {
        str(path.relative_to(SOURCES)): names
        for path in SOURCES.rglob("*.py")
        if path != HOME and (names := {n for n in names_in(path) if not any(n.startswith(a) for a in ALLOWED)})
    }
    assert found == {}
