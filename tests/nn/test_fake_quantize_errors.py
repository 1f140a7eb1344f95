"""`nn.FakeQuantize` refuses tensors and arguments that do not fit, and changes nothing."""

import pytest

import fakequant as fq
from fake_quantize_cases import AFFINE, BATCHES, OBSERVERS, assert_unchanged, each_running, state_of
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits, assert_same_state

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
observers = pytest.importorskip("fakequant.observers")

PER_CHANNEL, GROUPS = (fq.QuantSpec(axis=1), (None, 8)), (presets.int4(group_size=4), (6, 8))
MISFITS = {
    "missing axis": (*PER_CHANNEL, torch.ones(8)),
    "scalar": (*PER_CHANNEL, torch.tensor(1.0)),
    "wrong number of channels": (*PER_CHANNEL, torch.ones(4, 7)),
    "one channel": (*PER_CHANNEL, torch.ones(4, 1)),
    "group size does not divide": (*GROUPS, torch.ones(6, 6)),
    "fewer groups": (*GROUPS, torch.ones(6, 4)),
    "same number of groups in another layout": (*GROUPS, torch.ones(12, 4)),
    "same number of groups on more axes": (*GROUPS, torch.ones(2, 3, 8)),
    "one group": (*GROUPS, torch.ones(1, 4)),
    "integers": (AFFINE, None, torch.ones(3, dtype=torch.int32)),
    "complex numbers": (AFFINE, None, torch.ones(3, dtype=torch.complex64)),
    "sparse": (AFFINE, None, torch.eye(3).to_sparse()),
    "NumPy array": (AFFINE, None, torch.ones(3).numpy()),
    "NumPy array with channels last": (fq.QuantSpec(axis=-1), (6, 8), torch.ones(6, 8).numpy()),
    "list": (AFFINE, None, [1.0]),
    "meta device": (AFFINE, None, torch.ones(3, device="meta")),
    "scalar per token": (presets.int8_per_token(), None, torch.tensor(1.0)),
    "integers per token": (presets.int8_per_token(), None, torch.ones(2, 3, dtype=torch.int32)),
}
OCCASIONS = {
    "train": (observers.MinMax(), True, True),
    "eval": (observers.MinMax(), False, True),
    "only observing": (observers.MinMax(), True, False),
    "dynamic train": (observers.Dynamic(), True, True),
    "dynamic eval": (observers.Dynamic(), False, True),
    "binned train": (OBSERVERS["Percentile"], True, True),
}


@pytest.mark.parametrize(("observer", "training", "quantizing"), OCCASIONS.values(), ids=OCCASIONS)
@pytest.mark.parametrize(("spec", "shape", "bad"), MISFITS.values(), ids=MISFITS)
def test_tensor_that_does_not_fit_is_refused_with_the_path(spec, shape, bad, observer, training, quantizing):
    if spec.granularity == "token" and observer != observers.Dynamic():
        pytest.skip("per-token specs need Dynamic")
    module = fqnn.FakeQuantize(spec, observer, shape=shape, path="encoder.0.weight")
    module(BATCHES[0])
    module.train(training).quantizing = quantizing
    before = state_of(module)
    with pytest.raises((ValueError, IndexError, TypeError, RuntimeError), match=r"^FakeQuantize at encoder\.0\.weight"):
        module(bad)
    assert_unchanged(before, module)


@each_running
def test_tensor_on_another_device_leaves_the_quantizer_usable(observer):
    module, twin = (fqnn.FakeQuantize(AFFINE, observer) for _ in range(2))
    for m in (module, twin):
        m(BATCHES[0])
    with pytest.raises(RuntimeError, match="meta"):
        module(torch.ones(3, device="meta"))
    assert module.nonfinite == 0
    assert_same_bits(twin(BATCHES[1]), module(BATCHES[1]), "y")
    assert_same_state(twin, module)


CONSTRUCTION = {
    "spec is an int": (lambda: fqnn.FakeQuantize(8), TypeError, "`spec` must be a QuantSpec, got int"),
    "observer class": (
        lambda: fqnn.FakeQuantize(AFFINE, observers.MinMax),
        TypeError,
        "`observer` must be an Observer",
    ),
    "missing shape": (lambda: fqnn.FakeQuantize(presets.int8()), ValueError, "pass `shape`"),
    "unknown number of channels": (
        lambda: fqnn.FakeQuantize(presets.int8(), shape=(None, 8)),
        ValueError,
        "no fixed shape",
    ),
    "unknown number of groups": (
        lambda: fqnn.FakeQuantize(presets.int4(group_size=4), shape=(None, 8)),
        ValueError,
        "no fixed shape",
    ),
    "group size does not divide": (
        lambda: fqnn.FakeQuantize(presets.int4(group_size=3), shape=(6, 8)),
        ValueError,
        "does not divide axis -1",
    ),
    "per token with MinMax": (
        lambda: fqnn.FakeQuantize(presets.int8_per_token(), observers.MinMax()),
        ValueError,
        r"Use observer=Dynamic\(\)",
    ),
    "unknown gradient": (lambda: fqnn.FakeQuantize(AFFINE, gradient="ste"), ValueError, "`gradient` must be"),
    "eps of 0": (lambda: fqnn.FakeQuantize(AFFINE, eps=0.0), ValueError, "`eps` must be finite and greater than 0"),
}


@pytest.mark.parametrize(("make", "error", "message"), CONSTRUCTION.values(), ids=CONSTRUCTION)
def test_invalid_constructor_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
