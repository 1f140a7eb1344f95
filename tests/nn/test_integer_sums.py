"""Layers with exact sums: the same bits whatever multiplies, and those of the golden model."""

import copy
import dataclasses
import pickle

import pytest
from torch.utils.checkpoint import checkpoint

import fakequant as fq
from fakequant import _native, presets, recipes
from fakequant._backends.torch.integer_convolution import Geometry, integer_convolution
from fakequant._backends.torch.integer_linear import BiasCodes, IntegerGrid, integer_linear
from fakequant.config import LayerConfig, QuantConfig
from fakequant.testing.assertions import assert_same_bits
from integer_sums_cases import PRODUCTS, multiply_by, restored_settings, torch  # noqa: F401

nn = torch.nn


def operands(rows, inner, columns, zero, extreme):
    """Returns codes of the input less their zero point, and codes of the weight."""
    torch.manual_seed(rows + inner + columns + zero)
    x = torch.randint(0, 256, (rows, inner)) - zero
    weight = torch.randint(-127, 128, (columns, inner))
    if extreme:  # every sum reaches its bound, of either sign
        x, weight = torch.full_like(x, -zero if zero > 127 else 255 - zero), torch.full_like(weight, 127)
        weight[1::2] = -127
    return x, weight


@pytest.mark.parametrize("how", PRODUCTS)
@pytest.mark.parametrize("inner", [1, 2, 7, 511, 512, 513, 514, 1040, 5000, 32768, 32769])
def test_sums_are_exact(how, inner, monkeypatch):
    multiply_by(how, monkeypatch)
    for rows, columns in ((1, 1), (3, 5), (2, 33))[: 3 if inner < 10_000 else 1]:
        for zero in (0, 77, 255):
            for extreme in (False, True):
                x, weight = operands(rows, inner, columns, zero, extreme)
                x_scale, scale = torch.tensor(0.0371), torch.rand(columns) + 0.01
                bias, codes = torch.randn(columns), torch.randint(-(2**30), 2**30, (columns,)).double()
                sums = x.double() @ weight.double().t()
                grids = (
                    IntegerGrid(x_scale, torch.tensor(zero, dtype=torch.int32), 0, 255),
                    IntegerGrid(scale, None, -127, 127),
                )
                given = x * x_scale, weight * scale[:, None], bias, *grids
                assert_same_bits(integer_linear(*given), sums.float() * (x_scale * scale) + bias)
                expected = (sums * 8 + codes).float() * (x_scale * (scale / 8))
                assert_same_bits(integer_linear(*given, BiasCodes(codes, 8.0)), expected)


@pytest.mark.parametrize("how", PRODUCTS)
def test_both_zero_points_count_and_scales_per_token(how, monkeypatch):
    multiply_by(how, monkeypatch)
    rows, inner, columns = 4, 70, 6
    for bits in (2, 4, 8):
        low, high = 0, 2**bits - 1
        zeros, weight_zeros = (torch.randint(low, high + 1, (n,), dtype=torch.int32) for n in (rows, columns))
        x, weight = (torch.randint(low, high + 1, (n, inner)) for n in (rows, columns))
        x, weight = x - zeros[:, None], weight - weight_zeros[:, None]
        scale, weight_scale = torch.rand(rows) + 0.1, torch.rand(columns) + 0.1
        y = integer_linear(
            x * scale[:, None],
            weight * weight_scale[:, None],
            None,
            IntegerGrid(scale, zeros, low, high),
            IntegerGrid(weight_scale, weight_zeros, low, high),
        )
        assert_same_bits(y, (x.double() @ weight.double().t()).float() * (scale[:, None] * weight_scale))


