"""`LearnedFakeQuantize`: saved states, copies, casts and autocast."""

import copy
import io
import math
import pickle

import pytest

from fakequant import QuantSpec
from fakequant.testing.assertions import assert_same_bits
from learned_cases import INT4, SHAPE, UINT4, X, all_usable, bits, by_where, initialized, make_step_size, whole_numbers

torch = pytest.importorskip("torch")
nn = torch.nn
observers = pytest.importorskip("fakequant.observers")
quantizers = pytest.importorskip("fakequant.nn")
LearnedFakeQuantize, PACT = quantizers.LearnedFakeQuantize, quantizers.PACT


def saved(quantizer):
    file = io.BytesIO()
    torch.save(quantizer.state_dict(), file)
    file.seek(0)
    shape = None if quantizer.spec.axis is None else SHAPE
    other = LearnedFakeQuantize(quantizer.spec, shape=shape, init=quantizer.init)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


COPIES = {
    "state_dict": saved,
    "deepcopy": copy.deepcopy,
    "pickle": lambda quantizer: pickle.loads(pickle.dumps(quantizer)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@by_where
def test_copy_trains_like_the_original(where, copied):
    x, dy = whole_numbers() / 8, whole_numbers(seed=1) / 8
    quantizer = initialized(QuantSpec(bits=4, symmetric=False, **where), x)
    other = copied(quantizer)
    results = []
    for module in (quantizer, other):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for _ in range(3):
            y = module(x)
            y.backward(dy)
            optimizer.step()
        results.append([bits(t) for t in (y, module.scale, module.zero_point, *module.parameters())])
    for expected, actual in zip(*results, strict=True):
        assert_same_bits(expected, actual)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("init", ["lsq", observers.Histogram(steps=5)], ids=["lsq", "Histogram"])
def test_copy_made_while_observing_keeps_the_observations(copied, init):
    quantizer = LearnedFakeQuantize(INT4, init=init)
    quantizer.observing = True
    quantizer(X)
    other = copied(quantizer)
    other.observing = quantizer.observing = False
    assert_same_bits(bits(quantizer.scale), bits(other.scale))
    assert all_usable(other.scale)


def test_deepcopy_of_a_learned_quantizer_is_independent():
    quantizer = initialized()
    other = copy.deepcopy(quantizer)
    quantizer.step_size.grad = torch.tensor([math.nan])
    make_step_size(other, 0.25)
    other(X)
    torch.optim.SGD(quantizer.parameters(), lr=1.0).step()
    assert_same_bits(bits(initialized().scale), bits(quantizer.scale))


@by_where
def test_state_has_the_same_names_and_shapes_before_and_after_initialization(where):
    spec = QuantSpec(symmetric=False, **where)
    fresh = LearnedFakeQuantize(spec, shape=SHAPE)
    before = {k: (v.shape, v.dtype) for k, v in fresh.state_dict().items()}
    fresh.initialize(whole_numbers())
    assert {k: (v.shape, v.dtype) for k, v in fresh.state_dict().items()} == before
    assert set(before) == {"step_size", "offset", "grid", "switches"}


CASTS = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to(torch.float16),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("make", [lambda: initialized(UINT4), lambda: PACT(4, 1.7)], ids=["learned", "PACT"])
def test_casting_the_model_leaves_learned_parameters_float32(make, cast):
    expected, model = make(), cast(nn.Sequential(nn.Linear(3, 3), make()))
    quantizer = model[1]
    for p in (*quantizer.parameters(), *(b for b in quantizer.buffers() if b.is_floating_point())):
        assert p.dtype == torch.float32
    assert_same_bits(bits(expected.scale), bits(quantizer.scale))
    data = X.to(model[0].weight.dtype)
    y = quantizer(data)
    assert y.dtype == data.dtype
    assert torch.equal(y, expected(data))
    y.sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in quantizer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_the_dtype_of_the_data_only(dtype):
    model = nn.Sequential(nn.Linear(3, 3), initialized(UINT4))
    with torch.autocast("cpu", dtype=dtype):
        hidden = model[0](X[None])
        y = model(X[None])
    assert (hidden.dtype, y.dtype) == (dtype, dtype)
    assert torch.equal(y, model[1](hidden))
    y.float().sum().backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_state_of_another_granularity_is_refused_with_both_specs():
    per_tensor, per_channel = initialized(), LearnedFakeQuantize(QuantSpec(bits=4, axis=0), shape=(3, 2))
    with pytest.raises(RuntimeError, match=r"int4, per tensor\).*int4, per channel on axis 0"):
        per_channel.load_state_dict(per_tensor.state_dict())
    with pytest.raises(RuntimeError, match=r"act: .*int4, per channel on axis 0\).*int4, per tensor"):
        nn.ModuleDict({"act": per_tensor}).load_state_dict(nn.ModuleDict({"act": per_channel}).state_dict())


def test_state_of_another_number_of_channels_is_refused_with_the_spec():
    four, three = (LearnedFakeQuantize(QuantSpec(axis=0), shape=(n, 2)) for n in (4, 3))
    with pytest.raises(RuntimeError, match=r"`step_size` has shape \(4,\).*\n?.*int8, per channel on axis 0"):
        three.load_state_dict(four.state_dict())


def test_refused_state_leaves_a_learned_quantizer_unchanged():
    other = initialized(QuantSpec(bits=8)).state_dict()
    observing = LearnedFakeQuantize(INT4)
    observing.observing = True
    observing(X)
    frozen = initialized()
    frozen.frozen = True
    make_step_size(frozen, 77.0)
    for quantizer in (observing, frozen):
        with pytest.raises(RuntimeError, match="spec"):
            quantizer.load_state_dict(other)
        assert_same_bits(bits(initialized().scale), bits(quantizer.qparams().scale))
