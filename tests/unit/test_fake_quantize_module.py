"""`nn.FakeQuantize`: what the switches do, and one result in every way it can be computed."""

import copy
import itertools
import warnings
from contextlib import contextmanager, nullcontext

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
observers = pytest.importorskip("fakequant.observers")
nodes = pytest.importorskip("fakequant._backends.torch.compiled_nodes")
forward_ad = pytest.importorskip("torch.autograd.forward_ad")
TorchDispatchMode = pytest.importorskip("torch.utils._python_dispatch").TorchDispatchMode
FakeTensorMode = pytest.importorskip("torch._subclasses").FakeTensorMode

NAN, INF = float("nan"), float("inf")
AFFINE = presets.uint4()
# Each with the shape of its tensors, which are all 6 x 8.
SPECS = {
    "tensor": (AFFINE, None),
    "channel": (presets.int8(), (6, None)),
    "last channel": (fq.QuantSpec(bits=4, symmetric=False, axis=-1, numerics="half_away"), (None, 8)),
    "group": (presets.int4(group=4), (6, 8)),
    "torch": (fq.QuantSpec(symmetric=False, numerics="torch"), None),
    "torch channel": (fq.QuantSpec(axis=1, numerics="torch"), (None, 8)),
}
RUNNING = {
    "MinMax": observers.MinMax(),
    "MovingAverage": observers.MovingAverage(0.3),
    "Dynamic": observers.Dynamic(),
}
OBSERVERS = RUNNING | {
    "Percentile": observers.Percentile(90.0, bins=64),
    "Histogram": observers.Histogram(bins=64, steps=8),
    "MSE": observers.MSE(steps=8),
    "Entropy": observers.Entropy(bins=64, steps=8),
    "Fixed": observers.Fixed(-0.75, 1.5),
}
each_observer = pytest.mark.parametrize("observer", OBSERVERS.values(), ids=OBSERVERS)
each_running = pytest.mark.parametrize("observer", RUNNING.values(), ids=RUNNING)
each_spec = pytest.mark.parametrize(("spec", "shape"), SPECS.values(), ids=SPECS)
each_gradient = pytest.mark.parametrize("gradient", ["clipped", "pass"])
DTYPES = {"float32": torch.float32, "half": torch.half, "bfloat16": torch.bfloat16, "double": torch.double}
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


