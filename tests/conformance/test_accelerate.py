"""`accelerate` compares kernels with torch's, replaces those of torch's operators, and can be undone.

That no bit changes is tested in `test_accelerate_operators.py` and `test_accelerate_models.py`.
"""

import subprocess
import sys
import threading
import warnings

import pytest

import fakequant
from accelerated import (  # noqa: F401
    FUSED_ROWS,
    OPERATORS,
    ORDINARY,
    assert_same_tensors,
    by_operator,
    copies,
    counted_kernels,
    decelerated,
)
from fakequant._backends.torch import override_aten
from fakequant._backends.torch.compare_with_aten import REPLACED
from thoroughness import ALL
from torch_bridge import aten, torch


def registered():
    """Returns the kernels that torch's dispatcher holds, by operator."""
    return {name: torch._C._dispatch_dump(f"aten::{name}") for name in OPERATORS}


TORCHS_OWN = registered()


@pytest.fixture
def unverified(monkeypatch):
    """Makes the next `accelerate` compare the kernels, as the first one of a process does."""
    monkeypatch.setattr(override_aten._switch, "left", None)


ORDINARY_CALLS = [*ORDINARY.items(), ("_fused_moving_avg_obs_fq_helper", FUSED_ROWS)]


@pytest.mark.parametrize(("operator", "arguments"), ORDINARY_CALLS, ids=[name for name, _ in ORDINARY_CALLS])
def test_accelerated_operators_run_our_kernels_until_accelerate_is_undone(operator, arguments):
    function = getattr(aten, operator)
    with counted_kernels() as calls:
        function(*copies(arguments))
        assert calls == []
        with fakequant.accelerate():
            function(*copies(arguments))
        assert calls == [(operator, True)]
        function(*copies(arguments))
        assert len(calls) == 1


def test_accelerated_operators_call_native_kernels(monkeypatch):
    class NoKernels:
        def __getattr__(self, name):
            raise AssertionError(f"native {name}")

    with fakequant.accelerate():
        monkeypatch.setattr("fakequant._backends.torch.tensor_kernels._native", NoKernels())
        monkeypatch.setattr("fakequant._backends.torch.aten_kernels._native", NoKernels())
        for operator, arguments in ORDINARY.items():
            with pytest.raises(AssertionError, match="native"):
                getattr(aten, operator)(*copies(arguments))


def test_handle_lists_the_replaced_operators_until_it_is_undone():
    handle = fakequant.accelerate()
    assert handle.replaced == tuple(f"aten::{name}" for name in ORDINARY)
    assert "fake_quantize_per_tensor_affine_cachemask" in repr(handle)
    handle.undo()
    assert handle.replaced == ()
    assert registered() == TORCHS_OWN


def test_accelerating_twice_is_undone_by_one_undo():
    first = fakequant.accelerate()
    once = registered()
    assert all(once[name] != TORCHS_OWN[name] for name in OPERATORS)
    second = fakequant.accelerate()
    assert registered() == once
    second.undo()
    assert first.replaced == second.replaced == ()
    assert registered() == TORCHS_OWN
    second.undo()
    assert registered() == TORCHS_OWN


def test_decelerate_without_accelerate_does_nothing():
    fakequant.decelerate()
    fakequant.decelerate()
    assert registered() == TORCHS_OWN


def test_nested_accelerate_contexts_end_with_the_outermost():
    with fakequant.accelerate() as outer:
        with fakequant.accelerate() as inner:
            assert inner.replaced
        assert outer.replaced
        with outer:
            assert outer.replaced
        assert outer.replaced
    assert registered() == TORCHS_OWN


def test_an_accelerate_context_does_not_undo_an_earlier_or_inner_accelerate():
    handle = fakequant.accelerate()
    with fakequant.accelerate():
        pass
    assert handle.replaced
    handle.undo()
    with fakequant.accelerate():
        handle = fakequant.accelerate()
    assert handle.replaced


def test_an_accelerate_handle_can_be_entered_as_a_context_repeatedly():
    handle = fakequant.accelerate()
    for _ in range(2):
        with handle:
            assert handle.replaced
        assert registered() == TORCHS_OWN


def test_a_context_of_an_old_handle_does_not_undo_a_later_accelerate():
    old = fakequant.accelerate()
    fakequant.accelerate()
    with old:
        pass
    assert old.replaced


def test_an_exception_leaves_the_accelerate_context_and_undoes_it():
    with pytest.raises(KeyError, match="mine"), fakequant.accelerate():
        raise KeyError("mine")
    assert registered() == TORCHS_OWN


def test_accelerate_prints_nothing_and_warns_of_nothing(unverified, capfd, recwarn):
    filters = warnings.filters.copy()
    with fakequant.accelerate():
        pass
    fakequant.accelerate().undo()
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
    assert warnings.filters == filters


def with_another_bit(function):
    def wrong(*arguments):
        result = function(*arguments)
        first = result if isinstance(result, torch.Tensor) else result[0]
        bits = first.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[first.element_size()])
        bits[(0,) * bits.dim()] ^= 1
        return result

    return wrong


