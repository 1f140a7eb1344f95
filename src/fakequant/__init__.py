"""Fake quantization: bit-exact, at memory speed, on NumPy arrays and torch tensors."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING, Any as _Any

from fakequant import presets as presets, torch_ops as torch_ops
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

if _TYPE_CHECKING:  # for type checkers and editors; at run time `__getattr__` imports these
    from fakequant import nn as nn, observers as observers, ptq as ptq, recipes as recipes, results as results
    from fakequant._convert.convert import convert as convert
    from fakequant._convert.converted_files import load_converted as load_converted, save_converted as save_converted
    from fakequant._diagnosis.audit import audit as audit
    from fakequant._diagnosis.card import card as card
    from fakequant._diagnosis.check import check as check
    from fakequant._diagnosis.compare import compare as compare
    from fakequant._diagnosis.health import History as History, health as health
    from fakequant._diagnosis.report.writing import report as report
    from fakequant._diagnosis.sensitivity import sensitivity as sensitivity
    from fakequant._export.compressed_tensors.export_compressed_tensors import (
        export_compressed_tensors as export_compressed_tensors,
    )
    from fakequant._export.executorch.export_executorch import export_executorch as export_executorch
    from fakequant._export.gguf.export_gguf import export_gguf as export_gguf
    from fakequant._export.litert.export_litert import export_litert as export_litert
    from fakequant._export.load_grids import load_grids as load_grids
    from fakequant._export.onnx.export_onnx import export_onnx as export_onnx
    from fakequant._prepare.prepare import prepare as prepare, unprepare as unprepare
    from fakequant._prepare.summary import summary as summary
    from fakequant._prepare.torch_ao_state import load_torch_ao_state as load_torch_ao_state
    from fakequant._train.calibrate import calibrate as calibrate
    from fakequant._train.distill import distill as distill
    from fakequant._train.schedule import Schedule as Schedule
    from fakequant._verify.latency import latency as latency
    from fakequant._verify.verify import verify as verify
    from fakequant.config import LayerConfig as LayerConfig, QuantConfig as QuantConfig, Rule as Rule

# Public modules that need torch and are imported on first use.
_MODULES = ("nn", "observers", "ptq", "recipes", "results")
# The modules of the names that work on whole models. They need torch and are imported on first use.
_WHOLE_MODELS = {
    "History": "_diagnosis.health",
    "LayerConfig": "config",
    "QuantConfig": "config",
    "Rule": "config",
    "Schedule": "_train.schedule",
    "audit": "_diagnosis.audit",
    "calibrate": "_train.calibrate",
    "card": "_diagnosis.card",
    "check": "_diagnosis.check",
    "compare": "_diagnosis.compare",
    "convert": "_convert.convert",
    "distill": "_train.distill",
    "export_compressed_tensors": "_export.compressed_tensors.export_compressed_tensors",
    "export_executorch": "_export.executorch.export_executorch",
    "export_gguf": "_export.gguf.export_gguf",
    "export_litert": "_export.litert.export_litert",
    "export_onnx": "_export.onnx.export_onnx",
    "health": "_diagnosis.health",
    "latency": "_verify.latency",
    "load_grids": "_export.load_grids",
    "load_converted": "_convert.converted_files",
    "load_torch_ao_state": "_prepare.torch_ao_state",
    "prepare": "_prepare.prepare",
    "report": "_diagnosis.report.writing",
    "save_converted": "_convert.converted_files",
    "sensitivity": "_diagnosis.sensitivity",
    "summary": "_prepare.summary",
    "unprepare": "_prepare.prepare",
    "verify": "_verify.verify",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHOLE_MODELS, "__version__", *_MODULES})


def __getattr__(name: str) -> _Any:
    if name == "__version__":  # reading the metadata takes longer than importing the package
        return _import_module("importlib.metadata").version("fakequant")
    if name in _MODULES:
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
