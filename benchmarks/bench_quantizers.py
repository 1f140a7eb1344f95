"""Quantizer modules of `fakequant.nn`, compared with those of torch.ao: observing, quantizing, learning.

    python benchmarks/bench_quantizers.py [--json FILE] [--quick] [--only SUBSTRING]

Each row times one module and its torch.ao counterparts, in turns and on the same tensor. Modules are timed as in
training: `y = module(x); y.backward(g)`, then the gradients are dropped. Observers are also timed alone.

Before a row is timed, the modules are compared after three batches. Those that choose scales by the same rule must
have the same scales and zero points, bit by bit, and the same values except for one code at ties. torch's fused
operator chooses scales by another rule; its values must be within one code.

"others" and "?" have the same meaning as in bench_torch.py. The last table compares the ratios with the limits this
library is held to, for one thread; those for two threads are only reported.
"""

import argparse
import copy
import dataclasses
import gc
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.ao import quantization as ao
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

import fakequant as fq
from bench_torch import THREADS, Case, Row, forward_backward, gradient_for, leaf, machine, measure, without_ao_warnings
from fakequant import observers, presets
from fakequant.nn import FakeQuantize, LearnedFakeQuantize
from fakequant.testing.assertions import assert_same_bits
from fakequant.testing.timing import Contender

FLAT, WEIGHT, SMALL = (1 << 20,), (1024, 1024), (256,)
SIZES = {FLAT: "2^20", WEIGHT: "1024x1024", SMALL: "256"}
# The range of torch.ao's weights, -128 to 127. The preset has a narrow range, which changes the scale.
INT8 = dataclasses.replace(presets.int8(), narrow_range=False)
AO, FUSED, LEARNABLE = "FakeQuantize", "Fused", "Learnable"
TIES = 1e-3  # the share of elements that may lie on a tie, where the two numerics may round differently


# --- comparing ------------------------------------------------------------------------------------


def three_batches(module: nn.Module, x: Tensor) -> Tensor:
    """Returns the result of the last of three batches."""
    for factor in (1.0, 0.7, 1.9):
        y = module(x.detach() * factor)
    return y.detach()


def assert_same_values(y: Tensor, other: Tensor, scale: Tensor, what: str, ties: float = TIES) -> None:
    steps = ((y - other).abs() / scale.reshape(-1, *[1] * (y.dim() - 1))).round()
    assert float(steps.max()) <= 1, f"{what}: {float(steps.max())} codes apart"
    assert float((steps > 0).double().mean()) <= ties, f"{what}: {int((steps > 0).sum())} elements differ"


def assert_same_scales(ours: nn.Module, rival: nn.Module, what: str) -> None:
    for name in ("scale", "zero_point"):
        mine, theirs = (getattr(module, name).detach().reshape(-1) for module in (ours, rival))
        assert_same_bits(theirs.to(mine.dtype).numpy(), mine.numpy(), what, name)


def compare(ours: nn.Module, rivals: dict[str, nn.Module], x: Tensor, what: str) -> None:
    ours = copy.deepcopy(ours)
    y = three_batches(ours, x)
    for name, rival in rivals.items():
        fresh = copy.deepcopy(rival)
        other = three_batches(fresh, x)
        if name == FUSED:  # chooses scales by another rule
            assert_same_values(y, other, ours.scale, f"{what}, {name}", ties=1.0)
        else:
            assert_same_scales(ours, fresh, f"{what}, {name}")
            assert_same_values(y, other, ours.scale, f"{what}, {name}")


def nothing_to_compare() -> None:
    pass


# --- cases ----------------------------------------------------------------------------------------


def module_case(
    what: str,
    ours: nn.Module,
    rivals: dict[str, nn.Module],
    shape: tuple[int, ...],
    compared: tuple[str, ...] = (AO, FUSED, LEARNABLE),
) -> Case:
    x = leaf(shape)
    g = gradient_for(x)
    contenders = {
        name: forward_backward(copy.deepcopy(module), x, g, ())
        for name, module in {"ours": ours, **rivals, "relu": torch.relu}.items()
    }
    same = partial(compare, ours, {name: rivals[name] for name in compared if name in rivals}, x, what)
    return Case(what, "float32", SIZES[shape], x.numel(), contenders, same)


def activation_rivals() -> dict[str, nn.Module]:
    """torch.ao's defaults: quint8, 0 to 255, per tensor, moving average with the constant 0.01."""
    return {AO: ao.FakeQuantize(), FUSED: ao.FusedMovingAvgObsFakeQuantize()}


def weight_rivals() -> dict[str, nn.Module]:
    return {AO: ao.default_per_channel_weight_fake_quant(), FUSED: ao.default_fused_per_channel_wt_fake_quant()}


