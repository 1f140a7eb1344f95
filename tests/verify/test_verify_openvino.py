"""`verify` runs ONNX files in OpenVINO: its codes are those of the golden model, at ties too."""

import platform

import pytest

import fakequant as fq
from fakequant import presets
from thoroughness import ALL

torch = pytest.importorskip("torch")
nn = torch.nn
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
recipes = pytest.importorskip("fakequant.recipes")
opening = pytest.importorskip("fakequant._runtimes.session")
module = pytest.importorskip("fakequant._runtimes.openvino.session")
digit_models = pytest.importorskip("digit_models")

try:
    module.import_openvino()
except ImportError:
    pytest.skip("OpenVINO is not installed", allow_module_level=True)
pytestmark = [
    pytest.mark.usefixtures("torch_on_one_thread"),
    pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="the target is for x86"),
]

DATA = [digit_models.digits(48, 2), digit_models.digits(5, 3)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A function that returns a model and its file, exported once."""
    made = {}

    def get(name, recipe, target="openvino"):
        if (name, recipe, target) not in made:
            model = digit_models.calibrated(name, recipe, target)
            path = tmp_path_factory.mktemp("exported") / "model.onnx"
            fq.export_onnx(model, path, DATA[0][:2])
            made[name, recipe, target] = model, path
        return made[name, recipe, target]

    return get


# --- the same codes -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "recipe"), digit_models.CASES if ALL else [("mlp", "lsq"), ("residual", "int8")])
def test_openvino_has_the_codes_of_the_golden_model(name, recipe, exported):
    model, path = exported(name, recipe)
    found = fq.verify(model, path, DATA)
    digit_models.assert_verified(found, digit_models.float_model(name), "openvino", "openvino")
    assert all(kernel.endswith(" I8") for kernel in found.kernels.values())
    assert found.outputs.rows == 53


def test_codes_of_added_operands_are_not_read_and_that_is_said(exported):
    found = fq.verify(*exported("residual", "int8"), DATA[:1])
    assert set(found.skipped) == {"relus.0.output_quantizer", "down_norm.output_quantizer"}
    assert set(found.skipped.values()) == {module._ADDED}
    assert f"down_norm.output_quantizer is not compared: {module._ADDED}" in str(found)


def test_inputs_without_the_rule_of_openvino_are_noticed(exported):
    """The prepared model would see other codes at ties than the file."""
    model, path = exported("mlp", "int8")
    quantizer = model[1].input_quantizer
    assert fq.verify(model, path, DATA).ok
    rounding, quantizer.rounding = quantizer.rounding, None
    try:
        found = fq.verify(model, path, DATA)
    finally:
        quantizer.rounding = rounding
    assert sum(t.prepared_differ for t in found.tensors) > 100
    assert not found.ok


class Unused(nn.Module):
    """Has an input that nothing reads, and a layer whose result nothing uses behind a result that is added."""

    def __init__(self):
        super().__init__()
        self.a, self.dead, self.last = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x, unused):
        y = self.a(x)
        self.dead(y)
        return self.last(y + x)


def test_inputs_and_layers_that_nothing_uses_do_not_matter(tmp_path):
    torch.manual_seed(0)
    batch = torch.randn(8, 4, 6, 6), torch.randn(8, 2)
    model = fq.calibrate(fq.prepare(Unused(), recipes.int8(target="openvino"), batch), [batch], progress=False)
    fq.export_onnx(model, tmp_path / "model.onnx", batch)
    found = fq.verify(model, tmp_path / "model.onnx", [batch])
    assert found.ok, found.problem
    assert found.first_difference is None


class Rows(nn.Module):
    """A product of rows that the model's code takes from two axes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return self.fc(x.reshape(-1, 6)).reshape(x.shape[0], -1, 4)


class Repeated(nn.Module):
    """A convolution that is called three times, and once followed by a factor."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, groups=4)

    def forward(self, x):
        return self.conv(self.conv(torch.relu(self.conv(x))) * 0.5)


class Readers(nn.Module):
    """A convolution with several readers of its result."""

    def __init__(self, read, bias=False):
        super().__init__()
        self.conv, self.read = nn.Conv2d(2, 4, 3, bias=bias), read
        if bias:
            self.conv.bias.data.zero_()

    def forward(self, x):
        return self.read(self.conv(x))


class Difference(nn.Module):
    """A convolution minus another one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        return self.a(x) - self.b(x)


def small(layer):
    """A layer with results that are not much larger than the epsilon of a norm."""
    for parameter in layer.parameters():
        parameter.data *= 0.01
    return layer


# OpenVINO computes something else, or refuses the file, unless the graph has another form.
FORMS = {
    "product without a bias": (lambda: nn.Sequential(nn.Linear(6, 4, bias=False)), (3, 4, 6)),
    "product of four axes": (lambda: nn.Sequential(nn.Linear(6, 4, bias=False)), (3, 2, 5, 6)),
    "product of rows": (Rows, (3, 4, 6)),
    "average pool with padding": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(3, stride=1, padding=1), nn.Conv2d(4, 4, 1)),
        (3, 2, 8, 8),
    ),
    "weight of several convolutions in groups": (Repeated, (3, 4, 6, 6)),
    "square": (lambda: Readers(lambda y: y * y), (3, 2, 6, 6)),
    "double": (lambda: Readers(lambda y: y + y, bias=True), (3, 2, 6, 6)),
    "result and half of it": (lambda: Readers(lambda y: (y, y * 0.5)), (3, 2, 6, 6)),
    "results of four readers": (
        lambda: Readers(lambda y: torch.cat([-y, y.relu(), y * 3, y - y.mean()])),
        (3, 2, 6, 6),
    ),
    "instance norm": (lambda: nn.Sequential(small(nn.Conv1d(2, 4, 3, bias=False)), nn.InstanceNorm1d(4)), (3, 2, 6)),
    "largest of channels": (
        lambda: nn.Sequential(Readers(lambda y: y.amax(1), bias=True), nn.Linear(4, 4)),
        (3, 2, 6, 6),
    ),
    "difference of two layers": (lambda: nn.Sequential(Difference(), nn.Linear(6, 4)), (3, 2, 6, 6)),
    "padding of a pointwise convolution with a stride": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1, stride=2, padding=1)),
        (3, 2, 8, 8),
    ),
    "smallest of a row": (
        lambda: nn.Sequential(Readers(lambda y: y.amin(3), bias=True), nn.Linear(4, 4)),
        (3, 2, 6, 6),
    ),
}


