"""Bits per character of a language model in 4 bits after `ptq.rotate`, beside the same model as it is.

    python benchmarks/text_rotated.py [--json FILE] [--quick] [--seeds N] [--steps N] [--gptq]

The model is a Llama of the size of the model in `text_model.py` (two layers of width 128, four heads), trained on the same
text. Models as small as this have few outliers. "outliers" is the same Llama with outliers put in by hand, as large models
have them: four channels of every norm are multiplied by 30, and the weights after it are divided by 30, so the float model
is the same.

    int4 (w4a4)        weights in groups of 32, inputs per token
    MXFP4, NVFP4       blocks of 32 with a power of two as scale, and of 16 with FP8 scales

The figures are bits per character on the test text, mean ± standard deviation over the seeds, and the share of the loss
that the rotation recovers: 1 - (rotated - float) / (nearest - float), of the means. `--gptq` adds rows with `ptq.gptq` after
either.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fakequant as fq
from digits_formats import blocks
from fakequant import presets, recipes
from ptq_digits import versions
from ptq_text import bits_per_character
from text_formats import per_token
from text_model import BLOCKS, CONTEXT, HEADS, WIDTH, text, trained

CONFIGS = {
    "int4 (w4a4)": per_token(presets.int4(), 4),
    "MXFP4": blocks(presets.mxfp4()),
    "NVFP4": recipes.nvfp4(),
}
OUTLIERS, FACTOR = 4, 30.0


class Llama(nn.Module):
    """A Llama that takes codes of shape (batch, CONTEXT) and returns logits."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=characters, hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=BLOCKS,
                num_attention_heads=HEADS, num_key_value_heads=HEADS, max_position_embeddings=CONTEXT,
                tie_word_embeddings=False, use_cache=False, bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip

    def forward(self, codes: Tensor) -> Tensor:
        logits: Tensor = self.llama(codes).logits
        return logits


@torch.no_grad()
def with_outliers(model: Llama, seed: int) -> Llama:
    """Returns the same function with large values in a few channels of the inputs of linear layers."""
    made = copy.deepcopy(model)
    channels = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(seed))[:OUTLIERS]
    for layer in made.llama.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        after = {
            layer.input_layernorm: (attention.q_proj, attention.k_proj, attention.v_proj),
            layer.post_attention_layernorm: (mlp.gate_proj, mlp.up_proj),
        }
        for norm, layers in after.items():
            norm.weight[channels] *= FACTOR
            for linear in layers:
                linear.weight[:, channels] /= FACTOR
    return made


def quantized(model: nn.Module, config: fq.QuantConfig, data: list[Tensor], gptq: bool) -> nn.Module:
    made = fq.prepare(copy.deepcopy(model), config.skip(type="Embedding"), data[0])
    fq.calibrate(made, data, progress=False)
    if gptq:
        fq.ptq.gptq(made, data, progress=False)
    return made.eval()


def measure(figures: dict[tuple[str, str, str], list[float]], seed: int, steps: int, with_gptq: bool) -> None:
    data = text(seed)
    generator = torch.Generator().manual_seed(seed)
    calibration = list(data.train[torch.randint(len(data.train), (128,), generator=generator)][:, :-1].split(16))
    llama = trained(data, seed, steps, Llama)
    models: dict[str, nn.Module] = {
        "Llama": llama,
        "outliers": with_outliers(llama, seed),
    }

    def add(model: str, config: str, row: str, made: Callable[[Tensor], Tensor]) -> None:
        figures.setdefault((model, config, row), []).append(bits_per_character(made, data.test))

    for name, model in models.items():
        rotated = copy.deepcopy(model)
        fq.ptq.rotate(rotated, calibration[0], seed=seed)
        add(name, "float", "nearest", model)
        add(name, "float", "rotated", rotated)
        for title, config in CONFIGS.items():
            for gptq in (False, True) if with_gptq else (False,):
                end = ", gptq" if gptq else ""
                add(name, title, "gptq" if gptq else "nearest", quantized(model, config, calibration, gptq))
                add(name, title, f"rotated{end}", quantized(rotated, config, calibration, gptq))


def formatted(figures: list[float]) -> str:
    spread = statistics.stdev(figures) if len(figures) > 1 else 0.0
    return f"{statistics.mean(figures):.4f} ± {spread:.4f}"


def print_table(figures: dict[tuple[str, str, str], list[float]]) -> list[dict[str, object]]:
    rows = [
        row for row in ("nearest", "rotated", "gptq", "rotated, gptq") if any(row == name for _, _, name in figures)
    ]
    pairs = [pair for pair in (("nearest", "rotated"), ("gptq", "rotated, gptq")) if pair[1] in rows]
    shares: list[dict[str, object]] = []
    print(f"\n{'bits per character':<34}" + "".join(f"| {row:<16}" for row in rows) + "| recovered" * len(pairs))
    for model, config in dict.fromkeys((model, config) for model, config, _ in figures):
        means = {row: statistics.mean(figures[model, config, row]) for row in rows if (model, config, row) in figures}
        cells = [f"| {formatted(figures[model, config, row]) if row in means else '':<16}" for row in rows]
        if config != "float":
            least = statistics.mean(figures[model, "float", "nearest"])
            for before, after in pairs:
                share = 1 - (means[after] - least) / (means[before] - least)
                cells.append(f"| {100 * share:7.0f} % ")
                shares.append({"model": model, "config": config, "row": after, "recovered": share})
        print(f"{model + ', ' + config:<34}" + "".join(cells))
    return shares


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400, help="of training in float")
    parser.add_argument("--quick", action="store_true", help="one seed and a quarter of the steps")
    parser.add_argument("--gptq", action="store_true", help="rows with gptq too, which take longer")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = 1, max(options.steps // 4, 1)
    torch.set_num_threads(1)
    figures: dict[tuple[str, str, str], list[float]] = {}
    start = time.perf_counter()
    for seed in range(options.seeds):
        measure(figures, seed, options.steps, options.gptq)
        print(f"seed {seed}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    shares = print_table(figures)
    if options.json:
        rows = [{"model": m, "config": c, "row": r, "bits": values} for (m, c, r), values in figures.items()]
        with open(options.json, "w") as file:
            found = {"versions": versions("fakequant", "torch", "transformers"), "steps": options.steps}
            json.dump(found | {"figures": rows, "recovered": shares}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
