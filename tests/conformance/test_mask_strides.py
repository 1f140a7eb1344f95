"""`grad * mask` has torch's strides, including the arbitrary strides of axes of length 1."""

import random

import pytest

import fakequant as fq
from fakequant import torch_ops
from torch_bridge import aten, torch

NAMES = [f"fake_quantize_per_{kind}_affine_cachemask_backward" for kind in ("tensor", "channel")]


@pytest.mark.parametrize("name", NAMES)
def test_backward_of_a_dense_gradient_and_a_mask_with_gaps_has_torchs_strides(name):
    gradient = torch.empty_strided((2, 1), (1, 2)).fill_(1.0)
    mask = torch.ones(6, 2, dtype=torch.bool)[::3, ::2]
    assert getattr(torch_ops, name)(gradient, mask).stride() == getattr(aten, name)(gradient, mask).stride() == (1, 1)


def in_some_layout(shape, dtype, choose):
    """Returns a view with axes in any order, with gaps, or repeated elements."""
    axes = list(range(len(shape)))
    choose.shuffle(axes)
    steps = [choose.choice([1, 1, 1, 2, 3]) for _ in shape]
    memory = torch.ones([shape[a] * steps[a] * choose.choice([1, 2]) for a in axes], dtype=dtype)
    x = memory.permute([axes.index(a) for a in range(len(shape))])
    x = x[tuple(slice(0, n * step, step) for n, step in zip(shape, steps, strict=True))]
    if len(shape) == 4 and choose.random() < 0.2:
        x = x.contiguous(memory_format=torch.channels_last)
    if choose.random() < 0.4:
        strides = (choose.choice([1, 2, 5, 7]) if n == 1 else s for n, s in zip(shape, x.stride(), strict=True))
        x = x.as_strided(shape, list(strides))
    if shape and choose.random() < 0.15:
        x = x.narrow(choose.randrange(len(shape)), 0, 1).expand(shape)
    return x


@pytest.mark.parametrize("accelerated", [False, True], ids=["fakequant", "accelerated torch"])
def test_backward_has_torchs_strides_for_any_layouts(accelerated):
    choose = random.Random(0)
    for _ in range(3000):
        shape = tuple(choose.choice([1, 1, 2, 3]) for _ in range(choose.randint(0, 4)))
        gradient, mask = (in_some_layout(shape, dtype, choose) for dtype in (torch.float32, torch.bool))
        expected = getattr(aten, NAMES[0])(gradient, mask).stride()
        if accelerated:
            with fq.accelerate():
                actual = getattr(aten, NAMES[0])(gradient, mask).stride()
        else:
            actual = getattr(torch_ops, NAMES[0])(gradient, mask).stride()
        assert actual == expected, (shape, gradient.stride(), mask.stride())
