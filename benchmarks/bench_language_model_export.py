"""Time and memory of `export_compressed_tensors` and `export_onnx` for a Llama of 495 million random parameters in float32.

    python benchmarks/bench_language_model_export.py [--json FILE] [--quick]

Each recipe runs in a process of its own. Memory is the peak of the process, and what it held before the export, over the
bytes of the parameters. Both include about 0.4 GB for the imported libraries, with ONNX 0.5 GB. The parameters have 2 GB.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fakequant as fq

RECIPES = {
    "int4, groups of 32": lambda: fq.recipes.int4_weight_only(32, target="compressed-tensors"),
    "int8, per channel": lambda: fq.recipes.int8_dynamic(target="compressed-tensors"),
    "ONNX, int4, groups of 32": lambda: fq.recipes.int4_weight_only(32),
    "ONNX, int8": fq.recipes.int8,
}


def measure(name: str, layers: int) -> dict[str, float]:
    """Returns the figures of one recipe."""
    config = LlamaConfig(
        vocab_size=32000, hidden_size=1536, intermediate_size=4096, num_hidden_layers=layers, num_attention_heads=12
    )
    model = LlamaForCausalLM(config)
    parameters = sum(p.numel() for p in model.parameters())
    example = {"input_ids": torch.arange(8)[None], "use_cache": False}
    is_onnx = name.startswith("ONNX")
    model = fq.prepare(model.eval(), RECIPES[name](), example if is_onnx else None)
    if is_onnx:
        model = fq.calibrate(model, [example], progress=False)
    held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        if is_onnx:
            share = fq.export_onnx(model, f"{folder}/model.onnx", example, external_data=True).bytes / (4 * parameters)
        else:
            written = fq.export_compressed_tensors(model, f"{folder}/exported")
            share = written.quantized_bytes / written.quantized_float_bytes
        seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "parameters": parameters,
        "seconds": seconds,
        "held": held / (4 * parameters),
        "peak": peak / (4 * parameters),
        "share": share,
    }


def main() -> None:
    """Prints a row for each recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="two layers instead of fourteen")
    parser.add_argument("--recipe", choices=RECIPES, help=argparse.SUPPRESS)  # in the process of one recipe
    options = parser.parse_args()
    layers = 2 if options.quick else 14
    if options.recipe is not None:
        print(json.dumps(measure(options.recipe, layers)))
        return
    rows = {}
    for name in RECIPES:
        command = [sys.executable, __file__, "--recipe", name, *(["--quick"] if options.quick else [])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows[name] = row = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{name}: {row['parameters'] / 1e6:.0f} M parameters, {row['seconds']:.1f} s; memory {row['held']:.2f} before, "
            f"{row['peak']:.2f} at most; {'the files' if name.startswith('ONNX') else 'quantized layers'} "
            f"{row['share']:.3f} of their size; "
            f"{torch.get_num_threads()} threads"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
