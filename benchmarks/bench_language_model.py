"""Time of `generate` with prepared language models, over the float model, and of LoRA steps over packed weights.

    python benchmarks/bench_language_model.py [--json FILE] [--quick] [--only SUBSTRING]

The model is a Llama with four layers of width 512 and 4,096 tokens, 15 million random parameters, on one thread. It
generates 32 tokens, greedily, from 8. "frozen" is within `fq.nn.frozen_weights(model)`, which every call enters again, so
the time includes quantizing each weight once. Contenders take turns, and the shortest times count. Tokens are compared
first: those with and without the context must be the same.

The LoRA rows are training steps with 128 tokens and adapters of rank 16 on all linear layers, over 4-bit weights in groups
of 32: `quantize_adapters(packed=True)` over `packed=False`. Memory is that of the weights below the adapters: their codes and
scales over float32.
"""

import argparse
import copy
import json
import warnings
from collections.abc import Callable

import torch
from peft import LoraConfig, PeftModel, get_peft_model
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
    "int4 weights, FP8 keys": (fq.recipes.int4_weight_only(32, kv_cache=fq.presets.fp8_e4m3()), None),
}
LORA = "LoRA, packed int4"
TIME, MEMORY = 1.4, 0.2  # the limits of the LoRA row


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
    batch = {"input_ids": PROMPT}
    prepared = fq.calibrate(fq.prepare(copy.deepcopy(model), config, batch), [batch], progress=False).eval()
    if not torch.equal(generate(prepared), generate(prepared, frozen=True)):
        raise AssertionError("The frozen model has generated other tokens.")
    contenders: dict[str, Callable[[], object]] = {
        "float": lambda: generate(model),
        "prepared": lambda: generate(prepared),
        "frozen": lambda: generate(prepared, frozen=True),
    }
    times = best_times(contenders, seconds=0, min_rounds=rounds)
    return {name: times[name] / times["float"] for name in ("prepared", "frozen")}


def adapted(model: LlamaForCausalLM, *, packed: bool) -> PeftModel:
    """Returns a copy of a model with quantized weights and adapters."""
    made = fq.prepare(copy.deepcopy(model), fq.recipes.int4_weight_only(32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT, about its own arguments
        made = get_peft_model(made, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear"))
    return fq.nn.quantize_adapters(made, packed=packed)


def measure_adapters(model: LlamaForCausalLM, rounds: int) -> dict[str, float]:
    """Returns the time of a step over packed weights, and the memory of these weights, over those in float."""
    tokens = torch.randint(0, CONFIG.vocab_size, (1, 128))
    steps: dict[str, Callable[[], object]] = {}
    for name, packed in (("float", False), ("packed", True)):
        made = adapted(model, packed=packed).train()
        optimizer = torch.optim.AdamW([p for p in made.parameters() if p.requires_grad], lr=1e-4)

        def step(made: PeftModel = made, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            made(tokens, labels=tokens).loss.backward()
            optimizer.step()

        steps[name] = step
    bases = [m.base_layer for m in made.modules() if hasattr(m, "base_layer")]
    held = sum(tensor.nbytes for layer in bases for tensor in layer.packed_tensors())
    times = best_times(steps, seconds=0, min_rounds=rounds)
    return {"step": times["packed"] / times["float"], "memory": held / sum(4 * layer.weight.numel() for layer in bases)}


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
    if options.only in LORA:
        rows[LORA] = row = measure_adapters(model, 3 if options.quick else 7)
        met = row["step"] <= TIME and row["memory"] <= MEMORY
        print(f"{LORA}: step {row['step']:.2f} (limit {TIME:g}), memory {row['memory']:.3f} (limit {MEMORY:g}): "
              f"{'met' if met else 'NOT met'}")  # fmt: skip
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
