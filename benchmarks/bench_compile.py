"""Fake quantization compiled by Inductor, compared with the same model without it and with eager mode.

    python benchmarks/bench_compile.py [--json FILE] [--quick]

Inference: `relu(x) + y` on 2^20 floats, compiled alone; followed by fake quantization and compiled ("fused"); and the
latter in eager mode. Compiled and eager results must have the same bits, which is checked before anything is timed.

Training: one step of each model of bench_train_step.py, eager and compiled, in float and with `recipes.int8()`.

"?" and "others" have the same meaning as in bench_torch.py.
"""

import argparse
import copy
import dataclasses
import gc
import json
import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

import fakequant as fq
from bench_kernels import nothing_to_compare
from bench_torch import THREADS, Case, Row, machine, measure, without_ao_warnings
from bench_train_step import TASKS, Task, ours, stepper

SHAPE = (1024, 1024)
LIMIT = 1.3  # for the time of "fused" over that of relu + add, per tensor
UINT8 = fq.QuantSpec(symmetric=False, signed=False)
CHANNEL, GROUP, TOKEN = (
    fq.QuantSpec(axis=-1),
    fq.QuantSpec(axis=-1, group_size=32),
    fq.QuantSpec().per_token(),
)
SCALE, ZERO_POINT = torch.tensor(0.02), torch.tensor(3, dtype=torch.int32)
SCALES, GROUPS = torch.linspace(0.01, 0.06, SHAPE[1]), torch.linspace(0.01, 0.06, SHAPE[0] * 32).reshape(SHAPE[0], 32)
QUANTIZED: dict[str, Callable[[Tensor], Tensor]] = {
    "per tensor": lambda x: fq.fake_quantize(x, SCALE, ZERO_POINT, UINT8),
    "per channel, last axis": lambda x: fq.fake_quantize(x, SCALES, 0, CHANNEL),
    "groups of 32": lambda x: fq.fake_quantize(x, GROUPS, 0, GROUP),
    "learned, per tensor": lambda x: fq.fake_quantize_learned(x, SCALE, ZERO_POINT.float(), UINT8),
    "dynamic, per token": lambda x: fq.fake_quantize(x, *fq.choose_qparams(fq.min_max(x, TOKEN), TOKEN), TOKEN),
}
BASE, EAGER, FUSED = "relu + add", "eager", "fused"


def relu_add(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x) + y


def compiled(f: Callable, *args: Tensor) -> Callable:
    """Compiles `f` for these arguments, and runs it once so that compilation is not timed."""
    run = torch.compile(f, fullgraph=True, dynamic=False)
    run(*args)
    return run


def inference(seconds: float) -> list[Row]:
    x, y = torch.randn(SHAPE), torch.randn(SHAPE)
    rows = []
    for name, quantize in QUANTIZED.items():

        def both(x: Tensor, y: Tensor, quantize: Callable = quantize) -> Tensor:
            return quantize(relu_add(x, y))

        torch._dynamo.reset()
        base, fused = compiled(relu_add, x, y), compiled(both, x, y)
        assert torch.equal(fused(x, y).view(torch.int32), both(x, y).view(torch.int32)), name
        functions = {BASE: base, EAGER: both, FUSED: fused}
        contenders = {label: lambda f=f: f(x, y) for label, f in functions.items()}
        case = Case(name, "float32", "2^20", x.numel(), contenders, nothing_to_compare)
        rows += [measure(case, threads, seconds) for threads in THREADS]
    return rows


def training(task: Task, seconds: float) -> list[Row]:
    torch.manual_seed(0)
    model, x, target = task.build(), torch.randn(task.shape), torch.randint(10, task.shape[:1])
    models: dict[str, nn.Module] = {"float": copy.deepcopy(model), "int8": ours(fq.recipes.int8(), model, x)}
    torch._dynamo.reset()
    steps = {}
    for name, trained in models.items():
        steps[name] = stepper(trained, x, target)
        other = copy.deepcopy(trained)
        steps[f"{name}, compiled"] = stepper(torch.compile(other), x, target)
    case = Case(task.name, "float32", f"batch {len(x)}", None, steps, nothing_to_compare)
    return [measure(case, threads, seconds) for threads in THREADS]


def show(rows: list[Row], contenders: tuple[str, ...], base: str) -> None:
    print(f"\n{'':<24} | threads | " + " | ".join(f"{name:>16}" for name in contenders) + " | others")
    for row in rows:
        cells = [
            f"{row.seconds[name] * 1e3:7.3f} ms {row.seconds[name] / row.seconds[base]:5.2f}" for name in contenders
        ]
        print(
            f"{row.what:<24} | {row.threads:>7} | "
            + " | ".join(f"{cell:>16}" for cell in cells)
            + f" | {row.others:.1f}{'' if row.repeated else ' ?'}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    options = parser.parse_args()
    without_ao_warnings()
    warnings.filterwarnings("ignore", message=".* should not be instantiated", category=DeprecationWarning)
    gc.freeze()
    share = 0.2 if options.quick else 1

    facts = machine()
    print(fq.info(), f"load       {facts['load_average'][0]:.1f}", sep="\n")
    with torch.no_grad():
        inferred = inference(3 * share)
    show(inferred, (BASE, EAGER, FUSED), BASE)
    worst = max(row.seconds[FUSED] / row.seconds[BASE] for row in inferred if row.what == "per tensor")
    print(
        f"\nper tensor, fused over relu + add: {worst:.2f}, limit {LIMIT}, met: {'yes' if worst <= LIMIT else 'MISSED'}"
    )
    trained = [row for task in TASKS for row in training(task, task.seconds * share)]
    show(trained, ("float", "float, compiled", "int8", "int8, compiled"), "float")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({**facts, "rows": [dataclasses.asdict(row) for row in inferred + trained]}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
