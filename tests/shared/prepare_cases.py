"""Recipes, models and comparisons that the tests of `prepare` share."""

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")
tensors = pytest.importorskip("fakequant._backends.torch.tensor_functions")

# Quantizes layers only, so that it needs no example.
INT8 = fq.QuantConfig(default=recipes.int8().default)
EVERY_RECIPE = {
    "int8": recipes.int8(),
    "int8 for x86": recipes.int8(target="onnxruntime-x86"),
    "int8_dynamic": recipes.int8_dynamic(),
    "int4_weight_only": recipes.int4_weight_only(2),
    "w4a8": recipes.w4a8(),
    "lsq": recipes.lsq(4),
}
each_recipe = pytest.mark.parametrize("config", EVERY_RECIPE.values(), ids=EVERY_RECIPE)


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def randint(high, *shape, seed=1):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def off(model):
    fqnn.switch_quantizers(model, observing=False, quantizing=False)
    return model


def quantized_weight(layer, axis):
    """Returns the weight quantized with absmax / 127 per output channel and a straight-through gradient."""
    weight = layer.weight
    others = [d for d in range(weight.dim()) if d != axis]
    scale = (weight.detach().abs().amax(others) / 127).clamp(min=torch.finfo(torch.float32).eps)
    spec = fq.QuantSpec(bits=8, narrow_range=True, axis=axis)
    return tensors.fake_quantize(weight, scale, 0, spec, gradient="pass")


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
