"""Layers of a prepared model: what they were, and exactly the float function of quantized tensors."""

import copy
import io
import pickle

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")
tensors = pytest.importorskip("fakequant._backends.torch.tensor_functions")
parametrizations = pytest.importorskip("torch.nn.utils.parametrizations")

EVERY_RECIPE = {
    "int8": recipes.int8(),
    "int8 for x86": recipes.int8(target="onnxruntime-x86"),
    "int8_dynamic": recipes.int8_dynamic(),
    "int4_weight_only": recipes.int4_weight_only(2),
    "w4a8": recipes.w4a8(),
    "lsq": recipes.lsq(4),
}
each_recipe = pytest.mark.parametrize("config", EVERY_RECIPE.values(), ids=EVERY_RECIPE)


def same(expected, actual, *names):
    assert expected.dtype == actual.dtype, names
    expected, actual = (t.detach().float() if t.dtype == torch.bfloat16 else t.detach() for t in (expected, actual))
    assert_same_bits(expected.numpy(), actual.numpy(), *names)


def same_state(expected, actual):
    assert list(expected) == list(actual)
    for name, value in expected.items():
        same(value, actual[name], name)


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randint(high, *shape, seed=1):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


# --- layers of one weight -----------------------------------------------------------------------------

# The layer, its input, more arguments, and the axis of its output channels.
LAYERS = {
    "Linear": (lambda: nn.Linear(6, 4), randn(3, 6), {}, 0),
    "Linear without bias": (lambda: nn.Linear(6, 4, bias=False), randn(3, 6), {}, 0),
    "Linear of one vector": (lambda: nn.Linear(6, 4), randn(6), {}, 0),
    "Linear of many axes": (lambda: nn.Linear(6, 4), randn(2, 3, 5, 6), {}, 0),
    "Linear of nothing": (lambda: nn.Linear(6, 4), randn(0, 6), {}, 0),
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
    """The result, and the gradients of everything that has one."""
    if x.is_floating_point():
        x = x.clone().requires_grad_()
    y = layer(x, **options)
    if y.numel():
        (y.double() * randn(*y.shape, seed=7)).sum().backward()
    found = {name: p.grad for name, p in layer.named_parameters() if "quantizer" not in name}
    return y, {"x": x.grad if x.is_floating_point() else None, **found}


def same_gradients(expected, actual):
    same(expected[0], actual[0], "y")
    assert expected[1].keys() == actual[1].keys()
    for name, value in expected[1].items():
        if value is None:
            assert actual[1][name] is None, name
        else:
            same(value, actual[1][name], name)


def off(model):
    fqnn.switch_quantizers(model, observing=False, quantizing=False)
    return model


@each_layer
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_with_quantizers_off_a_layer_is_the_float_layer(make, x, options, axis, training, dtype):
    floats = build(make, dtype).train(training)
    layer = off(fq.prepare(copy.deepcopy(floats), recipes.int8())).train(training)
    if x.is_floating_point():
        x = x.to(dtype)
    options = {k: v.to(dtype) if k == "per_sample_weights" else v for k, v in options.items()}
    same_gradients(gradients(floats, x, **options), gradients(layer, x, **options))


def quantized_weight(layer, axis):
    """By the formula: absmax / 127 per output channel, and a gradient that passes."""
    weight = layer.weight
    others = [d for d in range(weight.dim()) if d != axis]
    scale = (weight.detach().abs().amax(others) / 127).clamp(min=torch.finfo(torch.float32).eps)
    spec = fq.QuantSpec(bits=8, narrow_range=True, axis=axis)
    return tensors.fake_quantize(weight, scale, 0, spec, gradient="pass")


@each_layer
def test_a_layer_is_the_float_function_of_quantized_tensors(make, x, options, axis):
    layer = fq.prepare(build(make), recipes.int8().rule(output=presets.uint4()))
    fq.calibrate(layer, lambda m: m(x if x.numel() else randn(3, 6), **options), progress=False)
    fqnn.switch_quantizers(layer, frozen=True)  # in evaluation biases are rounded too
    plain = build(make)
    to_input, to_output = layer.input_quantizer, layer.output_quantizer

    def forward(x, **options):
        if to_input is not None:
            x = tensors.fake_quantize(x, *to_input.qparams(), presets.uint8())
        y = torch.func.functional_call(plain, {"weight": quantized_weight(plain, axis)}, (x,), options)
        return tensors.fake_quantize(y, *to_output.qparams(), presets.uint4())

    expected = nn.Module()
    expected.forward = forward
    wide = 1.5 * x if x.is_floating_point() else x  # some of it is clipped
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
def test_transposed_convolutions_have_a_scale_per_output_channel_of_a_group(make):
    layer = fq.prepare(build(make), recipes.int8())
    assert layer.weight_quantizer.scale.shape == (layer.weight.shape[1],)


def test_a_layer_with_a_name_keyword_is_called_as_before():
    layer = off(fq.prepare(nn.Linear(4, 4), recipes.int8()))
    same(layer(randn(2, 4)), layer(input=randn(2, 4)))


# --- attention ----------------------------------------------------------------------------------------

Q, K, V = randn(2, 5, 16, seed=1), randn(2, 7, 16, seed=2), randn(2, 7, 16, seed=3)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(5)
BOOL = torch.ones(5, 5, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
FLOAT3 = randn(8, 5, 5, seed=4)
ATTENTION = {
    "self": dict(),
    "padding": dict(key_padding_mask=PADDING),
    "float padding": dict(key_padding_mask=torch.zeros(2, 5).masked_fill(PADDING, -torch.inf)),
    "bool mask": dict(attn_mask=BOOL),
    "float mask": dict(attn_mask=CAUSAL),
    "bool 3-d mask": dict(attn_mask=BOOL.expand(8, 5, 5)),
    "float 3-d mask": dict(attn_mask=FLOAT3),
    "bool mask and padding": dict(attn_mask=BOOL, key_padding_mask=PADDING),
    "3-d mask and padding": dict(attn_mask=FLOAT3, key_padding_mask=torch.zeros(2, 5).masked_fill(PADDING, -torch.inf)),
    "causal": dict(attn_mask=CAUSAL, is_causal=True),
}
# torch adds a mask inside the product and in other orders of axes: sums of at most 16 products of numbers of size one.
CLOSE = dict(rtol=1e-5, atol=1e-6)


def run_attention(layer, kind, batch_first, options):
    inputs = {"self": (Q, Q, Q), "cross": (Q, K, V), "memory": (Q, K, K)}[kind]
    leaf = {id(t): t.clone().requires_grad_() for t in inputs}
    inputs = [leaf[id(t)] for t in inputs]
    passed = {id(t): t if batch_first else t.transpose(0, 1) for t in inputs}
    y, weights = layer(*(passed[id(t)] for t in inputs), **options)
    y = y if batch_first else y.transpose(0, 1)
    loss = (y * randn(*y.shape, seed=8)).sum()
    if weights is not None:
        loss = loss + (weights * randn(*weights.shape, seed=9)).sum()
    loss.backward()
    found = {name: p.grad for name, p in layer.named_parameters() if "quantizer" not in name}
    return y, weights, {**found, **{f"input {i}": t.grad for i, t in enumerate(leaf.values())}}


def close(expected, actual):
    torch.testing.assert_close(actual[0], expected[0], **CLOSE)
    assert (expected[1] is None) == (actual[1] is None)
    if expected[1] is not None:
        torch.testing.assert_close(actual[1], expected[1], **CLOSE)
    assert expected[2].keys() == actual[2].keys()
    for name, value in expected[2].items():
        torch.testing.assert_close(actual[2][name], value, msg=name, rtol=1e-4, atol=1e-5)  # sums over all tokens


def attention(batch_first=True, **options):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, batch_first=batch_first, **options)
    nn.init.normal_(layer.in_proj_bias) if layer.in_proj_bias is not None else None
    return layer


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("weights", ["none", "mean", "heads"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_with_quantizers_off_self_attention_is_that_of_torch(options, batch_first, weights, training):
    options = {**options, "need_weights": weights != "none", "average_attn_weights": weights == "mean"}
    floats = attention(batch_first).train(training)
    layer = off(fq.prepare(copy.deepcopy(floats), recipes.int8())).train(training)
    expected, actual = (run_attention(m, "self", batch_first, options) for m in (floats, layer))
    close(expected, actual)


@pytest.mark.parametrize("kind", ["cross", "memory"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_with_quantizers_off_cross_attention_is_that_of_torch(kind, batch_first, need_weights, bias):
    floats = attention(batch_first, bias=bias)
    layer = off(fq.prepare(copy.deepcopy(floats), recipes.int8()))
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 4:] = True
    options = dict(need_weights=need_weights, key_padding_mask=padding)
    close(*(run_attention(m, kind, batch_first, options) for m in (floats, layer)))


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("average", [True, False], ids=["mean", "heads"])
@pytest.mark.parametrize("mask", [None, CAUSAL, FLOAT3[:4]], ids=["no mask", "mask", "3-d mask"])
@pytest.mark.parametrize("padding", [None, PADDING[1]], ids=["all", "padding"])
def test_unbatched_attention_is_that_of_torch(batch_first, average, mask, padding):
    floats = attention(batch_first)
    layer = off(fq.prepare(copy.deepcopy(floats), recipes.int8()))
    x = Q[0]
    if padding is not None and mask is not None:
        padding = torch.zeros(5).masked_fill(padding, -torch.inf)
    options = dict(attn_mask=mask, key_padding_mask=padding, average_attn_weights=average)
    for expected, actual in zip(floats(x, x, x, **options), layer(x, x, x, **options), strict=True):
        assert expected.shape == actual.shape
        torch.testing.assert_close(actual, expected, **CLOSE)


def test_dropout_of_attention_weights_shows_in_the_weights_as_in_torch():
    floats = attention(dropout=0.5)
    layer = off(fq.prepare(copy.deepcopy(floats), recipes.int8()))
    found = []
    for module in (floats, layer):
        torch.manual_seed(5)
        found.append(module(Q, Q, Q, average_attn_weights=False))
    torch.testing.assert_close(found[1][0], found[0][0], **CLOSE)
    torch.testing.assert_close(found[1][1], found[0][1], **CLOSE)


@pytest.mark.parametrize(
    "options",
    [
        dict(attn_mask=torch.ones(5, 5, dtype=torch.uint8)),
        dict(attn_mask=torch.ones(5, 5, dtype=torch.int64)),
        dict(key_padding_mask=torch.ones(2, 5, dtype=torch.int32)),
        dict(attn_mask=torch.zeros(1, 5)),
        dict(attn_mask=torch.zeros(5, 1)),
        dict(attn_mask=torch.zeros(2, 5, 5)),
        dict(key_padding_mask=torch.zeros(5, 2, dtype=torch.bool)),
        dict(is_causal=True),
    ],
    ids=["uint8", "int64", "int padding", "one query", "one key", "no heads", "transposed padding", "causal alone"],
)
def test_masks_that_torch_refuses_are_refused(options):
    for module in (attention(), off(fq.prepare(attention(), recipes.int8()))):
        with pytest.raises((RuntimeError, AssertionError, ValueError, TypeError)):
            module(Q, Q, Q, **options)


@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
def test_attention_is_the_product_of_quantized_tensors(kind, need_weights):
    layer = fq.prepare(attention(), recipes.int8())
    inputs = (Q, Q, Q) if kind == "self" else (Q, K, V)
    fq.calibrate(layer, lambda m: m(*inputs, need_weights=need_weights), progress=False)
    fqnn.switch_quantizers(layer, frozen=True)  # in evaluation biases are rounded too
    assert {path for path, _ in fqnn.quantizers(layer)} == {
        "weight_quantizer", "input_quantizer", "projection_quantizer",
        "out_proj.weight_quantizer", "out_proj.input_quantizer",
    }  # fmt: skip
    plain = attention()

    def quantized(x, quantizer):
        return tensors.fake_quantize(x, *quantizer.qparams(), presets.uint8())

    def weight(w):
        return tensors.fake_quantize(w, w.detach().abs().amax(1) / 127, 0, presets.int8(), gradient="pass")

    def projection(x, w, b):
        return quantized(F.linear(quantized(x, layer.input_quantizer), w, b), layer.projection_quantizer)

    w, b = weight(plain.in_proj_weight), plain.in_proj_bias
    if kind == "self":
        projected = projection(Q, w, b).chunk(3, -1)
    else:
        projected = [projection(*args) for args in zip(inputs, w.chunk(3), b.chunk(3), strict=True)]
    q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in projected)
    weights = torch.softmax(q * 0.5 @ k.transpose(-2, -1), dim=-1)
    y = weights @ v if need_weights else F.scaled_dot_product_attention(q, k, v)
    y = quantized(y.transpose(1, 2).flatten(-2), layer.out_proj.input_quantizer)
    y = F.linear(y, weight(plain.out_proj.weight), plain.out_proj.bias)
    actual, actual_weights = layer(*inputs, need_weights=need_weights)
    same(y, actual)
    if need_weights:
        same(weights.mean(1), actual_weights)
    y.square().sum().backward()
    actual.square().sum().backward()
    for name, parameter in plain.named_parameters():
        same(parameter.grad, layer.get_parameter(name).grad, name)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
def test_attention_in_evaluation_without_gradients_is_quantized_too(need_weights):
    layer = fq.prepare(attention(), recipes.int8())
    fq.calibrate(layer, lambda m: m(Q, Q, Q), progress=False)
    layer.eval()
    with_gradients = layer(Q, Q, Q, need_weights=need_weights)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            same(with_gradients[0], layer(Q, Q, Q, need_weights=need_weights)[0])
    same(with_gradients[0], layer.requires_grad_(False)(Q, Q, Q, need_weights=need_weights)[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiheadAttention(16, 4, kdim=8, vdim=8),
        lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True),
        lambda: nn.MultiheadAttention(16, 4, add_zero_attn=True),
    ],
    ids=["kdim", "bias_kv", "zero_attn"],
)
def test_attention_that_stays_in_float_has_no_quantizers_that_nobody_calls(make):
    model = fq.prepare(nn.ModuleDict({"a": make(), "fc": nn.Linear(4, 4)}), recipes.int8())
    assert [path for path, _ in fqnn.quantizers(model)] == ["fc.weight_quantizer", "fc.input_quantizer"]


def test_attention_that_is_skipped_has_no_quantizers_that_nobody_calls():
    config = recipes.int8().skip(type="MultiheadAttention")
    model = fq.prepare(nn.ModuleDict({"a": attention(), "fc": nn.Linear(4, 4)}), config)
    assert [path for path, _ in fqnn.quantizers(model)] == ["fc.weight_quantizer", "fc.input_quantizer"]


# --- encoder layers -----------------------------------------------------------------------------------


def encoder_layer(cls=nn.TransformerEncoderLayer, **options):
    torch.manual_seed(0)
    return cls(16, 4, 32, dropout=0.0, batch_first=True, **options)


def encoder(**options):
    return nn.TransformerEncoder(encoder_layer(**options), 2, enable_nested_tensor=True)


class OwnEncoderLayer(nn.TransformerEncoderLayer):
    def forward(self, src, *args, **options):
        return super().forward(src, *args, **options)


@pytest.mark.parametrize("norm_first", [True, False], ids=["norm first", "norm last"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(src_key_padding_mask=PADDING),
        dict(src_mask=CAUSAL),
        dict(src_mask=BOOL, src_key_padding_mask=PADDING),
        dict(src_mask=CAUSAL, is_causal=True),
    ],
    ids=["plain", "padding", "mask", "both", "causal"],
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_with_quantizers_off_an_encoder_layer_is_that_of_torch(norm_first, activation, options, training):
    floats = encoder_layer(norm_first=norm_first, activation=activation).train(training)
    layer = off(fq.prepare(copy.deepcopy(floats), recipes.int8())).train(training)
    torch.testing.assert_close(layer(Q, **options), floats(Q, **options), **CLOSE)


ENCODERS = {
    "layer": (encoder_layer, recipes.int8()),
    "norm first": (lambda: encoder_layer(norm_first=True), recipes.int8()),
    "stack": (encoder, recipes.int8()),
    "layer is skipped": (encoder_layer, recipes.int8().skip(type="TransformerEncoderLayer")),
    "stack of skipped layers": (encoder, recipes.int8().skip(type="TransformerEncoderLayer")),
    "a forward pass of its own": (lambda: encoder_layer(OwnEncoderLayer), recipes.int8()),
}


@pytest.mark.parametrize(("make", "config"), ENCODERS.values(), ids=ENCODERS)
@pytest.mark.parametrize("padding", [None, PADDING], ids=["all", "padding"])
def test_torchs_shortcut_in_evaluation_does_not_bypass_quantizers(make, config, padding):
    model = fq.prepare(make(), config)
    fq.calibrate(model, lambda m: m(Q, src_key_padding_mask=padding), progress=False)
    model.eval()
    for path, quantizer in fqnn.quantizers(model):
        assert torch.isfinite(quantizer.scale).all(), f"{path} was not called"
    with_gradients = model(Q, src_key_padding_mask=padding)
    floats = fq.unprepare(copy.deepcopy(model))(Q, src_key_padding_mask=padding)
    kept = slice(None) if padding is None else ~padding
    assert not torch.equal(with_gradients[kept], floats[kept])
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            same(with_gradients[kept], model(Q, src_key_padding_mask=padding)[kept])


@pytest.mark.parametrize(
    "config",
    [fq.QuantConfig().rule(type="Linear", weight=presets.int8()), recipes.int8().skip(type="MultiheadAttention")],
    ids=["only linears", "attention is skipped"],
)
def test_nor_where_only_the_attention_stays_in_float(config):
    model = fq.calibrate(fq.prepare(encoder(), config), [Q], progress=False).eval()
    called = []
    for path, quantizer in fqnn.quantizers(model):
        quantizer.register_forward_hook(lambda *_, path=path: called.append(path))
    with torch.no_grad():
        model(Q)
    assert sorted(called) == sorted(path for path, _ in fqnn.quantizers(model))


def test_unprepare_gives_the_shortcut_back():
    model = encoder()
    before = model.use_nested_tensor
    fq.unprepare(fq.prepare(model, recipes.int8()))
    assert model.use_nested_tensor is before
    assert not [name for name in vars(model) if "fakequant" in name]


class AddsEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = encoder_layer()

    def forward(self, x):
        return x + self.layer(x)


def test_every_quantizer_of_a_residual_encoder_layer_is_called():
    model = fq.prepare(AddsEncoder(), recipes.int8())
    fq.calibrate(model, [Q], progress=False)
    for path, quantizer in fqnn.quantizers(model):
        assert torch.isfinite(quantizer.scale).all(), f"{path} was not called"


# --- where results meet -------------------------------------------------------------------------------


class OwnLinear(nn.Linear):
    pass


class Meets(nn.Module):
    def __init__(self, linear=nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.relu, self.head = linear(4, 4), linear(4, 4), nn.ReLU(), linear(4, 2)

    def forward(self, x):
        return self.head(self.relu(self.a(x)) + self.b(x))


@pytest.mark.parametrize("linear", [nn.Linear, OwnLinear], ids=["Linear", "a subclass"])
def test_results_that_are_added_are_quantized_by_the_modules_they_come_from(linear):
    model = fq.prepare(Meets(linear), recipes.int8())
    assert model.b.output_quantizer is not None
    assert model.relu.output_quantizer.spec == presets.uint8()
    assert model.a.output_quantizer is None
    assert model.head.output_quantizer is None
    x = randn(3, 4)
    fq.calibrate(model, [x], progress=False)
    fqnn.switch_quantizers(model, frozen=True)  # in evaluation biases are rounded too
    a, b = (tensors.fake_quantize(x, *m.input_quantizer.qparams(), presets.uint8()) for m in (model.a, model.b))
    left = torch.relu(F.linear(a, quantized_weight(model.a, 0), model.a.bias))
    right = F.linear(b, quantized_weight(model.b, 0), model.b.bias)
    left = tensors.fake_quantize(left, *model.relu.output_quantizer.qparams(), presets.uint8())
    right = tensors.fake_quantize(right, *model.b.output_quantizer.qparams(), presets.uint8())
    y = tensors.fake_quantize(left + right, *model.head.input_quantizer.qparams(), presets.uint8())
    same(F.linear(y, quantized_weight(model.head, 0), model.head.bias), model(x))


def test_a_module_that_is_skipped_does_not_quantize_its_result():
    model = fq.prepare(Meets(), recipes.int8().skip("relu").skip("b"))
    assert not hasattr(model.relu, "output_quantizer")
    assert not model.relu._forward_hooks
    assert type(model.b) is nn.Linear


class AddsIndices(nn.Module):
    def __init__(self):
        super().__init__()
        self.flatten, self.table = nn.Flatten(), nn.Embedding(9, 4)

    def forward(self, x):
        return self.table(self.flatten(x) + 1)


def test_results_that_are_integers_pass_as_they_are():
    model = fq.prepare(AddsIndices(), recipes.int8())
    assert model(randint(8, 2, 3, 2)).shape == (2, 6, 4)


class HasEffects(nn.Module):
    """What ordinary forward passes do beside computing."""

    def __init__(self):
        super().__init__()
        self.fc, self.calls, self.history = nn.Linear(4, 4), 0, []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        self.features = self.fc(x)
        self.history.append(self.features)
        return self.features + torch.rand(4)


def test_preparing_a_model_leaves_no_traces_of_having_looked_at_it():
    model = HasEffects()
    rng = torch.get_rng_state()
    fq.prepare(model, recipes.int8())
    same(rng, torch.get_rng_state(), "random numbers")
    assert float(model.seen) == 0
    assert model.calls == 0
    assert model.history == []
    assert not hasattr(model, "features")
    pickle.dumps(model)


# --- what a layer keeps -------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(9, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose1d(4, 4, 1)
        self.norm = nn.BatchNorm1d(4)
        self.relu = nn.ReLU()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        x = self.table(x).transpose(1, 2)
        x = (x + self.relu(self.norm(self.up(self.conv(x))))).transpose(1, 2)
        return self.head(self.encoder(x + self.attention(x, x, x)[0]))


TOKENS = randint(9, 3, 6)


def mixed(config, training=True):
    model = fq.prepare(Mixed(), config)
    return fq.calibrate(model, [TOKENS], progress=False).train(training)


def before_and_after(config):
    model = Mixed()
    before = (
        dict(model.named_modules()),
        dict(model.named_parameters(remove_duplicate=False)),
        dict(model.named_buffers()),
    )
    fq.prepare(model, config)
    return model, before


@each_recipe
def test_modules_parameters_and_buffers_keep_names_identity_and_order(config):
    model, (modules, parameters, buffers) = before_and_after(config)
    for name, module in modules.items():
        assert model.get_submodule(name) is module
    now = {n: p for n, p in model.named_parameters(remove_duplicate=False) if "quantizer" not in n}
    assert list(now) == list(parameters)
    assert all(now[name] is value for name, value in parameters.items())
    assert all(model.get_buffer(name) is value for name, value in buffers.items())
    assert model.head.weight is model.table.weight
    assert [n for n, _ in model.named_modules() if "quantizer" not in n] == list(modules)


@each_recipe
def test_layers_are_of_a_class_derived_from_theirs_and_unprepare_gives_it_back(config):
    floats = Mixed()
    model = fq.prepare(Mixed(), config)
    kinds = {name: type(module) for name, module in floats.named_modules()}
    for name, kind in kinds.items():
        assert isinstance(model.get_submodule(name), kind), name
    changed = [name for name, kind in kinds.items() if type(model.get_submodule(name)) is not kind]
    assert {"conv", "up", "head", "attention"} <= set(changed)
    assert type(model.norm) is nn.BatchNorm1d
    fq.unprepare(model)
    assert {name: type(module) for name, module in model.named_modules()} == kinds
    for name, module in model.named_modules():
        expected = vars(floats.get_submodule(name))
        assert vars(module).keys() == expected.keys(), name
        for hooks in (key for key in expected if key.endswith("hooks")):
            assert len(vars(module)[hooks]) == len(expected[hooks]), (name, hooks)


def test_hooks_stay_and_see_what_they_saw():
    model, calls = Meets(), []
    handles = [
        model.a.register_forward_hook(lambda m, args, y: calls.append(("a", y))),
        model.relu.register_forward_hook(lambda m, args, y: calls.append(("relu", y))),
        model.b.register_forward_pre_hook(lambda m, args: calls.append(("b before", args[0]))),
        model.head.register_full_backward_hook(lambda m, gi, go: calls.append(("head back", go[0]))),
    ]
    off(fq.prepare(model, recipes.int8()))
    x = randn(3, 4)
    y = model(x)
    y.sum().backward()
    assert [name for name, _ in calls] == ["a", "relu", "b before", "head back"]
    assert calls[2][1] is x
    handles[1].remove()
    assert len(model.relu._forward_hooks) == 1
    fq.unprepare(model)
    assert len(model.relu._forward_hooks) == 0
    assert len(model.a._forward_hooks) == 1


def test_a_hook_that_is_added_in_another_process_does_not_replace_ours(monkeypatch):
    model = fq.prepare(Meets(), recipes.int8())
    fq.calibrate(model, [randn(3, 4)], progress=False)
    text = pickle.dumps(model)
    # A new process counts its hooks from zero.
    monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "next_id", 0)
    model = pickle.loads(text)
    for _ in range(1 + max(model.relu._forward_hooks)):
        model.relu.register_forward_hook(lambda m, args, y: None)
    ours = [hook for hook in model.relu._forward_hooks.values() if hook.__module__.startswith("fakequant.")]
    assert len(ours) == 1


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@each_recipe
def test_quantizers_are_in_the_mode_of_their_layer(config, training):
    model = Mixed().train(training)
    fq.prepare(model, config)
    assert {module.training for module in model.modules()} == {training}


def test_a_model_that_is_one_layer_is_prepared():
    layer = nn.Linear(4, 2)
    assert fq.prepare(layer, recipes.int8()) is layer
    assert isinstance(layer, nn.Linear)
    assert layer.weight_quantizer.path == "weight_quantizer"
    assert type(fq.unprepare(layer)) is nn.Linear


# --- states -------------------------------------------------------------------------------------------


@each_recipe
def test_a_float_state_loads_strictly_into_a_prepared_model(config):
    saved = {
        name: value + 0.5 if value.is_floating_point() else value + 1 for name, value in Mixed().state_dict().items()
    }
    model = mixed(config)
    quantizers = {n: v.clone() for n, v in model.state_dict().items() if "quantizer" in n}
    assert model.load_state_dict(saved, strict=True) == ([], [])
    for name, value in model.state_dict().items():
        same(quantizers[name] if "quantizer" in name else saved[name], value, name)


@each_recipe
def test_a_prepared_state_loads_strictly_into_a_freshly_prepared_model(config):
    model = mixed(config, training=False)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = fq.prepare(Mixed(), config)
    with torch.no_grad():
        for p in fresh.parameters():
            p.fill_(0.25)
    assert fresh.load_state_dict(torch.load(file, weights_only=True), strict=True) == ([], [])
    same_state(model.state_dict(), fresh.state_dict())
    same(model(TOKENS), fresh.eval()(TOKENS))


def test_a_state_of_another_config_is_refused():
    with pytest.raises(RuntimeError, match="spec"):
        mixed(recipes.w4a8()).load_state_dict(mixed(recipes.int8()).state_dict())


def test_a_prepared_state_does_not_load_strictly_into_a_float_model():
    with pytest.raises(RuntimeError, match="Unexpected"):
        Mixed().load_state_dict(mixed(recipes.int8()).state_dict(), strict=True)


@each_recipe
def test_unprepare_gives_the_float_model_back(config):
    floats = Mixed().eval()
    model = Mixed().eval()
    assert fq.unprepare(fq.prepare(model, config)) is model
    same_state(floats.state_dict(), model.state_dict())
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            same(floats(TOKENS), model(TOKENS))
    fq.prepare(model, config)  # and it can be prepared again


def test_unprepare_of_a_trained_model_keeps_its_weights():
    model = mixed(recipes.lsq(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(TOKENS).square().mean().backward()
    optimizer.step()
    trained = {n: v.clone() for n, v in model.state_dict().items() if "quantizer" not in n}
    same_state(trained, fq.unprepare(model).state_dict())


@pytest.mark.parametrize("what", [Mixed, lambda: mixed(recipes.int8()).encoder], ids=["float", "a part"])
def test_unprepare_of_what_is_not_prepared_is_an_error(what):
    with pytest.raises(ValueError, match="not prepared"):
        fq.unprepare(what())


# --- copies -------------------------------------------------------------------------------------------


def through_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": through_file,
}


@each_recipe
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_is_a_prepared_model_of_its_own(config, copied):
    model = mixed(config, training=False)
    other = copied(model)
    same_state(model.state_dict(), other.state_dict())
    same(model(TOKENS), other(TOKENS))
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in other.named_modules()}
    assert other.head.weight is other.table.weight
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}
    before = copy.deepcopy(model.state_dict())
    fq.unprepare(other)
    same_state(before, model.state_dict())
    same_state(Mixed().state_dict(), other.state_dict())
    with pytest.raises(ValueError, match="already"):
        fq.prepare(model, config)


# --- bad input ----------------------------------------------------------------------------------------


class Taken(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.output_quantizer = "mine"


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.LazyLinear(4)


def nothing_but_nan():
    layer = nn.Linear(4, 4)
    nn.init.constant_(layer.weight, torch.nan)
    return nn.Sequential(nn.Linear(4, 4), layer)


def small():
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


BAD = {
    "a rule matches nothing": (small, fq.QuantConfig().rule("haed", weight=presets.int8()), ValueError, "haed"),
    "no layer": (lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(4)), recipes.int8(), ValueError, "Nothing"),
    "only an LSTM": (lambda: nn.Sequential(nn.LSTM(4, 4)), recipes.int8(), ValueError, "recurrent"),
    "an empty model": (nn.Identity, recipes.int8(), ValueError, "Nothing"),
    "everything is skipped": (small, recipes.int8().skip(), ValueError, "the config says so"),
    "prepared already": (lambda: fq.prepare(small(), recipes.w4a8()), recipes.int8(), ValueError, "already"),
    "a part is prepared": (
        lambda: nn.Sequential(nn.Linear(4, 4), fq.prepare(small(), recipes.int8())), recipes.int8(), ValueError, "1.0",
    ),
    "meta": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")), recipes.int8(), ValueError, "meta",
    ),
    "groups that do not divide": (small, recipes.int4_weight_only(3), ValueError, "3"),
    "input per channel": (
        small, fq.QuantConfig(default=fq.LayerConfig(input=fq.QuantSpec(axis=1))), ValueError, "channel",
    ),
    "an axis that is not there": (
        small, fq.QuantConfig(default=fq.LayerConfig(weight=fq.QuantSpec(axis=5))), ValueError, "5",
    ),
    "no spec": (small, fq.QuantConfig(default=fq.LayerConfig()), ValueError, "no spec"),
    "a layer config": (small, recipes.int8().default, TypeError, "QuantConfig"),
    "a dict": (small, recipes.int8().to_dict(), TypeError, "QuantConfig"),
    "a recipe that was not called": (small, recipes.int8, TypeError, "QuantConfig"),
    "None": (small, None, TypeError, "QuantConfig"),
    "learned scales of NaN": (nothing_but_nan, recipes.lsq(4), RuntimeError, "finite"),
}  # fmt: skip


def picture(model):
    return {
        name: (type(module), {key: list(v) if hasattr(v, "keys") else v for key, v in vars(module).items()})
        for name, module in model.named_modules()
    }


@pytest.mark.filterwarnings("ignore:.*NaN or infinite:RuntimeWarning")
@pytest.mark.parametrize(("make", "config", "error", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_prepared_is_refused_and_left_as_it_was(make, config, error, message):
    model = make()
    before = picture(model)
    with pytest.raises(error, match=message):
        fq.prepare(model, config)
    assert picture(model) == before


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_lazy_layers_are_refused_or_left_in_float_until_they_have_a_shape():
    model = Lazy()
    with pytest.raises(ValueError, match="no shape yet"):
        fq.prepare(model, recipes.int8())
    assert type(model.fc) is nn.LazyLinear
    model.fc(randn(2, 3))
    fq.prepare(model, recipes.int8())
    assert type(model.fc) is not nn.Linear
    assert isinstance(model.fc, nn.Linear)


def test_a_layer_with_a_name_that_is_taken_stays_in_float():
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4), Taken(4, 4)), recipes.int8())
    assert fq.summary(model).floats == {"1": "it has an attribute `output_quantizer` of its own"}
    assert type(model[1]) is Taken


