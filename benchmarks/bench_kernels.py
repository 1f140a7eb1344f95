"""Speed of every kernel on NumPy arrays, compared with a copy of the array and with torch's operator.

    python benchmarks/bench_kernels.py [--json FILE] [--quick] [--only SUBSTRING]

Measures time, time per element and bandwidth, and the ratios to a copy and to torch, with one and two threads.
Bandwidth counts the bytes that must be moved: each input read once, each output written once.

Before a row is timed, its results are compared with torch's, which must have the same bits if torch has the
operator. For float formats the peer is a clamp and a cast in torch, or torchao's function, as the row says. The last
table compares the measured ratios with the limits this library is held to.
"""

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch

import fakequant as fq
import format_cases
from fakequant import torch_ops
from fakequant.testing.assertions import assert_same_bits
from fakequant.testing.timing import best_times

SCALE, ZERO, QMIN, QMAX = 0.05, 3, -128, 127
SPEC = fq.QuantSpec(symmetric=False)
PER_CHANNEL = fq.QuantSpec(symmetric=False, axis=0)
DTYPES = {
    "float32": (np.dtype(np.float32), torch.float32),
    "float64": (np.dtype(np.float64), torch.float64),
    "bfloat16": (np.dtype(ml_dtypes.bfloat16), torch.bfloat16),
    "float16": (np.dtype(np.float16), torch.float16),
}
aten = torch.ops.aten


@dataclasses.dataclass
class Case:
    op: str
    dtype: str
    size: int
    moved: int  # bytes that must be read and written
    ours: Callable[[], object]
    torch: Callable[[], object] | None
    copy: Callable[[], object]
    same: Callable[[], None]


@dataclasses.dataclass
class Row:
    op: str
    dtype: str
    size: int
    threads: int
    microseconds: float
    ns_per_element: float
    gb_per_second: float
    times_copy: float  # our time over a copy's
    faster_than_torch: float | None  # torch's time over ours


def to_torch(x: np.ndarray) -> torch.Tensor:
    if x.dtype == DTYPES["bfloat16"][0]:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def to_numpy(t: torch.Tensor) -> np.ndarray:
    if t.dtype == torch.bfloat16:
        return t.contiguous().view(torch.int16).numpy().view(DTYPES["bfloat16"][0])
    return t.numpy()


def data(size: int, dtype: str) -> np.ndarray:
    # About 3 % of the values lie outside the range.
    return (np.random.default_rng(0).standard_normal(size) * 3).astype(np.float32).astype(DTYPES[dtype][0])


def nothing_to_compare() -> None:
    """For rows without a torch operator to compare with. The tests compare them with the reference."""


