"""What the report marks as bad, and the text of its cards."""

import copy

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
nn = torch.nn
recipes = pytest.importorskip("fakequant.recipes")
advice = pytest.importorskip("fakequant._diagnosis.report.advice")
page = pytest.importorskip("fakequant._diagnosis.report.page")
tensors = pytest.importorskip("fakequant._diagnosis.report.tensor_counts")
QuantizerHealth = pytest.importorskip("fakequant._diagnosis.health").QuantizerHealth

GRIDS = {
    "int8": (fq.QuantSpec(), 0),
    "uint8, zero point 0": (fq.QuantSpec(signed=False, symmetric=False), 0),
    "uint8, zero point 128": (fq.QuantSpec(signed=False, symmetric=False), 128),
}


def findings(x, scale, spec, zero_point):
    counts = tensors.TensorCounts("x", "weight", spec)
    counts.add(x, torch.tensor(scale), torch.tensor(zero_point))
    counts.one_grid = (scale, zero_point)
    return advice.judge(QuantizerHealth("x", 0.0, None, None, None, 0), counts, True).findings


@pytest.mark.parametrize(("spec", "zero_point"), GRIDS.values(), ids=GRIDS)
def test_judge_names_the_cause_of_unused_codes(spec, zero_point):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)).abs()
    (finding,) = findings(x, x.max().item() / 20, spec, zero_point)  # no value is near an end of the range
    assert "scale is much too large" in finding.why
    assert "not an outlier" in finding.what_to_do
    outlier = torch.cat([x / 20, x.max()[None]])
    (finding,) = findings(outlier, x.max().item() / (spec.qmax - zero_point), spec, zero_point)
    assert "much wider than most of the values" in finding.why
    assert "outliers" in finding.what_to_do


def two_layers(config, data):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)).eval()
    prepared = fq.calibrate(fq.prepare(model, config, data[0]), data, progress=False).eval()
    return fq.unprepare(copy.deepcopy(prepared)), prepared


def test_report_marks_the_layer_with_the_lowest_sqnr_only_if_it_is_low(tmp_path):
    data = [torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(1))]
    for config, is_bad in ((recipes.int8(), False), (recipes.lsq(2, first_last_bits=None), True)):
        found = fq.compare(*two_layers(config, data), data, progress=False)
        assert (page.low_layer(found) is not None) == is_bad
        tile = next(
            t for t in page.overview(fq.summary(two_layers(config, data)[1]), [], found, None, None) if "SQNR" in t[0]
        )
        assert tile[3] == is_bad
        text = fq.report(
            two_layers(config, data)[1], tmp_path, data, float_model=two_layers(config, data)[0], progress=False
        )
        section = text.read_text().split('id="compared"')[1].split("</section>")[0]
        assert ("bad" in section) == is_bad


def test_report_cards_count_layers_with_weights_and_name_the_score():
    data = [torch.randn(8, 1, 6, 6)]
    model, prepared = two_layers(recipes.int8(), data)
    assert len(fq.summary(prepared).layers) == 3  # the result of the ReLU is quantized too
    found = fq.sensitivity(
        model, recipes.int8(), lambda m: -float(m(data[0]).square().sum()), data=data, progress=False
    )
    tiles = {tile[0]: tile for tile in page.overview(fq.summary(prepared), [], None, found, None)}
    assert tiles["Layers quantized"][1] == "2"
    assert "Results only: 1." in tiles["Layers quantized"][2]
    assert "from fakequant.sensitivity" in tiles["Score after calibration"][2]
