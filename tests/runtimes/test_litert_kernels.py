"""The golden model's arithmetic gives the codes of LiteRT's kernels, at ties too."""

import pickle
import platform
from types import SimpleNamespace

import numpy as np
import pytest

from fakequant import QuantSpec, _runtimes

torch = pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert.interpreter")
arithmetic = pytest.importorskip("fakequant._runtimes.litert.arithmetic")
files = pytest.importorskip("fakequant._export.litert.file")
graphs = pytest.importorskip("fakequant._export.litert.graph")
running = pytest.importorskip("fakequant._runtimes.litert.running")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="the formulas are those of the x86 kernels"
)
# By the name of the target, with the number of bits of codes.
KERNELS = {
    ("litert", 8): arithmetic.ARITHMETIC,
    **{("litert-builtin", bits): arithmetic.KERNELS["builtin"] for bits in (8, 16)},
    **{("litert-reference", bits): arithmetic.KERNELS["reference"] for bits in (8, 16)},
}
# Quotients of these are ties: exactly, and only on paper.
SCALES = [(0.5, 0.25, 0.25), (0.1, 0.3, 0.06), (0.7, 0.5, 0.9), (1.1, 0.3, 0.21), (0.5, 0.0625, 0.5)]
RNG = np.random.default_rng(0)
every_kernel = pytest.mark.parametrize(("target", "bits"), KERNELS)


def grid(scale, zero_point=0, bits=8):
    spec = QuantSpec(bits=bits, signed=True, symmetric=bits == 16)
    zero_point = 0 if bits == 16 else zero_point
    return values.GridOf(torch.tensor(np.float32(scale)), torch.tensor(zero_point, dtype=torch.int32), spec)


def codes(*shape, bits=8):
    return RNG.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), shape).astype(f"int{bits}")


def value(array, of):
    return (torch.from_numpy(array).float() - of.zero_point) * of.scale


def tensor(shape, of=None, data=None):
    if of is None:
        return graphs.Tensor(tuple(shape), "float32", data=data)
    scale, zero_point = np.float32([of.scale.item()]), int(of.zero_point)
    return graphs.Tensor(tuple(shape), f"int{of.spec.bits}", data=data, scale=scale, zero_point=zero_point)


def run(target, code, inputs, shape, of, options, constants=(), outer=None):
    """Returns the codes that an operator computes. The inputs are pairs of an array and its grid."""
    graph = graphs.Graph()
    for number, (array, its) in enumerate(inputs):
        graph.inputs.append((f"x{number}", tensor(array.shape, its)))
    operands = [one for _, one in graph.inputs] + list(constants)
    operands = operands if outer is None else outer(operands)
    graph.outputs.append(("y", graph.add(code, operands, [tensor(shape, of)], options)))
    file = running.Loaded(files.write(graph, {}), "the case", resolver=running.RESOLVERS[target])
    (found,) = file([array for array, _ in inputs])
    return found


def same(mine, theirs):
    wrong = int((mine.numpy() != theirs).sum())
    assert wrong == 0, f"{wrong} of {theirs.size} codes differ"


@every_kernel
def test_floats(target, bits):
    steps = np.arange(-260, 260) if bits == 8 else np.r_[-32772:-32760, -20:20, 32760:32772]
    for scale, zero_point in [(0.5, 0), (0.1, -9), (0.3, 127), (0.7, -128), (2.0**-7, 33)]:
        ties = ((steps + 0.5) * scale).astype(np.float32)
        up, down = (np.nextafter(ties, np.float32(end)) for end in (np.inf, -np.inf))
        x = np.concatenate([ties, up, down, np.float32([np.inf, -np.inf, 3e38, -1e10, 0, -0.0, 1e-45])])
        of = grid(scale, zero_point, bits)
        theirs = run(target, "QUANTIZE", [(x, None)], x.shape, of, ("Quantize", {}))
        same(KERNELS[target, bits].from_float(torch.from_numpy(x), of), theirs)


