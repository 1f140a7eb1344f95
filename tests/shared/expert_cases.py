"""A class of experts, a model with them, and configs for both."""

import pytest

import fakequant as fq
from fakequant import presets
from prepare_cases import randn

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")

EXPERTS, WIDTH, INNER, TOP_K = 4, 8, 6, 2
X86 = recipes.int8(target="onnxruntime-x86")


class Experts(nn.Module):
    """A class with the attributes of `fakequant.nn.kinds.Experts`. It computes one expert after the other."""

    def __init__(self, *, has_gate=True, has_bias=False, is_transposed=False):
        super().__init__()
        self.num_experts = EXPERTS
        self.has_gate, self.has_bias, self.is_transposed = has_gate, has_bias, is_transposed
        self.first = "gate_up_proj" if has_gate else "up_proj"
        for name, (outputs, inputs) in {
            self.first: ((2 if has_gate else 1) * INNER, WIDTH), "down_proj": (WIDTH, INNER),
        }.items():  # fmt: skip
            weight = 0.3 * torch.randn(EXPERTS, outputs, inputs)
            weight = weight.transpose(1, 2).contiguous() if is_transposed else weight
            self.register_parameter(name, nn.Parameter(weight))
            if has_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(0.3 * torch.randn(EXPERTS, outputs)))
        self.act_fn = nn.SiLU() if has_gate else nn.ReLU()

    def _apply_gate(self, y):
        gate, up = y.chunk(2, -1)
        return self.act_fn(gate) * up

    def multiply(self, x, name, expert):
        weight = self.get_parameter(name)[expert]
        y = x @ (weight if self.is_transposed else weight.T)
        return y + self.get_parameter(f"{name}_bias")[expert] if self.has_bias else y

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[-1])
        for expert in range(self.num_experts):
            tokens, places = torch.where(top_k_index == expert)
            z = self.multiply(hidden_states[tokens], self.first, expert)
            z = self.multiply(self._apply_gate(z) if self.has_gate else self.act_fn(z), "down_proj", expert)
            y = y.index_put((tokens, places), z * top_k_weights[tokens, places, None])
        return y.sum(1)


fqnn.register_layer_kind(Experts)(fqnn.kinds.Experts)


class Mixture(nn.Module):
    """A router, experts and a layer after them. With `idle`, one expert is never chosen."""

    def __init__(self, idle=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts, self.head = nn.Linear(WIDTH, EXPERTS), Experts(**options), nn.Linear(WIDTH, 3)
        self.idle = idle

    def forward(self, x):
        scores = self.router(x)
        if self.idle is not None:
            scores = scores - 1000 * F.one_hot(torch.tensor(self.idle), EXPERTS)
        weights, index = torch.topk(torch.softmax(scores, -1), TOP_K)
        return self.head(self.experts(x, index, weights))


LAYERS = {
    "gate": {},
    "no gate": {"has_gate": False},
    "gate, bias, transposed": {"has_bias": True, "is_transposed": True},
    "no gate, bias": {"has_gate": False, "has_bias": True},
}
each_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
CONFIGS = {
    "int8": recipes.int8(),
    "int8 for x86": X86,
    "int8_dynamic": recipes.int8_dynamic(),
    "int4_weight_only": recipes.int4_weight_only(2),
    "lsq": recipes.lsq(4),
    "one product in float": recipes.int8().skip("*.down_product"),
    "input only": fq.QuantConfig(default=fq.LayerConfig(input=presets.uint8())),
    "weight per tensor, with zero point": fq.QuantConfig(
        default=fq.LayerConfig(weight=presets.uint8(), input=presets.uint8())
    ),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def build(options=()):
    torch.manual_seed(0)
    return Experts(**dict(options))


def routed(tokens=12, seed=3):
    """Returns arguments of experts. Expert 1 is never chosen."""
    index = torch.tensor([[0, 2], [3, 0], [2, 3]])[torch.arange(tokens) % 3]
    return randn(tokens, WIDTH, seed=seed), index, randn(tokens, TOP_K, seed=seed + 1).abs()


def calibrated(model, config=X86, x=None):
    return fq.calibrate(
        fq.prepare(model, config, randn(40, WIDTH) if x is None else x),
        [randn(40, WIDTH) if x is None else x],
        progress=False,
    ).eval()


def names(options):
    return ["gate_up_product" if dict(options).get("has_gate", True) else "up_product", "down_product"]
