"""How many codes and results may differ in a `Verification` that is ok."""

import pytest

pytest.importorskip("torch")
verdict = pytest.importorskip("fakequant._verify.verdict")

each_model = pytest.mark.parametrize("whose", ["prepared", "runtime"])
# The number of codes of a model, and how many of them may differ at ties: four, and one in 10,000.
TIES = [(10, 4), (9_999, 4), (10_000, 5), (1_000_000, 104)]


def differing(whose, codes, differ, ties, path="0.input_quantizer"):
    numbers = {f"{whose}_differ": differ, f"{whose}_steps": 1, f"{whose}_ties": ties, f"why_{whose}": "odd"}
    return verdict.TensorReport(path, codes=codes, **numbers)


def verification(*tensors, **outputs):
    return verdict.Verification("generic", list(tensors), {}, verdict.OutputReport(numbers=8, **outputs), {})


@each_model
@pytest.mark.parametrize(("codes", "most"), TIES)
def test_verification_is_ok_up_to_the_tolerated_number_of_ties(whose, codes, most):
    assert verification(differing(whose, codes, most, most)).ok
    found = verification(differing(whose, codes, most + 1, most + 1))
    assert not found.ok
    assert str(most + 1) in found.problem


@each_model
def test_more_ties_are_tolerated_where_steps_are_finer(whose):
    """Rounding is 256 times as large a part of a step of 16 bits."""
    tensor = differing(whose, 10_000, 4 + 256, 4 + 256)
    assert not verification(tensor).ok
    tensor.bits = 16
    assert verification(tensor).ok
    assert not verification(tensor, differing(whose, 100, 1, 1, "b")).ok


def test_codes_that_kernels_round_twice_are_tolerated_up_to_a_share():
    tensor = differing("prepared", 1000, 24, 0)
    assert not verification(tensor).ok
    tensor.prepared_rounded = 24
    assert verification(tensor).ok
    tensor.prepared_differ = tensor.prepared_rounded = 25
    assert "25 of 1000 codes" in verification(tensor).problem
    assert "kernels round otherwise; at most 24" in verification(tensor).problem
    tensor.prepared_differ = 26
    assert "odd" in verification(tensor).problem


@each_model
def test_verification_counts_ties_of_equal_inputs_once(whose):
    tensor = differing(whose, 100, 9, 9)
    assert not verification(tensor).ok
    setattr(tensor, f"{whose}_repeated_ties", 5)
    assert verification(tensor).ok
    setattr(tensor, f"{whose}_repeated_ties", 4)
    assert not verification(tensor).ok


@each_model
def test_verification_counts_ties_over_all_quantizers(whose):
    """Ties of one model are not added to those of the other."""
    tensors = [differing(whose, 100, 2, 2, path) for path in ("a", "b")]
    assert verification(*tensors).ok
    other = "runtime" if whose == "prepared" else "prepared"
    assert verification(*tensors, differing(other, 100, 4, 4, "c")).ok
    assert not verification(*tensors, differing(whose, 100, 1, 1, "c")).ok


@each_model
def test_verification_is_not_ok_with_one_difference_that_is_not_a_tie(whose):
    found = verification(differing(whose, 10_000_000, 3, 2))
    assert not found.ok
    assert "0.input_quantizer" in found.problem
    assert "odd" in found.problem


@pytest.mark.parametrize("outputs", [{"prepared_unexplained": 1}, {"runtime_unexplained": 1}, {"disturbance": 1e-6}])
def test_verification_is_not_ok_with_one_result_beyond_rounding(outputs):
    assert verification(differing("runtime", 100, 0, 0)).ok
    assert not verification(differing("runtime", 100, 0, 0), **outputs).ok
