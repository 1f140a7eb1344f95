"""Fake quantization: bit-exact, at memory speed, on NumPy arrays and torch tensors."""

from importlib import import_module as _import_module
from typing import Any as _Any

from fakequant import presets as presets
from fakequant._accelerate import accelerate as accelerate, decelerate as decelerate
from fakequant._backends import import_whole as _import_whole
from fakequant._info import Info as Info, info as info
from fakequant._kernels import get_num_threads as get_num_threads, set_num_threads as set_num_threads
from fakequant.fake_quantizer import FakeQuantConfig as FakeQuantConfig, FakeQuantizer as FakeQuantizer
from fakequant.functional import (
    dequantize as dequantize,
    fake_quantize as fake_quantize,
    fake_quantize_backward as fake_quantize_backward,
    fake_quantize_dynamic as fake_quantize_dynamic,
    fake_quantize_learned as fake_quantize_learned,
    fake_quantize_learned_backward as fake_quantize_learned_backward,
    observe_fake_quantize as observe_fake_quantize,
    quantize as quantize,
    quantize_dynamic as quantize_dynamic,
    round_zero_point as round_zero_point,
)
from fakequant.qparams import (
    EncodedScales as EncodedScales,
    QParams as QParams,
    Range as Range,
    choose_qparams as choose_qparams,
    decode_scales as decode_scales,
    encode_scales as encode_scales,
    min_max as min_max,
)
from fakequant.spec import QuantSpec as QuantSpec
from fakequant.torch_names import (
    fake_quantize_learnable_per_channel_affine as fake_quantize_learnable_per_channel_affine,
    fake_quantize_learnable_per_channel_affine_backward as fake_quantize_learnable_per_channel_affine_backward,
    fake_quantize_learnable_per_tensor_affine as fake_quantize_learnable_per_tensor_affine,
    fake_quantize_learnable_per_tensor_affine_backward as fake_quantize_learnable_per_tensor_affine_backward,
    fake_quantize_per_channel_affine as fake_quantize_per_channel_affine,
    fake_quantize_per_channel_affine_cachemask as fake_quantize_per_channel_affine_cachemask,
    fake_quantize_per_channel_affine_cachemask_backward as fake_quantize_per_channel_affine_cachemask_backward,
    fake_quantize_per_tensor_affine as fake_quantize_per_tensor_affine,
    fake_quantize_per_tensor_affine_cachemask as fake_quantize_per_tensor_affine_cachemask,
    fake_quantize_per_tensor_affine_cachemask_backward as fake_quantize_per_tensor_affine_cachemask_backward,
    fake_quantize_per_tensor_affine_cachemask_tensor_qparams as fake_quantize_per_tensor_affine_cachemask_tensor_qparams,
    fused_moving_avg_obs_fake_quant as fused_moving_avg_obs_fake_quant,
    fused_moving_avg_obs_fq_helper as fused_moving_avg_obs_fq_helper,
)

# The modules of the names that work on whole models. They need torch and are imported on first use.
_WHOLE_MODELS = {
    "History": "_diagnosis.history",
    "LayerConfig": "config",
    "QuantConfig": "config",
    "Rule": "config",
    "Schedule": "_train.schedule",
    "calibrate": "_train.calibrate",
    "check": "_diagnosis.check",
    "compare": "_diagnosis.compare",
    "convert": "_convert.convert",
    "distill": "_train.distill",
    "export_executorch": "_executorch.export_executorch",
    "export_onnx": "_onnx.export_onnx",
    "health": "_train.health",
    "latency": "_verify.latency",
    "load_converted": "_convert.converted_files",
    "prepare": "_prepare.prepare",
    "report": "_diagnosis.report.writing",
    "save_converted": "_convert.converted_files",
    "sensitivity": "_diagnosis.sensitivity",
    "summary": "_prepare.summary",
    "unprepare": "_prepare.prepare",
    "verify": "_verify.verify",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHOLE_MODELS, "__version__", "nn", "observers", "ptq", "recipes"})


def __getattr__(name: str) -> _Any:
    if name == "__version__":  # reading the metadata takes longer than importing the package
        return _import_module("importlib.metadata").version("fakequant")
    if name in ("nn", "observers", "ptq", "recipes"):
        module = name
    elif name in _WHOLE_MODELS:
        module = _WHOLE_MODELS[name]
    else:
        raise AttributeError(f"module 'fakequant' has no attribute {name!r}")
    try:
        _import_whole(module)
        found = _import_module(f"fakequant.{module}")
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "tqdm"):
            raise
        raise ImportError(
            f'`fakequant.{name}` needs {error.name}, which is not installed.\nUse: pip install "fakequant[torch]"'
        ) from error
    return found if module == name else getattr(found, name)
