"""Time and peak memory of a QAT step, compared with the float step and with torch.ao, torchao and brevitas.

    python benchmarks/bench_train_step.py [--json FILE] [--quick] [--real] [--only SUBSTRING]

A step is forward, cross-entropy, backward, an SGD step and `zero_grad(set_to_none=True)`. There are three models:

    MLP            784-512-512-10, batch 128
    CNN            a stem of 32 channels and two residual blocks, batch 32 at 32x32
    encoder        nn.TransformerEncoder: two layers of width 384, 12 heads, feed-forward 1536; 16 × 64 tokens

and with --real, networks in real sizes, for which no limits are asked:

    BERT blocks    nn.TransformerEncoder: two layers of width 768, 12 heads, feed-forward 3072; 4 × 128 tokens
    resnet18, mobilenetv2_100      of timm, if it is installed; batch 8 at 224x224

All contenders start from the same weights and take turns; the shortest of many steps counts. "others" and "?" have
the same meaning as in bench_torch.py. Limits apply to two threads on a CPU with instructions for products of 8-bit
integers (AVX-512 VNNI); figures for one thread are only reported. FAKEQUANT_TARGET=avx2 does without these
instructions. Evaluation is a forward pass without gradients.

    int8           recipes.int8(): weights per channel, activations per tensor, observed in every step
    int8, floats   the same with save_codes=False
    float sums     the same with sums="float": products of floats in the forward pass too
    int8, x86      recipes.int8(target="onnxruntime-x86"), prepared with an example: also the results that this target
                   computes in integers are quantized
    lsq(8)         recipes.lsq(8), calibrated: all scales learned
    torch.ao FX    prepare_qat_fx: weights per channel, activations per tensor by moving average
    torchao        int8 weights per channel, int8 activations per token; it has no activations per tensor
    brevitas       int8 weights per channel, activations per tensor with scales that are learned after some steps of
                   collecting statistics; here one step, and the steps after it are timed

torchao and brevitas are optional. A contender is left out if it is not installed or does not support the model. To
install them:

    .venv/bin/python -m pip install --no-deps -r requirements-peers.txt

To keep them out of the environment, add `--target DIR` and put DIR into PYTHONPATH.

Peak memory is measured in one step after warm-up. It is the maximum, over the step, of the bytes that torch's CPU
allocator has handed out since the start of the step and not yet freed: activations, tensors saved by autograd,
temporaries and gradients. Parameters, buffers and the batch exist before the step and are not counted, and plain
SGD has no state. Memory that quantized layers keep to use it again is freed before and counts until the end. Memory
that libraries such as oneDNN allocate themselves is not counted for any contender.

Before anything is timed, the gradients with and without saved codes are compared bit by bit, for both recipes and for
tensors of all sizes. The exit status is 1 if they differ.
"""

import argparse
import copy
import dataclasses
import gc
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao import quantization as ao
from torch.ao.quantization.quantize_fx import prepare_qat_fx
from torch.profiler import ProfilerActivity, profile

import fakequant as fq
from bench_kernels import nothing_to_compare
from bench_torch import THREADS, Case, Row, machine, measure, without_ao_warnings
from fakequant import recipes
from fakequant._backends.torch import compiled_nodes
from fakequant.nn import _saved_codes as saved_codes
from fakequant.testing.timing import Contender

FLOAT, INT8, FLOATS, SUMS, X86, LSQ = "float", "int8", "int8, floats", "float sums", "int8, x86", "lsq(8)"
OURS = (INT8, FLOATS, SUMS, X86, LSQ)
FX, TORCHAO, BREVITAS = "torch.ao FX", "torchao", "brevitas"
PEERS = (FX, TORCHAO, BREVITAS)
ASKED_AT = 2  # the number of threads that limits apply to


# --- models ---------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


def cnn(width: int = 32) -> nn.Module:
    stem = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)
    return nn.Sequential(*stem, ResidualBlock(width), ResidualBlock(width), *head)


