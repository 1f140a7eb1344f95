"""A child process that is forked while another thread of its parent imports the torch front end."""

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")

# Imports one module slowly and forks meanwhile; the child does the same as the thread, in time or not at all.
PROGRAM = """
    import importlib.abc, os, signal, sys, threading, time
    import torch, fakequant as fq

    in_the_middle = threading.Event()

    class Slowly(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == {module!r} and not in_the_middle.is_set():
                in_the_middle.set()
                time.sleep(1)
            return None

    sys.meta_path.insert(0, Slowly())
    x = torch.linspace(-1, 1, 8)
    use = lambda: {use}

    thread = threading.Thread(target=use)
    thread.start()
    assert in_the_middle.wait(60)
    child = os.fork()
    if child == 0:
        use()
        os._exit(0)
    for _ in range(150):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        time.sleep(0.1)
    else:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        sys.exit("the child hangs")
    thread.join()
    use()
    sys.exit(os.waitstatus_to_exitcode(status))
"""
USES = {
    "own": ("fakequant._backends.torch.gradients", "fq.fake_quantize(x, 0.1, 0, fq.QuantSpec())"),
    "accelerate": ("fakequant._backends.torch.compare_with_aten", "fq.accelerate()"),
    "FakeQuantizer": ("fakequant._backends.torch.formula", "fq.FakeQuantizer().forward(x)"),
    "nn": ("fakequant.nn._bounded_parameters", "fq.nn.PACT(4)(x)"),
    "prepare": ("fakequant._prepare.plan", "fq.prepare"),
}


@pytest.mark.parametrize(("module", "use"), USES.values(), ids=USES)
def test_the_child_does_not_hang(module, use):
    program = textwrap.dedent(PROGRAM).format(module=module, use=use)
    # Once in a while the fork meets the thread inside torch, after the import, while it has a lock of torch's. An
    # import that the child waits for hangs every time.
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
