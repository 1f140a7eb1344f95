"""Forward and backward on tensors, compared with torch's operators and with ReLU; `accelerate()` on torch.ao modules.

    python benchmarks/bench_torch.py [--json FILE] [--quick] [--only SUBSTRING]

Operators are timed as in training: `y = f(x); y.backward(g)`, then the gradients are dropped. ReLU is the baseline,
as an operation that is cheap enough for any model. Modules of torch.ao and whole QAT steps are timed with and
without `fakequant.accelerate()`, on the same objects. The bytes saved for backward are counted too.

Before a row is timed, its results are compared: they must have the same bits as torch's, or, in numerics that torch
does not have, as fakequant's on NumPy arrays.

A "?" after a row or figure means that the shortest time was not reproduced within the run. "others" is the number
of CPUs that other processes kept busy. If it is not near 0, run again: long calls are disturbed more often than
short ones, and two threads wait for each other. The last table compares the ratios with the limits this library is
held to, for one and two threads.
"""

import argparse
import copy
import dataclasses
import gc
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.ao import quantization as ao
from torch.ao.quantization.quantize_fx import prepare_qat_fx

import fakequant as fq
from bench_kernels import QMAX, QMIN, SCALE, ZERO, data, to_numpy, to_torch
from fakequant import torch_ops
from fakequant.testing.assertions import assert_same_bits
from fakequant.testing.timing import Contender, best_times

THREADS = (1, 2)
OWN = fq.QuantSpec(symmetric=False)  # onnx numerics
# The same layouts at both sizes: a weight, and activations in NCHW order.
SIZES = {"2^20": ((1024, 1024), (8, 128, 32, 32)), "2^10": ((32, 32), (2, 8, 8, 8))}

Function = Callable[[Tensor], Tensor]
Results = tuple[Tensor, ...]


@dataclasses.dataclass
class Case:
    """Contenders "ours", "torch" and "baseline". If `switched`, "ours" is torch's code under `accelerate()`."""

    what: str
    dtype: str
    size: str
    elements: int | None
    contenders: dict[str, Contender]
    same: Callable[[], None]
    switched: bool = False


@dataclasses.dataclass
class Row:
    what: str
    dtype: str
    size: str
    elements: int | None
    threads: int
    seconds: dict[str, float]  # the shortest call of each contender
    repeated: bool
    others: float

    @property
    def x_torch(self) -> float:
        """torch's time over ours."""
        return self.seconds["torch"] / self.seconds["ours"]

    @property
    def x_baseline(self) -> float:
        """Our time over that of ReLU, or of the float model."""
        return self.seconds["ours"] / self.seconds["baseline"]


# --- forward + backward ---------------------------------------------------------------------------


def leaf(shape: tuple[int, ...], dtype: str = "float32") -> Tensor:
    x = to_torch(data(int(torch.Size(shape).numel()), dtype)).reshape(shape)
    return x.clone().requires_grad_()


def gradient_for(x: Tensor) -> Tensor:
    return x.detach().flatten().flip(0).reshape(x.shape)


def forward_backward(f: Function, x: Tensor, g: Tensor, parameters: Results = ()) -> Contender:
    leaves = (x, *parameters)

    def run() -> None:
        y = f(x)
        y.backward(g)
        for tensor in leaves:
            tensor.grad = None

    return run


def results_of(f: Function, x: Tensor, g: Tensor, parameters: Results = ()) -> Results:
    """Returns y and the gradients of x and of the parameters."""
    y = f(x)
    return (y.detach(), *torch.autograd.grad(y, (x, *parameters), g))


def assert_equal(expected: Results, actual: Results, names: str) -> None:
    """Asserts that y and dx have the same bits, and that the sums are close.

    torch's sums of a million float32 terms depend on its number of threads. The tests compare fakequant's with exact sums.
    """
    for name, a, b in zip(("y", "dx"), expected[:2], actual[:2]):
        assert_same_bits(to_numpy(a.detach()), to_numpy(b.detach()), names, name)
    for name, a, b in zip(("dscale", "dzero_point"), expected[2:], actual[2:]):
        torch.testing.assert_close(
            b, a, rtol=1e-3, atol=1e-3 * float(a.abs().max()), msg=lambda m, n=name: f"{names}, {n}: {m}"
        )


