"""`report`: the content of the page, its side effects and its errors."""

import copy
import pickle
import re
import sys
from html import unescape
from pathlib import Path

import pytest

import fakequant as fq
from fakequant import recipes
from small_reports import batches, small, write

torch = pytest.importorskip("torch")
matplotlib = pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
nn = torch.nn

from fakequant._diagnosis.health import History  # noqa: E402

# --- the page ---------------------------------------------------------------------------------------


def test_report_has_a_section_and_figures_for_everything_given(tmp_path):
    model, data, history = small(), batches(), History()
    float_model = fq.unprepare(copy.deepcopy(model))
    for step in range(4):
        history.measure(step, model, data)
    sensitivity = fq.sensitivity(
        float_model, recipes.w4a8(), lambda m: -float(m(data[0]).square().sum()), data=data, progress=False
    )
    page = write(
        model, tmp_path / "new" / "folder", data, float_model=float_model, sensitivity=sensitivity, history=history
    )
    assert page == tmp_path / "new" / "folder" / "report.html"
    text = page.read_text(encoding="utf-8")
    for part in ("overview", "quantizers", "compared", "sensitivity", "history", "tensors", "layers"):
        assert f'<section id="{part}">' in text
        assert f'href="#{part}"' in text
    figures = {p.name for p in (page.parent / "figures").iterdir()}
    tensors = [f"{p}-{w}.png" for p, _ in fq.nn.named_quantizers(model) for w in ("values", "codes")]
    others = ["layers-sqnr", "sensitivity", "history-clipped", "history-levels_used", "history-scale_drift"]
    assert figures == {*tensors, *(f"{name}.png" for name in [*others, "history-oscillating", "history-ranges"])}
    assert text.count("<svg ") == text.count("<figcaption>") == len(figures)
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in (page.parent / "figures").iterdir())
    assert fq.info().version in text
    assert not list(tmp_path.rglob("*unfinished*"))


def test_notebooks_show_the_page_and_its_path(tmp_path):
    page = write(small(), tmp_path / "a & b")
    frame = re.fullmatch(
        r'<p>(.*?)</p><iframe srcdoc="([^"]*)" sandbox="allow-scripts" style="[^"]*"></iframe>', page._repr_html_()
    )
    assert unescape(frame[1]) == str(page)
    assert unescape(frame[2]) == page.read_text(encoding="utf-8")
    assert page.parent._repr_html_() is None
    assert pickle.loads(pickle.dumps(page)) == Path(page)


@pytest.mark.parametrize("measure", ["output", "second_order"])
def test_report_shows_the_costs_of_widths(tmp_path, measure):
    pytest.importorskip("scipy")
    model, data = small(), batches()
    float_model = fq.unprepare(copy.deepcopy(model))
    config = recipes.w4a8(first_last_bits=None)
    found = fq.sensitivity(float_model, config, data=data, candidates=(2, 8), measure=measure, progress=False)
    page = write(model, tmp_path, sensitivity=found, max_tensors=0)
    text = page.read_text(encoding="utf-8")
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == ["pareto.png", "sensitivity.png"]
    for words in ("2-bit weight</th>", "8-bit weight</th>", "8 bits</text>", f"{found.layers[0].costs[2]:+.4g}<"):
        assert words in text
    assert ("an estimate" in text) == (measure == "second_order")
    assert "Score after calibration" not in text
    assert "$" not in re.search(r"<h3>Widths</h3>.*?</figure>", text, flags=re.DOTALL)[0]  # labels are not formulas


def test_report_omits_sections_of_what_is_not_given(tmp_path):
    page = write(small(), tmp_path)
    text = page.read_text(encoding="utf-8")
    for part in ("compared", "sensitivity", "history", "verification"):
        assert f'<section id="{part}">' not in text
    assert sorted(p.name for p in (tmp_path / "figures").iterdir()) == sorted(
        f"{layer}.weight_quantizer-{what}.png" for layer in (0, 2) for what in ("values", "codes")
    )
    assert "2 activation quantizers received no data" in text


def test_report_shows_a_verification(tmp_path):
    verify = pytest.importorskip("fakequant._verify.verdict")
    tensors = [verify.TensorReport("0.input_quantizer", 1000, runtime_differ=7, runtime_steps=2, why_runtime="odd")]
    found = verify.Verification("generic", tensors, {"0": "QGemm"}, verify.OutputReport(), {"2.input": "no scale"})
    text = write(small(), tmp_path, verification=found, max_tensors=0).read_text(encoding="utf-8")
    for words in ("Different codes", "7 differ, by 2", "odd", "QGemm", "2.input</span> is not compared: no scale"):
        assert words in text
    assert "first at 0.input_quantizer" in text


