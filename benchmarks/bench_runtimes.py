"""Exported files in ONNX Runtime, OpenVINO, ExecuTorch and LiteRT: codes that differ, integer kernels, and time over float.

    python benchmarks/bench_runtimes.py [--json FILE] [--quick] [--only SUBSTRING] [--timm]

A perceptron of widths 1024-1024-512-10, the residual CNN of `bench_train_step.py` on 32x32 images and a transformer
encoder of width 384 on 64 tokens, with random weights, are calibrated on random data and exported for each runtime. The
targets are those for VNNI on a CPU that has it. Contenders, as far as a runtime has them:

    float                    the float model in the same runtime
    int8, w4a8               static grids
    int8_dynamic             grids found at run time
    int4_weight_only         4-bit weights in groups of 32, activations in float, which the runtime does not round
    the same, rounded        with the default settings of ONNX Runtime and OpenVINO, which round activations to 8 bits

Columns:

    codes that differ   of the golden model and the runtime, found by `verify` on 16 random inputs, all models together;
                        "not ok" if `verify` does not accept a model
    in integers         the share of multiplications with a weight that run in integers: perceptron / CNN / encoder
    time over float     the shortest time of many calls over that of the float model, for 1 / 16 inputs; below 1 is faster.
                        All files of a runtime and a model take turns. Programs of ExecuTorch have the batch size of the
                        example; ONNX files take any.

`--only` takes a part of the name of a target or model. `--timm` measures MobileNetV2 and ResNet-18 of timm with random
weights, one image of 224x224 at a time, with static grids only, instead of the models above. The tables are those of docs/guides/runtimes.md.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import fakequant as fq
from bench_train_step import Encoder, cnn
from fakequant._runtimes import find
from fakequant._runtimes.session import open_file
from fakequant._runtimes.xnnpack.running import times_of_programs
from fakequant._verify.latency import write_float
from fakequant.config import QuantConfig
from fakequant.testing.timing import all_times

sys.path.append(str(Path(__file__).parents[1] / "tests" / "zoo"))
from fitted_norms import fit_norms
from vision_packages import find_vision_packages

WIDTHS = (1024, 1024, 512, 10)
BATCHES, THREADS = (1, 16), (1, 2)
ROUNDED = "int4_weight_only, rounded"


class Task(NamedTuple):
    """A model and its inputs."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    # The number of inputs that the model is calibrated and verified with.
    examples: int = 16
    batches: tuple[int, ...] = BATCHES
    is_static: bool = False

    def inputs(self, batch: int, seed: int) -> Tensor:
        return torch.randn(batch, *self.shape, generator=torch.Generator().manual_seed(seed))