@pytest.mark.parametrize(
    "model", [None, [nn.Linear(2, 2)], nn.Linear, torch.relu], ids=["None", "list", "class", "function"]
)
def test_what_is_no_module_is_a_type_error(model):
    with pytest.raises(TypeError, match="`model` must be"):
        fq.prepare(model, recipes.int8())


# --- layers that stay in float ------------------------------------------------------------------------


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


FLOATS = {
    "max_norm": lambda: nn.Embedding(4, 4, max_norm=1.0),
    "sparse": lambda: nn.EmbeddingBag(4, 4, sparse=True),
    "own forward": lambda: OwnForward(4, 4),
    "Bilinear": lambda: nn.Bilinear(4, 4, 4),
    "LSTM": lambda: nn.LSTM(4, 4),
    "GRUCell": lambda: nn.GRUCell(4, 4),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "BatchNorm": lambda: nn.BatchNorm1d(4),
}


@pytest.mark.parametrize("make", FLOATS.values(), ids=FLOATS)
def test_what_cannot_be_quantized_stays_exactly_as_it_was(make):
    layer = make()
    model = nn.ModuleDict({"other": layer, "fc": nn.Linear(4, 4)})
    before = picture(layer)
    fq.prepare(model, recipes.int8())
    assert picture(layer) == before


# --- parametrized layers ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "norm",
    [parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal],
    ids=lambda f: f.__name__,
)
@each_recipe
def test_preparing_does_not_change_what_a_parametrization_remembers(norm, config):
    torch.manual_seed(0)
    model = nn.Sequential(norm(nn.Linear(4, 4)))
    before = copy.deepcopy(model.state_dict())
    fq.prepare(model, config)
    same_state(before, {n: v for n, v in model.state_dict().items() if "quantizer" not in n})
    fq.unprepare(model)
    same_state(before, model.state_dict())


@pytest.mark.parametrize("training", [True, False])
def test_quantizers_are_in_the_mode_of_the_model(training):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.fc(x) + self.norm(x)

    model = fq.prepare(Sum().train(training), recipes.int8())
    modes = {path: quantizer.training for path, quantizer in fqnn.quantizers(model)}
    assert {"fc.output_quantizer", "norm.output_quantizer"} <= modes.keys()
    assert set(modes.values()) == {training}