# --- operators ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Operator:
    what: str
    ours: Function
    torch: Function
    x: Tensor
    parameters: Results = ()
    # Computes the results that `ours` must equal; None for those of `torch`.
    expected: Callable[[Tensor, Tensor], Results] | None = None

    def case(self, dtype: str, size: str) -> Case:
        g = gradient_for(self.x)

        def same() -> None:
            expected = self.expected(self.x, g) if self.expected else results_of(self.torch, self.x, g, self.parameters)
            assert_equal(expected, results_of(self.ours, self.x, g, self.parameters), self.what)

        contenders = {
            "ours": forward_backward(self.ours, self.x, g, self.parameters),
            "torch": forward_backward(self.torch, self.x, g, self.parameters),
            "baseline": forward_backward(torch.relu, self.x, g),
        }
        return Case(self.what, dtype, size, self.x.numel(), contenders, same)


def bound(f: Callable, *args, **options) -> Function:
    return lambda x: f(x, *args, **options)


def on_arrays(gradient: str, spec: fq.QuantSpec, scale, zero_point) -> Callable[[Tensor, Tensor], Results]:
    def expected(x: Tensor, g: Tensor) -> Results:
        y, mask = fq.fake_quantize(x.detach().numpy(), scale, zero_point, spec, mask="packed")
        dx = g.numpy() if gradient == "pass" else fq.fake_quantize_backward(g.numpy(), mask, spec)
        return torch.from_numpy(y), torch.from_numpy(dx)

    return expected


def learned_on_arrays(spec: fq.QuantSpec, *parameters: Tensor) -> Callable[[Tensor, Tensor], Results]:
    scale, zero_point = (p.detach().numpy() for p in parameters)

    def expected(x: Tensor, g: Tensor) -> Results:
        array = x.detach().numpy()
        y = fq.fake_quantize(array, scale, fq.round_zero_point(zero_point, spec), spec)
        gradients = fq.fake_quantize_learned_backward(g.numpy(), array, scale, zero_point, spec)
        return tuple(torch.from_numpy(a).reshape(t.shape) for a, t in zip((y, *gradients), (x, x, *parameters)))

    return expected


def per_tensor(x: Tensor) -> Iterator[Operator]:
    args = (SCALE, ZERO, QMIN, QMAX)
    torchs = bound(torch.fake_quantize_per_tensor_affine, *args)
    yield Operator("per tensor", bound(torch_ops.fake_quantize_per_tensor_affine, *args), torchs, x)
    for gradient in ("clipped", "pass"):
        ours = bound(fq.fake_quantize, SCALE, ZERO, OWN, gradient=gradient)
        expected = on_arrays(gradient, OWN, SCALE, ZERO)
        yield Operator(f"per tensor, own, {gradient}", ours, torchs, x, expected=expected)


def channel_parameters(channels: int) -> Results:
    index = torch.arange(channels)
    return index % 7 * 0.01 + 0.03, (index % 11 - 5).int()


def per_channel(x: Tensor, axis: int) -> Iterator[Operator]:
    what, spec = f"per channel, axis {axis}", dataclasses.replace(OWN, axis=axis)
    scale, zero_point = channel_parameters(x.shape[axis])
    args = (scale, zero_point, axis, QMIN, QMAX)
    torchs = bound(torch.fake_quantize_per_channel_affine, *args)
    yield Operator(what, bound(torch_ops.fake_quantize_per_channel_affine, *args), torchs, x)
    expected = on_arrays("clipped", spec, scale.numpy(), zero_point.numpy())
    yield Operator(f"{what}, own", bound(fq.fake_quantize, scale, zero_point, spec), torchs, x, expected=expected)