def per_tensor_cases(size: int, dtype: str) -> list[Case]:
    x = data(size, dtype)
    t, width = to_torch(x), x.dtype.itemsize
    torch_spec = dataclasses.replace(SPEC, numerics="torch")
    args = (SCALE, ZERO, QMIN, QMAX)

    def torch_forward():
        return aten.fake_quantize_per_tensor_affine_cachemask(t, *args)

    def packed(spec):
        return lambda: fq.fake_quantize(x, SCALE, ZERO, spec, mask="packed")

    def same_packed():
        y, mask = packed(torch_spec)()
        ty, tm = torch_forward()
        assert_same_bits(to_numpy(ty), y)
        assert_same_bits(tm.numpy(), np.unpackbits(mask, count=size, bitorder="little").astype(bool))

    def same_named():
        y, mask = torch_ops.fake_quantize_per_tensor_affine_cachemask(x, *args)
        ty, tm = torch_forward()
        assert_same_bits(to_numpy(ty), y)
        assert_same_bits(tm.numpy(), mask)

    _, mask = packed(torch_spec)()
    _, torch_mask = torch_forward()

    def torch_backward():
        return aten.fake_quantize_per_tensor_affine_cachemask_backward(t, torch_mask)

    def same_backward():
        assert_same_bits(to_numpy(torch_backward()), fq.fake_quantize_backward(x, mask, torch_spec))

    def same_value():
        expected = torch.fake_quantize_per_tensor_affine(t, *args)
        assert_same_bits(to_numpy(expected), torch_ops.fake_quantize_per_tensor_affine(x, *args))

    forward_bytes = 2 * size * width + size // 8
    cases = [
        Case("forward + packed mask", dtype, size, forward_bytes, packed(torch_spec), torch_forward, x.copy, same_packed),
        Case("forward + packed mask, onnx", dtype, size, forward_bytes, packed(SPEC), torch_forward, x.copy, nothing_to_compare),
        Case("forward + bool mask", dtype, size, 2 * size * width + size,
             lambda: torch_ops.fake_quantize_per_tensor_affine_cachemask(x, *args), torch_forward, x.copy, same_named),
        Case("forward only", dtype, size, 2 * size * width, lambda: torch_ops.fake_quantize_per_tensor_affine(x, *args),
             lambda: torch.fake_quantize_per_tensor_affine(t, *args), x.copy, same_value),
        Case("backward from packed mask", dtype, size, forward_bytes, lambda: fq.fake_quantize_backward(x, mask, torch_spec),
             torch_backward, x.copy, same_backward),
    ]  # fmt: skip
    if dtype == "float32":
        half_away = dataclasses.replace(SPEC, numerics="half_away")
        cases.append(Case("forward + packed mask, half_away", dtype, size, forward_bytes, packed(half_away),
                          torch_forward, x.copy, nothing_to_compare))  # fmt: skip
    return cases


