"""Recurrent layers that are converted, saved, exported, verified and diagnosed."""

import copy
import pickle

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits
from prepare_cases import randn
from thoroughness import sampled

torch = pytest.importorskip("torch")
nn = torch.nn
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

STEPS = 2
X86 = recipes.int8(target="onnxruntime-x86")


class Classifier(nn.Module):
    def __init__(self, cls, **options):
        super().__init__()
        torch.manual_seed(0)
        self.rnn = cls(5, 6, **options)
        size = (self.rnn.proj_size or 6) * (2 if self.rnn.bidirectional else 1)
        self.head = nn.Linear(size, 2)

    def forward(self, x):
        y, _ = self.rnn(x)
        return self.head(y[:, -1] if self.rnn.batch_first else y[-1])


class Unrolled(nn.Module):
    """A cell, called by the model's own code."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.head = nn.GRUCell(5, 6), nn.Linear(6, 2)

    def forward(self, x):
        h = None
        for step in range(STEPS):
            h = self.cell(x[:, step], h)
        return self.head(h)


MODELS = {
    "LSTM, both directions": lambda: Classifier(nn.LSTM, batch_first=True, bidirectional=True),
    "LSTM, projection": lambda: Classifier(nn.LSTM, batch_first=True, proj_size=3),
    "GRU, two layers, no bias": lambda: Classifier(nn.GRU, batch_first=True, num_layers=2, bias=False),
    "RNN": lambda: Classifier(nn.RNN, batch_first=True),
    "GRUCell": Unrolled,
}
each_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
CONFIGS = {
    "int8": recipes.int8(),
    "int8 for x86": X86,
    "int8_dynamic": recipes.int8_dynamic(),
    "int4_weight_only": recipes.int4_weight_only(-1),
    "lsq": recipes.lsq(4),
    "one product in float": recipes.int8().skip("*.hh*"),
    "input only": fq.QuantConfig(default=fq.LayerConfig(input=fq.presets.uint8())),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def calibrated(model, config=X86, x=None):
    x = randn(8, STEPS, 5) if x is None else x
    return fq.calibrate(fq.prepare(model, config, x), [x], progress=False).eval()


@torch.no_grad()
@each_model
@each_config
def test_converted_model_computes_the_prepared_one_without_float_weights(make, config):
    x = randn(8, STEPS, 5)
    model = calibrated(make(), config)
    golden = fq.convert(model)
    # A dynamic scale is computed from floats, which rounding changes, so codes may be one step apart.
    tolerance = 1e-2 if config is CONFIGS["int8_dynamic"] else 1e-5
    torch.testing.assert_close(golden(x), model(x), rtol=tolerance, atol=tolerance)
    before, layer = next(model.children()), next(golden.children())
    for name, part in layer.named_children():
        if isinstance(part, fqnn.QuantizedLayer) and part._fakequant.weight_spec is not None:
            assert f"weight_{name}" not in layer._parameters
            assert f"bias_{name}" not in layer._parameters
            assert part.weight_codes.dtype in (torch.int8, torch.uint8)
            assert_same_bits(fqnn.quantized_weight(before.get_submodule(name)), part.weight)
    floats = [t for t in vars(layer).get("_flat_weights", []) if t is not None]
    assert all(any(t is p for p in layer.parameters()) for t in floats)
    for other in (copy.deepcopy(golden), pickle.loads(pickle.dumps(golden)), copy.deepcopy(golden).to("cpu")):
        assert_same_bits(golden(x), other(x))


@torch.no_grad()
@each_model
@each_config
def test_converted_file_restores_every_bit(make, config, tmp_path):
    pytest.importorskip("safetensors")
    x = randn(8, STEPS, 5)
    golden = fq.convert(calibrated(make(), config))
    fq.save_converted(golden, tmp_path / "model.safetensors")
    fresh = make()
    for parameter in fresh.parameters():
        parameter.zero_()
    loaded = fq.load_converted(fresh, tmp_path / "model.safetensors")
    assert_same_bits(golden(x), loaded(x))
    state = golden.state_dict()
    assert state.keys() == loaded.state_dict().keys()
    for name, value in loaded.state_dict().items():
        assert_same_bits(state[name], value, name)
    assert_same_bits(golden(x), pickle.loads(pickle.dumps(loaded))(x))


def test_file_of_another_layer_leaves_the_model_unchanged(tmp_path):
    pytest.importorskip("safetensors")
    fq.save_converted(fq.convert(calibrated(Classifier(nn.LSTM))), tmp_path / "model.safetensors")
    for other, words in (
        (Classifier(nn.GRU), "'rnn' is LSTM in the file but GRU in the model"),
        (Classifier(nn.LSTM, num_layers=2), "rnn"),
        (nn.Linear(5, 2), "'rnn' is LSTM in the file but absent"),
    ):
        types, state = [type(m) for m in other.modules()], copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=words):
            fq.load_converted(other, tmp_path / "model.safetensors")
        assert [type(m) for m in other.modules()] == types
        for name, value in other.state_dict().items():
            assert_same_bits(state[name], value, name)


@pytest.mark.parametrize("name", sampled(MODELS, "LSTM, both directions", "GRUCell"))
def test_exported_file_has_integer_kernels_and_the_same_codes(name, tmp_path):
    pytest.importorskip("onnxruntime")
    model = calibrated(MODELS[name]())
    fq.export_onnx(model, tmp_path / "model.onnx", randn(2, STEPS, 5))
    found = fq.verify(model, tmp_path / "model.onnx", [randn(40, STEPS, 5, seed=2), randn(1, STEPS, 5, seed=3)])
    assert found.ok, found.problem
    layers = [path for path, module in model.named_modules() if isinstance(module, fqnn.QuantizedLayer)]
    assert found.kernels == dict.fromkeys(layers, "QGemm")
    steps = {t.path: t.codes // (41 * 6) for t in found.tensors if "hh_" in t.path}
    assert set(steps.values()) <= {STEPS, STEPS // 2}  # with `proj_size`, the state has 3 of 6 elements


class Stateful(nn.Module):
    """One layer that is called twice. Its first state is an input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn = nn.GRU(6, 6, num_layers=2)

    def forward(self, x, h):
        y, h = self.rnn(x, h)
        return self.rnn(y, h)


