"""What the kernels are compiled to for GPUs that are not here: `compiled_kernels.py` lists the calls."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

NVIDIA = ("sm_80", "sm_90", "sm_100")
# The others divide only to choose scales, or not at all.
DIVIDING = {
    "fake_quantize_kernel", "observe_tensor_kernel", "observe_rows_kernel", "join_kernel", "learned_kernel",
    "quantize_kernel",
}  # fmt: skip
# Every kernel that reads all elements of a tensor of floats reads 16 bytes at once.
OF_FLOATS = {
    "fake_quantize_kernel", "mask_backward_kernel", "range_kernel", "observe_tensor_kernel", "observe_rows_kernel",
    "learned_kernel", "quantize_kernel",
}  # fmt: skip
# torch's rule for learned scales has a fused multiply-add.
WITH_FMA = "learned, torch"


@pytest.fixture(scope="module")
def compiled():
    """Returns one row per target, call and kernel."""
    script = Path(__file__).with_name("compiled_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, script, *NVIDIA, "gfx942"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def of_nvidia(compiled):
    for row in compiled:
        if row["target"] in NVIDIA:
            yield f"{row['call']}: {row['kernel']} for {row['target']}", row, row["ptx"]


def test_every_kernel_compiles_for_every_gpu(compiled):
    kernels = {row["kernel"] for row in compiled}
    assert OF_FLOATS | DIVIDING | {"sum_kernel", "dequantize_kernel"} == kernels
    for target in (*NVIDIA, "gfx942"):
        assert {row["kernel"] for row in compiled if row["target"] == target} == kernels


def test_divisions_are_rounded_correctly(compiled):
    for name, row, ptx in of_nvidia(compiled):
        kinds = {".".join(kind) for kind in re.findall(r"\b(div|rcp)\.(\w+)\.\w*\.?f\d\d", ptx)}
        assert kinds == {"div.rn"} or (row["kernel"] not in DIVIDING and not kinds), name


def test_nothing_is_contracted_or_flushed_to_zero(compiled):
    for name, row, ptx in of_nvidia(compiled):
        assert ".ftz" not in ptx, name
        assert ("fma." in ptx) == (row["call"] == WITH_FMA and row["kernel"] == "learned_kernel"), name


def test_threads_load_16_bytes_and_spill_nothing(compiled):
    for name, row, ptx in of_nvidia(compiled):
        assert (row["LOCAL"], row["STACK"]) == (0, 0), name
        assert ".local" not in ptx, name
        assert row["REG"] <= 168, name  # three programs of 4 warps fit
        if row["kernel"] in OF_FLOATS and not row["call"].endswith(("one element", "odd rows")):
            assert re.search(r"ld\.global\.(v4\.b32|v2\.b64)", ptx), name


def test_registers_and_shared_memory_are_reported(compiled, capsys):
    """Prints the table that docs/guides/gpu.md explains: `make test-gpu` shows it."""
    rows = {
        (
            row["call"],
            row["kernel"],
        ): f"{row['REG']:4} registers, {row['SHARED']:5} bytes shared   {row['call']}: {row['kernel']}"
        for _, row, _ in of_nvidia(compiled)
        if row["target"] == NVIDIA[0]
    }
    assert rows
    with capsys.disabled():
        print("", f"for {NVIDIA[0]}:", *rows.values(), sep="\n")
