"""Fake quantization on a GPU: bits compared with the CPU's, and times beside a copy, torch, torch.ao and torchao.

    python benchmarks/bench_gpu.py [--json FILE] [--elements N]

The first table is computed and needs no GPU: how many bytes per element are read and written, and how long that takes at the
bandwidth of a GPU. A kernel cannot be faster than this; it may be slower. Bytes of chains of operations are counted while they
run on a small tensor. On a machine without a GPU, that is all.

With a GPU, the bits of all functions are compared with those of the CPU next, on ties, edges and special values, and only then
are functions timed, as in training. Times are ratios to a copy of the tensor in the same run.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.ao import quantization as ao
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fakequant as fq
from fakequant import nn, presets
from fakequant._backends.torch import formula, gpu_kernels, operators
from fakequant._backends.torch.tensor_kernels import Grid
from fakequant.formats import FLOAT_FORMATS
from fakequant.testing import cases
from fakequant.testing.timing import best_times

# Bytes per second, as their makers give them.
BANDWIDTH = {"A100 80GB SXM": 2.039e12, "H100 SXM": 3.35e12}
SPEC = fq.QuantSpec(symmetric=False)
SCALE, ZERO = 0.02, 3
# The size of the tensor on which bytes are counted.
SIZE = 2**18
# The limits that the kernels are held to, in bytes per float32 element.
LIMITS = {"forward with mask": 8.2, "backward": 8.2}


# --- bytes ----------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Counts the bytes of all tensors that operations read and write, views apart."""

    VIEWS = (
        "view",
        "detach",
        "alias",
        "expand",
        "permute",
        "slice",
        "select",
        "empty",
        "new_empty",
        "reshape",
        "unsqueeze",
    )

    def __init__(self):
        super().__init__()
        self.bytes = self.operations = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if not operator._schema.name.split("::")[1].lstrip("_").startswith(self.VIEWS):
            self.operations += 1
            self.bytes += sum(
                t.numel() * t.itemsize for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)
            )
        return result


def counted(call: Callable[[Tensor], object]) -> tuple[float, int]:
    """Returns bytes per element and the number of operations of a call on float32."""
    x = torch.linspace(-3, 3, SIZE)
    with torch.no_grad(), Traffic() as traffic:
        call(x)
    return round(traffic.bytes / SIZE, 3), traffic.operations


