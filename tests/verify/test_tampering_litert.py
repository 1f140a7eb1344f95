"""`verify` accepts no .tflite file that was changed, whether or not its hash was made to match."""

import platform

import numpy as np
import pytest

import fakequant as fq
from thoroughness import ALL

pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert.interpreter")
files = pytest.importorskip("fakequant._export.litert.file")
digit_models = pytest.importorskip("digit_models")

pytestmark = [
    pytest.mark.usefixtures("torch_on_one_thread"),
    pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="the target is for x86"),
]
DATA = [digit_models.digits(16, 2)]
TAMPERS = 240 if ALL else 12


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model and its file."""
    model = digit_models.calibrated("mlp", "int8", "litert")
    path = tmp_path_factory.mktemp("exported") / "model.tflite"
    fq.export_litert(model, path, DATA[0])
    return model, path


def says_ok(model, data, path):
    """Returns whether `verify` is content with a file of these bytes."""
    path.write_bytes(data)
    try:
        return fq.verify(model, path, DATA, runtime="litert").ok
    except ValueError:
        return False


def test_damaged_files(exported, tmp_path):
    model, path = exported
    whole, bad = path.read_bytes(), tmp_path / "m.tflite"
    for data, message in (
        (b"", "is empty"),
        (b"# no model", "is not a .tflite file"),
        (whole[: len(whole) // 2], "was changed|is damaged"),
        (whole[:8] + bytes(1000), "is damaged"),
        (whole.replace(b"sha256:", b"sha255:"), "was not written by fakequant.export_litert"),
    ):
        bad.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            fq.verify(model, bad, DATA, runtime="litert")


def test_changed_bytes(exported, tmp_path, record_property):
    """Every second hash is made to match again."""
    model, path = exported
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    seal = files._SEALED.search(whole)
    ok = []
    assert says_ok(model, files.sealed(whole), tmp_path / "m.tflite")
    for number, place in enumerate(rng.choice(len(whole), TAMPERS, replace=False).tolist()):
        if seal.start() <= place < seal.end():
            continue
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        data = files.sealed(bytes(changed)) if number % 2 else bytes(changed)
        if says_ok(model, data, tmp_path / "m.tflite"):
            ok.append((number, place))
    record_property("tampers", TAMPERS)
    assert ok == []


def _weight(graph, model):
    buffer = model.buffers[next(t.buffer for t in graph.tensors if t.name == b"3.weight")]
    buffer.data = np.array(buffer.data)
    buffer.data[0] ^= 1


def _scale(graph, model):
    tensor = next(t for t in graph.tensors if t.name.startswith(b"3.input_quantizer"))
    tensor.quantization.scale = np.nextafter(tensor.quantization.scale, np.float32(9))


def _activation(graph, model):
    options = next(op.builtinOptions for op in graph.operators if hasattr(op.builtinOptions, "keepNumDims"))
    options.fusedActivationFunction ^= 1


def _zero_point(graph, model):
    quantization = next(t for t in graph.tensors if t.name.startswith(b"5.input_quantizer")).quantization
    quantization.zeroPoint = quantization.zeroPoint + 1


@pytest.mark.parametrize("change", [_weight, _scale, _activation, _zero_point])
def test_changed_parts(change, exported, tmp_path):
    """The file is one that LiteRT runs, and its hash matches."""
    model, path = exported
    made = files.schema().ModelT.InitFromPackedBuf(path.read_bytes())
    change(made.subgraphs[0], made)
    assert not says_ok(model, files.sealed(files.pack(made)), tmp_path / "m.tflite")
