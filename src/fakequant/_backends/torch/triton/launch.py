"""How kernels are started."""

from typing import Any

import torch
from torch import Tensor

# Programs that keep the largest GPUs busy. More do not make reductions faster, but their partial results longer.
PROGRAMS = 512
# Multiplications and additions are not contracted, so that they are rounded as on the CPU.
OPTIONS = {"enable_fp_fusion": False}


def launch(kernel: Any, programs: tuple[int, ...], x: Tensor, *args: Any, warps: int = 4, **constants: Any) -> None:
    """Starts a kernel on the device of `x`, its first argument, and returns at once."""
    with torch.cuda.device_of(x):
        kernel[programs](x, *args, **constants, num_warps=warps, **OPTIONS)
