"""Classes derived from a supported layer type with a forward pass of their own."""

import copy
import dataclasses
import pickle

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits, assert_same_state
from prepare_cases import INT8, randn
from thoroughness import sampled

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")
tensors = pytest.importorskip("fakequant._backends.torch.tensor_functions")
layers = pytest.importorskip("fakequant.nn._quantized_layer")

X86 = "onnxruntime-x86"
WEIGHT = fq.QuantSpec(bits=8, narrow_range=True, axis=0)


class Standardized(nn.Conv2d):
    """A convolution with a standardized weight and a learned gain."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.full((self.out_channels, 1, 1, 1), 1.5))

    def computed(self):
        flat = self.weight.reshape(1, self.out_channels, -1)
        gain = self.gain.flatten() * 0.3
        return F.batch_norm(flat, None, None, gain, training=True, momentum=0.0, eps=1e-6).reshape_as(self.weight)

    def forward(self, x):
        return F.conv2d(x, self.computed(), self.bias, self.stride, self.padding, self.dilation, self.groups)


class Same(nn.Conv2d):
    """A convolution that pads its input as TensorFlow does."""

    def computed(self):
        return self.weight

    def changed(self, x):
        size, step = self.kernel_size[0], self.stride[0]
        pads = [max((-(-n // step) - 1) * step + size - n, 0) for n in x.shape[:1:-1]]
        return F.pad(x, [part for pad in pads for part in (pad // 2, pad - pad // 2)])

    def forward(self, x):
        return super().forward(self.changed(x))


class Causal(nn.Conv1d):
    """A convolution that sees only what came before, called with keyword arguments."""

    def computed(self):
        return self.weight

    def changed(self, x):
        return F.pad(x, (self.kernel_size[0] - 1, 0))

    def forward(self, input):
        return F.conv1d(bias=self.bias, weight=self.weight, input=self.changed(input))


class Casting(nn.Linear):
    """A linear layer that takes any type."""

    def computed(self):
        return self.weight

    def changed(self, x):
        return x.to(self.weight.dtype)

    def forward(self, x):
        return F.linear(self.changed(x), self.weight, self.bias)


class Gained(nn.Linear):
    """A linear layer with a learned gain per output."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.gain = nn.Parameter(torch.linspace(0.5, 3, self.out_features)[:, None])

    def computed(self):
        return self.weight * self.gain

    def forward(self, x):
        return F.linear(x, self.computed(), self.bias)


# A layer and an input.
LAYERS = {
    "standardized": (lambda: Standardized(3, 4, 3, padding=1, stride=2), randn(6, 3, 9, 8)),
    "standardized, depthwise, no bias": (lambda: Standardized(4, 8, 3, groups=4, bias=False), randn(6, 4, 6, 6)),
    "same": (lambda: Same(3, 4, 3, stride=2), randn(6, 3, 8, 8)),
    "causal": (lambda: Causal(3, 4, 4), randn(6, 3, 9)),
    "casting": (lambda: Casting(6, 4), randn(8, 6).double()),
    "gained": (lambda: Gained(6, 4), randn(8, 6)),
    "gained, tokens": (lambda: Gained(6, 4), randn(3, 5, 6)),
}
each_layer = pytest.mark.parametrize(("make", "x"), LAYERS.values(), ids=LAYERS)


def build(make):
    torch.manual_seed(0)
    return make()


def calibrated(model, x, config=None):
    """Returns a prepared model in training mode, with fixed scales of activations."""
    model = fq.calibrate(fq.prepare(model, config or recipes.int8(), x), [x], progress=False)
    fqnn.switch_quantizers(model, observing=False)
    return model


def quantized(weight):
    """Returns a weight quantized with absmax / 127 per output channel and a straight-through gradient."""
    scale = (weight.detach().abs().flatten(1).amax(1) / 127).clamp(min=torch.finfo(torch.float32).eps)
    return tensors.fake_quantize(weight, scale, 0, WEIGHT, gradient="pass")


def reference(layer, x, input_quantizer):
    """Computes a layer with the quantized input and the quantized computed weight."""
    x = layer.changed(x) if hasattr(layer, "changed") else x
    x = tensors.fake_quantize(x, *input_quantizer.qparams(), presets.uint8())
    weight = quantized(layer.computed())
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight, layer.bias)
    function = {3: F.conv1d, 4: F.conv2d}[weight.dim()]
    return function(x, weight, layer.bias, layer.stride, layer.padding, layer.dilation, layer.groups)


def gradients(y, *parameters):
    return torch.autograd.grad((y * randn(*y.shape, seed=5)).sum(), parameters)


