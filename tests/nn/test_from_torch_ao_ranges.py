"""`from_torch_ao` of modules that saw 0-d tensors or whose ranges are not finite."""

import pytest

from fakequant.nn import from_torch_ao
from fakequant.testing.assertions import assert_same_bits
from torch_bridge import to_numpy, torch

from torch.ao import quantization as tq  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.ao is deprecated and warns

CHANNELS = tq.MovingAveragePerChannelMinMaxObserver
CHANNEL_OPTIONS = dict(quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=torch.per_channel_affine)


@pytest.mark.parametrize("kind", [tq.FakeQuantize, tq.FusedMovingAvgObsFakeQuantize])
def test_modules_taken_over_have_torchs_bits_on_0d_tensors(kind):
    theirs = kind(tq.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    theirs(torch.tensor([-1.0, 2.0]))
    ours = from_torch_ao(theirs)
    for value in (0.3, 5.0, -7.0):
        x = torch.tensor(value)
        assert_same_bits(to_numpy(theirs(x)), to_numpy(ours(x)), kind, value)
    assert_same_bits(to_numpy(theirs.scale.reshape(())), to_numpy(ours.scale))
    theirs.disable_observer()
    assert_same_bits(to_numpy(theirs(x)), to_numpy(ours.eval()(x)))


def taken_over(lo, hi):
    theirs = tq.FakeQuantize(tq.MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    observer = theirs.activation_post_process
    observer.min_val, observer.max_val = torch.tensor(lo), torch.tensor(hi)
    return from_torch_ao(theirs)


@pytest.mark.parametrize(
    ("lo", "hi", "kept"),
    [
        (-1.0, torch.inf, (-1.0, -torch.inf)),
        (-torch.inf, 2.0, (torch.inf, 2.0)),
        (torch.nan, 2.0, (torch.inf, 2.0)),
        (-torch.inf, torch.inf, (torch.inf, -torch.inf)),
    ],
)
def test_from_torch_ao_keeps_the_finite_end_of_a_range(lo, hi, kept):
    ours = taken_over(lo, hi)
    assert (ours.running_min.item(), ours.running_max.item()) == kept
    assert ours.scale.isnan()
    with pytest.raises(RuntimeError, match="has not observed a finite value"):
        ours.eval()(torch.zeros(3))
    ours.train()(torch.tensor([-3.0, 4.0]))
    # A finite end moves by the averaging constant, 0.01; the other takes the observed value.
    expected = [
        known + torch.tensor(0.01) * (seen - known) if torch.isfinite(known := torch.tensor(end)) else seen
        for end, seen in zip(kept, torch.tensor([-3.0, 4.0]), strict=True)
    ]
    assert [ours.running_min.item(), ours.running_max.item()] == [e.item() for e in expected]


def test_from_torch_ao_keeps_finite_channels_beside_a_nonfinite_one():
    theirs = tq.FakeQuantize(CHANNELS, **CHANNEL_OPTIONS)
    theirs(torch.tensor([[-1.0, 1.0], [-2.0, 3.0], [0.0, 5.0]]))
    observer = theirs.activation_post_process
    observer.max_val[1] = torch.inf
    ours = from_torch_ao(theirs)
    assert ours.running_min.tolist() == [-1.0, -2.0, 0.0]
    assert ours.running_max.tolist() == [1.0, -torch.inf, 5.0]
    assert ours.scale.isnan().tolist() == [False, True, False]
    assert torch.equal(ours.scale[::2], theirs.scale[::2])
    assert torch.equal(ours.zero_point[::2], theirs.zero_point[::2].int())


def test_from_torch_ao_checks_scales_of_channels_with_a_finite_range():
    theirs = tq.FakeQuantize(CHANNELS, **CHANNEL_OPTIONS)
    theirs(torch.tensor([[-1.0, 1.0], [-2.0, 3.0]]))
    theirs.activation_post_process.max_val[0] = torch.inf
    theirs.scale[1] *= 2
    with pytest.raises(RuntimeError, match=r"the scale of the state is .*, but for its range this grid has"):
        from_torch_ao(theirs)