class Encoder(nn.Module):
    def __init__(self, width: int = 384) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 12, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class TraceableLayer(nn.Module):
    """A layer of the encoder with the same weights, written in operations that torch.fx can trace."""

    def __init__(self, layer: nn.TransformerEncoderLayer) -> None:
        super().__init__()
        attention = layer.self_attn
        self.heads = attention.num_heads
        self.projections = nn.Linear(attention.embed_dim, 3 * attention.embed_dim)
        self.projections.weight, self.projections.bias = attention.in_proj_weight, attention.in_proj_bias
        self.attended = nn.Linear(attention.embed_dim, attention.embed_dim)
        self.attended.weight, self.attended.bias = attention.out_proj.weight, attention.out_proj.bias
        self.linear1, self.linear2 = layer.linear1, layer.linear2
        self.norm1, self.norm2 = layer.norm1, layer.norm2

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projections(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = self.norm1(x + self.attended(y))
        return self.norm2(x + self.linear2(F.relu(self.linear1(x))))


def traceable(model: nn.Module, x: Tensor) -> nn.Module:
    """Returns the model, with rewritten layers if it is the encoder, which torch.fx would see as one operation."""
    if not isinstance(model, Encoder):
        return model
    rewritten = copy.deepcopy(model)
    rewritten.encoder = nn.Sequential(*map(TraceableLayer, rewritten.encoder.layers))
    # The products are summed in another order, and float32 has about 7 digits.
    assert (rewritten(x) - model(x)).abs().max() < 1e-5, "the rewritten encoder computes different results"
    return rewritten


@dataclasses.dataclass(frozen=True)
class Task:
    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a batch
    seconds: float  # to measure for, with two threads
    int8: float | None = None  # limits: time over that of the float step; None if none is asked
    x86: float | None = None
    lsq: float | None = None
    evaluation: float | None = None  # limit: time of evaluation over that of the float model
    memory: float | None = None  # limit: peak memory over that of the float step; None if not measured


TASKS = (
    Task("MLP", mlp, (128, 784), 6, int8=1.15, x86=1.30, lsq=1.45, evaluation=0.7),
    Task("CNN", cnn, (32, 3, 32, 32), 16, int8=1.10, x86=1.15, lsq=1.25, memory=1.25),
    Task("encoder", Encoder, (16, 64, 384), 26, int8=1.00, x86=1.20, lsq=1.25, evaluation=0.7, memory=1.05),
)


# --- contenders -----------------------------------------------------------------------------------


def without_peer_noise() -> None:
    """Hides messages that do not concern the benchmark.

    torchao's about GPU extensions and about how it registers enums, brevitas's about an optional package, and the
    profiler's about starting and stopping.
    """
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "fast_hadamard_transform package not found", UserWarning)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class Unsupported(Exception):
    """Raised if a peer cannot quantize the model; the message says why."""


def ours(config: fq.QuantConfig, model: nn.Module, x: Tensor) -> nn.Module:
    prepared = fq.prepare(copy.deepcopy(model), config, x)
    return fq.calibrate(prepared, [x], progress=False) if config.default.learned else prepared


def with_fx(model: nn.Module, x: Tensor) -> nn.Module:
    mapping = ao.get_default_qat_qconfig_mapping("x86")
    return prepare_qat_fx(copy.deepcopy(traceable(model, x)), mapping, (x,))


def with_torchao(model: nn.Module, x: Tensor) -> nn.Module:
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    if any(isinstance(module, nn.Conv2d) for module in model.modules()):
        raise Unsupported("quantizes Linear and Embedding only, not the convolutions")
    weights = IntxFakeQuantizeConfig(torch.int8, "per_channel", is_symmetric=True)
    activations = IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    prepared = copy.deepcopy(model)
    quantize_(prepared, QATConfig(activation_config=activations, weight_config=weights, step="prepare"))
    return prepared


def with_brevitas(model: nn.Module, x: Tensor) -> nn.Module:
    import brevitas.nn as qnn
    from brevitas.graph.quantize import layerwise_quantize
    from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat, Uint8ActPerTensorFloat

    class Attention(qnn.QuantMultiheadAttention):
        def forward(self, *inputs: Tensor, is_causal: bool = False, **options) -> tuple[Tensor, Tensor | None]:
            """Drops `is_causal`, which nn.TransformerEncoderLayer passes and brevitas does not accept."""
            assert not is_causal
            return super().forward(*inputs, **options)

    weights = Int8WeightPerChannelFloat
    signed, unsigned = (base.let(collect_stats_steps=1) for base in (Int8ActPerTensorFloat, Uint8ActPerTensorFloat))
    layer = {"input_quant": signed, "weight_quant": weights, "return_quant_tensor": False}
    attention = {
        "in_proj_input_quant": signed, "in_proj_weight_quant": weights, "in_proj_bias_quant": None,
        "q_scaled_quant": signed, "k_transposed_quant": signed, "v_quant": signed,
        "attn_output_weights_quant": unsigned,
        "out_proj_input_quant": signed, "out_proj_weight_quant": weights, "out_proj_bias_quant": None,
        "return_quant_tensor": False,
    }  # fmt: skip
    layers = {
        nn.Linear: (qnn.QuantLinear, layer),
        nn.Conv2d: (qnn.QuantConv2d, layer),
        nn.MultiheadAttention: (Attention, attention),
    }
    return layerwise_quantize(copy.deepcopy(model), compute_layer_map=layers)


