"""User-defined observers with `dynamic = True` use only the current tensor, in training and in evaluation."""

import copy
import dataclasses
from typing import ClassVar

import pytest

import fakequant as fq
from fakequant import QuantSpec, presets
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
observers = pytest.importorskip("fakequant.observers")


@dataclasses.dataclass(frozen=True)
class HalfRange(observers.Observer):
    """Half the range of everything in the state."""

    dynamic: ClassVar[bool] = True

    def init(self, blocks, device=None):
        nothing = torch.full(blocks, torch.inf, device=device)
        return {"lowest": nothing, "highest": -nothing}

    def update(self, state, x, spec, ranks=observers.ALONE):
        seen = fq.min_max(x.detach(), spec)
        lo, hi = ranks.range(seen.min, seen.max)
        state["lowest"].copy_(torch.minimum(state["lowest"], lo))
        state["highest"].copy_(torch.maximum(state["highest"], hi))
        return (seen.nan + seen.posinf + seen.neginf).sum()

    def range(self, state, spec):
        return 0.5 * state["lowest"], 0.5 * state["highest"]


SPECS = {
    "tensor": (presets.uint8(), None),
    "channel": (QuantSpec(axis=0), (4, None)),
    "group": (QuantSpec(bits=4, axis=-1, group_size=3), (4, 6)),
}
each_spec = pytest.mark.parametrize(("spec", "shape"), SPECS.values(), ids=SPECS)
each_mode = pytest.mark.parametrize("mode", ["train", "eval"])
BATCHES = [torch.linspace(-k, 3 * k, 24).reshape(4, 6) for k in (5.0, 1.0, 2.0)]


def by_hand(x, spec):
    seen = fq.min_max(x, spec)
    qparams = fq.choose_qparams(0.5 * seen.min, 0.5 * seen.max, spec)
    return fq.fake_quantize(x, *qparams, spec), qparams


@each_spec
@each_mode
def test_dynamic_observer_uses_only_the_current_tensor(spec, shape, mode):
    quantizer = fq.nn.FakeQuantize(spec, HalfRange(), shape=shape)
    quantizer.train(mode == "train")
    for x in BATCHES:
        y, qparams = by_hand(x, spec)
        assert_same_bits(y, quantizer(x))
        assert_same_bits(qparams.scale, quantizer.scale)
        assert_same_bits(qparams.zero_point, quantizer.zero_point)


@each_mode
def test_gradients_through_a_dynamic_observer_match_fake_quantize(mode):
    quantizer = fq.nn.FakeQuantize(presets.uint8(), HalfRange())
    quantizer.train(mode == "train")
    x, hand = (BATCHES[0].clone().requires_grad_() for _ in range(2))
    quantizer(x).sum().backward()
    by_hand(hand, presets.uint8())[0].sum().backward()
    assert_same_bits(hand.grad, x.grad)
    assert (x.grad == 0).any()


def test_dynamic_observer_forgets_the_previous_tensor_when_only_observing():
    quantizer = fq.nn.FakeQuantize(presets.uint8(), HalfRange())
    quantizer.quantizing = False
    for x in BATCHES:
        assert quantizer(x) is x
    assert_same_bits(by_hand(BATCHES[-1], presets.uint8())[1].scale, quantizer.qparams().scale)


@each_mode
@pytest.mark.parametrize("x", [torch.zeros(0, 6), torch.full((2, 3), torch.nan)], ids=["empty", "NaN"])
@pytest.mark.filterwarnings("ignore:.*values that are NaN:RuntimeWarning")
def test_dynamic_range_without_finite_values_is_0_to_0(x, mode):
    quantizers = [fq.nn.FakeQuantize(presets.uint8(), o) for o in (HalfRange(), observers.Dynamic())]
    results = [quantizer.train(mode == "train")(x) for quantizer in quantizers]
    assert_same_bits(*results)
    assert_same_bits(*(quantizer.scale for quantizer in quantizers))
    assert quantizers[0].nonfinite == quantizers[1].nonfinite == x.isnan().sum()


def test_frozen_dynamic_quantizer_keeps_its_scale():
    quantizer = fq.nn.FakeQuantize(presets.uint8(), HalfRange())
    quantizer(BATCHES[0])
    quantizer.frozen = True
    before = copy.deepcopy(quantizer.state_dict())
    expected = fq.fake_quantize(BATCHES[1], *quantizer.qparams(), presets.uint8())
    for mode in (True, False):
        assert_same_bits(expected, quantizer.train(mode)(BATCHES[1]))
    assert all(torch.equal(before[name], value) for name, value in quantizer.state_dict().items())


@each_mode
def test_dynamic_observer_works_in_a_prepared_model(mode):
    config = fq.recipes.int8().rule("*", activation_observer=HalfRange(), weight_observer=HalfRange())
    model = fq.prepare(torch.nn.Sequential(torch.nn.Linear(6, 3)), config, torch.ones(1, 6)).train(mode == "train")
    assert_same_bits(by_hand(BATCHES[0], model[0].input_quantizer.spec)[0], model[0].input_quantizer(BATCHES[0]))
    assert model(BATCHES[0]).shape == (4, 3)


def test_dynamic_observer_compiles_to_the_same_result():
    quantizer = fq.nn.FakeQuantize(presets.uint8(), HalfRange()).eval()
    compiled = torch.compile(copy.deepcopy(quantizer), backend="aot_eager", fullgraph=True)
    for x in BATCHES[:2]:
        assert_same_bits(quantizer(x), compiled(x))


def test_convert_refuses_a_dynamic_observer_that_no_runtime_has():
    config = fq.QuantConfig(
        default=fq.LayerConfig(weight=presets.int8(), input=presets.uint8(), activation_observer=HalfRange())
    )
    model = fq.prepare(torch.nn.Sequential(torch.nn.Linear(6, 2)), config, torch.ones(1, 6))
    with pytest.raises(ValueError, match=r"0\.input_quantizer has the dynamic observer HalfRange\(\)"):
        fq.convert(model)
