"""Time and memory of post-training methods: by the depth of a model, for one wide layer, and for a language model.

    python benchmarks/bench_ptq_depth.py [--json FILE] [--quick] [--only depth|layer|model|memory] [--threads N]

depth     `gptq`, `adaround`, `correct_bias` and `smooth` on 2, 4, 8 and 16 equal blocks (RMSNorm, attention and MLP of width 128,
          3 bits in groups of 32, inputs of 8 bits; 50 iterations of `adaround`) and 8,192 tokens in 8 batches. The time should grow with the number of blocks.
layer     `gptq` of one linear layer of 2048 x 2048, 4 bits in groups of 32, 8,192 tokens.
model     `gptq` of a Llama of 0.25 billion parameters (hidden 1024, 16 layers, vocabulary 32,000), 8,192 tokens. It is measured
          with 1 and 2 layers: the difference is what a layer takes, and the rest is the head.
memory    The peak of the resident memory while `gptq` runs on this Llama, over the size of its float weights. To save time, it
          rounds the first layer, the last one and the head; the others only run. A process of its own measures the peak, beyond
          what it had before the model was made.

The times of `depth` are CPU times, which other work on the machine changes little. `layer` and `model` are what a user waits
for: elapsed times, with the number of threads that `--threads` says. --quick leaves out 16 blocks and the model.
"""

import argparse
import copy
import json
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fakequant as fq

WIDTH, HEADS, TOKENS, BATCHES = 128, 4, 8192, 8
METHODS: dict[str, Callable[..., object]] = {
    "gptq": fq.ptq.gptq,
    "adaround": partial(fq.ptq.adaround, iterations=50),
    "correct_bias": fq.ptq.correct_bias,
    "smooth": fq.ptq.smooth,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def inputs(width: int) -> list[Tensor]:
    """Returns correlated inputs, as real ones are."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(width, width, generator=generator) / width**0.5
    shape = (BATCHES, TOKENS // BATCHES // 64, 64, width)
    return list(torch.randn(shape, generator=generator) @ mixed)


def prepared(model: nn.Module, data: list[Any], bits: int) -> nn.Module:
    weight = fq.QuantSpec(bits=bits, axis=-1, group_size=32)
    config = fq.QuantConfig(default=fq.LayerConfig(weight=weight, input=fq.presets.uint8())).skip(type="Embedding")
    return fq.calibrate(fq.prepare(model.eval(), config, data[0]), data, progress=False)


def timed(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the time that a function takes by a clock, in seconds."""
    start = clock()
    run()
    return clock() - start


def by_depth(depths: list[int]) -> dict[str, dict[int, float]]:
    data = inputs(WIDTH)
    found: dict[str, dict[int, float]] = {name: {} for name in METHODS}
    for depth in depths:
        torch.manual_seed(0)
        model = prepared(nn.Sequential(*(Block() for _ in range(depth))), data, 3)
        for name, method in METHODS.items():
            found[name][depth] = timed(partial(method, copy.deepcopy(model), data, progress=False), time.process_time)
    return found


def one_layer() -> float:
    torch.manual_seed(0)
    data = inputs(2048)
    model = prepared(nn.Sequential(nn.Linear(2048, 2048)), data, 4)
    return timed(partial(fq.ptq.gptq, model, data, progress=False))


def llama(layers: int, hidden: int = 1024, vocabulary: int = 32000) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        vocab_size=vocabulary,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def tokens(batches: int = BATCHES) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(32000, (batches, TOKENS // batches // 128, 128), generator=generator)
    return [{"input_ids": x} for x in ids]


def whole_model() -> dict[str, float]:
    seconds = []
    for layers in (1, 2):
        data = tokens()
        model = prepared(llama(layers), data, 4)
        seconds.append(timed(partial(fq.ptq.gptq, model, data, progress=False)))
    return {"layer": seconds[1] - seconds[0], "model": seconds[0] + 15 * (seconds[1] - seconds[0])}


def resident() -> int:
    """Returns the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def memory_alone() -> None:
    """Prints the peak of the memory while `gptq` runs, over the size of the float weights."""
    data = tokens(16)
    small = [{"input_ids": torch.arange(64)[None]}]
    fq.ptq.gptq(prepared(llama(2, 128, 64), small, 4), small, progress=False)  # loads all libraries
    before = resident()
    model = prepared(llama(16), data, 4)
    size = sum(p.nbytes for p in model.parameters())
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.01):
            peak = max(peak, resident())

    start = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    fq.ptq.gptq(model, data, layers=["model.layers.0.*", "model.layers.15.*", "lm_head"], progress=False)
    done.set()
    watcher.join()
    print(json.dumps({"prepared": (start - before) / size, "peak": (peak - before) / size}))


def memory() -> dict[str, float]:
    command = [sys.executable, __file__, "--alone"]
    # Threads would each keep freed memory of their own.
    found = subprocess.run(
        command, env={**os.environ, "MALLOC_ARENA_MAX": "1"}, capture_output=True, text=True, check=True
    )
    figures: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return figures


def limited(what: str, figure: float, limit: float, unit: str = "") -> dict[str, Any]:
    print(f"{what:<64}| {figure:8.2f}{unit} | <= {limit:g}{unit} | {'met' if figure <= limit else 'NOT met'}")
    return {"what": what, "measured": figure, "limit": limit, "met": figure <= limit}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--only", default="", choices=["", "depth", "layer", "model", "memory"])
    parser.add_argument("--quick", action="store_true", help="without 16 blocks and the language model")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.alone:
        memory_alone()
        return 0
    found: dict[str, Any] = {"threads": options.threads, "bars": []}
    if options.only in ("", "depth"):
        depths = [2, 4, 8] if options.quick else [2, 4, 8, 16]
        found["depth"] = by_depth(depths)
        print(f"\n{'seconds by the number of blocks':<32}" + "".join(f"|{depth:8}" for depth in depths))
        for name, times in found["depth"].items():
            print(f"{name:<32}" + "".join(f"|{times[depth]:8.1f}" for depth in depths))
        print()
        for name, times in found["depth"].items():
            ratio = times[depths[-1]] / times[depths[-2]]
            found["bars"].append(limited(f"{name}: {depths[-1]} blocks over {depths[-2]}", ratio, 2.2))
    if options.only in ("", "layer"):
        found["bars"].append(limited("gptq, 2048 x 2048 in groups of 32", one_layer(), 20, " s"))
    if options.only in ("", "model") and not options.quick:
        found["model"] = whole_model()
        minutes = found["model"]["model"] / 60
        found["bars"].append(limited("gptq, Llama of 16 layers, from 1 and 2 layers", minutes, 15, " min"))
    if options.only in ("", "memory"):
        found["memory"] = memory()
        print(f"{'prepared and calibrated, memory over its float weights':<64}| {found['memory']['prepared']:8.2f} |")
        found["bars"].append(limited("gptq: peak memory over the float weights", found["memory"]["peak"], 1.6))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
