"""`export_onnx` in float formats: the types of each opset, and the bits of dequantized weights and of activations."""

import numpy as np
import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits
from float_format_cases import BLOCKS, fp8

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")
reference = pytest.importorskip("onnx.reference")
dynamic_formats = pytest.importorskip("fakequant._export.onnx.formats")
grids = pytest.importorskip("fakequant._convert.golden.quantizer")
nn = torch.nn

WIDTH = 40  # the last block is shorter
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
FP8 = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")


class Many(nn.Module):
    """One layer per config, side by side, so that one export tests them all."""

    def __init__(self, names, outputs):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(WIDTH, outputs, bias=outputs != WIDTH) for name in names})

    def forward(self, x):
        return tuple(layer(x) for layer in self.layers.values())


def exported(layers, path, *, opset=21, outputs=6, change=lambda model: None):
    """Returns a prepared model with one layer per config, by name, and its golden model. Writes the file."""
    torch.manual_seed(0)
    model = Many(layers, outputs)
    change(model)
    config = fq.QuantConfig(default=fq.LayerConfig())
    for name, layer in layers.items():
        config = config.rule(path=f"layers.{name}", weight=layer.weight, input=layer.input)
    model = fq.calibrate(fq.prepare(model, config, example=X), [X], progress=False).eval()
    fq.export_onnx(model, path, X, opset=opset)
    return model, fq.convert(model)


def weight_only(name):
    return fq.LayerConfig(weight=BLOCKS[name].default.weight)


def with_outputs(path, names):
    model = onnx.load(path)
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    return model


def run_in_onnxruntime(path, names=()):
    session = ort.InferenceSession(with_outputs(path, names).SerializeToString())
    return session.run(None, {session.get_inputs()[0].name: X.numpy()})


def run_in_reference(path, names=()):
    session = reference.ReferenceEvaluator(with_outputs(path, names))
    return session.run(None, {session.input_names[0]: X.numpy()})


def types_of(path):
    graph = onnx.load(path).graph
    return {t.name: onnx.TensorProto.DataType.Name(t.data_type) for t in graph.initializer}


