"""Copies and averages of quantizers."""

import copy
import pickle

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits, assert_same_state
from quantizer_kinds import AFFINE, HISTOGRAM, KINDS, WIDE, X, assert_same_module, each_kind, snapshot, trained

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
observers = pytest.importorskip("fakequant.observers")
swa = pytest.importorskip("torch.optim.swa_utils")

# --- copies -----------------------------------------------------------------------------------------

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "twice": lambda m: copy.deepcopy(copy.deepcopy(m)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@each_kind
def test_copies_are_equal_and_independent(make, copied):
    module = trained(make)
    fqnn.switch_quantizers(module, frozen=True)
    other = copied(module)
    assert other.spec == module.spec
    before = snapshot(module)
    fqnn.switch_quantizers(other, frozen=False, quantizing=False)
    other(WIDE * 5)
    assert_same_state(before, module.state_dict())
    assert (module.frozen, module.quantizing) == (True, True)
    assert_same_module(module, copied(module))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_keep_path_counts_and_pending_searches(copied):
    module = fqnn.FakeQuantize(AFFINE, HISTOGRAM, path="a.b")
    module.quantizing = False
    with pytest.warns(RuntimeWarning, match="at a.b has observed 1 value"):
        module(torch.cat([X.flatten(), torch.tensor([torch.nan])]))
    other = copied(module)  # a search is pending
    assert (other.path, other.nonfinite) == ("a.b", 1)
    assert_same_state(module.state_dict(), other.state_dict())
    other.quantizing = True
    assert_same_bits(module.qparams().scale, other.qparams().scale, "scale")
    other(torch.tensor([torch.nan, 1.0]))
    assert (module.nonfinite, other.nonfinite) == (1, 2)


def test_copy_keeps_the_process_group_and_pickle_drops_it():
    group = object()
    module = fqnn.FakeQuantize(AFFINE, process_group=group)
    assert copy.copy(module).process_group is group
    assert copy.deepcopy(torch.nn.Sequential(torch.nn.Linear(2, 2), module))[1].process_group is not None
    assert pickle.loads(pickle.dumps(module)).process_group is None


# --- averaged models --------------------------------------------------------------------------------


def in_a_model(make):
    return torch.nn.Sequential(torch.nn.Linear(8, 8), make())


AVERAGES = {"mean": {}, "EMA": {"multi_avg_fn": swa.get_ema_multi_avg_fn(0.9)}}


@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
@each_kind
def test_averaged_model_has_the_buffers_of_its_model(make, average):
    model = in_a_model(make)
    ema = swa.AveragedModel(model, **average)
    for step in range(3):
        if isinstance(model[1], fqnn.LearnedFakeQuantize) and step == 0:
            model[1].initialize(X)
        model[1](X * (step + 1))
        ema.update_parameters(model)
    for name, value in model[1].named_buffers():
        assert_same_bits(value, dict(ema.module[1].named_buffers())[name], name)
    assert_same_bits(model[1].eval()(WIDE), ema.eval().module[1](WIDE), "y")


@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize(
    "make", [KINDS["MinMax"], KINDS["MovingAverage"], KINDS["LSQ+"]], ids=["MinMax", "MovingAverage", "LSQ+"]
)
def test_averaged_buffers_still_form_a_valid_quantizer(make, average):
    """The scale is positive, the zero point within the range, and the spec is not averaged."""
    model = in_a_model(make)
    ema = swa.AveragedModel(model, use_buffers=True, **average)
    for step in range(4):
        if isinstance(model[1], fqnn.LearnedFakeQuantize) and step == 0:
            model[1].initialize(X)
        model[1](X * (step + 1))
        ema.update_parameters(model)
    averaged = ema.eval().module[1]
    assert_same_bits(model[1].grid, averaged.grid, "grid")
    assert_same_bits(model[1].switches, averaged.switches, "switches")
    scale, zero_point = averaged.qparams()
    assert (scale > 0).all()
    assert scale.isfinite().all()
    assert averaged.spec.qmin <= zero_point.min() <= zero_point.max() <= averaged.spec.qmax
    assert averaged(WIDE).isfinite().all()
    make().load_state_dict(averaged.state_dict())


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_averaged_model_follows_the_switches_of_its_model(mode):
    model = in_a_model(KINDS["MinMax"])
    fqnn.switch_quantizers(model, quantizing=False)
    model[1](X)
    ema = getattr(swa.AveragedModel(model), mode)()
    ema.update_parameters(model)
    fqnn.switch_quantizers(model, quantizing=True, frozen=True)
    ema.update_parameters(model)
    ema.eval()
    assert str(ema.module[1]) == str(model[1])
    assert_same_bits(model.eval()[1](WIDE), ema.module[1](WIDE), "y")


def test_averaged_model_keeps_observations_that_await_a_search():
    model = in_a_model(KINDS["Histogram"])
    fqnn.switch_quantizers(model, quantizing=False)
    ema = swa.AveragedModel(model)
    model[1](X)
    ema.update_parameters(model)
    fqnn.switch_quantizers(model, quantizing=True)
    fqnn.switch_quantizers(ema.eval(), quantizing=True)
    assert_same_bits(model[1].eval()(WIDE), ema.module[1](WIDE), "y")


def test_averaged_model_has_the_zero_point_of_its_averaged_range():
    model = torch.nn.Sequential(fqnn.FakeQuantize(presets.uint8(), observers.MovingAverage(0.5)))
    average = swa.AveragedModel(model, use_buffers=True, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
    for step in range(60):
        model(torch.linspace(-2.0, 1.0, 9) + step / 20)
        average.update_parameters(model)
    quantizer = average.module[0]
    average.eval()
    expected = fq.choose_qparams(quantizer.running_min, quantizer.running_max, quantizer.spec)
    assert_same_bits(expected.scale, quantizer.scale)
    assert_same_bits(expected.zero_point, quantizer.zero_point)
