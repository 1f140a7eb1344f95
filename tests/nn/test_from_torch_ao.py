"""Quantizers taken over from torch.ao, as modules or as states, continue with the same bits."""

import numpy as np
import pytest

from fakequant.nn import from_torch_ao
from fakequant.testing import cases
from fakequant.testing.assertions import assert_same_bits
from torch_ao_cases import (
    CASES,
    FUSED,
    PLAIN,
    assert_same_results,
    assert_same_state,
    batches,
    by_case,
    by_way,
    gradients,
    hostile,
    loaded,
    switch,
    tq,
)
from torch_bridge import to_numpy, to_torch, torch

# torch.ao is deprecated and warns in many ways.
pytestmark = [pytest.mark.usefixtures("torch_on_one_thread"), pytest.mark.filterwarnings("ignore")]


@by_way
@by_case
def test_a_module_taken_over_observes_and_quantizes_with_torchs_bits(case, take_over):
    theirs = case.make()
    first, second, *rest = batches(case.shape, 6)
    theirs(first), theirs(second)
    ours = take_over(case, theirs)
    assert_same_state(theirs, ours, "taken over")
    for step, x in enumerate(rest):
        assert_same_results(theirs, ours, x, gradients(x), step)
        assert_same_state(theirs, ours, step)


@by_way
@by_case
def test_a_module_taken_over_with_its_observer_off_has_torchs_bits_for_every_value(case, take_over):
    theirs = case.make()
    for x in batches(case.shape, 2):
        theirs(x)
    theirs.disable_observer()
    ours = take_over(case, theirs)
    assert not ours.observing
    only_float32 = isinstance(theirs, tq.FusedMovingAvgObsFakeQuantize)
    for name, dtype in cases.DTYPES.items():
        if only_float32 and name != "float32":  # torch's operator takes nothing else
            continue
        x = hostile(theirs, dtype, case.spec.axis)
        assert_same_results(theirs, ours, x, gradients(x), name)


@by_case
def test_a_module_taken_over_in_evaluation_equals_torch_with_its_observer_off(case):
    theirs = case.make()
    for x in batches(case.shape, 2):
        theirs(x)
    ours = from_torch_ao(theirs.eval())
    assert not ours.training
    theirs.disable_observer()
    x = hostile(theirs, np.dtype(np.float32), case.spec.axis)
    assert_same_results(theirs, ours, x, gradients(x))
    assert_same_state(theirs, ours)


@by_case
def test_a_module_taken_over_with_fake_quantization_off_observes_only(case):
    theirs = case.make()
    first, *rest = batches(case.shape, 4)
    theirs(first)
    theirs.disable_fake_quant()
    ours = from_torch_ao(theirs)
    assert not ours.quantizing
    for x in rest:
        assert_same_results(theirs, ours, x, gradients(x))
    theirs.enable_fake_quant()
    ours.quantizing = True
    for x in batches(case.shape, 2, seed=5):
        assert_same_results(theirs, ours, x, gradients(x))
        assert_same_state(theirs, ours)


@by_case
def test_a_module_taken_over_before_it_quantized_has_torchs_bits(case):
    theirs = case.make()
    theirs.disable_fake_quant()
    for x in batches(case.shape, 2):
        theirs(x)
    ours = from_torch_ao(theirs)
    switch(theirs, ours, observe=False, quantize=True)
    for x in batches(case.shape, 2, seed=5):
        assert_same_results(theirs, ours, x, gradients(x))


@by_way
@by_case
def test_a_module_taken_over_has_torchs_bits_in_every_order_of_switches(case, take_over):
    theirs = case.make()
    steps = batches(case.shape, 9)
    theirs(next(steps))
    ours = take_over(case, theirs)
    for x, (observe, quantize) in zip(
        steps, [(1, 1), (1, 0), (0, 1), (0, 0), (1, 0), (1, 1), (0, 0), (0, 1)], strict=True
    ):
        switch(theirs, ours, bool(observe), bool(quantize))
        assert_same_results(theirs, ours, x, gradients(x), observe, quantize)
    assert_same_state(theirs, ours)


DATA = {
    "positive": lambda x: x.abs() + 0.25,
    "negative": lambda x: -x.abs() - 0.25,
    "tiny": lambda x: x * 1e-9,
    "tiny and positive": lambda x: x.abs() * 1e-7,
    "below eps": lambda x: x * 1e-40,
    "zeros": lambda x: x * 0,
    "huge": lambda x: (x * 1e30).clamp(-1e36, 1e36),
    "constant": lambda x: torch.full_like(x, 0.3),
}