def require_same_weights(run, path, golden):
    """Compares dequantized weights bit by bit, and results up to the order of 40 additions."""
    names = [f"layers.{name}.weight_dequantized" for name in golden.layers]
    found = run(path, names)
    results, weights = found[: len(names)], found[len(names) :]
    for layer, weight, y, expected in zip(golden.layers.values(), weights, results, golden(X), strict=True):
        assert_same_bits(layer.weight, weight, str(layer._fakequant.weight_spec))
        np.testing.assert_allclose(y, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_fp8_weights_and_inputs_have_their_types(tmp_path):
    path = tmp_path / "m.onnx"
    model, golden = exported({format: fp8(format).default for format in FP8}, path, opset=19)
    for format in FP8:
        kind, start = f"FLOAT8{format.upper()}", f"layers.{format}"
        assert types_of(path)[f"{start}.weight_codes"] == kind
        assert types_of(path)[f"{start}.input_quantizer_zero_point"] == kind
    quantized = [node for node in onnx.load(path).graph.node if node.op_type == "QuantizeLinear"]
    assert len(quantized) == len(FP8)
    assert all([a.i for a in node.attribute if a.name == "saturate"] == [1] for node in quantized)
    require_same_weights(run_in_onnxruntime, path, golden)
    names = [f"layers.{format}.input_quantizer_dequantized" for format in FP8]
    for layer, x in zip(model.layers.values(), run_in_onnxruntime(path, names)[len(FP8) :], strict=True):
        assert_same_bits(layer.input_quantizer(X), x)


# By config: the types of codes up to opset 22, which ONNX Runtime runs, and in opset 24.
TYPES = {
    "mxfp8": ("FLOAT8E4M3FN", "FLOAT8E4M3FN"),
    "mxfp8 e5m2 rceil": ("FLOAT8E5M2", "FLOAT8E5M2"),
    "mxfp6": ("FLOAT8E4M3FN", "FLOAT8E4M3FN"),
    "mxfp6 e3m2 ceil": ("FLOAT8E4M3FN", "FLOAT8E4M3FN"),
    "mxfp4": ("FLOAT8E4M3FN", "FLOAT4E2M1"),
    "mxint8": ("INT8", "INT8"),
    "nvfp4": ("FLOAT8E4M3FN", "FLOAT4E2M1"),
}
WEIGHTS = {name: weight_only(name) for name in TYPES}


def test_blocks_of_the_default_opset_run_in_onnxruntime(tmp_path):
    path = tmp_path / "m.onnx"
    _, golden = exported(WEIGHTS, path)
    for name, (codes, _) in TYPES.items():
        assert types_of(path)[f"layers.{name}.weight_codes"] == codes
        assert types_of(path)[f"layers.{name}.weight_scale"] == "FLOAT"
    require_same_weights(run_in_onnxruntime, path, golden)


def test_blocks_have_the_types_of_opset_24(tmp_path):
    path = tmp_path / "m.onnx"
    model, golden = exported(WEIGHTS, path, opset=24)
    found = types_of(path)
    for name, (_, codes) in TYPES.items():
        start = f"layers.{name}.weight"
        assert found[f"{start}_codes"] == codes
        if name == "nvfp4":
            assert (found[f"{start}_block_scale"], found[f"{start}_tensor_scale"]) == ("FLOAT8E4M3FN", "FLOAT")
            assert f"{start}_scale" not in found
        else:
            assert found[f"{start}_scale"] == "FLOAT8E8M0"
    require_same_weights(run_in_reference, path, golden)
    with pytest.raises(ValueError, match=r"FP4 codes or E8M0 scales(.|\n)*opset=21 or 22"):
        fq.verify(model, path, [X])


def test_opset_23_has_fp4_but_no_e8m0(tmp_path):
    path = tmp_path / "m.onnx"
    _, golden = exported({"mxfp4": weight_only("mxfp4")}, path, opset=23)
    found = types_of(path)
    assert (found["layers.mxfp4.weight_codes"], found["layers.mxfp4.weight_scale"]) == ("FLOAT4E2M1", "FLOAT")
    require_same_weights(run_in_reference, path, golden)


def set_identity(model):
    with torch.no_grad():
        for layer in model.layers.values():
            layer.weight.copy_(torch.eye(WIDTH))


def test_file_computes_the_blocks_of_its_inputs(tmp_path):
    """The weight is the identity, so the results are the quantized inputs."""
    names = ("mxfp8", "mxfp6 e3m2 ceil", "mxfp4", "mxint8", "nvfp4")
    path = tmp_path / "m.onnx"
    model, _ = exported({n: BLOCKS[n].default for n in names}, path, outputs=WIDTH, change=set_identity)
    for layer, found in zip(model.layers.values(), run_in_onnxruntime(path), strict=True):
        wanted = layer.input_quantizer(X)
        assert torch.equal(fq.nn.quantized_weight(layer), torch.eye(WIDTH))
        assert not torch.equal(wanted, X)
        assert torch.equal(torch.from_numpy(found), wanted)  # but for the sign of 0, which sums lose


SPECS = {
    str(spec): spec
    for spec in (
        *(presets.mxfp8(scale_rule=rule) for rule in ("floor", "ceil", "even", "rceil", "even_e2m1")),
        *(presets.mxfp4(scale_rule=rule) for rule in ("floor", "ceil", "even", "rceil")),
        *(presets.mxint8(scale_rule=rule) for rule in ("floor", "ceil", "even", "rceil")),
        presets.mxfp8(format="e5m2", axis=0),
        presets.mxfp6(format="e2m3", scale_rule="even"),
        presets.mxfp6(format="e3m2", scale_rule="rceil"),
        presets.nvfp4(),
        presets.nvfp4(axis=1),
        presets.fp8_e4m3(),
        fq.QuantSpec(format="e2m1", axis=-1, group_size=-1),
        fq.QuantSpec(format="e3m2"),
    )
}


def edges(size):
    """Returns values near powers of two, near the ends of formats, and special values."""
    draw = torch.Generator().manual_seed(size)
    exponents = torch.randint(-12, 12, (64, 96), generator=draw).float()
    mantissas = torch.tensor([1, 1 + 2**-23, 1.25, 1.5, 1.75, 1.875, 1.9375, 1.96875, 2 - 2**-23])
    x = torch.exp2(exponents) * mantissas[torch.randint(0, len(mantissas), (64, 96), generator=draw)]
    x = x * torch.where(torch.rand(x.shape, generator=draw) < 0.5, -1.0, 1.0)
    x[:, :32] *= 2.0**-10  # blocks of other magnitudes
    x[0], x[1], x[2, 3], x[3, 4], x[4, 5] = 0, -0.0, torch.inf, -torch.inf, torch.nan
    return x


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_exported_operations_have_the_bits_of_the_golden_grid(spec):
    scales = (1.0, 2.0**-20, 2.0**100) if spec.scale_format == "e4m3fn" else (1.0, 2.0**-128, 2.0**-100, 2.0**100)
    grid = grids.GoldenQuantizer(spec, None, None)
    for x in [edges(0) * scale for scale in scales] + [torch.randn(8, 80), torch.randn(3, 5), torch.zeros(2, 32)]:
        expected, found = grid(x), dynamic_formats.dynamic_format_grid(x, spec, grid.eps, "grid")
        assert_same_bits(expected.nan_to_num(7e7), found.nan_to_num(7e7), str(x.shape))
        assert torch.equal(expected.isnan(), found.isnan())


@pytest.mark.parametrize(
    ("layer", "opset", "words"),
    [
        (fp8("e4m3fn").default, 18, "FP8 needs opset 19, got opset 18"),
        (weight_only("mxfp8"), 20, "weight: scales per block need opset 21, got opset 20"),
    ],
)
def test_nothing_is_exported_below_the_first_opset_of_a_type(layer, opset, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        exported({"a": layer}, tmp_path / "m.onnx", opset=opset)
    assert list(tmp_path.iterdir()) == []


def test_runtimes_of_integers_refuse_float_formats(tmp_path):
    model = fq.prepare(nn.Sequential(nn.Linear(WIDTH, 6)), fq.recipes.mxfp4_weight_only())
    for target in ("openvino", "onnxruntime-x86", "xnnpack"):
        with pytest.raises(ValueError, match=r"compute with integers(.|\n)*export_onnx with target='generic'"):
            fq.export_onnx(model, tmp_path / "m.onnx", X, target=target)
    assert list(tmp_path.iterdir()) == []
