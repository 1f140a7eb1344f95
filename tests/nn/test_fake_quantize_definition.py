"""`nn.FakeQuantize`: observe, choose qparams, quantize, with the same result on every code path."""

import itertools
from contextlib import nullcontext

import pytest

import fakequant as fq
from fake_quantize_cases import (
    AFFINE,
    BATCHES,
    DY,
    INF,
    NAN,
    OBSERVERS,
    WIDE,
    assert_unchanged,
    changed,
    each_gradient,
    each_observer,
    each_running,
    each_spec,
    each_way,
    leaf,
    run,
    state_of,
    ways_of,
)
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits, assert_same_state

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
observers = pytest.importorskip("fakequant.observers")

DTYPES = {"float32": torch.float32, "half": torch.half, "bfloat16": torch.bfloat16, "double": torch.double}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def three_steps(x, state, observer, spec, gradient, dy=DY):
    """Observes, chooses qparams and quantizes, step by step. Changes `state`."""
    seen = fq.min_max(x, spec)
    if isinstance(observer, observers.MovingAverage):
        weight = torch.tensor(observer.constant, dtype=torch.float32)
        for name, value in (("running_min", seen.min), ("running_max", seen.max)):
            value, running = value.float(), state[name]
            state[name] = torch.where(running.isinf(), value, running + weight * (value - running))
    elif isinstance(observer, observers.MinMax):
        state["running_min"] = state["running_min"].minimum(seen.min.float())
        state["running_max"] = state["running_max"].maximum(seen.max.float())
    elif isinstance(observer, observers.Dynamic):
        state["running_min"], state["running_max"] = seen.min.float(), seen.max.float()
    else:
        observer.update(state, x, spec)
    scale, zero_point = fq.choose_qparams(*observer.range(state, spec), spec)
    x = leaf(x)
    y = fq.fake_quantize(x, scale, zero_point, spec, gradient=gradient)
    return y, torch.autograd.grad(y, x, dy.to(y.dtype))[0], scale, zero_point


# --- one definition ---------------------------------------------------------------------------------


@each_spec
@each_observer
def test_training_observes_chooses_qparams_and_quantizes(observer, spec, shape):
    for way, gradient in itertools.product(ways_of(observer), ("clipped", "pass")):
        assert_three_steps(observer, spec, shape, gradient, way)


def assert_three_steps(observer, spec, shape, gradient, way):
    module = fqnn.FakeQuantize(spec, observer, shape=shape, gradient=gradient)
    state = observer.init(tuple(module.scale.shape))
    for x in BATCHES:
        y, dx = run(module, x, way=way)
        *expected, scale, zero_point = three_steps(x, state, observer, spec, gradient)
        for name, e, a in zip(("y", "dx"), expected, (y, dx), strict=True):
            assert_same_bits(e, a, name)
        assert_same_bits(scale, module.scale, "scale")
        assert_same_bits(zero_point, module.zero_point, "zero_point")
        for name, value in state.items():
            assert_same_bits(value, getattr(module, name), name)


@each_way
@each_gradient
@each_spec
def test_evaluation_quantizes_with_the_stored_scale(spec, shape, gradient, way):
    module = fqnn.FakeQuantize(spec, observers.MinMax(), shape=shape, gradient=gradient)
    run(module, BATCHES[0])
    before = state_of(module.eval())
    y, dx = run(module, WIDE, way=way)
    x = leaf(WIDE)
    expected = fq.fake_quantize(x, module.scale, module.zero_point, spec, gradient=gradient)
    assert_same_bits(expected, y, "y")
    assert_same_bits(torch.autograd.grad(expected, x, DY)[0], dx, "dx")
    clipped = (dx == 0).float().mean().item()
    assert clipped > 0.5 if gradient == "clipped" else clipped == 0
    assert_unchanged(before, module)


@each_way
@each_gradient
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 5), (7,), (4, 1)], ids=str)
def test_per_token_ranges_are_those_of_the_current_tensor(shape, training, gradient, way):
    spec = presets.int8_per_token()
    module = fqnn.FakeQuantize(spec, gradient=gradient).train(training)
    for scale in (1.0, 100.0):
        x = torch.randn(shape) * scale
        y, dx = run(module, x, torch.ones(shape), way)
        expected = three_steps(x, {}, observers.Dynamic(), spec, gradient, torch.ones(shape))
        assert_same_bits(expected[0], y, "y")
        assert_same_bits(expected[1], dx, "dx")
    assert set(module.state_dict()) == {"grid", "switches"}


@each_way
@each_spec
@each_dtype
def test_output_keeps_the_input_dtype_and_scales_stay_float32(dtype, spec, shape, way):
    module = fqnn.FakeQuantize(spec, observers.MinMax(), shape=shape).to(dtype)
    state = observers.MinMax().init(tuple(module.scale.shape))
    for x in BATCHES:
        y, dx = run(module, x.to(dtype), way=way)
        expected = three_steps(x.to(dtype), state, observers.MinMax(), spec, "clipped")
        for name, e, a in zip(("y", "dx", "scale", "zero_point"), expected, (y, dx, *module.qparams()), strict=True):
            assert_same_bits(e, a, name)
    assert (y.dtype, module.scale.dtype, module.zero_point.dtype) == (dtype, torch.float32, torch.int32)


