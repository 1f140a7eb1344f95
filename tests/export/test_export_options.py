"""Names, dynamic shapes and autocast in exports, and regressions of models that failed to load."""

import functools
import types

import pytest

import fakequant as fq
from thoroughness import only_in_test_all

torch = pytest.importorskip("torch")
nn = torch.nn
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
recipes = pytest.importorskip("fakequant.recipes")

X86 = "onnxruntime-x86"


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x, shift):
        y = torch.relu(self.fc(x)) + shift
        return {"scores": self.head(y), "hidden": y}


def ready(model, batch, target=X86):
    torch.manual_seed(0)
    return fq.calibrate(fq.prepare(model, recipes.int8(target=target), batch), [batch], progress=False).eval()


def test_exported_inputs_and_outputs_have_the_given_names(tmp_path):
    batch = {"shift": randn(4, 8), "x": randn(4, 8, seed=1)}
    model = ready(Scores(), batch)
    fq.export_onnx(
        model, tmp_path / "m.onnx", batch, input_names=["tokens", "offset"], output_names=["logits", "state"]
    )
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert {value.name for value in session.get_inputs()} == {"tokens", "offset"}
    assert [value.name for value in session.get_outputs()] == ["logits", "state"]
    assert fq.verify(model, tmp_path / "m.onnx", [batch]).ok
    assert fq.verify(model, tmp_path / "m.onnx", [(batch["x"], batch["shift"])]).ok


def test_report_says_what_was_written(tmp_path):
    batch = {"shift": randn(4, 8), "x": randn(4, 8, seed=1)}
    torch.manual_seed(0)
    model = fq.prepare(Scores(), recipes.int8(target=X86).skip("head"), batch)
    model = fq.calibrate(model, [batch], progress=False)
    report = fq.export_onnx(model, tmp_path / "m.onnx", batch, opset=19)
    assert (report.path, report.target, report.opset) == (str(tmp_path / "m.onnx"), X86, 19)
    assert report.bytes == (tmp_path / "m.onnx").stat().st_size
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    for values, named in ((session.get_inputs(), report.inputs), (session.get_outputs(), report.outputs)):
        assert [(value.name, tuple(value.shape)) for value in values] == list(named.items())
    assert report.integers == ("fc",)
    assert report.floats == {"head": "it is not quantized"}
    assert str(report).splitlines()[1:4] == [
        "inputs: x of shape batch x 8, shift of shape batch x 8",
        "outputs: scores of shape batch x 3, hidden of shape batch x 8",
        "layers in integers: 1 of 2",
    ]
    assert str(report).endswith("head     | it is not quantized")


REASONS = {
    "its input is not quantized": recipes.int4_weight_only(None),
    "its weight has groups, for which there is no integer kernel": recipes.int4_weight_only(4),
    "its weight is e4m3fn; sums of products of floats are floats": recipes.fp8(),
}


@pytest.mark.parametrize("reason", REASONS)
def test_report_and_verify_have_the_same_reasons_for_float_layers(reason, tmp_path):
    torch.manual_seed(0)
    model = fq.calibrate(
        fq.prepare(nn.Sequential(nn.Linear(8, 4)), REASONS[reason], randn(4, 8)), [randn(4, 8)], progress=False
    )
    report = fq.export_onnx(model, tmp_path / "m.onnx", randn(4, 8))
    assert report.floats == {"0": reason}
    assert fq.verify(model, tmp_path / "m.onnx", [randn(4, 8)]).floats == report.floats


class Returns(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.fc, self.result = nn.Linear(8, 4), result

    def forward(self, x, scale=1.0, flag=None):
        return self.result(x, self.fc(x) * scale)


# What a model returns, and the names of the file's outputs.
RESULTS = {
    "tensor": (lambda x, y: y, ["output"]),
    "tuple": (lambda x, y: (y, [y + 1, y + 2]), ["output_0", "output_1.0", "output_1.1"]),
    "dict": (lambda x, y: {"logits": y, "states": {"first": y + 1}}, ["logits", "states.first"]),
    "the name of an input": (lambda x, y: {"x": y, "fc.bias": y + 1}, ["x_1", "fc.bias"]),
    "constants": (
        lambda x, y: {"rows": x.shape[0], "logits": y, "none": None, "text": "a", "loss": 0.5, "kind": y.dtype},
        ["logits"],
    ),
    "the same twice": (lambda x, y: (y, y, x), ["output_0", "output_1", "output_2"]),
}


@pytest.mark.parametrize(("result", "names"), RESULTS.values(), ids=RESULTS)
def test_outputs_are_named_after_the_results_that_are_tensors(result, names, tmp_path):
    batch = {"x": randn(4, 8), "scale": 2.0, "flag": None}
    model = ready(Returns(result), batch)
    fq.export_onnx(model, tmp_path / "m.onnx", batch)
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_outputs()] == names
    assert len(session.get_inputs()) == 1
    assert fq.verify(model, tmp_path / "m.onnx", [batch]).ok  # the constants of the batch are those of the file
    assert not fq.verify(model, tmp_path / "m.onnx", [{**batch, "scale": 3.0}]).ok


