"""`LearnedFakeQuantize`: freezing, observing and quantizing."""

import math

import pytest

import fakequant as fq
from fakequant import QuantSpec, reference
from fakequant.testing.assertions import assert_same_bits
from learned_cases import INT4, SHAPE, UINT4, WHERE, X, bits, by_optimizer, initialized, lsq, make_step_size

torch = pytest.importorskip("torch")
nn = torch.nn
quantizers = pytest.importorskip("fakequant.nn")
LearnedFakeQuantize, PACT = quantizers.LearnedFakeQuantize, quantizers.PACT

# --- frozen -----------------------------------------------------------------------------------------


@by_optimizer
def test_frozen_scale_does_not_move(optimizer):
    x = torch.tensor([[-1.0, 2.0], [3.0, -4.0]])
    quantizer = initialized(QuantSpec(bits=4, symmetric=False, axis=0), x)
    optimizer = optimizer(quantizer.parameters())
    for _ in range(2):  # build up momentum
        quantizer(x).backward(torch.full_like(x, 1e-4))
        optimizer.step()
    quantizer.frozen = True
    scale, zero_point, y = bits(quantizer.scale), bits(quantizer.zero_point), bits(quantizer(x))
    for broken in (0.1, math.nan, math.inf, -7.0):
        for p in quantizer.parameters():
            p.grad = torch.full_like(p, broken)
        optimizer.step()
        for mode in (False, True):
            quantizer.train(mode)
            assert_same_bits(scale, bits(quantizer.scale), broken)
            assert_same_bits(zero_point, bits(quantizer.zero_point), broken)
            assert_same_bits(y, bits(quantizer(x)), broken)


def test_frozen_quantizer_passes_gradients_and_learns_nothing():
    quantizer = initialized()
    quantizer.frozen = True
    x = torch.tensor([0.3, 100.0], requires_grad=True)
    quantizer(x).sum().backward()
    assert x.grad.tolist() == [1.0, 0.0]
    assert quantizer.step_size.grad is None


@pytest.mark.parametrize("moved", [77.0, -3.0, math.nan], ids=str)
def test_state_saved_while_frozen_has_the_frozen_scale(moved):
    quantizer = initialized()
    quantizer.frozen = True
    scale = bits(quantizer.scale)
    make_step_size(quantizer, moved)
    loaded = LearnedFakeQuantize(INT4)
    loaded.load_state_dict(quantizer.state_dict())
    assert loaded.frozen
    assert_same_bits(scale, bits(loaded.scale))
    loaded.frozen = False
    assert_same_bits(scale, bits(loaded.scale))


@pytest.mark.parametrize("moved", [77.0, -3.0, math.nan], ids=str)
def test_unfreezing_continues_from_the_frozen_scale(moved):
    quantizer = initialized()
    quantizer.frozen = True
    scale = bits(quantizer.scale)
    make_step_size(quantizer, moved)
    quantizer.frozen = False
    assert_same_bits(scale.reshape(1), bits(quantizer.step_size))
    quantizer(X)
    assert_same_bits(scale, bits(quantizer.scale))
    make_step_size(quantizer, 0.75)
    assert quantizer.scale == 0.75


def test_freezing_keeps_the_current_scale_not_that_of_the_last_forward_pass():
    quantizer = initialized()
    quantizer(X)
    make_step_size(quantizer, 0.75)
    quantizer.frozen = True
    assert quantizer.scale == 0.75


def test_observing_does_not_overwrite_a_learned_scale():
    quantizer = initialized()
    quantizer.path = "layers.0"
    with pytest.raises(RuntimeError, match=r"layers\.0 has a scale, which observing would overwrite"):
        quantizer.observing = True
    fq.nn.switch_quantizers(quantizer, observing=True)  # for a whole model, it skips this quantizer
    assert not quantizer.observing
    quantizer.reset_parameters()
    fq.nn.switch_quantizers(quantizer, observing=True)
    assert quantizer.observing


@pytest.mark.parametrize("moved", [77.0, math.nan], ids=str)
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "not frozen"])
@pytest.mark.parametrize("make", [initialized, PACT], ids=["LearnedFakeQuantize", "PACT"])
def test_loading_a_float_state_leaves_learned_scales_unchanged(make, frozen, moved):
    model = nn.Sequential(nn.Linear(3, 3), make())
    model[1](X)
    model[1].frozen = frozen
    with torch.no_grad():
        for p in model[1].parameters():
            p.fill_(moved)
    before = bits(model[1].scale)
    model.load_state_dict({f"0.{k}": v for k, v in nn.Linear(3, 3).state_dict().items()}, strict=False)
    assert_same_bits(before, bits(model[1].scale))


# --- switches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", reference.NUMERICS)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_quantizing_before_initialization_is_an_error_with_the_path(numerics, frozen):
    for where in WHERE.values():
        quantizer = LearnedFakeQuantize(QuantSpec(numerics=numerics, **where), shape=SHAPE, path="blocks.3.act")
        quantizer.frozen = frozen
        with pytest.raises(RuntimeError, match=r"LearnedFakeQuantize at blocks\.3\.act has no scale yet"):
            quantizer(torch.ones(SHAPE))
        with pytest.raises(RuntimeError, match=r"blocks\.3\.act has no scale yet"):
            quantizer.qparams()
        assert quantizer.scale.isnan().all()


def test_switched_off_quantizer_returns_its_input_object():
    quantizer = LearnedFakeQuantize(INT4)
    quantizer.quantizing = False
    assert quantizer(X) is X


def test_switch_quantizers_initializes_every_learned_quantizer_of_a_model():
    model = nn.Sequential(LearnedFakeQuantize(INT4), LearnedFakeQuantize(UINT4, init="lsq"))
    quantizers.switch_quantizers(model, observing=True)
    assert model(X) is X
    quantizers.switch_quantizers(model, observing=False)
    assert_same_bits(bits(initialized().scale), bits(model[0].scale))
    assert_same_bits(lsq(X.numpy(), 15), bits(model[1].scale))


def test_evaluation_does_not_observe():
    quantizer = LearnedFakeQuantize(INT4)
    quantizer.observing = True
    quantizer(X)
    scale = bits(quantizer.scale)
    y = bits(quantizer.eval()(X * 9))
    quantizer.observing = False
    assert_same_bits(y, bits(quantizer(X * 9)), "quantized, not only passed")
    assert_same_bits(scale, bits(quantizer.scale))


@pytest.mark.parametrize("switch", ["observing", "quantizing", "frozen"])
def test_learned_quantizer_saves_its_switches(switch):
    quantizer = LearnedFakeQuantize(INT4) if switch == "observing" else initialized()
    loaded = LearnedFakeQuantize(INT4)
    setattr(quantizer, switch, not getattr(quantizer, switch))
    loaded.load_state_dict(quantizer.state_dict())
    assert getattr(loaded, switch) == getattr(quantizer, switch)
    with pytest.raises(TypeError, match=f"`{switch}` is a switch"):
        setattr(loaded, switch, 1)