def learned_per_tensor(x: Tensor) -> Iterator[Operator]:
    parameters = tuple(torch.tensor([v], requires_grad=True) for v in (SCALE, float(ZERO)))
    args = (*parameters, QMIN, QMAX, 1.0)
    torchs = bound(torch._fake_quantize_learnable_per_tensor_affine, *args)
    ours = bound(torch_ops.fake_quantize_learnable_per_tensor_affine, *args)
    yield Operator("learned per tensor", ours, torchs, x, parameters)
    own = bound(fq.fake_quantize_learned, *parameters, OWN)
    yield Operator("learned per tensor, own", own, torchs, x, parameters, learned_on_arrays(OWN, *parameters))


def learned_per_channel(x: Tensor, axis: int) -> Iterator[Operator]:
    what, spec = f"learned per channel, axis {axis}", dataclasses.replace(OWN, axis=axis)
    parameters = tuple(p.float().requires_grad_() for p in channel_parameters(x.shape[axis]))
    args = (*parameters, axis, QMIN, QMAX, 1.0)
    torchs = bound(torch._fake_quantize_learnable_per_channel_affine, *args)
    yield Operator(what, bound(torch_ops.fake_quantize_learnable_per_channel_affine, *args), torchs, x, parameters)
    own = bound(fq.fake_quantize_learned, *parameters, spec)
    yield Operator(f"{what}, own", own, torchs, x, parameters, learned_on_arrays(spec, *parameters))


def operators(size: str) -> Iterator[Operator]:
    weight, activations = (leaf(shape) for shape in SIZES[size])
    flat = leaf((weight.numel(),))
    yield from per_tensor(flat)
    yield from learned_per_tensor(flat)
    for x, axis in ((weight, 0), (activations, 1)):
        yield from per_channel(x, axis)
        yield from learned_per_channel(x, axis)


def operator_cases(quick: bool) -> Iterator[Case]:
    for size in SIZES:
        for operator in operators(size):
            if not (quick and "own" in operator.what):
                yield operator.case("float32", size)
    if not quick:
        yield next(per_tensor(leaf((1 << 20,), "bfloat16"))).case("bfloat16", "2^20")


# --- memory saved for backward --------------------------------------------------------------------


def saved_bytes(f: Function, x: Tensor) -> float:
    """Returns the bytes saved for backward per element of x."""
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        f(x)
    return sum(saved) / x.numel()


def all_saved_bytes() -> dict[str, float]:
    x = leaf((1 << 20,))
    tensor, learned = list(per_tensor(x)), list(learned_per_tensor(x))
    functions = {operator.what: operator.ours for operator in tensor + learned}
    functions |= {
        "torch, per tensor": tensor[0].torch,
        "torch, learned per tensor": learned[0].torch,
        "relu": torch.relu,
    }
    return {what: saved_bytes(f, x) for what, f in functions.items()}


# --- modules --------------------------------------------------------------------------------------


def without_ao_warnings() -> None:
    """Silences the deprecation warnings of torch.ao."""
    warnings.filterwarnings("ignore", "torch.ao.quantization is deprecated", DeprecationWarning)
    warnings.filterwarnings("ignore", "Please use quant_min and quant_max", UserWarning, "torch.ao.quantization")


def module_cases(quick: bool) -> Iterator[Case]:
    """torch.ao's modules with their defaults: quint8, 0 to 255, per tensor, moving average."""
    weight, _ = SIZES["2^20"]
    flat = (weight[0] * weight[1],)
    yield module_case("FakeQuantize", ao.FakeQuantize(), flat)
    yield module_case("FusedMovingAvgObsFakeQuantize", ao.FusedMovingAvgObsFakeQuantize(), flat)
    if not quick:
        yield module_case("FakeQuantize, per channel", ao.default_per_channel_weight_fake_quant(), weight)
        yield module_case("Fused..., per channel", ao.default_fused_per_channel_wt_fake_quant(), weight)