def test_a_result_without_tensors_is_refused(tmp_path):
    model = ready(Returns(lambda x, y: 0.5), randn(4, 8))
    with pytest.raises(ValueError, match=r"returns no tensor, only 0\.5"):
        fq.export_onnx(model, tmp_path / "m.onnx", randn(4, 8))
    model = ready(Returns(lambda x, y: (y, object())), randn(4, 8))
    with pytest.raises(ValueError, match="returns a object, in which tensors cannot be found"):
        fq.export_onnx(model, tmp_path / "m.onnx", randn(4, 8))


@pytest.mark.parametrize(
    "given", [{}, pytest.param({"use_cache": False}, marks=only_in_test_all)], ids=["as it is", "without cache"]
)
def test_a_language_model_is_exported_without_its_cache(given, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=20
    )
    batch = {"input_ids": torch.arange(12).view(2, 6), **given}
    model = ready(transformers.LlamaForCausalLM(config).eval(), batch)
    fq.export_onnx(model, tmp_path / "m.onnx", batch)
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_outputs()] == ["logits"]
    assert fq.verify(model, tmp_path / "m.onnx", [batch]).ok


@pytest.mark.parametrize("names", [["a"], ["a", "a"], "ab", ["a", "b", "c"]], ids=str)
def test_wrong_number_of_input_names_is_refused(names, tmp_path):
    batch = (randn(4, 8), randn(4, 8))
    model = ready(Scores(), batch)
    with pytest.raises(ValueError, match="`input_names` must be 2 different names, for x, shift"):
        fq.export_onnx(model, tmp_path / "m.onnx", batch, input_names=names)
    assert not list(tmp_path.iterdir())


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.fc = nn.Embedding(20, 8), nn.Linear(8, 4)

    def forward(self, ids):
        return self.fc(self.table(ids)).mean(1)


def test_sequence_length_can_be_dynamic(tmp_path):
    ids = torch.randint(0, 20, (2, 5), generator=torch.Generator().manual_seed(0))
    model = ready(Tokens(), ids)
    shapes = ({0: "batch", 1: "length"},)
    fq.export_onnx(model, tmp_path / "m.onnx", ids, dynamic_shapes=shapes)
    other = torch.randint(0, 20, (3, 9), generator=torch.Generator().manual_seed(1))
    assert fq.verify(model, tmp_path / "m.onnx", [ids, other]).ok


