"""The golden model's arithmetic gives the codes of XNNPACK's kernels in ExecuTorch, at ties too."""

import itertools
import logging
import platform
from pathlib import Path

import numpy as np
import pytest

from fakequant import QuantSpec
from thoroughness import ALL, sampled

torch = pytest.importorskip("torch")
pytest.importorskip("executorch")
arithmetic = pytest.importorskip("fakequant._runtimes.xnnpack.arithmetic")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
F = torch.nn.functional

pytestmark = [
    pytest.mark.skipif(
        platform.machine().lower() not in ("x86_64", "amd64"), reason="the formulas are those of the x86 kernels"
    ),
    pytest.mark.filterwarnings("ignore"),  # ExecuTorch calls deprecated functions of torch
]

OURS = arithmetic.Xnnpack()
CPU = Path("/proc/cpuinfo")
HAS_VNNI = CPU.exists() and "avx512_vnni" in CPU.read_text(encoding="utf-8")
# Not exact in binary: quotients that are ties on paper are not ties in float32.
TENTHS = np.float32([0.1, 0.3, 0.7, 1.1, 1.3, 0.9, 0.5, 0.21])
ZERO_POINTS = [-128, 0, 127, -9, 33]
CHANNELS = 8
LAYERS = ["linear", "conv", "pointwise", "depthwise", "grouped", "conv1d", "transposed", "strided"]


class Program(torch.nn.Module):
    """A program with an input and an output per case.

    XNNPACK gives an int8 input the grid of its first reader. Therefore no two cases share an input.
    """

    def __init__(self, cases):
        super().__init__()
        self.cases = torch.nn.ModuleList(cases)

    def forward(self, *inputs):
        inputs = iter(inputs)
        return tuple(case(*itertools.islice(inputs, case.inputs)) for case in self.cases)


