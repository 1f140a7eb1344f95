"""Models whose own code calls the functions that are quantized."""

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional

X86 = "onnxruntime-x86"


class Attention(nn.Module):
    """Attention of one head, written with functions: no module returns the attention weights."""

    def __init__(self, width=8):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(-1, -2) * 0.3, -1)
        return self.out(weights @ self.value(x))


class Fused(Attention):
    """The same with torch's operator."""

    def forward(self, x):
        return self.out(F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x)))


class Borrowed(nn.Module):
    """Code that uses the weights of layers which it does not call."""

    def __init__(self):
        super().__init__()
        self.plain = nn.Linear(8, 8, bias=False)
        self.own_bias = nn.Linear(8, 8)
        self.other_bias = nn.Linear(8, 8, bias=False)
        self.conv = nn.Conv1d(3, 3, 3, padding=1)
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x):
        x = F.linear(x, self.plain.weight).tanh()
        x = F.linear(x, self.own_bias.weight, self.own_bias.bias).tanh()
        x = F.linear(x, self.other_bias.weight, bias=self.bias).tanh()
        return F.conv1d(x, self.conv.weight, self.conv.bias, padding=1)


def batch(seed=0):
    """Returns two sequences of three tokens."""
    return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed))


def prepared(make=Attention, target=X86, calibrated=True, **settings):
    """Returns a model of two blocks in evaluation mode, prepared with an example."""
    torch.manual_seed(0)
    config = fq.recipes.int8(target=target)
    config = fq.QuantConfig(**{**vars(config), **settings})
    model = fq.prepare(nn.Sequential(make(), make()), config, batch()).eval()
    return fq.calibrate(model, [batch(), batch(1)], progress=False) if calibrated else model
