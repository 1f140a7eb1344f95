"""Latency in ONNX Runtime of networks quantized by fakequant, beside ONNX Runtime's own static quantizer.

    python benchmarks/bench_zoo.py [--json FILE] [--quick] [--only SUBSTRING]

Convolutional networks of torchvision, timm and transformers at 224x224, one image, and a BERT encoder of six layers on
128 tokens, one and 16 sequences. All have random weights; batch norms have the statistics of the data. Contenders:

    float    the float file
    ours     recipes.int8, prepared with an example and calibrated; the target is "onnxruntime-vnni" on a CPU with VNNI, and
             otherwise "onnxruntime-x86", which has 7-bit weights
    theirs   onnxruntime.quantization: quant_pre_process, then quantize_static with QDQ, 8-bit unsigned activations and
             8-bit weights per channel (7 bits on a CPU without VNNI, `reduce_range`), calibrated with MinMax

Both quantizers see the same inputs, fakequant as one batch: over several, it averages their ranges. Columns:

    float / int8   the time of the float file over that of the quantized file, best of many calls in turns, one thread;
                   higher is faster
    SQNR           of the results with respect to the float file on other inputs, in dB: the mean over five networks with
                   different random weights
    integers       the share of convolutions, linear layers and matrix products with a weight that run in integer kernels
    pairs          QuantizeLinear and DequantizeLinear nodes that are left at run time

Limits: ours is at least 0.95 times as fast as theirs, and no slower than float unless theirs is too; the encoder is
1.5 (one sequence) and 1.7 times (16) as fast as float; the SQNR is not below theirs by more than the standard deviation
of the difference between the networks.
"""

import argparse
import copy
import json
import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime import quantization
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn

import fakequant as fq
from fakequant.testing.timing import best_times

sys.path.append(str(Path(__file__).parents[1] / "tests" / "zoo"))
from fitted_norms import fit_norms
from vision_packages import find_vision_packages

INTEGER = {"QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat", "MatMulInteger", "ConvInteger"}
FLOAT = {"Conv", "FusedConv", "Gemm", "FusedGemm", "MatMul", "FusedMatMul"}
CALIBRATION, HELD_OUT = 8, 8  # batches of one
NETWORKS = 5  # with different weights, for the SQNR


class Task(NamedTuple):
    """A network, its inputs, and how much faster than float it should be at least."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[int], Tensor]
    at_least: float = 1.0


# --- networks -------------------------------------------------------------------------------------


class First(nn.Module):
    """The first result of a model of transformers, by a positional argument."""

    def __init__(self, model: nn.Module, argument: str) -> None:
        super().__init__()
        self.model, self.argument = model, argument

    def forward(self, x: Tensor) -> Tensor:
        return self.model(**{self.argument: x})[0]


def torchvision_model(name: str) -> nn.Module:
    import torchvision

    return getattr(torchvision.models, name)()


def timm_model(name: str, **settings: Any) -> nn.Module:
    import timm

    return timm.create_model(name, **settings)


def resnet() -> nn.Module:
    import transformers

    config = transformers.ResNetConfig(
        layer_type="basic", hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], num_labels=1000
    )
    return First(transformers.ResNetForImageClassification(config), "pixel_values")


def encoder() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=1000
    )
    return First(transformers.BertModel(config, add_pooling_layer=False), "input_ids")


def image(seed: int) -> Tensor:
    """Returns noise with structure: neighbouring pixels are alike."""
    generator = torch.Generator().manual_seed(seed)
    coarse = nn.functional.interpolate(torch.randn(1, 3, 28, 28, generator=generator), 224, mode="bilinear")
    return coarse + 0.3 * torch.randn(1, 3, 224, 224, generator=generator)


def tokens(count: int) -> Callable[[int], Tensor]:
    return lambda seed: torch.randint(1000, (count, 128), generator=torch.Generator().manual_seed(seed))


TASKS = [
    Task("torchvision resnet18", lambda: torchvision_model("resnet18"), image),
    Task("torchvision mobilenet_v2", lambda: torchvision_model("mobilenet_v2"), image),
    Task("torchvision mobilenet_v3_small", lambda: torchvision_model("mobilenet_v3_small"), image),
    # The scales of its blocks start at 1e-6, with which the blocks would not matter.
    Task("timm convnext_atto", lambda: timm_model("convnext_atto", ls_init_value=1.0), image),
    Task("timm efficientnet_lite0", lambda: timm_model("efficientnet_lite0"), image),
    Task("transformers ResNet-18", resnet, image),
    Task("transformers BERT, batch 1", encoder, tokens(1), at_least=1.5),
    Task("transformers BERT, batch 16", encoder, tokens(16), at_least=1.7),
]


# --- files ----------------------------------------------------------------------------------------


class Reader(quantization.CalibrationDataReader):
    """Gives ONNX Runtime's quantizer the batches."""

    def __init__(self, name: str, batches: list[Tensor]) -> None:
        self.left = iter([{name: batch.numpy()} for batch in batches])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.left, None)


