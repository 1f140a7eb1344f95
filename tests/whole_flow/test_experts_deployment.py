"""Converted and exported experts, and their diagnosis."""

import copy
import dataclasses
import pickle

import pytest

import fakequant as fq
from expert_cases import (
    CONFIGS,
    EXPERTS,
    INNER,
    LAYERS,
    TOP_K,
    WIDTH,
    X86,
    Experts,
    Mixture,
    calibrated,
    each_config,
    each_layer,
    fqnn,
    names,
    nn,
    recipes,
    routed,
    torch,
)
from fakequant.testing.assertions import assert_same_bits, assert_same_state
from prepare_cases import randn
from thoroughness import ALL, sampled


@torch.no_grad()
@each_layer
@each_config
def test_converted_model_computes_the_prepared_one_without_float_weights(options, config, tmp_path):
    pytest.importorskip("safetensors")
    x = randn(40, WIDTH)
    model = calibrated(Mixture(**options), config)
    golden = fq.convert(model)
    # A dynamic scale is computed from floats, which rounding changes, so codes may be one step apart.
    tolerance = 1e-2 if config is CONFIGS["int8_dynamic"] else 1e-5
    torch.testing.assert_close(golden(x), model(x), rtol=tolerance, atol=tolerance)
    for name in names(options):
        part = golden.experts.get_submodule(name)
        if isinstance(part, fqnn.QuantizedLayer) and part._fakequant.weight_spec is not None:
            parameter = name.replace("product", "proj")
            assert parameter not in golden.experts._parameters
            assert f"{parameter}_bias" not in golden.experts._parameters
            assert_same_bits(fqnn.quantized_weight(model.experts.get_submodule(name)), part.weight)
    fq.save_converted(golden, tmp_path / "model.safetensors")
    fresh = Mixture(**options)
    for parameter in fresh.parameters():
        parameter.zero_()
    loaded = fq.load_converted(fresh, tmp_path / "model.safetensors")
    assert_same_state(dict(sorted(golden.state_dict().items())), dict(sorted(loaded.state_dict().items())))
    for other in (loaded, copy.deepcopy(golden), pickle.loads(pickle.dumps(golden))):
        assert_same_bits(golden(x), other(x))