# Axes of space, channels in and out, size of the image and of the kernel, stride, padding, dilation, groups. The first
# are large enough for 8-bit instructions. Of the sums, some are exact in one float32 product, some in parts.
KERNELS = [
    (2, 5, 7, 70, 3, 1, 1, 1, 1),
    (2, 4, 6, 80, 3, 2, 2, 3, 2),
    (2, 6, 6, 60, 5, 1, 2, 1, 6),
    (2, 70, 3, 16, 3, 1, 1, 1, 1),
    (1, 3, 4, 9000, 4, 3, 0, 2, 1),
    (1, 2, 3, 40, 3, 1, 1, 1, 1),
    (3, 4, 2, 17, 2, 1, 1, 1, 2),
]


@pytest.mark.parametrize("how", PRODUCTS)
@pytest.mark.parametrize(
    ("kernel", "last"), [*((one, False) for one in KERNELS), (KERNELS[0], True), (KERNELS[6], True)]
)
def test_sums_of_convolutions_are_exact(how, kernel, last, monkeypatch):
    multiply_by(how, monkeypatch)
    axes, channels, outputs, size, width, *geometry, groups = kernel
    generator = torch.Generator().manual_seed(axes + channels)
    order = {2: torch.channels_last, 3: torch.channels_last_3d}[axes] if last else torch.contiguous_format
    geometry = Geometry(*([one] * axes for one in geometry), groups)
    for low, zero, extreme in ((0, 0, False), (0, 77, False), (-128, 5, False), (0, 255, True)):
        shape = (2 if size < 9000 else 1, channels, *[size] * axes)
        x = torch.randint(low, low + 256, shape, generator=generator) - zero
        weight = torch.randint(-127, 128, (outputs, channels // groups, *[width] * axes), generator=generator)
        if extreme:  # every sum reaches its bound, of either sign
            x, weight = torch.full_like(x, -zero), torch.full_like(weight, 127)
            weight[1::2] = -127
        scale = torch.rand(outputs, generator=generator) + 0.01
        bias, codes = torch.randn(outputs), torch.randint(-(2**30), 2**30, (outputs,)).double()
        convolve = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[axes]
        sums = convolve(x.double(), weight.double(), None, *geometry)
        along = [-1] + [1] * axes
        x_scale = torch.tensor(0.0371)
        x_grid = IntegerGrid(x_scale, torch.tensor(zero, dtype=torch.int32), low, low + 255)
        given = (
            (x * x_scale).to(memory_format=order),
            weight * scale.reshape(-1, 1, *along[1:]),
            bias,
            x_grid,
            IntegerGrid(scale, None, -127, 127),
            geometry,
        )
        y = integer_convolution(*given)
        assert_same_bits(y, sums.float() * (x_scale * scale).reshape(along) + bias.reshape(along))
        if how != "in Python":  # torch's convolution of float64 along three axes returns another order
            assert y.is_contiguous(memory_format=order)
        expected = (sums * 8 + codes.reshape(along)).float() * (x_scale * (scale / 8)).reshape(along)
        assert_same_bits(integer_convolution(*given, BiasCodes(codes, 8.0)), expected)


class Convolutions(nn.Module):
    """Ways to pad, kernels that skip, groups, and one axis of space."""

    def __init__(self):
        super().__init__()
        self.same, self.valid = nn.Conv2d(3, 8, 3, padding="same"), nn.Conv2d(8, 8, 3, padding="valid", groups=8)
        self.mirror = nn.Conv2d(8, 8, 3, padding=2, dilation=2, padding_mode="reflect")
        self.line = nn.Conv1d(8, 8, 3, stride=2, padding=1, bias=False)

    def forward(self, x):
        y = self.mirror(self.valid(self.same(x).relu()).relu())
        return self.line(y.flatten(-2).relu())


IMAGES = torch.randn(3, 3, 14, 14, generator=torch.Generator().manual_seed(1))


def prepared_convolutions(config, sums="exact"):
    torch.manual_seed(0)
    model = fq.prepare(Convolutions(), dataclasses.replace(config, sums=sums), IMAGES)
    return fq.calibrate(model, [IMAGES], progress=False)


def step_of_images(model, run=lambda model, x: model(x), x=IMAGES):
    """Returns the results and gradients of a step in training, and the results in evaluation."""
    x = x.clone().requires_grad_()
    y = run(model.train(), x)
    gradients = torch.autograd.grad((y * torch.linspace(-1, 1, 8)[:, None]).sum(), [x, *model.parameters()])
    return [y.detach(), *gradients, model.eval()(x.detach())]


@pytest.mark.parametrize("name", ["int8", "4 bits", "learned"])
def test_whatever_runs_convolutions_gives_the_same_bits(name, monkeypatch):
    config = CONFIGS[name]
    expected = step_of_images(prepared_convolutions(config))
    others = {
        "codes not saved": step_of_images(prepared_convolutions(dataclasses.replace(config, save_codes=False))),
        "checkpoint": step_of_images(
            prepared_convolutions(config), lambda model, x: checkpoint(model, x, use_reentrant=False)
        ),
        "pickle": step_of_images(pickle.loads(pickle.dumps(copy.deepcopy(prepared_convolutions(config))))),
    }
    for other, found in others.items():
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a, b, other)
    for how in ("threads", *PRODUCTS):
        with monkeypatch.context() as patch:
            multiply_by(how, patch)
            torch.set_num_threads(1 + (torch.get_num_threads() == 1))
            found = step_of_images(prepared_convolutions(config))
            torch.set_float32_matmul_precision("highest")
            _native.select_target(_native.supported_targets()[-1])
        for a, b in ((found[0], expected[0]), (found[-1], expected[-1])):  # gradients are sums of floats
            assert_same_bits(a, b, how)


def test_transforms_and_compilers_give_the_same_bits_for_convolutions():
    model = prepared_convolutions(CONFIGS["int8"])
    fq.nn.switch_quantizers(model, frozen=True)
    *_, expected = before = step_of_images(model)
    assert_same_bits(torch.func.vmap(model.eval())(IMAGES), expected)
    assert_same_bits(model(IMAGES[0]), expected[0])
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(step_of_images(model, lambda _, x: compiled(x)), before, strict=True):
        assert_same_bits(found, wanted)


class CallsFunctions(nn.Conv2d):
    """Calls convolutions as functions, with settings of every form."""

    SETTINGS = ({"padding": "valid"}, {"stride": (2,), "padding": (1, 0)}, {"padding": "same", "dilation": 2})

    def __init__(self, number):
        super().__init__(4, 8, 3, groups=2)
        self.settings = self.SETTINGS[number]

    def forward(self, x):
        return nn.functional.conv2d(x, self.weight * 2, self.bias, groups=2, **self.settings)


@pytest.mark.parametrize("number", range(3))
def test_convolutions_that_are_called_as_functions(number):
    torch.manual_seed(number)
    x = torch.randn(2, 4, 9, 9)
    model = fq.prepare(nn.Sequential(CallsFunctions(number)), CONFIGS["int8"], x)
    model = fq.calibrate(model, [x], progress=False).eval()
    fq.nn.switch_quantizers(model, frozen=True)
    layer, weight = model[0], fq.nn.quantized_weight(model[0])
    x_scale, scale = layer.input_quantizer.scale, layer.weight_quantizer.scale.reshape(-1, 1, 1)
    levels = (fq.nn.quantize_input(layer, x) / x_scale).round(), (weight / scale[..., None]).round()
    sums = nn.functional.conv2d(*(level.double() for level in levels), groups=2, **layer.settings)
    assert_same_bits(model.train()(x), sums.float() * (x_scale * scale) + layer.bias[:, None, None])
    assert_same_bits(model.eval()(x), fq.convert(model)(x))


def test_one_more_zero_at_the_end(recwarn):
    """`padding="same"` with an even kernel. torch warns that it copies the input."""
    model = fq.prepare(nn.Sequential(nn.Conv2d(3, 8, 4, padding="same")), CONFIGS["int8"], IMAGES)
    model = fq.calibrate(model, [IMAGES], progress=False).eval()
    assert_same_bits(model(IMAGES), fq.convert(model)(IMAGES))


def test_gradients_and_results_are_nearly_those_of_float_sums():
    exact, floats = (step_of_images(prepared_convolutions(CONFIGS["int8"], sums)) for sums in ("exact", "float"))
    for a, b in zip(exact, floats, strict=True):
        assert a.stride() == b.stride()
        # A sum that is rounded to another code changes results by a step.
        assert (a - b).norm() <= 0.02 * b.norm()
    floats = prepared_convolutions(CONFIGS["int8"], "float").same
    weight, x = fq.nn.quantized_weight(floats), fq.nn.quantize_input(floats, IMAGES)
    assert_same_bits(floats.train()(IMAGES), floats._conv_forward(x, weight, floats.bias))


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_lower_precision_of_products(precision, monkeypatch):
    """torch may round the operands of float products. Exact sums then are products of float64."""
    expected, images = step(prepared(CONFIGS["int8"])), step_of_images(prepared_convolutions(CONFIGS["int8"]))
    for how in ("without int8", "in Python"):
        with monkeypatch.context() as patch:
            multiply_by(how, patch)
            before = torch.backends.mkldnn.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision
            torch.backends.mkldnn.matmul.fp32_precision = torch.backends.mkldnn.conv.fp32_precision = precision
            try:
                found = step(prepared(CONFIGS["int8"])), step_of_images(prepared_convolutions(CONFIGS["int8"]))
            finally:
                torch.backends.mkldnn.matmul.fp32_precision, torch.backends.mkldnn.conv.fp32_precision = before
        assert_same_bits(found[0][-1], expected[-1])
        assert_same_bits(found[1][-1], images[-1])


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 8, bias=False))


