"""The functions work in copied and pickled modules, in several threads and in child processes."""

import copy
import pickle
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

import fakequant as fq
from straight_through import AFFINE, make, torch

SPEC = AFFINE(axis=0)


def leaf(t):
    return t.detach().clone().requires_grad_()


class Layer(torch.nn.Linear):
    def __init__(self):
        super().__init__(6, 5)
        self.spec = fq.QuantSpec(bits=4, axis=0)
        self.scale = torch.nn.Parameter(torch.full((5,), 0.1))

    def forward(self, x):
        weight = fq.fake_quantize_learned(self.weight, self.scale, 0, self.spec)
        return torch.nn.functional.linear(fq.fake_quantize(x, 0.05, 0, fq.QuantSpec()), weight, self.bias)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copied_and_pickled_modules_give_equal_results_and_gradients(duplicate):
    layer, x = Layer(), torch.randn(3, 6)
    layer(x).sum().backward()
    other = duplicate(layer)
    other.zero_grad()
    assert torch.equal(other(x), layer(x))
    other(x).sum().backward()
    for a, b in zip(layer.parameters(), other.parameters(), strict=True):
        assert a is not b
        assert torch.equal(a.grad, b.grad)


def results_of_large_tensors():
    case = make(SPEC, (8, 40_000), fraction=True)
    leaves = [leaf(v) for v in case]
    y = fq.fake_quantize_learned(*leaves, SPEC)
    clipped = leaf(case.x)
    fq.fake_quantize(clipped, case.scale, case.zero_point.round().int(), SPEC).backward(case.x)
    return y.detach(), *torch.autograd.grad(y, leaves, case.x), clipped.grad, *fq.min_max(case.x, SPEC)


def test_results_do_not_depend_on_the_number_of_threads():
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(results_of_large_tensors())
    finally:
        torch.set_num_threads(before)
    for one, *others in zip(*results, strict=True):
        assert all(torch.equal(one, other) for other in others)


def test_backward_passes_in_several_threads_give_equal_gradients():
    """The threads share one graph and have a separate one each."""
    case, dy = make(SPEC, (5, 600)), torch.randn(4, 5, 600)
    x, scale = leaf(case.x), leaf(case.scale)
    clipped = fq.fake_quantize(x, case.scale, case.zero_point, SPEC)
    learned = fq.fake_quantize_learned(x, scale, case.zero_point, SPEC)

    def work(i):
        own = fq.fake_quantize_learned(x, scale, case.zero_point, SPEC)
        return [
            *torch.autograd.grad(clipped, x, dy[i], retain_graph=True),
            *torch.autograd.grad(learned, (x, scale), dy[i], retain_graph=True),
            *torch.autograd.grad(own, (x, scale), dy[i]),
        ]

    expected = [work(i) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for n, found in enumerate(pool.map(work, [0, 1, 2, 3] * 20)):
            assert all(map(torch.equal, found, expected[n % 4]))


def run(script):
    """Runs a script in a new interpreter and fails if it hangs."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )


def test_forked_children_compute_the_parents_bits():
    """The parent has used its threads before. A large operation of torch itself would hang in such a child."""
    done = run("""
        import os, hashlib, signal
        import torch, fakequant as fq
        from torch.utils.data import DataLoader, Dataset

        torch.set_num_threads(2)
        x, dy, scale = torch.randn(1_000_000, requires_grad=True), torch.randn(1_000_000), torch.tensor([0.1])
        scale.requires_grad_()

        def digest():
            clipped = fq.fake_quantize(x, 0.01, 0, fq.QuantSpec())
            y = fq.fake_quantize_learned(clipped, scale, 0, fq.QuantSpec(bits=4))
            tensors = (y.detach(), *torch.autograd.grad(y, (x, scale), dy))
            return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).digest()

        class Quantized(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, i):
                return fq.fake_quantize(torch.full((100_000,), i + 0.26), 0.1, 0, fq.QuantSpec())[:2]

        expected = digest()
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os._exit(digest() != expected)
        assert os.waitpid(child, 0)[1] == 0
        batches = list(DataLoader(Quantized(), batch_size=2, num_workers=2))
        assert torch.equal(torch.cat(batches), torch.stack([Quantized()[i] for i in range(4)]))
    """)
    assert done.returncode == 0, done.stderr


FIRST_USES = """
    import os, sys
    import torch, fakequant as fq
    from torch._subclasses import FakeTensorMode

    x = torch.linspace(-1, 1, 30).reshape(5, 6)
    spec = fq.QuantSpec(bits=4)

    def f(x):
        return fq.fake_quantize(x, torch.full((), 0.1), 0, spec)

    def within(context):
        with context:
            return fq.fake_quantize(x, 0.1, 0, spec)

    uses = {
        "eager": lambda: f(x),
        "autocast": lambda: within(torch.autocast("cpu", torch.bfloat16)),
        "inference_mode": lambda: within(torch.inference_mode()),
        "vmap": lambda: torch.func.vmap(f)(x),
        "grad": lambda: torch.func.grad(lambda x: f(x).sum())(x),
        "fake": lambda: within(FakeTensorMode(allow_non_fake_inputs=True)),
        "meta": lambda: within(torch.device("meta")),
    }

    for name, use in uses.items():
        child = os.fork()  # fakequant._backends.torch is imported in each of them
        if child == 0:
            try:
                use()
                from fakequant._backends.torch.plain_memory import is_eager, is_memory
                if is_eager(torch.zeros(2)) and not is_memory(torch.zeros(2, device="meta")):
                    os.write(1, name.encode() + b"\\n")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def good_first_uses():
    return run(FIRST_USES).stdout.split()


@pytest.mark.parametrize("use", ["eager", "autocast", "inference_mode", "vmap", "grad", "fake", "meta"])
def test_eager_tensors_are_recognized_after_a_first_call_in_any_mode(good_first_uses, use):
    """The first call imports the torch front end, which must not mistake the active mode for eager."""
    assert use in good_first_uses
