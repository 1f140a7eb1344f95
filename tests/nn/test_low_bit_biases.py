"""Biases of low-bit layers: a finer scale by shifted codes, rounding in training, and its measured error."""

import copy
import math

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
nn = torch.nn
recipes = pytest.importorskip("fakequant.recipes")
weight_shift = pytest.importorskip("fakequant._runtimes.target").weight_shift
integer = pytest.importorskip("fakequant._convert.golden.integer_layer")

X86 = "onnxruntime-x86"
SHIFTS = {2: 5, 3: 4, 4: 3, 5: 2, 6: 1, 7: 0, 8: 0}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def net(bits, target=X86, bias=False):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=bias), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5)
    )
    with torch.no_grad():
        for values in (model[1].running_mean, model[1].bias, model[1].weight):
            values.copy_(randn(8, seed=values.numel()).abs() + 0.1)
    config = recipes.lsq(bits, target=target, first_last_bits=None)
    return fq.calibrate(fq.prepare(model, config, randn(16, 3, 8, 8)), [randn(16, 3, 8, 8)], progress=False)


@pytest.mark.parametrize(("bits", "shift"), SHIFTS.items())
def test_weight_shift_is_the_largest_with_exact_sums_on_every_cpu(bits, shift):
    spec = fq.QuantSpec(bits=bits, axis=0)
    assert weight_shift(spec) == shift
    assert spec.qmin * 2**shift >= -64 or shift == 0
    assert spec.qmax * 2**shift < 64 or shift == 0
    assert weight_shift(fq.QuantSpec(bits=bits, signed=False, symmetric=False)) == 0
    assert weight_shift(fq.QuantSpec(bits=bits, axis=1, group_size=2)) == 0


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_shifted_codes_represent_the_same_weights(bits):
    model = net(bits)
    golden = fq.convert(model)
    for path in ("3", "5"):
        layer, made = model.get_submodule(path), golden.get_submodule(path)
        assert made._fakequant.weight_shift == SHIFTS[bits]
        assert_same_bits(fq.nn.quantized_weight(layer), integer.float_weight(made), path)
        levels = integer.weight_levels(made)
        scale = made.weight_scale.reshape(-1, *[1] * (levels.dim() - 1))
        assert_same_bits(integer.float_weight(made), (levels * scale), path)
        assert torch.equal(levels % 2 ** SHIFTS[bits], torch.zeros_like(levels))
        step = made.weight_scale * layer.input_quantizer.scale
        error = (layer.bias.detach().double() / step.double() - made.bias_codes).abs()
        assert error.max() <= 0.5 + 1e-9
    own = model[3].weight_quantizer.scale
    assert torch.equal(golden[3].weight_scale * 2 ** SHIFTS[bits], own)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_prepared_model_has_the_biases_of_the_golden_model(bits):
    """Integer and float sums are equal up to the order of additions."""
    model, x = net(bits).eval(), randn(32, 3, 8, 8, seed=5)
    expected, found = fq.convert(model)(x), model(x)
    assert (expected - found).abs().max() < 1e-4 * expected.abs().max()


def test_converting_for_another_target_keeps_the_shift_both_allow():
    golden = fq.convert(net(2, target=X86), target="generic")
    assert golden[3]._fakequant.weight_shift == 5


def test_saved_models_keep_the_weight_shift(tmp_path):
    pytest.importorskip("safetensors")
    golden = fq.convert(net(2))
    fq.save_converted(golden, tmp_path / "model.safetensors")
    torch.manual_seed(1)
    fresh = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(64, 5)
    )
    loaded = fq.load_converted(fresh, tmp_path / "model.safetensors")
    assert loaded[3]._fakequant.weight_shift == 5
    x = randn(4, 3, 8, 8)
    assert torch.equal(loaded(x), golden(x))


def test_onnx_files_hold_shifted_codes_that_verify(tmp_path):
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    for target in (X86, "generic"):
        model, x = net(2, target).eval(), randn(32, 3, 8, 8, seed=5)
        fq.export_onnx(model, tmp_path / "m.onnx", x[:1])
        stored = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
        assert stored["3.weight_codes"].dtype == "int8"
        assert set(abs(stored["3.weight_codes"].ravel())) <= {0, 32, 64}
        found = fq.verify(model, tmp_path / "m.onnx", [x])
        assert found.ok
        assert sum(t.runtime_differ for t in found.tensors) == 0
        assert found.floats == {}


# --- training ---------------------------------------------------------------------------------------------


