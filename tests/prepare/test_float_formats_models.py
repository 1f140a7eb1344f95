"""Prepared models with float formats and block scales: widths, sizes, specs, biases, copies and training."""

import copy
import dataclasses
import pickle

import pytest

import fakequant as fq
from fakequant import LayerConfig, QuantConfig, QuantSpec, presets, recipes

torch = pytest.importorskip("torch")
nn = torch.nn
change_spec = pytest.importorskip("fakequant.nn._model_quantizers").change_spec
weight_bytes = pytest.importorskip("fakequant._prepare.bit_widths").weight_bytes

RECIPES = {
    "fp8": recipes.fp8(),
    "mxfp8": recipes.mxfp8(),
    "nvfp4": recipes.nvfp4(),
    "mxfp4_weight_only": recipes.mxfp4_weight_only(),
}
by_recipe = pytest.mark.parametrize("config", RECIPES.values(), ids=RECIPES)
X = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 3))


def ready(config, x=X):
    return fq.calibrate(fq.prepare(mlp(), config, x), [x], progress=False)


# --- widths of the first and the last layer --------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 16])
def test_first_last_bits_leave_float_formats_alone_and_the_summary_says_so(bits):
    model = ready(dataclasses.replace(recipes.nvfp4(), first_last_bits=bits))
    assert {str(layer.weight_quantizer.spec) for layer in model if isinstance(layer, nn.Linear)} == {
        "e2m1, per group of 16 on axis 1, scales e4m3fn"
    }
    notes = [note for note in fq.summary(model).notes if "first_last_bits" in note]
    assert [note.split(" ")[0] for note in notes] == [
        f"{layer}.{name}_quantizer" for layer in (0, 4) for name in ("weight", "input")
    ]
    assert "config.rule('0', weight=..., input=...)" in notes[0]


def test_no_note_if_formats_have_enough_bits():
    model = ready(dataclasses.replace(recipes.mxfp8(), first_last_bits=8))
    assert fq.summary(model).notes == []


def test_first_last_bits_widen_the_integers_beside_a_float_format():
    layer = LayerConfig(weight=QuantSpec(bits=4, axis=0), input=presets.fp8_e4m3())
    model = ready(QuantConfig(default=layer, first_last_bits=16))
    assert [model[k].weight_quantizer.spec.bits for k in (0, 2, 4)] == [16, 4, 16]
    assert model[0].input_quantizer.spec == presets.fp8_e4m3()


# --- sizes and specs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (presets.fp8_e4m3(axis=0), 40 * 64 + 4 * 64),
        (presets.fp8_e5m2(), 40 * 64 + 4),
        (presets.mxfp8(), 40 * 64 + 2 * 64),  # blocks of 32 and 8
        (presets.mxfp6(), 40 * 64 * 6 // 8 + 2 * 64),
        (presets.mxfp4(), 40 * 64 // 2 + 2 * 64),
        (presets.mxint8(), 40 * 64 + 2 * 64),
        (presets.nvfp4(), 40 * 64 // 2 + 3 * 64 + 4),  # blocks of 16, 16 and 8, and the scale above them
    ],
    ids=str,
)
def test_summary_counts_packed_codes_and_scales_of_few_bits(spec, expected):
    torch.manual_seed(0)
    model = fq.prepare(
        nn.Sequential(nn.Linear(40, 64, bias=False)), QuantConfig(default=LayerConfig(weight=spec)), torch.ones(1, 40)
    )
    found = fq.summary(model)
    assert found.bytes_after == expected
    assert str(spec).split(",")[0] in str(found)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (QuantSpec(), QuantSpec(format="e4m3fn")),
        (QuantSpec(format="e4m3fn"), QuantSpec(format="e5m2")),
        (QuantSpec(axis=-1, group_size=32), presets.mxint8()),
        (presets.mxfp4(), dataclasses.replace(presets.mxfp4(), scale_format="float32")),
    ],
    ids=str,
)
def test_a_quantizer_cannot_change_its_formats(before, after):
    quantizer = fq.nn.FakeQuantize(before, fq.observers.Dynamic(), shape=(4, 64))
    with pytest.raises(ValueError, match="formats, sign, symmetry and axes must stay"):
        change_spec(quantizer, after)
    assert quantizer.spec == before


