"""Modules and states of torch.ao that cannot be taken over are refused."""

import pytest

from fakequant import QuantSpec
from fakequant.nn import PACT, FakeQuantize, FusedFakeQuantize, LearnedFakeQuantize, from_torch_ao
from fakequant.observers import Histogram, MinMax
from fakequant.testing.assertions import assert_same_bits
from torch_ao_cases import AFFINE, INT8, SYMMETRIC, TENSOR, learnable, tq
from torch_bridge import torch

# torch.ao is deprecated and warns in many ways.
pytestmark = [pytest.mark.usefixtures("torch_on_one_thread"), pytest.mark.filterwarnings("ignore")]


def observed(theirs, shape=(5, 6)):
    theirs(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    return theirs


def odd_codes(low, high, dtype=torch.qint8):
    return lambda: tq.FakeQuantize(TENSOR, low, high, dtype=dtype, qscheme=AFFINE)


REFUSED = {
    "histogram": (tq.fake_quantize.default_histogram_fake_quant, "HistogramObserver"),
    "uint8 symmetric": (lambda: tq.FakeQuantize(TENSOR, 0, 255, dtype=torch.quint8, qscheme=SYMMETRIC), "symmetric"),
    "codes -100 to 100": (odd_codes(-100, 100), "-100 to 100"),
    "codes 0 to 10": (odd_codes(0, 10), "0 to 10"),
    "codes -8 to 0": (odd_codes(-8, 0), "-8 to 0"),
    "codes -1 to 0": (odd_codes(-1, 0), "-1 to 0"),
    "unknown number of channels": (tq.default_per_channel_weight_fake_quant, "how many channels"),
    "unknown number of channels, fused": (tq.default_fused_per_channel_wt_fake_quant, "how many channels"),
    "float zero points": (lambda: observed(tq.fake_quantize.default_embedding_fake_quant()), "float"),
    "fixed qparams": (tq.fake_quantize.default_fixed_qparams_range_0to1_fake_quant, "FixedQParamsObserver"),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_from_torch_ao_refuses_unsupported_modules(make, message):
    with pytest.raises(ValueError, match=message):
        from_torch_ao(make())


@pytest.mark.parametrize("module", [torch.nn.Linear(2, 2), tq.MinMaxObserver(), None, "FakeQuantize"], ids=str)
def test_from_torch_ao_refuses_objects_that_are_not_fake_quantize_modules(module):
    with pytest.raises(TypeError, match=r"fake-quantize module of torch\.ao") as error:
        from_torch_ao(module)
    assert ("load_torch_ao_state for a whole model" in str(error.value)) == isinstance(module, torch.nn.Module)


def ours_per_channel():
    return FakeQuantize(QuantSpec(axis=0, numerics="torch"), shape=(5, 6))


def ours_affine():
    return FakeQuantize(QuantSpec(symmetric=False, numerics="torch"))


def affine_learnable():
    theirs = learnable(AFFINE, INT8)
    theirs.zero_point.data.fill_(3.9)
    return theirs


STATES = {
    "per-tensor state into a per-channel quantizer": (
        tq.default_weight_fake_quant, ours_per_channel, "per channel on axis 0",
    ),
    "per-channel state into a per-tensor quantizer": (
        tq.default_per_channel_weight_fake_quant, lambda: FakeQuantize(QuantSpec(numerics="torch")), "int8, per tensor",
    ),
    "zero point into a symmetric quantizer": (
        tq.default_fake_quant, lambda: FakeQuantize(QuantSpec(numerics="torch")), "zero point is not 0",
    ),
    "learned state into an observed quantizer": (affine_learnable, ours_affine, "LearnedFakeQuantize"),
    "observed state into a learned quantizer": (
        tq.default_fake_quant, lambda: LearnedFakeQuantize(QuantSpec(numerics="torch")), "Use FakeQuantize",
    ),
    "observed state into PACT": (tq.default_fake_quant, PACT, "no module like PACT"),
    "min-max state into a histogram observer": (
        tq.default_fake_quant, lambda: FakeQuantize(QuantSpec(symmetric=False), Histogram()), "Histogram",
    ),
    "fixed qparams": (
        tq.fake_quantize.default_fixed_qparams_range_0to1_fake_quant,
        lambda: FakeQuantize(QuantSpec(signed=False, symmetric=False, numerics="torch")),
        "act: .*torch.ao",
    ),
    "float zero points": (
        tq.fake_quantize.default_embedding_fake_quant,
        lambda: FakeQuantize(QuantSpec(signed=False, symmetric=False, axis=0, numerics="torch"), shape=(5, 6)),
        "act: .*zero point",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("make", "build", "message"), STATES.values(), ids=STATES)
def test_a_torch_ao_state_that_does_not_fit_is_refused_by_name_and_changes_nothing(make, build, message):
    theirs, ours = torch.nn.ModuleDict({"act": observed(make())}), torch.nn.ModuleDict({"act": build()})
    before = {k: v.clone() for k, v in ours.state_dict().items()}
    with pytest.raises(RuntimeError, match=rf"(?s)act: .*{message.removeprefix('act: ')}"):
        ours.load_state_dict(theirs.state_dict())
    for k, v in ours.state_dict().items():
        assert_same_bits(before[k], v, k)


def test_a_torch_ao_state_with_the_scale_of_another_grid_is_refused():
    theirs = tq.FakeQuantize(TENSOR, quant_min=-8, quant_max=7, dtype=torch.qint8, qscheme=AFFINE)
    theirs(torch.linspace(-1, 1, 9))
    ours = FakeQuantize(QuantSpec(symmetric=False, numerics="torch"))
    with pytest.raises(RuntimeError, match="another range of codes"):
        ours.load_state_dict(theirs.state_dict())
    assert ours.scale.isnan()
    FakeQuantize(QuantSpec(bits=4, symmetric=False, numerics="torch")).load_state_dict(theirs.state_dict())


@pytest.mark.parametrize(
    "options",
    [dict(gradient="pass"), dict(eps=1e-3), dict(observer=MinMax()), dict(shape=(None, 3), axis=1)],
    ids=str,
)
def test_fused_fake_quantize_refuses_options_the_fused_operator_does_not_support(options):
    spec = QuantSpec(symmetric=False, numerics="torch", axis=options.pop("axis", None))
    with pytest.raises(ValueError, match="The fused operator"):
        FusedFakeQuantize(spec, **options)