def run(cases, inputs):
    """Returns the outputs of a program for cases and inputs. XNNPACK must run all of it."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    logging.disable(logging.WARNING)
    try:
        exported = torch.export.export(Program(cases), tuple(inputs))
        lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()]).to_executorch()
    finally:
        logging.disable(logging.NOTSET)
    plan = lowered.executorch_program.execution_plan[0]
    assert [d.id for d in plan.delegates] == ["XnnpackBackend"]
    assert not plan.operators
    method = Runtime.get().load_program(bytes(lowered.buffer)).load_method("forward")
    return [output.clone().numpy() for output in method.execute(list(inputs))]


class Case(torch.nn.Module):
    """A part of a program: a function of tensors, most of which are made of codes."""

    def __init__(self, function, inputs=1, **buffers):
        super().__init__()
        import torch.ao.quantization.fx._decomposed  # noqa: F401  defines the operators

        self.function, self.inputs = function, inputs
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, *inputs):
        return self.function(self, *inputs)


def quantize(x, of):
    operator = torch.ops.quantized_decomposed.quantize_per_tensor
    return operator(x, of.scale.item(), int(of.zero_point), -128, 127, torch.int8)


def dequantize(codes, of):
    operator = torch.ops.quantized_decomposed.dequantize_per_tensor
    return operator(codes, of.scale.item(), int(of.zero_point), -128, 127, torch.int8)


def dequantize_channels(codes, scales, zeros, axis=0):
    operator = torch.ops.quantized_decomposed.dequantize_per_channel
    return operator(codes, scales, zeros, axis, -128, 127, torch.int8)


def grid(scale, zero_point=0, bits=8, signed=True):
    spec = QuantSpec(bits=bits, signed=signed, symmetric=False)
    return values.GridOf(torch.tensor(np.float32(scale)), torch.tensor(int(zero_point), dtype=torch.int32), spec)


def value(codes, of):
    return (torch.as_tensor(codes).int() - of.zero_point).float() * of.scale


def int8(array):
    return torch.from_numpy(np.ascontiguousarray(array, np.int8))


def same(mine, theirs):
    wrong = int((mine.numpy() != theirs).sum())
    assert wrong == 0, f"{wrong} of {theirs.size} codes differ"


# --- inputs ---------------------------------------------------------------------------------------


def near_ties(scale):
    """Returns floats at ties of a grid, their neighbours, and numbers that are not on any grid."""
    ties = ((np.arange(-260, 260) + 0.5) * scale).astype(np.float32)
    others = np.float32([np.inf, -np.inf, np.nan, 3e38, -3e38, 0, -0.0, 3e9 * scale, -3e9 * scale, 1e-45])
    x = [ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf)), others]
    return torch.from_numpy(np.concatenate(x))


def test_golden_inputs_have_the_codes_of_xnnpack():
    rng = np.random.default_rng(0)
    grids = [grid(2.0 ** rng.uniform(-8, 3), z) for z in [-128, 127, -77]]
    grids += [grid(s, z) for s, z in zip(TENTHS[:5], ZERO_POINTS, strict=True)] + [grid(1e-37)]
    inputs = [near_ties(of.scale.item()) for of in grids]
    for of, x, theirs in zip(
        grids, inputs, run([Case(lambda _, x, of=of: quantize(x, of)) for of in grids], inputs), strict=True
    ):
        same(OURS.from_float(x, of), theirs)


def test_golden_inputs_have_the_codes_of_xnnpack_with_few_levels():
    kinds = [(2, False, 0), (2, False, 1), (2, True, -2), (4, False, 3), (4, True, -1), (7, False, 100)]
    grids = [grid(scale, z, bits, signed) for scale, (bits, signed, z) in zip(TENTHS, kinds, strict=False)]
    inputs = [near_ties(of.scale.item()) for of in grids]
    inputs = [x[~x.isnan()] for x in inputs]
    cases = [Case(lambda _, x, of=of: quantize(F.hardtanh(x, *ends(of)), of)) for of in grids]
    for of, x, theirs in zip(grids, inputs, run(cases, inputs), strict=True):
        same(OURS.from_float(x, of), theirs)


def ends(of):
    """Returns the floats of the lowest and of the highest code."""
    return value(of.spec.qmin, of).item(), value(of.spec.qmax, of).item()


def test_golden_codes_on_another_grid_have_the_codes_of_xnnpack():
    codes = int8(np.arange(-128, 128))
    scales = list(itertools.product(TENTHS[:2], TENTHS[2:5]))
    zero_points = itertools.cycle(itertools.product(ZERO_POINTS, ZERO_POINTS))
    pairs = [(grid(s, z), grid(t, y)) for (s, t), (z, y) in zip(scales, zero_points, strict=False)]
    pairs += [(grid(0.1, 3), grid(0.2, -5)), (grid(0.3, -128), grid(0.6, -128))]
    cases = [Case(lambda _, x, a=a, b=b: quantize(dequantize(x, a), b)) for a, b in pairs]
    for (a, b), theirs in zip(pairs, run(cases, [codes.clone() for _ in pairs]), strict=True):
        same(OURS.from_regrid(value(codes, a), a, b), theirs)


# --- layers ---------------------------------------------------------------------------------------


class Layer(Case):
    """A layer with random codes and small weights, whose sums lie at ties of the grid of the result."""

    def __init__(self, kind, trial):
        rng = np.random.default_rng(trial)
        self_rank = {"linear": 2, "conv1d": 3}.get(kind, 4)
        grid_in = grid(TENTHS[trial % 8], ZERO_POINTS[trial % 4])
        per_channel, has_bias = trial % 4 != 3, trial % 3 != 1
        scales = np.roll(TENTHS, trial // 3) if per_channel else TENTHS[trial % 5]
        scales = torch.tensor(np.float32(scales * np.float32(0.01)))
        inputs = {"depthwise": 1, "grouped": CHANNELS // 2}.get(kind, CHANNELS)
        size = [1 if kind == "pointwise" else 3] * (self_rank - 2)
        weight = int8(rng.integers(-3, 4, (CHANNELS, inputs, *size)))
        buffers = {"weight": weight}
        if per_channel:
            buffers |= {"scales": scales, "zeros": torch.zeros(CHANNELS, dtype=torch.int64)}
        if has_bias:  # at ties of the codes of the bias, too
            halves = torch.from_numpy(rng.integers(-600, 600, CHANNELS) / 2)
            buffers["bias"] = (halves * scales.double() * grid_in.scale.double()).float()
        super().__init__(type(self).compute, **buffers)
        self.kind, self.rank, self.grid, self.per_channel = kind, self_rank, grid_in, per_channel
        self.has_bias = has_bias
        self.weight_grid = None if per_channel else grid(scales)
        self.weight_scale = scales.clone()
        self.codes = int8(rng.integers(-128, 128, (32, CHANNELS, 5, 5)[:self_rank]))
        step = self.grid.scale.item() * 0.001 * [2, 6, 14][trial % 3]
        self.activation = ["none", "relu", "hardtanh"][trial // 2 % 3]
        few = {"bits": [2, 4][trial % 2], "signed": False} if self.activation == "hardtanh" else {}
        self.result = grid(step, [0, 1, 3][trial % 3] if few else ZERO_POINTS[trial // 2 % 5], **few)

    def compute(self, codes):
        axis = 1 if self.kind == "transposed" else 0
        if self.per_channel:
            weight = dequantize_channels(self.weight, self.scales, self.zeros, axis)
        else:
            weight = dequantize(self.weight, self.weight_grid)
        y = self.layer(dequantize(codes, self.grid), weight, self.bias if self.has_bias else None)
        if self.activation == "relu":
            y = F.relu(y)
        if self.activation == "hardtanh":
            y = F.hardtanh(y, *ends(self.result))
        return quantize(y, self.result)

    def layer(self, x, weight, bias):
        if self.kind == "linear":
            return F.linear(x, weight, bias)
        padding = 0 if self.kind == "pointwise" else 1
        if self.kind == "conv1d":
            return F.conv1d(x, weight, bias, padding=padding)
        if self.kind == "transposed":
            return F.conv_transpose2d(x, weight, bias, padding=padding, stride=2)
        stride = {"stride": 2, "dilation": 2} if self.kind == "strided" else {}
        return F.conv2d(x, weight, bias, padding=padding, groups=self.groups, **stride)

    @property
    def groups(self):
        return {"depthwise": CHANNELS, "grouped": 2}.get(self.kind, 1)

    def sums(self):
        sums = self.layer(self.codes.double() - int(self.grid.zero_point), self.weight.double(), None)
        if self.has_bias:
            sums = sums + self._along_channels(OURS.bias_codes(self.bias, self.grid.scale, self.weight_scale)).double()
        return sums

    def golden(self):
        codes = OURS.from_sums(self.sums(), self._along_channels(self.grid.scale * self.weight_scale), self.result)
        return torch.maximum(codes, self.result.zero_point) if self.activation == "relu" else codes

    def _along_channels(self, tensor):
        return tensor if tensor.dim() == 0 else tensor.reshape(-1, *[1] * (self.rank - 2))


# Layers in one program, with the number of trials of each.
MOST = 4 if ALL else 2
PROGRAMS = {
    "linear": (["linear"], 4),
    "conv": (["conv"], MOST),
    "depthwise": (["depthwise"], MOST),
    "other convolutions": (["pointwise", "grouped", "conv1d", "transposed", "strided"], 2),
}


@pytest.mark.parametrize(("kinds", "number"), PROGRAMS.values(), ids=PROGRAMS)
def test_golden_layers_have_the_codes_of_xnnpack(kinds, number):
    layers = []
    for kind in kinds:
        first = 4 * LAYERS.index(kind)
        # The last one has one scale for its weight, the others have a scale per channel.
        layers += [Layer(kind, first + trial) for trial in (range(4) if number == 4 else (first % 3, 3))]
    for layer, theirs in zip(layers, run(layers, [layer.codes for layer in layers]), strict=True):
        same(layer.golden(), theirs)


def test_golden_layers_with_large_sums_have_the_codes_of_xnnpack():
    """Sums above 2^24 are rounded when they become float32. These lie at ties and beside them."""
    sums = (np.arange(131, 251, 2)[:, None] * 2**18 + np.arange(-2, 3)).ravel()
    total, last = np.divmod(sums, 127)
    codes = total[:, None] // 4095 + (np.arange(4095) < total[:, None] % 4095)
    layers = [Layer("linear", trial) for trial in (3, 3)]
    for layer, zero_point in zip(layers, (0, -9), strict=True):
        layer.has_bias, layer.activation, layer.result = False, "none", grid(2**10, zero_point)
        layer.grid, layer.weight_grid, layer.weight_scale = grid(2**-4), grid(2**-5), torch.tensor(2.0**-5)
        layer.codes = int8(np.concatenate([codes, last[:, None]], axis=1))
        layer.weight = int8(np.resize([127] * 4095 + [1], (CHANNELS, 4096)))
        assert (layer.sums().numpy() == sums[:, None]).all()
    for layer, theirs in zip(layers, run(layers, [layer.codes.clone() for layer in layers]), strict=True):
        same(layer.golden(), theirs)


# --- additions, products, means -------------------------------------------------------------------


OPERATIONS = {
    "add": (torch.add, OURS.from_addition),
    "add with ReLU": (lambda a, b: F.relu(a + b), OURS.from_addition),
    "sub": (torch.sub, OURS.from_subtraction),
    "mul": (torch.mul, OURS.from_product),
}


@pytest.mark.parametrize("name", sampled(OPERATIONS, "add", "sub", "mul"))
def test_golden_elementwise_operations_have_the_codes_of_xnnpack(name):
    operation, golden = OPERATIONS[name]
    a, b = (int8(codes) for codes in np.meshgrid(np.arange(-128, 128), np.arange(-128, 128)))
    rng = np.random.default_rng(0)
    if name == "mul":
        scales = [
            [p, q, p * q * ties] for p, q, ties in ((0.1, 0.9, 14), (0.3, 0.3, 18), (0.1, 0.7, 6), (0.21, 0.1, 2))
        ]
    else:
        limits = [[2**19.9, 0.5, 1], [2**-10, 2**-20, 1]]  # the largest and smallest that `has_addition` accepts
        scales = [[0.1, 0.7, 0.2], [0.3, 1.3, 0.6], *limits]
    scales = [*np.float32(scales), *np.float32(2.0 ** rng.uniform(-3, 3, (1, 3)))]
    zero_points = [(-128,) * 3, (127,) * 3, (0,) * 3, (-128, 127, -128), *rng.integers(-128, 128, (1, 3))]
    grids = [[grid(s, z) for s, z in zip(*pair, strict=True)] for pair in zip(scales, zero_points, strict=True)]
    if name in ("add with ReLU", "sub"):  # the kernel of the addition
        grids = grids[1::2]
    cases = [Case(lambda _, *x, of=of: _computed(operation, x, of), inputs=2) for of in grids]
    outputs = run(cases, [codes.clone() for _ in cases for codes in (a, b)])
    for (ga, gb, gy), theirs in zip(grids, outputs, strict=True):
        mine = golden(value(a, ga), ga, value(b, gb), gb, gy)
        same(torch.maximum(mine, gy.zero_point) if "ReLU" in name else mine, theirs)


def _computed(operation, operands, of):
    return quantize(operation(dequantize(operands[0], of[0]), dequantize(operands[1], of[1])), of[2])


def test_golden_averages_have_the_codes_of_xnnpack():
    rng = np.random.default_rng(1)
    cases, inputs, grids = [], [], []
    sizes, factors = [(7, 7), (3, 5), (1, 7), (1, 1)], [(1, 3), (2, 9), (3, 10)]
    for size, (steps, factor) in zip(sizes + sizes[:2], factors + factors, strict=True):
        number = size[0] * size[1]
        sums = np.arange(-128 * number, 127 * number, max(1, number // 8))
        codes = sums[:, None] // number + (np.arange(number) < sums[:, None] % number)
        inputs.append(int8(np.resize(codes, (2, len(codes) // 2, *size))))
        scale = TENTHS[len(cases) % 8]
        # Sums of `steps` steps lie between two codes.
        zero_points = rng.integers(-128, 128, 2)
        grids.append((grid(scale, zero_points[0]), grid(scale * 2 * steps * factor / number, zero_points[1])))
        cases.append(Case(lambda _, x, of=grids[-1]: quantize(dequantize(x, of[0]).mean((2, 3), keepdim=True), of[1])))
    for x, (gx, gy), theirs in zip(inputs, grids, run(cases, inputs), strict=True):
        same(OURS.from_average(value(x, gx), gx, (2, 3), gy), theirs)


# --- dynamic quantization -------------------------------------------------------------------------


def dynamic_per_token(x):
    """Quantizes and dequantizes with a scale per row."""
    operators = torch.ops.quantized_decomposed
    scale, zero_point = operators.choose_qparams_per_token_asymmetric(x, torch.int8)
    codes = operators.quantize_per_token(x, scale, zero_point, -128, 127, torch.int8)
    return operators.dequantize_per_token(codes, scale, zero_point, -128, 127, torch.int8, torch.float32)


def dynamic_per_tensor(x):
    """Quantizes and dequantizes with one scale. XNNPACK takes one per row or image."""
    operators = torch.ops.quantized_decomposed
    scale, zero_point = operators.choose_qparams.tensor(x, -128, 127, 1e-7, torch.int8)
    codes = operators.quantize_per_tensor.tensor(x, scale, zero_point, -128, 127, torch.int8)
    return operators.dequantize_per_tensor.tensor(codes, scale, zero_point, -128, 127, torch.int8)


def tokens(rows, length):
    """Returns rows with different ranges, with ties among them, and rows of zeros and of one sign."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, length)) * np.exp(2 * rng.standard_normal((rows, 1))) + rng.standard_normal(
        (rows, 1)
    )
    x[0], x[1], x[2] = np.resize(np.arange(-128, 128) / 2, length), np.resize(np.arange(511) / 2, length), 0
    x[3], x[4], x[5] = np.resize(0.1 * np.arange(-20, 490) / 2, length), x[3] * 1e-30, x[4] * 1e30
    x[6], x[7] = np.abs(x[6]), -np.abs(x[7])
    return torch.from_numpy(x.astype(np.float32))


