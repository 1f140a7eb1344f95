"""The public names, each documented with an example that runs."""

import importlib
import inspect
import types

import pytest

import fakequant

PUBLIC = [
    "EncodedScales",
    "FakeQuantConfig",
    "FakeQuantizer",
    "Info",
    "QParams",
    "QuantSpec",
    "Range",
    "accelerate",
    "choose_qparams",
    "decelerate",
    "decode_scales",
    "dequantize",
    "encode_scales",
    "fake_quantize",
    "fake_quantize_backward",
    "fake_quantize_dynamic",
    "fake_quantize_learned",
    "fake_quantize_learned_backward",
    "get_num_threads",
    "info",
    "min_max",
    "observe_fake_quantize",
    "quantize",
    "quantize_dynamic",
    "round_zero_point",
    "set_num_threads",
]
TORCH_OPS = [
    "fake_quantize_learnable_per_channel_affine",
    "fake_quantize_learnable_per_channel_affine_backward",
    "fake_quantize_learnable_per_tensor_affine",
    "fake_quantize_learnable_per_tensor_affine_backward",
    "fake_quantize_per_channel_affine",
    "fake_quantize_per_channel_affine_cachemask",
    "fake_quantize_per_channel_affine_cachemask_backward",
    "fake_quantize_per_tensor_affine",
    "fake_quantize_per_tensor_affine_cachemask",
    "fake_quantize_per_tensor_affine_cachemask_backward",
    "fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
    "fused_moving_avg_obs_fake_quant",
    "fused_moving_avg_obs_fq_helper",
]
NN = [
    "FakeQuantize",
    "FusedFakeQuantize",
    "LayerKind",
    "LearnedFakeQuantize",
    "PACT",
    "QuantizedLayer",
    "Quantizer",
    "compute",
    "from_torch_ao",
    "frozen_weights",
    "name_quantizers",
    "named_quantizers",
    "param_groups",
    "quantize_adapters",
    "quantize_input",
    "quantize_output",
    "quantized_weight",
    "register_layer_kind",
    "switch_quantizers",
]
KINDS = ["Experts", "Linear", "TransposedLinear"]
OBSERVERS = [
    "ALONE",
    "Entropy",
    "Fixed",
    "Histogram",
    "MSE",
    "Dynamic",
    "MinMax",
    "MovingAverage",
    "Observer",
    "Percentile",
    "Ranks",
    "State",
    "from_dict",
]
INTEGER_PRESETS = ["int16", "int2", "int4", "int8", "int8_per_token", "uint4", "uint8"]
FLOAT_PRESETS = ["fp8_e4m3", "fp8_e5m2", "mxfp4", "mxfp6", "mxfp8", "mxint8", "nvfp4"]
GGML_PRESETS = ["q4_0", "q4_1", "q4_k", "q6_k", "q8_0", "q8_0_input", "q8_k_input", "tq2_0"]
PRESETS = INTEGER_PRESETS + FLOAT_PRESETS + GGML_PRESETS
NUMBER_FORMATS = ["FLOAT_FORMATS", "FloatFormat", "GgmlType"]
# Types and lists of the values that fields of a QuantSpec take.
FIELD_VALUES = [
    "Format",
    "GGML_TYPES",
    "SUPER_BLOCKS",
    "GgmlRule",
    "ScaleFormat",
    "ScaleRule",
    "FORMATS",
    "SCALE_FORMATS",
    "SCALE_RULES",
]

PTQ = ["Changes", "LayerChange", "adaround", "correct_bias", "equalize", "gptq", "rotate", "smooth"]
RECIPES = [
    "fp8", "fp8_block", "gguf", "int4_weight_only", "int8", "int8_dynamic", "lsq", "mxfp4_weight_only", "mxfp8",
    "nvfp4", "nvfp4_weight_only", "w4a8",
]  # fmt: skip
# Imported on first use, because they need torch.
WHOLE_MODELS = [
    "History",
    "LayerConfig",
    "QuantConfig",
    "Rule",
    "Schedule",
    "audit",
    "calibrate",
    "card",
    "check",
    "compare",
    "convert",
    "distill",
    "export_compressed_tensors",
    "export_executorch",
    "export_gguf",
    "export_litert",
    "export_onnx",
    "health",
    "latency",
    "load_converted",
    "load_grids",
    "load_torch_ao_state",
    "prepare",
    "report",
    "save_converted",
    "sensitivity",
    "summary",
    "unprepare",
    "verify",
]
# Separate modules, imported explicitly because they need other packages.
INTEGRATIONS = {
    "fakequant.integrations.lightning": ["QATCallback"],
    "fakequant.integrations.transformers": ["QATCallback", "from_pretrained", "save_pretrained"],
}
PLACES = {
    "fakequant": PUBLIC,
    "fakequant.formats": NUMBER_FORMATS,
    "fakequant.nn": NN,
    "fakequant.nn.kinds": KINDS,
    "fakequant.observers": OBSERVERS,
    "fakequant.presets": PRESETS,
    "fakequant.ptq": PTQ,
    "fakequant.recipes": RECIPES,
    "fakequant.torch_ops": TORCH_OPS,
    **INTEGRATIONS,
}
# Return types, base classes, a type alias and a table; other names have their examples.
WITHOUT_EXAMPLE = {
    *(
        "Info",
        "QParams",
        "Range",
        "Quantizer",
        "QuantizedLayer",
        "LayerKind",
        "Observer",
        "State",
        "ALONE",
        "FLOAT_FORMATS",
    ),
    *("compute", "quantize_input", "quantize_output", "quantized_weight"),
}
by_place = pytest.mark.parametrize("place", PLACES)


def names(place):
    module = importlib.import_module(place)
    return {
        name: value
        for name, value in vars(module).items()
        if name in getattr(module, "__all__", [name])
        and not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and (place not in INTEGRATIONS or getattr(value, "__module__", None) == place)
    }


@by_place
def test_modules_export_exactly_the_public_names(place):
    imported = {
        "fakequant.formats": {"Literal", *FIELD_VALUES},
    }.get(place, set())
    assert names(place).keys() - imported == set(PLACES[place])


@by_place
def test_everything_public_has_a_docstring_with_an_example(place):
    lacking = [
        name
        for name, value in names(place).items()
        if name in PLACES[place] and name not in WITHOUT_EXAMPLE and ">>>" not in (inspect.getdoc(value) or "")
    ]
    assert lacking == []


def test_lazily_imported_names_exist_and_have_an_example():
    assert sorted(fakequant._WHOLE_MODELS) == WHOLE_MODELS
    for name in WHOLE_MODELS:
        assert ">>>" in inspect.getdoc(getattr(fakequant, name)), name
    with pytest.raises(AttributeError, match="no attribute 'prepar'"):
        fakequant.prepar  # noqa: B018


def test_dir_lists_lazily_imported_names():
    assert {*WHOLE_MODELS, *PUBLIC, "nn", "observers", "recipes", "__version__"} <= set(dir(fakequant))
