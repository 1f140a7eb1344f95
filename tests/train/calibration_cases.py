"""A prepared model and batches that the tests of `calibrate` and `Schedule` share."""

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
recipes = pytest.importorskip("fakequant.recipes")

torch.manual_seed(0)
BATCHES = [torch.randn(6, 4) * scale for scale in (1.0, 3.0, 0.5)]


def make(config=None, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    return fq.prepare(model, config or recipes.int8(), torch.ones(2, 4))


def calibrate(model, data, *args, **options):
    return fq.calibrate(model, data, *args, progress=False, **options)


def calibrated(config=None):
    return calibrate(make(config), BATCHES)
