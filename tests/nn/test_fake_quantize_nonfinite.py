"""`nn.FakeQuantize` before it has seen data, on NaN and infinities, and on empty tensors."""

import itertools
import warnings
from contextlib import nullcontext

import pytest

import fakequant as fq
from fake_quantize_cases import (
    AFFINE,
    BATCHES,
    INF,
    NAN,
    OBSERVERS,
    RUNNING,
    WIDE,
    assert_unchanged,
    changed,
    each_observer,
    each_spec,
    each_way,
    run,
    state_of,
    ways_of,
)
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits, assert_same_state

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
observers = pytest.importorskip("fakequant.observers")

# --- before any data --------------------------------------------------------------------------------

UNSEEN = {
    "eval": lambda m: m.eval(),
    "not observing": lambda m: fqnn.switch_quantizers(m, observing=False),
    "frozen": lambda m: fqnn.switch_quantizers(m, frozen=True),
}
NEED_DATA = {name: o for name, o in OBSERVERS.items() if o.needs_data}


@each_way
@pytest.mark.parametrize("switch", UNSEEN.values(), ids=UNSEEN)
@pytest.mark.parametrize("numerics", ["onnx", "torch", "half_away"])
@pytest.mark.parametrize("axis", [None, 0], ids=["tensor", "channel"])
def test_quantizing_before_observing_is_an_error_with_the_path(switch, numerics, axis, way):
    spec = fq.QuantSpec(symmetric=False, numerics=numerics, axis=axis)
    module = fqnn.FakeQuantize(spec, shape=(6, 8), path="encoder.0.input")
    switch(module)
    before = state_of(module)
    assert module.scale.isnan().all()
    with (
        way(),
        pytest.raises(RuntimeError, match=r"^FakeQuantize at encoder\.0\.input has not observed a finite value"),
    ):
        module(BATCHES[0])
    with pytest.raises(RuntimeError, match=r"at encoder\.0\.input has not observed a finite value"):
        module.qparams()
    assert_unchanged(before, module)


@pytest.mark.parametrize("observer", NEED_DATA.values(), ids=NEED_DATA)
def test_quantizing_without_data_is_an_error_for_every_observer(observer):
    module = fqnn.FakeQuantize(AFFINE, observer, path="a.b")
    module.observing = False
    with pytest.raises(RuntimeError, match=r"at a\.b has not observed a finite value"):
        module(BATCHES[0])


def test_fixed_range_quantizes_without_data():
    module = fqnn.FakeQuantize(AFFINE, observers.Fixed(-0.5, 1.0)).eval()
    scale, zero_point = fq.choose_qparams(torch.tensor(-0.5), torch.tensor(1.0), AFFINE)
    assert_same_bits(scale, module.scale, "scale")
    assert_same_bits(fq.fake_quantize(WIDE, scale, zero_point, AFFINE), module(WIDE), "y")


@each_way
@pytest.mark.parametrize("observer", NEED_DATA.values(), ids=NEED_DATA)
@pytest.mark.parametrize("axis", [None, 0], ids=["tensor", "channel"])
def test_first_batch_without_finite_values_is_an_error_with_the_path(observer, axis, way):
    if observer == observers.Dynamic():
        pytest.skip("Dynamic has the range 0 to 0 without finite values")
    spec = fq.QuantSpec(symmetric=False, axis=axis)
    module = fqnn.FakeQuantize(spec, observer, shape=(6, 8), path="encoder.0")
    x = BATCHES[0].clone()
    x[(0,) if axis == 0 else ()] = NAN
    with warnings.catch_warnings(), way():
        warnings.simplefilter("ignore")
        with pytest.raises((ValueError, RuntimeError), match=r"at encoder\.0.* not (seen|observed) a finite value"):
            module(x)
    scale = module.scale.flatten()
    assert scale[0].isnan()
    assert not (module.scale == 1).any()


# --- NaN and infinities -----------------------------------------------------------------------------

BAD = torch.tensor([NAN, INF, -INF, NAN, INF, -INF])


def with_and_without(x, spec):
    """Returns the batch with nonfinite values added to every channel or group, and without them."""
    if spec.axis == 0:
        return torch.cat([x, BAD[:, None]], 1), x
    if spec.axis is not None and spec.group_size is None:
        return torch.cat([x, BAD.repeat(2)[None, :8]], 0), x
    if spec.group_size is not None:  # replaced by its neighbour, which does not change the range
        bad = x.clone()
        bad[:, 0], bad[:, 4] = BAD, NAN
        other = x.clone()
        other[:, 0], other[:, 4] = x[:, 1], x[:, 5]
        return bad, other
    return torch.cat([x.flatten(), BAD]), x.flatten()


@each_spec
@each_observer
@pytest.mark.parametrize("quantizing", [True, False], ids=["quantizing", "only observing"])
def test_nonfinite_values_are_counted_and_otherwise_ignored(observer, spec, shape, quantizing):
    if spec.group_size is not None and observer not in RUNNING.values():
        pytest.skip("a replaced value is counted twice in a histogram")
    for way in ways_of(observer):
        assert_as_if_absent(observer, spec, shape, quantizing, way)


