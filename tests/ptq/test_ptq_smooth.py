"""`ptq.smooth`: the same function in float, with activations that are easier to quantize."""

import copy

import pytest

from fakequant.testing.assertions import assert_same_bits
from smooth_cases import (
    IMAGES,
    MODELS,
    TOKENS,
    assert_travels,
    assert_unchanged,
    each_model,
    encoder,
    failing,
    network,
    prepared,
    state,
)

torch = pytest.importorskip("torch")
nn = torch.nn
fq = pytest.importorskip("fakequant")
pytest.importorskip("fakequant.ptq")

CONFIGS = {
    "int8": fq.recipes.int8(),
    "dynamic": fq.recipes.int8_dynamic(),
    "weights only": fq.recipes.int4_weight_only(None),
    "observed weights": fq.QuantConfig(
        default=fq.LayerConfig(weight=fq.presets.int8(), input=fq.presets.uint8(), weight_observer=fq.observers.MSE())
    ),
}


@pytest.mark.parametrize(
    ("name", "config", "calibrated"),
    [
        ("encoder", "int8", True),
        ("encoder", "weights only", False),
        ("network", "int8", False),
        ("network", "dynamic", False),
        ("network", "dynamic", True),
        ("network", "observed weights", True),
    ],
)
def test_the_float_model_keeps_its_bits(name, config, calibrated):
    (make, data), config = MODELS[name], CONFIGS[config]
    model = make()
    expected = model(data[1])
    quantized = prepared(model, data, config, calibrated=calibrated)
    changes = fq.ptq.smooth(quantized, data, progress=False)
    assert changes.changed
    assert all(row.before is not None and row.after is not None for row in changes.layers if row.reason is None)
    assert_same_bits(expected, fq.unprepare(quantized).eval()(data[1]))


@each_model
def test_other_factors_keep_the_float_model_up_to_rounding(make, data):
    model = make()
    expected = model(data[1])
    quantized = prepared(model, data)
    fq.ptq.smooth(quantized, data, powers_of_two=False, progress=False)
    # Sums of at most 72 products, each with two factors that were rounded: about 72 * 2^-22 of the largest result.
    found = fq.unprepare(quantized).eval()(data[1])
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_table_of_an_encoder():
    quantized = prepared(encoder(), TOKENS)
    weights = {name: p.detach().clone() for name, p in quantized.named_parameters()}
    changes = fq.ptq.smooth(quantized, TOKENS, progress=False)
    assert [row.path for row in changes.layers] == ["q", "k", "v", "o", "gate", "up", "down"]
    assert changes.changed == ["q", "k", "v", "gate", "up", "down"]
    assert changes.layers[3].reason == "its input is a result of matmul"
    # q, k and v have one common factor per channel; o keeps its weight.
    ratios = [quantized.get_submodule(path).weight / weights[f"{path}.weight"] for path in "qkvo"]
    assert all(torch.equal(ratio, ratios[0]) for ratio in ratios[:3])
    assert torch.equal(ratios[3], torch.ones(8, 8))
    factors = ratios[0][0]
    assert torch.equal(quantized.norm1.weight, weights["norm1.weight"] / factors)
    assert torch.equal(quantized.norm1.bias, weights["norm1.bias"] / factors)
    # Channels of larger activations have larger factors.
    assert factors[weights["norm1.weight"].argmax()] > factors[weights["norm1.weight"].argmin()]


def test_a_batch_norm_that_is_folded_takes_the_factors():
    quantized = prepared(network(), IMAGES)
    first = quantized[0].weight.detach().clone(), quantized[1].weight.detach().clone()
    changes = fq.ptq.smooth(quantized, IMAGES, progress=False)
    assert changes.changed == ["3", "6", "11"]
    assert torch.equal(quantized[0].weight, first[0])
    assert not torch.equal(quantized[1].weight, first[1])


@pytest.mark.parametrize("alpha", [0.5, "search"])
def test_smoothing_outliers_helps(alpha):
    quantized = prepared(small(), TOKENS, fq.recipes.int8_dynamic())
    (row,) = fq.ptq.smooth(quantized, TOKENS, alpha=alpha, progress=False).layers
    assert row.after > row.before + 15


@pytest.mark.parametrize("config", ["int8", "weights only"])
def test_search_is_never_worse_on_the_data(config):
    quantized = prepared(encoder(), TOKENS, CONFIGS[config])
    before = fq.ptq.smooth(copy.deepcopy(quantized), TOKENS, progress=False)
    changes = fq.ptq.smooth(quantized, TOKENS, alpha="search", progress=False)
    for group in (["q", "k", "v"], ["gate", "up"], ["down"]):
        rows = [row for row in changes.layers if row.path in group]
        noise = [sum(10 ** (-getattr(row, at) / 10) for row in rows) for at in ("before", "after")]
        # The search adds up errors, and this adds up ratios: they agree where all layers of a group improve.
        assert noise[1] <= noise[0] * 1.05
    first, second = (found.layers[0].before for found in (before, changes))
    assert first == second
    kept = [row for row in changes.layers if row.reason and row.before is not None]
    assert all(row.before == row.after for row in kept)


