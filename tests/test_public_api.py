"""The exported names, and that each is documented with an example that runs."""

import inspect
import types

import fakequant

PUBLIC = [
    "FakeQuantConfig",
    "FakeQuantizer",
    "Info",
    "QParams",
    "QuantSpec",
    "Range",
    "accelerate",
    "choose_qparams",
    "decelerate",
    "dequantize",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_learnable_per_channel_affine",
    "fake_quantize_learnable_per_channel_affine_backward",
    "fake_quantize_learnable_per_tensor_affine",
    "fake_quantize_learnable_per_tensor_affine_backward",
    "fake_quantize_learned",
    "fake_quantize_learned_backward",
    "fake_quantize_per_channel_affine",
    "fake_quantize_per_channel_affine_cachemask",
    "fake_quantize_per_channel_affine_cachemask_backward",
    "fake_quantize_per_tensor_affine",
    "fake_quantize_per_tensor_affine_cachemask",
    "fake_quantize_per_tensor_affine_cachemask_backward",
    "fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fused_moving_avg_obs_fake_quant",
    "fused_moving_avg_obs_fq_helper",
    "get_num_threads",
    "info",
    "min_max",
    "observe_fake_quantize",
    "quantize",
    "round_zero_point",
    "set_num_threads",
]


def test_exported_names():
    exported = {
        name
        for name, value in vars(fakequant).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert exported == set(PUBLIC)


def test_every_public_function_has_a_docstring_with_an_example():
    records = {"Info", "QParams", "Range"}  # what functions return; their examples are there
    lacking = [n for n in PUBLIC if n not in records and ">>>" not in (inspect.getdoc(getattr(fakequant, n)) or "")]
    assert lacking == []
