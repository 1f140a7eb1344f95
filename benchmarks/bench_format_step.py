"""Time of a QAT step in FP8, MX and NVFP4, compared with the float step and with torchao's MX.

    python benchmarks/bench_format_step.py [--json FILE] [--quick]

The model is the encoder of `bench_train_step.py`, and a step is the same. All contenders start from the same weights and
take turns; the shortest of many steps counts. Limits apply to two threads; figures for one thread are only reported.

    int8               recipes.int8(), for comparison
    fp8                recipes.fp8(): weights per channel, activations per tensor, observed in every step
    mxfp8, nvfp4       the recipes: weights and inputs, with scales found in every step
    mxfp4              MXFP4 weights and inputs
    torchao MXFP8, 4   torchao's MX QAT (`MXFakeQuantizedLinear`) in all linear layers: weights and inputs, scale rule
                       "floor". Attention stays in float, and biases get no gradient.
"""

import argparse
import copy
import gc
import json
import sys

import torch
from torch import Tensor, nn

import fakequant as fq
from bench_kernels import nothing_to_compare
from bench_torch import THREADS, Case, Row, machine, measure
from bench_train_step import ASKED_AT, FLOAT, Encoder, ours, stepper, without_peer_noise
from fakequant import presets, recipes

LIMITS = {"mxfp8": 1.25, "mxfp4": 1.25}  # times the float step


def mxfp4() -> fq.QuantConfig:
    return fq.QuantConfig(default=fq.LayerConfig(weight=presets.mxfp4(), input=presets.mxfp4()))


def with_torchao(model: nn.Module, element: torch.dtype) -> nn.Module:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.qat.mx import MXFakeQuantizeConfig, MXFakeQuantizedLinear

    config = MXFakeQuantizeConfig(dtype=element, scaling_mode=ScaleCalculationMode.FLOOR)
    prepared = copy.deepcopy(model)
    linear = [name for name, module in prepared.named_modules() if type(module) is nn.Linear]
    for name in linear:
        prepared.set_submodule(name, MXFakeQuantizedLinear.from_linear(prepared.get_submodule(name), config, config))
    return prepared


def contenders(model: nn.Module, x: Tensor) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Returns the models to train, and for each missing one the reason."""
    configs = {"int8": recipes.int8(), "fp8": recipes.fp8(), "mxfp8": recipes.mxfp8(), "mxfp4": mxfp4()}
    models = {FLOAT: copy.deepcopy(model)}
    models |= {name: ours(config, model, x) for name, config in {**configs, "nvfp4": recipes.nvfp4()}.items()}
    missing = {}
    peers = {"torchao MXFP8": "float8_e4m3fn", "torchao MXFP4": "float4_e2m1fn_x2"}
    for name, element in peers.items():
        try:
            prepared = with_torchao(model, getattr(torch, element)).train()
            prepared(x).sum().backward()
            models[name] = prepared
        except ImportError as error:
            missing[name] = f"not installed: {error}"
        except Exception as error:  # reported, as a result
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return models, missing


def print_table(rows: dict[int, Row], missing: dict[str, str]) -> None:
    print(f"\n{'contender':<16}" + "".join(f"| ms, {n} thr. | x float " for n in THREADS) + "| limit   | met")
    for name in rows[ASKED_AT].seconds:
        cells = []
        for threads in THREADS:
            times = rows[threads].seconds
            doubt = " " if rows[threads].repeated else "?"
            cells.append(f"| {times[name] * 1e3:9.2f}{doubt} | {times[name] / times[FLOAT]:6.2f}{doubt} ")
        times, limit = rows[ASKED_AT].seconds, LIMITS.get(name)
        met = "" if limit is None else f"<= {limit:.2f} | {'yes' if times[name] <= limit * times[FLOAT] else 'MISSED'}"
        print(f"{name:<16}{''.join(cells)}| {met}")
    for name, reason in missing.items():
        print(f"{name}: {reason}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    options = parser.parse_args()
    without_peer_noise()
    gc.freeze()
    facts = machine()
    print(fq.info(), f"load       {facts['load_average'][0]:.1f}", sep="\n")
    torch.manual_seed(0)
    torch.set_num_threads(ASKED_AT)
    model, x, target = Encoder(), torch.randn(16, 64, 384), torch.randint(10, (16,))
    models, missing = contenders(model, x)
    steps = {name: stepper(trained, x, target) for name, trained in models.items()}
    case = Case("encoder", "float32", "batch 16", None, steps, nothing_to_compare)
    rows = {threads: measure(case, threads, 6 if options.quick else 30) for threads in THREADS}
    print_table(rows, missing)
    if options.json:
        ratios = {n: {name: s / row.seconds[FLOAT] for name, s in row.seconds.items()} for n, row in rows.items()}
        seconds = {n: row.seconds for n, row in rows.items()}
        with open(options.json, "w") as file:
            json.dump(
                {**facts, "seconds": seconds, "x_float": ratios, "limits": LIMITS, "missing": missing}, file, indent=1
            )
        print(f"\nwritten to {options.json}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
