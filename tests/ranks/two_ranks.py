"""Runs checks in two processes on this machine that train together, and collects their results.

A test module has a `CHECKS = Checks()` with functions that take a `Seat`. Both processes start once and run those of
all collected modules. After a check that hangs or fails they create a new process group, so that later checks are not
affected. The same functions run in the test process on the joined batches, with `Seat()`.
"""

import importlib
import inspect
import os
import time
import traceback
import warnings
from datetime import timedelta
from functools import partial

import pytest

from straight_through import torch

# The option that stops DistributedDataParallel from sending buffers, which torch 2.13 has renamed.
_OPTIONS = inspect.signature(torch.nn.parallel.DistributedDataParallel).parameters
OWN_BUFFERS = {"forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers": False}

dist = pytest.importorskip("torch.distributed")
if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

FileLock = pytest.importorskip("filelock").FileLock
mp = pytest.importorskip("torch.multiprocessing")

RANKS = 2
PATIENCE = 15.0  # seconds that one rank waits for the other in a check before a hang becomes an error
ALL_PATIENCE = 480.0  # seconds after which the processes are killed


class Seat:
    """Selects the rows of a batch that a rank sees, or all rows without a rank."""

    def __init__(self, rank=None):
        self.rank = rank

    def part(self, x):
        return x if self.rank is None else x.chunk(RANKS)[self.rank]


class Checks(dict):
    """Functions to run on both ranks, by the name of the function and of the case."""

    def __call__(self, *names, **options):
        def register(function):
            self[" ".join((function.__name__, *names))] = partial(function, **options)
            return function

        return register

    def names(self, function):
        """Returns a decorator that parametrizes a test by the checks that run `function`."""
        return pytest.mark.parametrize("name", [name for name, check in self.items() if check.func is function])

    def alone(self, name, **options):
        """Returns the result of a check in this process, on whole batches."""
        return self[name](Seat(), **options)


# --- running --------------------------------------------------------------------------------------


def work(rank, modules, folder, barrier, failed):
    """Runs the checks of modules in one process and writes their outcomes to a file. Warnings are errors."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # Raised by torch when it compiles a custom autograd function.
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    seat, outcomes = Seat(rank), {module: {} for module in modules}
    checks = [(module, *item) for module in modules for item in importlib.import_module(module).CHECKS.items()]
    for number, (module, name, function) in enumerate(checks):
        if not dist.is_initialized():
            where, patience = f"file://{folder}/store{number}", timedelta(seconds=PATIENCE)
            dist.init_process_group("gloo", where, timeout=patience, rank=rank, world_size=RANKS)
        try:
            outcomes[module][name] = {"result": function(seat)}
        except Exception:  # later checks still run
            outcomes[module][name] = {"error": traceback.format_exc()}
            failed.value = number
        barrier.wait(ALL_PATIENCE)
        if failed.value == number:
            dist.destroy_process_group()
    torch.save(outcomes, f"{folder}/rank{rank}")


def start(modules, folder):
    """Runs both processes and kills them if they do not end in time."""
    added = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    context = mp.get_context("spawn")
    shared = modules, str(folder), context.Barrier(RANKS), context.Value("i", -1)
    try:
        processes = mp.start_processes(work, shared, RANKS, join=False, daemon=True, start_method="spawn")
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    end = time.monotonic() + ALL_PATIENCE
    try:
        while not processes.join(timeout=1.0):
            assert time.monotonic() < end, "the ranks did not end"
    finally:
        for process in processes.processes:
            if process.is_alive():
                process.kill()


def outcomes_of(modules, tmp_path_factory):
    """Returns the outcomes of the checks of modules, by rank and by module. Parallel test processes share them."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    folder = folder / "two_ranks"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            start(modules, folder)
    return [torch.load(folder / f"rank{rank}") for rank in range(RANKS)]


def results_of(outcomes, name):
    """Returns the results of one check by rank."""
    for rank, outcome in enumerate(outcomes):
        assert "error" not in outcome[name], f"rank {rank}: {outcome[name]['error']}"
    return [outcome[name]["result"] for outcome in outcomes]
