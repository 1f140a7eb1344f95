"""Codes that differ between the prepared model, the golden model and ONNX Runtime; file sizes and latency.

    python benchmarks/bench_deploy.py [--json FILE] [--seeds N] [--epochs N] [--no-latency]

A perceptron, the CNN of `digits_cnn.py` (batch norm, a residual addition) and a transformer encoder (the rows of an
image as 8 tokens) are trained on handwritten digits in float, then with the recipe
`int8(target="onnxruntime-x86")`, and exported. The 900 test images are run through the prepared model, the golden
model (`convert`) and ONNX Runtime with all optimizations. For every quantizer of activations the differing codes
are counted:

    runtime     between the golden model and ONNX Runtime
    prepared    between the prepared and the golden model
    to the end  each model runs on its own from the images to the results
    alone       each layer in isolation: after the comparison, the codes of the golden model are replaced by those of
                the other model, so that the next layer starts from equal codes
    steps       alone: the largest difference of two codes
    tie         alone: the largest distance of a value with differing codes from the midpoint of two codes, in steps

To read the codes of ONNX Runtime, they are made outputs of a copy of the file. The copy must run the same kernels and
give the same results as the file. The counts in isolation must equal those of `verify`.

The same is repeated with the full range of 8-bit weights, which gives wrong results on CPUs without VNNI. Then file
sizes are compared with float, and latencies in ONNX Runtime: the best of many calls, int8 and float in turns.
"""

import argparse
import copy
import dataclasses
import itertools
import json
import logging
import sys
import tempfile
import time
import warnings
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

import fakequant as fq
from digits import BATCH, FLOAT_RATE, QUANTIZED_RATE, Split, perceptron, split
from digits_cnn import FROZEN, network, train
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._convert.golden.tracked_codes import on_grid
from fakequant.testing.timing import best_times

SAFE, FULL_RANGE = "onnxruntime-x86", "onnxruntime-vnni"
KERNELS = ("QGemm", "QLinearConv", "QLinearMatMul")
WIDE = (1024, 1024, 512, 10)  # widths of a perceptron whose file is almost entirely weights
Codes = dict[str, list[Tensor]]  # by the path of the quantizer; one tensor per call


# --- models ---------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """A transformer encoder with the rows of an image as tokens."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.rows = nn.Unflatten(1, (8, 8))
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(torch.randn(8, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(self.rows(x)) + self.position).mean(1))


