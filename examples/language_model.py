"""Fine-tunes small language models with 4-bit weights, and saves them for transformers, vLLM, SGLang or llama.cpp.

    python examples/language_model.py [--steps N] [--model llama | qwen3] [--lora] [--gguf] [--folder FOLDER]

The model reads bytes of Python's own documentation. It is trained in float, and then with quantized weights, FP8 keys
and values, and the float model as its teacher; with `--lora`, only adapters are trained, over packed 4-bit weights. The
result is a folder of compressed-tensors, or a GGUF file, with the codes that were trained. `verify` runs it in
transformers or llama.cpp. Start with `AutoModelForCausalLM.from_pretrained(...)` for a model of your own.
"""

import argparse
import copy
import pydoc_data.topics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import fakequant as fq

LENGTH = 64
SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": LENGTH, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
}


def read_text() -> tuple[Tensor, Tensor]:
    """Returns rows of bytes to train on, and rows to test on."""
    text = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "replace")
    rows = torch.tensor(list(text[: len(text) // LENGTH * LENGTH])).view(-1, LENGTH).clamp(max=127)
    rows = rows[torch.randperm(len(rows))]
    return rows[256:], rows[:256]


def train(model: PreTrainedModel, rows: Tensor, steps: int, rate: float, teach: Callable[..., Tensor] | None) -> None:
    """Trains with an ordinary loop: on the text, or on the predictions of a teacher."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    model.train()
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (16,))]
        optimizer.zero_grad()
        result = model(input_ids=batch, labels=batch)
        loss = result.loss if teach is None else teach(result, input_ids=batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()


def add_adapters(model: PreTrainedModel) -> PreTrainedModel:
    """Adds LoRA adapters to all linear layers, inside the quantized weights, which are held as codes."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=8, lora_alpha=8, target_modules="all-linear"))
    return fq.nn.quantize_adapters(adapted, packed=True)


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, rows: Tensor) -> float:
    """Returns the loss in bits."""
    return float(model.eval()(input_ids=rows, labels=rows).loss) / torch.tensor(2.0).log().item()


def main() -> None:
    """Prints losses, what was written, and whether transformers computes the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="in float; half as many with quantizers")
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--lora", action="store_true", help="train adapters instead of all weights")
    parser.add_argument("--gguf", action="store_true", help="write a file for llama.cpp instead of a folder")
    parser.add_argument("--folder", type=Path, help="what to write (default: in a temporary place)")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows, test = read_text()
    model = MODELS[options.model]()
    train(model, rows, options.steps, 3e-3, None)
    print(f"float          {bits_per_byte(model, test):.3f} bits per byte")

    teacher, example = copy.deepcopy(model), {"input_ids": test[:2]}
    if options.gguf:
        config = fq.recipes.gguf("q4_0")
    else:
        config = fq.recipes.int4_weight_only(32, target="compressed-tensors", kv_cache=fq.presets.fp8_e4m3())
    model = fq.prepare(model, config, example)
    if not options.gguf:  # scales of keys and values are calibrated
        model = fq.calibrate(model, [rows[:16], rows[16:32]], progress=False)
    print(f"rounded        {bits_per_byte(model, test):.3f}")

    if options.lora:
        model = add_adapters(model)
    like_float = fq.distill(model, teacher)
    train(model, rows, options.steps // 2, 3e-3 if options.lora else 3e-4, like_float)
    if options.lora:
        model = model.merge_and_unload()
    print(f"distilled      {bits_per_byte(model, test):.3f}")

    with fq.nn.frozen_weights(model):  # each weight is quantized once, not for every token
        tokens = model.generate(test[:1, :8], attention_mask=torch.ones(1, 8), max_new_tokens=24, do_sample=False)
    print(f"it continues   {bytes(tokens[0].tolist())!r}")

    with tempfile.TemporaryDirectory() as temporary:
        name = f"{options.model}.gguf" if options.gguf else f"{options.model}-int4"
        path = options.folder or Path(temporary, name)
        print((fq.export_gguf if options.gguf else fq.export_compressed_tensors)(model, path))
        found = fq.verify(model, path, [example])
        runtime = "llama.cpp" if options.gguf else "transformers"
        print(f"it computes what was trained, in {runtime}: {found.ok}")


if __name__ == "__main__":
    main()
