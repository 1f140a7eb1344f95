"""States that do not fit a quantizer are refused with the reason."""

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits, assert_same_state
from quantizer_kinds import AFFINE, CHANNEL, GROUP, HISTOGRAM, KINDS, WIDE, snapshot, through_a_file, trained

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
observers = pytest.importorskip("fakequant.observers")

MISFITS = {
    "granularity": (CHANNEL, presets.int8(group_size=4)),
    "tensor to channel": (fq.QuantSpec(), fq.QuantSpec(axis=0)),
    "bits": (GROUP, presets.int2(group_size=4)),
    "axis": (CHANNEL, presets.int8(axis=1)),
    "sign": (AFFINE, fq.QuantSpec(bits=4, symmetric=False)),
    "symmetry": (fq.QuantSpec(bits=4), fq.QuantSpec(bits=4, symmetric=False)),
    "narrow": (fq.QuantSpec(bits=8), fq.QuantSpec(bits=8, narrow_range=True)),
    "numerics": (fq.QuantSpec(), fq.QuantSpec(numerics="torch")),
    "group": (GROUP, presets.int4(group_size=8)),
}


@pytest.mark.parametrize("kind", [fqnn.FakeQuantize, fqnn.LearnedFakeQuantize], ids=["observed", "learned"])
@pytest.mark.parametrize(("saved", "here"), MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_state_of_another_spec_is_refused_and_changes_nothing(saved, here, kind, strict):
    theirs = torch.nn.ModuleDict({"act": kind(saved, shape=(8, 8))})
    ours = torch.nn.ModuleDict({"act": kind(here, shape=(8, 8))})
    if kind is fqnn.LearnedFakeQuantize:
        ours["act"].initialize(torch.randn(8, 8))
    else:
        ours["act"](torch.randn(8, 8))
    before = snapshot(ours)
    with pytest.raises(RuntimeError) as caught:
        ours.load_state_dict(theirs.state_dict(), strict=strict)
    message = str(caught.value)
    assert "act: the state is of a quantizer with the spec" in message
    assert f"({saved})" in message
    assert f"({here})" in message
    assert "size mismatch" not in message
    assert_same_state(before, ours.state_dict())


@pytest.mark.parametrize("kind", [fqnn.FakeQuantize, fqnn.LearnedFakeQuantize], ids=["observed", "learned"])
def test_state_with_another_number_of_channels_is_refused_with_the_spec(kind):
    ours, theirs = (kind(CHANNEL, shape=(channels, 8), path="layer.weight") for channels in (6, 5))
    before = snapshot(ours)
    with pytest.raises(RuntimeError, match=r"has shape \(5,\) in the state and \(6,\) here, where the spec is \(int8"):
        ours.load_state_dict(theirs.state_dict())
    assert_same_state(before, ours.state_dict())


FORMATS = {
    "unknown version": torch.tensor([2, 4, 0, 0, 0, -(2**31), -(2**31), 1], dtype=torch.int32),
    "unknown longer version": torch.tensor([2, *range(12)], dtype=torch.int32),
    "all zeros": torch.zeros(8, dtype=torch.int32),
    "empty": torch.zeros(0, dtype=torch.int32),
    "scalar": torch.tensor(3, dtype=torch.int32),
    "invalid bits": torch.tensor([1, 99, 0, 0, 0, -(2**31), -(2**31), 1], dtype=torch.int32),
    "invalid numerics": torch.tensor([1, 4, 0, 0, 0, -(2**31), -(2**31), 9], dtype=torch.int32),
    "too short": torch.tensor([1, 4, 0], dtype=torch.int32),
}


@pytest.mark.parametrize("grid", FORMATS.values(), ids=FORMATS)
def test_state_with_an_unknown_grid_format_is_refused_with_the_path(grid):
    """Modules of other libraries may also have a buffer called grid."""
    model = torch.nn.ModuleDict({"act": fqnn.FakeQuantize(AFFINE)})
    state = snapshot(model) | {"act.grid": grid}
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for ModuleDict:\s+act: "):
        model.load_state_dict(state)


def test_state_of_another_observer_is_refused():
    minmax, histogram = (fqnn.FakeQuantize(AFFINE, o) for o in (observers.MinMax(), HISTOGRAM))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "exponent", "counts"'):
        histogram.load_state_dict(minmax.state_dict())
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "exponent", "counts"'):
        minmax.load_state_dict(histogram.state_dict())


def test_state_with_another_number_of_bins_is_refused():
    ours, theirs = (fqnn.FakeQuantize(AFFINE, observers.Percentile(bins=n)) for n in (64, 128))
    with pytest.raises(RuntimeError, match=r"`counts` has shape \(128,\) in the state and \(64,\) here"):
        ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.5, 0.0], ids=str)
def test_learned_scale_survives_saving_after_a_nonfinite_step(bad):
    module = trained(KINDS["LSQ"])
    with torch.no_grad():
        module.step_size.fill_(bad)
    expected = module.qparams().scale
    other = KINDS["LSQ"]()
    other.load_state_dict(through_a_file(module.state_dict()))
    assert_same_bits(expected, other.qparams().scale, "scale")
    assert (expected > 0).all()
    assert_same_bits(module(WIDE), other(WIDE), "y")
