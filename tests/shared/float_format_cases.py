"""Models and configs in float formats that the tests of convert, files, export and verification share."""

import copy

import pytest

import fakequant as fq
from fakequant import presets

torch = pytest.importorskip("torch")
nn = torch.nn


def both(spec, *, operands=None):
    """Returns a config with one spec for weights and inputs."""
    layer = fq.LayerConfig(weight=spec, input=spec)
    return fq.QuantConfig(default=layer) if operands is None else fq.QuantConfig(default=layer, operands=operands)


def fp8(format):
    activations = fq.QuantSpec(format=format)
    layer = fq.LayerConfig(weight=fq.QuantSpec(format=format, axis=0), input=activations)
    return fq.QuantConfig(default=layer, operands=activations)


FP8 = {format: fp8(format) for format in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")}
BLOCKS = {
    "mxfp8": fq.recipes.mxfp8(),
    "mxfp8 e5m2 rceil": both(presets.mxfp8(format="e5m2", scale_rule="rceil")),
    "mxfp6": both(presets.mxfp6()),
    "mxfp6 e3m2 ceil": both(presets.mxfp6(format="e3m2", scale_rule="ceil")),
    "mxfp4": both(presets.mxfp4(scale_rule="even")),
    "mxfp4 weights": fq.recipes.mxfp4_weight_only(),
    "mxint8": both(presets.mxint8()),
    "nvfp4": fq.recipes.nvfp4(),
}
CONFIGS = {**FP8, **BLOCKS}


class Branches(nn.Module):
    """Two layers whose results are added: an operand is quantized."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(40, 24), nn.Linear(40, 24), nn.Linear(24, 5)

    def forward(self, x):
        return self.c(torch.relu(self.a(x) + self.b(x)))


def make_cnn():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 40, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(40, 6, 2, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 6 * 6, 10),
    )


def make_normed():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 6), nn.BatchNorm1d(6)
    )
    with torch.no_grad():
        for norm in (model[1], model[5]):
            norm.weight.copy_(torch.linspace(-1.4, 2, len(norm.weight)))  # some factors are negative
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
        model[0].weight[0].abs_()  # the lowest value of a channel with a negative factor is 0, whose code is 0
        model[0].weight[0, 0, 0, 0] = 0
    return model


def make_branches():
    torch.manual_seed(0)
    return Branches()


MODELS = {"cnn": make_cnn, "normed": make_normed, "branches": make_branches}
SHAPES = {"cnn": (3, 6, 6), "normed": (3, 6, 6), "branches": (40,)}


def batch(name, rows=4, seed=1):
    return torch.randn(rows, *SHAPES[name], generator=torch.Generator().manual_seed(seed))


def prepared(name, config, *, steps=1):
    """Returns a model that was trained for some steps; the last one changes the weights after the last forward."""
    model = fq.prepare(MODELS[name](), copy.deepcopy(config), example=batch(name))
    model = fq.calibrate(model, [batch(name)], progress=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for step in range(steps):
        model(batch(name, seed=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
