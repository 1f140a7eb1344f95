"""The recipe `gguf` and the target "llama.cpp": the block types of layers, copies, states and compiled quantizers."""

import copy
import dataclasses
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant import presets, recipes, reference_ggml
from fakequant.formats import GGML_TYPES, SUPER_BLOCKS
from fakequant.nn import FakeQuantize, LearnedFakeQuantize
from fakequant.observers._ranks import ALONE
from fakequant.testing.assertions import assert_same_bits
from thoroughness import ALL

TYPES = ("q4_0", "q4_1", "q8_0", "tq2_0", "mxfp4", "q4_k", "q6_k")
LEARNED = tuple(kind for kind in TYPES if kind != "mxfp4")
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
    weight = dataclasses.replace(getattr(presets, block_type)(), axis=1)
    rounded = presets.q8_0_input() if weight.group_size == 32 and block_type != "q4_k" else presets.q8_k_input()
    table = presets.q6_k() if block_type in SUPER_BLOCKS else presets.q8_0()
    for layer in (model.up, model.down):
        assert (layer.weight_quantizer.spec, layer.input_quantizer.spec) == (weight, rounded)
    assert model.lm_head.weight_quantizer.spec == model.embedding.weight_quantizer.spec
    assert model.lm_head.weight_quantizer.spec == dataclasses.replace(table, axis=1)
    assert model.lm_head.input_quantizer.spec == (rounded if block_type in SUPER_BLOCKS else presets.q8_0_input())
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


@pytest.mark.parametrize("name", [name for name in GGML_TYPES if name not in SUPER_BLOCKS])
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


# --- learned scales -------------------------------------------------------------------------------


@pytest.mark.parametrize("block_type", LEARNED)
def test_learned_scales_stay_the_same_in_copies_and_states(block_type):
    """After steps so large that scales leave their bounds and would change their sign."""
    model = prepared(block_type, learned=True)
    assert isinstance(model.up.weight_quantizer, LearnedFakeQuantize)
    assert isinstance(model.lm_head.weight_quantizer, FakeQuantize)
    before = model.up.weight_quantizer.scale.sign()
    optimizer = torch.optim.SGD(fq.nn.param_groups(model), lr=30.0)
    for _ in range(2):
        model(TOKENS).square().sum().backward()
        optimizer.step()
    with torch.no_grad():
        model.up.weight_quantizer.step_size.view(-1)[:3] = torch.tensor([torch.nan, 1e9, -1e9])
    quantizer = model.up.weight_quantizer
    quantizer(model.up.weight)
    bounds = quantizer.step_size.abs()
    assert bool(((bounds >= quantizer.eps) & (bounds <= quantizer._largest)).all())
    assert_same_bits(quantizer.step_size.sign().detach(), before)
    model.eval()
    y = model(TOKENS).detach()
    assert_same_bits(copy.deepcopy(model)(TOKENS), y)
    assert_same_bits(pickle.loads(pickle.dumps(model))(TOKENS), y)
    torch.manual_seed(1)
    other = fq.prepare(Tiny(), recipes.gguf(block_type, learned=True), TOKENS)
    other.load_state_dict(model.state_dict())
    assert_same_bits(other.eval()(TOKENS), y)
    assert_same_bits(other.up.weight_quantizer.step_size.sign().detach(), before)
    fq.nn.switch_quantizers(model, frozen=True)
    assert_same_bits(model(TOKENS), y)


@pytest.mark.parametrize("block_type", LEARNED)
def test_learned_scales_start_with_the_least_error(block_type):
    spec = getattr(presets, block_type)()
    x = torch.randn(8, 512, generator=torch.Generator().manual_seed(0))
    learned = LearnedFakeQuantize(spec, shape=(8, 512)).initialize(x)
    errors = [float((y - x).square().mean()) for y in (learned(x).detach(), fq.fake_quantize_dynamic(x, spec))]
    assert errors[0] <= errors[1]
    if block_type == "tq2_0":
        assert errors[0] < errors[1] / 3
    if block_type in ("q4_0", "q6_k"):  # the largest magnitude is on the side with one more code
        rows = x.unflatten(-1, (-1, spec.group_size))
        largest = rows.gather(-1, rows.abs().argmax(-1, keepdim=True)).squeeze(-1)
        assert_same_bits(learned.scale.sign(), -largest.sign())
        start = learned._start  # of which either rule may be the better one
        state = start.init(tuple(learned.scale.shape))
        start.update(state, x, ALONE)
        assert_same_bits(*start.scales(state).sign())


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("block_type", ["q4_0", "q4_k"])
def test_compiled_learned_scales_have_the_same_bits(block_type):
    torch._dynamo.reset()
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0))
    found = []
    for compiles in (False, True):
        quantizer = LearnedFakeQuantize(getattr(presets, block_type)(), shape=(4, 256)).initialize(x)
        with torch.no_grad():
            quantizer.step_size[0] *= -1  # beyond the bounds
        y = (torch.compile(quantizer, fullgraph=True, backend="aot_eager") if compiles else quantizer)(x * 2)
        y.square().sum().backward()
        found.append((y.detach(), *(p.grad for p in quantizer.parameters())))
    for eager, compiled in zip(*found, strict=True):
        assert_same_bits(compiled, eager)
    spec, leaves = quantizer.spec, [v.requires_grad_() for v in quantizer.qparams() if v.is_floating_point()]
    y = fq.fake_quantize_learned(x * 2, *leaves, *([0] if spec.symmetric else []), spec, grad_factor=None)
    y.square().sum().backward()
    for wanted, eager in zip((y.detach(), *(leaf.grad for leaf in leaves)), found[0], strict=True):
        assert_same_bits(eager, wanted)


def test_scales_that_are_not_learned_are_refused():
    with pytest.raises(ValueError, match="cannot be learned"):
        LearnedFakeQuantize(presets.q8_k_input(), shape=(4, 256))
    with pytest.raises(ValueError, match="powers of two"):
        recipes.gguf("mxfp4", learned=True)


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
