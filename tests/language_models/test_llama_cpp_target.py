"""The recipe `gguf` and the target "llama.cpp": the block types of layers, copies, states and compiled quantizers."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant import presets, recipes, reference_ggml
from fakequant.formats import GGML_TYPES
from fakequant.nn import FakeQuantize
from fakequant.testing.assertions import assert_same_bits
from thoroughness import ALL

TYPES = ("q4_0", "q4_1", "q8_0", "tq2_0", "mxfp4")
by_type = pytest.mark.parametrize("block_type", TYPES)
TOKENS = torch.arange(10).reshape(2, 5)


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 256)
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)
        self.lm_head = nn.Linear(256, 10, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.down(torch.relu(self.up(self.embedding(tokens)))))


def prepared(block_type, **options):
    torch.manual_seed(0)
    return fq.prepare(Tiny(), recipes.gguf(block_type, **options), TOKENS)


@by_type
def test_layers_have_the_types_of_the_recipe(block_type):
    model = prepared(block_type)
    weight = getattr(presets, block_type)(axis=1)
    rounded = presets.q8_k_input() if block_type == "tq2_0" else presets.q8_0_input()
    for layer in (model.up, model.down):
        assert (layer.weight_quantizer.spec, layer.input_quantizer.spec) == (weight, rounded)
    assert model.lm_head.weight_quantizer.spec == model.embedding.weight_quantizer.spec == presets.q8_0(axis=1)
    assert model.lm_head.input_quantizer.spec == presets.q8_0_input()
    assert prepared(block_type, activations=False).up.input_quantizer is None


@by_type
@pytest.mark.parametrize("activations", [True, False])
def test_outputs_stay_the_same_in_copies_states_and_frozen_models(block_type, activations):
    model = prepared(block_type, activations=activations)
    y = model(TOKENS)
    y.square().sum().backward()
    assert all(bool(p.grad.isfinite().all() & p.grad.any()) for p in model.parameters())
    evaluated = copy.deepcopy(model).eval()
    assert_same_bits(evaluated(TOKENS), y.detach())
    assert_same_bits(pickle.loads(pickle.dumps(model)).eval()(TOKENS), y.detach())
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    torch.manual_seed(1)
    other = fq.prepare(Tiny(), recipes.gguf(block_type, activations=activations), TOKENS)
    other.load_state_dict(torch.load(file))
    assert_same_bits(other.eval()(TOKENS), y.detach())
    fq.nn.switch_quantizers(evaluated, frozen=True)
    assert_same_bits(evaluated(TOKENS), y.detach())


@pytest.mark.parametrize("name", GGML_TYPES)
def test_compiled_quantizers_have_the_same_bits(name):
    torch._dynamo.reset()
    quantizer = FakeQuantize(getattr(presets, name)(), shape=(4, 256)).eval()
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    y = quantizer(x)
    options = {"fullgraph": True, "backend": "inductor" if ALL or name == "q8_0_input" else "aot_eager"}
    assert_same_bits(torch.compile(quantizer, **options)(x), y)
    assert_same_bits(torch.compile(lambda x: fq.fake_quantize_dynamic(x, quantizer.spec), **options)(x), y)


def test_rows_that_are_not_whole_blocks_stay_in_float():
    model = nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 256), nn.Linear(256, 8))
    with pytest.warns(UserWarning, match="stay in float"):
        found = fq.prepare(copy.deepcopy(model), recipes.gguf("tq2_0"), torch.ones(1, 40))
    assert [hasattr(layer, "weight_quantizer") for layer in found] == [False, False, True]
    for block_type, divisor in (("q4_0", "does not divide"), ("mxfp4", "not divisible by blocks of 32")):
        with pytest.warns(UserWarning, match=divisor):
            found = fq.prepare(copy.deepcopy(model), recipes.gguf(block_type), torch.ones(1, 40))
        assert [hasattr(layer, "weight_quantizer") for layer in found] == [False, True, True]


def test_tied_heads_share_the_grid_of_the_embedding():
    model = Tiny()
    model.lm_head.weight = model.embedding.weight
    model = fq.prepare(model, recipes.gguf("q4_0"), TOKENS)
    weights = [layer.weight_quantizer(layer.weight) for layer in (model.lm_head, model.embedding)]
    assert_same_bits(weights[0].detach(), weights[1].detach())


@pytest.mark.parametrize(("weight", "rounded", "why"), [
    (presets.int4(), None, "no block type of ggml"),
    (presets.q4_0(axis=0), None, "along the outputs"),
    (presets.q4_0(), presets.q8_0(), "not how kernels round inputs"),
])  # fmt: skip
def test_other_specs_are_refused(weight, rounded, why):
    config = fq.QuantConfig(default=fq.LayerConfig(weight=weight, input=rounded), target="llama.cpp")
    with pytest.raises(ValueError, match=why):
        fq.prepare(nn.Sequential(nn.Linear(64, 64)), config, torch.ones(1, 64))


@pytest.mark.parametrize("name", GGML_TYPES)
def test_quantizers_follow_every_tensor(name):
    spec = getattr(presets, name)()
    quantizer = FakeQuantize(spec, shape=(4, 256))
    for seed in range(2):
        x = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        y = quantizer(x)
        y.sum().backward()
        wanted = reference_ggml.fake_quantize_blocks(x.detach().numpy(), spec)
        assert_same_bits(y.detach(), wanted.y)
        assert_same_bits(quantizer.scale, wanted.scale)
        assert_same_bits(x.grad, np.ones((4, 256), np.float32))
    assert quantizer.zero_point.dtype == (torch.float32 if spec.has_offset else torch.int32)


def test_learned_scales_are_refused():
    with pytest.raises(ValueError, match="cannot be learned"):
        fq.nn.LearnedFakeQuantize(presets.q4_0(), shape=(4, 32))
    with pytest.raises(ValueError, match="cannot be learned"):
        fq.fake_quantize_learned(np.ones((1, 32), np.float32), np.ones((1, 1), np.float32), 0, presets.q4_0())


def test_a_spec_of_ggml_has_the_fields_of_its_type():
    with pytest.raises(ValueError, match=r"bits=4, got 8.\nUse fakequant.presets.q4_0\(\)"):
        fq.QuantSpec(scale_rule="q4_0", scale_format="float16", axis=-1, group_size=32)
    with pytest.raises(ValueError, match="does not divide"):
        fq.fake_quantize_dynamic(np.ones(40, np.float32), presets.q4_0())
    with pytest.raises(ValueError, match="must be finite, got nan"):
        fq.fake_quantize(np.ones((1, 32), np.float32), np.float32([[np.nan]]), 0, presets.q4_0())


def test_other_targets_and_converted_models_have_no_such_grids():
    for target in ("generic", "onnxruntime-x86", "compressed-tensors"):
        with pytest.raises(ValueError, match="no block types of ggml"):
            fq.prepare(nn.Sequential(nn.Linear(32, 8)), recipes.gguf(target=target), torch.ones(1, 32))
    with pytest.raises(ValueError, match="export_gguf"):
        fq.convert(prepared("q4_0"))
    with pytest.raises(ValueError, match="needs no codes"):
        fq.encode_scales(np.ones(1, np.float32), presets.q4_0())
