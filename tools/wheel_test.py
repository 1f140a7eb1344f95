"""Builds the sdist and a wheel, and uses the wheel where the sources are out of reach.

python tools/wheel_test.py [--build-dir build/dev], with a Python that has all that builds it.

The wheel is built from the sdist. That compiles the kernels once more, which takes minutes; with a build folder that
has them compiled from this tree, the wheel is built there, and the sdist must have the same files, byte for byte.
Results are in build/dist.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST, WORK = ROOT / "build" / "dist", ROOT / "build" / "wheel-test"
LICENSES = ("LICENSE", "licenses/nanobind.txt", "licenses/robin_map.txt")
IN_SDIST = ("CHANGELOG.md", "CMakeLists.txt", "README.md", "pyproject.toml", *LICENSES)


def run(*command: object, **options: object) -> None:
    """A command without what this shell says about Python, so that nothing leads back to the sources."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != "VIRTUAL_ENV"}
    subprocess.run([str(part) for part in command], check=True, env=clean, **options)


def check(condition: bool, message: str) -> None:
    if not condition:
        raise SystemExit(f"wheel-test: {message}")


def build(kind: str, source: Path, *options: str) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "-o", DIST, *options, source,
        stdout=subprocess.DEVNULL)  # fmt: skip
    [made] = DIST.glob({"sdist": "*.tar.gz", "wheel": "*.whl"}[kind])
    return made


def files_below(folder: Path) -> set[str]:
    return {
        path.relative_to(folder.parent).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }


def unpack(sdist: Path) -> Path:
    """The sdist's files in a folder that stays. Only what differs is written: their dates in the sdist mean nothing."""
    goal = WORK / "source"
    with tarfile.open(sdist) as archive:
        files = {m.name.split("/", 1)[1]: archive.extractfile(m).read() for m in archive if m.isfile()}
    expected = {*IN_SDIST, *files_below(ROOT / "csrc"), *(f"src/{f}" for f in files_below(ROOT / "src" / "fakequant"))}
    missing, foreign = expected - files.keys(), files.keys() - expected - {"PKG-INFO"}
    check(not missing, f"not in the sdist: {sorted(missing)}")
    check(not foreign, f"should not be in the sdist: {sorted(foreign)}")
    for name, content in files.items():
        path = goal / name
        check(name == "PKG-INFO" or (ROOT / name).read_bytes() == content, f"{name} is another one in the sdist")
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    for path in goal.rglob("*"):
        if path.is_file() and path.relative_to(goal).as_posix() not in files:
            path.unlink()
    return goal


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = next(n.split("/")[0] for n in names if n.endswith(".dist-info/METADATA"))
    expected = files_below(ROOT / "src" / "fakequant") | {f"{info}/licenses/{name}" for name in LICENSES}
    check(expected <= names, f"not in the wheel: {sorted(expected - names)}")
    modules = {n for n in names - expected if n.startswith("fakequant/_") and n.endswith((".so", ".pyd"))}
    check(any(n.startswith("fakequant/_native.") for n in modules), f"no compiled module in {sorted(names)}")
    others = {n for n in names - expected - modules if not n.startswith(f"{info}/")}
    check(not others, f"should not be in the wheel: {sorted(others)}")
    print(f"{wheel.name}: {wheel.stat().st_size / 1024:.0f} KiB, {len(names)} files, {len(modules)} compiled modules")


def install(wheel: Path, name: str, *options: str, also: Path | None = None) -> Path:
    """A fresh environment with the wheel; the Python in it. `also`: a folder of packages to see."""
    folder = WORK / name
    venv.create(folder, clear=True)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", *options, wheel)
    if also:
        places = {"base": str(folder), "platbase": str(folder)}
        # A plain path: the links that are in that folder itself, such as one to the sources, are not followed.
        (Path(sysconfig.get_path("purelib", "venv", places)) / "dev.pth").write_text(f"{also}\n")
    return python


def smoke_test(python: Path, *options: str) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        script = shutil.copy(ROOT / "tools" / "smoke_test.py", elsewhere)
        run(python, "-I", script, *options, cwd=elsewhere)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--build-dir", type=Path, help="where the kernels are compiled from this tree already")
    compiled = parser.parse_args().build_dir
    start = time.perf_counter()
    shutil.rmtree(DIST, ignore_errors=True)
    source = unpack(build("sdist", ROOT))
    if compiled:
        check(compiled.is_dir(), f"no build folder {compiled}")
        wheel = build("wheel", ROOT, "-C", f"build-dir={compiled.resolve()}")
    else:
        wheel = build("wheel", source, "-C", f"build-dir={WORK / 'cmake'}")
    check_wheel(wheel)
    print(f"built in {time.perf_counter() - start:.0f} s", flush=True)

    python = install(wheel, "numpy-only")
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "list", "--format=freeze"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    packages = {line.split("==")[0] for line in listed.split()}
    check(packages == {"fakequant", "ml_dtypes", "numpy"}, f"installed: {sorted(packages)}")
    smoke_test(python)

    if find_spec("torch"):
        python = install(wheel, "torch", "--no-deps", also=Path(sysconfig.get_path("purelib")))
        smoke_test(python, "--torch", "compiled")
    print(f"wheel-test: passed in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