class FirstStep(nn.Module):
    """Layers on the first element of a sequence. For one sequence, torch's exporter takes its length for a constant."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, y):
        return self.second(torch.relu(self.first(x[:, 0]))) + y


SHAPES = {
    "batch": ((), None),
    "by position": ((), ({0: "n"}, {0: "n"})),
    "by name": (("x", "y"), {"x": {0: "n"}, "y": {0: "n"}}),
}


@pytest.mark.parametrize(("names", "shapes"), SHAPES.values(), ids=SHAPES)
def test_an_example_with_one_row_exports_a_file_for_batches(names, shapes, tmp_path):
    one, many = ((randn(n, 3, 4), randn(n, 4)) for n in (1, 3))
    one, many = (dict(zip(names, x, strict=True)) if names else x for x in (one, many))
    model = fq.prepare(FirstStep(), recipes.int4_weight_only(None)).eval()
    fq.export_onnx(model, tmp_path / "m.onnx", one, dynamic_shapes=shapes)
    assert fq.verify(model, tmp_path / "m.onnx", [one, many], accuracy_level=1).ok


def test_an_input_of_one_row_that_is_no_batch_keeps_its_length(tmp_path):
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 8)

        def forward(self, x, shift):
            return self.layer(x) + shift.reshape(8)

    inputs = randn(1, 4), randn(1, 8)
    model = ready(Shifted(), inputs)
    fq.export_onnx(model, tmp_path / "m.onnx", inputs)
    assert fq.verify(model, tmp_path / "m.onnx", [inputs]).ok


def test_export_ignores_autocast(tmp_path):
    batch = randn(16, 8)
    model = ready(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), batch)
    fq.export_onnx(model, tmp_path / "plain.onnx", batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fq.export_onnx(model, tmp_path / "m.onnx", batch)
    assert (tmp_path / "m.onnx").read_bytes() == (tmp_path / "plain.onnx").read_bytes()


def test_forward_that_enables_autocast_is_refused_with_the_reason(tmp_path):
    batch = randn(16, 8)
    model = ready(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), batch)

    @functools.wraps(type(model).forward)
    def wrapped(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return type(self).forward(self, x)

    model.forward = types.MethodType(wrapped, model)
    with pytest.raises(ValueError, match=r"switches torch\.autocast on(.|\n)*unwrap_model"):
        fq.export_onnx(model, tmp_path / "m.onnx", batch)
    assert not list(tmp_path.iterdir())


def test_tensorrt_file_with_a_pool_between_convolutions_loads_and_verifies(tmp_path):
    x = randn(4, 4, 12, 12)
    model = ready(nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3)), x, "tensorrt")
    fq.export_onnx(model, tmp_path / "m.onnx", x)
    assert fq.verify(model, tmp_path / "m.onnx", [x]).ok


def has_vnni():
    with open("/proc/cpuinfo") as file:
        return "vnni" in file.read()


@pytest.mark.skipif(has_vnni(), reason="this CPU does not saturate")
def test_verify_explains_saturation_of_a_conv1d(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(32, 16, 5, padding=2, stride=2), nn.ReLU(), nn.Conv1d(16, 8, 3))
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.abs_()
    x = torch.rand(4, 32, 40, generator=torch.Generator().manual_seed(0))
    model = ready(model, x, "onnxruntime-vnni")
    fq.export_onnx(model, tmp_path / "m.onnx", x)
    found = fq.verify(model, tmp_path / "m.onnx", [x])
    assert found.saturates
    assert "not explained" not in str(found)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler imports deprecated modules
def test_prepare_refuses_a_compiled_model():
    model = torch.compile(nn.Sequential(nn.Linear(4, 2)))
    with pytest.raises(ValueError, match=r"compiled already(.|\n)*prepare\(model, config\) first"):
        fq.prepare(model, recipes.int8(), torch.ones(1, 4))


def test_summary_says_folds_only_for_batch_norms_that_fold():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.late, self.layer = nn.BatchNorm2d(4), nn.LayerNorm(6)

        def forward(self, x):
            return self.layer(self.late(torch.relu(self.norm(self.conv(x)))))

    found = fq.summary(fq.prepare(Net(), recipes.int8(), torch.ones(1, 3, 8, 8))).floats
    assert found["norm"] == "batch norm; it folds into conv when the model is converted"
    assert found["late"] == "batch norm"
    assert found["layer"] == "normalization layer"


@pytest.mark.parametrize("target", [X86, "openvino"])
def test_large_tensors_may_be_in_a_second_file(target, tmp_path, monkeypatch):
    pytest.importorskip("openvino" if target == "openvino" else "onnxruntime")
    x = randn(4, 48)
    model = ready(nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 48)), x, target)
    one = fq.export_onnx(model, tmp_path / "one.onnx", x)
    assert one.external_data is None
    monkeypatch.setattr("fakequant._export.onnx.export_onnx._LARGEST_FILE", 1000)
    path = tmp_path / "two.onnx"
    two = fq.export_onnx(model, path, x)
    data = tmp_path / "two.onnx.data"
    assert two.external_data == str(data)
    assert two.bytes == path.stat().st_size + data.stat().st_size
    assert str(two).startswith("two.onnx and two.onnx.data: ")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.onnx", "two.onnx", "two.onnx.data"]
    notes = [{p.key: p.value for p in onnx.load(tmp_path / name).metadata_props} for name in ("one.onnx", "two.onnx")]
    assert notes[0] == notes[1]  # the digest of the graph among them
    assert path.stat().st_size < one.bytes - 2 * 48 * 64 + 2000  # without the codes
    assert fq.verify(model, path, [x]).ok
    codes = bytearray(data.read_bytes())
    codes[10] ^= 1
    data.write_bytes(codes)
    with pytest.raises(ValueError, match="_codes is different in the file"):
        fq.verify(model, path, [x])
    data.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"has tensors that cannot be read(.|\n)*next to the first one, and no link"):
        fq.verify(model, path, [x])


def test_a_failed_export_leaves_both_files_as_they_were(tmp_path, monkeypatch):
    x = randn(4, 48)
    model = ready(nn.Sequential(nn.Linear(48, 64)), x)
    fq.export_onnx(model, tmp_path / "model.onnx", x, external_data=True)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with torch.no_grad():
        model[0].weight.neg_()

    def fails(*args):
        raise ValueError("refused")

    monkeypatch.setattr("fakequant._export.onnx.trial_run.require_runs", fails)
    with pytest.raises(ValueError, match="refused"):
        fq.export_onnx(model, tmp_path / "model.onnx", x, external_data=True)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


def test_one_file_replaces_two_and_leaves_files_of_others(tmp_path):
    x = randn(4, 48)
    model = ready(nn.Sequential(nn.Linear(48, 64)), x)
    data = tmp_path / "model.onnx.data"
    data.write_text("of somebody else")
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    assert data.read_text() == "of somebody else"
    fq.export_onnx(model, tmp_path / "model.onnx", x, external_data=True)
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    assert not data.exists()


def test_tied_weights_are_in_the_second_file_once(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(64, 48), nn.Linear(48, 64, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x):
            return self.head(self.table(x))

    x = torch.arange(8)[None]
    model = fq.calibrate(fq.prepare(Tied().eval(), recipes.int8(), x), [x], progress=False)
    fq.export_onnx(model, tmp_path / "model.onnx", x, external_data=True)
    assert (tmp_path / "model.onnx.data").stat().st_size == 64 * 48
    assert fq.verify(model, tmp_path / "model.onnx", x).ok


def test_exporting_computes_no_weight_and_keeps_no_second_copy_of_codes(tmp_path, monkeypatch):
    """Either would be as large as the model or a part of it. Weights and biases of one element stay constants."""
    from fakequant._export.onnx import export_onnx as module, lowering, operators

    x = randn(4, 48)
    model = ready(nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 48), nn.Linear(48, 1), nn.Linear(1, 1)), x)
    spread, register, make_exportable = operators._spread, lowering.register, module.make_exportable
    computed, written, kept = [], {}, {}

    def watched_spread(value, shape):
        computed.append(shape.numel())
        return spread(value, shape)

    def watched_register(graph, name, array, dtype):
        written[name] = array.ctypes.data
        return register(graph, name, array, dtype)

    def watched_make(golden):
        calls = make_exportable(golden)
        for path, layer in golden.named_modules():
            if path.isdigit():
                assert layer.weight_codes is None
                kept[path] = (layer._fakequant, layer._fakequant.stored.codes.data_ptr())
        return calls

    monkeypatch.setattr(operators, "_spread", watched_spread)
    monkeypatch.setattr(lowering, "register", watched_register)
    monkeypatch.setattr(module, "make_exportable", watched_make)
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    assert max(computed) == 1
    assert len(kept) == 4
    for path, (record, address) in kept.items():
        assert record.stored is None
        assert address == written[f"{path}.weight_codes"]
    assert fq.verify(model, tmp_path / "model.onnx", [x]).ok


@pytest.mark.parametrize("name", ["INT4", "UINT4"])
@pytest.mark.parametrize("shape", [(2, 4), (3, 5), (1, 1)])
def test_codes_of_4_bits_take_half_a_byte_before_they_are_written(name, shape):
    from fakequant._export.onnx.lowering import ir, register

    codes = torch.arange(torch.Size(shape).numel()).reshape(shape).numpy() - (8 if name == "INT4" else 0)
    dtype = getattr(ir.DataType, name)
    made = register(ir.Graph([], [], nodes=[], name="g"), "codes", codes, dtype).const_value
    assert made.numpy_packed().nbytes == (codes.size + 1) // 2
    assert made.tobytes() == ir.tensor(codes.astype(dtype.numpy()), dtype=dtype).tobytes()
    assert (made.numpy().astype(int) == codes).all()
