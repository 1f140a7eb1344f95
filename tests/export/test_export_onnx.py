"""Exported models have the golden model's codes for every bit width.

An export takes seconds, so there are few models with many cases each.
"""

import copy

import numpy as np
import pytest

import fakequant as fq
from fakequant import QuantSpec, presets
from fakequant.testing.assertions import assert_same_bits
from onnx_models import (
    calibrated,
    code_tensors,
    evaluate,
    exported,
    initializers,
    opset_of,
    randn,
    run,
    same,
    session,
    signed,
    unsigned,
)

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
integer = pytest.importorskip("fakequant._convert.golden.integer_layer")
nn = torch.nn
Fixed, LayerConfig, QuantConfig = fq.observers.Fixed, fq.LayerConfig, fq.QuantConfig


def exposed(model, *endings):
    """Returns the model with the tensors as outputs whose names have these endings."""
    model = copy.deepcopy(model)
    infos = {v.name: v for v in (*model.graph.value_info, *model.graph.output)}
    names = [n for node in model.graph.node for n in node.output if n.endswith(endings)]
    del model.graph.output[:]
    model.graph.output.extend(infos[name] for name in names)
    return model


def group(bits, size, **fields):
    return QuantSpec(bits=bits, axis=-1, group_size=size, **fields)


# Specs of inputs.
INPUTS = {
    **{f"int{b}": signed(b) for b in range(2, 9)},
    **{f"uint{b}": unsigned(b) for b in range(2, 9)},
    "int4_narrow": signed(4, narrow_range=True),
    "int8_narrow": signed(8, narrow_range=True),
    "int8_affine": signed(8, symmetric=False),
    "int5_affine_narrow": signed(5, symmetric=False, narrow_range=True),
    "int16": signed(16),
    "int16_narrow": signed(16, narrow_range=True),
    "int12_affine": signed(12, symmetric=False),
    "uint16": unsigned(16),
    "uint9": unsigned(9),
}
WEIGHTS = [
    *(signed(b, axis=0) for b in range(2, 9)),
    *(unsigned(b, axis=0) for b in range(2, 9)),
    signed(4, narrow_range=True, axis=0), signed(8, narrow_range=True), signed(8, symmetric=False, axis=0),
    group(4, 16), group(4, 32), group(4, 128), group(2, 32), group(8, 16, narrow_range=True), group(3, 128),
]  # fmt: skip
MORE_WEIGHTS = {
    "rows": (unsigned(8), signed(4, axis=0, group_size=2)),
    "int16_weight": (unsigned(8), signed(16, axis=0)),
    "uint4_group": (unsigned(8), unsigned(4, axis=-1, group_size=32)),
    "uint2_group": (unsigned(8), unsigned(2, axis=-1, group_size=64)),
}
RANGES = {name: (x, w) for (name, x), w in zip(INPUTS.items(), WEIGHTS, strict=True)}


class Ranges(nn.Module):
    """One layer per spec, each with its own part of the input."""

    def __init__(self, names):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(256, 4) for name in names})

    def forward(self, x):
        return torch.stack([layer(x[:, i]) for i, layer in enumerate(self.layers.values())], 1)


