"""Builds the sdist and a wheel, and tests the wheel in environments that cannot see the sources.

    python tools/wheel_test.py [--build-dir build/dev]

The Python that runs it must have the build requirements. By default the wheel is built from the sdist, which
compiles the kernels again and takes minutes. With a build folder in which they are already compiled from this tree,
the wheel is built there. In both cases the sdist must have the same files as this tree, byte for byte. The results
are in build/dist.
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
    """Runs a command without this shell's Python variables, which could lead back to the sources."""
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
    """Unpacks the sdist into a folder that is kept, and checks its files. Returns the folder.

    Files that have not changed are not written, so that their dates do not trigger another compilation.
    """
    goal = WORK / "source"
    with tarfile.open(sdist) as archive:
        files = {m.name.split("/", 1)[1]: archive.extractfile(m).read() for m in archive if m.isfile()}
    expected = {*IN_SDIST, *files_below(ROOT / "csrc"), *(f"src/{f}" for f in files_below(ROOT / "src" / "fakequant"))}
    missing, foreign = expected - files.keys(), files.keys() - expected - {"PKG-INFO"}
    check(not missing, f"not in the sdist: {sorted(missing)}")
    check(not foreign, f"should not be in the sdist: {sorted(foreign)}")
    for name, content in files.items():
        path = goal / name
        check(name == "PKG-INFO" or (ROOT / name).read_bytes() == content, f"{name} is different in the sdist")
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
    """Installs the wheel in a new environment and returns its Python. `also` is a folder of packages it can import."""
    folder = WORK / name
    venv.create(folder, clear=True)
    python = folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", *options, wheel)
    if also:
        places = {"base": str(folder), "platbase": str(folder)}
        # A .pth entry adds the folder itself but does not process its .pth files, one of which leads to the sources.
        (Path(sysconfig.get_path("purelib", "venv", places)) / "dev.pth").write_text(f"{also}\n")
    return python


def smoke_test(python: Path, *options: str) -> None:
    with tempfile.TemporaryDirectory() as elsewhere:
        script = shutil.copy(ROOT / "tools" / "smoke_test.py", elsewhere)
        run(python, "-I", script, *options, cwd=elsewhere)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--build-dir", type=Path, help="a build folder with kernels already compiled from this tree")
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
