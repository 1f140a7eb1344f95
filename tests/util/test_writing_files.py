"""Files are written completely or not at all."""

import os
import threading

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
optional = pytest.importorskip("fakequant._util.files")


def write_half(path):
    with optional.writing(path) as unfinished:
        unfinished.write_bytes(b"half")
        raise RuntimeError("no more")


def test_unfinished_file_has_a_unique_name_and_is_removed(tmp_path):
    with optional.writing(tmp_path / "m.bin") as unfinished, optional.writing(tmp_path / "m.bin") as other:
        assert sorted(os.listdir(tmp_path)) == sorted([unfinished.name, other.name])
        unfinished.write_bytes(b"new")
        other.write_bytes(b"new")
    assert os.listdir(tmp_path) == ["m.bin"]
    with pytest.raises(RuntimeError, match="no more"):
        write_half(tmp_path / "m.bin")
    assert os.listdir(tmp_path) == ["m.bin"]
    assert (tmp_path / "m.bin").read_bytes() == b"new"


PLACES = {
    "a missing folder": ("missing/m.bin", r"no folder .*missing"),
    "a folder": (".", "is a folder"),
    "a path below a file": ("file/m.bin", r"no folder .*file"),
}


@pytest.mark.parametrize(("place", "message"), PLACES.values(), ids=PLACES)
def test_unusable_path_is_refused_before_any_work(place, message, tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    began = []
    with pytest.raises(OSError, match=message), optional.writing(tmp_path / place):
        began.append(True)
    assert not began
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a read-only folder")
def test_read_only_folder_is_refused_before_any_work(monkeypatch):
    began = []
    message = r"(?s)/proc/self/m\.bin' cannot be written.*Use a path"
    with pytest.raises(OSError, match=message), optional.writing("/proc/self/m.bin"):
        began.append(True)
    assert not began
    export = pytest.importorskip("fakequant._export.example")
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    monkeypatch.setattr(export, "converted_view", lambda *args, **kwargs: began.append(True))
    model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(), torch.ones(1, 4))
    with pytest.raises(OSError, match="cannot be written"):
        fq.export_onnx(model, "/proc/self/m.onnx", torch.ones(1, 4))
    assert not began


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="needs a device file")
def test_device_file_is_not_replaced():
    with pytest.raises(OSError, match="not a regular file"), optional.writing("/dev/null"):
        pass


def test_threads_can_write_to_the_same_path(tmp_path):
    errors = []

    def write(number):
        try:
            for _ in range(200):
                with optional.writing(tmp_path / "m.bin") as unfinished:
                    unfinished.write_bytes(bytes([number]) * 1000)
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert os.listdir(tmp_path) == ["m.bin"]
    assert len(set((tmp_path / "m.bin").read_bytes())) == 1


def test_existing_symlink_is_not_followed(tmp_path, monkeypatch):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    names = iter(["planted.unfinished", "planted.unfinished", "fresh.unfinished"])
    monkeypatch.setattr(optional, "unfinished_name", lambda name: next(names))
    (tmp_path / "planted.unfinished").symlink_to(victim)
    with optional.writing(tmp_path / "m.bin") as unfinished:
        assert unfinished.name == "fresh.unfinished"
        unfinished.write_bytes(b"new")
    assert victim.read_bytes() == b"precious"
    assert not (tmp_path / "m.bin").is_symlink()


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX permissions")
@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077, 0o000], ids=oct)
def test_written_file_has_the_permissions_of_the_umask(mask, tmp_path):
    pytest.importorskip("safetensors")
    model = fq.convert(fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int4_weight_only(4)))
    before = os.umask(mask)
    try:
        (tmp_path / "plain").write_bytes(b"")
        with optional.writing(tmp_path / "m.bin") as unfinished:
            unfinished.write_bytes(b"new")
        fq.save_converted(model, tmp_path / "m.safetensors")
    finally:
        os.umask(before)
    expected = (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "m.bin").stat().st_mode == expected
    assert (tmp_path / "m.safetensors").stat().st_mode == expected


def test_long_file_name_can_be_written(tmp_path):
    with optional.writing(tmp_path / ("n" * 250)) as unfinished:
        unfinished.write_bytes(b"new")
    assert os.listdir(tmp_path) == ["n" * 250]
