"""Downloads the parts of torch that compiled autograd nodes are built with: python tools/torch_releases.py FOLDER.

For every release, FOLDER/<version>/torch gets the headers and the three libraries to link. CMake takes the folder as
FAKEQUANT_TORCH_RELEASES. A version that exists in the folder is not downloaded again; it serves every Python version.
Wheels come from pip's index and from PIP_EXTRA_INDEX_URL. CPU builds are smaller and have the same interface.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# Each was built and tested. Other versions of torch use the nodes written in Python.
VERSIONS = ("2.12.1", "2.13.0", "2.14.1", "2.15.0")
LIBRARIES = ("c10", "torch_cpu", "torch_python")


def is_wanted(name: str) -> bool:
    if name.startswith("torch/lib/"):
        return Path(name).name.split(".")[0].removeprefix("lib") in LIBRARIES
    return name == "torch/version.py" or name.startswith("torch/include/")


def fetch(version: str, goal: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", folder]
        subprocess.run([*command, f"torch=={version}"], check=True)
        [wheel] = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(goal, [name for name in archive.namelist() if is_wanted(name)])
    (goal / "complete").touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("versions", nargs="*", default=VERSIONS, help=f"default: {' '.join(VERSIONS)}")
    arguments = parser.parse_args()
    for version in arguments.versions:
        goal = arguments.folder / version
        if not (goal / "complete").exists():
            fetch(version, goal)
        print(goal / "torch")


if __name__ == "__main__":
    main()
