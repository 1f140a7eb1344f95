"""Conversions between NumPy arrays and torch tensors that keep every bit."""

import numpy as np
import pytest

from fakequant.testing import cases

torch = pytest.importorskip("torch")

aten = torch.ops.aten
BF16, FLOAT32 = cases.DTYPES["bfloat16"], cases.DTYPES["float32"]
ALL_SCALES = cases.SCALES + cases.EXTREME_SCALES + cases.BROKEN_SCALES
each_dtype = pytest.mark.parametrize("dtype", cases.DTYPES.values(), ids=cases.DTYPES)


def same_memory(a):
    """Returns a tensor that shares the array's memory and strides."""
    return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) if a.dtype == BF16 else torch.from_numpy(a)


def to_torch(a):
    """Returns a copy of the array as a contiguous tensor."""
    return same_memory(np.array(a, order="C"))


def to_numpy(t):
    return t.view(torch.int16).numpy().view(BF16) if t.dtype == torch.bfloat16 else t.numpy()
