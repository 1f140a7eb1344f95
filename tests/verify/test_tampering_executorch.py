"""`verify` accepts a program with one changed bit only if its results have the same bits."""

import collections
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from thoroughness import ALL

pytest.importorskip("torch")
pytest.importorskip("onnx")
pytest.importorskip("executorch.exir")

pytestmark = [
    pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="the target is for x86"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="every trial is a fork"),
]
SCRIPT = Path(__file__).with_name("program_trials.py")
MODELS = ["MLP, 4 bits", "CNN"] if ALL else ["MLP, 4 bits"]
SAME = "accepted, same bits"


@pytest.fixture(scope="module")
def tried():
    """All trials. They run in other processes, which a changed program may end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *map(str, (12, 2) if ALL else (6, 1)), *MODELS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("matches", ["matches", "old"])
@pytest.mark.parametrize("name", MODELS)
def test_verify_refuses_changed_programs(name, matches, tried, record_property):
    """With an old hash, the program is not run. With a matching one, `verify` sees only what it computes."""
    these = [trial for trial in tried if (trial["model"], trial["hash"]) == (name, matches)]
    unchanged = [trial["outcome"] for trial in these if trial["what"] == "nothing"]
    changed = [trial for trial in these if trial["what"] != "nothing"]
    counts = collections.Counter(trial["outcome"] for trial in changed)
    record_property("tampers", len(changed))
    assert unchanged == [SAME]
    assert [trial for trial in changed if trial["outcome"] in ("missed", "failed")] == []
    assert len(changed) >= 4
    assert counts["refused"] >= (len(changed) if matches == "old" else len(changed) / 4)


@pytest.mark.parametrize("name", MODELS)
def test_verify_notices_changes_of_tensors(name, tried):
    """The hash matches and the tensors of a program cannot be read, so the results must show the change."""
    these = [one for one in tried if (one["model"], one["hash"]) == (name, "matches") and "_" in one["what"]]
    tensors = {one["what"].rpartition(".")[2].split(",")[0] for one in these}
    assert tensors == {"weight_codes", "weight_scale", "bias_codes"}
    assert len(these) >= 6
    # Many changes by one bit have no effect on the codes of the results.
    assert len([one for one in these if one["outcome"] == "refused"]) >= len(these) / 4


def test_changed_programs_do_not_end_the_process(tried):
    """Some programs with a wrong byte end the process that runs them. They are not run if the hash is an old one."""
    assert [one for one in tried if one["outcome"].startswith("ended") and one["hash"] == "old"] == []
