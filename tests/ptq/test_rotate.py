"""`rotate`: the function of the model stays the same, inputs lose their outliers, and other models are refused."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config
from transformers.models.gemma2 import Gemma2Config

import fakequant as fq
from fakequant.ptq._orthogonal import hadamard, orthogonal
from fakequant.testing.assertions import assert_same_model
from ptq_models import randn

SIZES = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TOKENS = {"input_ids": torch.arange(40).reshape(2, 20), "use_cache": False}


class Block(nn.Module):
    """Attention with fused projections, and an MLP, after layer norms."""

    def __init__(self, width=12):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 20, bias=False), nn.Linear(20, width)
        self.one, self.two = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.one(y) + self.two(y)  # two writers at once, which are readers too
        x += self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.position = nn.Embedding(40, 12), nn.Parameter(randn(20, 12))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids):
        x = self.embedding(input_ids) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def scramble(model):
    """Gives norms weights and biases, and channels of the stream outliers, in float64."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight[:, 5] *= 30
    return model.double().eval()


class Norm(nn.RMSNorm):
    """The norms of transformers compute in float32, so they are replaced in models of float64."""


def language_model(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if "Gemma" not in type(model).__name__:
        for module in list(model.modules()):
            for name, child in module.named_children():
                if type(child).__name__.endswith("RMSNorm"):
                    setattr(module, name, Norm(len(child.weight), child.variance_epsilon))
    return scramble(model)


MODELS = {
    "llama": lambda: language_model(LlamaConfig(**SIZES, tie_word_embeddings=False)),
    "tied llama": lambda: language_model(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "mistral": lambda: language_model(MistralConfig(**SIZES)),
    "qwen2": lambda: language_model(Qwen2Config(**SIZES)),
    "qwen3": lambda: language_model(Qwen3Config(**SIZES)),
    "gpt2": lambda: language_model(GPT2Config(vocab_size=50, n_embd=24, n_layer=2, n_head=4)),
    "layer norms": lambda: scramble(Tokens()),
}


def run(model):
    with torch.no_grad():
        found = model(**TOKENS) if hasattr(model, "config") else model(TOKENS["input_ids"])
    return getattr(found, "logits", found)


def example(model):
    return TOKENS if hasattr(model, "config") else TOKENS["input_ids"]


@pytest.mark.parametrize("name", MODELS)
def test_the_function_stays_the_same_and_inputs_lose_their_outliers(name):
    model = MODELS[name]()
    expected = run(model)
    changes = fq.ptq.rotate(model, example(model))
    found = run(model)
    assert float((found - expected).norm() / expected.norm()) < 1e-10
    rows = {row.path: row for row in changes.layers}
    after_norm = [path for path in rows if path.endswith(("q_proj", "gate_proj", "c_attn", "c_fc", "up", "one"))]
    assert len(after_norm) >= 4
    assert sum(rows[path].after for path in after_norm) < 0.8 * sum(rows[path].before for path in after_norm)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other), found)


@pytest.mark.parametrize("options", [{"residual": False}, {"heads": False}, {"seed": 3}])
def test_parts_can_be_rotated_alone(options):
    model = MODELS["llama"]()
    before, expected = copy.deepcopy(model.state_dict()), run(model)
    fq.ptq.rotate(model, TOKENS, **options)
    assert float((run(model) - expected).norm() / expected.norm()) < 1e-10
    same = [name for name, tensor in model.state_dict().items() if torch.equal(tensor, before[name])]
    assert ("model.embed_tokens.weight" in same) is ("residual" in options)
    layer = model.model.layers[0]
    assert torch.equal(layer.input_layernorm.weight, torch.ones(24)) is ("residual" not in options)


def test_tied_embeddings_are_untied_and_stay_so(tmp_path):
    model = MODELS["tied llama"]()
    changes = fq.ptq.rotate(model, TOKENS)
    assert "lm_head no longer shares its weight" in changes.note
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    torch.testing.assert_close(run(loaded), run(model))