@pytest.mark.parametrize("change", DATA.values(), ids=DATA)
@by_case
def test_a_module_taken_over_has_torchs_bits_on_one_sided_and_extreme_ranges(case, change):
    theirs = case.make()
    first, *rest = batches(case.shape, 4)
    theirs(change(first))
    ours = from_torch_ao(theirs)
    assert_same_state(theirs, ours)
    for step, x in enumerate(rest):
        x = change(x)
        assert_same_results(theirs, ours, x, gradients(x), step)
        assert_same_state(theirs, ours, step)
    for x in batches(case.shape, 2, seed=5):  # then on ordinary ranges
        assert_same_results(theirs, ours, x, gradients(x))


@pytest.mark.parametrize("name", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_a_module_taken_over_observes_every_dtype_as_torch_does(case, name):
    theirs = case.make()
    first, *rest = batches(case.shape, 4)
    theirs(first)
    ours = from_torch_ao(theirs)
    for x in rest:
        x = to_torch(to_numpy(x).astype(cases.DTYPES[name]))
        assert_same_results(theirs, ours, x, gradients(x))
        assert_same_state(theirs, ours)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("case", [pytest.param(c, id=n) for n, c in FUSED.items() if c.spec.axis is None])
def test_a_fused_module_observes_nonfinite_values_as_torch_does(case, broken):
    theirs = case.make()
    first, second, third = batches(case.shape, 3)
    theirs(first)
    ours = from_torch_ao(theirs)
    second.view(-1)[7] = broken
    for x in (second, third):
        assert_same_results(theirs, ours, x, torch.ones_like(x))
        assert_same_state(theirs, ours)


@pytest.mark.parametrize("broken", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_an_observer_taken_over_ignores_nonfinite_values(case, broken):
    theirs = case.make()
    first, second = batches(case.shape, 2)
    theirs(first)
    ours = from_torch_ao(theirs)
    spoiled = second.clone()
    place = torch.zeros(case.shape, dtype=torch.bool)
    place.view(-1)[11] = True
    spoiled[place] = broken
    second[place] = second[(0, 0, 1) if case.spec.axis != 1 else (0, 0, 0)]  # a value its channel holds anyway
    theirs(second), ours(spoiled)
    assert_same_state(theirs, ours)
    assert ours.nonfinite == 1


@pytest.mark.parametrize("case", PLAIN.values(), ids=PLAIN)
def test_a_range_with_nan_is_refused_or_forgotten(case):
    theirs = case.make()
    first, second = batches(case.shape, 2)
    first[:, :, 0] = torch.nan
    theirs(first)
    try:
        ours = from_torch_ao(theirs)
    except (RuntimeError, ValueError):
        return
    assert ours(second).isfinite().all()


@by_case
def test_the_state_of_a_module_without_data_is_loaded_and_observes_as_torch_does(case):
    theirs = case.make()
    ours = loaded(case, theirs)
    with pytest.raises(RuntimeError, match="has not observed a finite value"):
        ours.eval()(torch.ones(case.shape))
    ours.train()
    for x in batches(case.shape, 3):
        assert_same_results(theirs, ours, x, gradients(x))
        assert_same_state(theirs, ours)


@pytest.mark.parametrize("case", [pytest.param(c, id=n) for n, c in CASES.items() if c.spec.axis is None])
def test_a_module_taken_over_without_data_has_no_scale(case):
    ours = from_torch_ao(case.make())
    assert ours.scale.isnan().all()
    with pytest.raises(RuntimeError, match="has not observed"):
        ours.eval()(torch.ones(3))


@by_case
def test_from_torch_ao_does_not_change_the_torch_module(case):
    theirs = case.make()
    first, second = batches(case.shape, 2)
    theirs(first)
    before = {k: v.clone() for k, v in theirs.state_dict().items()}
    ours = from_torch_ao(theirs)
    ours(second)
    for k, v in theirs.state_dict().items():
        assert_same_bits(before[k], v, k)


def test_from_torch_ao_infers_spec_and_observer():
    for name, case in CASES.items():
        theirs = case.make()
        theirs(next(batches(case.shape)))
        ours, expected = from_torch_ao(theirs), case.build()
        assert (type(ours), ours.spec, ours.observer) == (type(expected), expected.spec, expected.observer), name
        assert ours.state_dict().keys() == expected.state_dict().keys()
