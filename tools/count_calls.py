"""Counts the Python calls inside fakequant, and the files they are in, for three common operations.

    .venv/bin/python tools/count_calls.py [--trace]

Each operation runs three times before it is counted, so that one-time work is left out. `--trace` prints the calls in
order.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import fakequant as fq

SOURCES = str(Path(fq.__file__).parent)
TRACE = "--trace" in sys.argv


def count(run: Callable[[], object]) -> tuple[int, int]:
    for _ in range(3):
        run()
    calls: list[tuple[str, str]] = []

    def profile(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(SOURCES):
            calls.append((frame.f_code.co_filename[len(SOURCES) + 1 :], frame.f_code.co_qualname))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    if TRACE:
        print(*(f"    {file}: {name}" for file, name in calls), sep="\n")
    return len(calls), len({file for file, _ in calls})


def prepared_linear() -> Callable[[], object]:
    x = torch.randn(4, 16)
    model = fq.prepare(nn.Sequential(nn.Linear(16, 8)), fq.recipes.int8(), example=x)
    fq.calibrate(model, [x], progress=False)
    model.eval()
    return lambda: model(x)


def main() -> None:
    x = torch.randn(64, 64)
    strided, one, int8 = x[:, ::2], torch.tensor(0.1), fq.QuantSpec()
    group, scales = fq.QuantSpec(bits=4, axis=-1, group_size=32), torch.full((64, 2), 0.1)
    for what, run, limit in (
        ("strided tensor", lambda: fq.fake_quantize(strided, one, 0, int8), (15, 5)),
        ("groups of 32", lambda: fq.fake_quantize(x, scales, 0, group), (25, 6)),
        ("prepared Linear in evaluation", prepared_linear(), (30, 9)),
    ):
        calls, files = count(run)
        verdict = "yes" if calls <= limit[0] and files <= limit[1] else "MISSED"
        print(f"{what:<30} {calls:>3} calls in {files:>2} files; limit {limit[0]} in {limit[1]}, met: {verdict}")


if __name__ == "__main__":
    main()
