"""Compiles the kernels that calls would launch, for GPUs that are not here, and prints their code as JSON.

Runs in a process of its own, because Triton's interpreter must be off: python compiled_kernels.py sm_80 sm_90 sm_100
gfx942
"""

import json
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type

from fakequant import _kernels
from fakequant._backends.torch.tensor_kernels import Grid, ObserverOptions
from fakequant._backends.torch.triton import codes, fake_quantize, kernels, learned, observe, tiles
from fakequant._backends.torch.triton.launch import OPTIONS

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
NVIDIA_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PACKED, NONE = _kernels.MASK_PACKED, _kernels.MASK_NONE
INT8, UINT4 = (-128, 127), (0, 15)


def data(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype)


def grid(*shape, numerics="onnx", zero=True, bounds=INT8):
    z = torch.zeros(shape, dtype=torch.float32 if numerics == "q4_1" else torch.int32) if zero else None
    return Grid(torch.ones(shape), z, *bounds, numerics)


def observing(x, *blocks, numerics="onnx", symmetric=False, rule="any", update="moving_average", bounds=INT8):
    options = ObserverOptions(*bounds, numerics, symmetric, rule, update, 0.01, 1e-7, True)
    kernels.observe_fake_quantize(x, torch.ones(blocks), torch.ones(blocks), options)


X, HALF, IMAGE = data(512, 1024), data(512, 1024, dtype=torch.bfloat16), data(8, 64, 32, 32)
MASK = torch.zeros(512 * 1024 // 8, dtype=torch.uint8)
# Calls whose kernels are compiled for every GPU.
CALLS = {
    "forward": lambda: kernels.fake_quantize(X, grid(), PACKED),
    "backward": lambda: kernels.mask_backward(X, MASK, None, False),
    "backward of torch": lambda: kernels.mask_backward(X, MASK, None, True),
    "observing, per tensor": lambda: observing(X),
    "observing, per row": lambda: observing(X, 512, 1, symmetric=True, update="dynamic"),
    "observing, per channel": lambda: observing(IMAGE, 1, 64, 1, 1),
    "observing, few channels": lambda: observing(IMAGE, 8, 1, 1, 1, update="min_max"),
    "NVFP4": lambda: observing(HALF, 512, 64, numerics="e2m1", rule="e4m3fn", update="dynamic", bounds=UINT4),
    "learned": lambda: kernels.learned_backward(X, X, grid(), 0.5),
    "codes": lambda: kernels.quantize_packed(X, grid(bounds=UINT4), 4),
    "values": lambda: kernels.dequantize_packed(MASK, grid(bounds=UINT4), (1024, 128), 4, torch.float32),
}
# Calls whose kernels are compiled for the first GPU only: other constants of the same kernels.
VARIANTS = {
    "forward, bfloat16": lambda: kernels.fake_quantize(HALF, grid(), PACKED),
    "forward, float16": lambda: kernels.fake_quantize(X.half(), grid(), NONE),
    "forward, odd size": lambda: kernels.fake_quantize(data(100_003), grid(), PACKED),
    "forward, per row": lambda: kernels.fake_quantize(X, grid(512, 1), PACKED),
    "forward, channels last": lambda: kernels.fake_quantize(X, grid(1, 1024), PACKED),
    "forward, half_away": lambda: kernels.fake_quantize(X, grid(numerics="half_away"), PACKED),
    "forward, torch_tensor": lambda: kernels.fake_quantize(X, grid(numerics="torch_tensor"), PACKED),
    "forward, torch_channel": lambda: kernels.fake_quantize(X, grid(512, 1, numerics="torch_channel"), PACKED),
    "forward, e4m3fn": lambda: kernels.fake_quantize(X, grid(numerics="e4m3fn", zero=False), PACKED),
    "forward, q4_1": lambda: kernels.fake_quantize(X, grid(512, 32, numerics="q4_1", bounds=UINT4), NONE),
    "MXFP4": lambda: observing(X, 512, 32, numerics="e2m1", rule="floor", update="dynamic", bounds=UINT4),
    "q4_0": lambda: observing(X, 512, 32, numerics="q4_0", rule="q4_0", update="dynamic", bounds=(-8, 7)),
    "learned, torch": lambda: kernels.learned_backward(X, X, grid(numerics="torch_tensor"), 0.5),
    "learned, per row": lambda: kernels.learned_backward(HALF, HALF, grid(512, 1), 0.5),
    "learned, one element": lambda: kernels.learned_backward(data(1), data(1), grid(), 0.5),
    "observing, one element": lambda: observing(data(1)),
    "observing, many odd rows": lambda: observing(data(999, 27), 999, 1, update="dynamic"),
    "q4_0, short": lambda: observing(data(1, 32), 1, 1, numerics="q4_0", rule="q4_0", update="dynamic", bounds=(-8, 7)),
    "codes of 2 bits": lambda: kernels.quantize_packed(X, grid(numerics="half_away", bounds=(1, 3)), 2),
    "codes of e2m1": lambda: kernels.quantize_packed(X, grid(numerics="e2m1", zero=False, bounds=UINT4), 4),
    "values of e2m1": lambda: kernels.dequantize_packed(
        MASK, grid(numerics="e2m1", zero=False, bounds=UINT4), (1024, 128), 4, torch.bfloat16
    ),
    "values of int8": lambda: kernels.dequantize(X.to(torch.int8), grid(512, 1), torch.float32),
    "6-bit codes": lambda: kernels.quantize_packed(X, grid(numerics="e3m2", zero=False, bounds=(0, 63)), 6),
}


def beyond_32_bits(call):
    """Runs a call as if data had more than 2^31 elements."""
    before, tiles._LARGEST_OFFSET = tiles._LARGEST_OFFSET, 0
    call()
    tiles._LARGEST_OFFSET = before


for _name in ("forward", "backward", "observing, per tensor", "observing, per row", "learned", "codes", "values"):
    VARIANTS[f"{_name}, beyond 32 bits"] = partial(beyond_32_bits, CALLS[_name])


def recorded(call):
    """Returns the launches of a call, without running them."""
    launches = []

    def record(kernel, programs, *args, warps=4, **constants):
        launches.append((kernel, args, warps, constants))

    modules = (codes, fake_quantize, learned, observe)
    before = [module.launch for module in modules]
    for module in modules:
        module.launch = record
    call()
    for module, launch in zip(modules, before, strict=True):
        module.launch = launch
    return launches


def compile_for(target, kernel, args, warps, constants):
    """Compiles a kernel as a launch with these arguments would."""
    signature, constexprs, attributes = {}, {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, (*args, *constants.values()), strict=False)):
        value = constants.get(name, value)
        if name in constants or (type(value) is int and value == 1):
            signature[name], constexprs[i,] = "constexpr", value
            continue
        signature[name] = mangle_type(value)
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
            attributes[i,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=target, options={"num_warps": warps, **OPTIONS})


def resources(cubin):
    """Returns the registers of a kernel, and its bytes of stack and local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        out = subprocess.run(
            [NVIDIA_TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    return {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", out.stdout)}


def main(names):
    rows = []
    for name in names:
        calls = CALLS | VARIANTS if name == names[0] else CALLS
        for call, run in calls.items():
            for kernel, *launch in recorded(run):
                compiled = compile_for(TARGETS[name], kernel, *launch)
                row = {"target": name, "call": call, "kernel": kernel.fn.__name__}
                if "ptx" in compiled.asm:
                    row |= {
                        "ptx": compiled.asm["ptx"],
                        **resources(compiled.asm["cubin"]),
                        "SHARED": compiled.metadata.shared,
                    }
                rows.append(row)
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