def roofline() -> list[tuple[str, str, float, str]]:
    """Returns rows of (what, who, bytes per element, launches)."""
    scale, zero = torch.tensor(SCALE), torch.tensor(ZERO, dtype=torch.int32)
    mask = torch.ones(SIZE, dtype=torch.bool)
    packed = torch.zeros(SIZE // 8, dtype=torch.uint8)
    grid = Grid(scale, zero, -128, 127, "onnx")
    aten = torch.ops.aten
    on = torch.tensor(1)
    running = torch.tensor([-3.0]), torch.tensor([3.0])

    def eager(x: Tensor) -> tuple[Tensor, Tensor]:
        code = torch.round(x / scale) + zero
        inside = (code >= -128) & (code <= 127)
        return (code.clamp(-128, 127) - zero) * scale, inside

    def eager_observed(x: Tensor) -> object:
        return torch.aminmax(x), eager(x)

    rows = [
        ("forward with mask", "fakequant", counted(lambda x: operators.ops.fake_quantize_masked(x, *grid, True))),
        (
            "forward with mask",
            "torch",
            counted(lambda x: aten.fake_quantize_per_tensor_affine_cachemask(x, SCALE, ZERO, -128, 127)),
        ),
        ("forward with mask", "operations", counted(eager)),
        ("forward with mask", "fakequant without Triton", counted(lambda x: formula.fake_quantize(x, grid, 1))),
        ("backward", "fakequant", counted(lambda x: operators.ops.mask_backward(x, packed, None, False))),
        ("backward", "torch", counted(lambda x: x * mask)),
        ("backward", "fakequant without Triton", counted(lambda x: formula.mask_backward(x, packed, None, False))),
    ]
    found = [(what, who, size, str(operations)) for what, who, (size, operations) in rows]
    forward = found[0][2]
    # A kernel that first finds the range reads the data once more, which counting operations does not see.
    fused = counted(lambda x: torch.fused_moving_avg_obs_fake_quant(
        x, on, on, *(r.clone() for r in running), torch.ones(1), torch.zeros(1, dtype=torch.int32), 0.01, -128, 127, 0
    ))[0]  # fmt: skip
    observing = [
        ("observing and forward", "fakequant, one scale", forward + 4, "2"),
        ("observing and forward", "fakequant, rows and blocks up to 8192", forward, "1"),
        ("observing and forward", "torch.ao, fused", fused + 4, "several"),
        ("observing and forward", "operations", *counted(eager_observed)),
    ]
    return found + [(what, who, round(size, 3), str(launches)) for what, who, size, launches in observing]


def print_roofline(elements: int) -> list[dict[str, object]]:
    print(f"Computed, not measured: bytes per float32 element, and the shortest time for {elements} elements.\n")
    print(f"{'':24}{'':40}{'bytes':>8}{'launches':>10}" + "".join(f"{name:>16}" for name in BANDWIDTH))
    rows = roofline()
    for what, who, size, launches in rows:
        times = "".join(f"{1e6 * size * elements / b:13.1f} us" for b in BANDWIDTH.values())
        print(f"{what:24}{who:40}{size:8.3f}{launches:>10}{times}")
    for what, limit in LIMITS.items():
        size = next(size for w, who, size, _ in rows if (w, who) == (what, "fakequant"))
        print(f"\n{what}: {size} bytes, limit {limit}: {'met' if size <= limit else 'NOT MET'}", end="")
    print("\n")
    return [dict(zip(("what", "who", "bytes", "launches"), row, strict=True)) for row in rows]


# --- bits -----------------------------------------------------------------------------------------


def comparisons(device: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields results of the CPU and of the device."""
    formats = [{"numerics": n} for n in ("onnx", "half_away", "torch")] + [{"format": f} for f in FLOAT_FORMATS]
    for options, (name, dtype) in itertools.product(formats, cases.DTYPES.items()):
        spec = fq.QuantSpec(**options, **({"symmetric": False} if "numerics" in options else {}))
        for scale, zero in ((0.1, 0), (1 / 3, -7), (1e-40, 20)):
            zero = zero if spec.is_integer else 0
            values = np.resize(cases.values(scale, zero, -128, 127, dtype), 4003)
            x = torch.from_numpy(values.astype(np.float64)).to(getattr(torch, name))
            y, mask = fq.fake_quantize(x, torch.tensor(scale), torch.tensor(zero), spec, mask="packed")
            there = x.to(device), torch.tensor(scale, device=device), torch.tensor(zero, device=device)
            same, same_mask = fq.fake_quantize(*there, spec, mask="packed")
            yield f"{options}, {name}, y", y, same
            yield f"{options}, {name}, mask", mask, same_mask
            dx = fq.fake_quantize_backward(x, mask, spec)
            yield f"{options}, {name}, dx", dx, fq.fake_quantize_backward(there[0], same_mask, spec)
    quantizers = {
        "per tensor": lambda: nn.FakeQuantize(presets.uint8()),
        "per row": lambda: nn.FakeQuantize(fq.QuantSpec(axis=0), shape=(64, None)),
        "per token": lambda: nn.FakeQuantize(fq.QuantSpec().per_token()),
        "MXFP4": lambda: nn.FakeQuantize(presets.mxfp4()),
        "NVFP4": lambda: nn.FakeQuantize(presets.nvfp4()),
        "q4_0": lambda: nn.FakeQuantize(presets.q4_0()),
        "learned": lambda: nn.LearnedFakeQuantize(fq.QuantSpec(bits=4, axis=0), shape=(64, None)),
    }
    for name, make in quantizers.items():
        here = make()
        x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
        if isinstance(here, nn.LearnedFakeQuantize):
            here.initialize(x)
        there = make().to(device)
        there.load_state_dict(here.state_dict())
        for _ in range(3):
            leaf, other = x.clone().requires_grad_(), x.to(device, copy=True).requires_grad_()
            y, same = here(leaf), there(other)
            y.backward(torch.ones_like(y))
            same.backward(torch.ones_like(same))
            yield f"{name}, y", y.detach(), same.detach()
            yield f"{name}, dx", leaf.grad, other.grad
            for (key, value), found in zip(here.state_dict().items(), there.state_dict().values(), strict=True):
                yield f"{name}, {key}", value, found
            x = x * 0.7


def check(device: str) -> int:
    """Compares the device with the CPU and returns the number of elements that differ."""
    elements = different = 0
    for name, expected, actual in comparisons(device):
        actual = actual.cpu()
        unlike = ~(
            (expected == actual) & (expected.signbit() == actual.signbit())
            | (expected != expected) & (actual != actual)
        )
        elements += expected.numel()
        different += int(unlike.sum())
        if unlike.any():
            print(f"DIFFERENT: {name}: {int(unlike.sum())} of {expected.numel()}")
    print(f"{elements} elements compared with the CPU, {different} different\n")
    return different


# --- times ----------------------------------------------------------------------------------------


def contenders(x: Tensor) -> dict[str, Callable[[], object]]:
    """Returns what is timed on a tensor."""
    out, dy, other = torch.empty_like(x), torch.randn_like(x), torch.empty_like(x)
    mask = torch.ones_like(x, dtype=torch.bool)
    scale, zero = torch.tensor(SCALE, device=x.device), torch.tensor(ZERO, dtype=torch.int32, device=x.device)
    packed = fq.fake_quantize(x, scale, zero, SPEC, mask="packed")[1]
    ours, fused = nn.FakeQuantize(presets.uint8()).to(x.device), ao.FusedMovingAvgObsFakeQuantize().to(x.device)
    rows = nn.FakeQuantize(presets.mxfp4()).to(x.device)
    aten = torch.ops.aten
    found = {
        "copy": lambda: out.copy_(x),
        "forward, fakequant": lambda: fq.fake_quantize(x, scale, zero, SPEC, mask="packed"),
        "forward, torch": lambda: aten.fake_quantize_per_tensor_affine_cachemask(x, SCALE, ZERO, -128, 127),
        "forward, fakequant without Triton": lambda: formula.fake_quantize(x, Grid(scale, zero, -128, 127, "onnx"), 1),
        "backward, fakequant": lambda: fq.fake_quantize_backward(dy, packed, SPEC),
        "backward, torch": lambda: torch.mul(dy, mask, out=other),
        "observing, fakequant": lambda: ours(x),
        "observing, torch.ao": lambda: fused(x),
        "MXFP4, fakequant": lambda: rows(x),
    }
    try:
        from torchao.quantization.quant_primitives import _fake_quantize_affine
    except ImportError:
        return found
    block = tuple(x.shape)
    found["forward, torchao"] = lambda: _fake_quantize_affine(x, block, scale, zero, torch.int8, -128, 127)
    return found


def times(elements: int) -> dict[str, float]:
    """Prints and returns times as ratios to a copy."""
    x = torch.randn(elements // 1024, 1024, device="cuda")

    def repeated(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            with torch.no_grad():
                for _ in range(20):
                    call()
            torch.cuda.synchronize()

        run()  # compiles kernels
        return run

    best = best_times({name: repeated(call) for name, call in contenders(x).items()}, seconds=5.0)
    print(f"{elements} float32 elements; a copy takes {best['copy'] / 20 * 1e6:.1f} us. Ratios to it:\n")
    for name, seconds in best.items():
        print(f"{name:40}{seconds / best['copy']:8.2f}")
    return {name: seconds / best["copy"] for name, seconds in best.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also writes the figures to this file")
    parser.add_argument("--elements", type=int, default=2**24)
    options = parser.parse_args()
    figures: dict[str, object] = {"roofline": print_roofline(options.elements)}
    different = 0
    if not torch.cuda.is_available():
        print("There is no GPU here, so nothing was measured.")
    else:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton: {gpu_kernels.has_triton()}\n")
        different = check("cuda")
        figures |= {"device": torch.cuda.get_device_name(), "different": different, "ratios": times(options.elements)}
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file, indent=2)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
