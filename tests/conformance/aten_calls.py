"""Ordinary arguments of every function with a torch name, and the outcome of a call."""

import numpy as np

from torch_bridge import BF16, aten, torch

x = np.linspace(-1, 1, 6).reshape(2, 3).astype(np.float32)
mask = np.ones((2, 3), bool)


def f32(*values):
    return np.array(values, np.float32)


def i32(*values):
    return np.array(values, np.int32)


def i64(*values):
    return np.array(values, np.int64)


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


PER_TENSOR = {"input": x, "scale": 0.1, "zero_point": 0, "quant_min": -8, "quant_max": 7}
QPARAMS = {
    "input": x,
    "scale": f32(1),
    "zero_point": i32(0),
    "fake_quant_enabled": i64(1),
    "quant_min": -8,
    "quant_max": 7,
}
PER_CHANNEL = {"input": x, "scale": f32(0.1, 0.2), "zero_point": i32(0, 1), "axis": 0, "quant_min": -8, "quant_max": 7}
BACKWARD = {"grad": x, "mask": mask}
LEARNABLE = {"input": x, "scale": f32(0.1), "zero_point": f32(0), "quant_min": -8, "quant_max": 7, "grad_factor": 1.0}
LEARNABLE_CHANNEL = {**PER_CHANNEL, "zero_point": f32(0, 1.2), "grad_factor": 1.0}
FUSED = {
    "input": x, "observer_on": i64(1), "fake_quant_on": i64(1), "running_min": f32(np.inf), "running_max": f32(-np.inf),
    "scale": f32(1), "zero_point": i32(0), "averaging_const": 0.01, "quant_min": 0, "quant_max": 255, "ch_axis": -1,
    "per_row_fake_quant": False, "symmetric_quant": False,
}  # fmt: skip
FUSED_ROWS = FUSED | {
    "running_min": f32(np.inf, np.inf), "running_max": f32(-np.inf, -np.inf), "scale": f32(1, 1),
    "zero_point": i32(0, 0), "ch_axis": 0, "per_row_fake_quant": True,
}  # fmt: skip

FUNCTIONS = {
    "fake_quantize_per_tensor_affine": PER_TENSOR,
    "fake_quantize_per_tensor_affine_cachemask": PER_TENSOR,
    "fake_quantize_per_tensor_affine_cachemask_tensor_qparams": QPARAMS,
    "fake_quantize_per_tensor_affine_cachemask_backward": BACKWARD,
    "fake_quantize_per_channel_affine": PER_CHANNEL,
    "fake_quantize_per_channel_affine_cachemask": PER_CHANNEL,
    "fake_quantize_per_channel_affine_cachemask_backward": BACKWARD,
    "fake_quantize_learnable_per_tensor_affine": LEARNABLE,
    "fake_quantize_learnable_per_tensor_affine_backward": {"grad": x, **LEARNABLE},
    "fake_quantize_learnable_per_channel_affine": LEARNABLE_CHANNEL,
    "fake_quantize_learnable_per_channel_affine_backward": {"grad": x, **LEARNABLE_CHANNEL},
    "fused_moving_avg_obs_fake_quant": FUSED,
    "fused_moving_avg_obs_fq_helper": FUSED,
}


def torch_function(name):
    for place in (torch, aten):
        for spelling in (name, f"_{name}"):
            if hasattr(place, spelling):
                return getattr(place, spelling)
    raise AttributeError(name)


def to_torch(a):
    if not isinstance(a, np.ndarray):
        return a
    a = np.array(a)
    return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) if a.dtype == BF16 else torch.from_numpy(a)


def outcome(function, arguments):
    """Returns `(exception type, message)`, or None if the call succeeds."""
    try:
        function(*arguments)
    except Exception as error:
        return type(error).__name__, str(error).strip().removeprefix("_")
    return None