def module_case(what: str, module: nn.Module, shape: tuple[int, ...]) -> Case:
    x = leaf(shape)
    g = gradient_for(x)

    def outcome(accelerated: bool) -> Results:
        """Returns the results of three batches and the state after them."""
        fresh = copy.deepcopy(module)
        seen = []
        with fq.accelerate() if accelerated else nullcontext():
            for factor in (1.0, 0.7, 1.9):
                batch = (x.detach() * factor).requires_grad_()
                seen += results_of(fresh, batch, g)
        return (*seen, *fresh.state_dict().values())

    def same() -> None:
        assert_same_tensors(outcome(False), outcome(True), what)

    run = forward_backward(copy.deepcopy(module), x, g)
    contenders = {"ours": run, "torch": run, "baseline": forward_backward(torch.relu, x, g)}
    return Case(what, "float32", "2^20", x.numel(), contenders, same, switched=True)


def assert_same_tensors(expected: Results, actual: Results, name: str) -> None:
    for i, (a, b) in enumerate(zip(expected, actual, strict=True)):
        assert_same_bits(to_numpy(a), to_numpy(b), name, f"tensor {i}")


# --- QAT steps ------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def conv_bn_relu(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class ResidualCNN(nn.Module):
    """A stem, then four residual blocks on 16 x 16 and four on 8 x 8 pixels."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = conv_bn_relu(3, width, stride=2)
        self.large = nn.ModuleList(conv_bn_relu(width, width) for _ in range(4))
        self.small = nn.ModuleList(conv_bn_relu(width, width) for _ in range(4))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.large:
            x = x + block(x)
        x = nn.functional.max_pool2d(x, 2)
        for block in self.small:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def prepared(model: nn.Module, example: Tensor) -> nn.Module:
    return prepare_qat_fx(copy.deepcopy(model), ao.get_default_qat_qconfig_mapping("x86"), (example,))


def stepper(model: nn.Module, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def step_case(what: str, model: nn.Module, shape: tuple[int, ...], checked_steps: int) -> Case:
    x, target = torch.randn(shape), torch.randint(10, shape[:1])
    qat = prepared(model, x)

    def outcome(accelerated: bool) -> Results:
        """Returns the losses and the final state."""
        trained = copy.deepcopy(qat)
        step = stepper(trained, x, target)
        with fq.accelerate() if accelerated else nullcontext():
            losses = [step() for _ in range(checked_steps)]
        return (*losses, *trained.state_dict().values())

    def same() -> None:
        assert_same_tensors(outcome(False), outcome(True), what)

    run = stepper(copy.deepcopy(qat), x, target)
    contenders = {"ours": run, "torch": run, "baseline": stepper(copy.deepcopy(model), x, target)}
    return Case(what, "float32", f"batch {shape[0]}", None, contenders, same, switched=True)


def step_cases(quick: bool) -> Iterator[Case]:
    torch.manual_seed(0)
    yield step_case("step, MLP 784-512-512-10", mlp(), (128, 784), checked_steps=50)
    yield step_case("step, residual CNN", ResidualCNN(), (32, 3, 32, 32), checked_steps=2 if quick else 10)


# --- measuring ------------------------------------------------------------------------------------


class SwitchedContender:
    """Switches acceleration on or off before it starts its clock, so that switching is not timed."""

    def __init__(self, run: Contender, accelerated: bool) -> None:
        self.run, self.switch = run, fq.accelerate if accelerated else fq.decelerate
        self.best = float("inf")

    def __call__(self) -> None:
        self.switch()
        # The caches are cold in the first call after the switch, which matters for short calls only.
        if self._clocked() < 0.05:
            self._clocked()

    def _clocked(self) -> float:
        start = time.perf_counter()
        self.run()
        elapsed = time.perf_counter() - start
        self.best = min(self.best, elapsed)
        return elapsed


def best_times_switched(contenders: dict[str, Contender], **how) -> dict[str, float]:
    """Like `best_times`, but with `accelerate()` for "ours" only."""
    clocked = {name: SwitchedContender(run, name == "ours") for name, run in contenders.items()}
    best_times(clocked, **how)
    fq.decelerate()
    return {name: contender.best for name, contender in clocked.items()}


def repeated_best_times(case: Case, seconds: float, patience: float = 2) -> tuple[dict[str, float], bool]:
    """Returns the shortest times, and whether they were reproduced in two parts of the run.

    If they were not, the run continues for up to `patience` times as long.
    """
    part = best_times_switched if case.switched else best_times
    parts: list[dict[str, float]] = []
    start = time.perf_counter()
    while True:
        parts.append(part(case.contenders, seconds=seconds / 4, min_rounds=1))
        ordered = {name: sorted(times[name] for times in parts) for name in case.contenders}
        repeated = len(parts) > 1 and all(t[1] < 1.1 * t[0] for t in ordered.values())
        elapsed = time.perf_counter() - start
        if len(parts) > 1 and elapsed > seconds * (1 if repeated else patience):
            return {name: t[0] for name, t in ordered.items()}, repeated


def busy_seconds() -> float:
    """Returns the CPU time all processes have used, this one included; NaN if the system does not report it."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq, steal, *_ = map(int, file.readline().split()[1:])
    except (OSError, ValueError):
        return float("nan")
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def measure(case: Case, threads: int, seconds: float) -> Row:
    torch.set_num_threads(threads)  # fakequant's kernels follow
    case.same()
    start, busy, own = time.perf_counter(), busy_seconds(), time.process_time()
    times, repeated = repeated_best_times(case, seconds)
    elapsed = time.perf_counter() - start
    others = (busy_seconds() - busy - (time.process_time() - own)) / elapsed
    return Row(case.what, case.dtype, case.size, case.elements, threads, times, repeated, max(0.0, others))


