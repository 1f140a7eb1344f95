"""`card`: float beside exported files, in one table."""

import copy
import json

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
recipes = pytest.importorskip("fakequant.recipes")
module = pytest.importorskip("fakequant._diagnosis.card")

X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(40) % 3
BATCHES = [(X[:32], LABELS[:32]), (X[32:], LABELS[32:])]


class Named(nn.Module):
    """Returns a dict, with a constant."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        return {"logits": self.net(x), "kind": "scores"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A float model, the prepared one, and the path of its file."""
    torch.manual_seed(0)
    floats = Named()
    model = fq.prepare(Named(), recipes.int8(target="onnxruntime-x86"), X)
    fq.unprepare(model).load_state_dict(floats.state_dict())
    model = fq.calibrate(fq.prepare(model, recipes.int8(target="onnxruntime-x86"), X), BATCHES, progress=False)
    path = tmp_path_factory.mktemp("card") / "model.onnx"
    fq.export_onnx(model, path, X)
    return floats, model, path


@pytest.fixture(scope="module")
def timed(made):
    _, model, path = made
    return fq.card(model, path, BATCHES, seconds=0.01)


def test_scores_are_those_of_the_users_function(made):
    floats, model, path = made

    def evaluate(m):
        assert next(m.parameters()).device.type == "cpu"
        result = m(X)
        assert result["kind"] == "scores"
        return float(result["logits"].detach().double().sum())

    found = fq.card(model, [path], BATCHES, evaluate, float_model=floats, seconds=0)
    session = module.open_file(path)
    expected = [evaluate(floats), evaluate(model.eval()), float(session.run_unwatched((X,), {})[0].astype("f8").sum())]
    assert [row.score for row in found.rows] == expected
    assert expected[0] != expected[1]
    assert [row.agreement for row in found.rows] == [None] * 3
    assert found.rows[0].name == "float"
    assert all(not row.latencies and row.training_step is None for row in found.rows)


def test_without_a_function_results_are_compared_with_float(made, timed):
    floats, _, path = made
    first, prepared, file = timed.rows
    result = torch.from_numpy(module.open_file(path).run_unwatched((X,), {})[0].copy())
    same = floats(X)["logits"].argmax(1) == result.argmax(1)
    assert file.agreement == float(same.double().mean())
    assert file.sqnr == pytest.approx(prepared.sqnr, abs=0.5)
    assert (first.agreement, first.sqnr, first.score) == (None, None, None)


def test_files_have_bytes_times_shares_and_a_verdict(made, timed):
    _, model, path = made
    first, prepared, file = timed.rows
    assert (first.bytes, prepared.bytes, file.bytes) == (4 * 163, None, path.stat().st_size)
    assert (file.name, file.runtime, file.target) == ("model.onnx", "onnxruntime", "onnxruntime-x86")
    assert file.verification.ok
    assert file.share == 1
    assert file.float_bytes > first.bytes
    assert [one.threads for one in file.latencies] == [1]
    assert first.training_step == 1
    assert prepared.training_step > 0
    assert not model.training or model.net[0].training


def test_card_is_text_html_markdown_and_json(timed):
    text, markdown = str(timed), timed.to_markdown("Int8")
    header = ["model", "runtime", "agreement", "SQNR dB", "bytes", "ms, 1 thread", "in integers", "verify"]
    assert [cell.strip() for cell in text.splitlines()[0].split("|")] == [*header, "training step"]
    names = [line.split("|")[0].strip() for line in text.splitlines()[2:6]]
    assert names == ["without quantizers", "prepared", "float", "model.onnx"]
    lines = markdown.splitlines()
    assert lines[0] == "## Int8"
    assert {line.count("|") for line in lines if line.startswith("|")} == {10}
    assert lines[-1].startswith("- fakequant ")
    assert timed.to_html() == timed._repr_html_()
    assert timed.to_html().count("<tr>") == 5
    assert json.loads(json.dumps(timed.to_dict()))["rows"][2]["verified"] is True


def test_weights_that_ptq_has_changed_are_not_called_float(tmp_path):
    torch.manual_seed(0)
    floats = Named()
    model = fq.prepare(copy.deepcopy(floats), recipes.int4_weight_only(2, target="onnxruntime-x86"), X)
    model = fq.calibrate(model, BATCHES, progress=False)
    fq.ptq.gptq(model, BATCHES, progress=False)
    fq.export_onnx(model, tmp_path / "model.onnx", X)
    settings = {"accuracy_level": 1, "seconds": 0}
    alone = fq.card(model, tmp_path / "model.onnx", BATCHES, **settings)
    given = fq.card(model, tmp_path / "model.onnx", BATCHES, float_model=floats, **settings)
    assert [card.rows[0].name for card in (alone, given)] == ["without quantizers", "float"]
    assert alone.notes[0].startswith("without quantizers: its weights are those after training and ptq")
    assert given.rows[2].sqnr < 60 < alone.rows[2].sqnr


def test_a_card_runs_files_at_the_level_of_its_verdict(tmp_path):
    # The default level rounds the inputs of weight-only layers.
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    model = fq.prepare(model, recipes.int4_weight_only(32, target="onnxruntime-x86"), torch.ones(1, 64))
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    model = fq.calibrate(model, [x], progress=False)
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    cards = [
        fq.card(model, tmp_path / "model.onnx", [x], float_model=fq.unprepare(copy.deepcopy(model)), **level, seconds=0)
        for level in ({}, {"accuracy_level": 1})
    ]
    assert [card.ok for card in cards] == [False, True]
    default, exact = [abs(card.rows[2].sqnr - card.rows[1].sqnr) for card in cards]
    assert exact < 1e-3 < default
    with pytest.raises(ValueError, match="accuracy_level"):
        fq.card(model, tmp_path / "model.onnx", [x], accuracy_level=2)


def test_a_file_that_is_not_ok_is_named(timed, monkeypatch):
    monkeypatch.setattr(type(timed.rows[2].verification), "problem", "Codes differ\nat 0.")
    assert not timed.ok
    assert "NOT OK" in str(timed)
    assert "model.onnx: verify is not ok. Codes differ at 0." in str(timed).splitlines()


def test_wrong_arguments_are_refused(made):
    floats, model, path = made
    for arguments, error, words in (
        ((floats, path, BATCHES), ValueError, "prepare"),
        ((model, path, []), ValueError, "no batches"),
        ((model, path, BATCHES, 3), TypeError, "`evaluate` must be a function"),
        ((model, "none.onnx", BATCHES), FileNotFoundError, "none.onnx"),
    ):
        with pytest.raises(error, match=words):
            fq.card(*arguments, seconds=0)
