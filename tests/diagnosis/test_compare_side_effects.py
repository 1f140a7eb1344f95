"""`compare` leaves both models as they were."""

import pytest

import fakequant as fq
from comparing import assert_same, pair, snapshot
from fakequant import recipes

torch = pytest.importorskip("torch")
nn = torch.nn


class Counter(nn.Module):
    """Changes its buffer in evaluation too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


# A dynamic quantizer stores the range of the last tensor.
DYNAMIC = fq.QuantConfig(
    default=fq.LayerConfig(
        weight=fq.presets.int8(), input=fq.presets.uint8(), activation_observer=fq.observers.Dynamic()
    )
)


@pytest.mark.parametrize(
    "config",
    [recipes.int8(), recipes.int8_dynamic(), DYNAMIC, recipes.lsq(4)],
    ids=["int8", "int8_dynamic", "dynamic per tensor", "lsq"],
)
def test_compare_leaves_models_unchanged_also_after_an_error(config):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), Counter(), nn.Linear(4, 2)).train()
    model[1].eval()
    model, prepared = pair(model, config, data=[torch.randn(8, 4)])
    before = snapshot(model, prepared)
    first = fq.compare(model, prepared, [torch.randn(5, 4) * 100], progress=False)
    assert_same(before, snapshot(model, prepared))
    assert first.layers[0].isolated.sqnr is not None

    def breaks():
        yield torch.randn(5, 4)
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        fq.compare(model, prepared, breaks(), progress=False)
    with pytest.raises(RuntimeError):
        fq.compare(model, prepared, [torch.randn(5, 4), torch.randn(5, 3)], progress=False)
    assert_same(before, snapshot(model, prepared))


def test_compare_shows_a_progress_bar_unless_switched_off(capsys):
    models = pair(nn.Linear(2, 2), data=[torch.ones(1, 2)])
    fq.compare(*models, [torch.ones(1, 2)], progress=False)
    assert capsys.readouterr().err == ""
    fq.compare(*models, [torch.ones(1, 2)])
    assert "compare" in capsys.readouterr().err


@pytest.mark.parametrize("config", [recipes.int8(), recipes.lsq(4)], ids=["int8", "lsq"])
def test_compare_and_health_do_not_break_a_pending_backward_pass(config):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model, prepared = pair(model, config, data=[torch.randn(8, 4)])
    loss = prepared.train()(torch.randn(8, 4)).sum()
    fq.compare(model, prepared, [torch.randn(5, 4)], progress=False)
    fq.health(prepared, [torch.randn(5, 4)])
    loss.backward()  # fails if running means or learned scales were written to
    assert prepared[0].weight.grad is not None


def test_compare_restores_buffers_that_forward_replaces():
    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", None)

        def forward(self, x):
            self.calls, self.last = self.calls + 1, x
            return self.fc(x)

    prepared = fq.prepare(Replacing(), recipes.int8(), torch.ones(1, 4))
    with pytest.raises(TypeError, match="A batch must be"):
        fq.calibrate(prepared, [torch.ones(1, 4), "no batch"], progress=False)
    assert (prepared.calls, prepared.last) == (0, None)
    model, prepared = pair(Replacing(), data=[torch.ones(1, 4)])
    calls = prepared.calls
    fq.compare(model, prepared, [torch.ones(1, 4)], progress=False)
    fq.health(prepared, [torch.ones(1, 4)])
    assert prepared.calls is calls
    assert (calls, model.calls, model.last) == (1, 0, None)
