"""The golden model's arithmetic gives the codes of OpenVINO's kernels, at ties too."""

import itertools
import platform

import numpy as np
import pytest

from fakequant import QuantSpec
from thoroughness import ALL

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
arithmetic = pytest.importorskip("fakequant._runtimes.openvino.arithmetic")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
runtime = pytest.importorskip("fakequant._runtimes.openvino.running")

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="the formulas are those of the x86 kernels"
)

OURS = arithmetic.OpenVino()
try:
    CORE = runtime.import_openvino().Core()
except ImportError:
    pytest.skip("OpenVINO is not installed", allow_module_level=True)
SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
# Not exact in binary: quotients that are ties on paper are not ties in float32.
TENTHS = np.float32([0.1, 0.3, 0.7, 1.1, 1.3, 0.9, 0.5, 0.21])
LAYERS = ["Gemm", "MatMul", "Conv", "pointwise", "depthwise", "grouped"]
CHANNELS = 8


class Graph:
    """An ONNX graph of the form in which files are exported."""

    def __init__(self):
        self.nodes, self.constants, self.inputs, self.outputs = [], [], [], []

    def input(self, *shape):
        name = f"x{len(self.inputs)}"
        self.inputs.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
        return name

    def constant(self, value):
        name = f"c{len(self.constants)}"
        self.constants.append(onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def op(self, kind, *inputs, **attributes):
        name = f"y{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(kind, inputs, [name], **attributes))
        return name

    def quantizer(self, x, grid):
        """Returns the names of the codes and of the dequantized tensor."""
        dtype, spec = np.int8 if grid.spec.signed else np.uint8, grid.spec
        parameters = self.constant(grid.scale.numpy()), self.constant(dtype(int(grid.zero_point)))
        codes = self.op("QuantizeLinear", x, *parameters)
        if spec.bits < 8:
            codes = self.op("Clip", codes, self.constant(dtype(spec.qmin)), self.constant(dtype(spec.qmax)))
        return codes, self.op("DequantizeLinear", codes, *parameters)

    def weight(self, levels, scale, axis=0):
        axis = {"axis": axis} if np.ndim(scale) else {}
        zero = self.constant(np.zeros(np.shape(scale), np.int8))
        return self.op("DequantizeLinear", self.constant(levels.astype(np.int8)), self.constant(scale), zero, **axis)

    def identity(self, x, rank):
        """A layer without effect. It reads codes, so that OpenVINO computes them.

        AVX-512 without VNNI halves the weights of convolutions with int8 inputs and rounds them. These are even.
        """
        weight = 2 * np.eye(CHANNELS, dtype=np.int8).reshape(CHANNELS, CHANNELS, *[1] * (rank - 2))
        dequantized = self.weight(weight, np.full(CHANNELS, 0.5, np.float32))
        return self.op("Gemm", x, dequantized, transB=1) if rank == 2 else self.op("Conv", x, dequantized)

    def output(self, *names):
        self.outputs += [onnx.helper.make_empty_tensor_value_info(name) for name in names]

    def compiled(self):
        graph = onnx.helper.make_graph(self.nodes, "g", self.inputs, self.outputs, self.constants)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
        return CORE.compile_model(CORE.read_model(model.SerializeToString()), "CPU", SETTINGS)

    def run(self, *inputs, kernel=None):
        """Returns the outputs. If a kernel is given, it must be there and run in 8-bit integers."""
        compiled = self.compiled()
        if kernel is not None:
            infos = [node.get_rt_info() for node in compiled.get_runtime_model().get_ops()]
            precisions = {i["runtimePrecision"].astype(str) for i in infos if i["layerType"].astype(str) == kernel}
            assert precisions
            assert precisions <= {"u8", "i8"}
        results = compiled([np.asarray(x, np.float32) for x in inputs])
        return [results[output] for output in compiled.outputs]


def grid(scale, zero_point, signed=False, bits=8):
    spec = QuantSpec(bits=bits, signed=signed, symmetric=False)
    return values.GridOf(torch.tensor(np.float32(scale)), torch.tensor(int(zero_point), dtype=torch.int32), spec)


def value(codes, of):
    return (torch.from_numpy(codes) - of.zero_point).float() * of.scale


def codes_seen(result, of):
    """Returns the codes of a result that was dequantized."""
    return np.rint(result / float(of.scale)) + int(of.zero_point)


def same(mine, theirs):
    wrong = int((mine.numpy() != theirs).sum())
    assert wrong == 0, f"{wrong} of {theirs.size} codes differ"


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signed", "bits", "has_fixed_shape"),
    [*itertools.product((False, True), (8, 4, 2), (False,)), (False, 8, True), (False, 4, True), (True, 8, True)]
    if ALL
    else [(False, 8, False), (True, 4, False), (False, 2, False), (True, 8, True)],
)
def test_golden_inputs_have_the_codes_of_openvino(signed, bits, has_fixed_shape):
    rng = np.random.default_rng(0)
    for trial in range(8):
        of = grid(2.0 ** rng.uniform(-8, 3), 0, signed, bits)
        lowest, highest = of.spec.qmin, of.spec.qmax
        of = grid(of.scale.item(), [lowest, highest, *rng.integers(lowest, highest + 1, 6)][trial], signed, bits)
        ties = ((np.arange(-256, 257) + 0.5) * of.scale.item()).astype(np.float32)
        x = np.concatenate([ties, np.nextafter(ties, np.float32(9e9)), np.nextafter(ties, np.float32(-9e9))])
        x = np.resize(x, (len(x) // CHANNELS + 1, CHANNELS, 1, 1)).astype(np.float32)
        graph = Graph()
        codes, read = graph.quantizer(graph.input(len(x) if has_fixed_shape else None, *x.shape[1:]), of)
        graph.output(graph.identity(read, 4))
        mine = OURS.from_float(torch.from_numpy(x), of, has_fixed_shape)
        same(mine, codes_seen(graph.run(x, kernel="Convolution")[0], of))
        if not (signed and has_fixed_shape):  # codes that stay int8 have another formula
            graph.output(codes)
            same(mine, graph.run(x)[1])


# --- layers ---------------------------------------------------------------------------------------


class Layer:
    """A layer with random codes and small weights, whose sums lie at ties of the grid of the codes."""

    def __init__(self, kind, trial, zero_point, has_bias, is_rectified, per_channel=True, signed=False, rows=32):
        rng = np.random.default_rng(trial)
        self.kind, self.rank = kind, 2 if kind in ("Gemm", "MatMul") else 4
        self.grid = grid(TENTHS[trial % 8], zero_point, signed)
        lowest = -128 if signed else 0
        self.codes = rng.integers(lowest, lowest + 256, (rows, CHANNELS, 4, 4)[: self.rank])
        scales = np.roll(TENTHS, trial // 3) if per_channel else TENTHS[trial // 3 % 8]
        self.weight_scale = (scales * np.float32(0.01)).astype(np.float32)
        inputs = {"depthwise": 1, "grouped": CHANNELS // 2}.get(kind, CHANNELS)
        size = () if self.rank == 2 else (1, 1) if kind == "pointwise" else (3, 3)
        self.weight = rng.integers(-2, 3, (CHANNELS, inputs, *size))
        self.bias = rng.integers(-300, 300, CHANNELS) if has_bias else None
        self.is_rectified = is_rectified
        self.x = value(self.codes, self.grid).numpy()

    @property
    def tie_scale(self):
        return np.float32(self.grid.scale.item() * 0.001)

    def written(self, graph):
        """Adds the layer, with the quantizer of its input, to a graph and returns the name of its result."""
        _, x = graph.quantizer(graph.input(None, *self.x.shape[1:]), self.grid)
        scale = self.grid.scale.numpy() * self.weight_scale
        bias = []
        if self.bias is not None:
            codes = graph.constant(self.bias.astype(np.int32))
            bias = [graph.op("DequantizeLinear", codes, graph.constant(scale), **({"axis": 0} if scale.ndim else {}))]
        if self.kind == "MatMul":
            y = graph.op("MatMul", x, graph.weight(self.weight.T, self.weight_scale, axis=1))
            y = graph.op("Add", y, *bias) if bias else y
        elif self.kind == "Gemm":
            y = graph.op("Gemm", x, graph.weight(self.weight, self.weight_scale), *bias, transB=1)
        else:
            attributes = {"group": self.groups, "pads": [self.padding] * 4}
            y = graph.op("Conv", x, graph.weight(self.weight, self.weight_scale), *bias, **attributes)
        return graph.op("Relu", y) if self.is_rectified else y

    @property
    def groups(self):
        return {"depthwise": CHANNELS, "grouped": 2}.get(self.kind, 1)

    @property
    def padding(self):
        return 0 if self.kind == "pointwise" else 1

    def sums(self):
        levels = torch.from_numpy(self.codes - int(self.grid.zero_point)).double()
        weight = torch.from_numpy(self.weight).double()
        if self.rank == 2:
            products = levels @ weight.T
        else:
            products = torch.nn.functional.conv2d(levels, weight, padding=self.padding, groups=self.groups)
        x_scale, w_scale = self.grid.scale, torch.tensor(self.weight_scale)
        if self.grid.spec.signed and self.rank == 4:  # stored as uint8, with the scale (high - low) / 255
            low, high = ((limit - self.grid.zero_point).float() * x_scale for limit in (-128, 127))
            x_scale = (high - low) / 255
        offset = int(self.grid.zero_point) * self.weight.reshape(CHANNELS, -1).sum(1)
        bias = None
        if self.bias is not None:
            bias = self._along_channels(torch.from_numpy(self.bias).float() * (self.grid.scale * w_scale))
        return arithmetic.LayerSums(
            products,
            self._along_channels(x_scale * w_scale),
            bias,
            self._along_channels(torch.from_numpy(offset).float()),
            is_linear=self.rank == 2,
            is_rectified=self.is_rectified,
        )

    def _along_channels(self, tensor):
        return tensor if self.rank == 2 or tensor.dim() == 0 else tensor.reshape(-1, 1, 1)

    @property
    def kernel(self):
        return "FullyConnected" if self.rank == 2 else "Convolution"


def options(*more):
    """All combinations of bias, ReLU and more."""
    return list(itertools.product((False, True), (False, True), *more))


@pytest.mark.parametrize("zero_point", [0, 100] if ALL else [100])
@pytest.mark.parametrize("kind", LAYERS if ALL else ["Gemm", "Conv", "depthwise"])
def test_golden_layers_have_the_codes_of_openvino(kind, zero_point):
    ends = [(0, False), (77, False), (0, True), (-9, True)]
    for trial, (has_bias, is_rectified, per_channel, end) in enumerate(options((False, True), ends)):
        layer = Layer(kind, trial, zero_point, has_bias, is_rectified, per_channel)
        of = grid(layer.tie_scale * [2, 6, 14][trial % 3], *end)
        graph = Graph()
        codes, _ = graph.quantizer(layer.written(graph), of)
        graph.output(codes)
        same(OURS.from_layer_sums(layer.sums(), of), graph.run(layer.x, kernel=layer.kernel)[0])


@pytest.mark.parametrize("kind", ["Gemm", "Conv"])
def test_watching_codes_does_not_change_them(kind):
    for trial, (has_bias, is_rectified, zero_point) in enumerate(options((0, 77))):
        layer = Layer(kind, trial, 100, has_bias, is_rectified)
        of = grid(layer.tie_scale * 6, zero_point)
        graph = Graph()
        codes, read = graph.quantizer(layer.written(graph), of)
        graph.output(graph.identity(read, layer.rank))
        mine = OURS.from_layer_sums(layer.sums(), of)
        same(mine, codes_seen(graph.run(layer.x, kernel=layer.kernel)[0], of))
        graph.output(codes)
        seen, watched = graph.run(layer.x, kernel=layer.kernel)
        same(mine, watched)
        same(mine, codes_seen(seen, of))


@pytest.mark.parametrize("kind", ["Gemm", "Conv"])
def test_golden_layers_before_other_kernels_have_the_codes_of_openvino(kind):
    for trial, (has_bias, is_rectified) in enumerate(options()):
        layer = Layer(kind, trial, 100, has_bias, is_rectified)
        of = grid(layer.tie_scale * 6, 0)
        graph = Graph()
        graph.output(graph.quantizer(layer.written(graph), of)[1])
        same(OURS.from_layer_sums(layer.sums(), of, is_stored=False), codes_seen(graph.run(layer.x)[0], of))
        of = grid(layer.tie_scale * 6, -9, signed=True)
        graph = Graph()
        graph.output(graph.identity(graph.quantizer(layer.written(graph), of)[1], layer.rank))
        mine = OURS.from_layer_sums(layer.sums(), of, is_shifted=kind == "Conv")
        same(mine, codes_seen(graph.run(layer.x, kernel=layer.kernel)[0], of))


@pytest.mark.parametrize("bits", [2, 4] if ALL else [2])
@pytest.mark.parametrize("kind", LAYERS if ALL else ["MatMul", "grouped"])
def test_golden_layers_have_the_codes_of_openvino_with_few_levels(kind, bits):
    for trial, (has_bias, is_rectified, zero_point) in enumerate(options((0, 1))):
        layer = Layer(kind, trial, 100, has_bias, is_rectified)
        of = grid(layer.tie_scale * 6, zero_point, bits=bits)
        graph = Graph()
        codes, read = graph.quantizer(layer.written(graph), of)
        graph.output(graph.identity(read, layer.rank), codes)
        same(OURS.from_layer_sums(layer.sums(), of), graph.run(layer.x, kernel=layer.kernel)[1])


@pytest.mark.parametrize("signed", [False, True] if ALL else [True])
@pytest.mark.parametrize("kind", LAYERS if ALL else ["Gemm", "pointwise"])
def test_golden_layers_without_a_quantizer_have_the_results_of_openvino(kind, signed):
    for trial, (has_bias, is_rectified, zero_point) in enumerate(options((0, 100))):
        layer = Layer(kind, trial, zero_point, has_bias, is_rectified, signed=signed)
        graph = Graph()
        graph.output(layer.written(graph))
        same(OURS.value(layer.sums()), graph.run(layer.x, kernel=layer.kernel)[0])


@pytest.mark.parametrize("has_bias", [False, True])
def test_golden_linear_layers_with_large_sums_have_the_codes_of_openvino(has_bias):
    """Sums above 2^24 are rounded when they become float32."""
    rng = np.random.default_rng(0)
    for zero_point, end in itertools.product((0, 100), (0, 77)):
        layer = Layer("Gemm", 1, zero_point, has_bias, is_rectified=False)
        layer.codes = rng.integers(200, 256, (32, 4096))
        layer.weight = rng.integers(0, 64, (CHANNELS, 4096))
        layer.x = value(layer.codes, layer.grid).numpy()
        of = grid(layer.tie_scale * 1e6 / 3, end)
        graph = Graph()
        result = layer.written(graph)
        codes, _ = graph.quantizer(result, of)
        graph.output(codes)
        same(OURS.from_layer_sums(layer.sums(), of), graph.run(layer.x, kernel=layer.kernel)[0])
        graph = Graph()
        graph.output(layer.written(graph))
        same(OURS.value(layer.sums()), graph.run(layer.x, kernel=layer.kernel)[0])


@pytest.mark.parametrize("signed", [False, True])
def test_golden_products_of_activations_have_the_codes_of_openvino(signed):
    """OpenVINO computes with integers if both zero points are 0 and the second operand is signed."""
    rng = np.random.default_rng(0)
    for a_scale, b_scale, factor, zero_point in itertools.product(TENTHS[:3], TENTHS[2:5], (2, 6), (0, 9)):
        a_grid, b_grid = grid(a_scale, 0, signed), grid(b_scale, 0, signed=True)
        a, b = rng.integers(-128 if signed else 0, 128, (2, 2, 32, 16)), rng.integers(-8, 9, (2, 2, 16, 32))
        scale = a_grid.scale * b_grid.scale
        of = grid(scale.item() * factor * 8, zero_point)
        graph = Graph()
        operands = [graph.quantizer(graph.input(None, *x.shape[1:]), g)[1] for x, g in ((a, a_grid), (b, b_grid))]
        codes, _ = graph.quantizer(graph.op("MatMul", *operands), of)
        graph.output(codes)
        theirs = graph.run(value(a, a_grid), value(b, b_grid), kernel="MatMul")[0]
        same(OURS.from_sums(torch.from_numpy(a @ b), scale, of), theirs)


# --- additions ------------------------------------------------------------------------------------


def all_pairs():
    a, b = np.meshgrid(np.arange(256), np.arange(256))
    return a.reshape(-1, CHANNELS, 16, 16), b.reshape(-1, CHANNELS, 16, 16)


@pytest.mark.parametrize("is_rectified", [False, True])
def test_golden_additions_have_the_codes_of_openvino(is_rectified):
    a, b = all_pairs()
    rng = np.random.default_rng(0)
    scales = [*itertools.product(TENTHS[:3], TENTHS[2:5], (0.2, 1.4)), *2.0 ** rng.uniform(-3, 3, (6, 3))]
    for (a_scale, b_scale, scale), zero_points in zip(scales, itertools.cycle([(0, 0, 0), (10, 20, 30), (128, 0, 0)])):
        a_grid, b_grid, of = (grid(s, z) for s, z in zip((a_scale, b_scale, scale), zero_points, strict=True))
        graph = Graph()
        operands = [graph.quantizer(graph.input(None, *a.shape[1:]), g)[1] for g in (a_grid, b_grid)]
        total = graph.op("Add", *operands)
        codes, _ = graph.quantizer(graph.op("Relu", total) if is_rectified else total, of)
        graph.output(codes)
        mine = OURS.from_addition(value(a, a_grid), a_grid, value(b, b_grid), b_grid, of)
        mine = torch.maximum(mine, of.zero_point) if is_rectified else mine
        same(mine, graph.run(value(a, a_grid), value(b, b_grid), kernel="Eltwise")[0])


def residual(layer, grids, has_quantizer, is_read_again):
    """Returns a graph that adds a layer's result to codes, and the codes."""
    a_grid, b_grid, of = grids
    graph = Graph()
    result = layer.written(graph)
    if has_quantizer:
        _, result = graph.quantizer(result, a_grid)
    _, b = graph.quantizer(graph.input(None, *layer.x.shape[1:]), b_grid)
    _, read = graph.quantizer(graph.op("Add", result, b), of)
    graph.output(graph.identity(read, layer.rank))
    if is_read_again:
        graph.output(graph.identity(b, layer.rank))
    return graph, np.random.default_rng(3).integers(0, 256, layer.codes.shape)


RESIDUALS = list(itertools.product(range(3), [(0, 0, 0), (10, 20, 30), (128, 0, 0), (0, 128, 64)]))


def residual_grids(layer, trial, zero_points):
    a_scale = layer.tie_scale * 20
    b_scale = a_scale * np.float32([1, 3, 0.7][trial % 3])
    return [grid(s, z) for s, z in zip((a_scale, b_scale, 2 * b_scale), zero_points, strict=True)]


@pytest.mark.parametrize("is_read_again", [False, True])
@pytest.mark.parametrize("kind", ["Conv", "depthwise", "Gemm"] if ALL else ["Conv", "Gemm"])
def test_golden_additions_of_layers_have_the_codes_of_openvino(kind, is_read_again):
    for trial, zero_points in RESIDUALS:
        layer = Layer(kind, trial, 100, has_bias=True, is_rectified=False)
        grids = residual_grids(layer, trial, zero_points)
        graph, b = residual(layer, grids, False, is_read_again)
        mine = OURS.from_layer_sums_addition(layer.sums(), value(b, grids[1]), grids[1], grids[2])
        theirs = graph.run(layer.x, value(b, grids[1]), kernel=layer.kernel)[0]
        same(mine, codes_seen(theirs, grids[2]))


def test_golden_additions_of_quantized_layers_have_the_codes_of_openvino():
    for trial, zero_points in RESIDUALS:
        layer = Layer("Conv", trial, 100, has_bias=True, is_rectified=False)
        grids = residual_grids(layer, trial, zero_points)
        if grids[0].scale == grids[1].scale:  # the first quantizer is changed too
            continue
        graph, b = residual(layer, grids, True, is_read_again=True)
        a = OURS.from_layer_sums(layer.sums(), grids[0], is_stored=False)
        a = (a - grids[0].zero_point) * grids[0].scale
        mine = OURS.from_addition(a, grids[0], value(b, grids[1]), grids[1], grids[2])
        same(mine, codes_seen(graph.run(layer.x, value(b, grids[1]), kernel="Convolution")[0], grids[2]))


def test_openvino_does_not_round_before_an_addition_in_the_kernel_of_a_convolution():
    layer = Layer("Conv", 1, 100, has_bias=True, is_rectified=False)
    grids = residual_grids(layer, 1, (128, 0, 0))
    graph, b = residual(layer, grids, True, is_read_again=False)
    a = (OURS.from_layer_sums(layer.sums(), grids[0], is_stored=False) - grids[0].zero_point) * grids[0].scale
    mine = OURS.from_addition(a, grids[0], value(b, grids[1]), grids[1], grids[2]).numpy()
    theirs = codes_seen(graph.run(layer.x, value(b, grids[1]), kernel="Convolution")[0], grids[2])
    assert 0.01 < (mine != theirs).mean() < 0.5
    assert abs(mine - theirs).max() == 1


# --- means and moves ------------------------------------------------------------------------------


AVERAGES = [*itertools.product([(8, 8), (7, 7), (3, 5), (2, 2), (1, 1)], ["GlobalAveragePool", "ReduceMean"])]


@pytest.mark.parametrize(("size", "op"), AVERAGES if ALL else AVERAGES[::3], ids=str)
def test_golden_averages_have_the_codes_of_openvino(op, size):
    number = size[0] * size[1]
    sums = np.arange(0, 255 * number, max(1, number // 8))
    codes = sums[:, None] // number + (np.arange(number) < sums[:, None] % number)
    codes = np.resize(codes, (len(codes) // CHANNELS + 1, CHANNELS, *size))
    zero_points = itertools.cycle([(0, 0), (10, 30), (200, 0), (0, 77)])
    factors = itertools.product(TENTHS[:3], (1, 3, 9), (0.5, 2))
    for (scale, factor, steps), (x_zero, zero) in zip(factors, zero_points):
        x_grid, of = grid(scale, x_zero), grid(scale * 2 * steps * factor / number, zero)
        graph = Graph()
        _, x = graph.quantizer(graph.input(None, *codes.shape[1:]), x_grid)
        axes = [graph.constant(np.array([2, 3]))] if op == "ReduceMean" else []
        watched, _ = graph.quantizer(graph.op(op, x, *axes), of)
        graph.output(watched)
        theirs = graph.run(value(codes, x_grid))[0]
        same(OURS.from_average(value(codes, x_grid), x_grid, (2, 3), of), theirs)


@pytest.mark.parametrize("op", ["MaxPool", "Reshape", "Concat"])
def test_moved_codes_are_quantized_to_themselves(op):
    codes = np.arange(256).reshape(1, 1, 16, 16)
    for scale, zero_point in itertools.product(TENTHS[:5], (0, 10, 255)):
        of = grid(scale, zero_point)
        graph = Graph()
        _, x = graph.quantizer(graph.input(None, 1, 16, 16), of)
        moved = {
            "MaxPool": lambda x=x, graph=graph: graph.op("MaxPool", x, kernel_shape=[1, 1]),
            "Reshape": lambda x=x, graph=graph: graph.op("Reshape", x, graph.constant(np.array([-1, 2, 8, 16]))),
            "Concat": lambda x=x, graph=graph: graph.op("Concat", x, x, axis=1),
        }[op]()
        watched, _ = graph.quantizer(moved, of)
        graph.output(watched)
        theirs = graph.run(value(codes, of))[0]
        same(torch.from_numpy(np.resize(codes, theirs.shape)), theirs)
