"""Quantized results of functions in converted models, files and ONNX Runtime."""

import copy
import pickle

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits
from function_cases import X86, Attention, Borrowed, F, Fused, batch, nn, prepared, torch
from thoroughness import ALL

CASES = {
    "attention": lambda: prepared(),
    "fused attention": lambda: prepared(Fused, attention=True),
    "weights that other code uses": lambda: prepared(Borrowed),
    "generic": lambda: prepared(target="generic"),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def model(request):
    return request.param()


def test_the_golden_model_has_the_codes_of_the_prepared_model(model):
    with torch.no_grad():
        expected, found = model(batch(2)), fq.convert(model)(batch(2))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # the sums of the last layer


def test_a_converted_model_can_be_saved_and_loaded(model, tmp_path):
    golden = fq.convert(model)
    fq.save_converted(golden, tmp_path / "model.safetensors")
    torch.manual_seed(1)
    floating = fq.unprepare(model)
    for p in floating.parameters():
        nn.init.normal_(p)
    loaded = fq.load_converted(floating, tmp_path / "model.safetensors")
    assert_same_bits(loaded(batch(2)), golden(batch(2)))


def test_the_runtime_computes_what_was_prepared(model, tmp_path):
    pytest.importorskip("onnxruntime")
    is_generic = fq._prepare.prepare.preparation(model).config.target == "generic"
    if is_generic and not ALL:
        pytest.skip("slow; `make test-all` runs it")
    fq.export_onnx(model, tmp_path / "model.onnx", batch())
    if is_generic:
        return  # 8-bit weights saturate on some CPUs
    found = fq.verify(model, tmp_path / "model.onnx", [batch(2), batch(3)])
    assert found.ok, str(found)
    assert found.floats == {}
    assert sum(tensor.runtime_differ for tensor in found.tensors) == 0


# --- weights that other code uses -----------------------------------------------------------------


def test_a_weight_that_other_code_uses_is_quantized_by_its_layer():
    model, x = prepared(Borrowed), batch(2)
    block = model[0]
    layers = block.function_quantizers.layers
    names = {"linear_0": "plain", "linear_1": "own_bias", "linear_2": "other_bias", "conv1d_0": "conv"}
    assert layers == {key: getattr(block, name) for key, name in names.items()}
    y = block.plain(x).tanh()
    y = block.own_bias(y).tanh()
    y = (block.other_bias(y) + block.bias).tanh()
    assert_same_bits(block(x), block.conv(y))
    found = fq.summary(model)
    assert found.multiplications == found.quantized_multiplications > 0


class ReadsWeights(nn.Module):
    """Reads the weight of a layer before it calls a function that is quantized."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        x = x.to(self.a.weight.dtype)
        y = torch.tanh(self.a(x)) * self.b(x)
        return F.linear(y * self.b(x), self.c.weight, self.c.bias)


def test_reading_a_weight_of_a_converted_layer_does_not_count_as_a_call():
    model = prepared(ReadsWeights)
    assert "0.function_quantizers.mul_0" in dict(fq.nn.named_quantizers(model))
    golden = fq.convert(model)
    torch.testing.assert_close(golden(batch(2)), model(batch(2)).detach(), rtol=0, atol=1e-5)  # sums in another order


class AlsoCalled(nn.Module):
    """Calls a layer, and multiplies by its weight, in a list of arguments too."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return F.linear(self.a(x), self.a.weight) + torch.stack([self.a.weight, self.a.weight + 1]).sum()


class OtherBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return F.linear(self.a(x), self.b.weight, self.a.bias)


def test_functions_that_read_the_weight_of_a_layer_get_it_quantized(tmp_path):
    torch.manual_seed(0)
    config = fq.recipes.w4a8(target=X86)
    model = fq.calibrate(fq.prepare(AlsoCalled(), config, batch()), [batch()], progress=False).eval()
    weight = model.a.weight_quantizer(model.a.weight)
    expected = F.linear(model.a(batch()), weight) + torch.stack([weight, weight + 1]).sum()
    assert_same_bits(model(batch()), expected)
    again = fq.prepare(AlsoCalled(), config, batch())
    again.load_state_dict(model.state_dict())
    for other in (again.eval(), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(other(batch()), expected)
    model.zero_grad()
    model(batch()).sum().backward()
    assert model.a.weight.grad.abs().max() > 0
    fq.export_onnx(model, tmp_path / "model.onnx", batch())
    assert fq.verify(model, tmp_path / "model.onnx", [batch(1)]).ok


class NormBetween(nn.Module):
    """Calls a layer with a batch norm behind it, and a function with its weight and its bias."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.norm.weight.data.uniform_(0.5, 2)

    def forward(self, x):
        y = self.norm(self.a(x.mT))
        return F.conv1d(y, self.a.weight, self.a.bias)


def test_functions_that_read_weight_and_bias_of_a_layer_get_what_the_converted_layer_has():
    torch.manual_seed(0)
    x = 100 * batch()  # so that the bias is rounded to large steps
    model = fq.calibrate(fq.prepare(NormBetween(), fq.recipes.int8(), x), [x], progress=False).eval()
    golden = fq.convert(model)
    assert (model.a.bias - golden.a.bias).abs().max() > 1e-3
    torch.testing.assert_close(golden(x), model(x).detach(), rtol=0, atol=1e-4)  # sums in another order


def test_a_function_with_the_bias_of_another_layer_stays_in_float():
    torch.manual_seed(0)
    model = fq.prepare(OtherBias(), fq.recipes.int8(), batch()).eval()
    assert not hasattr(model, "function_quantizers")


# --- attention ------------------------------------------------------------------------------------

MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.tensor([[True, False, True], [False, False, False], [True, True, True]])},
    "float": {"attn_mask": torch.tensor([[0.0, -1.0, 2.0], [0.0, -torch.inf, 1.0], [-torch.inf] * 3])},
    "scale": {"scale": 0.7},
    "key heads": {"enable_gqa": True},
}


@pytest.mark.parametrize("options", MASKS.values(), ids=MASKS)
def test_attention_as_two_products_is_torchs_attention(options):
    attention = pytest.importorskip("fakequant.nn._attention").scaled_dot_product_attention
    generator = torch.Generator().manual_seed(0)
    heads = (4, 2 if "enable_gqa" in options else 4)
    q, k, v = (torch.randn(2, heads[n > 0], 3, 8, generator=generator, dtype=torch.float64) for n in range(3))
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    found = attention(q, k, v, quantize=lambda weights: weights, **options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)  # another order of operations


def test_attention_stays_one_operator_by_default():
    paths = [path for path, _ in fq.nn.named_quantizers(prepared(Fused))]
    assert not any("output_quantizer" in path or "function_quantizers" in path for path in paths)
    paths = [path for path, _ in fq.nn.named_quantizers(prepared(Fused, attention=True))]
    assert "0.function_quantizers.scaled_dot_product_attention_0_weights" in paths
    assert "0.query.output_quantizer" in paths


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_quantizes_its_attention_weights(need_weights):
    torch.manual_seed(0)
    config = fq.QuantConfig(**{**vars(fq.recipes.int8()), "attention": True})
    model = fq.prepare(nn.MultiheadAttention(8, 2, batch_first=True), config, (batch(), batch(), batch())).eval()
    seen = []
    model.attention_quantizer.register_forward_hook(lambda module, args, y: seen.append(y))
    fq.calibrate(model, lambda m: m(batch(), batch(), batch(), need_weights=need_weights), progress=False)
    model(batch(), batch(), batch(), need_weights=need_weights)
    scale = model.attention_quantizer.scale
    assert_same_bits(seen[-1], (seen[-1] / scale).round() * scale)
    assert not torch.equal(seen[-1], seen[0])


def test_products_of_two_results_are_summed_as_integers():
    golden = pytest.importorskip("fakequant._convert.golden.tracked_codes")
    spec = fq.presets.uint8()
    a, b = (golden.GridOf(torch.tensor(s), torch.tensor(z, dtype=torch.int32), spec) for s, z in ((0.1, 3), (0.7, 200)))
    generator = torch.Generator().manual_seed(0)
    codes = [torch.randint(0, 256, (2, 300, 300), generator=generator) for _ in "ab"]
    x, y = (golden.on_grid((c - g.zero_point) * g.scale, g) for c, g in zip(codes, (a, b), strict=True))
    product = x @ y
    exact = (codes[0] - 3).double() @ (codes[1] - 200).double()
    assert exact.abs().max() > 2**20
    assert_same_bits(golden.origin_of(product).sums.double(), exact)
    assert_same_bits(golden.plain(product), exact.float() * (a.scale * b.scale))


def test_a_module_without_function_quantizers_keeps_its_class():
    config = fq.QuantConfig(**{**vars(fq.recipes.int8()), "operands": None})
    model = fq.prepare(nn.Sequential(Attention()), config, batch())
    assert type(model[0]) is Attention
