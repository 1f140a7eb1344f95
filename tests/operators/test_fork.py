"""A child process forked while another thread of its parent imports the torch front end works."""

import os
import subprocess
import sys
import textwrap

import pytest

from thoroughness import sampled

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")

# A thread imports one module slowly. The process forks meanwhile, and the child must make the same call in time.
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


TRIED = sampled(USES, "own", "prepare")


@pytest.mark.parametrize(("module", "use"), TRIED.values(), ids=TRIED)
def test_a_child_forked_while_fakequant_is_imported_does_not_hang(module, use):
    program = textwrap.dedent(PROGRAM).format(module=module, use=use)
    # Rarely, the fork happens after the import, while the thread holds a lock of torch's, and the child hangs. Retry,
    # because a child that waits for an import hangs every time.
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=180)
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