# --- limits ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Bar:
    what: str
    measured: dict[int, float]  # by number of threads
    limit: float | None  # None if only reported
    at_least: bool = True
    doubtful: tuple[int, ...] = ()  # the numbers of threads whose times were not reproduced

    @property
    def asked(self) -> str:
        return "report" if self.limit is None else f"{'>=' if self.at_least else '<='} {self.limit:g}"

    @property
    def met(self) -> bool:
        if self.limit is None:
            return True
        return all(m >= self.limit if self.at_least else m <= self.limit for m in self.measured.values())


def bars(rows: list[Row], saved: dict[int, dict[str, float]]) -> list[Bar]:
    result = []

    def bar(text: str, what: str, size: str, limit: float | None, *, relus: bool = False) -> None:
        found = [r for r in rows if (r.what, r.dtype, r.size) == (what, "float32", size)]
        if found:
            measured = {r.threads: r.x_baseline if relus else r.x_torch for r in found}
            doubtful = tuple(r.threads for r in found if not r.repeated)
            result.append(Bar(text, measured, limit, not relus, doubtful))

    limits = {
        "per tensor": 7, "per channel, axis 0": 8, "per channel, axis 1": 8,
        "learned per tensor": 7, "learned per channel, axis 0": 7, "learned per channel, axis 1": 7,
    }  # fmt: skip
    for what, limit in limits.items():
        bar(f"{what}, 2^20: x torch", what, "2^20", limit)
    bar("per tensor, 2^20: relus", "per tensor", "2^20", 1.3, relus=True)
    for what in limits:
        bar(f"{what}, 2^10: x torch", what, "2^10", 1)
    for what, limit in {"per tensor, own, clipped": 0.125, "per tensor, own, pass": 0}.items():
        if saved:
            measured = {threads: figures[what] for threads, figures in saved.items()}
            result.append(Bar(f"saved, {what}: bytes/elem", measured, limit, at_least=False))
    for what in ("FakeQuantize", "FusedMovingAvgObsFakeQuantize"):
        bar(f"accelerate, {what}, 2^20: x torch", what, "2^20", 5)
    bar("accelerate, MLP step: x torch", "step, MLP 784-512-512-10", "batch 128", 2)
    bar("accelerate, CNN step: x torch", "step, residual CNN", "batch 32", None)
    return result


