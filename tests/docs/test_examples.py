"""The scripts in examples/ run and print the expected results."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from thoroughness import only_in_test_all

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="the example needs torch")
EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
PERCENT = r"(\d+\.\d) %"
QUICK = {
    "custom_observer.py": ["--images", "200"],
    "digits_mlp.py": ["--epochs", "1"],
    "distributed.py": [],
    "language_model.py": ["--steps", "6", "--model", "qwen3"],
    "residual_cnn_lsq.py": ["--epochs", "1"],
    "rounding.py": [],
    "transformer_weight_only_int4.py": ["--epochs", "1"],
}


def run(name, *start, is_quiet=True):
    command = [sys.executable, *(["-W", "error"] if is_quiet else []), *start, EXAMPLES / name, *QUICK[name]]
    # Other tests run at the same time: several threads would be slower than one.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment["GLOO_SOCKET_IFNAME"] = "lo"  # use the loopback interface only
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    assert not is_quiet or result.stderr == ""
    return result.stdout


def number(pattern, text):
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


def test_every_example_is_tested():
    assert sorted(path.name for path in EXAMPLES.glob("*.py")) == sorted(QUICK)


@needs_torch
@only_in_test_all
def test_digits_mlp_example_keeps_int8_accuracy_and_trains_2_bits():
    printed = run("digits_mlp.py")
    assert number(rf"int8 +calibrated +{PERCENT}", printed) == pytest.approx(
        number(rf"float +{PERCENT}", printed), abs=2
    )
    assert number(rf"2 bits +trained +{PERCENT}", printed) > number(rf"2 bits +calibrated +{PERCENT}", printed)


@needs_torch
@only_in_test_all
def test_residual_cnn_example_trains_2_bits_and_moves_scales():
    printed = run("residual_cnn_lsq.py")
    assert number(rf"2 bits, trained +{PERCENT}", printed) > number(rf"2 bits, calibrated +{PERCENT}", printed)
    assert number(r"scales moved by up to (\d+\.\d) %", printed) > 0


@needs_torch
@only_in_test_all
def test_transformer_example_trains_4_bit_weights():
    printed = run("transformer_weight_only_int4.py")
    assert number(rf"4-bit weights, trained +{PERCENT}", printed) > 25
    # Each weight takes 4 bits and 1/32 of a scale instead of 32 bits; embedding, norms and biases are float.
    assert number(r"with quantized weights \((\d+)%\)", printed) < 20


@needs_torch
@only_in_test_all  # the guide on language models runs the same steps
def test_language_model_example_writes_a_folder_that_computes_what_was_trained():
    pytest.importorskip("compressed_tensors")
    printed = run("language_model.py", is_quiet=False)  # other libraries warn
    assert "it computes what was trained, in transformers: True" in printed
    assert number(r"quantized layers (\d+\.\d)% of their size", printed) < 17


@needs_torch
@only_in_test_all
def test_custom_observer_example_beats_min_max():
    printed = run("custom_observer.py")
    assert number(r"Deviations.* (\d+\.\d) dB", printed) > number(r"MinMax.* (\d+\.\d) dB", printed) + 6


@needs_torch
@only_in_test_all  # tests/ranks has the same checks
def test_distributed_example_has_the_same_scales_on_both_ranks():
    assert re.search(r"\d+ scales, the same on 2 ranks", run("distributed.py", *TORCHRUN))


def test_rounding_example_runs_without_torch():
    printed = run(
        "rounding.py",
        "-c",
        "import sys, runpy; sys.modules['torch'] = None; runpy.run_path(sys.argv[1], run_name='__main__')",
    )
    assert re.search(r"half_away +-2 +1 +3 ", printed)
    assert number(r"per group of 32 +(\d+\.\d) dB", printed) > number(r"per tensor +(\d+\.\d) dB", printed)