def test_file_of_other_experts_leaves_the_model_unchanged(tmp_path):
    pytest.importorskip("safetensors")
    fq.save_converted(fq.convert(calibrated(Mixture())), tmp_path / "model.safetensors")
    other = nn.ModuleDict({"experts": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="'experts' is Experts in the file but Linear in the model"):
        fq.load_converted(other, tmp_path / "model.safetensors")
    assert type(other["experts"]) is nn.Linear
    other = Mixture(has_gate=False)
    with pytest.raises(ValueError, match="gate_up_product"):
        fq.load_converted(other, tmp_path / "model.safetensors")
    assert type(other.experts) is Experts


@torch.no_grad()
def test_converted_products_are_exact_sums_of_codes():
    model = calibrated(Mixture(has_bias=True))
    golden = fq.convert(model)
    part = golden.experts.gate_up_product
    x, index, _ = routed()
    groups, order = fqnn._experts.sorted_by_expert(index.flatten(), EXPERTS)
    y = part(x[order // TOP_K], groups)
    grid = part.input_quantizer
    codes = (
        (x[order // TOP_K].double() / grid.scale.double())
        .round()
        .long()
        .clamp(0 - grid.zero_point, 255 - grid.zero_point)
    )
    weight = part.weight_codes.long().unflatten(0, (EXPERTS, -1)) * 2**part._fakequant.weight_shift
    scale = (grid.scale * part.weight_scale).unflatten(0, (EXPERTS, -1))
    for row, expert in enumerate(groups.experts):
        sums = weight[expert] @ codes[row] + part.bias_codes.unflatten(0, (EXPERTS, -1))[expert]
        assert_same_bits(sums.float() * scale[expert], y[row])


@pytest.mark.parametrize("name", sampled(LAYERS, "no gate", "gate, bias, transposed"))
def test_exported_file_has_integer_kernels_and_the_same_codes(name, tmp_path):
    pytest.importorskip("onnxruntime")
    options = LAYERS[name]
    model = calibrated(Mixture(idle=1, **options))
    fq.export_onnx(model, tmp_path / "model.onnx", randn(5, WIDTH))
    # One token reaches two of the experts only.
    found = fq.verify(model, tmp_path / "model.onnx", [randn(40, WIDTH, seed=2), randn(1, WIDTH, seed=3)])
    assert found.ok, found.problem
    layers = ["router", *(f"experts.{name}" for name in names(options)), "head"]
    assert found.kernels == dict.fromkeys(layers, "QGemm")
    rows = {t.path: t.codes for t in found.tensors}
    assert rows[f"experts.{names(options)[0]}.input_quantizer"] == 41 * TOP_K * WIDTH
    assert rows["experts.down_product.input_quantizer"] == 41 * TOP_K * INNER
    assert found.integer_multiplications == found.multiplications


EXPORTED = ["one product in float"] + (["int8_dynamic", "int4_weight_only", "int8", "input only"] if ALL else [])


@pytest.mark.parametrize("name", EXPORTED)
def test_other_configs_export_too(name, tmp_path):
    pytest.importorskip("onnxruntime")
    model = calibrated(Mixture(has_bias=True), CONFIGS[name])
    fq.export_onnx(model, tmp_path / "model.onnx", randn(5, WIDTH))
    found = fq.verify(model, tmp_path / "model.onnx", [randn(40, WIDTH, seed=2)])
    assert found.ok, found.problem


class Large(nn.Module):
    """Experts whose sums of products in float are rounded. Their result is that of the model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 128, 64) / 3)
        self.experts.down_proj = nn.Parameter(torch.randn(EXPERTS, 64, 64) / 3)

    def forward(self, x):
        index = torch.arange(len(x)).reshape(-1, 1) % EXPERTS
        return self.experts(x, index, torch.ones(len(x), 1))


def test_rounding_of_the_float_products_is_explained(tmp_path):
    pytest.importorskip("onnxruntime")
    x = randn(64, 64)
    model = calibrated(Large(), dataclasses.replace(X86, sums="float"), x=x)
    fq.export_onnx(model, tmp_path / "model.onnx", x, dynamic_batch=False)
    found = fq.verify(model, tmp_path / "model.onnx", [x])
    assert not torch.equal(model(x), fq.convert(model)(x))
    assert found.ok, found.problem


@pytest.fixture(scope="module")
def file(folder):
    """A file of experts without biases."""
    pytest.importorskip("onnxruntime")
    fq.export_onnx(calibrated(Mixture()), folder / "model.onnx", randn(5, WIDTH))
    return folder / "model.onnx"


def test_file_of_another_model_is_refused(file):
    model = calibrated(Mixture())
    with torch.no_grad():
        model.experts.down_proj[3].neg_()
    with pytest.raises(ValueError, match=r"experts.down_product.weight\[3\]_codes is different"):
        fq.verify(model, file, [randn(5, WIDTH)])


def test_kernel_of_every_expert_is_looked_at(file, tmp_path):
    """The file is changed so that one expert multiplies floats."""
    onnx = pytest.importorskip("onnx")
    from fakequant._runtimes.onnxruntime.session import OnnxRuntimeSession

    file = onnx.load(file)
    weight = "experts.down_product.weight[2]_dequantized"
    node = onnx.helper.make_node("Abs", [weight], ["apart"])
    for number, other in enumerate(file.graph.node):
        if weight in other.input:
            other.input[list(other.input).index(weight)] = "apart"
            file.graph.node.insert(number, node)
            break
    onnx.save(file, tmp_path / "model.onnx")
    kernels = OnnxRuntimeSession(tmp_path / "model.onnx").kernels
    assert kernels["experts.gate_up_product"] == "QGemm"
    assert kernels["experts.down_product"] not in ("QGemm", "MatMulIntegerToFloat")


# --- diagnosis --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_converted", [False, True], ids=["prepared", "converted"])
def test_compare_has_a_row_for_every_product_and_restores_the_float_model(is_converted):
    floats, x = Mixture(has_bias=True), randn(40, WIDTH)
    model = calibrated(copy.deepcopy(floats))
    found = fq.compare(floats, fq.convert(model) if is_converted else model, [x], progress=False)
    assert [layer.path for layer in found.layers] == [
        "router", "experts.gate_up_product", "experts.down_product", "head",
    ]  # fmt: skip
    assert all(20 < layer.isolated.sqnr < 80 for layer in found.layers)
    assert type(floats.experts) is Experts
    assert [name for name, _ in floats.experts.named_children()] == ["act_fn"]


def test_sensitivity_names_products_that_a_config_can_leave_out():
    floats, x = Mixture(), randn(40, WIDTH)
    y = floats(x)

    def evaluate(model):
        return -float((model(x) - y).square().mean())

    found = fq.sensitivity(floats, recipes.int8(), evaluate, data=[x], progress=False)
    assert sorted(layer.path for layer in found.layers) == [
        "experts.down_product", "experts.gate_up_product", "head", "router",
    ]  # fmt: skip
    model = fq.prepare(copy.deepcopy(floats), found.suggest(keep=3), x)
    assert [row.path for row in fq.summary(model).layers] == [found.layers[-1].path]


def test_health_and_check_see_the_products():
    model, x = calibrated(Mixture()), randn(40, WIDTH)
    found = fq.health(model, [x]).to_dict()
    for name in names({}):
        assert 0 < found[f"experts.{name}.input_quantizer"]["levels_used"] <= 1
        assert found[f"experts.{name}.weight_quantizer"]["levels_used"] > 0
    pytest.importorskip("onnxruntime")
    done = fq.check(Mixture(has_bias=True, is_transposed=True), x)
    assert done.ok, str(done)
    assert done.float_kernels == {}
