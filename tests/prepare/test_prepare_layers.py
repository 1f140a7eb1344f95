"""A prepared layer computes the float function of quantized tensors."""

import copy

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits
from prepare_cases import INT8, off, quantized_weight, randint, randn

torch = pytest.importorskip("torch")
nn = torch.nn
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")
tensors = pytest.importorskip("fakequant._backends.torch.tensor_functions")

# Layer, input, further arguments, and the axis of the output channels.
LAYERS = {
    "Linear": (lambda: nn.Linear(6, 4), randn(3, 6), {}, 0),
    "Linear without bias": (lambda: nn.Linear(6, 4, bias=False), randn(3, 6), {}, 0),
    "Linear, one vector": (lambda: nn.Linear(6, 4), randn(6), {}, 0),
    "Linear, 4-D": (lambda: nn.Linear(6, 4), randn(2, 3, 5, 6), {}, 0),
    "Linear, empty batch": (lambda: nn.Linear(6, 4), randn(0, 6), {}, 0),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), randn(2, 4, 9), {}, 0),
    "Conv1d, same": (lambda: nn.Conv1d(4, 6, 4, padding="same", dilation=2), randn(2, 4, 9), {}, 0),
    "Conv1d, unbatched": (lambda: nn.Conv1d(4, 6, 3, bias=False), randn(4, 9), {}, 0),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3), randn(2, 4, 8, 7), {}, 0),
    "Conv2d, circular": (lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="circular"), randn(2, 4, 8, 7), {}, 0),
    "Conv2d, reflect": (lambda: nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"), randn(2, 4, 8, 7), {}, 0),
    "Conv2d, replicate": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="replicate"), randn(2, 4, 8, 7), {}, 0),
    "Conv2d, depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, stride=2), randn(2, 4, 8, 7), {}, 0),
    "Conv2d, dilated": (lambda: nn.Conv2d(4, 6, (3, 1), dilation=(2, 1), groups=2), randn(2, 4, 8, 7), {}, 0),
    "Conv3d": (lambda: nn.Conv3d(2, 4, 2, groups=2, padding=1), randn(2, 2, 4, 3, 5), {}, 0),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), randn(2, 4, 5), {}, 1),
    "ConvTranspose1d, sized": (
        lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1), randn(2, 4, 5), {"output_size": [10]}, 1,
    ),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, bias=False), randn(2, 4, 5, 4), {}, 1),
    "ConvTranspose2d, sized": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2),
        randn(2, 4, 5, 4),
        {"output_size": (10, 8)},
        1,
    ),
    "ConvTranspose2d, full size": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2), randn(2, 4, 5, 4), {"output_size": torch.Size([2, 6, 12, 9])}, 1,
    ),
    "ConvTranspose2d, padded": (
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=3, output_padding=(2, 1), dilation=2), randn(2, 4, 5, 4), {}, 1,
    ),
    "ConvTranspose3d": (
        lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), randn(1, 2, 3, 2, 2), {"output_size": [7, 4, 5]}, 1,
    ),
    "Embedding": (lambda: nn.Embedding(9, 4), randint(9, 3, 5), {}, 0),
    "Embedding, padding": (lambda: nn.Embedding(9, 4, padding_idx=-9), randint(3, 3, 5), {}, 0),
    "Embedding, by frequency": (lambda: nn.Embedding(9, 4, scale_grad_by_freq=True), randint(3, 3, 5), {}, 0),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(9, 4), randint(9, 3, 5), {}, 0),
    "EmbeddingBag, sum": (
        lambda: nn.EmbeddingBag(9, 4, mode="sum", padding_idx=1),
        randint(9, 8),
        {"offsets": torch.tensor([0, 3, 3]), "per_sample_weights": randn(8, seed=3)},
        0,
    ),
    "EmbeddingBag, max": (
        lambda: nn.EmbeddingBag(9, 4, mode="max"), randint(9, 8), {"offsets": torch.tensor([0, 2, 7])}, 0,
    ),
    "EmbeddingBag, last offset": (
        lambda: nn.EmbeddingBag(9, 4, include_last_offset=True), randint(9, 8), {"offsets": torch.tensor([0, 2, 8])}, 0,
    ),
}  # fmt: skip
each_layer = pytest.mark.parametrize(("make", "x", "options", "axis"), LAYERS.values(), ids=LAYERS)


def build(make, dtype=torch.float32):
    torch.manual_seed(0)
    return make().to(dtype)


def gradients(layer, x, **options):
    """Returns the result and the gradients of the input and all parameters."""
    if x.is_floating_point():
        x = x.clone().requires_grad_()
    y = layer(x, **options)
    if y.numel():
        (y.double() * randn(*y.shape, seed=7)).sum().backward()
    found = {name: p.grad for name, p in layer.named_parameters() if "quantizer" not in name}
    return y, {"x": x.grad if x.is_floating_point() else None, **found}


def same_gradients(expected, actual):
    assert_same_bits(expected[0], actual[0], "y")
    assert expected[1].keys() == actual[1].keys()
    for name, value in expected[1].items():
        if value is None:
            assert actual[1][name] is None, name
        else:
            assert_same_bits(value, actual[1][name], name)


@each_layer
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_layer_with_quantizers_off_equals_the_float_layer(make, x, options, axis, training, dtype):
    floats = build(make, dtype).train(training)
    layer = off(fq.prepare(copy.deepcopy(floats), INT8)).train(training)
    if x.is_floating_point():
        x = x.to(dtype)
    options = {k: v.to(dtype) if k == "per_sample_weights" else v for k, v in options.items()}
    same_gradients(gradients(floats, x, **options), gradients(layer, x, **options))


@each_layer
def test_layer_computes_the_float_function_of_quantized_tensors(make, x, options, axis):
    layer = fq.prepare(build(make), INT8.rule(output=presets.uint4()))
    fq.calibrate(layer, lambda m: m(x if x.numel() else randn(3, 6), **options), progress=False)
    fqnn.switch_quantizers(layer, frozen=True)  # evaluation would also round biases
    plain = build(make)
    to_input, to_output = layer.input_quantizer, layer.output_quantizer

    def forward(x, **options):
        if to_input is not None:
            x = tensors.fake_quantize(x, *to_input.qparams(), presets.uint8())
        y = torch.func.functional_call(plain, {"weight": quantized_weight(plain, axis)}, (x,), options)
        return tensors.fake_quantize(y, *to_output.qparams(), presets.uint4())

    expected = nn.Module()
    expected.forward = forward
    wide = 1.5 * x if x.is_floating_point() else x  # some values are clipped
    y, found = gradients(expected, wide, **options)
    found.update({name: p.grad for name, p in plain.named_parameters()})
    same_gradients((y, found), gradients(layer, wide, **options))
    if x.is_floating_point() and x.numel():
        assert (found["x"] == 0).any()


@pytest.mark.parametrize(
    "make",
    [lambda: nn.ConvTranspose1d(4, 6, 3), lambda: nn.ConvTranspose2d(4, 6, 3, groups=2)],
    ids=["1d", "2d groups"],
)
def test_transposed_convolution_has_a_scale_per_output_channel_of_a_group(make):
    layer = fq.prepare(build(make), INT8)
    assert layer.weight_quantizer.scale.shape == (layer.weight.shape[1],)


def test_prepared_layer_accepts_its_input_as_a_keyword():
    layer = off(fq.prepare(nn.Linear(4, 4), recipes.int8(), torch.ones(1, 4)))
    assert_same_bits(layer(randn(2, 4)), layer(input=randn(2, 4)))