@every_kernel
def test_training_rounds_inputs_like_the_kernels(target, bits):
    for scale, zero_point in [(0.5, 0), (0.1, -9), (0.3, 12), (2.0**-7, 33)]:
        ties = ((np.arange(-80, 80) + 0.5) * scale).astype(np.float32)
        of = grid(scale, zero_point, bits)
        theirs = run(target, "QUANTIZE", [(ties, None)], ties.shape, of, ("Quantize", {}))
        rounding = _runtimes.find(target).rounding
        same(rounding.codes(torch.from_numpy(ties), of.scale, of.zero_point, of.spec), theirs)
        moved = rounding.moved(torch.from_numpy(ties), of.scale, of.zero_point, of.spec)
        same(torch.round(moved / of.scale) + of.zero_point, theirs)
        assert pickle.loads(pickle.dumps(rounding)) is rounding


def layer(target, kind, scales, number, bits=8, channels=8, wide=False):
    """Returns the codes of a layer in our arithmetic and in LiteRT."""
    groups = {"grouped": 2, "depthwise": channels}.get(kind, 1)
    inputs = channels if kind == "depthwise" else 8
    x_of, of = grid(scales[0], [0, -128, 5][number % 3], bits), grid(scales[2], [-7, 0, -128][number % 3], bits)
    weight_scale = np.float32(scales[1] * RNG.choice([1, 0.5, 2, 0.3, 0.25], channels))
    if kind == "linear":
        x, weight, order, axis = codes(4, 8, bits=bits), RNG.integers(-3, 4, (channels, 8)), (0, 1), 0
        code, options = "FULLY_CONNECTED", ("FullyConnected", {"keepNumDims": True})
        levels = torch.from_numpy(x).double() - int(x_of.zero_point)
        sums = torch.nn.functional.linear(levels, torch.from_numpy(weight).double())
    else:
        x = codes(1, 6, 6, inputs, bits=bits)
        levels = (torch.from_numpy(x).double() - int(x_of.zero_point)).permute(0, 3, 1, 2)
        settings = {"padding": 1, "strideH": 1, "strideW": 1}
        shape = (8, channels, 3, 3) if kind == "transposed" else (channels, inputs // groups, 3, 3)
        weight = RNG.integers(-3, 4, shape)
        if kind == "transposed":
            sums = torch.nn.functional.conv_transpose2d(levels, torch.from_numpy(weight).double())
            code, options, order, axis = "TRANSPOSE_CONV", ("TransposeConv", settings), (1, 2, 3, 0), 0
        else:
            sums = torch.nn.functional.conv2d(levels, torch.from_numpy(weight).double(), groups=groups)
            if kind == "depthwise" and bits == 8:
                code, order, axis = "DEPTHWISE_CONV_2D", (1, 2, 3, 0), 3
                options = ("DepthwiseConv2D", {**settings, "depthMultiplier": 1})
            else:
                code, order, axis = "CONV_2D", (0, 2, 3, 1), 0
                options = ("Conv2D", {**settings, "dilationHFactor": 1, "dilationWFactor": 1})
    bias = RNG.integers(-40, 40, channels)
    spread = (1, *[1] * (sums.dim() - 2)) if kind != "linear" else ()
    sums = sums + torch.from_numpy(bias).reshape(-1, *spread[1:])
    largest = float(sums.abs().max())
    if bits == 16:  # so that the codes have all magnitudes
        of = grid(scales[0] * weight_scale.max() * largest / 30000 * (1 + number / 7), bits=16)
    has_wide = bits == 16 and (wide or kind == "linear")
    bias_type = "int64" if has_wide else "int32"
    if bits == 16 and not has_wide:
        options = (options[0], {**options[1], "quantizedBiasType": files.schema().TensorType.INT32})
    stored = np.ascontiguousarray(weight.astype(np.int8).transpose(order))
    scale = np.float32(x_of.scale.item()) * weight_scale
    constants = [
        graphs.Tensor(stored.shape, "int8", data=stored, scale=weight_scale, axis=axis),
        graphs.Tensor((channels,), bias_type, data=bias.astype(bias_type), scale=scale),
    ]
    along = [-1, *[1] * (sums.dim() - 2)] if kind != "linear" else [-1]
    accumulated = values.Accumulated(
        sums,
        torch.from_numpy(scale).reshape(along),
        layer=SimpleNamespace(
            groups=groups,
            _fakequant=SimpleNamespace(
                weight_shape=weight.shape, kind=SimpleNamespace(channel_axis=int(kind == "transposed"))
            ),
        ),
        grid_in=x_of,
        weight_scale=torch.from_numpy(weight_scale).reshape(along),
        largest=arithmetic.LARGEST_SUM if wide else largest,
    )
    mine = KERNELS[target, bits].from_layer(accumulated, of)
    mine = mine if kind == "linear" else mine.permute(0, 2, 3, 1)
    shape = tuple(mine.shape)
    sizes = graphs.Tensor((4,), "int32", data=np.array(shape, np.int32))
    outer = (lambda given: [sizes, given[1], given[0], given[2]]) if kind == "transposed" else None
    return mine, run(target, code, [(x, x_of)], shape, of, options, constants, outer)


@every_kernel
@pytest.mark.parametrize("kind", ["linear", "conv", "grouped", "depthwise", "transposed"])
def test_layers(kind, target, bits):
    for number, scales in enumerate(SCALES):
        for channels in (8, 12, 2):
            for _ in range(4):
                same(*layer(target, kind, scales, number, bits, channels))


@pytest.mark.parametrize("target", ["litert-builtin", "litert-reference"])
@pytest.mark.parametrize("kind", ["conv", "grouped", "transposed"])
def test_sums_of_64_bits(kind, target):
    for number, scales in enumerate(SCALES):
        same(*layer(target, kind, scales, number, 16, wide=True))


def test_means_whose_sums_may_overflow_are_left_to_floats():
    for target, bits in KERNELS:
        ours = KERNELS[target, bits]
        assert ours.has_average(1.0, 1.0, 2.0**31 - 1)
        assert ours.has_average(1.0, 1.0, 2.0**31) == (not ours.rounds_twice)
    of = grid(1.0, bits=16)
    x = torch.full((1, 2**16), 32767.0)
    assert KERNELS["litert-reference", 16].from_average(x, of, (1,), of).item() == 32767


def test_a_layer_with_one_output_has_one_scale():
    for target, bits in KERNELS:
        for number, scales in enumerate(SCALES * 20):
            same(*layer(target, "linear", scales, number, bits, channels=1))


@every_kernel
@pytest.mark.parametrize("code", ["ADD", "MUL"])
@pytest.mark.parametrize("shapes", [((128, 9, 16), (128, 9, 16)), ((4, 9, 8), (8,)), ((4, 9, 8), (4, 1, 8))])
def test_elements(code, shapes, target, bits):
    ours = KERNELS[target, bits]
    compute = ours.from_addition if code == "ADD" else ours.from_product
    factor = (8 if bits == 8 else 2000) if code == "MUL" else 1
    more = {"potScaleInt16": False} if code == "ADD" and bits == 16 else {}
    for a_scale, b_scale, scale in SCALES:
        scale = a_scale + b_scale if code == "ADD" and bits == 16 else scale * factor
        a_of, b_of, of = grid(a_scale, -3, bits), grid(b_scale, 9, bits), grid(scale, -20, bits)
        a, b = codes(*shapes[0], bits=bits), codes(*shapes[1], bits=bits)
        theirs = run(target, code, [(a, a_of), (b, b_of)], shapes[0], of, (code.capitalize(), more))
        same(compute(value(a, a_of), a_of, value(b, b_of), b_of, of), theirs)


@every_kernel
@pytest.mark.parametrize("axes", [(1, 2), (2,), (3,), (1, 2, 3)])
def test_means(axes, target, bits):
    ours = KERNELS[target, bits]
    for x_scale, scale, _ in SCALES:
        x_of, of = grid(x_scale, 5, bits), grid(scale, -9, bits)
        x = codes(3, 4, 8, 16, bits=bits)
        kept = tuple(1 if axis in axes else length for axis, length in enumerate(x.shape))
        shape = tuple(length for axis, length in enumerate(x.shape) if axis not in axes) if ours.rounds_twice else kept
        places = graphs.Tensor((len(axes),), "int32", data=np.array(axes, np.int32))
        options = ("Reducer", {"keepDims": not ours.rounds_twice})
        theirs = run(target, "MEAN", [(x, x_of)], shape, of, options, [places])
        same(ours.from_average(value(x, x_of), x_of, axes, of), theirs.reshape(kept))
