"""Small models for images like those of scikit-learn's digits, whose pixels are multiples of 1/16: full of ties."""

import sys

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
recipes = pytest.importorskip("fakequant.recipes")


def digits(n, seed=0):
    """Returns images of shape (n, 1, 8, 8) whose pixels are multiples of 1/16 from 0 to 1."""
    return torch.randint(0, 17, (n, 1, 8, 8), generator=torch.Generator().manual_seed(seed)) / 16


class Residual(nn.Module):
    """A residual block, and one that halves the image: both operands of its addition are convolutions."""

    def __init__(self):
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.same, self.same_norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.down, self.down_norm = nn.Conv2d(4, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8)
        self.short, self.short_norm = nn.Conv2d(4, 8, 1, stride=2, bias=False), nn.BatchNorm2d(8)
        self.relus, self.pool = nn.ModuleList(nn.ReLU() for _ in range(3)), nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = self.relus[0](self.stem_norm(self.stem(x)))
        x = self.relus[1](x + self.same_norm(self.same(x)))
        x = self.relus[2](self.short_norm(self.short(x)) + self.down_norm(self.down(x)))
        return self.head(self.pool(x).flatten(1))


class Encoder(nn.Module):
    """A transformer encoder whose tokens are the rows of the image."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 10)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")

    def forward(self, x):
        return self.head(self.layer(self.embed(x.flatten(1, 2))).mean(1))


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 16), nn.ReLU(), nn.Linear(16, 10))


def depthwise():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 12, 1), nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(), nn.Linear(192, 10),
    )  # fmt: skip


MODELS = {"mlp": mlp, "residual": Residual, "depthwise": depthwise, "encoder": Encoder}
RECIPES = {"int8": recipes.int8, "w4a8": recipes.w4a8, "lsq": lambda target: recipes.lsq(2, target=target)}
# Every model and every recipe occurs.
CASES = [("mlp", "lsq"), ("residual", "int8"), ("residual", "lsq"), ("depthwise", "w4a8"), ("encoder", "int8")]


def float_model(name):
    """Returns a model in eval mode with random weights, and batch norms as if trained."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.bias)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval()


def prepared(name, recipe, target):
    """Returns a prepared model that is not calibrated."""
    return fq.prepare(float_model(name), RECIPES[recipe](target=target), digits(2))


def calibrated(name, recipe, target, brightest=1.0):
    """Returns a prepared model in eval mode. The scale of its input comes from its brightest pixel."""
    return fq.calibrate(prepared(name, recipe, target), [digits(32, 1) * brightest], progress=False).eval()


def layers_of(model):
    """Returns the paths of the layers with weights. Attention has one for queries, keys and values."""
    kinds = (nn.Linear, nn.Conv2d, nn.MultiheadAttention)
    return {path for path, module in model.named_modules() if isinstance(module, kinds)}


def assert_verified(found, model, runtime, target):
    """Asserts that `verify` found no difference, and that all layers run in integers."""
    assert found.ok, found.verdict()
    assert (found.runtime, found.target, found.is_changed) == (runtime, target, False)
    assert set(found.integers) == layers_of(model)
    assert found.floats == {}
    assert found.outputs.agreeing == found.outputs.rows > 0
    assert found.outputs.runtime_unexplained == 0
    # Between the codes of an encoder there are float operations, whose last bits may differ.
    allowed = 2 if isinstance(model, Encoder) else 0
    assert sum(t.runtime_differ for t in found.tensors) <= allowed, str(found)
    assert sum(t.prepared_differ for t in found.tensors) <= 4
    assert sum(t.codes for t in found.tensors) > 1000


def without(monkeypatch, package):
    """Makes every import of a package fail, as if it were not installed."""
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, package, None)
