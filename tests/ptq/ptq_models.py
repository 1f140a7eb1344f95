"""Models and data for the tests of post-training methods."""

import torch
from torch import nn

import fakequant as fq


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def config(bits=3, **layer):
    """All weights per channel with few bits, inputs with 8 bits."""
    default = fq.LayerConfig(weight=fq.QuantSpec(bits=bits, axis=0), input=fq.presets.uint8(), **layer)
    return fq.QuantConfig(default=default)


def ready(model, data, used=None):
    """Returns the model, prepared and calibrated, in evaluation mode."""
    prepared = fq.prepare(model.eval(), used or config(), data[0])
    return fq.calibrate(prepared, data, progress=False)


def chain():
    """A small CNN: a batch norm after a convolution without bias, a depthwise one, and a linear layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, padding=1, groups=6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 25, 4),
    )
    model.train()(randn(64, 2, 5, 5, seed=3))  # statistics that fit
    return model.eval()


IMAGES = [randn(16, 2, 5, 5, seed=s) for s in (4, 5)]


def output_error(model, floats, data):
    with torch.no_grad():
        return sum(float((model(x) - floats(x)).square().sum()) for x in data)