def write_files(task: Task, folder: Path, vnni: bool, seed: int) -> dict[str, Path]:
    """Writes the files of the contenders, for random weights of this seed, and returns their paths."""
    paths = {name: folder / f"{task.name} {seed} {name}.onnx" for name in ("float", "ours", "theirs")}
    torch.manual_seed(seed)
    batches = [task.batch(seed) for seed in range(CALIBRATION)]
    model = fit_norms(task.make(), torch.cat(batches))
    example = batches[0]
    torch.onnx.export(copy.deepcopy(model), (example,), paths["float"], dynamo=True, external_data=False, verbose=False)

    target = "onnxruntime-vnni" if vnni else "onnxruntime-x86"
    ours = fq.prepare(copy.deepcopy(model), fq.recipes.int8(target=target), example)
    fq.calibrate(ours, [torch.cat(batches)], progress=False)
    fq.export_onnx(ours, paths["ours"], example, dynamic_batch=False)

    ready = folder / "ready.onnx"
    quant_pre_process(str(paths["float"]), str(ready))
    quantization.quantize_static(
        str(ready),
        str(paths["theirs"]),
        Reader(onnx.load(ready).graph.input[0].name, batches),
        quant_format=quantization.QuantFormat.QDQ,
        activation_type=quantization.QuantType.QUInt8,
        weight_type=quantization.QuantType.QInt8,
        per_channel=True,
        reduce_range=not vnni,
        calibrate_method=quantization.CalibrationMethod.MinMax,
    )
    return paths