def training_cases() -> Iterator[Case]:
    activations = FakeQuantize(presets.uint8())
    yield module_case("uint8 MovingAverage", activations, activation_rivals(), FLAT)
    yield module_case("uint8 MovingAverage", activations, activation_rivals(), SMALL)
    average = FakeQuantize(INT8, observers.MovingAverage(), shape=WEIGHT)
    yield module_case("int8 per channel MovingAverage", average, weight_rivals(), WEIGHT)
    latest = FakeQuantize(INT8, observers.Dynamic(), shape=WEIGHT)
    # torch.ao has no dynamic observer. Its moving averages take the same time.
    yield module_case("int8 per channel Dynamic", latest, weight_rivals(), WEIGHT, compared=())


def evaluation_cases() -> Iterator[Case]:
    for what, ours, rivals, shape in (
        ("eval, uint8", FakeQuantize(presets.uint8()), activation_rivals(), FLAT),
        ("eval, uint8", FakeQuantize(presets.uint8()), activation_rivals(), SMALL),
        (
            "eval, int8 per channel",
            FakeQuantize(INT8, observers.MovingAverage(), shape=WEIGHT),
            weight_rivals(),
            WEIGHT,
        ),
    ):
        for module in (ours, *rivals.values()):
            three_batches(module, leaf(shape))
            module.eval()
        for module in rivals.values():
            module.disable_observer()
        yield module_case(what, ours, rivals, shape)


def learnable(observer: type, qmin: int, qmax: int, **options) -> nn.Module:
    module = _LearnableFakeQuantize(observer, quant_min=qmin, quant_max=qmax, **options)
    module.enable_param_learning()
    return module


def learned_case(what: str, ours: LearnedFakeQuantize, rival: nn.Module, shape: tuple[int, ...]) -> Case:
    """Starts both from the same scales, without a gradient factor, which is torch.ao's default."""
    x = leaf(shape)
    g = gradient_for(x)
    ours.initialize(x)
    with torch.no_grad():
        rival.scale.copy_(ours.scale)
        rival.zero_point.copy_(ours.zero_point)
    contenders = {
        name: forward_backward(module, x, g, tuple(module.parameters()))
        for name, module in {"ours": ours, LEARNABLE: rival}.items()
    }
    contenders["relu"] = forward_backward(torch.relu, x, g)

    def same() -> None:
        assert_same_scales(ours, rival, what)
        assert_same_values(ours(x).detach(), rival(x).detach(), ours.scale, what)

    return Case(what, "float32", SIZES[shape], x.numel(), contenders, same)


def learned_cases() -> Iterator[Case]:
    uint8 = LearnedFakeQuantize(presets.uint8(), grad_factor=1.0)
    yield learned_case("learned uint8", uint8, learnable(ao.MovingAverageMinMaxObserver, 0, 255), FLAT)
    int8 = LearnedFakeQuantize(INT8, init=observers.MinMax(), shape=WEIGHT, grad_factor=1.0)
    per_channel = learnable(
        ao.MovingAveragePerChannelMinMaxObserver, -128, 127, channel_len=WEIGHT[0], dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric, ch_axis=0,
    )  # fmt: skip
    yield learned_case("learned int8 per channel", int8, per_channel, WEIGHT)


# The observers and their counterparts in torch.ao, None where it has none.
OBSERVERS: dict[observers.Observer, type | None] = {
    observers.MinMax(): ao.MinMaxObserver,
    observers.MovingAverage(): ao.MovingAverageMinMaxObserver,
    observers.Dynamic(): None,
    observers.Percentile(): None,
    observers.Histogram(): ao.HistogramObserver,
    observers.Entropy(): None,
    observers.MSE(): None,
}


def observing_cases(quick: bool) -> Iterator[Case]:
    """Yields a row for observing a tensor and, for observers that search, a row for choosing the range."""
    x = leaf(FLAT).detach()
    for observer, rival in OBSERVERS.items():
        if quick and rival is None:
            continue
        ours = FakeQuantize(presets.uint8(), observer)
        ours.quantizing = False
        contenders: dict[str, Contender] = {"ours": partial(ours, x), "relu": partial(torch.relu, x)}
        if rival is not None:
            theirs = rival(dtype=torch.quint8)
            contenders["observer"] = partial(theirs, x)
        name = type(observer).__name__
        yield Case(f"observe, {name}", "float32", "2^20", x.numel(), contenders, nothing_to_compare)
        if observer.searches:
            ours(x)
            contenders = {"ours": ours.refresh, "relu": partial(torch.relu, x)}
            if rival is not None:
                theirs(x)
                contenders["observer"] = theirs.calculate_qparams
            yield Case(f"search, {name}", "float32", "any", None, contenders, nothing_to_compare)


