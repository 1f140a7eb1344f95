"""The golden model's arithmetic gives the codes of LiteRT's kernels, at ties too."""

import platform

import numpy as np
import pytest

from fakequant import QuantSpec

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
OURS = arithmetic.Litert()
# Quotients of these are ties: exactly, and only on paper.
SCALES = [(0.5, 0.25, 0.25), (0.1, 0.3, 0.06), (0.7, 0.5, 0.9), (1.1, 0.3, 0.21)]
RNG = np.random.default_rng(0)


def grid(scale, zero_point=0):
    spec = QuantSpec(bits=8, signed=True, symmetric=False)
    return values.GridOf(torch.tensor(np.float32(scale)), torch.tensor(zero_point, dtype=torch.int32), spec)


def codes(*shape):
    return RNG.integers(-128, 128, shape).astype(np.int8)


def value(array, of):
    return (torch.from_numpy(array).float() - of.zero_point) * of.scale


def tensor(shape, of=None, data=None):
    if of is None:
        return graphs.Tensor(tuple(shape), "float32", data=data)
    return graphs.Tensor(
        tuple(shape), "int8", data=data, scale=np.float32([of.scale.item()]), zero_point=int(of.zero_point)
    )


def run(code, inputs, shape, of, options, constants=(), resolver="AUTO", outer=None):
    """Returns the codes that an operator computes. The inputs are pairs of an array and its grid."""
    graph = graphs.Graph()
    for number, (array, its) in enumerate(inputs):
        graph.inputs.append((f"x{number}", tensor(array.shape, its)))
    operands = [one for _, one in graph.inputs] + list(constants)
    operands = operands if outer is None else outer(operands)
    graph.outputs.append(("y", graph.add(code, operands, [tensor(shape, of)], options)))
    file = running.Loaded(files.write(graph, {}), "the case", resolver=resolver)
    (found,) = file([array for array, _ in inputs])
    return found


def same(mine, theirs):
    wrong = int((mine.numpy() != theirs).sum())
    assert wrong == 0, f"{wrong} of {theirs.size} codes differ"


def test_floats():
    for scale, zero_point in [(0.5, 0), (0.1, -9), (0.3, 127), (0.7, -128), (2.0**-7, 33)]:
        ties = ((np.arange(-260, 260) + 0.5) * scale).astype(np.float32)
        up, down = (np.nextafter(ties, np.float32(end)) for end in (np.inf, -np.inf))
        x = np.concatenate([ties, up, down, np.float32([np.inf, -np.inf, 3e38, 0, -0.0, 1e-45])])
        of = grid(scale, zero_point)
        same(OURS.from_float(torch.from_numpy(x), of), run("QUANTIZE", [(x, None)], x.shape, of, ("Quantize", {})))


