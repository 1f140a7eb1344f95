"""Bits per character of a language model in llama.cpp: trained on the grid that runs there, or converted to it.

    python benchmarks/llama_cpp.py [--json FILE] [--quick] [--seeds N] [--steps N]

The model is a LlamaForCausalLM of transformers with one block of width 256, so that rows fill the blocks of TQ2_0:
450,000 weights. The text is that of `text_model.py`; every seed has another division of it and another initialization.
All rows come from the same float model and get the same number of further steps, a quarter of the first ones, with a tenth of
the rate and a cosine decay to 0. They differ in what they are trained with:

    float, trained on       no quantizers. Losses are compared with this row
    nearest                 "float, trained on", converted
    trained on the grid     `recipes.gguf(...)`, exported as it is
    learned scales          `recipes.gguf(..., learned=True)`, exported as it is
    int4, 2 bits            `int4_weight_only(32)`, and the same with `presets.int2()`: symmetric, groups of 32, min-max
    ternary, learned        codes -1, 0 and 1 with a learned scale (LSQ) for every 256 weights
    ..., converted          their quantized weights, converted

Converted means: loaded into a model with `recipes.gguf(...)` and exported without training, which has the codes of
ggml's own quantizer; only the scales of Q4_K are ours, and not those that its search would find. Embedding and head are
Q8_0, or Q6_K beside Q4_K, and in float in training on the grids that are converted.

Every file is written, loaded and run in llama.cpp, which returns the logits. Float is measured in torch, because
`export_gguf` writes no float files. "in torch" is the same model before it is exported or converted, as it was trained.
"moved" is the share of the weights that are more than a quarter of a step away from where they were trained, as
`fakequant.audit` finds it in the file.

The figures are bits per character on every fourth window of the test text, mean ± standard deviation over the seeds; losses
are differences of the same seed. Nothing was tuned. The limit: training on the grid, with learned scales or without, loses
at most half of what the best other way loses. It is not applied to Q8_0, where there is nothing to lose, and to Q4_K.
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fakequant as fq
from fakequant import presets, recipes
from fakequant._runtimes.llama_cpp.running import run_gguf
from ptq_digits import versions
from ptq_text import bits_per_character, formatted
from text_formats import train
from text_model import CONTEXT, Text, text, trained

EVERY = 4  # of the test windows, one is measured
SHARE = 0.5  # of the loss of the best other way, which training on the grid may have
FLOAT, LONGER, NEAREST, TRAINED = "float", "float, trained on", "nearest", "trained on the grid"
LEARNED = "learned scales"


class Characters(nn.Module):
    """A Llama that takes codes of shape (batch, CONTEXT) and returns logits."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=characters, hidden_size=256, intermediate_size=256, num_hidden_layers=1,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
                tie_word_embeddings=False, use_cache=False, bos_token_id=None, eos_token_id=None,
            )
        )  # fmt: skip

    def forward(self, codes: Tensor) -> Tensor:
        logits: Tensor = self.llama(codes).logits
        return logits


def weight_only(weight: fq.QuantSpec, *, learned: bool = False) -> fq.QuantConfig:
    """Returns the config with this weight, and with embedding and head in float."""
    config = fq.QuantConfig(default=fq.LayerConfig(weight=weight, learned=learned))
    return config.skip(type="Embedding").skip("*lm_head")


# The grids that are trained and then converted, by type.
OTHERS = {
    "q4_0": {"int4": weight_only(presets.int4())},
    "tq2_0": {
        "2 bits": weight_only(presets.int2()),
        "ternary, learned": weight_only(fq.QuantSpec(bits=2, narrow_range=True, axis=-1, group_size=256), learned=True),
    },
    "q4_k": {},
    "q8_0": {},
}


class Figure(NamedTuple):
    """What was measured of a row. None where there is nothing to measure."""

    torch: float
    llama_cpp: float | None = None
    moved: float | None = None


class Measurement:
    """The rows of one seed, by name."""

    def __init__(self, windows: Tensor, folder: Path) -> None:
        self.windows, self.path = windows, folder / "model.gguf"
        self.rows: dict[str, Figure] = {}

    def in_torch(self, name: str, model: nn.Module) -> None:
        self.rows[name] = Figure(bits_per_character(model, self.windows))

    def in_llama_cpp(self, name: str, source: Characters, exported: Characters) -> None:
        """Exports a model and runs the file. `source` is the model as it was trained."""
        fq.export_gguf(exported.llama, self.path)
        with run_gguf(self.path, self.windows[:, :-1].tolist(), threads=1) as ran:
            logits = torch.stack([torch.from_numpy(output) for output in ran.outputs])
        parts = iter(logits.split(128))
        moved = None
        if any(isinstance(module, fq.nn.Quantizer) for module in source.modules()):
            layers = fq.audit(source.llama, self.path).layers
            moved = sum(layer.moved for layer in layers) / sum(layer.elements for layer in layers)
        self.rows[name] = Figure(
            bits_per_character(source, self.windows), bits_per_character(lambda _: next(parts), self.windows), moved
        )


