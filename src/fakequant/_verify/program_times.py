"""Times programs of ExecuTorch in a process of their own, whose thread pool has a chosen number of threads.

    python -m fakequant._verify.program_times FOLDER

The folder has `task.json`, `inputs.pt` and, when the process has ended, `times.json`.
"""

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fakequant.testing.timing import Contender, all_times

_TASK, _INPUTS, _TIMES = "task.json", "inputs.pt", "times.json"


def times_of_programs(
    programs: dict[str, Path], inputs: list[Tensor], threads: int, seconds: float
) -> dict[str, list[float]]:
    """Returns the times of programs that take turns, in seconds per call, by name.

    Args:
        programs: The files by name.
        inputs: What all of them take.
        threads: The number of threads.
        seconds: How long to measure.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {name: str(path.absolute()) for name, path in programs.items()}
        (folder / _TASK).write_text(json.dumps({"programs": files, "threads": threads, "seconds": seconds}))
        torch.save(inputs, folder / _INPUTS)
        done = subprocess.run([sys.executable, "-m", __name__, name], capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
            raise RuntimeError(f"The process that times programs of ExecuTorch failed: {lines[-1]}")
        times: dict[str, list[float]] = json.loads((folder / _TIMES).read_text())
        return times


def _measure(folder: Path) -> None:
    from fakequant._executorch.loaded import Loaded
    from fakequant._verify.runtimes.executorch import set_thread_count, thread_count

    task = json.loads((folder / _TASK).read_text())
    inputs = torch.load(folder / _INPUTS, weights_only=True)
    torch.set_num_threads(1)
    set_thread_count(task["threads"])
    if thread_count() != task["threads"]:
        raise RuntimeError(f"ExecuTorch uses {thread_count()} threads instead of {task['threads']}.")
    loaded = {name: Loaded(Path(path).read_bytes(), path) for name, path in task["programs"].items()}
    contenders: dict[str, Contender] = {
        name: partial(program.method.execute, inputs) for name, program in loaded.items()
    }
    (folder / _TIMES).write_text(json.dumps(all_times(contenders, seconds=task["seconds"])))


if __name__ == "__main__":
    _measure(Path(sys.argv[1]))
