"""`compare`: exact numbers on small models, and its errors."""

import copy
import math

import pytest

import fakequant as fq
from comparing import UNIT, compared, decibels, on_unit_grid, pair, with_weights

torch = pytest.importorskip("torch")
nn = torch.nn


def test_compare_gives_isolated_and_accumulated_errors_of_layers():
    models = pair(with_weights([[1.25, 0.0], [0.0, 1.25]], [[4.0, 0.0]]), on_unit_grid())
    first, second = compared(*models, data=[torch.tensor([[1.25, -2.0]])]).values()
    # 1.25 becomes 1. The results are 1.5625, -2.5 and 1.25, -2.5.
    assert first.isolated.sqnr == pytest.approx(decibels(1.5625**2 + 2.5**2, 0.3125**2), rel=1e-12)
    assert first.accumulated == first.isolated
    assert first.isolated.max_steps == 0.25
    # In isolation 1.5625 becomes 2, in the model 1.25 becomes 1; -2.5 becomes -2. 6.25 becomes 8 and 4.
    assert second.isolated.sqnr == pytest.approx(decibels(6.25**2, 1.75**2), rel=1e-12)
    assert second.accumulated.sqnr == pytest.approx(decibels(6.25**2, 2.25**2), rel=1e-12)
    assert (second.isolated.max_steps, second.accumulated.max_steps) == (0.5, 0.5625)
    assert second.isolated.clipped == second.accumulated.clipped == 0
    assert second.weight_sqnr is None


def test_compare_sums_errors_over_at_most_steps_batches():
    models = pair(with_weights([[4.0]]), on_unit_grid())
    data = [torch.tensor([[1.25], [9.0]]), torch.tensor([[3.0]]), torch.tensor([[100.0]])]
    found = compared(*models, data=iter(data), steps=2)["0"].isolated
    assert found.sqnr == pytest.approx(decibels(5.0**2 + 36.0**2 + 12.0**2, 1.0 + 8.0**2), rel=1e-12)
    assert found.max_steps == 2  # 9 becomes 7
    assert found.clipped == 1 / 3


def test_compare_counts_inputs_outside_the_range_as_clipped():
    models = pair(with_weights([[1.0]]), on_unit_grid())
    found = compared(*models, data=[torch.tensor([[-70.0], [70.0]])])["0"]
    assert found.isolated.clipped == found.accumulated.clipped == 1.0
    assert found.isolated.max_steps == 63
    assert found.isolated.sqnr == pytest.approx(decibels(70.0**2, 63.0**2))


def test_compare_measures_max_steps_in_the_scale_of_each_channel_or_token():
    per_channel = fq.QuantSpec(bits=4, narrow_range=True, axis=-1)
    layer = nn.Sequential(nn.Linear(2, 1, bias=False))
    prepared = fq.prepare(copy.deepcopy(layer), on_unit_grid())
    grid = fq.nn.FakeQuantize(per_channel, fq.observers.MinMax(), shape=(None, 2))
    grid(torch.tensor([[7.0, 70.0]]))
    prepared[0].input_quantizer = grid
    assert compared(layer, prepared, data=[torch.tensor([[1.4, 11.0]])])["0"].isolated.max_steps == pytest.approx(0.4)

    per_token = fq.QuantSpec(bits=4, narrow_range=True, axis=-1, group_size=-1)
    config = fq.QuantConfig(default=fq.LayerConfig(input=per_token, activation_observer=fq.observers.Dynamic()))
    data = [torch.tensor([[1.4, 7.0], [11.0, 70.0]])]
    found = compared(*pair(layer, config), data=data)["0"].isolated
    assert found.max_steps == pytest.approx(0.4)
    assert found.clipped == 0


def test_compare_gives_the_sqnr_of_weights():
    config = fq.QuantConfig(default=fq.LayerConfig(weight=UNIT, weight_observer=fq.observers.Fixed(-7.0, 7.0)))
    found = compared(*pair(with_weights([[1.25, -3.0]]), config), data=[torch.ones(1, 2)])["0"]
    assert found.weight_sqnr == pytest.approx(decibels(1.25**2 + 9, 0.25**2), rel=1e-12)
    assert found.isolated.max_steps is None
    assert found.isolated.clipped is None


def test_compare_of_equal_models_gives_an_infinite_sqnr():
    models = pair(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), data=[torch.randn(3, 4)])
    fq.nn.switch_quantizers(models[1], quantizing=False)
    for layer in compared(*models, data=[torch.randn(5, 4)]).values():
        assert layer.weight_sqnr == layer.isolated.sqnr == layer.accumulated.sqnr == math.inf
        assert layer.isolated.max_steps is None


