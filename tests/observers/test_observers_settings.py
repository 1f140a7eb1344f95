"""Observers as data: settings, dicts, and observers that users define."""

import copy
import dataclasses
import json
import math
import pickle

import numpy as np
import pytest

from observer_cases import ALL, INT8, LARGEST, assert_same_range, bell, range_of

torch = pytest.importorskip("torch")

from fakequant import choose_qparams, observers  # noqa: E402
from fakequant.observers import (  # noqa: E402
    MSE,
    Dynamic,
    Entropy,
    Fixed,
    Histogram,
    MinMax,
    MovingAverage,
    Observer,
    Percentile,
    from_dict,
)
from fakequant.observers._ranks import ALONE  # noqa: E402
from fakequant.testing.assertions import assert_same_bits  # noqa: E402

INF, NAN = math.inf, math.nan

# --- settings ---------------------------------------------------------------------------------------

SETTINGS = {
    "MinMax": (MinMax(), {}),
    "MovingAverage": (MovingAverage(), dict(constant=0.01)),
    "MovingAverage, set": (MovingAverage(0.5), dict(constant=0.5)),
    "Dynamic": (Dynamic(), {}),
    "Percentile": (Percentile(), dict(bins=4096, percent=99.99)),
    "Percentile, set": (Percentile(99, bins=8), dict(bins=8, percent=99)),
    "Histogram": (Histogram(), dict(bins=4096, norm=2.0, steps=100)),
    "Histogram, set": (Histogram(2.4, 10, bins=64), dict(bins=64, norm=2.4, steps=10)),
    "MSE": (MSE(), dict(steps=100)),
    "Entropy": (Entropy(), dict(bins=4096, steps=128)),
    "Fixed": (Fixed(-1, 2.5), dict(lo=-1, hi=2.5)),
}


@pytest.mark.parametrize(("observer", "settings"), SETTINGS.values(), ids=SETTINGS)
def test_observer_round_trips_through_dict_json_pickle_copy_and_repr(observer, settings):
    as_dict = observer.to_dict()
    assert as_dict == {"kind": type(observer).__name__, **settings}
    for again in (
        from_dict(as_dict),
        from_dict(json.loads(json.dumps(as_dict))),
        pickle.loads(pickle.dumps(observer)),
        copy.deepcopy(observer),
        eval(repr(observer)),
        dataclasses.replace(observer),
    ):
        assert type(again) is type(observer)
        assert again == observer
        assert hash(again) == hash(observer)
    as_dict["kind"] = "changed"
    assert observer.to_dict()["kind"] == type(observer).__name__
    with pytest.raises(dataclasses.FrozenInstanceError):
        observer.constant = 1


def test_observers_with_different_settings_are_unequal():
    every = [observer for observer, _ in SETTINGS.values()]
    assert len(set(every)) == len(every)
    assert MinMax() != Dynamic()
    assert MSE(100) != Entropy(100)


def test_tables_of_this_file_cover_every_public_observer():
    public = {
        n
        for n in vars(observers)
        if isinstance(getattr(observers, n), type) and n not in ("Observer", "Ranks", "State")
    }
    assert public == set(ALL) == {n.split(",")[0] for n in SETTINGS}


def test_from_dict_fills_absent_settings_with_defaults():
    assert from_dict({"kind": "Histogram"}) == Histogram()
    assert from_dict({"kind": "Histogram", "steps": 3}) == Histogram(steps=3)


@pytest.mark.parametrize("fields", [{}, {"kind": None}, {"kind": "minmax"}, {"kind": "_Running"}, {"kind": "Observer"}])
def test_from_dict_refuses_an_unknown_kind_and_lists_the_known_ones(fields):
    with pytest.raises(ValueError, match=r"`kind` must be one of .*Histogram.*MinMax.*MovingAverage"):
        from_dict(fields)


@pytest.mark.parametrize("kind", [["MinMax"], {"kind": "MinMax"}], ids=repr)
def test_from_dict_refuses_a_kind_that_is_not_a_string(kind):
    with pytest.raises((TypeError, ValueError), match="`kind` must be"):
        from_dict({"kind": kind})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "MinMax", "constant": 1}, "MinMax has no setting 'constant'; it has none."),
        ({"kind": "MovingAverage", "steps": 1}, "MovingAverage has no setting 'steps'; it has constant."),
        ({"kind": "Histogram", "step": 1}, "Histogram has no setting 'step'; it has bins, norm, steps."),
        ({"kind": "MovingAverage", "constant": 0}, "`constant` must be greater than 0"),
    ],
)
def test_from_dict_refuses_unknown_and_invalid_settings(fields, message):
    with pytest.raises(ValueError, match=r"setting|must be") as caught:
        from_dict(fields)
    assert message in str(caught.value)