def perceptron() -> nn.Module:
    layers = [layer for pair in pairwise(WIDTHS) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def from_timm(name: str) -> nn.Module:
    import timm

    return fit_norms(timm.create_model(name), torch.randn(4, 3, 224, 224))


TASKS = [Task("MLP", perceptron, WIDTHS[:1]), Task("CNN", cnn, (3, 32, 32)), Task("encoder", Encoder, (64, 384))]
TIMM = [
    Task(name, partial(from_timm, key), (3, 224, 224), 2, (1,), is_static=True)
    for name, key in {"MobileNetV2": "mobilenetv2_100", "ResNet-18": "resnet18"}.items()
]


def targets(vnni: bool) -> list[str]:
    return [*(("onnxruntime-vnni", "openvino-vnni") if vnni else ("onnxruntime-x86", "openvino")), "xnnpack", "litert"]


def configs(target: str, is_static: bool) -> dict[str, QuantConfig]:
    """Returns the configs that a target has something for, by the name of their row."""
    recipes = fq.recipes
    found = {"int8": recipes.int8(target=target), "w4a8": recipes.w4a8(target=target)}
    if is_static:
        return found
    if "openvino" not in target:
        found["int8_dynamic"] = recipes.int8_dynamic(target=target)
    found["int4_weight_only"] = recipes.int4_weight_only(target=target)
    if target not in ("xnnpack", "litert"):
        found[ROUNDED] = found["int4_weight_only"]
    return found


# --- files ----------------------------------------------------------------------------------------


def prepared(task: Task, config: QuantConfig) -> nn.Module:
    torch.manual_seed(0)
    model = fq.prepare(task.make().eval(), config, task.inputs(task.examples, 0))
    return fq.calibrate(model, [task.inputs(task.examples, seed) for seed in range(2)], progress=False).eval()


def export(model: nn.Module, target: str, path: Path, x: Tensor) -> Path:
    getattr(fq, find(target).runtime.exporter)(model, path, x)
    return path


# --- figures --------------------------------------------------------------------------------------


def verified(model: nn.Module, path: Path, task: Task, name: str) -> dict[str, Any]:
    """Returns what `verify` finds: codes that differ, the share of multiplications in integers, kernels."""
    level = None if name == ROUNDED or path.suffix != ".onnx" else 1
    found = fq.verify(model, path, [task.inputs(max(task.batches), 100)], accuracy_level=level)
    return {
        "codes": sum(t.codes for t in found.tensors),
        "differ": sum(t.runtime_differ for t in found.tensors),
        "ok": found.ok,
        "problem": found.problem,
        "share": found.integer_multiplications / found.multiplications,
        "kernels": dict(Counter(found.kernels.values())),
        "floats": found.floats,
    }


def measure(task: Task, target: str, folder: Path, seconds: float) -> dict[str, Any]:
    """Returns the figures of all contenders for one target and model."""
    suffix = find(target).runtime.suffix
    models = {name: prepared(task, config) for name, config in configs(target, task.is_static).items()}
    files = {}
    for name, model in models.items():
        for batch in task.batches:
            if name != ROUNDED:
                files[name, batch] = export(model, target, folder / f"{name} {batch}{suffix}", task.inputs(batch, 1))
            else:
                files[name, batch] = files["int4_weight_only", batch]
    figures = {name: verified(model, files[name, max(task.batches)], task, name) for name, model in models.items()}
    times: dict[str, dict[str, dict[str, float]]] = {name: {} for name in ("float", *models)}
    for batch in task.batches:
        x = task.inputs(batch, 2)
        beside = write_float(models["int8"], (x,), {}, open_file(files["int8", batch]), folder)
        paths = {"float": beside} | {name: files[name, batch] for name in models}
        for threads in THREADS:
            found = timed(paths, open_file(files["int8", batch]).key, x, threads, seconds)
            for name, samples in found.items():
                times[name][f"{threads} threads, batch {batch}"] = min(samples)
    return {"model": task.name, "target": target, "figures": figures, "seconds": times}


def timed(paths: dict[str, Path], runtime: str, x: Tensor, threads: int, seconds: float) -> dict[str, list[float]]:
    if runtime == "executorch":
        return times_of_programs(paths, [x], threads, seconds)
    opened = {name: open_file(path, runtime, threads) for name, path in paths.items()}
    runs = {name: file.run_with_rounding if name == ROUNDED else file.run_unwatched for name, file in opened.items()}
    # A model may have no layer for which the level makes a difference.
    contenders = {name: partial(run, (x,), {}) for name, run in runs.items() if run((x,), {}) is not None}
    times = all_times(contenders, seconds=seconds)
    return times | {name: times["int4_weight_only"] for name in paths if name not in times}


# --- output ---------------------------------------------------------------------------------------


def over_float(one: dict[str, Any], name: str, threads: int) -> str:
    keys = [key for key in one["seconds"]["float"] if key.startswith(f"{threads} threads")]
    return " / ".join(f"{one['seconds'][name][key] / one['seconds']['float'][key]:.2f}" for key in keys)


def differing(found: list[dict[str, Any]]) -> str:
    codes, differ = sum(one["codes"] for one in found), sum(one["differ"] for one in found)
    refused = sum(not one["ok"] for one in found)
    return (f"{differ} of {codes:,}" if codes else "no codes") + (f"; {refused} not ok" if refused else "")


def tables(found: list[dict[str, Any]]) -> str:
    """Returns the tables of the guide: one for 1 thread with what `verify` found, one for 2 threads."""
    names = list(dict.fromkeys(one["model"] for one in found))
    batches = {task.name: " / ".join(map(str, task.batches)) for task in (*TASKS, *TIMM)}
    heads = [f"{name}: {batches[name]}" for name in names]
    lines = [
        f"| target | grids | codes that differ | in integers | {' | '.join(heads)} |",
        f"| --- | --- | --- | --- | {' | '.join('---' for _ in names)} |",
    ]
    twice = [
        f"| target | grids | {' | '.join(heads)} |",
        f"| --- | --- | {' | '.join('---' for _ in names)} |",
    ]
    for target in dict.fromkeys(one["target"] for one in found):
        of = [one for one in found if one["target"] == target]
        for name in of[0]["figures"]:
            figures = [one["figures"][name] for one in of]
            shares = " / ".join(f"{figure['share']:.0%}" for figure in figures)
            start = f"| `{target}` | `{name.split(',')[0]}`{''.join(name.partition(',')[1:])} |"
            by_model = {one["model"]: one for one in of}
            times = {
                threads: " | ".join(
                    over_float(by_model[model], name, threads) if model in by_model else "not measured"
                    for model in names
                )
                for threads in THREADS
            }
            lines.append(f"{start} {differing(figures)} | {shares} | {times[1]} |")
            twice.append(f"{start} {times[2]} |")
    return "\n".join(["Time over float, 1 thread:", "", *lines, "", "Time over float, 2 threads:", "", *twice])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="a tenth of the time")
    parser.add_argument("--timm", action="store_true", help="networks of timm instead of small models")
    parser.add_argument("--only", default="", help="only targets or models whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger().setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # from torch's exporter, about its own code

    start = time.perf_counter()
    cpu = Path("/proc/cpuinfo")
    vnni = cpu.exists() and "vnni" in cpu.read_text()
    packages = ("fakequant", "torch", "onnxruntime", "openvino", "executorch", "ai-edge-litert")
    if options.timm:
        find_vision_packages()
    versions = {name: version(name) for name in packages}
    print(f"VNNI: {'yes' if vnni else 'no'}; {', '.join(f'{k} {v}' for k, v in versions.items())}\n", flush=True)
    found = []
    for target in targets(vnni):
        for task in TIMM if options.timm else TASKS:
            if options.only in target or options.only in task.name:
                with tempfile.TemporaryDirectory() as folder:
                    found.append(measure(task, target, Path(folder), 1.0 if options.quick else 10.0))
                print(f"{target}, {task.name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
                if options.json:  # also what was measured if the rest fails
                    written = {"versions": versions, "vnni": vnni, "networks": found}
                    Path(options.json).write_text(json.dumps(written, indent=1))
    for one in found:
        for name, figure in one["figures"].items():
            print(f"{one['target']}, {one['model']}, {name}: {figure['kernels']}{_remarks(figure)}")
    print(f"\n{tables(found)}")
    if options.json:
        written = {"versions": versions, "vnni": vnni, "networks": found, "table": tables(found)}
        Path(options.json).write_text(json.dumps(written, indent=1))
    return 0


def _remarks(figure: dict[str, Any]) -> str:
    reasons = Counter(figure["floats"].values())
    words = [f"{number} layers in float: {why}" for why, number in reasons.items()]
    return "".join(f"\n    {word}" for word in [*words, *filter(None, [figure["problem"]])])


if __name__ == "__main__":
    sys.exit(main())