def test_steps_of_two_calls_of_a_layer_follow_each_other(tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    batches = [{"x": randn(steps, n, 6), "h": randn(2, n, 6, seed=2)} for steps, n in ((3, 2), (5, 4), (1, 1))]
    model = fq.calibrate(fq.prepare(Stateful(), X86, batches[0]), batches, progress=False).eval()
    axes = {"x": {0: "time", 1: "batch"}, "h": {1: "batch"}}
    fq.export_onnx(model, tmp_path / "model.onnx", batches[0], dynamic_shapes=axes)
    found = fq.verify(model, tmp_path / "model.onnx", batches)
    assert found.ok, found.problem
    codes = {tensor.path: tensor.codes for tensor in found.tensors}
    assert codes["rnn.hh_l1.input_quantizer"] == 2 * 6 * (3 * 2 + 5 * 4 + 1)
    assert all(tensor.runtime_differ == tensor.runtime_ties for tensor in found.tensors)

    file = onnx.load(tmp_path / "model.onnx")
    body = next(a.g for node in file.graph.node if node.op_type == "Scan" for a in node.attribute if a.name == "body")
    codes = next(tensor for tensor in body.initializer if tensor.name == "rnn.hh_l0.weight_codes")
    codes.raw_data = bytes([codes.raw_data[0] ^ 1]) + codes.raw_data[1:]
    onnx.save(file, tmp_path / "model.onnx")
    assert not fq.verify(model, tmp_path / "model.onnx", batches[:1]).ok


# Without ranges of its own: a state of zeros has none, and runtimes take another scale for it, which multiplies zeros.
ANY_LENGTH = {
    "time first": (X86, {"batch_first": False}, ({0: "time", 1: "batch"},)),
    "dynamic batch on the axis of time": (X86, {"batch_first": False}, None),
    "batch first, scales at run time": (
        recipes.int8_dynamic(target="onnxruntime-vnni"),
        {"batch_first": True, "bidirectional": True},
        ({0: "batch", 1: "time"},),
    ),
    "4-bit weights": (recipes.int4_weight_only(-1), {"batch_first": True}, ({0: "batch", 1: "time"},)),
}


@pytest.mark.parametrize("name", sampled(ANY_LENGTH, "time first", "batch first, scales at run time", "4-bit weights"))
def test_a_file_has_one_step_for_sequences_of_any_length(name, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    config, options, axes = ANY_LENGTH[name]
    model, path = calibrated(Classifier(nn.LSTM, **options), config), tmp_path / "model.onnx"
    fq.export_onnx(model, path, randn(4, 4, 5), dynamic_shapes=axes)
    nodes = [node.op_type for node in onnx.load(path).graph.node]
    assert nodes.count("Scan") == 1 + options.get("bidirectional", False)
    assert not {"Sigmoid", "Tanh"} & set(nodes)
    shapes = [(7, 4), (1, 4)] if axes is None else [(7, 3), (1, 2), (2, 1)]
    batches = [randn(*(shape[::-1] if options["batch_first"] else shape), 5, seed=2) for shape in shapes]
    found = fq.verify(model, path, batches, accuracy_level=1)
    assert found.ok, found.problem
    quantizers = [tensor.path for tensor in found.tensors]
    assert ("rnn.hh_l0.input_quantizer" in quantizers) == (name != "4-bit weights")


def test_layers_in_a_loop_have_no_known_kernel_in_openvino(tmp_path):
    pytest.importorskip("openvino")
    model = calibrated(MODELS["LSTM, both directions"](), recipes.int8(target="openvino"))
    axes = ({0: "batch", 1: "time"},)
    fq.export_onnx(model, tmp_path / "model.onnx", randn(2, STEPS, 5), dynamic_shapes=axes)
    found = fq.verify(model, tmp_path / "model.onnx", [randn(8, 7, 5, seed=2)])
    assert found.ok, found.problem
    assert found.kernels["rnn.hh_l0"] == "TensorIterator"
    assert {tensor.path: tensor.codes for tensor in found.tensors}["rnn.hh_l0_reverse.input_quantizer"] == 8 * 7 * 6


def test_a_file_for_executorch_has_the_length_of_the_example(tmp_path):
    pytest.importorskip("executorch")
    model, axes = calibrated(Classifier(nn.RNN), recipes.int8(target="xnnpack")), {0: torch.export.Dim("time", max=9)}
    with pytest.raises(ValueError, match=r"sequences of rnn is dynamic \(axis 0"):
        fq.export_executorch(model, tmp_path / "model.pte", randn(STEPS, STEPS, 5), dynamic_shapes=(axes,))
    assert list(tmp_path.iterdir()) == []


def test_prepared_layer_exports_with_torch_export():
    model, x = calibrated(Classifier(nn.LSTM, batch_first=True)), randn(2, STEPS, 5)
    assert_same_bits(model(x), torch.export.export(model, (x,)).module()(x))


# --- diagnosis --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_converted", [False, True], ids=["prepared", "converted"])
def test_compare_has_a_row_for_every_product_and_restores_the_float_model(is_converted):
    floats, x = Classifier(nn.LSTM, batch_first=True, bidirectional=True), randn(8, STEPS, 5)
    model = calibrated(copy.deepcopy(floats))
    found = fq.compare(floats, fq.convert(model) if is_converted else model, [x], progress=False)
    names = ("ih_l0", "hh_l0", "ih_l0_reverse", "hh_l0_reverse")
    assert [layer.path for layer in found.layers] == [*(f"rnn.{name}" for name in names), "head"]
    assert all(20 < layer.isolated.sqnr < 80 for layer in found.layers)
    assert type(floats.rnn) is nn.LSTM
    assert list(floats.rnn.children()) == []


def test_sensitivity_names_products_that_a_config_can_leave_out():
    floats, x = Classifier(nn.GRU, batch_first=True), randn(8, STEPS, 5)
    y = floats(x)

    def evaluate(model):
        return -float((model(x) - y).square().mean())

    found = fq.sensitivity(floats, recipes.int8(), evaluate, data=[x], progress=False)
    assert sorted(layer.path for layer in found.layers) == ["head", "rnn.hh_l0", "rnn.ih_l0"]
    model = fq.prepare(copy.deepcopy(floats), found.suggest(keep=2), x)
    assert [row.path for row in fq.summary(model).layers] == [found.layers[-1].path]


def test_health_measures_the_hidden_states_of_every_step():
    model, x = calibrated(Classifier(nn.LSTM, batch_first=True)), randn(8, STEPS, 5)
    found = fq.health(model, [x]).to_dict()
    assert 0 < found["rnn.hh_l0.input_quantizer"]["levels_used"] <= 1
    assert found["rnn.hh_l0.weight_quantizer"]["levels_used"] > 0


def test_saturation_in_an_earlier_step_is_named_as_the_reason(tmp_path):
    """On a CPU with VNNI nothing saturates, and the codes are equal."""
    pytest.importorskip("onnxruntime")
    model = Classifier(nn.RNN, batch_first=True)
    with torch.no_grad():
        model.rnn.weight_ih_l0.copy_(torch.linspace(0.3, 0.4, 30).reshape(6, 5))
    x = randn(20, STEPS, 5)
    calibrated(model, recipes.int8(), x)
    fq.export_onnx(model, tmp_path / "model.onnx", x[:2])
    found = fq.verify(model, tmp_path / "model.onnx", [x])
    assert not any("not explained" in t.why for t in found.tensors)
    assert found.ok or found.saturates