class DynamicLinear(Case):
    """A linear layer with dynamic inputs. The weight has a scale per output or per group."""

    def __init__(self, bits, inputs, quantizer=dynamic_per_token, group_size=None, has_bias=True):
        rng = np.random.default_rng(bits + inputs)
        outputs, lowest = 24, -(2 ** (bits - 1))
        shape = (outputs,) if group_size is None else (outputs, inputs // group_size)
        # Weights of groups are positive, so that the sums are large.
        weight = int8(rng.integers(lowest if group_size is None else 0, -lowest, (outputs, inputs)))
        scales = torch.from_numpy(np.exp(2 * rng.standard_normal(shape)).astype(np.float32))
        buffers = {"weight": weight, "scales": scales, "zeros": torch.zeros(shape, dtype=torch.int64)}
        if has_bias:
            buffers["bias"] = torch.from_numpy(rng.standard_normal(outputs).astype(np.float32))
        super().__init__(type(self).compute, **buffers)
        self.lowest, self.group_size, self.quantizer, self.has_bias = lowest, group_size, quantizer, has_bias

    def compute(self, x):
        operators, limits = torch.ops.quantized_decomposed, (self.lowest, -self.lowest - 1, torch.int8)
        if self.group_size is None:
            weight = operators.dequantize_per_channel(self.weight, self.scales, self.zeros, 0, *limits)
        else:
            rest = self.group_size, torch.float32
            weight = operators.dequantize_per_channel_group(self.weight, self.scales, self.zeros, *limits, *rest)
        return F.linear(self.quantizer(x), weight, self.bias if self.has_bias else None)

    def golden(self, x):
        scale, zero_point = OURS.token_qparams(x)
        codes, bias = OURS.from_tokens(x), self.bias if self.has_bias else torch.zeros(())
        if self.group_size is not None:
            return OURS.dynamic_grouped_value(codes, scale, zero_point, self.weight, self.scales, bias)
        sums = (codes.double() - zero_point) @ self.weight.double().T
        return OURS.dynamic_value(sums, scale, self.scales, bias)


def same_bits(mine, theirs):
    wrong = int((mine.numpy().view(np.int32) != theirs.view(np.int32)).sum())
    assert wrong == 0, f"{wrong} of {theirs.size} results differ"


def test_golden_dynamic_layers_have_the_results_of_xnnpack():
    """One program, with a convolution, and with a layer that shows the codes of its input."""
    x, images, (identity, shown) = tokens(40, 512), tokens(12, 8 * 36).reshape(12, 8, 6, 6), identity_and_tokens()
    layers = [DynamicLinear(8, 512), DynamicLinear(8, 512, dynamic_per_tensor, has_bias=False), DynamicLinear(4, 512)]
    convolution = DynamicConvolution()
    inputs = [*(x.clone() for _ in layers), shown, images]
    *results, codes, convolved = run([*layers, identity, convolution], inputs)
    for layer, theirs in zip(layers, results, strict=True):
        same_bits(layer.golden(x), theirs)
    scale, zero_point = OURS.token_qparams(shown)
    same_bits((OURS.from_tokens(shown) - zero_point) * scale, codes)
    same_bits(convolution.golden(images), convolved)


def identity_and_tokens():
    """Returns a layer without effect, with weights 0 and 1, and tokens whose zero points are at ties."""
    x, rng = tokens(4096, 8), np.random.default_rng(0)
    highest, steps = rng.uniform(0.1, 3, len(x)).astype(np.float32), rng.integers(0, 255, len(x)) + 0.5
    steps[::4] = 127.5
    lowest = (-highest * steps / (255 - steps)).astype(np.float32)
    lowest[::2] = np.nextafter(lowest[::2], np.float32(0))
    x[8:, 0], x[8:, 1:] = torch.from_numpy(highest[8:]), torch.from_numpy(lowest[8:])[:, None] / torch.arange(1, 8)
    layer = DynamicLinear(8, 8, has_bias=False)
    layer.weight, layer.scales, layer.zeros = torch.eye(8).to(torch.int8), torch.ones(8), torch.zeros(8).long()
    return layer, x


class DynamicConvolution(Case):
    """A convolution with dynamic inputs, which have a scale per image."""

    def __init__(self):
        weight = int8(np.random.default_rng(3).integers(-127, 128, (8, 8, 3, 3)))
        scales, bias = torch.from_numpy(TENTHS), torch.from_numpy(TENTHS * 3)
        super().__init__(type(self).compute, weight=weight, scales=scales, zeros=torch.zeros(8).long(), bias=bias)

    def compute(self, x):
        dequantized = dequantize_channels(self.weight, self.scales, self.zeros)
        return F.conv2d(dynamic_per_tensor(x), dequantized, self.bias, padding=1)

    def golden(self, x):
        scale, zero_point = OURS.token_qparams(x, (1, 2, 3))
        sums = F.conv2d(OURS.from_tokens(x, (1, 2, 3)).double() - zero_point, self.weight.double(), padding=1)
        return OURS.dynamic_value(sums, scale, self.scales.reshape(-1, 1, 1), self.bias.reshape(-1, 1, 1))


@pytest.mark.skipif(not HAS_VNNI, reason="the order of additions is that of the kernel for AVX-512 with VNNI")
def test_golden_dynamic_layers_with_groups_have_the_results_of_xnnpack():
    x = tokens(40, 512)
    layers = [DynamicLinear(4, 512, group_size=32), DynamicLinear(4, 512, group_size=256, has_bias=False)]
    for layer, theirs in zip(layers, run(layers, [x.clone() for _ in layers]), strict=True):
        same_bits(layer.golden(x), theirs)
