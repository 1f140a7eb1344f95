"""Bits per character of a small Llama with 4-bit weights: rounded, GPTQ, trained, distilled, and with LoRA.

    python benchmarks/text_recipes.py [--json FILE] [--quick] [--seeds N] [--steps N]

The model is the LlamaForCausalLM of `llama_cpp.py`, with one block of width 256 and 450,000 weights, and the text is the
one of `text_model.py`; every seed has another division of it and another initialization. All rows start from the
same float model, which has been trained with a decay of the rate to 0. Embedding and head stay in float, in q4_0 they have
8 bits. Rows that are trained get a quarter of the steps of the float model, with cosine decay to 0:

    float, trained on       no quantizers: what the further steps alone change
    nearest                 codes of the float weights
    GPTQ                    `ptq.gptq` on 128 windows of the training text
    trained                 cross entropy with the text, AdamW, rate 3e-4
    distilled               KL divergence to the float model instead (`distill`, temperature 1), same rate
    LoRA, distilled         the same loss; only adapters of rank 16 on all linear layers are trained, rate 3e-3, then merged

"bits per character" is on every second window of the test text, and "KL" the mean KL divergence to the float model there, in
bits. Figures are mean ± standard deviation over the seeds. Nothing was tuned.
"""

import argparse
import copy
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import fakequant as fq
from llama_cpp import Characters
from ptq_digits import versions
from ptq_text import bits_per_character, formatted
from text_model import BATCH, RATE, Text, loss, text, trained

EVERY = 2  # of the test windows, one is measured
WINDOWS = 128  # of calibration
RANK, LORA_RATE = 16, RATE
FLOAT, LONGER = "float", "float, trained on"
GRIDS = {
    "int4, groups of 32": fq.recipes.int4_weight_only(32).skip(type="Embedding").skip("*lm_head"),
    "NVFP4": fq.recipes.nvfp4_weight_only().skip(type="Embedding").skip("*lm_head"),
    "q4_0": fq.recipes.gguf("q4_0"),
}
Loss = Callable[[Tensor, Tensor], Tensor]


class Figure(NamedTuple):
    """What was measured of a row: bits per character, and the KL divergence to the float model in bits."""

    bits: float
    kl: float


def train(model: nn.Module, data: Text, steps: int, seed: int, rate: float, compute_loss: Loss) -> nn.Module:
    """Trains what requires gradients. `compute_loss` takes logits and windows."""
    generator = torch.Generator().manual_seed(seed + 1000)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for _ in range(steps):
        windows = data.train[torch.randint(len(data.train), (BATCH,), generator=generator)]
        optimizer.zero_grad()
        compute_loss(model(windows[:, :-1]), windows).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def divergence(model: nn.Module, teacher: nn.Module, windows: Tensor) -> float:
    """Returns the mean KL divergence of the predictions from the teacher's, in bits."""
    compare = fq.distill(model, teacher)
    sums = [float(compare(model(x), x)) * len(x) for x in windows[:, :-1].split(128)]
    return sum(sums) / len(windows) / math.log(2)


def prepared(model: Characters, config: fq.QuantConfig, data: Text) -> Characters:
    """Returns a copy of a model with quantizers."""
    made = copy.deepcopy(model)
    made.llama = fq.prepare(made.llama, config, data.train[:1, :-1])
    return made.eval()


def with_adapters(made: Characters) -> Characters:
    """Adds LoRA adapters to all linear layers of a prepared model, inside the quantized weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT, about its own arguments
        adapted = get_peft_model(made.llama, LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear"))
    made.llama = fq.nn.quantize_adapters(adapted)
    return made


def run_seed(seed: int, steps: int) -> dict[str, Figure]:
    """Returns what was measured, by the names of the rows."""
    data = text(seed)
    teacher = trained(data, seed, steps, Characters).requires_grad_(False)
    model = copy.deepcopy(teacher).requires_grad_(True)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(data.train), (WINDOWS,), generator=generator)
    calibration = data.train[chosen][:, :-1].split(16)
    more, windows = steps // 4, data.test[::EVERY]
    found: dict[str, Figure] = {}

    def measure(name: str, made: nn.Module) -> None:
        found[name] = Figure(bits_per_character(made, windows), divergence(made, teacher, windows))

    measure(FLOAT, model)
    measure(LONGER, train(copy.deepcopy(model), data, more, seed, RATE / 10, loss))
    for grid, config in GRIDS.items():
        made = prepared(model, config, data)
        measure(f"{grid}: nearest", made)
        fq.ptq.gptq(made.llama, calibration, progress=False)
        measure(f"{grid}: GPTQ", made.eval())
        made = prepared(model, config, data)
        measure(f"{grid}: trained", train(made, data, more, seed, RATE / 10, loss))
        made = prepared(model, config, data)
        like_float = fq.distill(made, teacher)
        compare = lambda logits, windows: like_float(logits, windows[:, :-1])  # noqa: B023, E731
        measure(f"{grid}: distilled", train(made, data, more, seed, RATE / 10, compare))
        made = with_adapters(prepared(model, config, data))
        like_float = fq.distill(made, teacher)
        train(made, data, more, seed, LORA_RATE, compare)
        made.llama = made.llama.merge_and_unload()
        measure(f"{grid}: LoRA, distilled", made)
    return found


def print_table(figures: dict[str, list[Figure]]) -> None:
    """Prints a line for each row."""
    print(f"\n{'':<36}| {'bits per character':<19}| {'over float':<17}| KL to float")
    for name, several in figures.items():
        bits, over = [f.bits for f in several], [f.bits - g.bits for f, g in zip(several, figures[FLOAT], strict=True)]
        print(f"{name:<36}| {formatted(bits):<19}| {formatted(over):<17}| {formatted([f.kl for f in several])}")


def main() -> int:
    """Runs all seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400, help="of the float training")
    parser.add_argument("--quick", action="store_true", help="one seed and a quarter of the steps")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = 1, max(options.steps // 4, 4)
    torch.set_num_threads(1)
    start = time.perf_counter()
    figures: dict[str, list[Figure]] = {}
    for seed in range(options.seeds):
        for name, figure in run_seed(seed, options.steps).items():
            figures.setdefault(name, []).append(figure)
        print(f"seed {seed}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print_table(figures)
    if options.json:
        data = {
            name: {"bits": [f.bits for f in several], "kl": [f.kl for f in several]}
            for name, several in figures.items()
        }
        data["mean KL"] = {name: statistics.mean(f.kl for f in several) for name, several in figures.items()}
        with open(options.json, "w") as file:
            json.dump(
                {"versions": versions("fakequant", "torch", "transformers", "peft"), "rows": data}, file, indent=1
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
