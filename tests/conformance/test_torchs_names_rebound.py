"""After a program rebinds torch's names to fakequant's functions, calls left to torch still reach torch."""

import subprocess
import sys
import textwrap

import pytest

import fakequant as fq
from accelerated import decelerated  # noqa: F401
from fakequant import torch_ops
from torch_bridge import aten, torch

X = torch.linspace(-1, 1, 6).reshape(2, 3)
SCALES, ZEROS = torch.full((2,), 0.1), torch.zeros(2, dtype=torch.int32)
ON, STATE = torch.ones(1, dtype=torch.int64), (torch.zeros(1), torch.zeros(1), torch.ones(1), torch.zeros(1).int())
# Arguments that torch refuses, by function name.
REFUSED = {
    "fake_quantize_per_tensor_affine": (torch, (X, 0.1, 0, 7, -8)),
    "fake_quantize_per_channel_affine": (torch, (X, SCALES, ZEROS, 0, 7, -8)),
    "_fake_quantize_learnable_per_tensor_affine": (torch, (X, SCALES[:1], SCALES[:1], 7, -8)),
    "_fake_quantize_learnable_per_channel_affine": (torch, (X, SCALES, SCALES, 0, 7, -8)),
    "fused_moving_avg_obs_fake_quant": (torch, (X, ON, ON, *STATE, 0.01, 7, -8, -1)),
    "fake_quantize_per_tensor_affine_cachemask": (aten, (X, 0.1, 0, 7, -8)),
    "fake_quantize_per_tensor_affine_cachemask_backward": (aten, (X, X > 0.0)),
    "fake_quantize_per_channel_affine_cachemask": (aten, (X, SCALES, ZEROS, 0, 7, -8)),
    "fake_quantize_per_channel_affine_cachemask_backward": (aten, (X, X[0] > 0.0)),
    "_fake_quantize_learnable_per_tensor_affine_backward": (aten, (X, X, SCALES[:1], SCALES[:1], 7, -8)),
    "_fake_quantize_learnable_per_channel_affine_backward": (aten, (X, X, SCALES, SCALES, 0, 7, -8)),
    "_fused_moving_avg_obs_fq_helper": (aten, (X, ON, ON, *STATE, 0.01, 7, -8, -1)),
}


def outcome(function, arguments):
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "accepted"


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("accelerated", [False, True], ids=["not accelerated", "accelerated"])
def test_a_rebound_torch_name_raises_torchs_errors(name, accelerated, monkeypatch):
    namespace, arguments = REFUSED[name]
    expected = outcome(getattr(namespace, name), arguments)
    ours = getattr(torch_ops, name.lstrip("_"))
    monkeypatch.setattr(namespace, name, ours)
    if accelerated:
        with fq.accelerate():
            assert outcome(getattr(namespace, name), arguments) == expected
    assert outcome(getattr(namespace, name), arguments) == expected


def test_torch_names_rebound_before_the_first_call_raise_torchs_errors():
    """The first call on a tensor imports the torch front end, which must still find torch's functions."""
    code = """
        import fakequant as fq, torch
        for name in ("fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"):
            setattr(torch, name, getattr(fq.torch_ops, name))
        name = "fake_quantize_per_tensor_affine_cachemask"
        setattr(torch.ops.aten, name, getattr(fq.torch_ops, name))
        x = torch.ones(2, 3)
        calls = (
            lambda: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, 7, -8),
            lambda: torch.fake_quantize_per_channel_affine(x, torch.ones(2), torch.zeros(2).int(), 0, 7, -8),
            lambda: torch.ops.aten.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 0, 7, -8),
        )
        for switch in (lambda: None, fq.accelerate, fq.decelerate):
            switch()
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    assert type(error) is RuntimeError and "`quant_min` should be less" in str(error), error
                else:
                    raise AssertionError("accepted")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
