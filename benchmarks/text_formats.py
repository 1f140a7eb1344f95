"""Bits per character of a language model in FP8, MX and NVFP4, beside integers: PTQ and QAT, compared with float.

    python benchmarks/text_formats.py [--json FILE] [--quick] [--seeds N] [--steps N]

The model and its text are described in `text_model.py`; every seed has another division of the text and another
initialization. Weights and inputs of all linear layers have the format of the row; attention, norms and the embedding
stay in float.

    int8               weights per channel, inputs per token
    int4               weights in groups of 32, inputs per token
    FP8 e4m3, e5m2     weights per channel, inputs per tensor with a moving average of the range
    MXFP8, 6, 4        blocks of 32 inputs with a power of two as scale: e4m3fn, e2m3, e2m1
    NVFP4              blocks of 16 inputs: e2m1, FP8 scales

QAT trains a quarter of the steps of the float training, with a tenth of its rate and a cosine decay to 0. "float,
trained on" does the same without quantizers. The figures are bits per character on the test text, mean ± standard
deviation over the seeds. Nothing was tuned.
"""

import argparse
import copy
import json
import statistics
import sys
import time

import torch
from torch import nn

import fakequant as fq
from digits_formats import blocks
from fakequant import presets, recipes
from fakequant.observers import Dynamic
from ptq_digits import versions
from ptq_text import bits_per_character
from text_model import BATCH, RATE, Text, loss, text, trained


def per_token(weight: fq.QuantSpec, bits: int) -> fq.QuantConfig:
    """Returns the config with this weight and inputs of `bits` bits per token."""
    tokens = fq.QuantSpec(bits=bits).per_token()
    return fq.QuantConfig(default=fq.LayerConfig(weight=weight, input=tokens, activation_observer=Dynamic()))


def without_operands(config: fq.QuantConfig) -> fq.QuantConfig:
    """Returns the config with products of two activations in float, as in the other rows."""
    return fq.QuantConfig(default=config.default)


CONFIGS = {
    "int8": per_token(presets.int8(), 8),
    "int4": per_token(presets.int4(), 4),
    "FP8 e4m3": without_operands(recipes.fp8()),
    "FP8 e5m2": without_operands(recipes.fp8(format="e5m2")),
    "MXFP8": recipes.mxfp8(),
    "MXFP6": blocks(presets.mxfp6()),
    "MXFP4": blocks(presets.mxfp4()),
    "NVFP4": recipes.nvfp4(),
}


def train(model: nn.Module, data: Text, steps: int, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed + 1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE / 10, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(steps):
        windows = data.train[torch.randint(len(data.train), (BATCH,), generator=generator)]
        optimizer.zero_grad()
        loss(model(windows[:, :-1]), windows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def run_seed(seed: int, steps: int) -> dict[str, float]:
    """Returns bits per character by the names of the rows."""
    data = text(seed)
    model = trained(data, seed, steps)
    found = {"float": bits_per_character(model, data.test)}
    longer = train(copy.deepcopy(model), data, steps // 4, seed)
    found["float, trained on"] = bits_per_character(longer, data.test)
    generator = torch.Generator().manual_seed(seed)
    calibration = data.train[torch.randint(len(data.train), (128,), generator=generator)][:, :-1].split(16)
    for name, config in CONFIGS.items():
        made = fq.prepare(copy.deepcopy(model), config.skip(type="Embedding"), calibration[0])
        fq.calibrate(made, calibration, progress=False)
        found[f"PTQ {name}"] = bits_per_character(made.eval(), data.test)
        found[f"QAT {name}"] = bits_per_character(train(made, data, steps // 4, seed), data.test)
    return found


def formatted(figures: list[float]) -> str:
    spread = statistics.stdev(figures) if len(figures) > 1 else 0.0
    return f"{statistics.mean(figures):.3f} ± {spread:.3f}"


def print_table(figures: dict[str, list[float]]) -> None:
    print(f"\n{'bits per character':<20}| {'PTQ':<14}| QAT")
    for name in ("float", "float, trained on"):
        print(f"{name:<20}| {formatted(figures[name])}")
    for name in CONFIGS:
        print(f"{name:<20}| {formatted(figures[f'PTQ {name}']):<14}| {formatted(figures[f'QAT {name}'])}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=800, help="of the float training")
    parser.add_argument("--quick", action="store_true", help="one seed and a quarter of the steps")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = 1, 200
    torch.set_num_threads(1)
    start = time.perf_counter()
    figures: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        for name, value in run_seed(seed, options.steps).items():
            figures.setdefault(name, []).append(value)
        print(f"seed {seed}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print_table(figures)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"versions": versions("fakequant", "torch"), "steps": options.steps, "bits_per_character": figures},
                file,
                indent=1,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