class Together(nn.Module):
    """Networks that read the same input, because an export of each takes longer."""

    def __init__(self, makers):
        super().__init__()
        self.networks = nn.ModuleList(make() for make in makers)

    def forward(self, x):
        return [network(x) for network in self.networks]


if ALL:
    TRIED = {name: ([make], shape) for name, (make, shape) in FORMS.items()}
else:
    TRIED = {str(s): ([make for make, shape in FORMS.values() if shape == s], s) for _, s in FORMS.values()}


@pytest.mark.parametrize(("makers", "shape"), TRIED.values(), ids=TRIED)
def test_forms_that_openvino_computes_as_they_are(makers, shape, tmp_path):
    torch.manual_seed(0)
    model, x = Together(makers), torch.randn(shape)
    model = fq.calibrate(fq.prepare(model, recipes.int8(target="openvino-vnni"), x), [x], progress=False)
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    found = fq.verify(model, tmp_path / "model.onnx", [x, torch.randn(7, *shape[1:])])
    assert found.ok, found.problem
    assert found.first_difference is None
    assert len(found.integers) == len(found.kernels)


@pytest.mark.parametrize("between", [nn.Identity, nn.GELU])
def test_batch_norms_of_another_axis_stay_apart_from_a_linear_layer(between, tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 2), between(), nn.BatchNorm2d(10)), torch.randn(3, 10, 4, 6)
    recipe = recipes.int4_weight_only(None, target="openvino")
    model = fq.calibrate(fq.prepare(model, recipe, x), [x], progress=False)
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    assert fq.verify(model, tmp_path / "model.onnx", [x], accuracy_level=1).ok


