"""`verify` accepts no .tflite file that was changed, whether or not its hash was made to match."""

import dataclasses
import functools
import platform

import numpy as np
import pytest

import fakequant as fq
from fakequant import QuantSpec, recipes
from thoroughness import ALL

pytest.importorskip("torch")
pytest.importorskip("ai_edge_litert.interpreter")
files = pytest.importorskip("fakequant._export.litert.file")
seals = pytest.importorskip("fakequant._export.seal")
digit_models = pytest.importorskip("digit_models")

pytestmark = [
    pytest.mark.usefixtures("torch_on_one_thread"),
    pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="the target is for x86"),
]
DATA = [digit_models.digits(16, 2)]
# How many bytes are changed anywhere in a file, and in its constants and scales.
ANYWHERE, IN_CONSTANTS = (30, 40) if ALL else (2, 4)


def weights_in_4_bits(target):
    config = recipes.int8_dynamic(target=target)
    return dataclasses.replace(config, default=dataclasses.replace(config.default, weight=QuantSpec(bits=4, axis=0)))


MODELS = {
    "integers": ("mlp", recipes.int8),
    "convolutions": ("residual", recipes.int8),
    "dynamic scales": ("mlp", recipes.int8_dynamic),
    "4 bits": ("mlp", weights_in_4_bits),
    "float operators": ("encoder", recipes.w4a8),
    "16 bits": ("depthwise", functools.partial(recipes.int8, activation_bits=16)),
}


@pytest.fixture(scope="module")
def files_of(tmp_path_factory):
    """A function that returns a model and its file, exported once."""
    made = {}

    def get(name):
        if name not in made:
            build, recipe = MODELS[name]
            model = fq.prepare(digit_models.float_model(build), recipe(target="litert"), DATA[0])
            model = fq.calibrate(model, [digit_models.digits(32, 1)], progress=False).eval()
            path = tmp_path_factory.mktemp("exported") / "model.tflite"
            fq.export_litert(model, path, DATA[0])
            made[name] = model, path
        return made[name]

    return get


@pytest.fixture
def exported(files_of):
    return files_of("integers")


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
        (seals.sealed(whole.replace(b"fakequant.parameters", b"fakequant.parameter_")), "is damaged"),
        (seals.sealed(whole.replace(b'"int8"', b'"int9"')), "is not the file that fakequant.export_litert writes"),
        (seals.sealed(whole.replace(b'"litert"', b'"litard"')), "written for the target 'litard'"),
    ):
        bad.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            fq.verify(model, bad, DATA, runtime="litert")


def test_files_have_layers_of_all_kinds(files_of):
    kinds = {name: files.LitertFile(files_of(name)[1]) for name in MODELS}
    operators = {n: {code.builtinCode for code in file.model.operatorCodes} for n, file in kinds.items()}
    types = {n: {tensor.type for tensor in file.graph.tensors} for n, file in kinds.items()}
    schema = files.schema()
    assert schema.BuiltinOperator.CONV_2D in operators["convolutions"]
    assert schema.BuiltinOperator.SOFTMAX in operators["float operators"]
    assert schema.BuiltinOperator.QUANTIZE not in operators["dynamic scales"]
    assert schema.TensorType.INT4 in types["4 bits"]
    assert schema.TensorType.INT16 in types["16 bits"]


def places(data, rng):
    """Returns the numbers of bytes to change: some anywhere, and some of constants and of scales."""
    seal = seals.SEAL.search(data)
    model = files.schema().ModelT.InitFromPackedBuf(data)
    found = rng.choice(len(data), ANYWHERE, replace=False).tolist()
    stored = [model.buffers[tensor.buffer].data for tensor in model.subgraphs[0].tensors]
    stored += [tensor.quantization and tensor.quantization.scale for tensor in model.subgraphs[0].tensors]
    parts = [part.tobytes() for part in stored if part is not None and len(part)]
    for part in rng.permutation(np.array(parts, object))[:IN_CONSTANTS]:
        found.append(data.index(part) + int(rng.integers(len(part))))
    return [place for place in dict.fromkeys(found) if not seal.start() <= place < seal.end()]


@pytest.mark.parametrize("name", MODELS)
def test_changed_bytes(name, files_of, tmp_path, record_property):
    """Every hash is made to match again, but for every fourth."""
    model, path = files_of(name)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    assert says_ok(model, seals.sealed(whole), tmp_path / "m.tflite")
    tried, ok = places(whole, rng), []
    for number, place in enumerate(tried):
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        data = seals.sealed(bytes(changed)) if number % 4 else bytes(changed)
        if says_ok(model, data, tmp_path / "m.tflite"):
            ok.append((number, place))
    record_property("tampers", len(tried))
    assert len(tried) >= (ANYWHERE + IN_CONSTANTS) // 2
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
    assert not says_ok(model, seals.sealed(files.pack(made)), tmp_path / "m.tflite")
