"""The thread pool: concurrent callers, forked children, process exit."""

import multiprocessing
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits

SPEC = fq.QuantSpec(symmetric=False)


def data(seed, size=300_000):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def result_of(seed):
    return fq.fake_quantize(data(seed), 0.02, 3, SPEC, mask="packed")


def test_concurrent_callers_get_their_own_results():
    fq.set_num_threads(1)
    expected = [result_of(seed) for seed in range(8)]
    fq.set_num_threads(3)
    wrong = []

    def caller(seed):
        for _ in range(20):
            for e, a in zip(expected[seed], result_of(seed), strict=True):
                if not np.array_equal(e, a):
                    wrong.append(seed)

    callers = [threading.Thread(target=caller, args=(seed,)) for seed in range(8)]
    for t in callers:
        t.start()
    for t in callers:
        t.join(timeout=60)
        assert not t.is_alive()
    assert wrong == []


def test_kernels_release_the_gil():
    # Another Python thread counts during one long call, which is possible only if the kernel releases the GIL.
    fq.set_num_threads(1)
    x = data(0, 1 << 25)
    count = 0
    stop = threading.Event()

    def counter():
        nonlocal count
        while not stop.is_set():
            count += 1
            time.sleep(0)

    t = threading.Thread(target=counter)
    t.start()
    before = count
    fq.fake_quantize(x, 0.02, 3, SPEC)
    during = count - before
    stop.set()
    t.join()
    assert during > 10


def _child(queue, seed):
    queue.put([a.tobytes() for a in result_of(seed)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_work_after_the_parent_used_its_threads():
    fq.set_num_threads(3)
    expected = [a.tobytes() for a in result_of(0)]
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        queue = context.Queue()
        child = context.Process(target=_child, args=(queue, 0))
        child.start()
        assert queue.get(timeout=60) == expected
        child.join(timeout=60)
        assert child.exitcode == 0
    assert [a.tobytes() for a in result_of(0)] == expected


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


def test_process_exits_with_idle_threads():
    result = run(
        "import numpy as np, fakequant as fq\n"
        "fq.set_num_threads(4)\n"
        "fq.fake_quantize(np.ones(10**6, np.float32), 0.1, 0, fq.QuantSpec())\n"
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_process_exits_while_another_thread_is_inside_a_kernel():
    result = run(
        "import threading, numpy as np, fakequant as fq\n"
        "x = np.ones(1 << 22, np.float32)\n"
        "def forever():\n"
        "    while True: fq.fake_quantize(x, 0.1, 0, fq.QuantSpec())\n"
        "threading.Thread(target=forever, daemon=True).start()\n"
        "import time; time.sleep(0.3)\n"
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_idle_threads_use_no_cpu():
    fq.set_num_threads(4)
    result_of(0)
    time.sleep(0.05)
    # Three spinning threads would use 1.5 seconds, a single one 0.5 seconds.
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.4


def test_environment_variable_sets_the_number_of_threads():
    result = run("import fakequant; print(fakequant.get_num_threads())", FAKEQUANT_NUM_THREADS="3")
    assert result.stdout == "3\n"
    for bad in ("0", "-1", "two", "1.5"):
        result = run("import fakequant", FAKEQUANT_NUM_THREADS=bad)
        assert f"FAKEQUANT_NUM_THREADS='{bad}': expected a whole number of at least 1." in result.stderr


def test_results_do_not_depend_on_the_number_of_threads():
    fq.set_num_threads(1)
    expected = result_of(0)
    for n in (2, 3, 7, 64):
        fq.set_num_threads(n)
        for e, a in zip(expected, result_of(0), strict=True):
            assert_same_bits(e, a, n)