# --- prepared layers --------------------------------------------------------------------------------


@each_layer
def test_prepared_layer_computes_with_the_quantized_computed_weight(make, x):
    layer = build(make)
    # The sums of torch's products, which the reference has.
    model = calibrated(nn.Sequential(copy.deepcopy(layer)), x, dataclasses.replace(recipes.int8(), sums="float"))
    y, expected = model(x), reference(layer, x, model[0].input_quantizer)
    assert_same_bits(expected, y)
    names = [name for name, _ in layer.named_parameters()]
    expected = gradients(expected, *layer.parameters())
    for name, ours, theirs in zip(
        names, gradients(y, *(model[0].get_parameter(n) for n in names)), expected, strict=True
    ):
        assert theirs.abs().max() > 0, name
        assert_same_bits(theirs, ours, name)


@each_layer
def test_quantized_weight_is_the_computed_weight_on_its_grid(make, x):
    layer = build(make)
    model = calibrated(nn.Sequential(copy.deepcopy(layer)), x)
    assert_same_bits(quantized(layer.computed()), fqnn.quantized_weight(model[0]))


@each_layer
def test_copies_pickles_and_states_compute_the_same(make, x):
    layer = build(make)
    model = calibrated(nn.Sequential(copy.deepcopy(layer)), x)
    y = model(x)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(y, made(x))
        assert isinstance(made[0], type(layer))
    again = fq.prepare(nn.Sequential(build(make)), recipes.int8(), x)
    again.load_state_dict(model.state_dict())
    assert_same_bits(y, again(x))
    again.load_state_dict(nn.Sequential(layer).state_dict(), strict=False)
    restored = fq.unprepare(model)[0]
    assert type(restored) is type(layer)
    assert_same_state(layer.state_dict(), restored.state_dict())
    assert_same_bits(layer(x), restored(x))


@pytest.mark.parametrize("name", sampled(LAYERS, "standardized", "causal", "gained, tokens"))
def test_compiled_and_exported_layers_compute_the_same(name):
    make, x = LAYERS[name]
    model = calibrated(nn.Sequential(build(make)), x)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    y, again = model(x), compiled(x)
    assert_same_bits(y, again)
    for ours, theirs in zip(gradients(again, *compiled.parameters()), gradients(y, *model.parameters()), strict=True):
        assert_same_bits(theirs, ours)
    model.eval()
    assert_same_bits(model(x), torch.export.export(model, (x,)).module()(x))


def test_learned_scale_starts_at_the_computed_weight():
    layer = Gained(6, 4)
    computed = nn.Sequential(nn.Linear(6, 4))
    computed[0].weight = nn.Parameter(layer.computed().detach())
    for first_last_bits in (None, 8):
        config = dataclasses.replace(recipes.lsq(4), first_last_bits=first_last_bits)
        prepared, plain = (fq.prepare(copy.deepcopy(m), config, randn(3, 6)) for m in (nn.Sequential(layer), computed))
        assert_same_bits(plain[0].weight_quantizer.step_size, prepared[0].weight_quantizer.step_size)


def test_prepare_leaves_the_layer_and_random_numbers_alone():
    class Busy(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.register_buffer("runs", torch.zeros(1))
            self.register_buffer("replaced", torch.zeros(1))
            self.seen = 0

        def forward(self, x):
            self.runs += 1
            self.replaced = self.replaced + torch.rand(1)
            self.seen += 1
            self.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    layer = Busy()
    before, random = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
    model = fq.prepare(nn.Sequential(layer), INT8)
    assert_same_bits(torch.get_rng_state(), random)
    assert layer.training
    assert layer.seen == 0
    fq.nn.quantized_weight(layer)
    fq.unprepare(model)
    assert_same_state(before, layer.state_dict())


# --- the input --------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Both layers read a result that its producer quantizes, because it is an operand of the additions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.relu = nn.Conv2d(3, 4, 1), nn.ReLU()
        self.standardized, self.same, self.last = Standardized(4, 4, 3, padding=1), Same(4, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = self.relu(self.first(x))
        return self.last(x + self.standardized(x) + self.same(x))


def test_layer_that_changes_its_input_keeps_its_input_quantizer():
    x = randn(4, 3, 6, 6)
    model = calibrated(Branches(), x)
    assert model.standardized.input_quantizer is None
    assert model.standardized._fakequant.input_grid is model.relu.output_quantizer
    assert isinstance(model.same.input_quantizer, fqnn.Quantizer)


def test_producer_of_an_input_that_is_padded_quantizes_its_result():
    x = randn(4, 3, 6, 6)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), Same(4, 4, 3), nn.ReLU(), Standardized(4, 4, 3))
    fq.prepare(model, recipes.int8(target=X86), x)
    # The last convolution quantizes the result of the model.
    assert [p for p, _ in fqnn.named_quantizers(model) if "output" in p] == ["1.output_quantizer", "4.output_quantizer"]


