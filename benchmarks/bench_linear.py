"""Latency in ONNX Runtime of linear layers with inputs in float or with dynamic scales.

    python benchmarks/bench_linear.py [--json FILE] [--quick]

weight-only    `recipes.int4_weight_only()` on one linear layer with random weights, 1 and 16 rows, at both accuracy levels of
               the session: 4, the default, at which the kernel rounds its input to 8 bits, and 1. The error is the
               largest difference from the product of float64 numbers, over the largest result.
dynamic        `recipes.int8_dynamic()` on a BERT encoder of six layers, width 384, with random weights, on 128 tokens,
               one and 16 sequences. Beside it ONNX Runtime's own `quantize_dynamic` (8-bit weights per channel; 7 bits on a
               CPU without VNNI, `reduce_range`). Our target is "onnxruntime-vnni" on a CPU with VNNI, and otherwise
               "onnxruntime-x86", which has 7-bit weights. The SQNR is that of the results with respect to the float file.

Times are the best of many calls in turns, one thread, over the time of the float file; lower is faster.
"""

import argparse
import copy
import json
import logging
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch
from onnxruntime import quantization
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn

import fakequant as fq
from bench_zoo import encoder, sqnr, tokens
from fakequant.testing.timing import best_times

LEVEL = "session.qdq_matmulnbits_accuracy_level"
SHAPES = ((1024, 1024), (1024, 4096))  # inputs, outputs


class Bar(NamedTuple):
    """A measured figure and its limit."""

    what: str
    measured: float
    at_most: float

    @property
    def met(self) -> bool:
        return self.measured <= self.at_most