def wide_perceptron() -> nn.Sequential:
    layers = [layer for pair in itertools.pairwise(WIDE) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


MODELS = {"MLP": perceptron, "CNN": network, "encoder": Encoder}


def trained(name: str, data: Split, epochs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = MODELS[name]()
    train(model, data, epochs, FLOAT_RATE, seed)
    return model.eval()


def quantized(model: nn.Module, data: Split, epochs: int, seed: int, target: str) -> nn.Module:
    made = fq.prepare(copy.deepcopy(model), fq.recipes.int8(target=target), data[0][:BATCH])
    fq.calibrate(made, data[0].split(BATCH), progress=False)
    train(made, data, epochs, QUANTIZED_RATE, seed, FROZEN)
    return made.eval()


# --- codes ----------------------------------------------------------------------------------------


@torch.no_grad()
def run(
    model: nn.Module, images: Tensor, grids: dict[str, GoldenQuantizer], force: Codes | None = None
) -> tuple[Any, ...]:
    """Runs a prepared or golden model. Returns its result, its codes, and its codes before rounding.

    If `force` is given, these codes replace those of the model after they were recorded.
    """
    codes: Codes = {}
    levels: Codes = {}

    def look(path: str, grid: GoldenQuantizer, x: Tensor, y: Tensor) -> Any:
        scale, zero = grid.grid_for(x).scale, grid.grid_for(x).zero_point
        x, y = x.as_subclass(Tensor), y.as_subclass(Tensor)
        codes.setdefault(path, []).append(torch.round(y / scale) + zero)
        levels.setdefault(path, []).append(x.double() / scale.double() + zero)
        if force is None or path not in force:
            return None
        other = force[path][len(codes[path]) - 1]
        return on_grid((other - zero) * scale, grid.grid_for(x))

    hooks = [
        model.get_submodule(path).register_forward_hook(lambda _, args, y, p=path, g=grid: look(p, g, args[0], y))
        for path, grid in grids.items()
    ]
    try:
        return model(images).as_subclass(Tensor), codes, levels
    finally:
        for hook in hooks:
            hook.remove()


def session(path: Path, threads: int = 1, optimized: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    options.add_session_config_entry(
        "session.force_spinning_stop", "1"
    )  # spinning threads of one session would slow down another
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def call(of: onnxruntime.InferenceSession, images: Tensor) -> list[np.ndarray]:
    return of.run(None, {of.get_inputs()[0].name: images.numpy()})


def nodes(path: Path) -> list[Any]:
    """Returns the nodes of the graph that ONNX Runtime optimizes a file to."""
    optimized = path.with_suffix(".optimized.onnx")
    session(path, optimized=optimized)
    return list(onnx.load(optimized).graph.node)


def runtime_codes(path: Path, images: Tensor) -> tuple[Tensor, Codes]:
    """Returns the result and the codes of ONNX Runtime. The codes are outputs of a copy of the file."""
    model = onnx.load(path)
    found = []
    for node in model.graph.node:
        props = {prop.key: prop.value for prop in node.metadata_props}
        if "fakequant.quantizer" in props:
            found.append((props["fakequant.quantizer"], int(props["fakequant.offset"])))
            model.graph.output.append(onnx.ValueInfoProto(name=node.output[0]))
    probed = path.with_suffix(".probed.onnx")
    onnx.save(model, probed)
    assert kinds(nodes(probed)) == kinds(nodes(path)), "the copy runs other kernels"
    results = call(session(probed), images)
    assert np.array_equal(results[0], call(session(path), images)[0]), "the copy gives other results"
    codes: Codes = {}
    for (name, offset), value in zip(found, results[1:], strict=True):
        codes.setdefault(name, []).append(torch.from_numpy(value.astype(np.float32)) - offset)
    return torch.from_numpy(results[0]), codes


def kinds(of: list[Any]) -> Counter[str]:
    return Counter(node.op_type for node in of if node.op_type in KERNELS or node.op_type.startswith("QLinear"))


@dataclasses.dataclass
class Count:
    """How the codes of the golden model differ from those of another model."""

    to_end: int
    alone: int
    steps: int
    tie: float


@dataclasses.dataclass
class Row:
    """The counts of one quantizer."""

    path: str
    codes: int
    runtime: Count | None  # None if the file has no such tensor, because it is that of another quantizer
    prepared: Count


def differing(a: list[Tensor], b: list[Tensor]) -> int:
    return sum(int((x != y).sum()) for x, y in zip(a, b, strict=True))


def count(own: list[Tensor], alone: list[Tensor], levels: list[Tensor], other: list[Tensor]) -> Count:
    steps, tie = 0, 0.0
    for x, y, level in zip(alone, other, levels, strict=True):
        if (x != y).any():
            steps = max(steps, int((x - y).abs().max()))
            tie = max(tie, float((level - level.floor() - 0.5).abs()[x != y].max()))
    return Count(differing(own, other), differing(alone, other), steps, tie)


def compare(prepared: nn.Module, path: Path, images: Tensor) -> dict[str, Any]:
    """Exports a model, runs it in all three ways and counts differing codes."""
    fq.export_onnx(prepared, path, images[:2])
    golden = fq.convert(prepared)
    grids = {name: module for name, module in golden.named_modules() if isinstance(module, GoldenQuantizer)}
    results, codes = {}, {}
    results["prepared"], codes["prepared"], _ = run(prepared, images, grids)
    results["golden"], own, _ = run(golden, images, grids)
    results["runtime"], codes["runtime"] = runtime_codes(path, images)
    counts: dict[str, dict[str, Count]] = {}
    for which, others in codes.items():
        _, alone, levels = run(golden, images, grids, force=others)
        counts[which] = {
            name: count(own[name], alone[name], levels[name], other) for name, other in others.items() if name in own
        }
    rows = [
        Row(name, sum(map(torch.numel, of)), counts["runtime"].get(name), counts["prepared"][name])
        for name, of in own.items()
    ]
    said = fq.verify(prepared, path, [images])
    there = {t.path: (t.prepared_differ, t.runtime_differ) for t in said.tensors}
    counted = {row.path: (row.prepared.alone, row.runtime.alone if row.runtime else 0) for row in rows}
    return {
        "rows": rows,
        "kernels": said.kernels,
        "integer nodes": dict(kinds(nodes(path))),
        "results": results,
        "verify": {"ok": said.ok, "saturates": said.saturates, "counts as here": there == counted},
        "why": {t.path: t.why for t in said.tensors},
    }


# --- sizes and latency ----------------------------------------------------------------------------


def export_float(model: nn.Module, path: Path, example: Tensor) -> None:
    options = {"external_data": False, "dynamic_shapes": ({0: "batch"},), "verbose": False}
    torch.onnx.export(model.eval(), (example,), path, dynamo=True, **options)


def sizes(folder: Path) -> dict[str, int]:
    """Returns the sizes of files of the wide perceptron, in bytes."""
    torch.manual_seed(0)
    model, images = wide_perceptron(), torch.rand(64, WIDE[0])
    export_float(copy.deepcopy(model), folder / "wide float.onnx", images)
    configs = {"int8": fq.recipes.int8(target=SAFE), "int4 group 32": fq.recipes.int4_weight_only(32)}
    for name, config in configs.items():
        made = fq.calibrate(fq.prepare(copy.deepcopy(model), config, images), [images], progress=False)
        fq.export_onnx(made, folder / f"wide {name}.onnx", images)
    return {name: (folder / f"wide {name}.onnx").stat().st_size for name in ("float", *configs)}


def latencies(folder: Path, seconds: float) -> list[dict[str, Any]]:
    print(f"\n{'latency in us':<14}| threads | batch |    float |     int8 | float / int8")
    found = []
    shapes = {"MLP": (64,), "CNN": (64,), "wide": (WIDE[0],)}
    for (name, shape), threads, batch in itertools.product(shapes.items(), (1, 2), (1, 32, 512)):
        images = torch.rand(batch, *shape)
        sessions = {kind: session(folder / f"{name} {kind}.onnx", threads) for kind in ("float", "int8")}
        times = best_times({kind: lambda s=s, x=images: call(s, x) for kind, s in sessions.items()}, seconds=seconds)
        found.append({"model": name, "threads": threads, "batch": batch} | times)
        shown = f"{times['float'] * 1e6:8.1f} | {times['int8'] * 1e6:8.1f} | {times['float'] / times['int8']:.2f}"
        print(f"{name:<14}| {threads:>7} | {batch:>5} | {shown}")
    return found


# --- output ---------------------------------------------------------------------------------------


class Bar(NamedTuple):
    """A measured figure and its limit."""

    what: str
    measured: float
    at_most: float

    @property
    def met(self) -> bool:
        return self.measured <= self.at_most


def bars(compared: list[dict[str, Any]], size: dict[str, int], vnni: bool) -> list[Bar]:
    """Returns the limits, with the worst figure of all seeds."""
    found = []
    for name in MODELS:
        safe = [one for one in compared if one["model"] == name and one["target"] == SAFE]
        full = [one for one in compared if one["model"] == name and one["target"] == FULL_RANGE]
        if name != "encoder":
            codes = max(sum(row.runtime.to_end for row in one["rows"] if row.runtime) for one in safe)
            floats = max(sum(k not in KERNELS for k in one["kernels"].values()) for one in safe)
            found += [Bar(f"{name}: codes, runtime", codes, 0), Bar(f"{name}: layers in float", floats, 0)]
        share = max(sum(r.prepared.alone for r in one["rows"]) / sum(r.codes for r in one["rows"]) for one in safe)
        steps = max(row.prepared.steps for one in safe for row in one["rows"])
        found += [Bar(f"{name}: share of codes, prepared", share, 1e-4), Bar(f"{name}: steps, prepared", steps, 1)]
        others = sum(not one["verify"]["counts as here"] for one in safe + full)
        found.append(Bar(f"{name}: runs that verify counts differently", others, 0))
        if full and not vnni:
            missed = sum(not one["verify"]["saturates"] for one in full)
            found.append(Bar(f"{name}: runs with undetected saturation", missed, 0))
    return found + [Bar(f"size, {k}", size[k] / size["float"], n) for k, n in (("int8", 0.27), ("int4 group 32", 0.16))]


def print_compared(one: dict[str, Any]) -> None:
    print(f"\n{one['model']}, seed {one['seed']}, {one['target']}")
    titles = f"{'to the end':>10} | {'alone':>6} | {'steps':>5} | {'tie':>7}"
    print(f"{'':<52}| {'':>7} | {'runtime':<37} | prepared")
    print(f"{'quantizer':<52}| {'codes':>7} | {titles} | {titles}")
    for row in one["rows"]:
        print(f"{row.path:<52}| {row.codes:>7} | {formatted(row.runtime)} | {formatted(row.prepared)}")
    print("".join(f"why: {why}\n" for why in dict.fromkeys(one["why"].values()) if why), end="")
    print(f"kernels of {len(one['kernels'])} layers: {dict(Counter(one['kernels'].values()))}; {one['integer nodes']}")
    print("accuracy: " + ", ".join(f"{k} {v:.2f} %" for k, v in one["accuracy"].items()))
    print(f"largest difference of results, golden and runtime: {one['largest difference of results']:.2g}")
    print(f"verify: {one['verify']}")


def formatted(c: Count | None) -> str:
    if c is None:
        return f"{'tensor of another quantizer':<37}"
    return f"{c.to_end:>10} | {c.alone:>6} | {c.steps or '':>5} | {f'{c.tie:.0e}' if c.alone else '':>7}"


def run_seed(seed: int, epochs: int, folder: Path) -> list[dict[str, Any]]:
    data = split(seed)
    images, labels = data[2:]
    found = []
    for name in MODELS:
        model = trained(name, data, epochs, seed)
        export_float(copy.deepcopy(model), folder / f"{name} float.onnx", images[:2])
        for target in (SAFE,) if name == "encoder" else (SAFE, FULL_RANGE):
            prepared = quantized(model, data, epochs, seed, target)
            path = folder / f"{name} {'int8' if target == SAFE else 'full range'}.onnx"
            one = {"model": name, "seed": seed, "target": target} | compare(prepared, path, images)
            results = {"float": model(images).detach()} | one.pop("results")
            one["accuracy"] = {k: (y.argmax(1) == labels).double().mean().item() * 100 for k, y in results.items()}
            one["largest difference of results"] = float((results["golden"] - results["runtime"]).abs().max())
            found.append(one)
            print_compared(one)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--epochs", type=int, default=12, help="of training in float, and again of training with quantizers"
    )
    parser.add_argument("--no-latency", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)  # from torch's exporter, about its own code

    start = time.perf_counter()
    cpu = Path("/proc/cpuinfo")
    vnni = cpu.exists() and "vnni" in cpu.read_text()
    print(f"VNNI: {'yes' if vnni else 'no'}; ONNX Runtime {onnxruntime.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compared = [one for seed in range(options.seeds) for one in run_seed(seed, options.epochs, folder)]
        size = sizes(folder)
        print(f"\n{'file':<14}|     bytes | of float")
        print("\n".join(f"{kind:<14}| {n:>9} | {n / size['float']:.4f}" for kind, n in size.items()))
        latency = [] if options.no_latency else latencies(folder, seconds=0.6)
    checked = bars(compared, size, vnni)
    print(f"\n{'figure':<48}| measured |   limit")
    for bar in checked:
        print(f"{bar.what:<48}| {bar.measured:8.2g} | {bar.at_most:7.2g} | {'met' if bar.met else 'NOT met'}")
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    if options.json:
        packages = ("fakequant", "torch", "onnx", "onnxruntime", "scikit-learn")
        written = {
            "versions": {name: version(name) for name in packages},
            "epochs": options.epochs,
            "vnni": vnni,
            "compared": [one | {"rows": [dataclasses.asdict(row) for row in one["rows"]]} for one in compared],
            "bytes": size,
            "latency_seconds": latency,
            "bars": [bar._asdict() | {"met": bar.met} for bar in checked],
        }
        Path(options.json).write_text(json.dumps(written, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
