"""Trials of ExecuTorch programs with changed bytes, each in a process of its own: a changed program may end it.

Run as a script, it prints a JSON list of trials. Its arguments are the number of bytes that are changed anywhere in a
file, the number of bytes in each tensor, and the models. Its processes are forks of one that never runs a program,
because the threads of XNNPACK do not survive a fork.
"""

import functools
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import fakequant as fq
import tamper_trials as trials
from fakequant import recipes
from fakequant._export.executorch.program import make_program
from fakequant._export.seal import SEAL, sealed
from fakequant._runtimes.xnnpack import session as executorch
from fakequant._runtimes.xnnpack.running import import_runtime

MODELS = {
    "MLP, 4 bits": (trials.mlp, trials.rows(16, 12), recipes.w4a8),
    "CNN": (trials.ResidualCNN, trials.image(4), recipes.int8),
}
SECONDS = 20
REFUSED, SAME, MISSED = 10, 11, 12
NAMES = {REFUSED: "refused", SAME: "accepted, same bits", MISSED: "missed"}


def places(data: bytes, golden: torch.nn.Module, anywhere: int, in_tensor: int) -> Iterator[tuple[str, int]]:
    """Yields a description and the number of each byte to change: some anywhere, and some of every tensor."""
    rng, seal = np.random.default_rng(0), SEAL.search(data)
    assert seal is not None
    for place in sorted(rng.choice(len(data), anywhere, replace=False).tolist()):
        if not seal.start() <= place < seal.end():
            yield f"byte {place} of {len(data)}", place
    for path, module in golden.named_modules():
        for name in ("weight_codes", "weight_scale", "bias_codes"):
            tensor = module._buffers.get(name)
            if tensor is None:
                continue
            # Weights of convolutions are stored with the channels last.
            stored = tensor.permute(0, 2, 3, 1) if tensor.dim() == 4 else tensor
            start = data.find(stored.numpy().tobytes())
            if start >= 0:
                for offset in rng.choice(tensor.nbytes, in_tensor, replace=False).tolist():
                    yield f"{path}.{name}, byte {offset}", start + offset


def results(data: bytes, x: torch.Tensor) -> bytes:
    """Returns the results of a program as bytes."""
    method = import_runtime().Runtime.get().load_program(data).load_method("forward")
    return b"".join(value.numpy().tobytes() for value in method.execute([x]))


def forked(function) -> int:
    """Returns the number that a function returns, computed in another process. It is negative if that was ended."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(SECONDS)
            code = function()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outcome(model, data: bytes, x: torch.Tensor, expected: bytes, path: Path) -> int:
    if not trials.says_ok(model, data, x, path):
        return REFUSED
    return SAME if results(data, x) == expected else MISSED


def tried(name: str, folder: Path, *numbers: int) -> Iterator[dict[str, str]]:
    """Yields the trials of a model: what was changed, whether the hash matches, and what came of it."""
    build, x, recipe = MODELS[name]
    model, path, kept = trials.make(build, x, recipe, "xnnpack"), folder / "model.pte", folder / "results"
    fq.export_executorch(model, path, x)
    whole, golden = path.read_bytes(), fq.convert(model)
    made = make_program(golden, (x,), {}, watched=True)
    executorch.make_program = lambda *args, **options: made  # `verify` would make it again in every trial
    assert forked(lambda: kept.write_bytes(results(whole, x)) and 0) == 0
    expected, rng = kept.read_bytes(), np.random.default_rng(1)
    for what, data in (("nothing", whole), ("nothing", sealed(whole))):
        yield trial(name, what, data is not whole, forked(lambda d=data: outcome(model, d, x, expected, path)))
    for number, (what, place) in enumerate(places(whole, golden, *numbers)):
        bit = int(rng.integers(8))
        changed = whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
        if number % 3 == 0:
            code = forked(functools.partial(outcome, model, changed, x, expected, path))
            yield trial(name, f"{what}, bit {bit}", False, code)
        code = forked(functools.partial(outcome, model, sealed(changed), x, expected, path))
        yield trial(name, f"{what}, bit {bit}", True, code)


def trial(name: str, what: str, is_sealed: bool, code: int) -> dict[str, str]:
    outcome = f"ended by {signal.Signals(-code).name}" if code < 0 else NAMES.get(code, "failed")
    return {"model": name, "what": what, "hash": "matches" if is_sealed else "old", "outcome": outcome}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as where:
        found = [one for name in sys.argv[3:] for one in tried(name, Path(where), *map(int, sys.argv[1:3]))]
    json.dump(found, sys.stdout)