def session(path: Path, optimized: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def call(of: onnxruntime.InferenceSession, x: Tensor) -> np.ndarray:
    return of.run(None, {of.get_inputs()[0].name: x.numpy()})[0]


# --- figures --------------------------------------------------------------------------------------


def kernels(optimized: Path) -> dict[str, float]:
    """Returns the share of layers in integer kernels, and the number of nodes between codes and floats."""
    graph = onnx.load(optimized).graph
    weights = {tensor.name for tensor in graph.initializer}
    integer = sum(node.op_type in INTEGER and bool(weights & set(node.input)) for node in graph.node)
    floats = sum(node.op_type in FLOAT and node.input[1] in weights for node in graph.node)
    pairs = sum(node.op_type in ("QuantizeLinear", "DequantizeLinear") for node in graph.node)
    return {"integers": integer / max(integer + floats, 1), "pairs": pairs}


def sqnr(float_results: list[np.ndarray], results: list[np.ndarray]) -> float:
    y, q = np.concatenate(float_results).astype(np.float64), np.concatenate(results).astype(np.float64)
    return float(10 * np.log10((y**2).sum() / ((y - q) ** 2).sum()))


def measure(task: Task, folder: Path, vnni: bool, seconds: float, networks: int) -> dict[str, Any]:
    held_out = [task.batch(1000 + number) for number in range(HELD_OUT)]
    noise: dict[str, list[float]] = {"ours": [], "theirs": []}
    for seed in reversed(range(networks)):  # the first one is timed
        paths = write_files(task, folder, vnni, seed)
        optimized = {name: path.with_suffix(".optimized.onnx") for name, path in paths.items()}
        sessions = {name: session(path, optimized[name]) for name, path in paths.items()}
        results = {name: [call(of, x) for x in held_out] for name, of in sessions.items()}
        for name, values in noise.items():
            values.append(sqnr(results["float"], results[name]))
    times = best_times(
        {name: lambda of=of: call(of, held_out[0]) for name, of in sessions.items()}, seconds=seconds, min_rounds=10
    )
    figures = {
        name: {
            "speed": times["float"] / times[name],
            "sqnr": float(np.mean(noise[name])),
            "sqnr_of_networks": noise[name],
            **kernels(optimized[name]),
        }
        for name in ("ours", "theirs")
    }
    return {"task": task.name, "seconds": times, "at_least": task.at_least, **figures}


class Bar(NamedTuple):
    """A measured figure and its limit."""

    what: str
    measured: float
    at_least: float

    @property
    def met(self) -> bool:
        return self.measured >= self.at_least


def bars(found: list[dict[str, Any]]) -> list[Bar]:
    rows = []
    for one in found:
        ours, theirs, name = one["ours"], one["theirs"], one["task"]
        rows.append(Bar(f"{name}: speed over theirs", ours["speed"] / theirs["speed"], 0.95))
        if one["at_least"] > 1 or theirs["speed"] >= 1:
            rows.append(Bar(f"{name}: speed over float", ours["speed"], one["at_least"]))
        spread = np.std(np.subtract(ours["sqnr_of_networks"], theirs["sqnr_of_networks"]))
        rows.append(Bar(f"{name}: SQNR", ours["sqnr"], theirs["sqnr"] - float(spread)))
    return rows


def print_row(one: dict[str, Any]) -> None:
    cells = [f"{one['task']:<31}| {one['seconds']['float'] * 1e3:8.2f}"]
    for name in ("ours", "theirs"):
        of = one[name]
        cells.append(f"{of['speed']:12.2f} | {of['sqnr']:5.1f} | {of['integers']:8.1%} | {of['pairs']:5d}")
    print(" | ".join(cells), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time, and one network each")
    parser.add_argument("--only", default="", help="only networks whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    logging.getLogger().setLevel(logging.ERROR)  # ONNX Runtime's quantizer advises what is done here anyway
    warnings.simplefilter("ignore")  # from torch's exporter, about its own code
    find_vision_packages()

    start = time.perf_counter()
    cpu = Path("/proc/cpuinfo")
    vnni = cpu.exists() and "vnni" in cpu.read_text()
    print(f"VNNI: {'yes' if vnni else 'no'}; ONNX Runtime {onnxruntime.__version__}; one thread\n")
    titles = f"{'float / int8':>12} |  SQNR | integers | pairs"
    print(f"{'':<31}| {'float':>8} | {'ours':<37} | theirs\n{'network':<31}| {'ms':>8} | {titles} | {titles}")
    found = []
    for task in TASKS:
        if options.only in task.name:
            with tempfile.TemporaryDirectory() as folder:
                seconds, networks = (4.0, 1) if options.quick else (20.0, NETWORKS)
                found.append(measure(task, Path(folder), vnni, seconds, networks))
            print_row(found[-1])
    checked = bars(found)
    print(f"\n{'figure':<50}| measured |   limit")
    for bar in checked:
        print(f"{bar.what:<50}| {bar.measured:8.2f} | {bar.at_least:7.2f} | {'met' if bar.met else 'NOT met'}")
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    if options.json:
        packages = ("fakequant", "torch", "onnx", "onnxruntime", "transformers", "timm", "torchvision")
        written = {
            "versions": {name: version(name) for name in packages},
            "vnni": vnni,
            "networks": found,
            "bars": [bar._asdict() | {"met": bar.met} for bar in checked],
        }
        Path(options.json).write_text(json.dumps(written, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