# --- limits ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Bar:
    what: str
    size: str
    rival: str
    limit: float | None  # for one thread; None if only reported
    measured: dict[int, float]  # by number of threads
    doubtful: bool

    @property
    def met(self) -> bool:
        return self.limit is None or self.measured[1] >= self.limit


LIMITS = {
    ("uint8 MovingAverage", "2^20"): 6,
    ("uint8 MovingAverage", "256"): 2,
    ("int8 per channel MovingAverage", "1024x1024"): 8,
    ("int8 per channel Dynamic", "1024x1024"): 8,
    ("learned uint8", "2^20"): 7,
}
REPORTED = {("uint8 MovingAverage", "256", FUSED)}  # exempt from the limit of its row


def ratios(row: Row) -> dict[str, float]:
    """Returns the rivals' times divided by ours."""
    return {name: t / row.seconds["ours"] for name, t in row.seconds.items() if name not in ("ours", "relu")}


def bars(rows: list[Row]) -> list[Bar]:
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        for rival in ratios(row):
            found.setdefault((row.what, row.size, rival), []).append(row)
    return [
        Bar(
            *key,
            None if key in REPORTED else LIMITS.get(key[:2]),
            {row.threads: ratios(row)[key[2]] for row in group},
            not all(row.repeated for row in group),
        )
        for key, group in found.items()
    ]


# --- output ---------------------------------------------------------------------------------------


def print_heading(title: str) -> None:
    print(
        f"\n{title:<34} {'size':<10} threads {'us':>10} {'us relu':>10} {'relus':>8}  {'others':>6}  torch.ao: us, x ours"
    )


def format_row(row: Row) -> str:
    us = {name: t * 1e6 for name, t in row.seconds.items()}
    rivals = "   ".join(f"{name} {us[name]:.1f} {ratio:.2f}x" for name, ratio in ratios(row).items()) or "–"
    return (f"{row.what:<34} {row.size:<10} {row.threads:>7} {us['ours']:>10.1f} {us['relu']:>10.1f} "
            f"{us['ours'] / us['relu']:>8.2f}  {row.others:>6.1f}{' ' if row.repeated else '?'} {rivals}")  # fmt: skip


def print_bars(checked: list[Bar]) -> None:
    names = [f"{b.what}, {b.size}, x {b.rival}" for b in checked]
    width = max(map(len, names), default=0)
    print(f"\n{'figure':<{width}} | limit  | 1 thread | 2 threads | ok")
    for name, b in zip(names, checked, strict=True):
        asked, verdict = ("report", "–") if b.limit is None else (f">= {b.limit:g}", "yes" if b.met else "MISSED")
        print(
            f"{name:<{width}} | {asked:<6} | {b.measured[1]:>8.2f} | {b.measured[2]:>9.2f} | {verdict}{'?' * b.doubtful}"
        )


def write_json(path: str, facts: dict, rows: list[Row], checked: list[Bar]) -> None:
    figures = {
        **facts,
        "rows": [dataclasses.asdict(row) | {"x_rivals": ratios(row)} for row in rows],
        "bars": [dataclasses.asdict(b) | {"met": b.met} for b in checked],
    }
    with open(path, "w") as file:
        json.dump(figures, file, indent=1)
    print(f"\nwritten to {path}")


def run_section(title: str, cases: Iterator[Case], only: str, seconds: float) -> list[Row]:
    rows: list[Row] = []
    for case in cases:
        if only in case.what:
            if not rows:
                print_heading(title)
            for threads in THREADS:
                rows.append(measure(case, threads, seconds))
                print(format_row(rows[-1]), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="shorter, without the observers that torch.ao lacks")
    parser.add_argument("--only", default="", help="only rows whose name contains this string")
    options = parser.parse_args()
    without_ao_warnings()
    gc.freeze()

    facts = machine()
    print(fq.info(), f"load       {facts['load_average'][0]:.1f}", sep="\n")
    sections: list[tuple[str, Callable[[], Iterator[Case]]]] = [
        ("observing + quantizing, fwd + bwd", training_cases),
        ("learned, fwd + bwd", learned_cases),
        ("evaluation, fwd + bwd", evaluation_cases),
        ("observing only", partial(observing_cases, options.quick)),
    ]
    seconds = 0.3 if options.quick else 1.5
    rows = [row for title, cases in sections for row in run_section(title, cases(), options.only, seconds)]
    checked = bars(rows)
    print_bars(checked)
    if options.json:
        write_json(options.json, facts, rows, checked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
