"""Prepared attention and encoder layers match torch's, and no fast path bypasses their quantizers."""

import copy
import dataclasses

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits
from prepare_cases import INT8, off, randn

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")
tensors = pytest.importorskip("fakequant._backends.torch.tensor_functions")

# --- attention --------------------------------------------------------------------------------------

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
# torch adds masks inside the product and in another axis order: sums of at most 16 products of values near one.
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
        torch.testing.assert_close(
            actual[2][name], value, msg=name, rtol=1e-4, atol=1e-5
        )  # gradients are sums over all tokens


def attention(batch_first=True, **options):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, batch_first=batch_first, **options)
    nn.init.normal_(layer.in_proj_bias) if layer.in_proj_bias is not None else None
    return layer


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("weights", ["none", "mean", "heads"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_self_attention_with_quantizers_off_matches_torch(options, batch_first, weights, training):
    options = {**options, "need_weights": weights != "none", "average_attn_weights": weights == "mean"}
    floats = attention(batch_first).train(training)
    layer = off(fq.prepare(copy.deepcopy(floats), recipes.int8(), (Q, Q, Q))).train(training)
    expected, actual = (run_attention(m, "self", batch_first, options) for m in (floats, layer))
    close(expected, actual)


@pytest.mark.parametrize("kind", ["cross", "memory"])
@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_cross_attention_with_quantizers_off_matches_torch(kind, batch_first, need_weights, bias):
    floats = attention(batch_first, bias=bias)
    layer = off(fq.prepare(copy.deepcopy(floats), recipes.int8(), (Q, Q, Q)))
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 4:] = True
    options = dict(need_weights=need_weights, key_padding_mask=padding)
    close(*(run_attention(m, kind, batch_first, options) for m in (floats, layer)))


@pytest.mark.parametrize("batch_first", [True, False], ids=["batch first", "batch second"])
@pytest.mark.parametrize("average", [True, False], ids=["mean", "heads"])
@pytest.mark.parametrize("mask", [None, CAUSAL, FLOAT3[:4]], ids=["no mask", "mask", "3-d mask"])
@pytest.mark.parametrize("padding", [None, PADDING[1]], ids=["all", "padding"])
def test_unbatched_attention_with_quantizers_off_matches_torch(batch_first, average, mask, padding):
    floats = attention(batch_first)
    layer = off(fq.prepare(copy.deepcopy(floats), recipes.int8(), (Q[0], Q[0], Q[0])))
    x = Q[0]
    if padding is not None and mask is not None:
        padding = torch.zeros(5).masked_fill(padding, -torch.inf)
    options = dict(attn_mask=mask, key_padding_mask=padding, average_attn_weights=average)
    for expected, actual in zip(floats(x, x, x, **options), layer(x, x, x, **options), strict=True):
        assert expected.shape == actual.shape
        torch.testing.assert_close(actual, expected, **CLOSE)


def test_attention_dropout_matches_torch():
    floats = attention(dropout=0.5)
    layer = off(fq.prepare(copy.deepcopy(floats), recipes.int8(), (Q, Q, Q)))
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
def test_attention_refuses_the_masks_that_torch_refuses(options):
    for module in (attention(), off(fq.prepare(attention(), recipes.int8(), (Q, Q, Q)))):
        with pytest.raises((RuntimeError, AssertionError, ValueError, TypeError)):
            module(Q, Q, Q, **options)


@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
def test_attention_computes_with_quantized_tensors(kind, need_weights):
    layer = fq.prepare(attention(), dataclasses.replace(recipes.int8(), sums="float"), (Q, Q, Q))
    inputs = (Q, Q, Q) if kind == "self" else (Q, K, V)
    fq.calibrate(layer, lambda m: m(*inputs, need_weights=need_weights), progress=False)
    fqnn.switch_quantizers(layer, frozen=True)  # evaluation would also round biases
    assert {path for path, _ in fqnn.named_quantizers(layer)} == {
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
    assert_same_bits(y, actual)
    if need_weights:
        assert_same_bits(weights.mean(1), actual_weights)
    y.square().sum().backward()
    actual.square().sum().backward()
    for name, parameter in plain.named_parameters():
        assert_same_bits(parameter.grad, layer.get_parameter(name).grad, name)


@pytest.mark.parametrize("need_weights", [True, False], ids=["weights", "no weights"])
def test_attention_in_evaluation_without_gradients_is_quantized(need_weights):
    layer = fq.prepare(attention(), recipes.int8(), (Q, Q, Q))
    fq.calibrate(layer, lambda m: m(Q, Q, Q), progress=False)
    layer.eval()
    with_gradients = layer(Q, Q, Q, need_weights=need_weights)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert_same_bits(with_gradients[0], layer(Q, Q, Q, need_weights=need_weights)[0])
    assert_same_bits(with_gradients[0], layer.requires_grad_(False)(Q, Q, Q, need_weights=need_weights)[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.MultiheadAttention(16, 4, kdim=8, vdim=8),
        lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True),
        lambda: nn.MultiheadAttention(16, 4, add_zero_attn=True),
    ],
    ids=["kdim", "bias_kv", "zero_attn"],
)
def test_unsupported_attention_has_no_unused_quantizers(make):
    model = fq.prepare(nn.ModuleDict({"a": make(), "fc": nn.Linear(4, 4)}), INT8)
    assert [path for path, _ in fqnn.named_quantizers(model)] == ["fc.weight_quantizer", "fc.input_quantizer"]


def test_skipped_attention_has_no_unused_quantizers():
    model = fq.prepare(
        nn.ModuleDict({"a": attention(), "fc": nn.Linear(4, 4)}),
        INT8.skip(type="MultiheadAttention"),
    )
    assert [path for path, _ in fqnn.named_quantizers(model)] == ["fc.weight_quantizer", "fc.input_quantizer"]


# --- encoder layers ---------------------------------------------------------------------------------


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
def test_encoder_layer_with_quantizers_off_matches_torch(norm_first, activation, options, training):
    floats = encoder_layer(norm_first=norm_first, activation=activation).train(training)
    layer = off(fq.prepare(copy.deepcopy(floats), recipes.int8(), Q)).train(training)
    torch.testing.assert_close(layer(Q, **options), floats(Q, **options), **CLOSE)


ENCODERS = {
    "layer": (encoder_layer, recipes.int8()),
    "norm first": (lambda: encoder_layer(norm_first=True), recipes.int8()),
    "stack": (encoder, recipes.int8()),
    "layer is skipped": (encoder_layer, recipes.int8().skip(type="TransformerEncoderLayer")),
    "stack of skipped layers": (encoder, recipes.int8().skip(type="TransformerEncoderLayer")),
    "overridden forward": (lambda: encoder_layer(OwnEncoderLayer), recipes.int8()),
}


@pytest.mark.parametrize(("make", "config"), ENCODERS.values(), ids=ENCODERS)
@pytest.mark.parametrize("padding", [None, PADDING], ids=["all", "padding"])
def test_encoder_fast_path_does_not_bypass_quantizers(make, config, padding):
    model = fq.prepare(make(), config, Q)
    fq.calibrate(model, lambda m: m(Q, src_key_padding_mask=padding), progress=False)
    model.eval()
    for path, quantizer in fqnn.named_quantizers(model):
        assert torch.isfinite(quantizer.scale).all(), f"{path} was not called"
    with_gradients = model(Q, src_key_padding_mask=padding)
    floats = fq.unprepare(copy.deepcopy(model))(Q, src_key_padding_mask=padding)
    kept = slice(None) if padding is None else ~padding
    assert not torch.equal(with_gradients[kept], floats[kept])
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert_same_bits(with_gradients[kept], model(Q, src_key_padding_mask=padding)[kept])


@pytest.mark.parametrize(
    "config",
    [fq.QuantConfig().rule(type="Linear", weight=presets.int8()), recipes.int8().skip(type="MultiheadAttention")],
    ids=["only linears", "attention is skipped"],
)
def test_encoder_fast_path_does_not_bypass_linear_layers_beside_float_attention(config):
    model = fq.calibrate(fq.prepare(encoder(), config, Q), [Q], progress=False).eval()
    called = []
    for path, quantizer in fqnn.named_quantizers(model):
        quantizer.register_forward_hook(lambda *_, path=path: called.append(path))
    with torch.no_grad():
        model(Q)
    assert sorted(called) == sorted(path for path, _ in fqnn.named_quantizers(model))


def test_unprepare_restores_the_encoder_fast_path():
    model = encoder()
    before = model.use_nested_tensor
    fq.unprepare(fq.prepare(model, recipes.int8(), Q))
    assert model.use_nested_tensor is before
    assert not [name for name in vars(model) if "fakequant" in name]


class AddsEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = encoder_layer()

    def forward(self, x):
        return x + self.layer(x)


def test_residual_encoder_layer_calls_every_quantizer():
    model = fq.prepare(AddsEncoder(), recipes.int8(), Q)
    fq.calibrate(model, [Q], progress=False)
    for path, quantizer in fqnn.named_quantizers(model):
        assert torch.isfinite(quantizer.scale).all(), f"{path} was not called"
