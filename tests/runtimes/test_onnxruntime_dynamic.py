"""Dynamic linear layers in ONNX Runtime: the golden model has the scales, codes and results of its kernels."""

import platform

import numpy as np
import pytest

import fakequant as fq
from fakequant import QuantSpec
from fakequant.testing.assertions import assert_same_bits
from thoroughness import ALL

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
recipes = pytest.importorskip("fakequant.recipes")
grids = pytest.importorskip("fakequant._convert.golden.quantizer")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
targets = pytest.importorskip("fakequant._runtimes.target")
nn = torch.nn

pytestmark = pytest.mark.skipif(
    platform.machine().lower() not in ("x86_64", "amd64"), reason="the formulas are those of the x86 kernels"
)
X86 = "onnxruntime-x86"
SPEC = QuantSpec(bits=8, signed=False, symmetric=False)


def ties():
    """Returns numbers whose quotient by the scale is halfway between two integers, or next to it."""
    scale = np.float32(0.1)
    middle = (np.arange(-100, 155, dtype=np.float32) + np.float32(0.5)) * scale
    ends = np.float32([-100 * scale, 155 * scale])
    return np.concatenate([middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf), ends])


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


TENSORS = {
    "normal": randn(40, 7).numpy(),
    "ties": ties(),
    "positive": randn(40).abs().add(3).numpy(),
    "negative": -randn(40).abs().add(3).numpy(),
    "zeros": np.zeros((3, 4), np.float32),
    "one number": np.float32([-2.5]),
    "tiny": randn(40).numpy() * np.float32(1e-30),
    "large": randn(40).numpy() * np.float32(1e37),
    "zero point at a tie": np.float32([-127.5, 127.5, 0.5, -0.5, 3.0]),
    "zero point at the other tie": np.float32([-128.5, 126.5, 0.5, -0.5, 3.0]),
}


@pytest.mark.parametrize("x", TENSORS.values(), ids=TENSORS)
def test_a_dynamic_grid_has_the_scale_zero_point_and_codes_of_dynamic_quantize_linear(x):
    outputs = [onnx.helper.make_empty_tensor_value_info(name) for name in ("codes", "scale", "zero_point")]
    node = onnx.helper.make_node("DynamicQuantizeLinear", ["x"], [output.name for output in outputs])
    taken = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None] * x.ndim)
    model = onnx.helper.make_model(
        onnx.helper.make_graph([node], "g", [taken], outputs),
        opset_imports=[onnx.helper.make_opsetid("", 17)],
        ir_version=9,
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    codes, scale, zero_point = session.run(None, {"x": x})
    made = grids.GoldenQuantizer(SPEC, None, None, eps=targets.SMALLEST_DYNAMIC_SCALE)
    found = made.grid_for(torch.from_numpy(x))
    assert int(found.zero_point) == zero_point
    if x.any():  # the scale of zeros is arbitrary
        assert_same_bits(found.scale, scale)
    assert np.array_equal(values.codes_of(values.plain(made(torch.from_numpy(x))), found).numpy(), codes)


class Shared(nn.Module):
    """Three layers read one tensor, as in attention."""

    def __init__(self, width=32):
        super().__init__()
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, 24, False)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.norm(x)
        return torch.softmax(self.query(x) @ self.key(x).mT, -1) @ self.value(x)


MODELS = {
    "MLP": (lambda: nn.Sequential(nn.Linear(32, 33), nn.GELU(), nn.Linear(33, 5, bias=False)), randn(8, 32)),
    "tokens": (lambda: nn.Sequential(nn.Linear(32, 33), nn.GELU(), nn.Linear(33, 5)), randn(2, 5, 32)),
    "shared input": (Shared, randn(2, 5, 32)),
    "encoder": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), randn(2, 5, 32)),
}


TARGETS = [X86, "onnxruntime-vnni"]
PAIRS = [(name, TARGETS[number % 2]) for number, name in enumerate(MODELS)]
if ALL:
    PAIRS = [(name, target) for name in MODELS for target in TARGETS]