def layer(kind, scales, number):
    """Returns the codes of a layer and of the arithmetic."""
    x_of, of = grid(scales[0], [0, -128, 5][number % 3]), grid(scales[2], [-7, 0, -128][number % 3])
    channels = 8
    weight_scale = np.float32(scales[1] * np.array([1, 0.5, 2, 1, 0.3, 1, 0.25, 1]))
    if kind == "linear":
        x, weight, order = codes(4, 8), RNG.integers(-3, 4, (channels, 8)), (0, 1)
        call = torch.nn.functional.linear
        code, options, shape = "FULLY_CONNECTED", ("FullyConnected", {"keepNumDims": True}), (4, channels)
        levels = torch.from_numpy(x).double() - int(x_of.zero_point)
        sums = call(levels, torch.from_numpy(weight).double())
        axis = 0
    else:
        x = codes(1, 6, 6, 8)
        levels = (torch.from_numpy(x).double() - int(x_of.zero_point)).permute(0, 3, 1, 2)
        settings = {"padding": 1, "strideH": 1, "strideW": 1}
        if kind == "depthwise":
            weight, order, axis = RNG.integers(-3, 4, (channels, 1, 3, 3)), (1, 2, 3, 0), 3
            sums = torch.nn.functional.conv2d(levels, torch.from_numpy(weight).double(), groups=8)
            code, options = "DEPTHWISE_CONV_2D", ("DepthwiseConv2D", {**settings, "depthMultiplier": 1})
        elif kind == "transposed":
            weight, order, axis = RNG.integers(-3, 4, (8, channels, 3, 3)), (1, 2, 3, 0), 0
            sums = torch.nn.functional.conv_transpose2d(levels, torch.from_numpy(weight).double())
            code, options = "TRANSPOSE_CONV", ("TransposeConv", settings)
        else:
            groups = 2 if kind == "grouped" else 1
            weight, order, axis = RNG.integers(-3, 4, (channels, 8 // groups, 3, 3)), (0, 2, 3, 1), 0
            sums = torch.nn.functional.conv2d(levels, torch.from_numpy(weight).double(), groups=groups)
            code, options = "CONV_2D", ("Conv2D", {**settings, "dilationHFactor": 1, "dilationWFactor": 1})
        sums = sums.permute(0, 2, 3, 1)
        shape = tuple(sums.shape)
    bias = RNG.integers(-40, 40, channels).astype(np.int32)
    sums = sums + torch.from_numpy(bias)
    stored = np.ascontiguousarray(weight.astype(np.int8).transpose(order))
    scale = np.float32(x_of.scale.item()) * weight_scale
    constants = [
        graphs.Tensor(stored.shape, "int8", data=stored, scale=weight_scale, axis=axis),
        graphs.Tensor((channels,), "int32", data=bias, scale=scale),
    ]
    sizes = graphs.Tensor((4,), "int32", data=np.array(shape, np.int32))
    outer = (lambda given: [sizes, given[1], given[0], given[2]]) if kind == "transposed" else None
    mine = OURS.from_sums(sums, torch.from_numpy(scale), of)

    def theirs(resolver="AUTO"):
        return run(code, [(x, x_of)], shape, of, options, constants, resolver, outer)

    return mine, theirs


@pytest.mark.parametrize("kind", ["linear", "conv", "grouped", "depthwise", "transposed"])
def test_layers(kind):
    for number, scales in enumerate(SCALES):
        mine, theirs = layer(kind, scales, number)
        same(mine, theirs())


@pytest.mark.parametrize("code", ["ADD", "MUL"])
@pytest.mark.parametrize("shapes", [((4, 9, 8), (4, 9, 8)), ((4, 9, 8), (8,)), ((4, 9, 8), (4, 1, 8))])
def test_elements(code, shapes):
    compute = OURS.from_addition if code == "ADD" else OURS.from_product
    for a_scale, b_scale, scale in SCALES:
        a_of, b_of, of = grid(a_scale, -3), grid(b_scale, 9), grid(scale * (8 if code == "MUL" else 1), -20)
        a, b = codes(*shapes[0]), codes(*shapes[1])
        theirs = run(code, [(a, a_of), (b, b_of)], shapes[0], of, (code.capitalize(), {}))
        same(compute(value(a, a_of), a_of, value(b, b_of), b_of, of), theirs)


@pytest.mark.parametrize("axes", [(1, 2), (2,), (3,), (1, 2, 3)])
def test_means(axes):
    for x_scale, scale, _ in SCALES:
        x_of, of = grid(x_scale, 5), grid(scale, -9)
        x = codes(3, 4, 8, 16)
        shape = tuple(1 if axis in axes else length for axis, length in enumerate(x.shape))
        places = graphs.Tensor((len(axes),), "int32", data=np.array(axes, np.int32))
        theirs = run("MEAN", [(x, x_of)], shape, of, ("Reducer", {"keepDims": True}), [places])
        same(OURS.from_average(value(x, x_of), x_of, axes, of), theirs)


@pytest.mark.parametrize("resolver", ["BUILTIN_WITHOUT_DEFAULT_DELEGATES", "BUILTIN_REF"])
@pytest.mark.parametrize("kind", ["linear", "conv", "depthwise", "transposed"])
def test_kernels_in_fixed_point_are_one_code_off_at_most(kind, resolver):
    """Apps can choose LiteRT's own kernels. The golden model does not follow them: docs/guides/runtimes.md says so."""
    found = []
    for number, scales in enumerate(SCALES):
        mine, theirs = layer(kind, scales, number)
        found.append(np.abs(mine.numpy() - theirs(resolver)).max())
    assert max(found) == 1
