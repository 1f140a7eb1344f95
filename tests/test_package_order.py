"""Packages form layers: a module imports only from its own package and from packages below it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import fakequant
from fakequant._runtimes import RUNTIMES, TARGETS

ROOT = Path(fakequant.__file__).parent
# From the bottom to the top. docs/architecture.md draws it. Rooms of runtimes are columns, and their files are on
# different floors: `_runtimes.session` stands for the files of this name in all rooms, `_runtimes` for all other files.
LAYERS = [
    {"formats", "_native", "_util", "_torch_releases"},
    {"spec"},
    {"_kernels", "reference", "presets"},
    {"_backends", "_info", "reference_formats", "reference_ggml"},
    {"qparams", "torch_ops", "testing"},
    {"functional", "fake_quantizer", "_accelerate"},
    {"observers", "_runtimes", "_moves"},
    {"config", "nn"},
    {"recipes", "_model"},
    {"_prepare"},
    {"_convert.golden.tracked_codes"},
    {"_runtimes.arithmetic", "_runtimes.running"},
    {"_train", "_convert"},
    {"_paired_models"},
    {"_export"},
    {"_runtimes.onnx_forms"},
    {"_runtimes.session"},
    {"_verify"},
    {"_diagnosis"},
    {"ptq"},
    {"integrations", "_demo", "results"},
    {"_cli"},
]
LEVELS = {name: level for level, names in enumerate(LAYERS) for name in names}
LOWEST_FLOOR = {"__init__", "target", "rounding"}
# The bases of sessions with ONNX files and of kernels of several runtimes, which no room owns.
SHARED = {"_runtimes.onnx_session": "_runtimes.session", "_runtimes.reciprocal_arithmetic": "_runtimes.arithmetic"}
# Where public names and rooms are listed. A recipe may be for one target.
FRONT_DOORS = {"__init__.py", "results.py", "recipes.py", "_runtimes/__init__.py"}
# Runtimes that are also libraries whose models and trainers other packages know.
LIBRARIES = {"transformers"}


def modules() -> Iterator[tuple[str, str, str]]:
    """Yields (importing module, imported module, file and line) for all imports, also in functions."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[0] in ("__init__", "__main__"):
            continue  # the front doors
        here = ".".join(parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fakequant":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("fakequant.")]
            else:
                continue
            for name in names:
                yield here, _module(name.removeprefix("fakequant.")), f"{path.relative_to(ROOT)}:{node.lineno}"


def _module(name: str) -> str:
    """Returns the module that a dotted name is, or is in."""
    place = ROOT.joinpath(*name.split("."))
    is_module = place.with_suffix(".py").exists() or place.is_dir() or "." not in name
    return name if is_module else name.rpartition(".")[0]


def unit(module: str) -> str:
    """Returns the name in `LAYERS` that a module belongs to.

    >>> unit("_runtimes.openvino.session"), unit("_export.onnx.lowering")
    ('_runtimes.session', '_export')
    """
    parts = module.split(".")
    if parts[0] == "_runtimes":
        floor = SHARED.get(module, f"_runtimes.{parts[-1]}")
        return floor if floor in LEVELS else "_runtimes"
    return next((name for n in range(len(parts), 0, -1) if (name := ".".join(parts[:n])) in LEVELS), parts[0])


def test_every_package_has_a_layer():
    packages = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert packages - {"__init__", "__main__"} <= set(LEVELS)


def test_imports_point_downwards():
    wrong = [
        f"{where}: {unit(here)} imports {unit(there)}"
        for here, there, where in modules()
        if unit(there) != unit(here) and LEVELS[unit(there)] >= LEVELS[unit(here)]
    ]
    assert wrong == []


def test_rooms_have_files_of_fixed_names():
    rooms = [path for path in (ROOT / "_runtimes").iterdir() if (path / "__init__.py").exists()]
    floors = LOWEST_FLOOR | {name.split(".")[1] for name in LEVELS if name.startswith("_runtimes.")}
    assert all((room / "target.py").exists() for room in rooms)
    assert {path.stem for room in rooms for path in room.glob("*.py")} == floors


def test_rooms_and_exporters_do_not_import_each_other():
    for columns in ("_runtimes", "_export"):
        folders = {path.name for path in (ROOT / columns).iterdir() if path.is_dir()}
        found = [
            where
            for here, there, where in modules()
            if here.startswith(f"{columns}.") and there.startswith(f"{columns}.")
            for mine, other in [(here.split(".")[1], there.split(".")[1])]
            if mine in folders and other in folders and mine != other
        ]
        assert found == []


def test_runtimes_are_named_only_in_rooms_and_exporters():
    others = [runtime for runtime in RUNTIMES.values() if runtime != TARGETS["generic"].runtime]
    names = {name.lower() for runtime in others for name in (runtime.key, runtime.name, runtime.room)} - LIBRARIES
    named = re.compile("|".join(map(re.escape, sorted(names))), re.IGNORECASE)
    found = [
        f"{place}:{number}"
        for path in sorted(ROOT.rglob("*.py"))
        if (place := str(path.relative_to(ROOT))) not in FRONT_DOORS
        if not re.match(r"(_runtimes|_export)/\w+/", place)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if named.search(line)
    ]
    assert found == []


def test_training_knows_no_runtime():
    known = {there for here, there, _ in modules() if here.split(".")[0] == "nn" and there.startswith("_runtimes")}
    assert known == {"_runtimes.rounding", "_runtimes.target"}