def test_ranges_are_those_of_a_model_that_is_calibrated_after_smoothing():
    late = prepared(encoder(), TOKENS, calibrated=False)
    fq.ptq.smooth(late, TOKENS, progress=False)
    assert not fq.nn._model_quantizers.has_scale(late.q._fakequant.input_grid or late.q.input_quantizer)
    fq.calibrate(late, TOKENS, progress=False)
    early = prepared(encoder(), TOKENS)
    fq.ptq.smooth(early, TOKENS, progress=False)
    for x in TOKENS:
        assert_same_bits(late.eval()(x), early.eval()(x))


def test_ranges_of_other_activations_do_not_change():
    quantized = prepared(encoder(), TOKENS)
    before = {path: q.scale.clone() for path, q in fq.nn.named_quantizers(quantized)}
    fq.ptq.smooth(quantized, [TOKENS[0] * 3], progress=False)
    changed = {path for path, q in fq.nn.named_quantizers(quantized) if not torch.equal(q.scale, before[path])}
    layers = ("q", "k", "v", "gate", "up", "down")
    expected = {f"{layer}.{name}_quantizer" for layer in layers for name in ("input", "weight")}
    assert changed == expected | {"up.output_quantizer"}


def small():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)).eval()
    with torch.no_grad():
        model[0].weight[3] = 100.0
        model[1].weight[:, 3] /= 100
    return model


def test_learned_scales_start_again():
    model = small()
    expected = model(TOKENS[0])
    quantized = prepared(model, TOKENS, fq.recipes.lsq(4))
    scale = quantized[1].weight_quantizer.step_size
    before = scale.detach().clone()
    fq.ptq.smooth(quantized, TOKENS, progress=False)
    assert quantized[1].weight_quantizer.step_size is scale
    assert not torch.equal(scale, before)
    again = copy.deepcopy(quantized[1].weight_quantizer).initialize(quantized[1].weight.detach())
    assert_same_bits(again.scale, quantized[1].weight_quantizer.scale)
    assert_same_bits(expected, fq.unprepare(quantized).eval()(TOKENS[0]))


def test_frozen_and_fixed_ranges_are_left_alone():
    quantized = prepared(encoder(), TOKENS)
    quantized.q.weight_quantizer.frozen = True
    changes = {row.path: row.reason for row in fq.ptq.smooth(quantized, TOKENS, progress=False).layers}
    assert changes["q"] == changes["v"]
    assert "q.weight_quantizer is frozen" in changes["q"]
    assert changes["gate"] is None
    layer = fq.LayerConfig(
        weight=fq.presets.int8(), input=fq.presets.uint8(), activation_observer=fq.observers.Fixed(-4.0, 4.0)
    )
    quantized = prepared(encoder(), TOKENS, fq.QuantConfig(default=layer))
    assert not fq.ptq.smooth(quantized, TOKENS, progress=False).changed


@each_model
def test_smoothed_models_travel(make, data):
    quantized = prepared(make(), data)
    fq.ptq.smooth(quantized, data, progress=False)
    assert_travels(quantized, prepared(make(), data), data[0])


def test_exported_and_verified(tmp_path):
    quantized = prepared(small(), TOKENS, fq.recipes.int8(target="onnxruntime-x86"))
    fq.ptq.smooth(quantized, TOKENS, progress=False)
    fq.export_onnx(quantized, tmp_path / "model.onnx", TOKENS[0])
    assert fq.verify(quantized, tmp_path / "model.onnx", TOKENS).ok


# The data are read for the example, the statistics, the ranges and errors of the trials, and the new ranges.
@pytest.mark.parametrize(("name", "time"), [("encoder", 3), ("encoder", 5), ("network", 4), ("network", 5)])
def test_an_error_undoes_everything(name, time):
    make, data = MODELS[name]
    quantized = prepared(make(), data).train()
    before = state(quantized)
    with pytest.raises(RuntimeError, match="no more data"):
        fq.ptq.smooth(quantized, failing(data, time), progress=False)
    assert_unchanged(before, quantized)


def test_generators_and_labels():
    quantized = prepared(network(), IMAGES)
    expected = copy.deepcopy(quantized)
    fq.ptq.smooth(quantized, ((x, torch.zeros(2)) for x in IMAGES), progress=False)
    fq.ptq.smooth(expected, IMAGES, progress=False)
    assert_same_bits(expected(IMAGES[0]), quantized(IMAGES[0]))


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (ValueError, "from 0 to 1", dict(alpha=1.5)),
        (ValueError, "from 0 to 1", dict(alpha=True)),
        (ValueError, "from 0 to 1", dict(alpha="best")),
        (TypeError, "`powers_of_two` must be True or False", dict(powers_of_two=1)),
        (ValueError, "no batches", dict(data=[])),
        (TypeError, "must be batches", dict(data={"x": 1})),
        (TypeError, "must be batches", dict(data=lambda model: None)),
    ],
)
def test_bad_arguments(error, words, arguments):
    quantized = prepared(network(), IMAGES)
    before = state(quantized)
    with pytest.raises(error, match=words):
        fq.ptq.smooth(quantized, **{"data": IMAGES, "progress": False, **arguments})
    assert_unchanged(before, quantized)


def test_models_that_are_not_prepared():
    with pytest.raises(ValueError, match="not prepared"):
        fq.ptq.smooth(network(), IMAGES)
    with pytest.raises(TypeError, match="Module"):
        fq.ptq.smooth(3, IMAGES)
