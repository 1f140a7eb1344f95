"""`summary` and `health` of prepared models."""

import dataclasses

import pytest

import fakequant as fq
from fakequant import recipes

torch = pytest.importorskip("torch")
nn = torch.nn


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.relu = nn.ReLU()
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        x = self.relu(x + self.norm(self.conv(x)))
        return self.head(x.mean((2, 3)))


def test_summary_lists_quantized_float_and_unmatched_modules():
    with pytest.warns(UserWarning, match=r"rule\('heads\.\*'\); near: head"):
        model = fq.prepare(
            Residual(), recipes.int8().skip("head").rule("heads.*", weight=fq.presets.int4()), torch.ones(1, 3, 8, 8)
        )
    found = fq.summary(model)
    assert [(layer.path, layer.kind) for layer in found.layers] == [
        ("conv", "Conv2d"),
        ("norm", "BatchNorm2d"),
        ("relu", "ReLU"),
    ]
    assert found.layers[1].output == "uint8, per tensor"
    assert found.floats["head"] == "the config says so"
    assert [near for _, near in found.unmatched] == [["head"]]
    assert "head" in str(found)
    assert found.to_dict()["parameters"] == sum(p.numel() for p in Residual().parameters())


def test_summary_opens_with_the_shares_that_are_quantized():
    x = torch.ones(2, 3, 4, 4)
    config = recipes.int8().skip("head")
    found = fq.summary(fq.prepare(Residual(), config, x))
    assert found.multiplications == 2 * (3 * 16 * 27 + 3 * 2)
    assert found.quantized_multiplications == 2 * 3 * 16 * 27
    assert found.quantized_parameters == 3 * 27
    assert found.parameters == 3 * 27 + 3 + 6 + 3 * 2 + 2
    assert str(found).startswith("quantized: 99.5% of 2,604 multiplications, 82.7% of 98 parameters\n\n")
    without = fq.summary(fq.prepare(Residual(), dataclasses.replace(config, operands=None)))
    assert without.multiplications == 0
    assert str(without).startswith("quantized: 82.7% of 98 parameters\n\n")
    assert found.to_dict()["quantized_parameters"] == 81


def test_summary_counts_a_shared_weight_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    found = fq.summary(fq.prepare(model, recipes.int8(), torch.ones(1, 4)))
    assert (found.parameters, found.quantized_parameters) == (24, 16)


def test_summary_bytes_count_codes_and_scales():
    model = fq.prepare(nn.Sequential(nn.Linear(64, 10, bias=False)), recipes.int4_weight_only(32))
    found = fq.summary(model)
    assert found.bytes_before == 4 * 640
    assert found.bytes_after == 640 // 2 + 4 * 20


def test_summary_bytes_count_codes_instead_of_what_weights_are_computed_from():
    normed = [nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False)) for _ in range(2)]
    found = fq.summary(fq.prepare(nn.Sequential(*normed), recipes.int4_weight_only(4)))
    assert found.bytes_before == 2 * 4 * (16 + 4)
    assert found.bytes_after == 2 * (16 // 2 + 4 * 4)


def test_summary_does_not_count_learned_scales_as_parameters():
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4)), recipes.lsq(4), torch.ones(1, 4))
    found = fq.summary(model)
    assert found.parameters == 20
    assert "learned" in found.layers[0].weight


def test_summary_refuses_a_model_that_is_not_prepared():
    with pytest.raises(ValueError, match="not prepared"):
        fq.summary(nn.Linear(2, 2))


def calibrated(config=None):
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(4, 8)), config or recipes.int8(), torch.linspace(0, 1, 12).reshape(3, 4))
    return fq.calibrate(model, [torch.linspace(0, 1, 12).reshape(3, 4)], progress=False)


def test_health_counts_clipped_values_and_used_codes_exactly():
    model = calibrated()
    x = torch.tensor([[0.0, 0.5, 1.0, 3.0]])
    found = fq.health(model, [x, -x]).to_dict()["0.input_quantizer"]
    assert found["clipped"] == 4 / 8  # 3, -0.5, -1, -3
    assert found["levels_used"] == 3 / 256
    assert fq.health(model).to_dict()["0.input_quantizer"]["clipped"] is None


def test_history_measures_drift_since_the_last_measurement():
    model, history = calibrated(), fq.History()
    assert history.measure(0, model).to_dict()["0.weight_quantizer"]["scale_drift"] is None
    with torch.no_grad():
        model[0].weight[2] *= 1.5
    assert history.measure(1, model).to_dict()["0.weight_quantizer"]["scale_drift"] == pytest.approx(0.5)
    assert history.measure(2, model).to_dict()["0.weight_quantizer"]["scale_drift"] == 0


@pytest.mark.parametrize(
    ("moves", "share"),
    [((1, -1, 1, 0), 1 / 32), ((1, 1, 1, 0), 0), ((0, 0, 0, 0), 0)],
    ids=["back and forth", "one direction", "unchanged"],
)
def test_history_counts_weights_that_oscillate(moves, share):
    model = calibrated()
    fq.nn.switch_quantizers(model, frozen=True)
    scale = model[0].weight_quantizer.scale
    with torch.no_grad():
        model[0].weight[0, 0] = 0.0
    shares, history = [], fq.History()
    for step, sign in enumerate(moves):
        shares.append(history.measure(step, model).to_dict()["0.weight_quantizer"]["oscillating"])
        with torch.no_grad():
            model[0].weight[0, 0] += sign * 3 * scale[0]
    assert shares == [None, None, share, share]


def test_health_leaves_the_model_unchanged():
    model = calibrated().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fq.health(model, [torch.randn(5, 4) * 100])
    assert model.training
    assert all(m.training for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_health_logs_to_a_writer():
    class Writer(list):
        def add_scalar(self, name, value, step):
            self.append((name, value, step))

    writer = Writer()
    fq.health(calibrated(), [torch.ones(2, 4)]).log(writer, 7)
    assert ("0.input_quantizer/clipped", 0.0, 7) in writer
    assert "0.input_quantizer" in str(fq.health(calibrated()))


def test_health_leaves_weight_quantizers_unchanged():
    model = fq.calibrate(
        fq.prepare(nn.Sequential(nn.Linear(4, 2)), recipes.int8(), torch.ones(3, 4)), [torch.ones(3, 4)], progress=False
    )
    with torch.no_grad():
        model[0].weight.mul_(2)  # like an optimizer step; the scale is that of the last forward pass
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fq.health(model, [torch.ones(3, 4)])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_summary_does_not_list_unmatched_rules_of_recipes():
    model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), recipes.int8_dynamic())
    assert fq.summary(model).unmatched == []


def test_a_summary_of_quantized_weights_says_what_is_quantized():
    model = fq.prepare(nn.Sequential(nn.Linear(32, 4)), fq.recipes.int4_weight_only(), torch.ones(2, 32))
    first = str(fq.summary(model)).split("\n")[0]
    assert first == "quantized: weights only, 97.0% of 132 parameters; the inputs of 256 multiplications are floats"