CONFIGS = {
    "int8": recipes.int8(),
    "dynamic": recipes.int8_dynamic(),
    "4 bits": recipes.w4a8().rule(input=fq.presets.uint4()),
    "learned": recipes.lsq(4, first_last_bits=None),
    "affine": QuantConfig(default=LayerConfig(weight=fq.QuantSpec(symmetric=False, axis=0), input=fq.presets.uint8())),
}
X = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)) * 3


def prepared(config, sums="exact"):
    model = fq.prepare(network(), dataclasses.replace(config, sums=sums), X)
    return fq.calibrate(model, [X], progress=False)


def step(model, run=lambda model, x: model(x)):
    """Returns results and gradients of a step in training, and the results in evaluation."""
    x = X.clone().requires_grad_()
    y = run(model.train(), x)
    gradients = torch.autograd.grad((y * torch.linspace(-1, 1, 8)).sum(), [x, *model.parameters()])
    return [y.detach(), *gradients, model.eval()(X)]


def test_whatever_runs_gives_the_same_bits(monkeypatch):
    for name, config in CONFIGS.items():
        expected = step(prepared(config))
        others = {
            "codes not saved": step(prepared(dataclasses.replace(config, save_codes=False))),
            "checkpoint": step(prepared(config), lambda model, x: checkpoint(model, x, use_reentrant=False)),
            "copy": step(copy.deepcopy(prepared(config))),
            "pickle": step(pickle.loads(pickle.dumps(prepared(config)))),
        }
        for other, found in others.items():
            for a, b in zip(found, expected, strict=True):
                assert_same_bits(a, b, f"{name}, {other}")
        for how in ("threads", *PRODUCTS):
            with monkeypatch.context() as patch:
                multiply_by(how, patch)
                torch.set_num_threads(1 + (torch.get_num_threads() == 1))
                found = step(prepared(config))
                torch.set_float32_matmul_precision("highest")
                _native.select_target(_native.supported_targets()[-1])
            for a, b in ((found[0], expected[0]), (found[-1], expected[-1])):  # gradients are sums of floats
                assert_same_bits(a, b, f"{name}, {how}")