@each_way
@each_running
def test_float64_data_beyond_float32_has_a_finite_scale(observer, way):
    module = fqnn.FakeQuantize(fq.QuantSpec(symmetric=False), observer)
    y, dx = run(module, torch.tensor([-1e300, 1e300, 1.0], dtype=torch.double), torch.ones(3), way)
    assert module.scale.isfinite()
    assert y.isfinite().all()
    largest = torch.finfo(torch.float32).max
    assert [module.running_min.item(), module.running_max.item()] == [-largest, largest]
    assert dx.tolist() == [0, 0, 1]


CAST = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to half": lambda m: m.to("cpu", torch.half),
    "type": lambda m: m.type(torch.half),
}


@pytest.mark.parametrize("cast", CAST.values(), ids=CAST)
@pytest.mark.parametrize("observer", [OBSERVERS["MovingAverage"], OBSERVERS["Histogram"]], ids=["running", "binned"])
def test_casting_a_model_leaves_its_quantizers_unchanged(observer, cast):
    module = fqnn.FakeQuantize(AFFINE, observer)
    module(BATCHES[0])
    before = state_of(module)
    model = cast(torch.nn.Sequential(torch.nn.Linear(2, 2), module))
    assert model[0].weight.dtype != torch.float32
    assert_unchanged(before, module)
    assert module._nonfinite.dtype == torch.int64


@each_way
@each_dtype
def test_autocast_does_not_change_results_or_state(dtype, way):
    module, other = (fqnn.FakeQuantize(AFFINE, observers.MovingAverage(0.3)) for _ in range(2))
    for training, x in ((True, BATCHES[0]), (True, BATCHES[1]), (False, BATCHES[2])):
        expected = run(other.train(training), x.to(dtype))
        with torch.autocast("cpu", torch.bfloat16):
            actual = run(module.train(training), x.to(dtype), way=way)
        for e, a in zip(expected, actual, strict=True):
            assert_same_bits(e, a)
    assert_same_state(other, module)


# --- switches ---------------------------------------------------------------------------------------

SWITCHES = list(itertools.product([True, False], repeat=4))


def label(on):
    names = ("training", "observing", "quantizing", "frozen")
    return " ".join(name for name, value in zip(names, on, strict=True) if value) or "nothing"


@pytest.mark.parametrize("on", SWITCHES, ids=label)
@each_observer
def test_switches_decide_what_is_observed_and_quantized(observer, on):
    training, observing, quantizing, frozen = on
    module = fqnn.FakeQuantize(AFFINE, observer)
    module(BATCHES[0])
    fqnn.switch_quantizers(module.train(training), observing=observing, quantizing=quantizing, frozen=frozen)
    before, x = state_of(module), leaf(WIDE)
    looks = observing and not frozen and (training or observer == observers.Dynamic())
    looks = looks and observer.needs_data
    y = module(x)
    assert (module.training, module.observing, module.quantizing, module.frozen) == on
    if quantizing:
        scale, zero_point = module.qparams()
        assert_same_bits(fq.fake_quantize(x, scale, zero_point, AFFINE), y, "y")
    else:
        assert y is x
    if looks:
        twin = fqnn.FakeQuantize(AFFINE, observer)
        twin(BATCHES[0])
        twin(WIDE)
        assert_same_bits(twin.scale, module.qparams().scale, "scale")
        assert changed(before, module) >= {"running_max", "scale"}
        for name in module._names:
            assert_same_bits(getattr(twin, name), getattr(module, name), name)
    else:
        assert_unchanged(before, module)


@pytest.mark.parametrize("on", SWITCHES, ids=label)
def test_nonfinite_values_are_counted_only_while_observing_in_training(on):
    training, observing, quantizing, frozen = on
    module = fqnn.FakeQuantize(AFFINE)
    module(BATCHES[0])
    fqnn.switch_quantizers(module.train(training), observing=observing, quantizing=quantizing, frozen=frozen)
    looks = training and observing and not frozen
    with pytest.warns(RuntimeWarning, match="NaN or infinite") if looks else nullcontext():
        module(torch.tensor([NAN, INF, 1.0]))
    assert module.nonfinite == 2 * looks


@each_observer
def test_observing_first_gives_the_same_state_as_observing_while_quantizing(observer):
    together, first = (fqnn.FakeQuantize(AFFINE, observer) for _ in range(2))
    first.quantizing = False
    for x in BATCHES:
        together(x)
        assert first(x) is x
    first.quantizing = True
    assert_same_state(together, first)
    assert_same_bits(together.eval()(WIDE), first.eval()(WIDE), "y")


@each_observer
def test_freezing_keeps_the_scale_of_the_data_observed_before(observer):
    module, twin = (fqnn.FakeQuantize(AFFINE, observer) for _ in range(2))
    twin(BATCHES[0])
    module.quantizing = False
    module(BATCHES[0])
    fqnn.switch_quantizers(module, quantizing=True, frozen=True)
    module(WIDE)
    assert_same_bits(twin.qparams().scale, module.qparams().scale, "scale")


@pytest.mark.parametrize("name", ["observing", "quantizing", "frozen"])
@pytest.mark.parametrize("bad", [1, 0, None, "on", torch.tensor(True)], ids=repr)
def test_switch_refuses_values_that_are_not_bool(name, bad):
    module = fqnn.FakeQuantize(AFFINE)
    before = state_of(module)
    with pytest.raises(TypeError, match=f"`{name}` is a switch: True or False"):
        setattr(module, name, bad)
    assert_unchanged(before, module)