@by_operator
def test_an_operator_whose_bits_differ_is_not_replaced(operator, monkeypatch, unverified):
    with monkeypatch.context() as patch:
        patch.setitem(REPLACED, operator, with_another_bit(REPLACED[operator]))
        with pytest.warns(RuntimeWarning, match=rf"differ in .*\b{operator}\b.*; these stay torch's") as warned:
            handle = fakequant.accelerate()
    assert [w.filename for w in warned] == [__file__]
    changed = {o for o, dump in registered().items() if dump != TORCHS_OWN[o]}
    assert changed == set(OPERATORS) - {operator}
    assert handle.left == (f"aten::{operator}",)
    assert set(handle.replaced) == {f"aten::{o}" for o in changed}
    fakequant.accelerate()  # neither compares nor warns again
    handle.undo()
    assert registered() == TORCHS_OWN


def test_accelerate_raises_and_replaces_nothing_if_all_operators_differ(monkeypatch, unverified):
    with monkeypatch.context() as patch:
        for operator in OPERATORS:
            patch.setitem(REPLACED, operator, with_another_bit(REPLACED[operator]))
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"differ in .*; nothing was replaced"):
                fakequant.accelerate()
            assert registered() == TORCHS_OWN
    with fakequant.accelerate() as handle:
        assert handle.left == ()
        assert len(handle.replaced) == len(OPERATORS)


def answers_what_torch_refuses(function):
    """Returns a kernel that accepts all arguments and returns the first one where torch raises."""

    def careless(*arguments):
        result = function(*arguments)
        return (arguments[0],) * 3 if result is None else result

    return careless


@by_operator
def test_an_operator_that_accepts_arguments_torch_refuses_is_not_replaced(operator, monkeypatch, unverified):
    with monkeypatch.context() as patch:
        patch.setitem(REPLACED, operator, answers_what_torch_refuses(REPLACED[operator]))
        with pytest.warns(RuntimeWarning, match=rf"\b{operator}\b.*; these stay torch's"):
            handle = fakequant.accelerate()
    assert f"aten::{operator}" in handle.left


@pytest.mark.parametrize("default", ["dtype", "device"])
def test_accelerate_works_under_other_default_dtypes_and_devices(default, unverified):
    before = torch.get_default_dtype()
    try:
        if default == "dtype":
            torch.set_default_dtype(torch.float64)
            fakequant.accelerate()
        else:
            with torch.device("meta"):
                fakequant.accelerate()
    finally:
        torch.set_default_dtype(before)


def test_accelerate_that_fails_replaces_nothing(monkeypatch):
    impl = torch.library.Library.impl

    def failing(self, name, *arguments, **options):
        if name == OPERATORS[-1]:
            raise OSError("no more operators")
        return impl(self, name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.library.Library, "impl", failing)
        with pytest.raises(OSError, match="no more"):
            fakequant.accelerate()
    assert registered() == TORCHS_OWN
    with fakequant.accelerate():
        pass
    assert registered() == TORCHS_OWN


# --- threads ------------------------------------------------------------------------------


def run_threads(*functions):
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_accelerate_contexts_of_several_threads_keep_torchs_bits():
    data = torch.linspace(-1, 1, 1000)
    expected = torch.fake_quantize_per_tensor_affine(data, 0.1, 0, -8, 7)

    def computes():
        assert_same_tensors([expected], [torch.fake_quantize_per_tensor_affine(data, 0.1, 0, -8, 7)])

    def enters_and_leaves():
        for _ in range(200):
            with fakequant.accelerate() as handle:
                assert handle.replaced
                computes()

    def only_computes():
        for _ in range(200):
            computes()

    run_threads(*[enters_and_leaves] * 4)
    # `accelerate` contexts remove kernels only if no other thread could be about to call them.
    fakequant.decelerate()
    assert registered() == TORCHS_OWN
    with fakequant.accelerate():
        run_threads(*[enters_and_leaves, only_computes] * 2)
    assert registered() == TORCHS_OWN


SWITCHING_WHILE_OTHERS_COMPUTE = """
import sys, threading, time, torch, fakequant
sys.setswitchinterval(1e-5)
x = torch.linspace(-1, 1, 64)
def quantize():
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -8, 7)
expected, wrong, end = quantize(), [], time.time() + float(sys.argv[1])
def compute():
    while time.time() < end:
        try:
            if not torch.equal(quantize(), expected):
                wrong.append("other bits")
        except Exception as error:
            wrong.append(error)
threads = [threading.Thread(target=compute) for _ in range(4)]
for thread in threads: thread.start()
while time.time() < end:
    with fakequant.accelerate(): pass
for thread in threads: thread.join()
sys.exit(str(wrong[0]) if wrong else 0)
"""


def test_accelerating_while_other_threads_compute_keeps_torchs_bits():
    done = subprocess.run(
        [sys.executable, "-c", SWITCHING_WHILE_OTHERS_COMPUTE, "4" if ALL else "1.5"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-500:]
