"""How kernels are started."""

from typing import Any

import torch
from torch import Tensor

# Programs that keep the largest GPUs busy. More do not make reductions faster, but their partial results longer.
PROGRAMS = 512


def launch(kernel: Any, programs: tuple[int, ...], x: Tensor, *args: Any, warps: int = 4, **constants: Any) -> None:
    """Starts a kernel on the device of `x`, its first argument, and returns at once.

    Multiplications and additions are not contracted, so that they are rounded as on the CPU.
    """
    with torch.cuda.device_of(x):
        kernel[programs](x, *args, **constants, num_warps=warps, enable_fp_fusion=False)
