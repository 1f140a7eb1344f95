"""Counts of values on the grid for `report`, and the findings based on them."""

import math
from itertools import pairwise

import pytest

import fakequant as fq
from fakequant import observers, recipes
from small_reports import batches, small, write

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
nn = torch.nn

from fakequant._diagnosis.health import QuantizerHealth  # noqa: E402
from fakequant._diagnosis.report.advice import judge  # noqa: E402
from fakequant._diagnosis.report.tensor_counts import TensorCounts, counting  # noqa: E402

# --- counts ------------------------------------------------------------------------------------


def test_tensor_counts_count_values_by_their_place_on_the_grid():
    spec = fq.QuantSpec(bits=2)  # -2 to 1
    counts = TensorCounts("w", "weight", spec)
    x = torch.tensor([-9.0, -2.75, -2.0, -0.26, 0.0, 0.24, 1.25, 1.75, 4.0, 100.0]) * 0.5
    counts.add(x, torch.tensor(0.5), torch.tensor(0, dtype=torch.int32))
    edges, bins = counts.edges.tolist(), counts.bins.tolist()
    assert (edges[counts.inside], edges[2 * counts.inside]) == (-2.5, 1.5)
    inside = [v for v in (x / 0.5).tolist() if edges[0] <= v < edges[-1]]
    expected = [sum(lo <= v < hi for v in inside) for lo, hi in pairwise(edges)]
    assert bins == expected
    assert (counts.under, counts.over, counts.total) == (1, 1, 10)
    assert (counts.below, counts.above) == (2, 3)
    assert counts.codes.tolist() == [3, 0, 3, 4]
    assert counts.used == 3
    assert counts.one_grid == (0.5, 0.0)


@pytest.mark.parametrize(
    ("spec", "shape", "scale_shape"),
    [
        (fq.QuantSpec(bits=4, axis=0), (3, 8), (3, 1)),
        (fq.QuantSpec(bits=4, axis=-1), (3, 8), (1, 8)),
        (fq.QuantSpec(bits=4, axis=1, group_size=4), (3, 8), (3, 2, 1)),
        (fq.QuantSpec(bits=8, axis=-1, group_size=-1), (2, 3, 8), (2, 3, 1)),
        (fq.QuantSpec(bits=12, signed=False, symmetric=False), (5, 7), ()),
        (fq.QuantSpec(bits=20), (5, 7), ()),
    ],
    ids=str,
)
def test_tensor_counts_divide_every_value_by_the_scale_of_its_block(spec, shape, scale_shape):
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(spec.qmin, spec.qmax + 1, shape, generator=generator)
    scale = 2.0 ** torch.randint(-3, 4, scale_shape, generator=generator)
    blocks = codes.reshape(*scale_shape[:2], -1) if len(scale_shape) == 3 and len(shape) == 2 else codes
    zero_point = 7 if not spec.symmetric else 0
    x = ((blocks - zero_point) * scale).reshape(shape).float()
    counts = TensorCounts("x", "activation", spec)
    found = scale.reshape(fq._backends.blocks.blocks_of(shape, spec).parameters)
    counts.add(x, found, torch.full(found.shape, zero_point, dtype=torch.int32))
    width = spec.levels / counts.inside
    places = torch.floor((codes.flatten() - spec.qmin + 0.5) / width).long() + counts.inside
    assert torch.equal(counts.bins, torch.bincount(places, minlength=3 * counts.inside))
    assert int(counts.codes.sum()) == x.numel() == counts.total
    assert (counts.clipped, counts.under, counts.over) == (0, 0, 0)
    assert counts.sqnr == math.inf


def test_tensor_counts_count_nonfinite_values_separately():
    counts = TensorCounts("x", "activation", fq.QuantSpec(bits=4))
    counts.add(torch.tensor([1.0, math.nan, math.inf, -math.inf]), torch.tensor(1.0), torch.tensor(0))
    assert counts.nonfinite == 3
    assert (int(counts.bins.sum()), counts.under, counts.over) == (1, 1, 1)
    assert counts.sqnr == math.inf


@pytest.mark.parametrize(
    "recipe", [recipes.w4a8(), recipes.int8_dynamic(), recipes.lsq(2)], ids=["w4a8", "int8_dynamic", "lsq"]
)
def test_tensor_counts_agree_with_health(recipe):
    model, data = small(recipe), batches()
    with counting(model) as counts:
        found = fq.health(model, data)
    for quantizer, counted in zip(found.quantizers, counts, strict=True):
        assert counted.path == quantizer.path
        assert counted.clipped == quantizer.clipped
        assert counted.used / counted.spec.levels == pytest.approx(quantizer.levels_used, abs=1e-6)
    assert counts[0].kind == "weight"
    assert counts[1].kind == "activation"
    assert counts[1].total == 256
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_dynamic_quantizers_have_no_single_grid():
    config = recipes.int8().rule(activation_observer=observers.Dynamic())
    model = small(config)
    with counting(model) as counts:
        fq.health(model, batches())
    assert {c.path: c.one_grid is None for c in counts}["0.input_quantizer"]


# --- findings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "mark", "words"),
    [
        ({"clipped": 0.2}, "clips", "20.0% of the values"),
        ({"scale_drift": 0.5}, "drifts", "50.0%"),
        ({"oscillating": 0.25}, "oscillates", "25.0% of the weights"),
        ({"nonfinite": 3}, "not finite", "3 values"),
    ],
)
def test_judge_names_the_finding_its_cause_and_a_fix(values, mark, words):
    fields = dict(clipped=0.0, levels_used=1.0, scale_drift=0.0, oscillating=0.0, nonfinite=0)
    counts = TensorCounts("x", "activation", fq.QuantSpec(bits=4))
    counts.add(torch.arange(-8.0, 8.0), torch.tensor(1.0), torch.tensor(0))
    counts.add(torch.full((4,), 7.75), torch.tensor(1.0), torch.tensor(0))  # clipped by less than a step
    assert (counts.above, counts.far) == (4, 0)
    assert judge(QuantizerHealth("x", **{**fields, "clipped": 0.2}), counts, True).findings == []
    if mark == "clips":
        counts.add(torch.full((5,), 9.0), torch.tensor(1.0), torch.tensor(0))
    assert counts.far == (5 if mark == "clips" else 0)
    (finding,) = judge(QuantizerHealth("x", **{**fields, **values}), counts, True).findings
    assert finding.mark == mark
    assert words in finding.why
    assert finding.what_to_do


def test_judge_reports_unused_codes_only_with_enough_values():
    health = QuantizerHealth("x", 0.0, None, None, None, 0)
    counts = TensorCounts("x", "weight", fq.QuantSpec(bits=8))
    counts.add(torch.tensor([1.0, 2.0, 3.0]), torch.tensor(1.0), torch.tensor(0))
    assert judge(health, counts, True).findings == []
    counts.add(torch.randn(1000, generator=torch.Generator().manual_seed(0)), torch.tensor(1.0), torch.tensor(0))
    assert [f.mark for f in judge(health, counts, True).findings] == ["few codes"]


def test_report_lists_quantizers_that_observed_nothing(tmp_path):
    model = fq.prepare(nn.Sequential(nn.Linear(8, 4)), recipes.int8(), torch.ones(1, 8))
    text = write(model, tmp_path).read_text()
    assert "nothing was observed" in text
    assert "fakequant.calibrate(model, data)" in text
