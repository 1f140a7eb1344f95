"""Codes that differ between the golden model and each runtime, on trained models of handwritten digits.

    python benchmarks/digits_runtimes.py [--json FILE] [--seed N] [--epochs N] [--only SUBSTRING]

A perceptron, a CNN with a residual addition, a depthwise CNN and a transformer encoder are trained in float, then with
the recipes `int8`, `w4a8` and `lsq(2)` for each target, and exported. `verify` runs the 900 test images. Columns:

    golden        codes that differ between the golden model and the runtime, and how many of them are not ties
    prepared      codes that differ between the prepared and the golden model
    classes       images for which the golden model and the runtime find the same class
    in integers   the share of the multiplications of layers that run in integers
    accuracy      of the prepared model and of the runtime, in percent

The targets are those for VNNI on a CPU that has it. The images are multiples of 1/16, so their codes are full of ties.
"""

import argparse
import copy
import json
import logging
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fakequant as fq
from bench_deploy import MODELS
from digits import BATCH, FLOAT_RATE, QUANTIZED_RATE, Split, split
from digits_cnn import FROZEN, train
from digits_depthwise import network as depthwise
from fakequant._runtimes import find
from fakequant._runtimes.session import open_file

NETWORKS = {**MODELS, "depthwise CNN": depthwise}
RECIPES = {"int8": fq.recipes.int8, "w4a8": fq.recipes.w4a8, "lsq(2)": lambda target: fq.recipes.lsq(2, target=target)}


def has_vnni() -> bool:
    cpu = Path("/proc/cpuinfo")
    return cpu.exists() and "vnni" in cpu.read_text()


def targets() -> list[str]:
    of_onnx = ("onnxruntime-vnni", "openvino-vnni") if has_vnni() else ("onnxruntime-x86", "openvino")
    return [*of_onnx, "xnnpack", "litert"]


def quantized(model: nn.Module, data: Split, recipe: str, target: str, epochs: int, seed: int) -> nn.Module:
    made = fq.prepare(copy.deepcopy(model), RECIPES[recipe](target=target), data[0][:2])
    fq.calibrate(made, data[0].split(BATCH), progress=False)
    train(made, data, epochs, QUANTIZED_RATE, seed, FROZEN)
    return made.eval()


def exported(model: nn.Module, folder: Path, images: Tensor, target: str) -> Path:
    runtime = find(target).runtime
    path = folder / f"model{runtime.suffix}"
    batches = {".pte": {"max_batch": len(images)}, ".tflite": {"dynamic_batch": True}}.get(runtime.suffix, {})
    getattr(fq, runtime.exporter)(model, path, images[:2], **batches)
    return path


@torch.no_grad()
def compared(model: nn.Module, images: Tensor, labels: Tensor, target: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        path = exported(model, Path(name), images, target)
        found = fq.verify(model, path, [images])
        runtime = torch.from_numpy(open_file(path).run_unwatched((images,), {})[0])
    golden, prepared = fq.convert(model)(images), model(images)

    def right(results: Tensor) -> float:
        return 100 * float((results.argmax(1) == labels).double().mean())

    return {
        "ok": found.ok,
        "problem": found.problem,
        "codes": sum(t.codes for t in found.tensors),
        "golden": sum(t.runtime_differ for t in found.tensors),
        "not ties": sum(t.runtime_differ - t.runtime_ties for t in found.tensors),
        "prepared": sum(t.prepared_differ for t in found.tensors),
        "classes": int((golden.argmax(1) == runtime.argmax(1)).sum()),
        "images": len(images),
        "in integers": found.integer_multiplications / found.quantized_multiplications,
        "accuracy": [right(prepared), right(runtime)],
    }


def printed(row: dict[str, Any]) -> str:
    name = f"{row['target']:<16} | {row['model']:<13} | {row['recipe']:<6}"
    codes = f"{row['golden']:>3}, {row['not ties']} no tie | {row['prepared']:>4} of {row['codes']:>8}"
    rest = f"{row['classes']}/{row['images']} | {row['in integers']:6.1%} | {'/'.join(f'{a:.1f}' for a in row['accuracy'])}"
    return f"{name} | {'ok' if row['ok'] else 'NOT OK':<6} | {codes} | {rest}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=12, help="of training in float, and again with quantizers")
    parser.add_argument("--only", default="", help="a part of the name of a target or a model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)  # from torch's exporter, about its own code
    start = time.perf_counter()
    data = split(options.seed)
    images, labels = data[2:]
    rows = []
    print(
        "target           | model         | recipe | verify | golden, no ties | prepared of codes | classes | in integers | accuracy"
    )
    for name, make in NETWORKS.items():
        wanted = [target for target in targets() if options.only in f"{target} {name}"]
        if not wanted:
            continue
        torch.manual_seed(options.seed)
        model = make()
        train(model, data, options.epochs, FLOAT_RATE, options.seed)
        for target in wanted:
            for recipe in RECIPES:
                made = quantized(model, data, recipe, target, options.epochs, options.seed)
                row = {"target": target, "model": name, "recipe": recipe} | compared(made, images, labels, target)
                rows.append(row)
                print(printed(row), flush=True)
                if row["problem"]:
                    print(f"    {row['problem']}")
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    if options.json:
        packages = ("fakequant", "torch", "onnxruntime", "openvino", "executorch", "ai-edge-litert")
        versions = {package: version(package) for package in packages}
        Path(options.json).write_text(json.dumps({"versions": versions, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