def test_padding_before_a_stride_is_a_reason_for_float(tmp_path):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(2, 4, 1, stride=2, padding=1)), torch.randn(3, 2, 7, 7)
    model = fq.calibrate(fq.prepare(model, recipes.int8(target="openvino"), x), [x], progress=False)
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    found = fq.verify(model, tmp_path / "model.onnx", [x])
    assert found.ok, found.problem
    assert "a 1x1 kernel, a stride and padding" in found.floats["0"]


@pytest.mark.parametrize("name", ["function", "module"])
def test_halves_of_a_softmax_have_the_codes_of_openvino(name, tmp_path):
    class Softmax(nn.Module):
        def forward(self, x):
            return x.softmax(-1)

    torch.manual_seed(0)
    model = nn.Sequential(Softmax() if name == "function" else nn.Softmax(-1), nn.Linear(2, 4))
    x = torch.cat([torch.zeros(40, 2), torch.tensor([[30.0, -30.0]])])  # halves, and a range of 0 to 1
    model = fq.calibrate(fq.prepare(model, recipes.int8(target="openvino"), x), [x], progress=False)
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    found = fq.verify(model, tmp_path / "model.onnx", [x])
    assert found.ok, found.problem
    assert found.first_difference is None


@pytest.mark.parametrize(("inputs", "bits"), [(17, 8), (18, 4)])
def test_4_bit_weights_with_an_odd_number_of_inputs_are_stored_in_bytes(inputs, bits, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, inputs)
    model = fq.prepare(nn.Sequential(nn.Linear(inputs, 20)), recipes.int4_weight_only(None, target="openvino-vnni"), x)
    fq.export_onnx(model.eval(), tmp_path / "model.onnx", x)
    found = fq.verify(model, tmp_path / "model.onnx", [torch.randn(7, inputs)])
    assert found.ok, found.problem
    types = {"0.weight_codes": onnx.TensorProto.INT8 if bits == 8 else onnx.TensorProto.INT4}
    stored = {one.name: one.data_type for one in onnx.load(tmp_path / "model.onnx").graph.initializer}
    assert types.items() <= stored.items()


def test_average_pools_whose_padding_has_the_code_0_read_codes(tmp_path):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AvgPool2d(3, padding=1), nn.Conv2d(4, 4, 1))
    x = torch.randn(3, 2, 8, 8)
    model = fq.calibrate(fq.prepare(model, recipes.int8(target="openvino-vnni"), x), [x], progress=False)
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    assert fq.verify(model, tmp_path / "model.onnx", [x]).ok
    assert "Max" not in {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}


@pytest.mark.parametrize("opset", [13, 21] if ALL else [13])
def test_circular_padding_is_a_concatenation(opset, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=(2, 1), padding_mode="circular"), nn.ReLU(), nn.Conv2d(4, 2, 1))
    x = torch.randn(2, 4, 6, 6)
    model = fq.calibrate(fq.prepare(model, recipes.int8(target="openvino"), x), [x], progress=False)
    fq.export_onnx(model, tmp_path / "model.onnx", x, opset=opset)
    found = fq.verify(model, tmp_path / "model.onnx", [x, torch.randn(5, 4, 6, 6)])
    assert found.ok, found.problem


# --- what OpenVINO cannot run is not exported -------------------------------------------------------


REFUSED = {
    "no outputs": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 0)),
        torch.randn(2, 4),
        r"OpenVINO refuses the file(.|\n)*This is in '1'",
    ),
    "1-d": (
        lambda: nn.Sequential(nn.Linear(4, 4)),
        torch.randn(4),
        r"shape \(4,\) in the model and .* \(1, 4\) in OpenVINO",
    ),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_file_that_openvino_cannot_run_is_not_written(name, tmp_path):
    make, x, message = REFUSED[name]
    model = make()
    model = fq.calibrate(fq.prepare(model, recipes.int8(target="openvino"), x), [x], progress=False)
    with pytest.raises(ValueError, match=message):
        fq.export_onnx(model, tmp_path / "model.onnx", x, dynamic_batch=name != "1-d")
    assert not list(tmp_path.iterdir())


# --- the choice of the runtime --------------------------------------------------------------------


