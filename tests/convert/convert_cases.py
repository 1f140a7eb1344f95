"""Models, recipes and grids that the tests of `convert` share."""

import pytest

from fakequant import presets
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")


def same(expected, actual, *names):
    assert_same_bits(values.plain(expected).numpy(), values.plain(actual).numpy(), *names)


def grid(scale, zero_point, spec=None):
    return values.GridOf(torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32), spec or presets.uint8())
