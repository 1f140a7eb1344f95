"""Bits per character of a small Llama in llama.cpp: 4-bit files of models that were trained on the grid that runs, or not.

    python benchmarks/llama_cpp.py [--json FILE] [--quick] [--seeds N] [--steps N]

The text is that of `text_model.py`; every seed has another division of it and another initialization. The model is a Llama
with two layers of width 128. Its linear layers are Q4_0 in the files, embedding and head Q8_0. Each row is a file, and
llama.cpp computes the figure from it:

    float                  the float model
    nearest Q4_0           the float model, rounded without training
    other grid, converted  trained on the 4-bit grid of other tools (largest magnitude / 7.5), then rounded by the rule of Q4_0
    Q4_0                   trained with `recipes.gguf("q4_0")`, and its codes

QAT trains a quarter of the steps of the float training, with a tenth of its rate and a cosine decay to 0. The last
column is the model in torch that the file was made from: how much the way to llama.cpp has lost. Figures are means ± standard
deviations over the seeds. Nothing was tuned.
"""

import argparse
import copy
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import fakequant as fq
from fakequant import recipes
from fakequant._export.gguf.architectures import architecture_of, metadata_of
from fakequant._export.gguf.file import field, write
from fakequant._export.gguf.file_tensors import ModelTensors, file_tensors
from fakequant._runtimes.llama_cpp.running import run_gguf
from ptq_digits import versions
from text_formats import formatted
from text_model import BATCH, CONTEXT, RATE, Text, loss, text

ROWS = ("float", "nearest Q4_0", "other grid, converted", "Q4_0")
# The grid of other tools. Embedding and head stay in float.
OTHER = recipes.int4_weight_only(32, target="compressed-tensors").skip("lm_head")


class Model(nn.Module):
    """A Llama that takes codes of characters and returns logits."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=characters, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
            max_position_embeddings=CONTEXT,
        )  # fmt: skip
        self.llama = LlamaForCausalLM(config)

    def forward(self, codes: Tensor) -> Tensor:
        logits: Tensor = self.llama(input_ids=codes, use_cache=False).logits
        return logits


def train(model: Model, data: Text, steps: int, rate: float, seed: int) -> Model:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
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


@torch.no_grad()
def in_torch(model: Model, windows: Tensor) -> float:
    sums = [float(loss(model(part[:, :-1]), part)) * len(part) for part in windows.split(128)]
    return sum(sums) / len(windows) / math.log(2)


def in_llama_cpp(path: Path, windows: Tensor) -> float:
    with run_gguf(path, windows[:, :-1].tolist(), threads=1) as ran:
        logits = torch.stack([torch.from_numpy(output) for output in ran.outputs])
    return float(loss(logits, windows)) / math.log(2)


@torch.no_grad()
def write_float(model: nn.Module, path: Path) -> None:
    config = model.config
    known = architecture_of(config)
    metadata = {f"{known.name}.{name}": field(value) for name, value in metadata_of(config).items()}
    metadata |= {"general.architecture": field(known.name), "tokenizer.ggml.model": field("none")}
    write(path, metadata, file_tensors(model, ModelTensors(model, [], known.name), known))


@torch.no_grad()
def rounded(model: Model) -> Model:
    """Returns a float model with the weights that a prepared one computes with."""
    found = copy.deepcopy(model)
    for path, layer in model.llama.named_modules():
        if getattr(layer, "weight_quantizer", None) is not None:
            found.llama.get_submodule(path).weight.copy_(layer.weight_quantizer(layer.weight))
    fq.unprepare(found.llama)
    return found


def run_seed(seed: int, steps: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Returns bits per character in llama.cpp and in torch, by the names of the rows."""
    data = text(seed)
    torch.manual_seed(seed)
    model = train(Model(data.characters), data, steps, RATE, seed)
    path, found = folder / "model.gguf", {}
    write_float(model.llama, path)
    found["float"] = in_llama_cpp(path, data.test), in_torch(model, data.test)

    def measure(name: str, made: Model, source: Model | None = None) -> None:
        fq.export_gguf(made.llama, path)
        found[name] = in_llama_cpp(path, data.test), in_torch(source or made, data.test)

    nearest = copy.deepcopy(model)
    fq.prepare(nearest.llama, recipes.gguf("q4_0"))
    measure("nearest Q4_0", nearest.eval())
    other = copy.deepcopy(model)
    fq.prepare(other.llama, OTHER)
    other = train(other, data, steps // 4, RATE / 10, seed + 1000)
    converted = rounded(other)
    fq.prepare(converted.llama, recipes.gguf("q4_0"))
    measure("other grid, converted", converted.eval(), other)
    same = copy.deepcopy(model)
    fq.prepare(same.llama, recipes.gguf("q4_0"))
    measure("Q4_0", train(same, data, steps // 4, RATE / 10, seed + 1000))
    return found


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
    figures: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for name, value in run_seed(seed, options.steps, Path(folder)).items():
                figures.setdefault(name, []).append(value)
            print(f"seed {seed}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(f"\n{'bits per character':<24}| {'llama.cpp':<16}| torch")
    for name in ROWS:
        there, here = zip(*figures[name], strict=True)
        print(f"{name:<24}| {formatted(list(there)):<16}| {formatted(list(here))}")
    if options.json:
        known = versions("fakequant", "torch", "transformers", "cyllama")
        Path(options.json).write_text(
            json.dumps({"versions": known, "steps": options.steps, "bits_per_character": figures}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
