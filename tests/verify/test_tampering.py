"""`verify` accepts a file with one change only if every code and result has the same bits."""

import pytest

import fakequant as fq
from thoroughness import ALL, sampled

torch = pytest.importorskip("torch")
nn = torch.nn
np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
recipes = pytest.importorskip("fakequant.recipes")
notes = pytest.importorskip("fakequant._export.notes")
opening = pytest.importorskip("fakequant._verify.file_of_model")
tampers = pytest.importorskip("tampers")
trials = pytest.importorskip("tamper_trials")

# The models are small and run hundreds of times.
pytestmark = pytest.mark.usefixtures("torch_on_one_thread")


class Encoder(nn.Module):
    """Attention, layer norms and a GELU, in code that torch.fx can trace."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down, self.act = nn.Linear(16, 32), nn.Linear(32, 16), nn.GELU()
        self.first, self.second = nn.LayerNorm(16), nn.LayerNorm(16)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = self.first(x + self.out(torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v))
        return self.second(x + self.down(self.act(self.up(x))))


class MaskedLogits(nn.Module):
    """Fills part of its output with a large number, which must not hide errors elsewhere."""

    def __init__(self, fill):
        super().__init__()
        self.fc, self.head, self.fill = nn.Linear(12, 16), nn.Linear(16, 6), fill
        self.register_buffer("mask", torch.tensor([False, True, False, False, True, False]))

    def forward(self, x):
        return self.head(torch.relu(self.fc(x))).masked_fill(self.mask, self.fill)


class SeveralOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 8), nn.Linear(8, 5)

    def forward(self, x):
        y = torch.relu(self.a(x))
        z = self.b(y)
        return {"logits": z, "parts": (y, torch.tanh(z)), "class": z.argmax(1), "sure": z > 0}


X86 = "onnxruntime-x86"
# The number of changes of one kind that are tried in one file.
MOST = 40 if ALL else 6
MODELS = {
    "MLP": (trials.mlp, trials.rows(16, 12), recipes.int8),
    "MLP, 4 bits": (trials.mlp, trials.rows(16, 12), recipes.w4a8),
    "CNN": (trials.ResidualCNN, trials.image(8), recipes.int8),
    "encoder": (Encoder, trials.rows(8, 5, 16), recipes.int8),
    "-inf": (lambda: MaskedLogits(float("-inf")), trials.rows(16, 12), recipes.int8),
    "-1e9": (lambda: MaskedLogits(-1e9), trials.rows(16, 12), recipes.int8),
    "several": (SeveralOutputs, trials.rows(16, 12), recipes.int8),
    "dynamic": (
        lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)),
        trials.rows(16, 12),
        recipes.int8_dynamic,
    ),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function that returns a model, its exported file and data, exported once."""
    made = {}

    def get(name):
        if name not in made:
            build, x, recipe = MODELS[name]
            model = trials.make(build, x, recipe, X86)
            path = tmp_path_factory.mktemp("exported") / "model.onnx"
            fq.export_onnx(model, path, x[:2])
            assert fq.verify(model, path, [x]).ok, name
            made[name] = model, onnx.load(path), x
        return made[name]

    return get


def run(file, x):
    """Returns all results and codes of a file as bytes, or None if ONNX Runtime refuses it."""
    watched = onnx.ModelProto()
    watched.CopyFrom(file)
    known = {output.name for output in watched.graph.output}
    for node in file.graph.node:
        if trials.is_quantizer(node) and node.output[0] not in known:
            watched.graph.output.append(onnx.helper.make_empty_tensor_value_info(node.output[0]))
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        session = ort.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
        values = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    except Exception:  # ONNX Runtime's exceptions have no common base class
        return None
    return [(value.shape, value.tobytes()) for value in values]


@pytest.mark.parametrize("name", sampled(MODELS, "MLP, 4 bits", "CNN", "encoder", "-inf", "several", "dynamic"))
def test_verify_refuses_files_with_changed_tensors(name, exported, tmp_path, record_property):
    model, file, x = exported(name)
    rng = np.random.default_rng(0)
    changed = [(what, made) for what, made, _, _ in tampers.of_tensors(file, rng)]
    number, missed, accepted = trials.misses(run, model, file, x, tmp_path / "m.onnx", changed, MOST)
    record_property("tampers", number)
    assert missed == []
    assert number > MOST / 2
    assert accepted < number / 4


