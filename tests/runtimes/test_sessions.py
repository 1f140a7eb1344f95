"""A file is opened by the runtime that it was written for."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

from torch import nn  # noqa: E402

import fakequant as fq  # noqa: E402
from fakequant import _runtimes  # noqa: E402
from fakequant._runtimes import session as sessions  # noqa: E402

X = torch.randn(3, 8)
RUNTIMES = {
    "generic": "onnxruntime",
    "onnxruntime-x86": "onnxruntime",
    "openvino": "openvino",
    "xnnpack": "executorch",
    "litert": "litert",
}


def exported(target, folder):
    """Returns the path of a small model that is exported for a target."""
    runtime = _runtimes.find(target).runtime
    pytest.importorskip(runtime.package)
    model = fq.prepare(nn.Sequential(nn.Linear(8, 4)), fq.recipes.int8(target=target), X)
    path = folder / f"file{'' if target == 'generic' else runtime.suffix}"
    getattr(fq, runtime.exporter)(fq.calibrate(model, [X], progress=False), path, X)
    return path


@pytest.mark.parametrize("target", RUNTIMES)
def test_every_file_is_opened_by_one_runtime(target, tmp_path):
    path = exported(target, tmp_path)
    opened = [key for key in _runtimes.RUNTIMES if sessions._session(key).opens(path)]
    assert opened == [RUNTIMES[target]]
    assert sessions.open_file(path).key == RUNTIMES[target]


def test_files_of_no_format_are_opened_by_none(tmp_path):
    (tmp_path / "text.onnx").write_text("no model")
    for path in (tmp_path, tmp_path / "text.onnx", tmp_path / "missing.onnx"):
        assert not any(sessions._session(key).opens(path) for key in _runtimes.RUNTIMES)


def test_a_session_of_folders_opens_a_folder(tmp_path, monkeypatch):
    class Folder(sessions.Session):
        key = "folders"
        is_folder = True

        @classmethod
        def opens(cls, path):
            return (path / "config.json").is_file()

    find = sessions._session
    monkeypatch.setitem(sessions.RUNTIMES, "folders", None)
    monkeypatch.setattr(sessions, "_session", lambda key: Folder if key == "folders" else find(key))
    with pytest.raises(FileNotFoundError, match="There is no file"):  # no runtime opens it
        sessions.open_file(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert isinstance(sessions.open_file(tmp_path), Folder)
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        sessions.open_file(tmp_path / "config.json", "folders")
