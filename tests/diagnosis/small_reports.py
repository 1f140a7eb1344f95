"""A small calibrated model, its data, and a function that writes its report."""

import pytest

import fakequant as fq
from fakequant import recipes

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
nn = torch.nn

from fakequant._diagnosis.report.writing import report  # noqa: E402


def small(config=None, seed=0):
    torch.manual_seed(seed)
    model = fq.prepare(
        nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)), config or recipes.w4a8(), torch.rand(32, 8)
    )
    return fq.calibrate(model, [torch.rand(32, 8)], progress=False)


def batches(n=2):
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(16, 8, generator=generator) * 1.5 for _ in range(n)]


def write(model, folder, data=None, **options):
    return report(model, folder, data, progress=False, **options)
