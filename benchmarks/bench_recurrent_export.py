"""Export of a recurrent network: CPU time by the number of steps, and the time of the file in ONNX Runtime over float.

    python benchmarks/bench_recurrent_export.py [--json FILE] [--quick] [--threads N]

The network is that of a speaker encoder: three LSTM layers of 256 units over frames of 40 numbers, and a linear layer on the
last state. It is exported with 20, 80 and 160 frames, and timed with 160, batch 1.

export    CPU time of `export_onnx`, which other work on the machine changes little.
time      The shortest time of a run in ONNX Runtime over that of the float file, which torch's exporter writes with an LSTM
          node per layer. The files take turns. Weight-only layers have the default accuracy level.
codes     The codes of the file that differ from the golden model's, as `verify` finds, on sequences of 160 and 80 frames.

--quick leaves out 80 and 160 frames of the export.
"""

import argparse
import copy
import json
import tempfile
import time

import onnxruntime as ort
import torch
from torch import Tensor, nn

import fakequant as fq

FRAMES = (20, 80, 160)
RECIPES = {
    "int8": lambda: fq.recipes.int8(target="onnxruntime-x86"),
    "int8_dynamic": lambda: fq.recipes.int8_dynamic(target="onnxruntime-x86"),
    "w4a8": lambda: fq.recipes.w4a8(target="onnxruntime-x86"),
    "int4_weight_only": lambda: fq.recipes.int4_weight_only(-1),
}
ROUNDS = 40
LONGEST_EXPORT, SLOWEST = 15.0, 1.0  # of int8: CPU seconds, and time over float


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        _, (last, _) = self.lstm(x)
        return torch.relu(self.linear(last[-1]))


def session(path: str, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def times(paths: dict[str, str], x: Tensor, threads: int) -> dict[str, float]:
    """Returns the shortest time of each file, in milliseconds."""
    sessions = {name: session(path, threads) for name, path in paths.items()}
    best = dict.fromkeys(paths, float("inf"))
    for _ in range(ROUNDS):
        for name, one in sessions.items():
            feed = {one.get_inputs()[0].name: x.numpy()}
            start = time.perf_counter()
            one.run(None, feed)
            best[name] = min(best[name], 1e3 * (time.perf_counter() - start))
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    floats, found = Encoder().eval(), {}
    frames = FRAMES[:1] if options.quick else FRAMES
    x, axes = torch.randn(1, FRAMES[-1], 40), ({0: "batch", 1: "frames"},)
    with tempfile.TemporaryDirectory() as folder:
        paths = {"float": f"{folder}/float.onnx"}
        torch.onnx.export(floats, (x,), paths["float"], dynamo=True, verbose=False, external_data=False)
        for name, recipe in RECIPES.items():
            model = fq.prepare(copy.deepcopy(floats), recipe(), x[:, :4])
            fq.calibrate(model, [torch.randn(4, 20, 40)], progress=False).eval()
            paths[name] = f"{folder}/{name}.onnx"
            row = found[name] = {}
            for number in frames:
                start = time.process_time()
                fq.export_onnx(model, paths[name], x[:, :number], dynamic_shapes=axes)
                row[f"export, {number} frames"] = time.process_time() - start
            checked = fq.verify(model, paths[name], [x, torch.randn(2, FRAMES[1], 40)], accuracy_level=1)
            assert checked.ok, checked.problem
            row["codes"] = sum(tensor.codes for tensor in checked.tensors)
            row["differ"] = sum(tensor.runtime_differ for tensor in checked.tensors)
        best = times(paths, x, options.threads)
    print(
        f"{'':<18}"
        + "".join(f"| {f'export, {n} frames':<19}" for n in frames)
        + "| time over float | codes that differ"
    )
    for name, row in found.items():
        row["time"] = best[name] / best["float"]
        exports = "".join(f"| {row[f'export, {n} frames']:<19.1f}" for n in frames)
        print(f"{name:<18}{exports}| {row['time']:<16.2f}| {row['differ']:.0f} of {row['codes']:.0f}")
    print(f"float: {best['float']:.2f} ms, {options.threads} thread(s)")
    longest = max(found["int8"][f"export, {n} frames"] for n in frames)
    met = longest <= LONGEST_EXPORT and found["int8"]["time"] <= SLOWEST
    print(f"int8: export {longest:.1f} <= {LONGEST_EXPORT} s, time {found['int8']['time']:.2f} <= {SLOWEST}: {met}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
