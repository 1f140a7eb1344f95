"""Time and memory of post-training methods on MobileNetV2 with images of 224x224.

    python benchmarks/ptq_mobilenet.py [--json FILE] [--quick] [--images N] [--threads N] [--only SUBSTRING]

torchvision's `mobilenet_v2` has random weights; its batch norms are fitted to random images. It is prepared with
`recipes.w4a8()` and calibrated. Each method then runs once, with its defaults, on a copy of that model and on the same
images, in batches of 16. No accuracy is measured: random weights have none. The SQNR is the median over layers, before
and after.

Seconds are wall-clock time, so the machine should do nothing else; CPU is that of all threads. The peak is
that of the whole process, which only grows: a row shows what all rows up to it needed.
"""

import argparse
import copy
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parent.parent / "tests" / "zoo"))

import torch
from torch import Tensor, nn

import fakequant as fq
from fitted_norms import fit_norms
from ptq_digits import versions
from vision_packages import find_vision_packages

SIZE, BATCH = 224, 16
LIMIT = 600.0  # seconds of adaround with two threads

METHODS: dict[str, Callable[[nn.Module, list[Tensor]], fq.ptq.Changes]] = {
    "bias": lambda model, batches: fq.ptq.correct_bias(model, batches, progress=False),
    "gptq": lambda model, batches: fq.ptq.gptq(model, batches, progress=False),
    "adaround": lambda model, batches: fq.ptq.adaround(model, batches, progress=False),
}


class Figures(NamedTuple):
    """What was measured of a method."""

    method: str
    seconds: float
    cpu_seconds: float  # of all threads
    before: float  # median SQNR of layers in dB
    after: float
    peak_gib: float


def mobilenet(images: Tensor) -> nn.Module:
    find_vision_packages()
    from torchvision.models import mobilenet_v2

    torch.manual_seed(0)
    return fit_norms(mobilenet_v2(weights=None), images)


def measure(name: str, model: nn.Module, batches: list[Tensor]) -> Figures:
    made = copy.deepcopy(model)
    start, cpu_start = time.perf_counter(), time.process_time()
    changes = METHODS[name](made, batches)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    layers = [layer for layer in changes.layers if layer.before is not None and layer.after is not None]
    before, after = (statistics.median(getattr(layer, which) for layer in layers) for which in ("before", "after"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Figures(name, seconds, cpu_seconds, before, after, peak)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="only methods with this in their name")
    parser.add_argument("--quick", action="store_true", help="16 images")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    images = torch.randn(
        BATCH if options.quick else options.images, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0)
    )
    batches = list(images.split(BATCH))
    model = fq.prepare(mobilenet(batches[0]), fq.recipes.w4a8(), batches[0])
    start = time.perf_counter()
    fq.calibrate(model, batches, progress=False)
    print(f"\n{len(images)} images, {options.threads} threads; calibrate: {time.perf_counter() - start:.1f} s")
    found: list[Figures] = []
    print("\nmethod    | seconds |     CPU | SQNR before | after | peak GiB")
    for name in METHODS:
        if options.only in name:
            found.append(measure(name, model, batches))
            x = found[-1]
            print(
                f"{name:<10}| {x.seconds:7.1f} | {x.cpu_seconds:7.1f} | {x.before:8.1f} dB | {x.after:5.1f} | {x.peak_gib:.2f}",
                flush=True,
            )
    written: dict[str, Any] = {"versions": versions("fakequant", "torch", "torchvision"), "images": len(images)}
    written |= {"threads": options.threads, "rows": [figures._asdict() for figures in found]}
    for figures in found:
        if figures.method == "adaround" and not options.quick:
            met = figures.seconds <= LIMIT
            written["bars"] = [{"what": "adaround, seconds", "measured": figures.seconds, "at_most": LIMIT, "met": met}]
            print(f"\nadaround: {figures.seconds:.1f} s, limit <= {LIMIT:.0f} s: {'met' if met else 'NOT met'}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(written, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