# --- output ---------------------------------------------------------------------------------------


def print_heading(title: str, baseline: str) -> None:
    print(f"\n{title:<34} {'dtype':<9} {'size':<9} threads {'us':>10} {'ns/elem':>8} {'us torch':>10} "
          f"{f'us {baseline}':>10} {'x torch':>8} {f'{baseline}s':>8} {'others':>8}")  # fmt: skip


def format_row(r: Row) -> str:
    us = {name: f"{t * 1e6:>10.1f}" for name, t in r.seconds.items()}
    per_element = f"{r.seconds['ours'] / r.elements * 1e9:8.3f}" if r.elements else "       –"
    return (f"{r.what:<34} {r.dtype:<9} {r.size:<9} {r.threads:>7} {us['ours']} {per_element} {us['torch']} "
            f"{us['baseline']} {r.x_torch:>8.2f} {r.x_baseline:>8.2f} {r.others:>8.1f} {'' if r.repeated else '?'}")  # fmt: skip


def print_bars(checked: list[Bar]) -> None:
    width = max((len(b.what) for b in checked), default=0)
    print(f"\n{'figure':<{width}} | {'limit':<8} | measured (1 thread) | measured (2 threads) | ok")
    for b in checked:
        one, two = (f"{b.measured[n]:.3f}{'?' if n in b.doubtful else ' '}" for n in THREADS)
        verdict = "–" if b.limit is None else ("yes" if b.met else "MISSED") + ("?" if b.doubtful else "")
        print(f"{b.what:<{width}} | {b.asked:<8} | {one:>19} | {two:>20} | {verdict}")


def machine() -> dict:
    return {
        "info": dataclasses.asdict(fq.info()),
        "torch": torch.__version__,
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
        "processor": platform.processor(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
    }


def write_json(path: str, facts: dict, rows: list[Row], saved: dict, checked: list[Bar]) -> None:
    figures = {
        **facts,
        "rows": [dataclasses.asdict(r) | {"x_torch": r.x_torch, "x_baseline": r.x_baseline} for r in rows],
        "saved_bytes_per_element": saved,
        "bars": [dataclasses.asdict(b) | {"met": b.met} for b in checked],
    }
    with open(path, "w") as file:
        json.dump(figures, file, indent=1)
    print(f"\nwritten to {path}")


def run_section(title: str, baseline: str, cases: Iterator[Case], only: str, seconds: float) -> list[Row]:
    rows = []
    for case in cases:
        if only in case.what:
            if not rows:
                print_heading(title, baseline)
            for threads in THREADS:
                rows.append(measure(case, threads, seconds))
                print(format_row(rows[-1]), flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="shorter, and only rows that have a limit")
    parser.add_argument("--only", default="", help="only rows whose name contains this string")
    options = parser.parse_args()
    without_ao_warnings()
    # Exempts the imported modules from garbage collection, which runs before every measurement.
    gc.freeze()

    facts = machine()
    print(fq.info(), f"load       {facts['load_average'][0]:.1f}", sep="\n")
    sections = [
        ("forward + backward", "relu", operator_cases(options.quick), 0.2 if options.quick else 0.8),
        ("accelerate(): torch.ao modules", "relu", module_cases(options.quick), 0.5 if options.quick else 1.5),
        ("accelerate(): QAT", "float", step_cases(options.quick), 1.0 if options.quick else 6.0),
    ]
    rows = [row for *section, seconds in sections for row in run_section(*section, options.only, seconds)]
    saved = {}
    if not options.only:
        for threads in THREADS:
            torch.set_num_threads(threads)
            saved[threads] = all_saved_bytes()
        print(f"\n{'saved for backward':<34} bytes/elem")
        for what, figure in saved[1].items():
            print(f"{what:<34} {figure:10.3f}")
    checked = bars(rows, saved)
    print_bars(checked)
    if options.json:
        write_json(options.json, facts, rows, saved, checked)
    return 0


if __name__ == "__main__":
    sys.exit(main())