def on_grid(model: Characters, config: fq.QuantConfig, data: Text) -> Characters:
    """Returns a copy of a model with quantizers."""
    made = copy.deepcopy(model)
    made.llama = fq.prepare(made.llama, config, data.train[:1, :-1])
    return made.eval()


def as_float(source: Characters) -> Characters:
    """Returns a copy of a prepared model in float, with its quantized weights."""
    made = copy.deepcopy(source)
    with torch.no_grad():
        for layer in made.modules():
            if isinstance(layer, fq.nn.QuantizedLayer) and layer.weight_quantizer is not None:
                layer.weight.copy_(fq.nn.quantized_weight(layer))
    made.llama = fq.unprepare(made.llama)
    return made


def run_seed(seed: int, steps: int) -> dict[str, Figure]:
    """Returns what was measured, by the names of the rows."""
    data = text(seed)
    model = trained(data, seed, steps, Characters)
    more = steps // 4
    with tempfile.TemporaryDirectory() as folder:
        found = Measurement(data.test[::EVERY], Path(folder))
        found.in_torch(FLOAT, model)
        longer = train(copy.deepcopy(model), data, more, seed)
        found.in_torch(LONGER, longer)
        for kind, others in OTHERS.items():
            recipe = recipes.gguf(kind)
            found.in_llama_cpp(f"{kind} {NEAREST}", longer, on_grid(longer, recipe, data))
            for name, config in others.items():
                source = train(on_grid(model, config, data), data, more, seed)
                converted = on_grid(as_float(source), recipe, data)
                found.in_llama_cpp(f"{kind} {name}, converted", source, converted)
            for name, config in ((TRAINED, recipe), (LEARNED, recipes.gguf(kind, learned=True))):
                if kind != "q8_0" or name == TRAINED:
                    made = train(on_grid(model, config, data), data, more, seed)
                    found.in_llama_cpp(f"{kind} {name}", made, made)
    return found.rows


# --- output ---------------------------------------------------------------------------------------


Figures = dict[str, list[Figure]]


def losses(figures: Figures, name: str) -> list[float]:
    """Returns what a row loses over "float, trained on" of the same seed: in llama.cpp, or in torch if it is float."""
    measured = [f.torch if f.llama_cpp is None else f.llama_cpp for f in figures[name]]
    return [value - longer.torch for value, longer in zip(measured, figures[LONGER], strict=True)]


class Bar(NamedTuple):
    """What training on a grid loses, and what the best other way does, in bits per character."""

    kind: str
    trained: float
    best_other: str
    other: float

    @property
    def met(self) -> bool:
        return self.trained <= SHARE * self.other


def bars(figures: Figures) -> list[Bar]:
    found = []
    for kind in (kind for kind, others in OTHERS.items() if others):
        rows = (f"{kind} {TRAINED}", f"{kind} {LEARNED}")
        means = {name: statistics.mean(losses(figures, name)) for name in figures if name.startswith(kind)}
        best = min((name for name in means if name not in rows), key=means.__getitem__)
        found.append(Bar(kind, min(means[row] for row in rows), best.removeprefix(f"{kind} "), means[best]))
    return found


def print_tables(figures: Figures) -> None:
    print(f"\n{'bits per character':<34}| {'in torch':<16}| {'in llama.cpp':<16}| {'loss':<17}| moved")
    for name, several in figures.items():
        ran = "" if several[0].llama_cpp is None else formatted([f.llama_cpp for f in several])
        moved = "" if several[0].moved is None else f"{100 * statistics.mean(f.moved for f in several):.1f} %"
        lost = formatted(losses(figures, name))
        print(f"{name:<34}| {formatted([f.torch for f in several]):<16}| {ran:<16}| {lost:<17}| {moved}")
    print(f"\n{'type':<6}| {TRAINED} loses | the best other way loses | limit")
    for bar in bars(figures):
        other = f"{bar.other:.4f}: {bar.best_other}"
        print(f"{bar.kind:<6}| {bar.trained:25.4f} | {other} | {SHARE:g} of it: {'met' if bar.met else 'NOT met'}")


def as_data(figures: Figures, steps: int) -> dict[str, object]:
    return {
        "versions": versions("fakequant", "torch", "transformers", "cyllama"),
        "steps": steps,
        "rows": {name: [figure._asdict() for figure in several] for name, several in figures.items()},
        "bars": [bar._asdict() | {"met": bar.met} for bar in bars(figures)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400, help="of the float training")
    parser.add_argument("--quick", action="store_true", help="one seed and a quarter of the steps")
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.steps = 1, max(options.steps // 4, 4)
    torch.set_num_threads(1)
    start = time.perf_counter()
    figures: Figures = {}
    for seed in range(options.seeds):
        for name, figure in run_seed(seed, options.steps).items():
            figures.setdefault(name, []).append(figure)
        print(f"seed {seed}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print_tables(figures)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(as_data(figures, options.steps), file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