class Watching(TorchDispatchMode):
    """Changes nothing; but what runs under a mode goes through the dispatcher."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextmanager
def without_compiled_nodes():
    before, nodes.compiled = nodes.compiled, None
    yield
    nodes.compiled = before


WAYS = {"nodes": nullcontext, "Python": without_compiled_nodes, "operators": Watching}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
# The number of elements of a batch is not a multiple of 8; values lie between and on the codes, and beyond the range.
torch.manual_seed(0)
BATCHES = [torch.randn(6, 8) * width for width in (1.0, 0.25, 3.0)]
BATCHES[0][0, :4] = torch.tensor([0.5, -0.5, 0.0, -0.0])
DY = torch.randn(6, 8)
WIDE = torch.linspace(-20, 20, 48).view(6, 8)


def same(expected, actual, *names):
    assert expected.dtype == actual.dtype, names
    exact = [t.detach().float() if t.dtype == torch.bfloat16 else t.detach() for t in (expected, actual)]
    assert_same_bits(*(t.numpy() for t in exact), *names)


def same_state(expected, actual):
    expected, actual = expected.state_dict(), actual.state_dict()
    assert list(expected) == list(actual)
    for name, value in expected.items():
        same(value, actual[name], name)


def state_of(module):
    """Also what is no buffer, as copies."""
    values = {name: value.clone() for name, value in module.state_dict().items()}
    return values | {"nonfinite": torch.tensor(module.nonfinite)}


def changed(before, module):
    return {k for k, v in state_of(module).items() if not torch.equal(torch.nan_to_num(v), torch.nan_to_num(before[k]))}


def assert_unchanged(before, module):
    for name, value in state_of(module).items():
        same(before[name], value, name)


def leaf(x):
    return x.detach().clone().requires_grad_()


def run(module, x, dy=DY, way=nullcontext):
    """y, and the gradient."""
    x = leaf(x)
    with way():
        y = module(x)
        (dx,) = torch.autograd.grad(y, x, dy.to(y.dtype))
    return y, dx


def three_steps(x, state, observer, spec, gradient, dy=DY):
    """The definition: observe, choose scale and zero point, quantize. `state` is changed."""
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


# --- one definition -------------------------------------------------------------------------------


def ways_of(observer):
    """Only a running range is followed in more than one way."""
    return WAYS.values() if observer in RUNNING.values() else [nullcontext]


@each_spec
@each_observer
def test_training_is_the_three_steps_one_after_the_other(observer, spec, shape):
    for way, gradient in itertools.product(ways_of(observer), ("clipped", "pass")):
        assert_three_steps(observer, spec, shape, gradient, way)


def assert_three_steps(observer, spec, shape, gradient, way):
    module = fqnn.FakeQuantize(spec, observer, shape=shape, gradient=gradient)
    state = observer.init(tuple(module.scale.shape))
    for x in BATCHES:
        y, dx = run(module, x, way=way)
        *expected, scale, zero_point = three_steps(x, state, observer, spec, gradient)
        for name, e, a in zip(("y", "dx"), expected, (y, dx), strict=True):
            same(e, a, name)
        same(scale, module.scale, "scale")
        same(zero_point, module.zero_point, "zero_point")
        for name, value in state.items():
            same(value, getattr(module, name), name)


@each_way
@each_gradient
@each_spec
def test_evaluation_quantizes_with_the_scale_there_is(spec, shape, gradient, way):
    module = fqnn.FakeQuantize(spec, observers.MinMax(), shape=shape, gradient=gradient)
    run(module, BATCHES[0])
    before = state_of(module.eval())
    y, dx = run(module, WIDE, way=way)
    x = leaf(WIDE)
    expected = fq.fake_quantize(x, module.scale, module.zero_point, spec, gradient=gradient)
    same(expected, y, "y")
    same(torch.autograd.grad(expected, x, DY)[0], dx, "dx")
    clipped = (dx == 0).float().mean().item()
    assert clipped > 0.5 if gradient == "clipped" else clipped == 0
    assert_unchanged(before, module)


@each_way
@each_gradient
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 5), (7,), (4, 1)], ids=str)
def test_ranges_per_token_are_those_of_the_tensor(shape, training, gradient, way):
    spec = presets.int8_per_token()
    module = fqnn.FakeQuantize(spec, gradient=gradient).train(training)
    for scale in (1.0, 100.0):
        x = torch.randn(shape) * scale
        y, dx = run(module, x, torch.ones(shape), way)
        expected = three_steps(x, {}, observers.Dynamic(), spec, gradient, torch.ones(shape))
        same(expected[0], y, "y")
        same(expected[1], dx, "dx")
    assert set(module.state_dict()) == {"grid", "switches"}


@each_way
@each_spec
@each_dtype
def test_every_dtype_keeps_its_own_and_scales_stay_float32(dtype, spec, shape, way):
    module = fqnn.FakeQuantize(spec, observers.MinMax(), shape=shape).to(dtype)
    state = observers.MinMax().init(tuple(module.scale.shape))
    for x in BATCHES:
        y, dx = run(module, x.to(dtype), way=way)
        expected = three_steps(x.to(dtype), state, observers.MinMax(), spec, "clipped")
        for name, e, a in zip(("y", "dx", "scale", "zero_point"), expected, (y, dx, *module.qparams()), strict=True):
            same(e, a, name)
    assert (y.dtype, module.scale.dtype, module.zero_point.dtype) == (dtype, torch.float32, torch.int32)


@each_way
@each_running
def test_doubles_beyond_float32_have_a_finite_scale(observer, way):
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
def test_casting_a_model_changes_no_bit_of_a_quantizer(observer, cast):
    module = fqnn.FakeQuantize(AFFINE, observer)
    module(BATCHES[0])
    before = state_of(module)
    model = cast(torch.nn.Sequential(torch.nn.Linear(2, 2), module))
    assert model[0].weight.dtype != torch.float32
    assert_unchanged(before, module)
    assert module._nonfinite.dtype == torch.int64


@each_way
@each_dtype
def test_autocast_changes_nothing(dtype, way):
    module, other = (fqnn.FakeQuantize(AFFINE, observers.MovingAverage(0.3)) for _ in range(2))
    for training, x in ((True, BATCHES[0]), (True, BATCHES[1]), (False, BATCHES[2])):
        expected = run(other.train(training), x.to(dtype))
        with torch.autocast("cpu", torch.bfloat16):
            actual = run(module.train(training), x.to(dtype), way=way)
        for e, a in zip(expected, actual, strict=True):
            same(e, a)
    same_state(other, module)


# --- switches -------------------------------------------------------------------------------------

SWITCHES = list(itertools.product([True, False], repeat=4))


def label(on):
    names = ("training", "observing", "quantizing", "frozen")
    return " ".join(name for name, value in zip(names, on, strict=True) if value) or "nothing"


@pytest.mark.parametrize("on", SWITCHES, ids=label)
@each_observer
def test_what_each_combination_of_switches_changes(observer, on):
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
        same(fq.fake_quantize(x, scale, zero_point, AFFINE), y, "y")
    else:
        assert y is x
    if looks:
        twin = fqnn.FakeQuantize(AFFINE, observer)
        twin(BATCHES[0])
        twin(WIDE)
        same(twin.scale, module.qparams().scale, "scale")
        assert changed(before, module) >= {"running_max", "scale"}
        for name in module._names:
            same(getattr(twin, name), getattr(module, name), name)
    else:
        assert_unchanged(before, module)


@pytest.mark.parametrize("on", SWITCHES, ids=label)
def test_what_each_combination_counts(on):
    training, observing, quantizing, frozen = on
    module = fqnn.FakeQuantize(AFFINE)
    module(BATCHES[0])
    fqnn.switch_quantizers(module.train(training), observing=observing, quantizing=quantizing, frozen=frozen)
    looks = training and observing and not frozen
    with pytest.warns(RuntimeWarning, match="NaN or infinite") if looks else nullcontext():
        module(torch.tensor([NAN, INF, 1.0]))
    assert module.nonfinite == 2 * looks


@each_observer
def test_observing_first_and_quantizing_later_is_observing_and_quantizing(observer):
    together, first = (fqnn.FakeQuantize(AFFINE, observer) for _ in range(2))
    first.quantizing = False
    for x in BATCHES:
        together(x)
        assert first(x) is x
    first.quantizing = True
    same_state(together, first)
    same(together.eval()(WIDE), first.eval()(WIDE), "y")


@each_observer
def test_a_frozen_scale_is_that_of_what_was_observed_before(observer):
    module, twin = (fqnn.FakeQuantize(AFFINE, observer) for _ in range(2))
    twin(BATCHES[0])
    module.quantizing = False
    module(BATCHES[0])
    fqnn.switch_quantizers(module, quantizing=True, frozen=True)
    module(WIDE)
    same(twin.qparams().scale, module.qparams().scale, "scale")


@pytest.mark.parametrize("name", ["observing", "quantizing", "frozen"])
@pytest.mark.parametrize("bad", [1, 0, None, "on", torch.tensor(True)], ids=repr)
def test_a_switch_is_a_bool(name, bad):
    module = fqnn.FakeQuantize(AFFINE)
    before = state_of(module)
    with pytest.raises(TypeError, match=f"`{name}` is a switch: True or False"):
        setattr(module, name, bad)
    assert_unchanged(before, module)


# --- before anything was seen ---------------------------------------------------------------------

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
def test_quantizing_before_anything_was_observed_is_an_error_with_the_path(switch, numerics, axis, way):
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
def test_every_observer_needs_data(observer):
    module = fqnn.FakeQuantize(AFFINE, observer, path="a.b")
    module.observing = False
    with pytest.raises(RuntimeError, match=r"at a\.b has not observed a finite value"):
        module(BATCHES[0])


def test_a_fixed_range_needs_none():
    module = fqnn.FakeQuantize(AFFINE, observers.Fixed(-0.5, 1.0)).eval()
    scale, zero_point = fq.choose_qparams(torch.tensor(-0.5), torch.tensor(1.0), AFFINE)
    same(scale, module.scale, "scale")
    same(fq.fake_quantize(WIDE, scale, zero_point, AFFINE), module(WIDE), "y")


@each_way
@pytest.mark.parametrize("observer", NEED_DATA.values(), ids=NEED_DATA)
@pytest.mark.parametrize("axis", [None, 0], ids=["tensor", "channel"])
def test_a_first_batch_without_a_finite_value_is_an_error_with_the_path(observer, axis, way):
    if observer == observers.Dynamic():
        pytest.skip("which has the range 0 to 0 then")
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


# --- NaN and infinities ---------------------------------------------------------------------------

BAD = torch.tensor([NAN, INF, -INF, NAN, INF, -INF])


def with_and_without(x, spec):
    """The batch with values that are not finite added where they are in every channel or group, and without them."""
    if spec.axis == 0:
        return torch.cat([x, BAD[:, None]], 1), x
    if spec.axis is not None and spec.group_size is None:
        return torch.cat([x, BAD.repeat(2)[None, :8]], 0), x
    if spec.group_size is not None:  # as if it were its neighbour, which does not change the range
        bad = x.clone()
        bad[:, 0], bad[:, 4] = BAD, NAN
        other = x.clone()
        other[:, 0], other[:, 4] = x[:, 1], x[:, 5]
        return bad, other
    return torch.cat([x.flatten(), BAD]), x.flatten()


@each_spec
@each_observer
@pytest.mark.parametrize("quantizing", [True, False], ids=["quantizing", "only observing"])
def test_values_that_are_not_finite_are_as_if_absent_and_counted(observer, spec, shape, quantizing):
    if spec.group_size is not None and observer not in RUNNING.values():
        pytest.skip("counts of neighbours are not those of absent values")
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
    same_state(clean, module)
    if observer.needs_data:
        assert module.nonfinite == total
        assert len(caught) == 1, "said once"
        assert caught[0].category is RuntimeWarning
        assert "FakeQuantize at blocks.3.input has observed" in str(caught[0].message)
    else:
        assert (module.nonfinite, caught) == (0, [])


@each_way
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("axis", [None, 0, -1], ids=["tensor", "channel", "last channel"])
def test_nan_stays_nan_infinities_saturate_and_neither_has_a_gradient(axis, training, way):
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
    same(torch.zeros(3), dx[0, :3], "dx")
    same(fq.fake_quantize(x, *module.qparams(), spec), y, "y")


@each_way
@each_observer
def test_a_later_batch_without_a_finite_value_changes_nothing_but_the_count(observer, way):
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


def test_values_that_are_not_finite_are_told_of_once_per_quantizer():
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


# --- empty tensors --------------------------------------------------------------------------------


@each_way
@each_observer
@pytest.mark.parametrize("axis", [None, 1], ids=["tensor", "channel"])
def test_an_empty_tensor_gives_an_empty_one(observer, axis, way):
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
    if observer.dynamic:  # the range of the tensor at hand, which has none
        assert not module.running_min.any()
        assert not module.running_max.any()
    else:
        assert_unchanged(before, module)


@each_way
def test_an_empty_tensor_of_tokens(way):
    module = fqnn.FakeQuantize(presets.int8_per_token())
    with way():
        for shape in ((0, 8), (8, 0)):
            assert module(torch.empty(shape)).shape == shape


# --- bad input ------------------------------------------------------------------------------------

PER_CHANNEL, GROUPS = (fq.QuantSpec(axis=1), (None, 8)), (presets.int4(group=4), (6, 8))
MISFITS = {
    "an axis too few": (*PER_CHANNEL, torch.ones(8)),
    "a scalar": (*PER_CHANNEL, torch.tensor(1.0)),
    "other channels": (*PER_CHANNEL, torch.ones(4, 7)),
    "one channel": (*PER_CHANNEL, torch.ones(4, 1)),
    "groups that do not divide": (*GROUPS, torch.ones(6, 6)),
    "fewer groups": (*GROUPS, torch.ones(6, 4)),
    "as many groups elsewhere": (*GROUPS, torch.ones(12, 4)),
    "as many groups on more axes": (*GROUPS, torch.ones(2, 3, 8)),
    "one group": (*GROUPS, torch.ones(1, 4)),
    "integers": (AFFINE, None, torch.ones(3, dtype=torch.int32)),
    "complex numbers": (AFFINE, None, torch.ones(3, dtype=torch.complex64)),
    "sparse": (AFFINE, None, torch.eye(3).to_sparse()),
    "an array": (AFFINE, None, torch.ones(3).numpy()),
    "an array with channels last": (fq.QuantSpec(axis=-1), (6, 8), torch.ones(6, 8).numpy()),
    "a list": (AFFINE, None, [1.0]),
    "another device": (AFFINE, None, torch.ones(3, device="meta")),
    "a token without features": (presets.int8_per_token(), None, torch.tensor(1.0)),
    "tokens of integers": (presets.int8_per_token(), None, torch.ones(2, 3, dtype=torch.int32)),
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
def test_a_tensor_that_does_not_fit_is_refused_with_the_path(spec, shape, bad, observer, training, quantizing):
    if spec.granularity == "token" and observer != observers.Dynamic():
        pytest.skip("only for ranges found anew")
    module = fqnn.FakeQuantize(spec, observer, shape=shape, path="encoder.0.weight")
    module(BATCHES[0])
    module.train(training).quantizing = quantizing
    before = state_of(module)
    with pytest.raises((ValueError, IndexError, TypeError, RuntimeError), match=r"^FakeQuantize at encoder\.0\.weight"):
        module(bad)
    assert_unchanged(before, module)


@each_running
def test_a_tensor_on_another_device_spoils_nothing(observer):
    module, twin = (fqnn.FakeQuantize(AFFINE, observer) for _ in range(2))
    for m in (module, twin):
        m(BATCHES[0])
    with pytest.raises(RuntimeError, match="meta"):
        module(torch.ones(3, device="meta"))
    assert module.nonfinite == 0
    same(twin(BATCHES[1]), module(BATCHES[1]), "y")
    same_state(twin, module)


CONSTRUCTION = {
    "no spec": (lambda: fqnn.FakeQuantize(8), TypeError, "`spec` must be a QuantSpec, got int"),
    "a class": (lambda: fqnn.FakeQuantize(AFFINE, observers.MinMax), TypeError, "`observer` must be an Observer"),
    "no shape": (lambda: fqnn.FakeQuantize(presets.int8()), ValueError, "pass `shape`"),
    "no channels": (lambda: fqnn.FakeQuantize(presets.int8(), shape=(None, 8)), ValueError, "no fixed shape"),
    "no groups": (lambda: fqnn.FakeQuantize(presets.int4(group=4), shape=(None, 8)), ValueError, "no fixed shape"),
    "group": (lambda: fqnn.FakeQuantize(presets.int4(group=3), shape=(6, 8)), ValueError, "does not divide axis -1"),
    "memory": (
        lambda: fqnn.FakeQuantize(presets.int8_per_token(), observers.MinMax()),
        ValueError,
        r"Use observer=Dynamic\(\)",
    ),
    "gradient": (lambda: fqnn.FakeQuantize(AFFINE, gradient="ste"), ValueError, "`gradient` must be"),
    "eps": (lambda: fqnn.FakeQuantize(AFFINE, eps=0.0), ValueError, "`eps` must be finite and greater than 0"),
}


@pytest.mark.parametrize(("make", "error", "message"), CONSTRUCTION.values(), ids=CONSTRUCTION)
def test_what_cannot_be_built(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- autograd -------------------------------------------------------------------------------------


@each_way
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    ("gradient", "requires_grad", "kept"), [("clipped", True, 6), ("pass", True, 0), ("clipped", False, 0)]
)
def test_one_bit_per_element_is_kept_or_nothing(gradient, requires_grad, kept, training, way):
    module = fqnn.FakeQuantize(AFFINE, gradient=gradient)
    module(BATCHES[0])
    saved, x = [], BATCHES[1].flatten()[:43].clone().requires_grad_(requires_grad)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.nbytes) or t, lambda t: t), way():
        y = module.train(training)(x)
    assert sum(saved) == kept
    assert y.requires_grad == requires_grad


@each_way
@each_gradient
def test_two_forwards_before_one_backward(gradient, way):
    module = fqnn.FakeQuantize(AFFINE, observers.MovingAverage(0.3), gradient=gradient)
    twin = fqnn.FakeQuantize(AFFINE, observers.MovingAverage(0.3), gradient=gradient)
    expected = [run(twin, x, dy) for x, dy in zip(BATCHES, (DY, -DY, 2 * DY), strict=True)]
    xs = [leaf(x) for x in BATCHES]
    with way():
        ys = [module(x) for x in xs]
        grads = torch.autograd.grad(ys, xs, (DY, -DY, 2 * DY))
    for (y, dx), actual_y, actual_dx in zip(expected, ys, grads, strict=True):
        same(y, actual_y, "y")
        same(dx, actual_dx, "dx")
    same_state(twin, module)


@each_way
@each_gradient
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_gradient_can_be_taken_again_and_differentiated(training, gradient, way):
    module = fqnn.FakeQuantize(AFFINE, gradient=gradient)
    module(BATCHES[1])
    x, dy = leaf(BATCHES[2]), leaf(DY)
    with way():
        y = module.train(training)(x)
        first = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
        again = torch.autograd.grad(y, x, dy, create_graph=True)[0]
        (second,) = torch.autograd.grad(again, dy, torch.full((6, 8), 3.0))
    same(first, again, "dx")
    same(torch.where(first == 0, 0.0, 3.0) if gradient == "clipped" else torch.full((6, 8), 3.0), second, "d2")
    assert (first == 0).any() == (gradient == "clipped")


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
@each_gradient
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("way", [nullcontext, without_compiled_nodes], ids=["nodes", "Python"])
def test_a_tangent_goes_the_way_of_the_gradient(training, gradient, way):
    module, twin = (fqnn.FakeQuantize(AFFINE, gradient=gradient) for _ in range(2))
    for m in (module, twin):
        m(BATCHES[1])
        m.train(training)
    expected = run(twin, BATCHES[2])
    with way(), forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(module(forward_ad.make_dual(BATCHES[2], DY)))
    same(expected[0], y, "y")
    same(expected[1], tangent, "tangent")
    same_state(twin, module)


def test_under_vmap_every_example_has_a_range_of_its_own_and_nothing_is_remembered():
    module = fqnn.FakeQuantize(AFFINE)
    module(BATCHES[0])
    before = state_of(module)
    expected = torch.stack([copy.deepcopy(module)(x) for x in WIDE])
    with pytest.warns(RuntimeWarning, match="do not remember what they see.\nCall `calibrate` first"):
        same(expected, torch.func.vmap(module)(WIDE), "y")
    assert_unchanged(before, module)
    same(module.eval()(WIDE), torch.func.vmap(module)(WIDE), "y")
    assert_unchanged(before, module)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
@each_observer
def test_without_a_graph_the_same_is_computed(observer, mode):
    for way in ways_of(observer):
        assert_same_without_graph(observer, mode, way)


def assert_same_without_graph(observer, mode, way):
    module, twin = (fqnn.FakeQuantize(AFFINE, observer) for _ in range(2))
    for training, x in zip((True, True, False), BATCHES, strict=True):
        expected = twin.train(training)(x)
        with mode(), way():
            y = module.train(training)(leaf(x))
        assert not y.requires_grad
        same(expected, y.clone(), "y")
    same_state(twin, module)
    run(module.train(), BATCHES[0])


@each_running
def test_a_quantizer_made_in_inference_mode_can_be_used_outside(observer):
    with torch.inference_mode():
        module = fqnn.FakeQuantize(AFFINE, observer)
    twin = fqnn.FakeQuantize(AFFINE, observer)
    for x in BATCHES:
        same(twin(x), module(x), "y")
    same_state(twin, module)


# --- layouts --------------------------------------------------------------------------------------

IMAGE = torch.randn(2, 3, 4, 5)
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "gaps": lambda x: torch.stack([x, x * 9], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
    "negated": lambda x: torch._neg_view((-x).contiguous()),
}
IMAGE_SPECS = {
    "tensor": AFFINE,
    "channel": fq.QuantSpec(bits=4, symmetric=False, axis=1),
    "last axis": fq.QuantSpec(bits=4, axis=-1),
    "group": fq.QuantSpec(bits=4, axis=1, group_size=3),
    "last group": fq.QuantSpec(bits=4, axis=-1, group_size=5),
    "token": presets.int8_per_token(),
}


@pytest.mark.parametrize("way", [nullcontext, without_compiled_nodes], ids=["nodes", "Python"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("spec", IMAGE_SPECS.values(), ids=IMAGE_SPECS)
def test_memory_layout_changes_no_value(spec, layout, way):
    observer = None if spec.granularity == "token" else observers.MovingAverage(0.3)
    module, twin = (fqnn.FakeQuantize(spec, observer, shape=IMAGE.shape) for _ in range(2))
    for training, scale in ((True, 1.0), (True, 4.0), (False, 9.0)):
        x = layout(IMAGE * scale).requires_grad_()
        dy = torch.randn(x.shape)
        expected = run(twin.train(training), x.detach().clone(memory_format=torch.contiguous_format), dy)
        with way():
            y = module.train(training)(x)
            (dx,) = torch.autograd.grad(y, x, dy)
        same(expected[0], y.contiguous(), "y")
        same(expected[1], dx.contiguous(), "dx")
        assert y.stride() == torch.empty_like(x).stride()
    same_state(twin, module)


# --- other devices, fake tensors ------------------------------------------------------------------


@each_observer
def test_on_the_meta_device(observer):
    module = fqnn.FakeQuantize(AFFINE, observer, device="meta")
    for training, quantizing in itertools.product([True, False], repeat=2):
        module.train(training).quantizing = quantizing
        y = module(torch.empty(6, 8, device="meta"))
        assert (y.shape, y.device.type) == ((6, 8), "meta")
    assert {v.device.type for v in module.state_dict().values()} == {"meta"}


@each_observer
def test_a_model_from_the_meta_device_is_like_a_new_one(observer):
    new = fqnn.FakeQuantize(AFFINE, observer)
    module = fqnn.FakeQuantize(AFFINE, observer, device="meta").to_empty(device="cpu")
    for value in module.buffers():  # memory that was somebody else's
        value.fill_(77)
    module.reset_parameters()
    same_state(new, module)
    assert module.nonfinite == 0
    for m in (new, module):
        m.eval()
        m.train()
    assert str(new) == str(module)
    same(new(BATCHES[0]), module(BATCHES[0]), "y")
    same_state(new, module)


@each_observer
def test_resetting_forgets_what_was_observed_and_keeps_the_switches(observer):
    module = fqnn.FakeQuantize(AFFINE, observer)
    module(BATCHES[0])
    module.quantizing = False
    module(BATCHES[1])
    module.reset_parameters()
    module.quantizing = True
    same_state(fqnn.FakeQuantize(AFFINE, observer), module)


@each_running
def test_fake_tensors(observer):
    module = fqnn.FakeQuantize(AFFINE, observer)
    module(BATCHES[0])
    before = state_of(module)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = fqnn.FakeQuantize(AFFINE, observer)
        for training in (True, False):
            x = torch.empty(6, 8, requires_grad=True)
            y = fake.train(training)(x)
            assert (y.shape, y.requires_grad) == ((6, 8), True)
    assert_unchanged(before, module)


def test_functional_call_changes_the_buffers_it_was_given():
    module, twin = (fqnn.FakeQuantize(AFFINE) for _ in range(2))
    before = state_of(module)
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    y = torch.func.functional_call(module, buffers, (BATCHES[0],))
    same(twin(BATCHES[0]), y, "y")
    assert_unchanged(before, module)
    for name, value in twin.named_buffers():
        same(value, buffers[name], name)
