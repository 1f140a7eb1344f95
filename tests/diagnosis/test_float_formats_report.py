"""Health, comparisons and reports of float formats: grids whose steps are not equal."""

import math

import pytest

import fakequant as fq
from fakequant import presets, recipes
from fakequant.formats import FLOAT_FORMATS
from small_reports import batches, small, write

torch = pytest.importorskip("torch")
nn = torch.nn

from fakequant._backends.torch.grid_values import number_of_values, places_of, scale_of_each, step_of_each  # noqa: E402
from fakequant._diagnosis.health import QuantizerHealth  # noqa: E402
from fakequant._diagnosis.report.advice import judge  # noqa: E402
from fakequant._diagnosis.report.figures import draw_levels, draw_values  # noqa: E402
from fakequant._diagnosis.report.tensor_counts import TensorCounts, counting  # noqa: E402

by_format = pytest.mark.parametrize("name", FLOAT_FORMATS)
RECIPES = {"fp8": recipes.fp8(), "mxfp8": recipes.mxfp8(), "nvfp4": recipes.nvfp4()}
by_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def counted(spec, x, scale=1.0, kind="activation"):
    counts = TensorCounts("x", kind, spec)
    counts.add(x, torch.tensor(scale), torch.tensor(0, dtype=torch.int32))
    return counts


# --- values of a grid ------------------------------------------------------------------------------


@by_format
def test_places_are_those_of_ascending_values(name):
    spec, form = fq.QuantSpec(format=name), FLOAT_FORMATS[name]
    values = torch.from_numpy(form.values())
    places = places_of(torch.arange(1 << form.bits, dtype=torch.uint8), spec)
    finite = values.isfinite()
    assert torch.equal(places < 0, ~finite)
    assert torch.equal(torch.from_numpy(form.grid())[places[finite]], values[finite])
    assert int(places.max()) + 1 == number_of_values(spec)


@by_format
def test_steps_are_distances_to_the_next_value(name):
    spec, grid = fq.QuantSpec(format=name), torch.from_numpy(FLOAT_FORMATS[name].grid())
    positive = grid[grid >= 0]
    for scale in (1.0, 0.37):
        s = torch.tensor(scale)
        assert torch.equal(scale_of_each(s, grid, spec), s.expand(grid.shape))
        steps = step_of_each(s, positive[:-1] * s, spec)
        assert torch.equal(steps, positive.diff() * s)
        assert torch.equal(step_of_each(s, -positive[:-1] * s, spec), steps)


def test_scales_of_short_blocks_belong_to_their_elements():
    spec, x = presets.mxfp4(), torch.zeros(2, 40)
    scale = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    expected = torch.cat([scale[:, :1].expand(2, 32), scale[:, 1:].expand(2, 8)], 1)
    assert torch.equal(scale_of_each(scale, x, spec), expected)


# --- health and comparison -------------------------------------------------------------------------


def test_health_counts_values_that_saturate_and_values_of_the_grid_in_use():
    model = fq.prepare(nn.Sequential(nn.Linear(2, 1)), recipes.fp8(), torch.tensor([[448.0, -448.0]]))
    fq.calibrate(model, [torch.tensor([[448.0, -448.0]])], progress=False)
    # 464 rounds to 448, 465 would not; zeros of both signs are one value of 253.
    data = torch.tensor([[448.0, 464.0], [465.0, -1e6], [0.0, -0.0], [1.0, 1.01]])
    found = fq.health(model, [data]).to_dict()["0.input_quantizer"]
    assert found["clipped"] == 2 / 8
    assert found["levels_used"] == pytest.approx(4 / 253)


@pytest.mark.filterwarnings("ignore:.*NaN or infinite:RuntimeWarning")
def test_nan_is_no_value_of_a_float_grid():
    model = fq.prepare(nn.Sequential(nn.Linear(2, 1)), recipes.fp8(), torch.tensor([[448.0, -448.0]]))
    fq.calibrate(model, [torch.tensor([[448.0, -448.0]])], progress=False)
    found = fq.health(model, [torch.tensor([[math.nan, 1.0]])]).to_dict()["0.input_quantizer"]
    assert found["levels_used"] == pytest.approx(1 / 253)
    counts = counted(presets.fp8_e4m3(), torch.tensor([math.nan, 1.0]))
    assert (int(counts.codes.sum()), counts.total, counts.nonfinite) == (1, 2, 1)


@by_recipe
def test_counts_of_a_report_agree_with_health(recipe):
    model, data = small(recipe), batches()
    with counting(model) as counts:
        found = fq.health(model, data)
    for quantizer, counted in zip(found.quantizers, counts, strict=True):
        assert counted.clipped == quantizer.clipped
        assert counted.used / counted.levels == pytest.approx(quantizer.levels_used, abs=1e-6)


