"""Fine-tunes small language models with 4-bit weights, and saves them for transformers, vLLM and SGLang.

    python examples/language_model.py [--steps N] [--model llama | qwen3] [--folder FOLDER]

The model reads bytes of Python's own documentation. It is trained in float, then with fake quantization, and written as
a folder of compressed-tensors with the codes that were trained. `verify` loads the folder in transformers. Start with
`AutoModelForCausalLM.from_pretrained(...)` for a model of your own.
"""

import argparse
import pydoc_data.topics
import tempfile
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


def train(model: PreTrainedModel, rows: Tensor, steps: int, rate: float) -> None:
    """Trains with an ordinary loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (16,))]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()


@torch.no_grad()
def bits_per_byte(model: PreTrainedModel, rows: Tensor) -> float:
    """Returns the loss in bits."""
    return float(model.eval()(input_ids=rows, labels=rows).loss) / torch.tensor(2.0).log().item()


def main() -> None:
    """Prints losses, what was written, and whether transformers computes the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="in float; half as many with quantizers")
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--folder", type=Path, help="where to write the folder (default: a temporary place)")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows, test = read_text()
    model = MODELS[options.model]()
    train(model, rows, options.steps, 3e-3)
    print(f"float          {bits_per_byte(model, test):.3f} bits per byte")

    example = {"input_ids": test[:2]}
    model = fq.prepare(model, fq.recipes.int4_weight_only(32, target="compressed-tensors"), example)
    print(f"rounded        {bits_per_byte(model, test):.3f}")
    train(model, rows, options.steps // 2, 3e-4)
    print(f"trained        {bits_per_byte(model, test):.3f}")

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary, f"{options.model}-int4")
        print(fq.export_compressed_tensors(model, folder))
        found = fq.verify(model, folder, [example])
        print(f"the folder computes what was trained, in transformers: {found.ok}")


if __name__ == "__main__":
    main()