def test_layer_that_begins_to_change_its_input_raises():
    class Sometimes(nn.Conv2d):
        def forward(self, x):
            return super().forward(F.pad(x, (1, 1)) if x.shape[-1] > 8 else x)

    model = Branches()
    model.standardized = Sometimes(4, 4, 1)
    fq.prepare(model, recipes.int8(), randn(1, 3, 6, 6))
    assert model.standardized.input_quantizer is None
    with pytest.raises(
        RuntimeError, match=r"Sometimes multiplies an input of shape \(1, 4, 9, 11\)(.|\n)*Register a kind"
    ):
        model.standardized(randn(1, 4, 9, 9))


def test_forward_pass_that_calls_another_number_of_functions_raises():
    class Twice(nn.Linear):
        def forward(self, x):
            return super().forward(x) if len(x) < 3 else super().forward(x[:1]) + super().forward(x)

    model = fq.prepare(nn.Sequential(Twice(4, 4)), recipes.int8(), randn(1, 4))
    with pytest.raises(RuntimeError, match=r"Twice called F.linear and convolutions 2 times, but once when"):
        model(randn(3, 4))


# --- converted layers and files ---------------------------------------------------------------------


@torch.no_grad()
@each_layer
def test_converted_layer_has_the_codes_of_the_computed_weight(make, x, tmp_path):
    layer = build(make)
    model = calibrated(nn.Sequential(copy.deepcopy(layer)), x).eval()
    golden = fq.convert(model)
    scale, codes = golden[0].weight_scale, golden[0].weight_codes
    assert_same_bits(fq.quantize(layer.computed(), scale, 0, WEIGHT), codes)
    assert "weight" not in golden[0]._parameters
    torch.testing.assert_close(golden(x), model(x), rtol=1e-5, atol=1e-5)
    fq.save_converted(golden, tmp_path / "golden.safetensors")
    loaded = fq.load_converted(nn.Sequential(build(make)), tmp_path / "golden.safetensors")
    for made in (loaded, copy.deepcopy(golden), pickle.loads(pickle.dumps(golden))):
        assert_same_bits(golden(x), made(x))


@torch.no_grad()
@each_layer
def test_layer_without_weight_quantizer_converts_with_its_computed_weight(make, x):
    config = fq.QuantConfig(default=fq.LayerConfig(input=presets.uint8()))
    model = calibrated(nn.Sequential(build(make)), x, config).eval()
    assert_same_bits(model(x), fq.convert(model)(x))


