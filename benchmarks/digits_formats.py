"""Accuracy of a small CNN in FP8, MX and NVFP4, beside integers: PTQ and QAT, compared with float.

    python benchmarks/digits_formats.py [--json FILE] [--quick] [--seeds N] [--epochs N]

Network, data, training and learning rates are those of `digits_cnn.py`. Weights and inputs of all layers have the format
of the row:

    int8               the recipe: weights per channel, activations per tensor
    int4               4 bits everywhere: weights per channel, activations per tensor with a moving average of the range
    FP8 e4m3, e5m2     the recipe `fp8`: weights per channel, activations per tensor with a moving average
    MXFP8, 6, 4        blocks of 32 input channels with a power of two as scale: e4m3fn, e2m3, e2m1. The scale rule is
                       `floor` unless another one is named
    NVFP4              blocks of 16 input channels: e2m1, FP8 scales

The accuracy is that of the last step, on the test images, in percent: mean ± standard deviation over the seeds.
Nothing was tuned.
"""

import copy
import dataclasses
import sys

import fakequant as fq
from digits import BATCH, QUANTIZED_RATE, accuracy, formatted, measure
from digits_cnn import FROZEN, min_max, train, train_in_float
from fakequant import presets, recipes


def blocks(spec: fq.QuantSpec) -> fq.QuantConfig:
    """Returns the config with weights and inputs of this spec."""
    return fq.QuantConfig(default=fq.LayerConfig(weight=spec, input=spec))


CONFIGS = {
    "int8": recipes.int8(),
    "int4": dataclasses.replace(min_max(4), first_last_bits=None),
    "FP8 e4m3": recipes.fp8(),
    "FP8 e5m2": recipes.fp8(format="e5m2"),
    "MXFP8": recipes.mxfp8(),
    "MXFP6": blocks(presets.mxfp6()),
    "MXFP4": blocks(presets.mxfp4()),
    "MXFP4, even": blocks(presets.mxfp4(scale_rule="even")),
    "MXFP4, rceil": blocks(presets.mxfp4(scale_rule="rceil")),
    "NVFP4": recipes.nvfp4(),
}


def run_seed(seed: int, epochs: int) -> dict[str, float]:
    """Returns accuracies by the names of the rows."""
    data, model, found = train_in_float(seed, epochs)
    for name, config in CONFIGS.items():
        made = fq.prepare(copy.deepcopy(model), config, data[0][:BATCH])
        fq.calibrate(made, data[0].split(BATCH), progress=False)
        found[f"PTQ {name}"] = accuracy(made, data)
        train(made, data, epochs, QUANTIZED_RATE, seed, FROZEN)
        found[f"QAT {name}"] = accuracy(made, data)
    return found


def print_table(figures: dict[str, list[float]]) -> None:
    print(f"\n{'accuracy in percent':<20}| {'PTQ':<12}| QAT")
    for name in ("float", "float, trained on"):
        print(f"{name:<20}| {formatted(figures[name])}")
    for name in CONFIGS:
        print(f"{name:<20}| {formatted(figures[f'PTQ {name}']):<12}| {formatted(figures[f'QAT {name}'])}")


if __name__ == "__main__":
    sys.exit(measure(__doc__, 12, run_seed, print_table))