def test_transforms_and_compilers_give_the_same_bits():
    model = prepared(CONFIGS["int8"])
    fq.nn.switch_quantizers(model, frozen=True)
    *_, expected = before = step(model)

    def loss(parameters, x):
        y = torch.func.functional_call(model.train(), parameters, (x,))
        return (y * torch.linspace(-1, 1, 8)).sum()

    gradients = torch.func.grad(loss)(dict(model.named_parameters()), X)
    for found, wanted in zip(gradients.values(), before[2:-1], strict=True):
        assert_same_bits(found, wanted)
    assert_same_bits(torch.func.vmap(model.eval())(X), expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for found, wanted in zip(step(model, lambda _, x: compiled(x)), before, strict=True):
        assert_same_bits(found, wanted)


class Residual(nn.Module):
    """The second layer's input is on the grid of the ReLU, whose result is also added."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.relu = nn.Linear(40, 8), nn.Linear(8, 8), nn.ReLU()

    def forward(self, x):
        y = self.relu(self.a(x))
        return y + self.b(y)


@pytest.mark.parametrize("symmetric", [True, False])
def test_checkpoints_with_the_grid_of_another_module(symmetric):
    grid = fq.QuantSpec(bits=8, symmetric=symmetric)
    config = QuantConfig(default=LayerConfig(weight=presets.int8(), input=grid), operands=grid)
    torch.manual_seed(0)
    model = fq.calibrate(fq.prepare(Residual(), config, X), [X], progress=False)
    assert model.b.input_quantizer is None
    expected = step(copy.deepcopy(model))
    found = step(model, lambda model, x: checkpoint(model, x, use_reentrant=False))
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


def test_second_derivatives_are_those_of_float_sums():
    found = {}
    for sums in ("exact", "float"):
        model, x = prepared(CONFIGS["int8"], sums), X.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        first.square().sum().backward()
        found[sums] = model[0].weight.grad
    torch.testing.assert_close(found["exact"], found["float"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_evaluation_has_the_bits_of_the_golden_model(config):
    model = fq.prepare(nn.Sequential(nn.Linear(700, 64)), config, torch.zeros(1, 700))
    # Sums of many products: added up as floats, some would be rounded on the way.
    x = torch.randn(200, 700, generator=torch.Generator().manual_seed(2))
    fq.calibrate(model, [x], progress=False)
    assert_same_bits(model.eval()(x), fq.convert(model)(x))


@pytest.mark.parametrize("name", ["int8", "4 bits"])
def test_evaluation_of_convolutions_has_the_bits_of_the_golden_model(name):
    model = prepared_convolutions(CONFIGS[name])
    assert_same_bits(model.eval()(IMAGES), fq.convert(model)(IMAGES))


def test_float_sums_are_those_of_torch():
    model = prepared(CONFIGS["int8"], "float").eval()
    layer = model[0]
    bias = fq.nn._quantized_layer.bias_to_add(layer, X, layer.weight)
    weight = fq.nn.quantized_weight(layer)
    assert_same_bits(layer(X), nn.functional.linear(fq.nn.quantize_input(layer, X), weight, bias))


def test_nan_and_values_off_the_grid():
    model = prepared(CONFIGS["int8"]).eval()
    x = X.clone()
    x[2, 3] = torch.nan
    y, expected = model[0](x), model[0](X)
    assert y[2].isnan().all()
    assert_same_bits(y[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])
    # A hook that only watches, as those of `verify`, changes no sum.
    model[0].input_quantizer.register_forward_hook(lambda module, args, y: None)
    assert_same_bits(model[0](X), expected)
    model[0].input_quantizer.register_forward_hook(lambda module, args, y: y * 1.01)
    assert (model[0](X) - expected).abs().max() > 1e-3


def test_summary_says_how_sums_are_computed(monkeypatch):
    exact, floats = prepared(CONFIGS["int8"]), prepared(CONFIGS["int8"], "float")
    monkeypatch.setattr(_native, "has_int8_products", lambda: False)
    assert set(fq.summary(exact).sums.values()) == {"exact, products of floats"}
    assert "sums of products are exact in 0 of 2 layers" in str(fq.summary(floats))