def test_runtime_is_that_of_the_files_target(exported):
    assert fq.verify(*exported("mlp", "int8"), DATA[1:]).runtime == "openvino"
    other = exported("mlp", "int8", "onnxruntime-vnni")
    assert fq.verify(*other, DATA[1:]).runtime == "onnxruntime"
    assert fq.verify(*other, DATA[1:], runtime="openvino").runtime == "openvino"


@pytest.mark.parametrize(("target", "runtime"), [("onnxruntime-vnni", "openvino"), ("openvino", "onnxruntime")])
def test_file_of_another_runtime_is_ok_only_if_the_codes_are_the_same(target, runtime, exported):
    """The golden model has the arithmetic of the file's target, which is not that of the runtime."""
    found = fq.verify(*exported("residual", "int8", target), DATA, runtime=runtime)
    assert (found.runtime, found.target) == (runtime, target)
    beyond = sum(t.runtime_differ - t.runtime_ties for t in found.tensors)
    ties = sum(t.runtime_ties for t in found.tensors)
    assert found.ok == (found.problem is None)
    if found.ok:
        assert beyond == 0
        assert ties <= 4 + sum(t.codes for t in found.tensors) // 10_000
        assert found.outputs.agreeing == found.outputs.rows
    else:
        assert beyond > 0 or ties > 4 or found.outputs.disturbance or found.outputs.runtime_unexplained
        assert found.problem in str(found)


@pytest.mark.parametrize("runtime", ["openvinoo", "", "OpenVINO", "tensorrt", 3])
def test_wrong_runtime(runtime, exported):
    allowed = "`runtime` must be one of onnxruntime, openvino, .*, or None, got"
    with pytest.raises(ValueError, match=allowed):
        fq.verify(*exported("mlp", "int8"), DATA, runtime=runtime)


def test_openvino_is_not_installed(exported, monkeypatch):
    model, path = exported("mlp", "int8")
    digit_models.without(monkeypatch, "openvino")
    for runtime in (None, "openvino"):
        with pytest.raises(ImportError, match=r'needs openvino.*\nUse: pip install "fakequant\[openvino\]"'):
            fq.verify(model, path, DATA, runtime=runtime)


# --- files that do not fit ------------------------------------------------------------------------


