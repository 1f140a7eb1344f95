"""`History`: the health of a model over training."""

import copy
import json
import pickle

import numpy as np
import pytest

import fakequant as fq

torch = pytest.importorskip("torch")

from fakequant._diagnosis.health import Health, History, QuantizerHealth  # noqa: E402


def health(**values):
    fields = dict(clipped=None, levels_used=None, scale_drift=None, oscillating=None, nonfinite=0)
    return Health([QuantizerHealth(path, **{**fields, **some}) for path, some in values.items()])


def test_history_series_contain_only_steps_with_a_value():
    history = History()
    history.add(0, health(a={"clipped": 0.5}))
    history.add(10, health(a={"clipped": 0.25, "scale_drift": 0.125}, b={"clipped": 0.0}))
    history.add(15, health(a={}, b={"clipped": 1.0}))
    assert history.paths == ["a", "b"]
    assert history.series("a", "clipped") == ([0, 10], [0.5, 0.25])
    assert history.series("a", "scale_drift") == ([10], [0.125])
    assert history.series("b", "clipped") == ([10, 15], [0.0, 1.0])
    assert history.series("b", "oscillating") == ([], [])


def test_history_to_dict_is_json_serializable():
    history = History()
    history.add(3, health(a={"clipped": 0.5, "nonfinite": 2}))
    found = json.loads(json.dumps(history.to_dict()))
    assert found["a"]["clipped"] == {"steps": [3], "values": [0.5]}
    assert found["a"]["nonfinite"] == {"steps": [3], "values": [2]}
    assert found["a"]["oscillating"] == {"steps": [], "values": []}


def test_history_prints_first_and_last_values():
    history = History()
    history.add(0, health(a={"clipped": 0.5}))
    history.add(1, health(a={"clipped": 0.25}))
    assert "50.00% to 25.00%" in str(history)


def test_history_refuses_steps_that_do_not_increase():
    history = History()
    history.add(5, health(a={}))
    for step in (5, 4):
        with pytest.raises(ValueError, match=f"larger than the last one, 5, got {step}"):
            history.add(step, health(a={}))
    assert history.steps == [5]


@pytest.mark.parametrize(
    ("step", "value", "message"),
    [
        (0.5, health(), "`step` must be a whole number of steps, got 0.5"),
        (True, health(), "`step` must be a whole number of steps, got True"),
        (0, {}, r"what fakequant.health\(model\) returns, got dict"),
    ],
)
def test_history_refuses_steps_and_healths_of_wrong_types(step, value, message):
    history = History()
    with pytest.raises(TypeError, match=message):
        history.add(step, value)
    assert history.paths == []


def test_history_series_refuses_unknown_names_and_paths():
    history = History()
    history.add(0, health(a={}))
    with pytest.raises(ValueError, match="one of clipped, levels_used"):
        history.series("a", "clip")
    with pytest.raises(KeyError, match="no quantizer 'b' in this history, which has a"):
        history.series("b", "clipped")


def test_history_records_the_health_of_a_training_model():
    torch.manual_seed(0)
    model = fq.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4)), fq.recipes.lsq(2), torch.randn(16, 4))
    model = fq.calibrate(model, [torch.randn(16, 4)], progress=False).train()
    optimizer, history = torch.optim.SGD(model.parameters(), 0.1), History()
    for step in range(4):
        history.measure(step, model, [torch.randn(8, 4)])
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
    assert history.series("0.weight_quantizer", "scale_drift")[0] == [1, 2, 3]
    assert history.series("0.weight_quantizer", "oscillating")[0] == [2, 3]
    assert history.series("0.input_quantizer", "clipped")[0] == [0, 1, 2, 3]


def test_history_accepts_numpy_integers_as_steps():
    history = History()
    history.add(np.int64(3), health(a={"clipped": 0.5}))
    assert json.dumps(history.series("a", "clipped")) == "[[3], [0.5]]"


def test_history_compares_with_its_own_last_measurement():
    model = fq.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4)), fq.recipes.w4a8(), torch.randn(16, 4))
    history, other = History(), History()
    assert history.measure(0, model).quantizers[0].scale_drift is None
    with torch.no_grad():
        model[0].weight *= 1.5
    assert other.measure(0, model).quantizers[0].scale_drift is None
    assert fq.health(model) == fq.health(model)
    assert fq.health(model).quantizers[0].scale_drift is None
    for copied in (copy.deepcopy(history), pickle.loads(pickle.dumps(history)), history):
        found = copied.measure(1, copy.deepcopy(model))
        assert found.quantizers[0].scale_drift == pytest.approx(0.5)
        assert "scale drift" in str(found)
    assert "scale drift" not in str(fq.health(model))


def test_history_that_refuses_a_step_forgets_nothing():
    model = fq.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4)), fq.recipes.w4a8(), torch.randn(16, 4))
    history = History()
    history.measure(5, model)
    with torch.no_grad():
        model[0].weight *= 1.5
    with pytest.raises(ValueError, match="larger than the last one"):
        history.measure(5, model)
    assert history.measure(6, model).quantizers[0].scale_drift == pytest.approx(0.5)


def test_health_has_the_ends_of_each_grid_and_writes_them_to_any_writer():
    model = fq.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)), fq.recipes.int8(), example=torch.ones(1, 4))
    fq.calibrate(model, [torch.tensor([[-1.0, 0.0, 0.5, 4.1]])], progress=False)
    found = fq.health(model)
    one = next(q for q in found.quantizers if q.path == "0.input_quantizer")
    quantizer = model[0].input_quantizer
    ends = quantizer.eval()(torch.tensor([-1e9, 1e9])).tolist()
    assert (one.scale, [one.min, one.max]) == (float(quantizer.scale), pytest.approx(ends))

    class Board:
        def __init__(self):
            self.seen = {}

        def add_scalar(self, name, value, step):
            self.seen[name] = value, step

    class Run:
        def log(self, data, step=None):
            self.seen = {name: (value, step) for name, value in data.items()}

    class Logger(Run):
        def log_metrics(self, metrics, step=None):
            self.log(metrics, step)

    class Trainer:
        def log(self, logs, start_time=None):
            self.seen = {name: (value, 7) for name, value in logs.items()}

    boards = [Board(), Run(), Logger(), Trainer()]
    for board in boards:
        found.log(board, 7)
        assert board.seen == boards[0].seen
    assert boards[0].seen["0.input_quantizer/scale"] == (float(quantizer.scale), 7)
    with pytest.raises(TypeError, match="one of the methods add_scalar, log_metrics"):
        found.log(object(), 7)