def test_compare_handles_results_that_are_zero_nan_or_infinite():
    model, prepared = pair(with_weights([[0.0]], [[1.0]]), on_unit_grid())
    with torch.no_grad():
        prepared[0].weight.fill_(1.0)
    assert compared(model, prepared, data=[torch.ones(1, 1)])["0"].isolated.sqnr == -math.inf
    with torch.no_grad():
        prepared[0].weight.fill_(0.0)
        prepared[1].weight.fill_(torch.nan)
    found = fq.compare(model, prepared, [torch.ones(1, 1)], progress=False)
    assert found.layers[0].isolated.sqnr == math.inf
    assert math.isnan(found.layers[1].isolated.sqnr)
    assert found.worst == "1"
    # Equal infinities are not a difference.
    model, prepared = pair(with_weights([[3e38, 1.0]]), fq.QuantConfig(default=fq.LayerConfig(weight=UNIT)))
    fq.nn.switch_quantizers(prepared, quantizing=False)
    assert compared(model, prepared, data=[torch.full((1, 2), 10.0)])["0"].isolated.sqnr == math.inf


def test_compare_names_the_layer_with_the_worst_isolated_error():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    data = [torch.randn(32, 16)]
    _, prepared = pair(model, data=data)
    prepared[1].input_quantizer.frozen = True  # otherwise the scale is computed from the range
    prepared[1].input_quantizer.scale.mul_(0.05)
    found = fq.compare(model, prepared, data, progress=False)
    assert found.worst == "1"
    assert found.to_dict()["worst"] == "1"
    assert found.to_dict()["layers"][1]["isolated"]["clipped"] > 0.5
    assert "Worst by itself: 1" in str(found)
    # The other layers are good in isolation; in the model the layers after the broken one are not.
    assert all(layer.isolated.sqnr > 30 for layer in found.layers if layer.path != "1")
    assert found.layers[0].accumulated.sqnr > 30 > found.layers[2].accumulated.sqnr


@pytest.mark.parametrize("nan_at", [0, 1])
def test_compare_keeps_nan_in_max_steps_over_batches(nan_at):
    data = [torch.ones(1, 4), torch.ones(1, 4)]
    model, prepared = pair(nn.Sequential(nn.Linear(4, 2)), data=data)
    data[nan_at] = torch.full((1, 4), math.nan)
    assert math.isnan(compared(model, prepared, data=data)["0"].isolated.max_steps)


# --- bad input ------------------------------------------------------------------------------------


def test_compare_refuses_wrong_models_and_data():
    model, prepared = pair(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), data=[torch.ones(1, 4)])
    data = [torch.ones(1, 4)]
    with pytest.raises(ValueError, match="no quantized layers"):
        fq.compare(model, copy.deepcopy(model), data)
    with pytest.raises(ValueError, match=r"`float_model` is quantized: 0 has(.|\n)*unprepare"):
        fq.compare(prepared, prepared, data)
    with pytest.raises(ValueError, match=r"do not match: `float_model` has no 0, 1\.(.|\n)*without wrappers"):
        fq.compare(nn.ModuleDict({"module": model}), prepared, data)
    other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"0 has a weight of shape \(3, 4\)(.|\n)*\(4, 4\)"):
        fq.compare(other, prepared, data)
    with pytest.raises(ValueError, match="0 has no weight"):
        fq.compare(nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), prepared, data)
    with pytest.raises(ValueError, match="no batches"):
        fq.compare(model, prepared, [], progress=False)
    with pytest.raises(ValueError, match="no batches"):
        fq.compare(model, prepared, data, steps=0, progress=False)
    with pytest.raises(TypeError, match="not a function"):
        fq.compare(model, prepared, lambda model: model(data[0]))
    with pytest.raises(TypeError, match=r"`quantized_model` must be a torch\.nn\.Module"):
        fq.compare(model, "prepared", data)
    with pytest.raises(TypeError, match=r"`float_model` must be a torch\.nn\.Module"):
        fq.compare("model", prepared, data)
    with pytest.raises(ValueError, match=r"not empty"):
        fq.compare(model, prepared, [torch.ones(0, 4)], progress=False)


def test_compare_raises_if_no_data_reaches_a_quantized_layer():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            return x

    model = Idle()
    with pytest.raises(ValueError, match="No quantized layer received values"):
        fq.compare(*pair(model, fq.recipes.int8_dynamic()), [torch.ones(1, 2)], progress=False)


def test_compare_of_an_uncalibrated_model_names_the_missing_scale():
    models = pair(nn.Sequential(nn.Linear(2, 2)), fq.QuantConfig(default=fq.recipes.int8().default))
    with pytest.raises(RuntimeError, match=r"0\.input_quantizer"):
        fq.compare(*models, [torch.ones(1, 2)], progress=False)