def test_damaged_files(exported, tmp_path):
    model, path = exported("mlp", "int8")
    whole, bad = path.read_bytes(), tmp_path / "m.onnx"
    for data in (b"", b"# no model", whole[: len(whole) // 2], whole[:100], bytes(1000)):
        bad.write_bytes(data)
        with pytest.raises(ValueError, match=r"Use a file that fakequant\.export_onnx wrote|does not belong to the"):
            fq.verify(model, bad, DATA, runtime="openvino")
    with pytest.raises(FileNotFoundError, match="There is no file"):
        fq.verify(model, tmp_path / "none.onnx", DATA, runtime="openvino")


def test_operator_that_openvino_does_not_know(exported, tmp_path):
    model, path = exported("mlp", "int8")
    file = onnx.load(path)
    next(node for node in file.graph.node if node.op_type == "Relu").op_type = "NoSuchOperator"
    onnx.save(file, tmp_path / "m.onnx")
    with pytest.raises(ValueError, match=r"OpenVINO cannot load .*m\.onnx"):
        fq.verify(model, tmp_path / "m.onnx", DATA)


def test_file_of_another_model(exported):
    with pytest.raises(ValueError, match=r"does not belong to the model: (?s:.)*Export the model again"):
        fq.verify(exported("mlp", "lsq")[0], exported("mlp", "int8")[1], DATA)
    with pytest.raises(ValueError, match="does not belong to the model: "):
        fq.verify(exported("depthwise", "w4a8")[0], exported("mlp", "int8")[1], DATA)


def test_batch_that_openvino_cannot_run(exported):
    model = nn.Sequential(nn.Flatten(0, -2), nn.Linear(8, 4))  # takes any image whose rows have 8 pixels
    model = fq.calibrate(fq.prepare(model, recipes.int8(target="openvino"), DATA[0]), [DATA[0]], progress=False)
    path = exported("mlp", "int8")[1].with_name("rows.onnx")
    fq.export_onnx(model, path, DATA[0][:2])
    with pytest.raises(
        ValueError, match=r"OpenVINO cannot run the file on this batch(?s:.)*Use batches with the shapes"
    ):
        fq.verify(model, path, [torch.ones(2, 1, 4, 8)])


def test_onnx_file_in_executorch(exported):
    pytest.importorskip("executorch.exir")
    with pytest.raises(ValueError, match=r"is not an ExecuTorch program\.\nUse a \.pte file"):
        fq.verify(*exported("mlp", "int8"), DATA, runtime="executorch")


# --- grids that OpenVINO cannot compute -----------------------------------------------------------


def generic(weight, activation):
    config = fq.QuantConfig(default=fq.LayerConfig(weight=weight, input=activation))
    model = fq.prepare(digit_models.mlp(), config, DATA[0])
    return fq.calibrate(model, DATA[:1], progress=False)


@pytest.mark.parametrize("target", ["openvino", "openvino-vnni"])
def test_affine_weights_name_the_layer(target, tmp_path):
    model = generic(fq.QuantSpec(signed=False, symmetric=False, axis=0), presets.uint8())
    message = rf"(?s)1 has weights in uint8.*but {target} needs symmetric weights.*target='{target}'"
    with pytest.raises(ValueError, match=message):
        fq.convert(model, target=target)
    with pytest.raises(ValueError, match=message):
        fq.export_onnx(model, tmp_path / "m.onnx", DATA[0], target=target)
    assert list(tmp_path.iterdir()) == []


def test_weights_of_8_bits_name_the_layer_without_vnni():
    model = generic(presets.int8(), presets.uint8())
    with pytest.raises(ValueError, match=r"1 has weights up to 12\d, but openvino sums them exactly only up to 64"):
        fq.convert(model, target="openvino")
    fq.convert(model, target="openvino-vnni")


class ReadTwice(nn.Module):
    """A convolution whose result is read as codes by another one, and as floats by an addition."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, groups=4)

    def forward(self, x):
        y = self.first(x)
        return torch.tanh(self.second(y)) + y


def test_results_that_are_read_as_codes_and_as_floats_are_right(tmp_path):
    torch.manual_seed(0)
    model = fq.prepare(ReadTwice(), recipes.int8(target="openvino"), DATA[0][:2])
    fq.calibrate(model, DATA, progress=False).eval()
    fq.export_onnx(model, tmp_path / "model.onnx", DATA[0][:2])
    found = fq.verify(model, tmp_path / "model.onnx", DATA)
    assert found.ok, str(found)
    assert found.integers == ["first", "second"]
    assert model.first.output_quantizer is not None


def test_rounding_of_float_inputs_is_named(tmp_path):
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(64, 32)), recipes.int4_weight_only(target="openvino")).eval()
    x = torch.randn(8, 64)
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    found = fq.verify(model, tmp_path / "model.onnx", [x])
    assert found.rounded == ["0"]
    assert "DYNAMIC_QUANTIZATION_GROUP_SIZE" in (found.problem or "")
    assert fq.verify(model, tmp_path / "model.onnx", [x], accuracy_level=1).ok


def test_dynamic_scales_are_refused():
    with pytest.raises(ValueError, match="openvino has no integer kernels for scales that are computed at run time"):
        fq.prepare(nn.Sequential(nn.Linear(4, 4)), recipes.int8_dynamic(target="openvino"))


def test_a_bias_of_zeros_is_no_bias(tmp_path):
    """OpenVINO removes it, and then rounds in another order."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(384, 1024), nn.Linear(1024, 2)), torch.randn(256, 384)
    nn.init.zeros_(model[0].bias)
    model = fq.prepare(model, recipes.int8(target="openvino"), x[:2])
    fq.calibrate(model, [x], progress=False).eval()
    fq.export_onnx(model, tmp_path / "model.onnx", x[:2])
    found = fq.verify(model, tmp_path / "model.onnx", [x])
    assert sum(tensor.codes for tensor in found.tensors) > 300_000
    assert [tensor.runtime_differ for tensor in found.tensors] == [0, 0]
