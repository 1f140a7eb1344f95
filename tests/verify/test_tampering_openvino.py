"""`verify` accepts a file with one change in OpenVINO only if every code and result has the same bits."""

import platform

import pytest

import fakequant as fq
from thoroughness import ALL, sampled

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
recipes = pytest.importorskip("fakequant.recipes")
runtime = pytest.importorskip("fakequant._runtimes.openvino.running")
tampers = pytest.importorskip("tampers")
trials = pytest.importorskip("tamper_trials")

try:
    CORE = runtime.import_openvino().Core()
except ImportError:
    pytest.skip("OpenVINO is not installed", allow_module_level=True)
pytestmark = [
    pytest.mark.usefixtures("torch_on_one_thread"),
    pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="the target is for x86"),
]

SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
# The number of changes of one kind that are tried in one file. A trial compiles two models.
MOST = 20 if ALL else 5
MODELS = {
    "MLP, 4 bits": (trials.mlp, trials.rows(16, 12), recipes.w4a8),
    "CNN": (trials.ResidualCNN, trials.image(4), recipes.int8),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function that returns a model, its exported file and data, exported once."""
    made = {}

    def get(name):
        if name not in made:
            build, x, recipe = MODELS[name]
            model = trials.make(build, x, recipe, "openvino")
            path = tmp_path_factory.mktemp("exported") / "model.onnx"
            fq.export_onnx(model, path, x[:2])
            found = fq.verify(model, path, [x])
            assert found.ok, found.verdict()
            assert found.runtime == "openvino"
            made[name] = model, onnx.load(path), x
        return made[name]

    return get


def run(file, x):
    """Returns the results of a file, and the codes that can be read, as bytes. None if OpenVINO refuses the file."""
    watched = onnx.ModelProto()
    watched.CopyFrom(file)
    for node in file.graph.node:
        if trials.is_quantizer(node) and not is_added(file, node.output[0]):
            watched.graph.output.append(onnx.helper.make_empty_tensor_value_info(node.output[0]))
    found = []
    try:
        for model in (file, watched):
            compiled = CORE.compile_model(CORE.read_model(model.SerializeToString(), b""), "CPU", SETTINGS)
            found += [np.array(value) for value in compiled([x.numpy()]).values()]
    except Exception:  # OpenVINO's exceptions have no common base class
        return None
    return [(value.shape, value.tobytes()) for value in found]


def is_added(file, codes):
    """Returns True if an addition follows. OpenVINO would compute it differently if the codes were outputs."""
    nodes = file.graph.node
    floats = {node.output[0] for node in nodes if codes in node.input[:1] and node.op_type == "DequantizeLinear"}
    return any(node.op_type in ("Add", "Sub") and floats & set(node.input) for node in nodes)


def operations(file):
    """Returns changed operations. OpenVINO ends the process if a Gemm has `transA`."""
    return [(what, made) for what, made in tampers.of_nodes(file) if not what.startswith("transA of Gemm")]


def missed(exported, name, path, changed, most):
    """Returns the changes that `verify` missed, the number of files tried, and the number of files it accepted."""
    model, file, x = exported(name)
    number, found, accepted = trials.misses(run, model, file, x, path, changed, most, counts_refused=True)
    return found, number, accepted


@pytest.mark.parametrize("name", sampled(MODELS, "CNN"))
def test_verify_refuses_files_with_changed_tensors(name, exported, tmp_path, record_property):
    changed = [(what, made) for what, made, _, _ in tampers.of_tensors(exported(name)[1], np.random.default_rng(0))]
    found, number, accepted = missed(exported, name, tmp_path / "m.onnx", changed, MOST)
    record_property("tampers", number)
    assert found == []
    assert number >= MOST
    assert accepted < number / 4


@pytest.mark.parametrize("name", sampled(MODELS, "MLP, 4 bits"))
def test_verify_refuses_changed_tensors_with_a_matching_fingerprint(name, exported, tmp_path, record_property):
    """The fingerprint is right, so the tensors themselves must be compared."""
    changed = [
        (what, trials.refreshed(made))
        for what, made, tensor, _ in tampers.of_tensors(exported(name)[1], np.random.default_rng(1))
        if tensor.endswith(trials.OWNED)
    ]
    found, number, accepted = missed(exported, name, tmp_path / "m.onnx", changed, MOST)
    record_property("tampers", number)
    assert found == []
    assert number >= MOST
    assert accepted < number / 4


@pytest.mark.parametrize("name", sampled(MODELS, "CNN"))
def test_verify_refuses_files_with_changed_operations(name, exported, tmp_path, record_property):
    changed = operations(exported(name)[1])
    found, number, _ = missed(exported, name, tmp_path / "m.onnx", changed, MOST // 2)
    record_property("tampers", number)
    assert found == []
    assert number >= MOST // 2


@pytest.mark.parametrize("name", sampled(MODELS, "MLP, 4 bits"))
def test_verify_refuses_changed_operations_with_a_matching_fingerprint(name, exported, tmp_path, record_property):
    """Changes of a factor by one ulp are left out, because they look like rounding."""
    changed = operations(exported(name)[1])
    changed = [(what, trials.refreshed(made)) for what, made in changed if "a little more" not in what]
    found, number, accepted = missed(exported, name, tmp_path / "m.onnx", changed, len(changed) if ALL else MOST)
    record_property("tampers", number)
    assert found == []
    assert number >= MOST // 2
    assert 0 < accepted < number / 2  # changes without an effect are accepted
