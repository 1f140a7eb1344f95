"""`compare` leaves both models as they were."""

import pytest
from comparing import assert_same, pair, snapshot

import fakequant as fq
from fakequant import recipes

torch = pytest.importorskip("torch")
nn = torch.nn


class Counter(nn.Module):
    """Changes in evaluation too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


# A range per tensor that is found at run time is kept until the next.
DYNAMIC = fq.QuantConfig(
    default=fq.LayerConfig(
        weight=fq.presets.int8(), input=fq.presets.uint8(), activation_observer=fq.observers.Dynamic()
    )
)


@pytest.mark.parametrize(
    "config", [recipes.int8(), recipes.int8_dynamic(), DYNAMIC, recipes.lsq(4)], ids=["8", "token", "dynamic", "lsq"]
)
def test_looking_changes_nothing(config):
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


def test_a_bar_is_shown_if_wanted(capsys):
    models = pair(nn.Linear(2, 2), data=[torch.ones(1, 2)])
    fq.compare(*models, [torch.ones(1, 2)], progress=False)
    assert capsys.readouterr().err == ""
    fq.compare(*models, [torch.ones(1, 2)])
    assert "compare" in capsys.readouterr().err


@pytest.mark.parametrize("config", [recipes.int8(), recipes.lsq(4)], ids=["int8", "lsq"])
def test_a_backward_pass_may_come_after_looking(config):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model, prepared = pair(model, config, data=[torch.randn(8, 4)])
    loss = prepared.train()(torch.randn(8, 4)).sum()
    fq.compare(model, prepared, [torch.randn(5, 4)], progress=False)
    fq.health(prepared, [torch.randn(5, 4)])
    loss.backward()  # needs running means and learned scales that nobody wrote to
    assert prepared[0].weight.grad is not None


def test_buffers_that_are_replaced_come_back():
    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", None)

        def forward(self, x):
            self.calls, self.last = self.calls + 1, x
            return self.fc(x)

    prepared = fq.prepare(Replacing(), recipes.int8())
    with pytest.raises(TypeError, match="A batch must be"):
        fq.calibrate(prepared, [torch.ones(1, 4), "no batch"], progress=False)
    assert (prepared.calls, prepared.last) == (0, None)
    model, prepared = pair(Replacing(), data=[torch.ones(1, 4)])
    calls = prepared.calls
    fq.compare(model, prepared, [torch.ones(1, 4)], progress=False)
    fq.health(prepared, [torch.ones(1, 4)])
    assert prepared.calls is calls
    assert (calls, model.calls, model.last) == (1, 0, None)