@pytest.mark.parametrize("name", ["MLP, 4 bits", "CNN"])
def test_verify_refuses_changed_tensors_with_a_matching_fingerprint(name, exported, tmp_path, record_property):
    """The fingerprint is right, so the tensors themselves must be compared."""
    model, file, x = exported(name)
    rng = np.random.default_rng(1)
    changed = [
        (what, trials.refreshed(made))
        for what, made, tensor, _ in tampers.of_tensors(file, rng)
        if tensor.endswith(trials.OWNED)
    ]
    number, missed, _ = trials.misses(run, model, file, x, tmp_path / "m.onnx", changed, MOST)
    record_property("tampers", number)
    assert missed == []
    assert number > MOST / 2


@pytest.mark.parametrize("name", sampled(MODELS, "MLP, 4 bits", "CNN", "encoder", "-inf", "several", "dynamic"))
def test_verify_refuses_files_with_changed_operations(name, exported, tmp_path, record_property):
    model, file, x = exported(name)
    number, missed, _ = trials.misses(run, model, file, x, tmp_path / "m.onnx", list(tampers.of_nodes(file)), MOST)
    record_property("tampers", number)
    assert missed == []
    assert number > 3


@pytest.mark.parametrize("name", ["CNN", "encoder", "-1e9", "several"])
def test_verify_refuses_changed_operations_with_a_matching_fingerprint(name, exported, tmp_path, record_property):
    """Changes of a factor by one ulp are left out, because they look like rounding."""
    model, file, x = exported(name)
    changed = [(what, trials.refreshed(made)) for what, made in tampers.of_nodes(file) if "a little more" not in what]
    number, missed, _ = trials.misses(run, model, file, x, tmp_path / "m.onnx", changed, MOST)
    record_property("tampers", number)
    assert missed == []


def of_golden(golden):
    """Yields path, module, name and new value of one tensor at a time, changed by the smallest step."""
    for path, module in golden.named_modules():
        for name, buffer in list(module._buffers.items()):
            if buffer is None or name not in ("weight_scale", "bias_codes", "weight_codes", "scale", "zero_point"):
                continue
            changed = buffer.clone()
            flat, place = changed.view(-1), buffer.numel() // 2
            up = torch.nextafter(flat[place], torch.tensor(torch.inf)) if flat.is_floating_point() else flat[place] + 1
            flat[place] = up
            yield f"{path}.{name}[{place}]", module, name, changed


@pytest.mark.parametrize("name", ["MLP, 4 bits", "CNN", "encoder", "several"])
def test_verify_refuses_changed_golden_models(name, exported, tmp_path, monkeypatch, record_property):
    """Tries each change once without comparing the file's parameters and once without checking the conversion."""
    model, file, x = exported(name)
    original, number, missed = opening.converted_view, 0, []
    changes = [what for what, *_ in of_golden(original(model, target=X86))]
    for what in changes if ALL else changes[:: max(1, len(changes) // MOST)]:

        def converted(*args, wanted=what, **options):
            golden = original(*args, **options)
            _, module, tensor, changed = next(one for one in of_golden(golden) if one[0] == wanted)
            module._buffers[tensor] = changed
            return golden

        monkeypatch.setattr(opening, "converted_view", converted)
        without_parameters = onnx.ModelProto()
        without_parameters.CopyFrom(file)
        kept = [p for p in file.metadata_props if p.key != notes.PARAMETERS]
        del without_parameters.metadata_props[:]
        without_parameters.metadata_props.extend(kept)
        monkeypatch.setattr(opening, "require_same_parameters", lambda *args: None)
        missed += [what] if trials.says_ok(model, without_parameters, x, tmp_path / "m.onnx") else []
        monkeypatch.undo()
        monkeypatch.setattr(opening, "converted_view", converted)
        monkeypatch.setattr(opening, "require_converted", lambda *args: None)
        missed += [what] if trials.says_ok(model, file, x, tmp_path / "m.onnx") else []
        monkeypatch.undo()
        number += 2
    record_property("tampers", number)
    assert missed == []
    assert number > 10
