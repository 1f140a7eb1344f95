"""pyproject.toml agrees with the code, the pinned versions, the workflows and the compiled-in licences."""

import ast
import re
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import nanobind
import pytest
import yaml
from packaging.requirements import Requirement

from fakequant._torch_releases import NEWEST, OLDEST, release_of

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
TOOL = (ROOT / "tools/torch_releases.py").read_text(encoding="utf-8")
TORCH_VERSIONS = ast.literal_eval(re.search(r"^VERSIONS = (.*)$", TOOL, re.MULTILINE)[1])


def pins(file):
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonical(r.name): next(iter(r.specifier)).version for r in found}


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(extra):
    """Returns all requirements of an extra, including those of nested extras."""
    found = set()
    for line in EXTRAS[extra]:
        requirement = Requirement(line)
        if requirement.name == "fakequant":
            found = found.union(*(requirements(other) for other in requirement.extras))
        else:
            found.add(requirement)
    return found


def test_required_dependencies_are_numpy_and_ml_dtypes():
    assert {Requirement(line).name for line in PROJECT["project"]["dependencies"]} == {"numpy", "ml_dtypes"}


def test_wheels_are_built_for_the_documented_versions_of_python():
    classifiers = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["project"]["classifiers"]), re.MULTILINE)
    built = [f"3.{one[3:-2]}" for one in PROJECT["tool"]["cibuildwheel"]["build"]]
    assert built == classifiers
    for file in ("README.md", "docs/installation.md", "RELEASING.md"):
        assert f"{built[0]} to {built[-1]}" in (ROOT / file).read_text(encoding="utf-8"), file


def test_extras_contain_the_documented_packages():
    names = {extra: {r.name for r in requirements(extra)} for extra in EXTRAS}
    torch, onnx = {"torch", "tqdm"}, {"safetensors", "onnx", "onnxscript", "onnxruntime"}
    assert names["torch"] == torch
    assert names["onnx"] == torch | onnx
    assert names["search"] == torch | {"scipy"}
    assert names["report"] == torch | {"scipy", "matplotlib", "jinja2"}
    assert names["demo"] == names["onnx"] | names["report"] | {"scikit-learn"}
    assert names["transformers"] == torch | {"transformers", "accelerate", "safetensors"}
    assert names["llm"] == names["transformers"] | {"compressed-tensors"}
    assert names["lightning"] == torch | {"lightning"}
    assert names["gpu"] == torch | {"triton"}
    assert names["openvino"] == torch | onnx | {"openvino"}
    assert names["executorch"] == torch | {"executorch"}
    assert names["litert"] == torch | {"ai-edge-litert"}
    assert names["all"] == names["demo"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_tested_versions_are_within_the_declared_ranges(extra):
    pinned = {**pins("requirements-runtimes.txt"), **pins("requirements-dev.txt"), **pins("requirements-demo.txt")}
    pinned |= pins("requirements-gpu.txt")
    for requirement in requirements(extra):
        tested = TORCH_VERSIONS if requirement.name == "torch" else [pinned[canonical(requirement.name)]]
        assert all(map(requirement.specifier.contains, tested)), requirement


def test_extras_named_in_code_and_docs_exist():
    files = [
        p for place in ("src", "docs", "examples") for p in (ROOT / place).rglob("*") if p.suffix in {".py", ".md"}
    ]
    named = {
        extra.strip()
        for path in [*files, ROOT / "README.md"]
        for extras in re.findall(r"fakequant\[([a-z, ]+)\]", path.read_text(encoding="utf-8"))
        for extra in extras.split(",")
    }
    defaults = re.findall(r'extra: str = "(\w+)"', (ROOT / "src/fakequant/_util/packages.py").read_text())
    assert {"torch", "onnx"} <= named
    assert named | set(defaults) <= EXTRAS.keys()


def test_build_requirements_are_the_tested_versions():
    assert pins("requirements-build.txt").items() <= pins("requirements-demo.txt").items()


def test_autograd_nodes_are_built_and_tested_for_every_torch_release():
    """Wheels and the release workflow are tested with the newest version of every supported release."""
    releases = [release_of(version) for version in TORCH_VERSIONS]
    assert releases == [(OLDEST[0], minor) for minor in range(OLDEST[1], NEWEST[1] + 1)]
    [loop] = [step for step in PROJECT["tool"]["cibuildwheel"]["linux"]["test-command"] if "torch==" in step]
    assert loop.startswith(f"for v in {' '.join(TORCH_VERSIONS)}; do ")
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"pip install -q torch==(.*)\n", makefile)[1] in TORCH_VERSIONS
    assert f"TORCH      ?= {TORCH_VERSIONS[-1]}\n" in makefile
    job = yaml.safe_load((ROOT / ".github/workflows/releases.yml").read_text())["jobs"]["torch"]
    assert {entry["torch"] for entry in job["strategy"]["matrix"]["include"]} == set(TORCH_VERSIONS)


def test_licences_of_compiled_in_code_match_their_sources():
    [ours] = [f for f in distribution("nanobind").files or () if f.name == "LICENSE"]
    assert (ROOT / "licenses/nanobind.txt").read_text() == ours.read_text()
    header = Path(nanobind.__file__).parent / "ext/robin_map/include/tsl/robin_map.h"
    comment = re.sub(r"^ \* ?", "", header.read_text().split("*/")[0], flags=re.MULTILINE)
    assert (ROOT / "licenses/robin_map.txt").read_text().strip() in comment


def test_version_is_the_same_everywhere():
    version = PROJECT["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    # The first section of the changelog is the next release: this version, or what comes after it.
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first
    assert first[1] in (version, "Unreleased")


def test_github_workflows_are_valid():
    for path in sorted((ROOT / ".github/workflows").glob("*.yml")):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["name"] == path.stem
        for job in workflow["jobs"].values():
            assert job["runs-on"]
            assert all(("uses" in step) != ("run" in step) for step in job["steps"])