def session(path: Path, level: int | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if level is not None:
        options.add_session_config_entry(LEVEL, str(level))
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def call(of: onnxruntime.InferenceSession, x: Tensor) -> np.ndarray:
    return of.run(None, {of.get_inputs()[0].name: x.numpy()})[0]


def export_float(model: nn.Module, path: Path, x: Tensor) -> None:
    torch.onnx.export(copy.deepcopy(model), (x,), path, dynamo=True, external_data=False, verbose=False)


def weight_only(shape: tuple[int, int], rows: int, folder: Path, seconds: float) -> dict[str, Any]:
    """Returns the times of a layer over the float layer, and its errors, by accuracy level."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(*shape)).eval(), torch.randn(rows, shape[0])
    export_float(model, folder / "float.onnx", x)
    prepared = fq.prepare(model, fq.recipes.int4_weight_only())
    fq.export_onnx(prepared, folder / "int4.onnx", x, dynamic_batch=False)
    sessions = {"float": session(folder / "float.onnx"), "4": session(folder / "int4.onnx")}
    sessions["1"] = session(folder / "int4.onnx", level=1)
    weight = fq.nn.quantized_weight(prepared[0]).detach().double()
    exact = (x.double() @ weight.T + prepared[0].bias.detach().double()).numpy()
    times = best_times({name: lambda of=of: call(of, x) for name, of in sessions.items()}, seconds=seconds)
    levels = {
        level: {
            "time": times[level] / times["float"],
            "error": float(np.abs(call(sessions[level], x) - exact).max() / np.abs(exact).max()),
        }
        for level in ("4", "1")
    }
    return {"shape": shape, "rows": rows, "seconds": times["float"], "levels": levels}


def dynamic(batch: int, folder: Path, vnni: bool, seconds: float) -> dict[str, Any]:
    """Returns the times of an encoder over the float file, and its SQNR, quantized by fakequant and by ONNX Runtime."""
    torch.manual_seed(0)
    model, x = encoder().eval(), tokens(batch)(0)
    paths = {name: folder / f"{name}.onnx" for name in ("float", "ours", "theirs")}
    export_float(model, paths["float"], x)
    target = "onnxruntime-vnni" if vnni else "onnxruntime-x86"
    prepared = fq.prepare(copy.deepcopy(model), fq.recipes.int8_dynamic(target=target), x)
    fq.export_onnx(prepared, paths["ours"], x, dynamic_batch=False)
    quant_pre_process(str(paths["float"]), str(folder / "ready.onnx"))
    quantization.quantize_dynamic(
        str(folder / "ready.onnx"),
        str(paths["theirs"]),
        per_channel=True,
        reduce_range=not vnni,
        weight_type=quantization.QuantType.QInt8,
    )
    sessions = {name: session(path) for name, path in paths.items()}
    held_out = [tokens(batch)(1000 + number) for number in range(4)]
    results = {name: [call(of, other) for other in held_out] for name, of in sessions.items()}
    times = best_times(
        {name: lambda of=of: call(of, x) for name, of in sessions.items()}, seconds=seconds, min_rounds=10
    )
    figures = {
        name: {"time": times[name] / times["float"], "sqnr": sqnr(results["float"], results[name])}
        for name in ("ours", "theirs")
    }
    return {"batch": batch, "seconds": times["float"], **figures}


def bars(layers: list[dict[str, Any]], encoders: list[dict[str, Any]]) -> list[Bar]:
    large = next(one for one in layers if one["shape"] == SHAPES[-1] and one["rows"] == 1)["levels"]
    rows = [
        Bar("weight-only, 1024x4096, 1 row, level 4: time", large["4"]["time"], 0.5),
        Bar("weight-only, 1024x4096, 1 row, level 1: time", large["1"]["time"], 1.0),
        Bar("weight-only, 1024x4096, 1 row, level 1: error", large["1"]["error"], 1e-5),
    ]
    for one, limit in zip(encoders, (0.65, 0.7), strict=True):
        name = f"dynamic, batch {one['batch']}"
        rows.append(Bar(f"{name}: time", one["ours"]["time"], limit))
        # The noise of a timing on a shared machine.
        rows.append(Bar(f"{name}: time over theirs", one["ours"]["time"] / one["theirs"]["time"], 1.05))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    logging.getLogger().setLevel(logging.ERROR)  # ONNX Runtime's quantizer advises what is done here anyway
    warnings.simplefilter("ignore")  # from torch's exporter, about its own code
    seconds = 2.0 if options.quick else 10.0

    cpu = Path("/proc/cpuinfo")
    vnni = cpu.exists() and "vnni" in cpu.read_text()
    print(f"VNNI: {'yes' if vnni else 'no'}; ONNX Runtime {onnxruntime.__version__}; one thread\n")
    print("weight-only   | rows | level 4 | error   | level 1 | error")
    layers, encoders = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shape in SHAPES:
            for rows in (1, 16):
                layers.append(weight_only(shape, rows, folder, seconds))
                cells = [f"{one['time']:7.2f} | {one['error']:7.1e}" for one in layers[-1]["levels"].values()]
                print(f"{shape[0]}x{shape[1]:<9}| {rows:4} | {' | '.join(cells)}", flush=True)
        print("\nencoder  | float ms | ours | SQNR | theirs | SQNR")
        for batch in (1, 16):
            encoders.append(dynamic(batch, folder, vnni, 2 * seconds))
            one, ours, theirs = encoders[-1], encoders[-1]["ours"], encoders[-1]["theirs"]
            print(
                f"batch {batch:<3}| {one['seconds'] * 1e3:8.2f} | {ours['time']:4.2f} | {ours['sqnr']:4.1f} | "
                f"{theirs['time']:6.2f} | {theirs['sqnr']:4.1f}",
                flush=True,
            )
    checked = bars(layers, encoders)
    print(f"\n{'figure':<50}| measured |    limit")
    for bar in checked:
        print(f"{bar.what:<50}| {bar.measured:8.2g} | {bar.at_most:8.2g} | {'met' if bar.met else 'NOT met'}")
    if options.json:
        packages = ("fakequant", "torch", "onnx", "onnxruntime", "transformers")
        written = {
            "versions": {name: version(name) for name in packages},
            "vnni": vnni,
            "layers": layers,
            "encoders": encoders,
            "bars": [bar._asdict() | {"met": bar.met} for bar in checked],
        }
        Path(options.json).write_text(json.dumps(written, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