@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_dynamic_layers_run_in_integers_with_the_same_codes(name, target, tmp_path):
    make, x = MODELS[name]
    torch.manual_seed(0)
    model = fq.prepare(make().eval(), recipes.int8_dynamic(target=target), x)
    path = tmp_path / "model.onnx"
    fq.export_onnx(model, path, x)
    found = fq.verify(model, path, [x, randn(3, *x.shape[1:], seed=1)])
    assert set(found.kernels.values()) <= {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
    assert found.floats == {}
    if target == X86 or not found.saturates:  # without VNNI, 8-bit weights saturate
        assert found.ok, found.verdict()
        assert found.skipped == {}
        assert len(found.tensors) == len(found.kernels)


def test_few_bit_and_affine_weights_are_stored_in_bytes(tmp_path):
    x = randn(8, 32)
    for weight in (QuantSpec(bits=4, axis=0), QuantSpec(bits=6, axis=None), QuantSpec(bits=6, symmetric=False, axis=0)):
        torch.manual_seed(0)
        config = recipes.int8_dynamic(target=X86).rule("*", weight=weight)
        model = fq.prepare(
            nn.Sequential(nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)), config, torch.ones(1, 32)
        ).eval()
        fq.export_onnx(model, tmp_path / "model.onnx", x)
        found = fq.verify(model, tmp_path / "model.onnx", [x])
        assert found.ok, found.verdict()
        assert set(found.kernels.values()) == {"DynamicQuantizeMatMul"}


def test_dynamic_layers_without_such_a_kernel_run_in_float_with_the_same_codes(tmp_path):
    """Scales along the inputs vary within a sum, and the target `generic` has a smallest scale."""
    x = randn(8, 32)
    per_tensor = fq.QuantConfig(
        default=fq.LayerConfig(weight=QuantSpec(bits=7, axis=0), input=SPEC, activation_observer=fq.observers.Dynamic())
    )
    along_inputs = recipes.int8_dynamic(target=X86).rule("*", weight=QuantSpec(bits=7, axis=1))
    for config in (per_tensor, along_inputs):
        torch.manual_seed(0)
        model = fq.prepare(
            nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)), config, torch.ones(1, 32)
        ).eval()
        fq.export_onnx(model, tmp_path / "model.onnx", x)
        found = fq.verify(model, tmp_path / "model.onnx", [x, 1e-7 * x], accuracy_level=1)
        assert found.ok, found.verdict()
        assert len(found.floats) == 2


def test_the_target_decides_whether_tokens_have_scales_of_their_own():
    model = nn.Sequential(nn.Linear(8, 8))
    for target, granularity in ((X86, "tensor"), ("generic", "token")):
        prepared = fq.prepare(model, recipes.int8_dynamic(target=target))
        quantizer = prepared[0].input_quantizer
        assert (quantizer.spec.granularity, quantizer.is_dynamic) == (granularity, True)
        fq.unprepare(model)


def test_another_range_is_a_difference_although_the_codes_are_the_same(tmp_path):
    """A file that doubles its input has the same codes, at twice the scale."""
    torch.manual_seed(0)
    x = randn(8, 16)
    model = fq.prepare(nn.Sequential(nn.Tanh(), nn.Linear(16, 4)), recipes.int8_dynamic(target=X86)).eval()
    path = tmp_path / "model.onnx"
    fq.export_onnx(model, path, x)
    proto = onnx.load(path)
    node = next(node for node in proto.graph.node if node.op_type == "DynamicQuantizeLinear")
    two = onnx.numpy_helper.from_array(np.float32(2), "two")
    proto.graph.initializer.append(two)
    place = list(proto.graph.node).index(node)
    proto.graph.node.insert(place, onnx.helper.make_node("Mul", [node.input[0], "two"], ["doubled"]))
    proto.graph.node[place + 1].input[0] = "doubled"
    onnx.save(proto, path)
    found = fq.verify(model, path, [x])
    assert not found.ok
    assert "the two models found different ranges" in found.verdict()
