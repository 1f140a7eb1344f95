"""Time of `generate` with prepared language models, over the float model.

    python benchmarks/bench_language_model.py [--json FILE] [--quick] [--only SUBSTRING]

The model is a Llama with four layers of width 512 and 4,096 tokens, 15 million random parameters, on one thread. It
generates 32 tokens, greedily, from 8. "frozen" is within `fq.nn.frozen_weights(model)`, which every call enters anew, so
the time includes quantizing each weight once. Contenders take turns, and the shortest times count. Tokens are compared
first: those with and without the context must be the same.
"""

import argparse
import copy
import json
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fakequant as fq
from fakequant.testing.timing import best_times

CONFIG = LlamaConfig(
    vocab_size=4096, hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=4, max_position_embeddings=256,
)  # fmt: skip
PROMPT, NEW = torch.arange(8).reshape(1, 8), 32
# By recipe, the largest ratio that is allowed for the frozen model. None where there is no limit.
RECIPES = {
    "int4 weights, groups of 32": (fq.recipes.int4_weight_only(32), 1.3),
    "NVFP4 weights": (fq.recipes.nvfp4_weight_only(), None),
    "int8, inputs per token": (fq.recipes.int8_dynamic(), None),
    "Q4_0, inputs Q8_0": (fq.recipes.gguf("q4_0"), None),
}


def generate(model: LlamaForCausalLM, *, frozen: bool = False) -> torch.Tensor:
    """Returns the tokens of the prompt and the new ones."""
    if frozen:
        with fq.nn.frozen_weights(model):
            return generate(model)
    mask = torch.ones_like(PROMPT)
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    found: torch.Tensor = model.generate(PROMPT, attention_mask=mask, **options)
    return found


def measure(model: LlamaForCausalLM, config: fq.QuantConfig, rounds: int) -> dict[str, float]:
    """Returns the times of one recipe over the float model's."""
    prepared = fq.prepare(copy.deepcopy(model), config, {"input_ids": PROMPT}).eval()
    if not torch.equal(generate(prepared), generate(prepared, frozen=True)):
        raise AssertionError("The frozen model has generated other tokens.")
    contenders: dict[str, Callable[[], object]] = {
        "float": lambda: generate(model),
        "prepared": lambda: generate(prepared),
        "frozen": lambda: generate(prepared, frozen=True),
    }
    times = best_times(contenders, seconds=0, min_rounds=rounds)
    return {name: times[name] / times["float"] for name in ("prepared", "frozen")}


def main() -> None:
    """Prints a row for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", default="", help="only recipes whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    rows = {}
    print(f"{'generate, over float':<28}| prepared | frozen | limit")
    for name, (config, limit) in RECIPES.items():
        if options.only in name:
            rows[name] = row = measure(model, config, 3 if options.quick else 7)
            met = "" if limit is None else f"{limit:g}: {'met' if row['frozen'] <= limit else 'NOT met'}"
            print(f"{name:<28}| {row['prepared']:8.2f} | {row['frozen']:6.2f} | {met}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