def contenders(model: nn.Module, x: Tensor) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Returns the models to train, and for each missing one the reason."""
    int8 = recipes.int8()
    models = {
        FLOAT: copy.deepcopy(model),
        INT8: ours(int8, model, x),
        FLOATS: ours(dataclasses.replace(int8, save_codes=False), model, x),
        SUMS: ours(dataclasses.replace(int8, sums="float"), model, x),
        X86: fq.prepare(copy.deepcopy(model), recipes.int8(target="onnxruntime-x86"), x),
        LSQ: ours(recipes.lsq(8), model, x),
    }
    missing = {}
    for name, prepare in {FX: with_fx, TORCHAO: with_torchao, BREVITAS: with_brevitas}.items():
        try:
            prepared = prepare(model, x).train()
            prepared(x).sum().backward()  # fails here if it cannot be trained
            models[name] = prepared
        except Unsupported as reason:
            missing[name] = str(reason)
        except ImportError as error:
            missing[name] = f"not installed: {error}"
        except Exception as error:  # reported, as a result
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return models, missing


def stepper(model: nn.Module, x: Tensor, target: Tensor) -> Contender:
    # A rate so small that the weights hardly change: all steps compute with similar numbers.
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()  # lets modules initialize and drops earlier gradients
    return step


def evaluator(model: nn.Module, x: Tensor) -> Contender:
    """Returns a forward pass of a copy of the model, which a step has given its ranges."""
    evaluated = copy.deepcopy(model).eval()

    def evaluate() -> None:
        with torch.no_grad():
            evaluated(x)

    return evaluate


# --- gradients and memory -------------------------------------------------------------------------


def gradients(config: fq.QuantConfig, model: nn.Module, x: Tensor, target: Tensor, steps: int = 2) -> list[Tensor]:
    """Returns the gradients of all parameters in each of a few steps."""
    prepared = ours(config, model, x)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(prepared(x), target).backward()
        found += [parameter.grad.clone() for parameter in prepared.parameters()]
        optimizer.step()
    return found


def same_gradients(model: nn.Module, x: Tensor, target: Tensor) -> bool:
    """Whether gradients are the same, bit by bit, with saved codes. Forces small tensors to be saved as codes too."""
    for config in (recipes.int8(), recipes.lsq(8)):
        with mock.patch.object(saved_codes, "_SMALLEST", 1):
            saved = gradients(config, model, x, target)
        kept = gradients(dataclasses.replace(config, save_codes=False), model, x, target)
        if not all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(saved, kept, strict=True)):
            return False
    return True


def peak_bytes(step: Contender) -> int:
    """Returns the peak of the memory allocated during a step."""
    step()
    compiled_nodes.release_memory()  # so that memory used again in this step counts
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    in_use = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        in_use += event.nbytes()
        peak = max(peak, in_use)
    return peak


# --- limits ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Bar:
    model: str
    what: str
    asked: str
    measured: float | bool
    met: bool
    doubtful: bool = False


def at_most(model: str, what: str, measured: float, limit: float, doubtful: bool = False) -> Bar:
    return Bar(model, what, f"<= {limit:.2f}", measured, measured <= limit, doubtful)


@dataclasses.dataclass
class Figures:
    """The results of one model."""

    task: Task
    equal_gradients: bool
    missing: dict[str, str]
    rows: dict[int, Row]  # by number of threads
    peaks: dict[str, int]  # bytes
    evaluation: Row  # with ASKED_AT threads

    def x_float(self, name: str, threads: int) -> float:
        times = self.rows[threads].seconds
        return times[name] / times[FLOAT]

    def evaluation_x_float(self, name: str) -> float:
        return self.evaluation.seconds[name] / self.evaluation.seconds[FLOAT]

    def fastest_peer(self, threads: int) -> str | None:
        times = self.rows[threads].seconds
        return min((name for name in PEERS if name in times), key=times.__getitem__, default=None)

    def x_fastest_peer(self, threads: int) -> float | None:
        """Returns the time of the fastest peer divided by ours."""
        peer, times = self.fastest_peer(threads), self.rows[threads].seconds
        return None if peer is None else times[peer] / times[INT8]

    def bars(self) -> dict[str, Bar]:
        """Returns the limits of this model by name."""
        task, doubtful = self.task, not self.rows[ASKED_AT].repeated
        found = {
            "gradients": Bar(task.name, "gradients", "equal bits", self.equal_gradients, self.equal_gradients),
        }
        for name, limit in ((INT8, task.int8), (X86, task.x86), (LSQ, task.lsq)):
            if limit is not None:
                found[name] = at_most(task.name, name, self.x_float(name, ASKED_AT), limit, doubtful)
        ratio = self.x_fastest_peer(ASKED_AT)
        if ratio is not None:
            found["peers"] = Bar(task.name, "fastest peer over int8", "> 1", ratio, ratio > 1, doubtful)
        if task.evaluation is not None:
            found["evaluation"] = at_most(
                task.name,
                "int8, evaluation",
                self.evaluation_x_float(INT8),
                task.evaluation,
                not self.evaluation.repeated,
            )
        if task.memory is not None:
            memory = self.peaks[INT8] / self.peaks[FLOAT]
            found["memory"] = at_most(task.name, "int8, peak memory", memory, task.memory)
        return found


def real_tasks() -> list[Task]:
    found = [Task("BERT blocks", partial(Encoder, 768), (4, 128, 768), 30, memory=1.05)]
    try:
        import timm
    except ImportError:
        print("resnet18 and mobilenetv2_100 need timm\n")
        return found
    for name in ("resnet18", "mobilenetv2_100"):
        build = partial(timm.create_model, name, num_classes=10)
        found.append(Task(name, build, (8, 3, 224, 224), 60, memory=1.25))
    return found


def run(task: Task, seconds: float) -> Figures:
    torch.manual_seed(0)
    torch.set_num_threads(ASKED_AT)
    model, x, target = task.build(), torch.randn(task.shape), torch.randint(10, task.shape[:1])
    equal = same_gradients(model, x, target)
    print(f"{task.name}: gradients with and without saved codes {'are equal' if equal else 'DIFFER'}", flush=True)
    models, missing = contenders(model, x)
    steps = {name: stepper(trained, x, target) for name, trained in models.items()}
    peaks = {} if task.memory is None else {name: peak_bytes(step) for name, step in steps.items()}
    case = Case(task.name, "float32", f"batch {len(x)}", None, steps, nothing_to_compare)
    evaluations = {name: evaluator(models[name], x) for name in (FLOAT, INT8, SUMS)}
    evaluation = measure(dataclasses.replace(case, contenders=evaluations), ASKED_AT, seconds * 0.2)
    # Figures that are only reported may be less precise.
    rows = {threads: measure(case, threads, seconds * (1 if threads == ASKED_AT else 0.5)) for threads in THREADS}
    return Figures(task, equal, missing, rows, peaks, evaluation)


# --- output ---------------------------------------------------------------------------------------


def verdict(bar: Bar | None) -> str:
    """Returns the columns "limit" and "met"."""
    if bar is None:
        return f"{'–':<10} | –"
    return f"{bar.asked:<10} | {'yes' if bar.met else 'MISSED'}{'?' * bar.doubtful}"


def line(model: str, what: str, cells: list[str], bar: Bar | None) -> str:
    return f"{model:<15} | {what:<26} | {' | '.join(f'{cell:>11}' for cell in cells)} | {verdict(bar)}"


def print_heading(cells: list[str]) -> None:
    print(f"\n{'model':<15} | {'contender':<26} | {' | '.join(f'{cell:>11}' for cell in cells)} | {'limit':<10} | met")


def print_steps(figures: list[Figures]) -> None:
    print_heading([cell for n in THREADS for cell in (f"ms, {n} thr.", "x float")])
    for f in figures:
        bars, model = f.bars(), f.task.name
        for name in (FLOAT, *OURS, *PEERS):
            cells = []
            for n in THREADS:
                doubt = " " if f.rows[n].repeated else "?"
                present = name in f.rows[n].seconds
                cells += [f"{f.rows[n].seconds[name] * 1e3:.2f}{doubt}" if present else "-"]
                cells += [f"{f.x_float(name, n):.2f}{doubt}" if present else "-"]
            print(line(model, name, cells, bars.get(name)))
        ratios = [f.x_fastest_peer(n) for n in THREADS]
        if all(ratios):
            cells = [cell for ratio in ratios for cell in ("", f"{ratio:.2f} ")]
            print(line(model, "fastest peer / int8", cells, bars["peers"]))
        equal = "equal" if f.equal_gradients else "different"
        print(line(model, "gradients, codes / floats", [equal, "", equal, ""], bars["gradients"]))
        print(line(model, "others", [cell for n in THREADS for cell in (f"{f.rows[n].others:.1f} ", "")], None))


def print_evaluation(figures: list[Figures]) -> None:
    print_heading([f"ms, {ASKED_AT} thr.", "x float"])
    for f in figures:
        doubt = " " if f.evaluation.repeated else "?"
        for name, seconds in f.evaluation.seconds.items():
            cells = [f"{seconds * 1e3:.2f}{doubt}", f"{f.evaluation_x_float(name):.2f}{doubt}"]
            print(line(f.task.name, f"{name}, evaluation", cells, f.bars().get("evaluation") if name == INT8 else None))


def print_memory(figures: list[Figures]) -> None:
    if figures:
        print_heading(["peak MB", "x float"])
    for f in figures:
        for name in (FLOAT, *OURS, *PEERS):
            peak = f.peaks.get(name)
            cells = ["-", "-"] if peak is None else [f"{peak / 1e6:.2f}", f"{peak / f.peaks[FLOAT]:.3f}"]
            print(line(f.task.name, name, cells, f.bars().get("memory") if name == INT8 else None))


REMARKS = {  # about the encoder
    FX: "rewritten in operations that torch.fx can trace; in nn.TransformerEncoder it would quantize only some weights",
    TORCHAO: "attention stays in float; the feed-forward layers and the head are quantized",
    BREVITAS: "attention weights are quantized too, and queries, keys and values separately",
}


def print_remarks(figures: list[Figures]) -> None:
    print()
    for f in figures:
        for name, reason in f.missing.items():
            print(f"{name}, {f.task.name}: {reason}")
        for name, remark in REMARKS.items():
            if f.task.name == "encoder" and name not in f.missing:
                print(f"{name}, encoder: {remark}")


def write_json(path: str, facts: dict, figures: list[Figures]) -> None:
    written = {
        **facts,
        "rows": [
            dataclasses.asdict(row) | {"x_float": {name: f.x_float(name, row.threads) for name in row.seconds}}
            for f in figures
            for row in f.rows.values()
        ],
        "evaluation": {
            f.task.name: {name: f.evaluation_x_float(name) for name in f.evaluation.seconds} for f in figures
        },
        "peak_bytes": {f.task.name: f.peaks for f in figures if f.peaks},
        "equal_gradients": {f.task.name: f.equal_gradients for f in figures},
        "missing": {f.task.name: f.missing for f in figures},
        "bars": [dataclasses.asdict(bar) for f in figures for bar in f.bars().values()],
    }
    with open(path, "w") as file:
        json.dump(written, file, indent=1)
    print(f"\nwritten to {path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="a fifth of the time")
    parser.add_argument("--real", action="store_true", help="networks in real sizes instead")
    parser.add_argument("--only", default="", help="only models whose name contains this string")
    options = parser.parse_args()
    without_ao_warnings()
    without_peer_noise()
    gc.freeze()

    facts = machine()
    print(fq.info(), f"load       {facts['load_average'][0]:.1f}\n", sep="\n")
    tasks = real_tasks() if options.real else TASKS
    figures = [run(t, t.seconds * (0.2 if options.quick else 1)) for t in tasks if options.only in t.name]
    print_steps(figures)
    print_evaluation(figures)
    print_memory([f for f in figures if f.peaks])
    print_remarks(figures)
    if options.json:
        write_json(options.json, facts, figures)
    return 0 if all(f.equal_gradients for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