def frozen(model):
    return fq.Schedule(model, freeze_ranges_at=0, freeze_norms_at=0)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_training_and_evaluation_agree_with_frozen_batch_norms(bias):
    model, x = net(2, bias=bias), randn(32, 3, 8, 8, seed=5)
    before = model.train()(x)
    frozen(model)
    with torch.no_grad():
        assert torch.equal(model.train()(x), model.eval()(x))
        assert not torch.equal(model.train()(x), before)


def test_training_and_evaluation_agree_with_frozen_ranges_if_there_is_no_batch_norm():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), randn(16, 8)
    config = recipes.lsq(2, first_last_bits=None)
    model = fq.calibrate(fq.prepare(model, config, x), [x], progress=False)
    assert not torch.equal(model.train()(x), model.eval()(x))
    schedule = fq.Schedule(model, freeze_ranges_at=1)
    assert not torch.equal(model.train()(x), model.eval()(x))
    schedule.step()
    assert torch.equal(model.train()(x), model.eval()(x))
    for other in (copy.deepcopy(model), torch.load(saved(model), weights_only=False)):
        assert torch.equal(other.train()(x), model.eval()(x))
    fresh = fq.prepare(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), config, torch.ones(1, 8))
    fresh.load_state_dict(model.state_dict())
    resumed = fq.Schedule(fresh, freeze_ranges_at=1)
    resumed.load_state_dict(schedule.state_dict())
    assert torch.equal(fresh.train()(x), model.eval()(x))
    fq.Schedule(model, freeze_ranges_at=1)  # a new training run
    assert not model[0]._fakequant.deploys_bias


def saved(model):
    import io

    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


def test_batch_norm_frozen_by_the_user_rounds_the_bias_too():
    model, x = net(2), randn(32, 3, 8, 8, seed=5)
    model.train()
    model[1].eval()
    first = fq.nn.compute(model[0], model[0]._conv_forward, x)
    assert torch.equal(first, fq.nn.compute(model.eval()[0], model[0]._conv_forward, x))


def test_bias_rounding_passes_the_gradient():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 4)), randn(16, 8)
    model = fq.calibrate(fq.prepare(model, recipes.lsq(2), x), [x], progress=False)
    expected = {}
    for freeze in (False, True):
        if freeze:
            frozen(model)
        model.zero_grad()
        (model.train()(x) * randn(16, 4, seed=3)).sum().backward()
        expected[freeze] = model[0].bias.grad.clone()
    assert torch.equal(expected[False], expected[True])


# --- measured error -----------------------------------------------------------------------------------------


def test_health_reports_the_bias_error_in_standard_deviations():
    model = net(2)
    found = fq.health(model).to_dict()
    golden = fq.convert(model)
    norm, made = model[1], golden[0]
    gamma, beta = norm.weight.detach().double(), norm.bias.detach().double()
    factor = gamma / (norm.running_var.double() + norm.eps).sqrt()
    exact = beta - norm.running_mean.double() * factor
    change = made.bias_codes.double() * integer.bias_scales(made)[0].double() - exact
    expected = float((change / gamma).square().mean().sqrt())
    assert found["0.weight_quantizer"]["bias_error"] == pytest.approx(expected, rel=1e-6)
    assert found["3.weight_quantizer"]["bias_error"] is None  # without a batch norm, the size of a channel is unknown
    assert found["0.input_quantizer"]["bias_error"] is None
    assert "bias error" in str(fq.health(model))


@pytest.mark.parametrize(("shape", "is_known"), [((16, 8), True), ((4, 16, 8), False)], ids=["vectors", "tokens"])
def test_health_reports_no_bias_error_behind_a_batch_norm_over_tokens(shape, is_known):
    x = randn(*shape)
    model = fq.prepare(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16)), recipes.int8(), x)
    found = fq.health(fq.calibrate(model, [x], progress=False)).to_dict()
    assert (found["0.weight_quantizer"]["bias_error"] is not None) == is_known


def test_compare_reports_the_sqnr_of_the_bias_rounding():
    model, x = net(2), randn(16, 3, 8, 8)
    float_model = fq.unprepare(copy.deepcopy(model))
    found = {layer.path: layer for layer in fq.compare(float_model, model, [x], progress=False).layers}
    y = float_model.eval()[:4](x).detach().double()
    golden = fq.convert(model)
    change = (
        golden[3].bias_codes.double() * integer.bias_scales(golden[3])[0].double() - model[3].bias.detach().double()
    )
    expected = 10 * math.log10(float(y.square().mean()) / float(change.square().mean()))
    assert found["3"].bias_sqnr == pytest.approx(expected, rel=1e-6)
    converted = fq.compare(float_model, golden, [x], progress=False)
    assert all(layer.bias_sqnr is None for layer in converted.layers)
    assert "bias dB" in str(converted)
