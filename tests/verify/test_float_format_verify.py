"""`verify` of files in float formats: codes of FP8, ties, changed files, and what is not compared."""

import copy

import numpy as np
import pytest

import fakequant as fq
from fakequant import presets
from float_format_cases import BLOCKS, FP8, batch, fp8, prepared

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
nn = torch.nn
positions = pytest.importorskip("fakequant._backends.torch.grid_values")
explain = pytest.importorskip("fakequant._verify.explain_codes")
tracked = pytest.importorskip("fakequant._convert.golden.tracked_codes")

DATA = [batch("normed", rows=16, seed=seed) for seed in (5, 6)]


@pytest.fixture(scope="module")
def fp8_file(tmp_path_factory):
    """A prepared model with batch norms in FP8, and its file."""
    model = prepared("normed", FP8["e4m3fn"], steps=0)
    path = tmp_path_factory.mktemp("fp8") / "m.onnx"
    fq.export_onnx(model, path, batch("normed"))
    return model, path


def test_every_fp8_code_is_compared_and_equal(fp8_file):
    model, path = fp8_file
    found = fq.verify(model, path, DATA)
    assert found.ok, found
    assert found.is_exact
    assert found.skipped == {}
    assert {t.path: t.codes for t in found.tensors} == {"0.input_quantizer": 32 * 108, "4.input_quantizer": 32 * 128}
    assert [t.runtime_differ for t in found.tensors] == [0, 0]
    assert found.integers == []
    assert set(found.floats.values()) == {"its weight is e4m3fn; sums of products of floats are floats"}
    again = fq.verify(copy.deepcopy(model), path, DATA)
    assert str(again) == str(found)


def changed(path, tmp_path, change):
    """Returns a copy of the file with one change, whose metadata is that of the original."""
    model = onnx.load(path)
    change({tensor.name: tensor for tensor in model.graph.initializer}, model.graph)
    onnx.save(model, tmp_path / "changed.onnx")
    return tmp_path / "changed.onnx"


def flip_bit(name, byte, bit):
    def change(tensors, graph):
        data = bytearray(tensors[name].raw_data)
        data[byte] ^= 1 << bit
        tensors[name].raw_data = bytes(data)

    return change


def with_other_type(tensors, graph):
    for tensor in tensors.values():
        if tensor.data_type == onnx.TensorProto.FLOAT8E4M3FN and tensor.name.endswith("quantizer_zero_point"):
            tensor.data_type = onnx.TensorProto.FLOAT8E5M2


def without_quantizer(tensors, graph):
    node = next(n for n in graph.node if n.name.startswith("4.input_quantizer") and n.op_type == "DequantizeLinear")
    before = next(n for n in graph.node if n.op_type == "QuantizeLinear" and n.output[0] == node.input[0])
    for reader in graph.node:
        for i, name in enumerate(reader.input):
            if name == node.output[0]:
                reader.input[i] = before.input[0]


CHANGES = {
    "a weight code": flip_bit("4.weight_codes", 3, 4),
    "the sign of a weight code": flip_bit("0.weight_codes", 5, 7),
    "a weight scale": flip_bit("4.weight_scale", 2, 6),
    "the scale of an input": flip_bit("4.input_quantizer_scale", 2, 3),
    "the type of the inputs": with_other_type,
    "no quantizer": without_quantizer,
}


def is_accepted(model, path):
    try:
        return fq.verify(model, path, DATA).ok
    except ValueError as error:
        if "does not belong to the model" in str(error) or "cannot load" in str(error):
            return False
        raise


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changed_file_is_not_accepted(change, fp8_file, tmp_path):
    model, path = fp8_file
    assert is_accepted(model, path)
    assert not is_accepted(model, changed(path, tmp_path, change))


def test_codes_with_block_scales_are_not_claimed_to_be_compared(tmp_path):
    model = prepared("branches", BLOCKS["nvfp4"])
    fq.export_onnx(model, tmp_path / "m.onnx", batch("branches"))
    found = fq.verify(model, tmp_path / "m.onnx", [batch("branches", rows=16, seed=5)])
    assert found.ok, found
    assert not found.is_exact
    assert found.tensors == []
    assert found.skipped == dict.fromkeys([f"{n}.input_quantizer" for n in "abc"], "it has more than one scale")
    assert "No activation has a fixed scale" in str(found)