class Net(nn.Module):
    """Layers with forward passes of their own, one before a batch norm, and an addition."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = Standardized(3, 8, 3), nn.BatchNorm2d(8)
        self.same, self.head, self.last = Same(8, 8, 3), Casting(8 * 36, 8), Gained(8, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.stem(x)))
        return self.last(F.relu(self.head((x + self.same(x)).flatten(1))))


def test_exported_layers_are_verified_and_run_in_integer_kernels(tmp_path):
    x = randn(16, 3, 8, 8)
    model = Net()
    model(x)  # statistics for the batch norm
    model = fq.prepare(model, recipes.int8(target=X86), x)
    model = fq.calibrate(model, [x, 0.7 * randn(16, 3, 8, 8, seed=2)], progress=False).eval()
    assert fq.convert(model)._fakequant.conversion.folded == ["norm"]
    fq.export_onnx(model, tmp_path / "model.onnx", x[:1])
    found = fq.verify(model, tmp_path / "model.onnx", [randn(32, 3, 8, 8, seed=3)])
    assert found.ok, found
    assert found.kernels == {"stem": "QLinearConv", "same": "QLinearConv", "head": "QGemm", "last": "QGemm"}
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(tmp_path / "model.onnx").graph
    # Nothing is left of the computation of weights.
    assert {node.op_type for node in graph.node} <= {
        "QuantizeLinear", "DequantizeLinear", "Conv", "Relu", "Pad", "Add", "Reshape", "Gemm",
    }  # fmt: skip
    assert not any("gain" in i.name for i in graph.initializer)


# --- diagnosis --------------------------------------------------------------------------------------


def test_diagnosis_measures_the_computed_weight():
    x, layer = randn(8, 6), Gained(6, 4)
    plain = nn.Sequential(nn.Linear(6, 4))
    plain[0].load_state_dict({"weight": layer.computed().detach(), "bias": layer.bias.detach()})
    floats = nn.Sequential(layer), plain
    ours, theirs = (calibrated(copy.deepcopy(model), x) for model in floats)
    learned = (calibrated(copy.deepcopy(model), x, recipes.lsq(4)) for model in floats)  # their scales are fixed
    found = [fq.health(model, [x]).to_dict() for model in learned]
    assert found[0] == found[1]
    rows = [fq.compare(one, model, [x]).layers[0] for one, model in zip(floats, (ours, theirs), strict=True)]
    assert rows[0].weight_sqnr == rows[1].weight_sqnr
    assert fq.summary(ours).bytes_after == fq.summary(theirs).bytes_after + 4 * layer.gain.numel()


# --- what stays in float ----------------------------------------------------------------------------


def unsupported(forward, base=nn.Linear, size=(4, 3), **attributes):
    made = type("Odd", (base,), {"forward": forward})(*size)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def changed_in_place(self, x):
    y = F.linear(x, self.weight, self.bias)
    y += 1
    return y


def masked(self, x, mask):
    return F.linear(x, self.weight, self.bias) * mask


UNSUPPORTED = {
    "child": (
        lambda: unsupported(lambda self, x: F.linear(self.act(x), self.weight, self.bias), act=nn.ReLU()),
        "it has child modules",
    ),
    "no call": (
        lambda: unsupported(lambda self, x: x @ self.weight.T),
        "it calls F.linear and convolutions 0 times instead of once",
    ),
    "two calls": (
        lambda: unsupported(lambda self, x: F.linear(F.linear(x, self.weight), self.weight.T, None)),
        "it calls F.linear and convolutions 2 times instead of once",
    ),
    "shape": (
        lambda: unsupported(lambda self, x: F.linear(x, self.weight[:2], None), size=(4, 3, False)),
        "F.linear gets a weight of shape (2, 4), not (3, 4)",
    ),
    "bias left out": (
        lambda: unsupported(lambda self, x: F.linear(x, self.weight)),
        "F.linear does not get the layer's bias",
    ),
    "another bias": (
        lambda: unsupported(
            lambda self, x: F.conv2d(x, self.weight, torch.ones(3)), base=nn.Conv2d, size=(4, 3, 1, 1, 0, 1, 1, False)
        ),
        "F.conv2d does not get the layer's bias",
    ),
    "result": (
        lambda: unsupported(lambda self, x: 2 * F.linear(x, self.weight, self.bias)),
        "it does not return the result of F.linear",
    ),
    "result in place": (lambda: unsupported(changed_in_place), "it does not return the result of F.linear"),
    "two results": (
        lambda: unsupported(lambda self, x: (F.linear(x, self.weight, self.bias), x)),
        "it does not return the result of F.linear",
    ),
    "weight of the input": (
        lambda: unsupported(lambda self, x: F.linear(x, self.weight * x.mean(), self.bias)),
        "its weight depends on the input",
    ),
    "error": (
        lambda: unsupported(masked),
        "it fails on a small input with TypeError: masked() missing 1 required positional argument: 'mask'",
    ),
}


@pytest.mark.parametrize(("make", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_unsupported_forward_pass_stays_in_float_and_summary_says_why(make, reason):
    layer = make()
    before = type(layer)
    assert not layers.is_layer(layer)
    model = fq.prepare(nn.ModuleDict({"odd": layer, "fc": nn.Linear(4, 4)}), INT8)
    assert fq.summary(model).floats["odd"] == f"Odd overrides the forward pass of a supported layer type: {reason}"
    assert type(layer) is before


def test_code_of_an_unsupported_layer_is_recorded():
    class Odd(nn.Linear):
        def forward(self, x):
            return x + F.linear(x, self.weight, self.bias)

    model = nn.Sequential(nn.Linear(4, 4), Odd(4, 4))
    x = randn(3, 4)
    fq.prepare(model, recipes.int8(), x)
    assert model[0].output_quantizer is not None  # an operand of the addition
    assert set(model[1].function_quantizers) == {"linear_0"}
    assert not isinstance(model[1], fqnn.QuantizedLayer)


def test_weight_that_other_code_uses_is_not_taken_for_the_computed_one():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.fc = Gained(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return F.linear(self.fc(x), self.table.weight)

    model = fq.prepare(Tied(), recipes.int8(), randn(3, 4))
    assert not hasattr(model, "function_quantizers") or not model.function_quantizers.layers