def test_report_opens_with_the_shares_in_integers(tmp_path):
    verify = pytest.importorskip("fakequant._verify.verdict")
    text = write(small(), tmp_path, max_tensors=0).read_text(encoding="utf-8")
    first = re.search(r"<dl class=.tiles.>\s*<div>(.*?)</div>", text)[1]
    assert "<dt>Quantized</dt>" in first
    found = fq.summary(small())
    share = f"{found.quantized_multiplications / found.multiplications:.1%}"
    assert share in first
    assert f"{found.parameters:,} parameters</dd>" in first
    assert "In integers in the runtime" not in text
    said = verify.Verification("generic", [], {"0": "QGemm", "2": "Gemm"}, verify.OutputReport(numbers=1), {})
    said.integers = ["0"]
    said.floats = {"2": "its input is not quantized", "4": "Own is not a supported layer type"}
    said.parameters, said.integer_parameters = found.parameters, found.parameters // 3
    said.multiplications, said.integer_multiplications = found.multiplications, found.multiplications // 2
    text = write(small(), tmp_path, max_tensors=0, verification=said).read_text(encoding="utf-8")
    tile = re.search(r"<div><dt>In integers in the runtime.*?</div>", text)[0]
    assert "2 of 3 layers run in float" in tile
    assert 'class="number bad">50.0%' in tile
    assert '<td class="path">2</td><td>Gemm</td><td>its input is not quantized</td>' in text
    assert '<td class="path">4</td><td>–</td><td>Own is not a supported layer type</td>' in text


def test_the_report_loads_nothing_and_uses_every_id_once(tmp_path):
    text = write(small(), tmp_path, batches()).read_text(encoding="utf-8")
    assert not re.search(r"https?:|//\w+\.|@import|url\((?!#)", text)
    assert "default-src 'none'" in text
    ids = re.findall(r'\sid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:href="#|url\(#)([^")]+)', text)
    assert set(used) <= set(ids)
    # Figures contain no fixed colours, which would not follow the dark theme.
    for svg in re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL):
        assert not re.search(r"#[0-9a-fA-F]{6}\b", svg)


def test_report_writes_the_same_bytes_for_the_same_model(tmp_path):
    model, data = small(), batches()
    first, second = (write(model, tmp_path / name, data, max_tensors=1) for name in "ab")
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert len(files) == 3
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    write(small(seed=1), tmp_path / "a", data, max_tensors=0)  # overwrites the first report
    assert first.read_bytes() != second.read_bytes()


def test_report_lists_quantizers_that_are_switched_off(tmp_path):
    model = small()
    assert "switched off" not in write(model, tmp_path, batches(), max_tensors=0).read_text(encoding="utf-8")
    model[0].input_quantizer.quantizing = False
    text = write(model, tmp_path, batches(), max_tensors=0).read_text(encoding="utf-8")
    assert "It is switched off" in text


@pytest.mark.parametrize("data", [batches(), iter(batches())], ids=["list", "iterator"])
def test_report_refuses_negative_steps(tmp_path, data):
    with pytest.raises(ValueError, match="`steps` must be a number of batches"):
        write(small(), tmp_path / "r", data, steps=-1)


def test_report_names_a_model_that_is_a_single_layer(tmp_path):
    model = nn.Linear(8, 4)
    prepared = fq.calibrate(fq.prepare(copy.deepcopy(model), recipes.int8(), batches()[0]), batches(), progress=False)
    text = write(prepared, tmp_path, batches(), float_model=model, max_tensors=0).read_text(encoding="utf-8")
    assert "at the model" in text


def test_report_removes_figures_of_an_earlier_report_only(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "mine.png").touch()
    write(small(), tmp_path, batches())
    assert (tmp_path / "figures" / "mine.png").exists()  # because there was no earlier report
    write(small(), tmp_path, max_tensors=1)
    assert len(list((tmp_path / "figures").iterdir())) == 2


def test_report_escapes_titles_and_paths(tmp_path):
    model = nn.Sequential()
    model.add_module("<b>$x$", nn.Linear(4, 2))
    model = fq.prepare(model, recipes.int4_weight_only(4))
    text = write(model, tmp_path, title="<script>alert(1)</script>").read_text(encoding="utf-8")
    assert "<b>$x$" not in text
    assert "&lt;b&gt;$x$" in text
    assert "<script>alert" not in text
    assert (tmp_path / "figures" / "_b_x_.weight_quantizer-values.png").is_file()