def assert_as_if_absent(observer, spec, shape, quantizing, way):
    module, clean = (fqnn.FakeQuantize(spec, observer, shape=shape, path="blocks.3.input") for _ in range(2))
    fqnn.switch_quantizers(module, quantizing=quantizing)
    total = 0
    with way(), warnings.catch_warnings(record=True, action="always") as caught:
        for x in BATCHES:
            x, without = with_and_without(x, spec)
            module(x)
            total += (~x.isfinite()).sum().item()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                clean(without)
    module.quantizing = True
    assert_same_state(clean, module)
    if observer.needs_data:
        assert module.nonfinite == total
        assert len(caught) == 1, "one warning"
        assert caught[0].category is RuntimeWarning
        assert "FakeQuantize at blocks.3.input has observed" in str(caught[0].message)
    else:
        assert (module.nonfinite, caught) == (0, [])


@each_way
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("axis", [None, 0, -1], ids=["tensor", "channel", "last channel"])
def test_nan_stays_nan_infinities_saturate_and_both_have_zero_gradient(axis, training, way):
    spec = fq.QuantSpec(bits=4, symmetric=False, axis=axis)
    module = fqnn.FakeQuantize(spec, observers.MinMax(), shape=(6, 8))
    module(BATCHES[0])
    x = BATCHES[0].clone()
    x[0, :3] = BAD[:3]
    with pytest.warns(RuntimeWarning, match="NaN or infinite") if training else nullcontext():
        y, dx = run(module.train(training), x, way=way)
    scale, zero_point = (v.expand(6) if axis is None else v for v in module.qparams())
    at = [0, 0, 0] if axis != -1 else [0, 1, 2]
    ends = [((q - zero_point[c]) * scale[c]).item() for c, q in zip(at[1:], (spec.qmax, spec.qmin), strict=True)]
    assert y[0, 0].isnan()
    assert y[0, 1:3].tolist() == ends
    assert_same_bits(torch.zeros(3), dx[0, :3], "dx")
    assert_same_bits(fq.fake_quantize(x, *module.qparams(), spec), y, "y")


@each_way
@each_observer
def test_later_batch_without_finite_values_changes_only_the_count(observer, way):
    module = fqnn.FakeQuantize(AFFINE, observer, path="p")
    module(BATCHES[0])
    before = state_of(module)
    with way(), pytest.warns(RuntimeWarning, match="at p ") if observer.needs_data else nullcontext():
        y = module(BAD)
    assert y.isnan().tolist() == BAD.isnan().tolist()
    if observer == observers.Dynamic():  # the range 0 to 0
        assert [module.running_min.item(), module.running_max.item()] == [0, 0]
        assert module.scale.item() == torch.finfo(torch.float32).eps
    else:
        assert changed(before, module) == ({"nonfinite"} if observer.needs_data else set())


def test_nonfinite_warning_is_given_once_per_quantizer():
    model = torch.nn.ModuleDict({"a": fqnn.FakeQuantize(AFFINE), "b": fqnn.FakeQuantize(AFFINE)})
    fqnn.name_quantizers(model)
    with warnings.catch_warnings(record=True, action="always") as caught:
        for _ in range(3):
            for module in model.values():
                module(torch.tensor([1.0, NAN]))
        model.eval()
        model.train()
        model.state_dict()
        assert len(caught) == 2
        model["a"].reset_parameters()
        assert model["a"].nonfinite == 0
        model["a"](torch.tensor([INF, 1.0]))
    assert [str(w.message).split(" has ")[0] for w in caught] == [f"FakeQuantize at {p}" for p in "aba"]
    assert (model["a"].nonfinite, model["b"].nonfinite) == (1, 3)


# --- empty tensors ----------------------------------------------------------------------------------


@each_way
@each_observer
@pytest.mark.parametrize("axis", [None, 1], ids=["tensor", "channel"])
def test_empty_tensor_gives_an_empty_result_and_leaves_the_state(observer, axis, way):
    for training, quantizing in itertools.product([True, False], repeat=2):
        assert_empty(observer, training, quantizing, axis, way)


def assert_empty(observer, training, quantizing, axis, way):
    module = fqnn.FakeQuantize(fq.QuantSpec(axis=axis), observer, shape=(None, 8))
    module(BATCHES[0])
    module.train(training).quantizing = quantizing
    before, x = state_of(module), torch.empty(0, 8, requires_grad=True)
    with way():
        y = module(x)
        y.sum().backward()
    assert (y.shape, y.dtype, x.grad.shape) == ((0, 8), torch.float32, (0, 8))
    if observer.dynamic:  # the range of an empty tensor is 0 to 0
        assert not module.running_min.any()
        assert not module.running_max.any()
    else:
        assert_unchanged(before, module)


@each_way
def test_empty_tensor_per_token_gives_an_empty_result(way):
    module = fqnn.FakeQuantize(presets.int8_per_token())
    with way():
        for shape in ((0, 8), (8, 0)):
            assert module(torch.empty(shape)).shape == shape


def test_scales_of_other_rows_stay_if_one_row_of_many_has_no_range():
    """With many rows the kernel observes and quantizes them chunk by chunk."""
    quantizer, untouched = (
        fqnn.FakeQuantize(fq.QuantSpec(axis=0), observers.MovingAverage(), shape=(64, 1024)) for _ in range(2)
    )
    x = torch.ones(64, 1024)
    x[50] = torch.nan
    with pytest.raises(ValueError, match="1 of 64 blocks"):
        quantizer(x)
    # Buffers, not the state_dict: reading that computes scales again.
    for name, value in untouched.named_buffers():
        assert_same_bits(quantizer.get_buffer(name), value)
