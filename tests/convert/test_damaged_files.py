"""A file of a converted model with any flipped bit is refused."""

import json
import random

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
safetensors = pytest.importorskip("safetensors")
save_file = pytest.importorskip("safetensors.torch").save_file


def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3), nn.LayerNorm(3)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "m.safetensors"
    model = fq.calibrate(
        fq.prepare(make(), fq.recipes.int8(), torch.randn(4, 1, 4, 4)), [torch.randn(4, 1, 4, 4)], progress=False
    )
    fq.save_converted(fq.convert(model), path)
    return path


def snapshot(model):
    return {name: value.clone() for name, value in model.state_dict().items()}, [type(m) for m in model.modules()]


def is_refused(model, path):
    """Returns True if loading raises an error that says what to do."""
    try:
        fq.load_converted(model, path)
    except ValueError as error:
        return any(words in str(error) for words in ("Write it again", "Pass a file that was", "version that wrote it"))
    return False


def test_file_with_one_flipped_bit_is_refused_and_the_model_unchanged(saved, tmp_path):
    good = saved.read_bytes()
    header = 8 + int.from_bytes(good[:8], "little")
    chosen = random.Random(0)
    bits = set(range(64))  # the bytes that hold the header length
    bits |= set(chosen.sample(range(64, 8 * header), 1500))
    bits |= set(chosen.sample(range(8 * header, 8 * len(good)), 400))
    for word in (b"checksum", b"fakequant", b"format"):
        start = good.index(word)
        bits |= set(range(8 * start, 8 * (start + len(word) + 6)))
    model, path = make(), tmp_path / "m.safetensors"
    tensors, kinds = snapshot(model)
    for bit in sorted(bits):
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(damaged)
        assert is_refused(model, path), f"bit {bit} of {good[bit // 8 - 8 : bit // 8 + 8]}"
    now, kinds_now = snapshot(model)
    assert kinds == kinds_now
    assert tensors.keys() == now.keys()
    assert all(torch.equal(value, now[name]) for name, value in tensors.items())
    fq.load_converted(model, saved)


def without_checksum(saved, path, version):
    with safetensors.safe_open(saved, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        described = json.loads(file.metadata()["fakequant"])
    save_file(tensors, path, metadata={"fakequant": json.dumps({**described, "format": version})})


def test_format_1_file_without_checksum_loads_with_a_warning(saved, tmp_path):
    without_checksum(saved, tmp_path / "old.safetensors", 1)
    with pytest.warns(UserWarning, match=r"old\.safetensors has no checksum"):
        model = fq.load_converted(make(), tmp_path / "old.safetensors")
    x = torch.randn(2, 1, 4, 4)
    assert torch.equal(model(x), fq.load_converted(make(), saved)(x))


def test_format_2_file_without_checksum_is_refused(saved, tmp_path):
    without_checksum(saved, tmp_path / "new.safetensors", 2)
    with pytest.raises(ValueError, match="its checksum does not match its contents"):
        fq.load_converted(make(), tmp_path / "new.safetensors")