class Mixed(nn.Module):
    """FP8 and integers, before and after each other."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(16, 16, 1) for _ in range(4))

    def forward(self, x):
        x = torch.relu(self.b(torch.relu(self.a(x))))
        return self.d(torch.nn.functional.relu6(self.c(x)))


def test_integers_fp8_and_fewer_bits_mix(tmp_path):
    torch.manual_seed(0)
    config = fp8("e5m2").rule(path="b", weight=presets.int8(), input=presets.uint8())
    config = config.rule(path="d", input=fq.QuantSpec(format="e2m1"), weight=fq.QuantSpec(format="e3m2", axis=0))
    x = torch.randn(8, 16, 2, 2)
    model = fq.calibrate(fq.prepare(Mixed(), config, example=x), [x], progress=False).eval()
    fq.export_onnx(model, tmp_path / "m.onnx", x)
    found = fq.verify(model, tmp_path / "m.onnx", [x])
    assert found.ok, found
    assert [t.path for t in found.tensors] == ["a.input_quantizer", "b.input_quantizer", "c.input_quantizer"]
    assert found.skipped == {"d.input_quantizer": "the file rounds it in float: runtimes have no type with so few bits"}


def test_fp8_weights_between_integers_run(tmp_path):
    torch.manual_seed(0)
    layer = fq.LayerConfig(weight=presets.fp8_e4m3(axis=0), input=presets.uint8())
    x = torch.randn(4, 16, 2, 2)
    model = nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 4, 1))
    model = fq.calibrate(fq.prepare(model, fq.QuantConfig(default=layer), example=x), [x], progress=False).eval()
    fq.export_onnx(model, tmp_path / "m.onnx", x)
    found = fq.verify(model, tmp_path / "m.onnx", [x])
    assert found.ok, found
    assert found.kernels == {"0": "FusedConv", "2": "Conv"}


# --- positions and ties ---------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m3", "e3m2", "e2m1"])
def test_positions_count_the_values_of_a_format(format):
    spec = fq.QuantSpec(format=format)
    grid = torch.from_numpy(spec.float_format.grid())
    found = positions.positions(grid * 0.3, torch.tensor(0.3), spec)
    half = len(grid) // 2
    assert found.tolist() == list(range(-half, half + 1))
    assert torch.equal(positions.values_at(found, spec), grid)
    special = positions.positions(torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0]), torch.tensor(1.0), spec)
    assert special[1:].tolist() == [half, -half, 0]
    assert special[0].isnan()
    assert positions.values_at(special, spec)[0].isnan()


def test_tie_lies_between_neighbours_of_any_distance():
    spec = fq.QuantSpec(format="e2m1")
    grid = tracked.GridOf(torch.tensor(2.0), torch.tensor(0, dtype=torch.int32), spec)
    # The midpoints of 0 and 0.5, 4 and 6, -1.5 and -2, times the scale; then no midpoint, and codes two apart.
    x = torch.tensor([0.5, 10.0, -3.5, 9.0, 10.0])
    golden, other = torch.tensor([0.0, 6, -3, 6, 5]), torch.tensor([1.0, 7, -4, 7, 7])
    tolerance = torch.full((5,), 1e-6, dtype=torch.float64)
    assert explain.ties(x, grid, tolerance, golden, other).tolist() == [True, True, True, False, False]


def test_reciprocal_is_found_as_a_reason():
    spec = presets.fp8_e4m3()
    draw = np.random.default_rng(0)
    grid = spec.float_format.grid()
    middle = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    for _ in range(200):
        scale = torch.tensor(np.float32(draw.uniform(0.01, 1)))
        of = tracked.GridOf(scale, torch.tensor(0, dtype=torch.int32), spec)
        x = torch.from_numpy(middle) * scale
        golden = tracked.codes_of(x, of)
        other = positions.positions(x * (1 / scale), torch.tensor(1.0), spec)
        if not torch.equal(golden, other):
            assert explain.why_runtime(None, x, of, [], golden, other) == explain.RECIPROCAL
            assert explain.why_runtime(None, x, of, [], golden, golden + 5 * (golden != other)) == explain.UNKNOWN
            return
    raise AssertionError("no scale has a tie at which a reciprocal matters")