BAD = {
    "constant": [(MovingAverage, dict(constant=c)) for c in (0, 0.0, -0.1, 1.0001, NAN, INF, -INF)],
    "percent": [(Percentile, dict(percent=p)) for p in (50, 50.0, 0, 100.5, -1, NAN, INF)],
    "bins": [
        (kind, dict(bins=b))
        for kind in (Percentile, Histogram, Entropy)
        for b in (0, 2, 3, -4, 100, True, 8.0, "8", None)
    ],
    "norm": [(Histogram, dict(norm=n)) for n in (0, -1, NAN, INF)],
    "steps": [(kind, dict(steps=s)) for kind in (Histogram, MSE, Entropy) for s in (0, -1, NAN, INF, 2.5, True)],
    "lo": [(Fixed, dict(lo=a, hi=b)) for a, b in ((1, 0), (NAN, 1), (0, NAN), (-INF, 0), (0, INF), (INF, INF))],
    "lo` and `hi": [(Fixed, dict(lo=a, hi=b)) for a, b in ((0, 1e39), (-1e39, 0), (1e300, 1e301))],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        pytest.param(name, kind, options, id=f"{kind.__name__}-{options}")
        for name, cases in BAD.items()
        for kind, options in cases
    ],
)
def test_invalid_setting_is_refused_by_name(name, kind, options):
    with pytest.raises((ValueError, TypeError), match=f"`{name}` "):
        kind(**options)


def test_settings_at_their_limits_are_allowed():
    MovingAverage(1.0), MovingAverage(1), MovingAverage(1e-6)
    Percentile(100), Percentile(50.001), Percentile(bins=4)
    Histogram(0.5, 1), MSE(1), Entropy(1), Fixed(0, 0), Fixed(-LARGEST, LARGEST)


@pytest.mark.parametrize("lo", [-LARGEST, -1, 0])
@pytest.mark.parametrize("hi", [LARGEST, 1, 0])
@pytest.mark.parametrize("blocks", [(), (3,), (2, 2)], ids=str)
def test_fixed_range_is_the_same_for_every_block(lo, hi, blocks):
    state = Fixed(lo, hi).init(blocks)
    expected = np.full(blocks, lo), np.full(blocks, hi)
    assert_same_range(expected, [end.numpy() for end in Fixed(lo, hi).range(state, INT8)])


# --- user-defined observers -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MeanAndSpread(Observer):
    """The mean plus and minus some standard deviations of the latest tensor."""

    deviations: float = 3.0

    def init(self, blocks, device=None):
        return {"center": torch.full(blocks, NAN, device=device), "spread": torch.zeros(blocks, device=device)}

    def update(self, state, x, spec, ranks=ALONE):
        finite = x[x.isfinite()]
        state["center"].copy_(finite.mean())
        state["spread"].copy_(finite.std())
        return torch.tensor(x.numel() - finite.numel())

    def range(self, state, spec):
        reach = state["spread"] * self.deviations
        unseen = state["center"].isnan()
        low, high = state["center"] - reach, state["center"] + reach
        return low.masked_fill(unseen, INF), high.masked_fill(unseen, -INF)


def test_user_defined_observer_is_found_by_its_class_name():
    own = MeanAndSpread(2.0)
    assert own.to_dict() == {"kind": "MeanAndSpread", "deviations": 2.0}
    assert from_dict(own.to_dict()) == own
    with pytest.raises(ValueError, match="MeanAndSpread has no setting 'deviation'; it has deviations"):
        from_dict({"kind": "MeanAndSpread", "deviation": 1})
    assert (own.dynamic, own.searches, own.needs_data, own._in_kernel) == (False, False, True, None)


def test_user_defined_observer_works_in_a_quantizer():
    from fakequant.nn import FakeQuantize

    fq = FakeQuantize(INT8, MeanAndSpread(2.0))
    with pytest.raises(RuntimeError, match="has not observed a finite value"):
        fq.qparams()
    x = bell(500)
    fq(x)
    lo, hi = x.mean() - x.std() * 2, x.mean() + x.std() * 2
    expected = choose_qparams(lo, hi, INT8)
    assert_same_bits(expected.scale, fq.qparams().scale)
    assert set(fq.state_dict()) >= {"center", "spread", "scale"}


def test_private_observer_class_is_not_found_by_name():
    class _Hidden(MinMax):
        pass

    with pytest.raises(ValueError, match="`kind` must be one of"):
        from_dict(_Hidden().to_dict())


def test_observer_class_without_all_three_methods_is_abstract():
    class Half(MeanAndSpread.__base__):
        def init(self, blocks, device=None):
            return {}

    for kind in (Observer, Half):
        with pytest.raises(TypeError, match="abstract"):
            kind()


def test_derived_observer_inherits_methods_it_does_not_override():
    class Doubled(MinMax):
        def range(self, state, spec):
            lo, hi = super().range(state, spec)
            return lo * 2, hi * 2

    assert_same_range((-2, 6), range_of(Doubled(), [-1.0, 3.0]))
    assert from_dict(Doubled().to_dict()) == Doubled()
    assert Doubled() != MinMax()


def test_histogram_refuses_too_many_scales():
    with pytest.raises(ValueError, match=r"Use MSE\(\) or MinMax\(\) for that many"):
        observers.Histogram().init((512, 512))
    observers.Histogram(bins=16).init((512, 512))


def test_settings_that_are_not_numbers_are_refused():
    assert observers.Fixed(np.float32(0), 1).to_dict() == {"kind": "Fixed", "lo": 0.0, "hi": 1.0}
    for make in (
        lambda: observers.MovingAverage("0.5"),
        lambda: observers.Fixed("0", 1),
        lambda: observers.Percentile("99"),
    ):
        with pytest.raises(TypeError, match="must be a number"):
            make()
    with pytest.raises(ValueError, match="Fixed needs the setting 'lo'"):
        observers.from_dict({"kind": "Fixed"})