def test_the_rotated_model_is_prepared_and_smoothed():
    model = MODELS["llama"]().float()
    fq.ptq.rotate(model, TOKENS)
    expected = run(model)
    prepared = fq.calibrate(fq.prepare(model, fq.recipes.int8(), TOKENS), [TOKENS], progress=False)
    assert fq.ptq.smooth(prepared, [TOKENS], progress=False).changed
    torch.testing.assert_close(run(fq.unprepare(prepared)), expected, rtol=1e-3, atol=1e-4)


class PostNorm(nn.Module):
    """The norm comes after the addition, as in BERT."""

    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(40, 12), nn.Linear(12, 20), nn.Linear(20, 12)
        self.norms, self.head = nn.ModuleList(nn.LayerNorm(12) for _ in range(2)), nn.Linear(12, 4)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        for norm in self.norms:
            x = norm(x + self.down(self.up(x).relu()))
        return self.head(x)


class Reads(Tokens):
    """Other code reads the residual stream."""

    def forward(self, input_ids):
        return super().forward(input_ids) + self.embedding(input_ids)[..., :1]


REFUSED = {
    "post-norm": (lambda: PostNorm().double().eval(), "not known between norms.0 and norms.1"),
    "gemma2": (lambda: language_model(Gemma2Config(**SIZES)), "not known between"),
    "reads": (lambda: scramble(Reads()), "would compute something else"),
    "no norm": (lambda: nn.Sequential(nn.Embedding(40, 4), nn.Linear(4, 4)).double(), "no residual stream"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_models_are_refused_and_unchanged(name):
    make, reason = REFUSED[name]
    model = make()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=reason):
        fq.ptq.rotate(model, example(model))
    assert_same_model(before, model)
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    assert len({id(p) for p in model.parameters()}) == len({id(p) for p in before.parameters()})


class Small(nn.Module):
    """A block without attention. A negative `shift` keeps it silent on most inputs."""

    def __init__(self, width=16, shift=0.0):
        super().__init__()
        self.norm, self.up = nn.RMSNorm(width), nn.Linear(width, 2 * width, bias=False)
        self.down, self.shift = nn.Linear(2 * width, width, bias=False), shift

    def forward(self, x):
        return x + self.down((self.up(self.norm(x)) + self.shift).relu())


class Blocks(nn.Module):
    """A residual stream of 16 channels, and parts that `forward` uses if it is told to."""

    def __init__(self, *blocks):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.kinds = nn.Embedding(40, 16), nn.Embedding(2, 16)
        self.blocks = nn.Sequential(*(make() for make in blocks))
        self.norm, self.head = nn.RMSNorm(16), nn.Linear(16, 16, bias=False)
        self.scale = nn.Parameter(torch.linspace(1, 2, 16))

    def forward(self, input_ids, kinds=None, scaled=False):
        x = self.embedding(input_ids)
        y = self.head(self.norm(self.blocks(x if kinds is None else x + self.kinds(kinds))))
        return y * self.scale if scaled else y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_16_bits_are_rotated_in_float32_and_rounded_once(dtype):
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES | {"num_hidden_layers": 4}, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    assert model.model.layers[3].mlp.down_proj.weight.std() < 0.03  # blocks add little to the stream
    parameters = dict(model.named_parameters())
    precise = copy.deepcopy(model).float()
    changes = [fq.ptq.rotate(m, TOKENS) for m in (model, precise)]
    assert changes[0].layers == changes[1].layers
    assert all(p is parameters[name] for name, p in model.named_parameters() if name != "lm_head.weight")
    assert_same_model(precise.to(dtype), model)


def test_new_parameters_and_inputs_of_16_bits():
    model, precise = (scramble(Tokens()).to(torch.bfloat16) for _ in range(2))
    precise.float()
    for other in (model, precise):
        fq.ptq.rotate(other, TOKENS["input_ids"])
    assert_same_model(precise.to(torch.bfloat16), model)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_blocks_of_zeros_are_rotated():
    model = Blocks(Small, Small, Small)
    del model.kinds, model.scale
    nn.init.zeros_(model.blocks[1].down.weight)  # so that two norms of the same weight read the same
    model.double()
    expected = run(model)
    fq.ptq.rotate(model, TOKENS["input_ids"])
    torch.testing.assert_close(run(model), expected, rtol=1e-10, atol=1e-10)


class Two(Tokens):
    def __init__(self):
        super().__init__()
        self.flipped = nn.Embedding(40, 12)
        self.flipped.weight = self.embedding.weight

    def forward(self, input_ids):
        x = self.embedding(input_ids) + self.position + self.flipped(input_ids.flip(-1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_embeddings_that_share_a_weight_are_rotated_once():
    model = scramble(Two())
    expected = run(model)
    fq.ptq.rotate(model, TOKENS["input_ids"])
    torch.testing.assert_close(run(model), expected, rtol=1e-10, atol=1e-10)
    assert model.flipped.weight is model.embedding.weight


class Part(Small):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(4, 32)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(self.up(y) + self.part(y[..., :4]))


class Tied(Blocks):
    """An embedding that the example does not use has the weight of the output layer."""

    def __init__(self):
        super().__init__(Small, Small)
        self.kinds = nn.Embedding(16, 16)
        self.head.weight = self.kinds.weight

    def forward(self, input_ids):
        return super().forward(input_ids, scaled=True)


UNKNOWN = {
    "not called": (lambda: Blocks(Small, Small), {}, r"does not reach scale, kinds.weight"),
    "tied": (Tied, {}, r"does not reach kinds.weight"),
    "not read": (lambda: Blocks(Small, Small), {"kinds": torch.ones(2, 20, dtype=torch.long)}, "does not reach scale,"),
    "silent": (
        lambda: Blocks(Small, lambda: Small(shift=-100), Small),
        {"kinds": torch.ones(2, 20, dtype=torch.long), "scaled": True},
        r"The outputs of blocks.1.down are 0 on the example",
    ),
    "part": (
        lambda: Blocks(Small, Part),
        {"kinds": torch.ones(2, 20, dtype=torch.long), "scaled": True},
        "blocks.1.part reads 4 of the 16 channels of blocks.1.norm",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_the_example_does_not_show_is_refused(name):
    make, more, reason = UNKNOWN[name]
    model = make().double()
    before = copy.deepcopy(model)
    with pytest.raises(ValueError, match=reason):
        fq.ptq.rotate(model, {"input_ids": TOKENS["input_ids"], **more})
    assert_same_model(before, model)


def test_the_note_says_that_checkpoints_cannot_hold_a_model_of_other_norms():
    assert "from_pretrained cannot load it" in fq.ptq.rotate(MODELS["gpt2"](), TOKENS).note
    assert "from_pretrained" not in fq.ptq.rotate(MODELS["qwen2"](), TOKENS).note


def test_wrong_arguments():
    model = MODELS["layer norms"]()
    with pytest.raises(TypeError, match="`heads` must be True or False"):
        fq.ptq.rotate(model, TOKENS["input_ids"], heads=1)
    with pytest.raises(TypeError, match="`seed` must be an integer"):
        fq.ptq.rotate(model, TOKENS["input_ids"], seed=0.5)
    with pytest.raises(ValueError, match="Nothing to rotate"):
        fq.ptq.rotate(model, TOKENS["input_ids"], residual=False, heads=False)
    with pytest.raises(ValueError, match="No attention of the model has linear layers `v_proj`"):
        fq.ptq.rotate(model, TOKENS["input_ids"], residual=False)
    fq.prepare(model, fq.recipes.int4_weight_only(4), TOKENS["input_ids"])
    with pytest.raises(ValueError, match="is prepared already"):
        fq.ptq.rotate(model, TOKENS["input_ids"])


@pytest.mark.parametrize("size", [1, 2, 12, 20, 24, 28, 36, 96, 896, 1536])
def test_hadamard_matrices_have_orthogonal_rows_of_ones(size):
    found = hadamard(size)
    assert found.abs().eq(1).all()
    assert torch.equal(found @ found.t(), size * torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("size", [3, 12, 52])
def test_other_sizes_are_random_and_orthogonal(size):
    assert (hadamard(size) is None) is (size != 12)
    q = orthogonal(size, 1)
    torch.testing.assert_close(q @ q.t(), torch.eye(size, dtype=torch.float64))
    assert torch.equal(q, orthogonal(size, 1))
    assert not torch.equal(q, orthogonal(size, 2))