@by_recipe
def test_compare_counts_steps_of_the_grid(recipe):
    model = small(recipe)
    floats = fq.unprepare(small(recipe))
    found = fq.compare(floats.eval(), model.eval(), [torch.rand(32, 8, generator=torch.Generator().manual_seed(0))])
    for layer in found.layers:
        clipped = layer.isolated.clipped
        assert layer.isolated.max_steps <= 0.5 or clipped > 0
        # An error of a whole value is at most as many steps as there are in a power of two, and the last one.
        assert layer.accumulated.max_steps < 32


# --- counts and findings ---------------------------------------------------------------------------


def test_counts_of_a_float_grid():
    x = torch.tensor([0.0, -0.0, 0.2, 0.3, 5.1, -6.0, 7.0, 7.1, 8.1, -9.0, math.nan, math.inf]) * 0.5
    counts = counted(fq.QuantSpec(format="e2m1"), x, 0.5)
    grid = FLOAT_FORMATS["e2m1"].grid().tolist()
    found = {value: n for value, n in zip(grid, counts.codes.tolist(), strict=True) if n}
    assert found == {0.0: 3, 0.5: 1, 6.0: 5, -6.0: 3}  # the format has no NaN: the code is that of the lowest value
    # 7 is a tie with 8, the next value of an unbounded grid, and is clipped.
    assert (counts.below, counts.above, counts.far, counts.nonfinite) == (2, 4, 3, 2)
    assert counts.edges[counts.inside] == -7
    assert counts.edges[2 * counts.inside] == 7
    assert counts.one_grid == (0.5, 0.0)


def advice_of(spec, x, scale=1.0, kind="activation"):
    counts = counted(spec, x, scale, kind)
    health = QuantizerHealth("x", counts.clipped, counts.used / counts.levels, 0.0, 0.0, 0)
    return judge(health, counts, True).findings


def test_unused_values_of_8_bit_floats_are_no_problem():
    x = torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 1
    assert advice_of(presets.fp8_e5m2(), x, 2 / 57344) == []
    (finding,) = advice_of(fq.QuantSpec(bits=8), x / 20, 2 / 127)
    assert finding.mark == "few codes"


def test_a_scale_that_is_much_too_large_for_a_float_grid_is_found():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    (finding,) = advice_of(fq.QuantSpec(format="e2m1"), x.clamp(-2, 2), 4.0)
    assert finding.mark == "few codes"
    assert "none near an end" in finding.why


def test_clipping_by_a_block_scale_names_the_scale_rule():
    spec, x = presets.mxfp4(), torch.full((4, 32), 7.9)
    counts = TensorCounts("x", "activation", spec)
    counts.add(x, torch.ones(4, 1), torch.zeros(4, 1, dtype=torch.int32))
    counts.far = counts.total  # 7.9 is less than a step above 6
    (finding,) = judge(QuantizerHealth("x", counts.clipped, 1.0, 0.0, 0.0, 0), counts, True).findings[:1]
    assert (finding.mark, "scale_rule" in finding.what_to_do) == ("clips", True)


# --- figures ---------------------------------------------------------------------------------------


def lines(figure):
    """The positions of the vertical lines of a figure."""
    return [[float(segment[0][0]) for segment in c.get_segments()] for c in figure.axes[0].collections][-1]


def test_lines_of_a_figure_are_the_values_of_the_format():
    counts = counted(fq.QuantSpec(format="e2m1"), torch.randn(100), 0.5)
    assert lines(draw_values(counts)) == [0.5 * value for value in FLOAT_FORMATS["e2m1"].grid().tolist()]


def test_lines_of_a_large_format_are_powers_of_two():
    counts = counted(presets.fp8_e4m3(), torch.randn(100))
    powers = [8.0, 16.0, 32.0, 64.0, 128.0, 256.0]
    assert lines(draw_values(counts)) == [*(-p for p in reversed(powers)), *powers]
    counts = counted(fq.QuantSpec(bits=4), torch.randn(100))
    assert lines(draw_values(counts)) == [float(code) for code in range(-8, 8)]


def test_bars_are_labelled_with_values():
    axes = draw_levels(counted(fq.QuantSpec(format="e2m1"), torch.randn(100))).axes[0]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["-6", "-4", "-3", "-2", "-1.5", "-1", "-0.5", "0", "0.5", "1", "1.5", "2", "3", "4", "6"]
    for name in FLOAT_FORMATS:
        counts = counted(fq.QuantSpec(format=name), torch.randn(100))
        labels = [label.get_text() for label in draw_levels(counts).axes[0].get_xticklabels()]
        assert "0" in labels
        assert 5 <= len(labels) <= 15


@by_recipe
def test_a_report_is_written(recipe, tmp_path):
    text = write(small(recipe), tmp_path, batches(), max_tensors=1).read_text()
    expected = "values of the format" if recipe == RECIPES["nvfp4"] else "powers of two"
    assert f"Lines are {'the ' if 'values' in expected else ''}{expected}" in text
