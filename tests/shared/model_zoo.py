"""Small models of many kinds, recipes for them, and one step of training."""

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
recipes = pytest.importorskip("fakequant.recipes")
parametrizations = pytest.importorskip("torch.nn.utils.parametrizations")


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv, self.conv_norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.head = nn.ReLU(), nn.Linear(8, 4)

    def forward(self, x):
        x = self.relu(self.norm(self.stem(x)))
        x = self.relu(x + self.conv_norm(self.conv(x)))
        return self.head(x.mean((2, 3)))


def depthwise_separable():
    def block(inputs, outputs):
        return [
            nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False),
            nn.BatchNorm2d(inputs),
            nn.ReLU6(inplace=True),
            nn.Conv2d(inputs, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        ]

    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), *block(4, 8), *block(8, 8), nn.Flatten(), nn.LazyLinear(4))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 3, stride=2, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x):
        first = F.relu(self.down1(x))
        second = F.relu(self.down2(first))
        return self.out(torch.cat([first, self.up(second, output_size=first.shape[-2:])], 1))


def transformer_encoder(layers=2):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), layers)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 16), nn.Embedding(8, 16)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens):
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions(torch.arange(length))
        mask = torch.full((length, length), -torch.inf).triu(1)
        h = self.norm1(x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return self.head(x + self.mlp(self.norm2(x)))


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.a(x)) + x if x.sum() > 0 else self.a(x)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.again = self.fc

    def forward(self, x):
        return self.head(torch.relu(self.again(torch.relu(self.fc(x)))))


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2, bias=False)})

    def forward(self, x):
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return torch.cat([head(x) for head in self.heads.values()], -1)


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def parametrized():
    layer = nn.Linear(4, 4)
    nn.utils.parametrize.register_parametrization(layer, "weight", Double())
    return nn.Sequential(layer, nn.ReLU(), nn.Linear(4, 2))


def weight_normed():
    return nn.Sequential(parametrizations.weight_norm(nn.Conv1d(3, 4, 1)), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


IMAGES = randn(2, 3, 8, 8)
ZOO = {
    "residual": (Residual, IMAGES),
    "depthwise-separable": (depthwise_separable, IMAGES),
    "U-Net": (UNet, randn(2, 3, 7, 8)),
    "TransformerEncoder": (transformer_encoder, randn(2, 5, 16)),
    "GPT": (GPT, torch.randint(0, 50, (2, 5), generator=torch.Generator().manual_seed(1))),
    "branches": (Branches, randn(3, 4).abs()),
    "a module used twice": (Twice, randn(3, 4)),
    "lists and dicts": (Lists, randn(3, 4)),
    "parametrized": (parametrized, randn(3, 4)),
    "weight-normed": (weight_normed, randn(2, 3, 2)),
    "LSTM": (Recurrent, randn(2, 3, 4)),
}
RECIPES = {
    "int8": recipes.int8(),
    "int8_dynamic": recipes.int8_dynamic(),
    "int4_weight_only": recipes.int4_weight_only(2),
    "w4a8": recipes.w4a8(target="onnxruntime-x86"),
    "lsq": recipes.lsq(4),
    "fp8": recipes.fp8(),
    "mxfp8": recipes.mxfp8(),
    "nvfp4": recipes.nvfp4(),
}


def build(make, x):
    torch.manual_seed(0)
    model = make()
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        model.eval()(x)
        model.train()
    return model


def train(model, x):
    """Trains one step and returns the names of the parameters that have a gradient."""
    torch.manual_seed(3)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    names = [name for name, p in model.named_parameters() if p.grad is not None]
    for name in names:
        assert torch.isfinite(model.get_parameter(name).grad).all(), name
    optimizer.step()
    return names