def ranges(specs, target):
    torch.manual_seed(0)
    config = QuantConfig(target=target)
    for name, (x, weight) in specs.items():
        # Scales that are not powers of two, and zero points within the range of affine grids.
        step = 0.1 + 0.001 * x.bits
        low = x.qmin if x.symmetric else x.qmin - (x.qmin + x.levels // 3)
        observer = Fixed(low * step, (low + x.levels - 1) * step)
        config = config.rule(f"layers.{name}", weight=weight, input=x, activation_observer=observer)
    return fq.calibrate(
        fq.prepare(Ranges(specs), config, torch.zeros(1, len(specs), 256)),
        [torch.zeros(1, len(specs), 256)],
        progress=False,
    )


def hostile(scale, zero_point, spec):
    """Returns ties near the range, their neighbouring floats, and distant values, in rows of 256."""
    ends = [spec.qmin - int(zero_point), spec.qmax - int(zero_point)]
    near = range(-150, 151) if spec.bits <= 8 else range(-60, 61)
    k = np.array(sorted({*near, *(end + d for end in ends for d in range(-30, 31))}), dtype=np.float32)
    ties = ((k + np.float32(0.5)) * np.float32(scale)).astype(np.float32)
    infinite = np.float32(np.inf)
    far = np.array([0.0, -0.0, 1e-45, -1e-45, 1e9, -1e9, 3e38, -3e38, infinite, -infinite], dtype=np.float32)
    x = np.concatenate([ties, np.nextafter(ties, infinite), np.nextafter(ties, -infinite), k * np.float32(scale), far])
    return np.resize(x, (8, 256))


def check_ranges(model, specs, proto, execute, largest=np.inf):
    golden = fq.convert(model)
    grids = {name: golden.layers[name].input_quantizer for name in specs}
    x = np.stack([hostile(g.scale, g.zero_point, g.spec) for g in grids.values()], 1).clip(-largest, largest)
    tensors = code_tensors(proto)
    assert sorted(tensors) == sorted(f"layers.{name}.input_quantizer" for name in specs)
    found = execute(exposed(proto, "input_quantizer_quantized"), torch.from_numpy(x))
    stored = initializers(proto)
    for i, (name, grid) in enumerate(grids.items()):
        path = f"layers.{name}.input_quantizer"
        expected = fq.quantize(x[:, i], grid.scale.numpy(), grid.zero_point.numpy(), grid.spec)
        if not grid.spec.symmetric:
            assert grid.spec.qmin < int(grid.zero_point) < grid.spec.qmax, name
        tensor, offset = tensors[path]
        codes = found[tensor].astype(np.int64) - offset
        assert codes.min() == grid.spec.qmin, name
        assert codes.max() == grid.spec.qmax, name
        np.testing.assert_array_equal(codes, expected.astype(np.int64), err_msg=name)
        assert_same_bits(grid.scale, stored[f"{path}_scale"], name)
        assert int(stored[f"{path}_zero_point"]) - offset == int(grid.zero_point), name
    for name, (_, spec) in specs.items():
        check_weight(golden.layers[name], spec, f"layers.{name}", proto, stored)
    found = execute(exposed(proto, ".weight_dequantized"), torch.from_numpy(x))
    for name in specs:
        same(integer.float_weight(golden.layers[name]), found[f"layers.{name}.weight_dequantized"], name)


def check_weight(layer, spec, path, proto, stored):
    """Asserts the stored codes, scales and types of a weight."""
    zero = 0 if layer.weight_zero_point is None else layer.weight_zero_point
    times = 2**layer._fakequant.weight_shift
    codes = fq.quantize(integer.float_weight(layer), layer.weight_scale * times, zero, spec).numpy()
    found = stored[f"{path}.weight_codes"]
    np.testing.assert_array_equal(found.astype(np.int64), codes.astype(np.int64) * times, err_msg=path)
    assert found.astype(np.int64).min() >= spec.qmin * times
    assert_same_bits(layer.weight_scale.ravel(), stored[f"{path}.weight_scale"].ravel(), path)
    node = next(n for n in proto.graph.node if f"{path}.weight_codes" in n.input)
    assert node.op_type == "DequantizeLinear"
    attributes = {a.name: a.i for a in node.attribute}
    if spec.granularity == "group":
        assert attributes["block_size"] == spec.group_size
    kinds = onnx.TensorProto
    kind = next(i.data_type for i in proto.graph.initializer if i.name == f"{path}.weight_codes")
    opset = opset_of(proto)[""]
    if integer.is_integer(layer) and spec.bits <= 8:  # integer kernels take bytes
        assert kind == (kinds.INT8 if spec.signed else kinds.UINT8)
    elif spec.bits == 4 and opset >= 21:
        assert kind == (kinds.INT4 if spec.signed else kinds.UINT4)
    elif spec.bits == 2 and opset >= 25:
        assert kind == (kinds.INT2 if spec.signed else kinds.UINT2)


def test_every_bit_width_has_equal_codes_in_onnxruntime(folder):
    specs = RANGES
    model = ranges(specs, "generic")
    proto = exported(model, folder, torch.zeros(2, len(specs), 256), "ranges.onnx")
    check_ranges(model, specs, proto, lambda m, x: run(m, x, optimized=False))
    check_ranges(model, specs, proto, run)


def test_two_bit_weights_use_the_two_bit_type_from_opset_25(folder):
    specs = {name: RANGES[name] for name in ("int2", "uint2", "uint4", "uint9")}
    specs |= {**MORE_WEIGHTS, "int2_group": (presets.int16(), group(2, 32))}
    model = ranges(specs, "generic")
    proto = exported(model, folder, torch.zeros(2, len(specs), 256), "two_bits.onnx", opset=25)
    check_ranges(
        model, specs, proto, evaluate, largest=1e7
    )  # the evaluator converts x / scale to int32 before it clips
    check_ranges(model, specs, proto, lambda m, x: run(m, x, optimized=False))


@pytest.mark.parametrize("weight", [signed(2, axis=0), unsigned(2, axis=0)], ids=str)
def test_two_bit_weights_with_a_quantized_input_load_with_all_optimizations(weight, tmp_path):
    """ONNX Runtime 1.31 fuses such a layer into a QGemm, which does not accept 2 bits."""
    config = QuantConfig(default=LayerConfig(weight=weight, input=presets.uint8()))
    model = calibrated(nn.Sequential(nn.Linear(8, 4)), config, randn(4, 8))
    session(exported(model, tmp_path, randn(1, 8), opset=25))


def test_signed_codes_stored_unsigned_are_equal_at_opset_13(folder):
    names = ("int2", "uint3", "int7", "int8", "int8_narrow", "int5_affine_narrow")
    specs = {name: (INPUTS[name], signed(8, narrow_range=True, axis=0)) for name in names}
    model = ranges(specs, "onnxruntime-vnni")
    proto = exported(model, folder, torch.zeros(2, len(specs), 256), "unsigned.onnx", opset=13)
    for tensor, _ in code_tensors(proto).values():
        kind = next(v.type.tensor_type.elem_type for v in proto.graph.value_info if v.name == tensor)
        assert kind == onnx.TensorProto.UINT8
    check_ranges(model, specs, proto, lambda m, x: run(m, x, optimized=False))
    check_ranges(model, specs, proto, run)
