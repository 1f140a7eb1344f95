"""Learned quantizers on two ranks: their initialization, and compiled ones."""

import pytest

from fakequant import QuantSpec
from fakequant.testing.assertions import assert_same_bits, assert_same_state
from rank_quantizers import OBSERVERS, SPECS, batches, compiled, learned, state_of
from straight_through import torch
from thoroughness import sampled
from two_ranks import Checks

fqnn = pytest.importorskip("fakequant.nn")
nn = torch.nn

CHECKS = check = Checks()


def exact_batches():
    """Returns multiples of 1/16, whose sums are exact in any order."""
    return [(x * 16).round() / 16 for x in batches()]


def initialize(seat, spec, data, init=None):
    first = learned(spec, init=init).initialize(seat.part(data()[0]))
    later = learned(spec, init=init)
    later.observing = True
    for x in data():
        later(seat.part(x))
    later.observing = False
    return {
        f"{name} {field}": value
        for name, quantizer in (("first", first), ("later", later))
        for field, value in zip(("scale", "zero_point"), quantizer.qparams(), strict=True)
    }


check("lsq tensor", spec=QuantSpec(bits=4), data=exact_batches)(initialize)
check("lsq channel", spec=QuantSpec(bits=2, axis=1), data=exact_batches)(initialize)
check("lsq random", spec=QuantSpec(bits=4, axis=1), data=batches)(initialize)
for _name in OBSERVERS:
    check(_name, spec=SPECS["channel"], data=batches, init=OBSERVERS[_name])(initialize)


@check()
def initialize_a_weight(seat):
    """The weight is equal on all ranks, so its statistics must not change with their number."""
    weight = torch.randn(5, 7, generator=torch.Generator().manual_seed(3))
    return fqnn.LearnedFakeQuantize(QuantSpec(bits=3, axis=0), shape=(5, 7)).initialize(weight).scale


LEARNED_STATES = {
    "learning": {},
    "frozen": dict(frozen=True),
    "off": dict(quantizing=False),
    "observing": dict(observing=True),
}
LEARNED_STATES = sampled(LEARNED_STATES, "learning", "frozen")


def compile_learned(seat, switches, wrap=compiled):
    quantizer = learned(SPECS["channel"]).initialize(seat.part(batches()[0]))
    fqnn.switch_quantizers(quantizer, **switches)
    x = seat.part(batches()[1]).clone().requires_grad_()
    y = wrap(quantizer)(x)
    y.sum().backward()
    gradients = [quantizer.step_size.grad, quantizer.offset.grad]
    return {"y": y.detach(), "dx": x.grad, "gradients": gradients, **state_of(quantizer)}


for _name, _switches in LEARNED_STATES.items():
    check(_name, switches=_switches)(compile_learned)
    check(_name, "eager", switches=_switches, wrap=lambda module: module)(compile_learned)


# float64 sums in another order may differ in the last bit, and so may a float32 rounded from them.
ONE_ULP = 2.0**-23


@CHECKS.names(initialize)
def test_learned_scales_are_initialized_from_the_data_of_all_ranks(ranks, name):
    whole, (first, second) = CHECKS.alone(name), ranks(name)
    assert_same_state(first, second)
    if name == "initialize lsq random":
        for field, value in whole.items():
            torch.testing.assert_close(first[field], value, rtol=ONE_ULP, atol=0)
    else:
        assert_same_state(whole, first)
    assert not all(torch.equal(whole[f"first {f}"], whole[f"later {f}"]) for f in ("scale", "zero_point")) or (
        "Fixed" in name
    )


def test_an_equal_weight_on_all_ranks_initializes_the_scale_as_in_one_process(ranks):
    for scale in ranks("initialize_a_weight"):
        assert_same_bits(CHECKS.alone("initialize_a_weight"), scale)


@pytest.mark.parametrize("state", LEARNED_STATES)
def test_compiled_learned_quantizers_on_ranks_have_eager_bits(ranks, state):
    for found, expected in zip(ranks(f"compile_learned {state}"), ranks(f"compile_learned {state} eager"), strict=True):
        for one, other in zip(expected.pop("gradients"), found.pop("gradients"), strict=True):
            assert_same_bits(one, other)
        assert_same_state(expected, found)
