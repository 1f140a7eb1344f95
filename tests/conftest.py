"""Fixtures for instruction sets and threads, and a cache for torch's exporter."""

import contextlib
import copy
import functools
import gc
import os
import re
import sys
import threading
import typing
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

import fakequant
from fakequant import _native
from thoroughness import ALL

# decelerate() removes kernels only if no other thread is running, so libraries must not leave threads behind.
# transformers loads tensors in threads that stay alive if loading fails, Inductor keeps those in which it compiles, and
# tqdm, which shows the compiler's progress, starts one that watches it.
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
with contextlib.suppress(ModuleNotFoundError):
    import tqdm

    tqdm.tqdm.monitor_interval = 0

# Importing and collecting the tests makes a million objects that stay. Looking for garbage among them takes seconds.
gc.disable()

# The assertions of helper modules are explained as those of tests are.
_FILES = list(Path(__file__).parent.rglob("*.py"))
_HELPERS = {path.stem for path in _FILES if not path.stem.startswith(("test_", "conftest"))}
pytest.register_assert_rewrite(*_HELPERS - sys.modules.keys())

# They have no examples. Modules of the same name cannot be collected together, and the second needs Triton.
collect_ignore_glob = ["*/conftest.py", "*/compiled_kernels.py"]

# Without torch (`make test-python`), collect only the files that can be imported without it.
if find_spec("torch") is None:
    _NEEDS_TORCH = re.compile(
        r"^(?:import (?:torch|releases)\b|from (?:torch|straight_through|tensor_data|accelerated|releases|zoo)\b"
        r"|from fakequant\.(?:_backends\.torch|nn|observers|_prepare|_train|_convert|_export|_verify)\b"
        r"|from fakequant import .*\b(?:nn|observers|recipes)\b)",
        re.MULTILINE,
    )
    collect_ignore = [str(path) for path in _FILES if _NEEDS_TORCH.search(path.read_text(encoding="utf-8"))]


def pytest_collection_finish():
    """Looks for garbage from now on, but not among what was imported and collected."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 20)  # exports make many objects that live shortly
    gc.enable()


# The kernels of all instruction sets give the same bytes: `make test-kernels` compares them. One is enough here.
TARGETS = _native.supported_targets() if ALL else [_native.target()]


@pytest.fixture(params=TARGETS)
def target(request):
    """Runs the test on one instruction set, or on each, and restores the previous one."""
    before = _native.target()
    assert _native.select_target(request.param)
    yield request.param
    _native.select_target(before)


@pytest.fixture
def each_target():
    """Iterates over the instruction sets within one test, for expected results that are slow to compute."""
    before = _native.target()

    def each():
        for name in TARGETS:
            assert _native.select_target(name)
            yield name

    yield each
    assert _native.select_target(before)


@pytest.fixture(autouse=True)
def threads_as_before():
    """Restores the number of threads after every test, and fails a test that leaves threads of its own."""
    before, running = fakequant.get_num_threads(), set(threading.enumerate())
    yield
    fakequant.set_num_threads(before)
    if left := set(threading.enumerate()) - running:
        gc.collect()  # ends the threads of executors that nobody holds any more
        for thread in left:
            thread.join(timeout=5)
        left = {thread for thread in left if thread.is_alive()}
    assert not left, f"threads are still running: {left}"


@pytest.fixture(autouse=True)
def nothing_compiled_before():
    """Forgets what earlier tests compiled: torch compiles one function at most 8 times in a process."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


@pytest.fixture
def torch_on_one_thread():
    """Runs torch on one thread, because its sums depend on the number of threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy warns about overflow and NaN, which are expected results
        yield
    torch.set_num_threads(before)


@pytest.fixture(params=[(target, n) for target in TARGETS for n in (1, 2)], ids=lambda p: f"{p[0]}-{p[1]}")
def machine(request, torch_on_one_thread):
    """Runs the test on the instruction sets, with one and with two threads."""
    before = _native.target()
    assert _native.select_target(request.param[0])
    fakequant.set_num_threads(request.param[1])
    yield
    assert _native.select_target(before)


@pytest.fixture(scope="session", autouse=True)
def exporter_reads_its_operators_once():
    """Caches the operators that torch's exporter would translate again in every export, most of its time."""
    if "onnxscript" not in sys.modules:  # imported by every test module that exports
        yield
        return
    registration = pytest.importorskip("torch.onnx._internal.exporter._registration")
    read = functools.cache(registration.ONNXRegistry.from_torchlib)

    def from_torchlib(*args, **options):
        registry = copy.copy(read(*args, **options))
        # An export adds operators to its registry.
        registry.functions = {target: list(found) for target, found in registry.functions.items()}
        return registry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registration.ONNXRegistry, "from_torchlib", staticmethod(from_torchlib))
        yield


@pytest.fixture(scope="session", autouse=True)
def operators_are_materialized_once():
    """Keeps torch.export from looking up all operators of torch dozens of times in every export."""
    exporting = sys.modules.get("torch._export.utils")
    if not hasattr(exporting, "_materialize_cpp_cia_ops"):
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "_materialize_cpp_cia_ops", functools.cache(exporting._materialize_cpp_cia_ops))
        yield


@pytest.fixture(scope="session", autouse=True)
def exports_keep_no_books():
    """Keeps torch.export from making types of annotations a million times, and from copying the origins of nodes."""
    if "torch.fx.traceback" not in sys.modules:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        # py_impl() evaluates its annotations in every call, and an export calls it for every operator of torch.
        patch.setattr(sys.modules["torch._ops"], "Callable", typing.Callable)
        node_source = getattr(sys.modules["torch.fx.traceback"], "NodeSource", type)
        if node_source is not type:
            patch.setattr(node_source, "__deepcopy__", lambda self, _: self, raising=False)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for files that several tests of a module read."""
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def programs_made_once():
    """Makes `verify` reuse the programs with watched codes that it makes for ExecuTorch, most of its time."""
    executorch = pytest.importorskip("fakequant._runtimes.xnnpack.session")
    fingerprint = pytest.importorskip("fakequant._export.notes")
    make, made = executorch.make_program, {}

    def make_program(golden, args, kwargs, **options):
        shapes = [tuple(x.shape) for x in (*args, *kwargs.values())]
        key = fingerprint.digest_of_parameters(golden), str(golden), str(shapes), str(options)
        if key not in made:
            made[key] = make(golden, args, kwargs, **options)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executorch, "make_program", make_program)
        yield