def test_report_draws_the_worst_tensors_if_there_are_too_many(tmp_path):
    model, data = small(), [batch * 100 for batch in batches()]
    text = write(model, tmp_path, data, max_tensors=1).read_text(encoding="utf-8")
    drawn = {p.name.rsplit("-", 1)[0] for p in (tmp_path / "figures").iterdir()}
    assert len(drawn) == 1
    assert drawn <= {"0.input_quantizer", "2.input_quantizer"}
    assert "3 more tensors" in text
    assert "max_tensors=None" in text


# --- side effects -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "recipe", [recipes.w4a8(), recipes.int8_dynamic(), recipes.lsq(4)], ids=["w4a8", "int8_dynamic", "lsq"]
)
def test_report_leaves_the_model_unchanged(recipe, tmp_path):
    model = small(recipe).train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    history = History()
    history.measure(0, model)
    with torch.no_grad():
        model[0].weight *= 1.5
        before["0.weight"] = model[0].weight.clone()
    write(model, tmp_path, [torch.randn(5, 8) * 100], max_tensors=0)
    assert [m.training for m in model] == [True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not m._forward_pre_hooks and not m._forward_hooks for m in model.modules())
    if recipe.default.learned:
        return
    # The drift of the user's history is still since its own last measurement.
    assert history.measure(1, model).to_dict()["0.weight_quantizer"]["scale_drift"] == pytest.approx(0.5)


def settings():
    return {
        name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"
    }  # reading the backend would load it


def test_report_neither_uses_nor_changes_matplotlib_settings(tmp_path):
    model, had_pyplot = small(), "matplotlib.pyplot" in sys.modules
    plain = write(model, tmp_path / "a", max_tensors=1).read_bytes()
    with matplotlib.rc_context(
        {"font.size": 30, "text.usetex": True, "axes.facecolor": "red", "svg.hashsalt": "other"}
    ):
        before = settings()
        assert write(model, tmp_path / "b", max_tensors=1).read_bytes() == plain
        assert settings() == before
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_report_accepts_data_that_can_be_read_only_once(tmp_path):
    model = small()
    float_model = fq.unprepare(copy.deepcopy(model))
    text = write(model, tmp_path, iter(batches(1)), float_model=float_model, max_tensors=0).read_text()
    assert '<section id="compared">' in text


# --- errors -----------------------------------------------------------------------------------------


def test_report_refuses_a_model_that_is_not_prepared(tmp_path):
    with pytest.raises(ValueError, match="not prepared"):
        write(nn.Linear(2, 2), tmp_path / "r")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("data", [[], lambda model: None], ids=["batches", "function"])
def test_report_refuses_empty_data(tmp_path, data):
    with pytest.raises(ValueError, match="`data` has no batches"):
        write(small(), tmp_path / "r", data)
    assert not list(tmp_path.iterdir())


def test_report_that_fails_on_data_leaves_no_files_and_hooks(tmp_path):
    model = small()
    with pytest.raises(RuntimeError):
        write(model, tmp_path / "r", [torch.rand(2, 9)])
    assert not list(tmp_path.iterdir())
    assert all(not m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("place", ["", "figures"])
def test_report_refuses_a_file_in_place_of_its_folder(tmp_path, place):
    file = tmp_path / "r" / place if place else tmp_path / "r"
    file.parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with pytest.raises(NotADirectoryError, match="is a file, not a folder"):
        write(small(), tmp_path / "r")
    assert file.read_text() == "mine"


def test_report_refuses_a_file_as_parent_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="is a file, not a folder"):
        write(small(), tmp_path / "file" / "r")


def test_report_says_why_a_folder_cannot_be_written(tmp_path, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OSError, match="cannot be written: Permission denied"):
        write(small(), tmp_path / "r")


@pytest.mark.parametrize("module", ["matplotlib", "jinja2"])
def test_report_without_its_packages_names_the_install_command(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install "fakequant\[report\]"'):
        write(small(), tmp_path / "r")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"float_model": 3}, TypeError, "`float_model` must be a torch.nn.Module, got int"),
        ({"float_model": nn.Linear(2, 2)}, ValueError, "`float_model` needs `data` to be compared on"),
        ({"history": []}, TypeError, "`history` must be a fakequant.History, got list"),
        ({"sensitivity": 1.0}, TypeError, "`sensitivity` must be what fakequant.sensitivity"),
        ({"verification": True}, TypeError, "`verification` must be what fakequant.verify"),
        ({"title": 5}, TypeError, "`title` must be a string, got 5"),
        ({"max_tensors": -1}, ValueError, "`max_tensors` must be a number of tensors or None, got -1"),
    ],
)
def test_report_refuses_wrong_options(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        write(small(), tmp_path / "r", **options)
    assert not list(tmp_path.iterdir())