def test_widths_cannot_be_searched_if_no_weight_is_an_integer():
    with pytest.raises(ValueError, match="widths of integer grids"):
        fq.sensitivity(mlp(), recipes.nvfp4(), data=[X], candidates=(2, 4), progress=False)


def test_a_search_of_widths_keeps_float_formats():
    config = recipes.int8().rule("2", weight=presets.mxfp4(), input=presets.mxfp8())
    found = fq.sensitivity(mlp(), config, data=[X], candidates=(4, 8), progress=False)
    costs = {layer.path: list(layer.costs) for layer in found.layers}
    assert costs == {"0": [4, 8], "2": [4], "4": [4, 8]}
    # All weights with 4 bits, and the scales: 64 and 3 of float32, and 2 blocks of 24 rows of e8m0.
    smallest = weight_bytes(40 * 64, 4, 64) + weight_bytes(64 * 24, 4, 48, "e8m0") + weight_bytes(24 * 3, 4, 3)
    chosen = found.suggest(bytes=smallest)
    assert {rule.path: rule.use.weight.format for rule in chosen.rules[:3]} == {"0": "int", "2": "e2m1", "4": "int"}
    with pytest.raises(ValueError, match="too small"):
        found.suggest(bytes=smallest - 1)


def test_sensitivity_without_candidates_ranks_layers_in_float_formats():
    found = fq.sensitivity(mlp(), recipes.nvfp4(), data=[X], progress=False)
    assert sorted(layer.path for layer in found.layers) == ["0", "2", "4"]
    assert all(layer.cost > 0 for layer in found.layers)


# --- configs, biases, copies, training -------------------------------------------------------------


@by_recipe
def test_configs_survive_json(config):
    assert QuantConfig.from_json(config.to_json()) == config


def test_biases_of_float_layers_are_not_rounded():
    model = ready(recipes.fp8()).eval()
    layer = model[0]
    weight = layer.weight_quantizer(layer.weight)
    x = layer.input_quantizer(X)
    assert torch.equal(layer(X), nn.functional.linear(x, weight, layer.bias))
    assert all(q.bias_error is None for q in fq.health(model, [X]).quantizers)


@by_recipe
def test_a_model_trains_and_travels_with_every_bit(config):
    model = ready(config).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    target = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(X) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    y = model.eval()(X)
    loaded = fq.prepare(mlp(), config, X)
    loaded.load_state_dict(model.state_dict())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded.eval()):
        assert torch.equal(other(X), y)


@by_recipe
def test_a_schedule_and_a_teacher_work_with_float_formats(config):
    model = ready(config).train()
    distillation = fq.distill(model, outputs="mse", layers=["0"])
    schedule = fq.Schedule(model, quantize_from=1, freeze_ranges_at=2)
    losses = []
    for _ in range(3):
        loss = distillation(model(X), X)
        loss.backward()
        losses.append(loss.item())
        schedule.step()
    assert losses[0] == pytest.approx(0, abs=1e-9)  # the quantizers are off at first
    assert losses[1] > 1e-7
    assert all(q.frozen for _, q in fq.nn.named_quantizers(model))
    # Scales that follow the blocks of an input cannot be frozen: it stores none.
    y = model.eval()(X)
    assert torch.equal(y, copy.deepcopy(model)(X))
    assert bool(y.isfinite().all())


def test_operands_of_additions_are_quantized_to_fp8():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(40, 8), nn.Linear(40, 8)

        def forward(self, x):
            return self.a(x) + self.b(x)

    torch.manual_seed(0)
    model = fq.calibrate(fq.prepare(Sum(), recipes.fp8(), X), [X], progress=False).eval()
    assert {str(layer.output_quantizer.spec) for layer in (model.a, model.b)} == {"e4m3fn, per tensor"}
    a = model.a(X)
    scale = model.a.output_quantizer.scale
    assert torch.equal(a, (a / scale).to(torch.float8_e4m3fn).float() * scale)