def per_channel_cases(size: int, dtype: str) -> list[Case]:
    channels, cases = 64, []
    scale = (np.arange(channels) % 7 * 0.01 + 0.03).astype(np.float32)
    zero = (np.arange(channels) % 11 - 5).astype(np.int32)
    shapes = {
        "first axis": ((channels, size // channels), 0),
        "middle axis": ((size // (channels * 256), channels, 256), 1),
        "last axis": ((size // channels, channels), 1),
    }
    for where, (shape, axis) in shapes.items():
        x = data(size, dtype).reshape(shape)
        t = to_torch(x)
        spec = fq.QuantSpec(symmetric=False, axis=axis, numerics="torch")

        def ours(x=x, spec=spec):
            return fq.fake_quantize(x, scale, zero, spec, mask="packed")

        def torchs(t=t, axis=axis):
            return aten.fake_quantize_per_channel_affine_cachemask(
                t, torch.from_numpy(scale), torch.from_numpy(zero), axis, QMIN, QMAX
            )

        def same(ours=ours, torchs=torchs, x=x):
            (y, mask), (ty, tm) = ours(), torchs()
            assert_same_bits(to_numpy(ty), y)
            assert_same_bits(
                tm.numpy(), np.unpackbits(mask, count=x.size, bitorder="little").astype(bool).reshape(x.shape)
            )

        moved = 2 * size * x.dtype.itemsize + size // 8
        cases.append(Case(f"per channel, {where}", dtype, size, moved, ours, torchs, x.copy, same))
    groups = fq.QuantSpec(bits=4, axis=-1, group_size=32)
    x = data(size, dtype).reshape(-1, 1024)
    group_scale = np.full((x.shape[0], 32), 0.5, np.float32)
    cases.append(Case("groups of 32", dtype, size, 2 * size * x.dtype.itemsize + size // 8,
                      lambda: fq.fake_quantize(x, group_scale, 0, groups, mask="packed"), None, x.copy,
                      nothing_to_compare))  # fmt: skip
    return cases


def learned_cases(size: int, dtype: str) -> list[Case]:
    if dtype not in ("float32", "bfloat16"):
        return []
    x = data(size, dtype).reshape(-1, 64, 256)
    dy = np.ascontiguousarray(x[::-1])
    t, tdy = to_torch(x), to_torch(dy)
    s1, z1 = np.float32([SCALE]), np.float32([2.0])
    sc, zc = np.full(64, SCALE, np.float32), np.full(64, 2.0, np.float32)
    moved = 2 * size * x.dtype.itemsize + size * 4

    def ours_tensor():
        return torch_ops.fake_quantize_learnable_per_tensor_affine_backward(dy, x, s1, z1, QMIN, QMAX)

    def torch_tensor():
        return aten._fake_quantize_learnable_per_tensor_affine_backward(
            tdy, t, torch.from_numpy(s1), torch.from_numpy(z1), QMIN, QMAX, 1.0
        )

    def ours_channel():
        return torch_ops.fake_quantize_learnable_per_channel_affine_backward(dy, x, sc, zc, 1, QMIN, QMAX)

    def torch_channel():
        return aten._fake_quantize_learnable_per_channel_affine_backward(
            tdy, t, torch.from_numpy(sc), torch.from_numpy(zc), 1, QMIN, QMAX, 1.0
        )

    def same_tensor():
        assert_same_bits(to_numpy(torch_tensor()[0]), ours_tensor().dx)

    def same_channel():
        assert_same_bits(to_numpy(torch_channel()[0]), ours_channel().dx)

    return [
        Case("learned backward, per tensor", dtype, size, moved, ours_tensor, torch_tensor, x.copy, same_tensor),
        Case("learned backward, per channel", dtype, size, moved, ours_channel, torch_channel, x.copy, same_channel),
    ]


def observing_cases(size: int, dtype: str) -> list[Case]:
    x = data(size, dtype)
    t, width = to_torch(x), x.dtype.itemsize
    lo, hi = np.full(1, np.inf, np.float32), np.full(1, -np.inf, np.float32)
    state = [torch.tensor([v]) for v in (float("inf"), float("-inf"), 1.0)] + [torch.zeros(1, dtype=torch.int32)]
    on = torch.ones(1, dtype=torch.int64)

    def torch_fused():
        return torch.fused_moving_avg_obs_fake_quant(t, on, on, *state, 0.01, 0, 255, -1, False, False)

    def same_range():
        seen, (tlo, thi) = fq.min_max(x), torch.aminmax(t)
        assert_same_bits(to_numpy(tlo), np.asarray(seen.min).astype(x.dtype))
        assert_same_bits(to_numpy(thi), np.asarray(seen.max).astype(x.dtype))

    unsigned = fq.QuantSpec(signed=False, symmetric=False)
    cases = [
        Case("min/max", dtype, size, size * width, lambda: fq.min_max(x), lambda: torch.aminmax(t), x.copy, same_range)
    ]
    if dtype == "float32":
        cases.append(Case("observe + qparams + forward", dtype, size, 3 * size * width,
                          lambda: fq.observe_fake_quantize(x, unsigned, lo, hi, mask="packed"), torch_fused, x.copy,
                          nothing_to_compare))  # fmt: skip
    return cases


def code_cases(size: int, dtype: str) -> list[Case]:
    x = data(size, dtype)
    width = x.dtype.itemsize
    int4 = fq.QuantSpec(bits=4)
    q8, q4 = fq.quantize(x, SCALE, ZERO, SPEC), fq.quantize(x, 0.5, 0, int4, packed=True)
    return [
        Case("quantize to int8", dtype, size, size * (width + 1), lambda: fq.quantize(x, SCALE, ZERO, SPEC), None, x.copy, nothing_to_compare),
        Case("quantize to packed int4", dtype, size, size * width + size // 2, lambda: fq.quantize(x, 0.5, 0, int4, packed=True), None, x.copy, nothing_to_compare),
        Case("dequantize int8", dtype, size, size * (width + 1), lambda: fq.dequantize(q8, SCALE, ZERO, SPEC, dtype=x.dtype), None, x.copy, nothing_to_compare),
        Case("dequantize packed int4", dtype, size, size * width + size // 2, lambda: fq.dequantize(q4, 0.5, 0, int4, shape=(size,), dtype=x.dtype), None, x.copy, nothing_to_compare),
    ]  # fmt: skip


def float_format_cases(size: int, dtype: str) -> list[Case]:
    if dtype == "float64":
        return []
    x = data(size, dtype).reshape(-1, 1024)
    t = to_torch(x)
    cases = []
    for op, moved, ours, peer, has_our_bits in format_cases.rows(x, t, dtype):
        same = format_cases.compare(ours, peer, to_numpy) if peer is not None and has_our_bits else nothing_to_compare
        cases.append(Case(op, dtype, size, moved, ours, peer, x.copy, same))
    return cases


def measure(case: Case, threads: int, seconds: float) -> Row:
    fq.set_num_threads(threads)
    torch.set_num_threads(threads)
    case.same()
    contenders = {"ours": case.ours, "copy": case.copy}
    if case.torch is not None:
        contenders["torch"] = case.torch
    best = best_times(contenders, seconds=seconds)
    return Row(
        case.op, case.dtype, case.size, threads,
        microseconds=best["ours"] * 1e6,
        ns_per_element=best["ours"] / case.size * 1e9,
        gb_per_second=case.moved / best["ours"] / 1e9,
        times_copy=best["ours"] / best["copy"],
        faster_than_torch=best["torch"] / best["ours"] if "torch" in best else None,
    )  # fmt: skip


def small_call_microseconds() -> dict[str, float]:
    one, zero, true = np.ones(1, np.float32), np.zeros(1, np.int32), np.ones(1, bool)
    fq.set_num_threads(1)
    contenders = {
        "fake_quantize": lambda: fq.fake_quantize(one, SCALE, ZERO, SPEC),
        "fake_quantize_per_tensor_affine": lambda: torch_ops.fake_quantize_per_tensor_affine(
            one, SCALE, ZERO, QMIN, QMAX
        ),
        "fake_quantize + packed mask": lambda: fq.fake_quantize(one, SCALE, ZERO, SPEC, mask="packed"),
        "fake_quantize_backward": lambda: fq.fake_quantize_backward(one, true, SPEC),
        "quantize": lambda: fq.quantize(one, SCALE, ZERO, SPEC),
        "fake_quantize per channel": lambda: fq.fake_quantize(one, one, zero, PER_CHANNEL),
        "fake_quantize_per_channel_affine": lambda: torch_ops.fake_quantize_per_channel_affine(
            one, one, zero, 0, QMIN, QMAX
        ),
    }
    return {name: t * 1e6 for name, t in best_times(contenders, seconds=1).items()}


@dataclasses.dataclass
class Bar:
    what: str
    measured: float
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def bars(rows: list[Row], small: dict[str, float]) -> list[Bar]:
    found = {(r.op, r.dtype, r.size, r.threads): r for r in rows}

    def row(op, dtype="float32", size=1 << 20, threads=1):
        return found.get((op, dtype, size, threads))

    result = []

    def bar(what, r, attribute, limit, at_least):
        if r is not None:
            result.append(Bar(what, getattr(r, attribute), limit, at_least))

    bar("onnx forward, 2^20: times torch", row("forward + packed mask, onnx"), "faster_than_torch", 18, True)
    bar("forward + packed mask, 2^20: times torch", row("forward + packed mask"), "faster_than_torch", 25, True)
    bar("forward + packed mask, 2^20: copies", row("forward + packed mask"), "times_copy", 1.5, False)
    bar(
        "forward + packed mask, 2^24 fresh: times torch",
        row("forward + packed mask", size=1 << 24),
        "faster_than_torch",
        10,
        True,
    )
    bar("per channel, first axis, 2^20: times torch", row("per channel, first axis"), "faster_than_torch", 25, True)
    bar("per channel, middle axis, 2^20: times torch", row("per channel, middle axis"), "faster_than_torch", 25, True)
    bar("bfloat16 forward, 2^20: times torch", row("forward + packed mask", "bfloat16"), "faster_than_torch", 15, True)
    bar("float16 forward, 2^20: times torch", row("forward + packed mask", "float16"), "faster_than_torch", 15, True)
    bar("backward from packed mask, 2^20: copies", row("backward from packed mask"), "times_copy", 1.5, False)
    bar(
        "learned backward per tensor, 2^20: times torch",
        row("learned backward, per tensor"),
        "faster_than_torch",
        8,
        True,
    )
    bar(
        "learned backward per channel, 2^20: times torch",
        row("learned backward, per channel"),
        "faster_than_torch",
        5,
        True,
    )
    for what, limit in (("FP8, static (cast)", 2), ("MXFP4", 3), ("NVFP4", 3.5)):
        bar(f"{what}, 2^20: copies", row(what), "times_copy", limit, False)
    # bfloat16: per tensor, in groups and in blocks.
    limits = {"avx512": (2, 3.5, 3, 4), "avx2": (4, 6, 5, 6)}.get(fq.info().target, ())
    for what, limit in zip(("forward + packed mask, onnx", "groups of 32", "MXFP4", "NVFP4"), limits, strict=False):
        bar(f"bfloat16, {what}, 2^20: copies", row(what, "bfloat16"), "times_copy", limit, False)
    peers = {"FP8, static (cast)": 10, "MXFP8 (cast)": 10, "MXFP4 (torchao)": 20, "NVFP4 (torchao)": 20}
    for what, limit in peers.items():
        bar(f"{what}, 2^20: times the peer", row(what), "faster_than_torch", limit, True)
    one, two = (row("forward + packed mask", size=1 << 22, threads=n) for n in (1, 2))
    if one and two:
        result.append(Bar("forward, 2^22: two threads over one", one.microseconds / two.microseconds, 1.7, True))
    if small:
        forward = max(small[name] for name in ("fake_quantize + packed mask", "fake_quantize_per_tensor_affine"))
        result.append(Bar("one element, forward per tensor: microseconds", forward, 5, False))
        _, mask = fq.fake_quantize(data(1 << 20, "float32"), SCALE, ZERO, SPEC, mask="packed")
        result.append(Bar("mask: bits per element", mask.nbytes * 8 / (1 << 20), 1, False))
    return result


def format_row(r: Row) -> str:
    torch_ratio = f"{r.faster_than_torch:8.1f}" if r.faster_than_torch else "       –"
    return (f"{r.op:<34} {r.dtype:<9} 2^{r.size.bit_length() - 1:<3} {r.threads:>3} {r.microseconds:>11.1f} "
            f"{r.ns_per_element:>8.3f} {r.gb_per_second:>8.1f} {r.times_copy:>8.2f} {torch_ratio}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="2^20 float32 only")
    parser.add_argument("--only", default="", help="only rows whose operation contains this string")
    options = parser.parse_args()
    seconds = 0.3 if options.quick else 0.6

    plan = [(d, 1 << 20) for d in (["float32"] if options.quick else DTYPES)]
    if not options.quick:
        plan += [("float32", 1 << n) for n in (12, 16, 22, 24)]
    print(fq.info(), f"torch      {torch.__version__}", sep="\n", end="\n\n")
    print(f"{'operation':<34} {'dtype':<9} size threads       us   ns/elem     GB/s   copies  x torch")
    rows = []
    for dtype, size in plan:
        builders = [per_tensor_cases, observing_cases, code_cases]
        if size >= 1 << 16:
            builders += [per_channel_cases, learned_cases, float_format_cases]
        for build in builders:
            for case in build(size, dtype):
                if options.only in case.op:
                    for threads in (1, 2):
                        rows.append(measure(case, threads, seconds))
                        print(format_row(rows[-1]), flush=True)
    small = {} if options.only else small_call_microseconds()
    for name, microseconds in small.items():
        print(f"one element: {name:<34} {microseconds:.2f} us")

    checked = bars(rows, small)
    print(f"\n{'figure':<52} measured   limit")
    for b in checked:
        print(
            f"{b.what:<52} {b.measured:8.2f} {'>=' if b.at_least else '<='} {b.limit:<5g} {'' if b.met else '  MISSED'}"
        )
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {
                    "info": dataclasses.asdict(fq.info()), "torch": torch.__version__, "processor": platform.processor(),
                    "rows": [dataclasses.asdict(r) for r in rows], "one_element_microseconds": small,
                    "bars": [dataclasses.asdict(b) | {"met": b.met} for b in checked],
                },
                file, indent=1,
            )  # fmt: skip
        print(f"\nwritten to {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
