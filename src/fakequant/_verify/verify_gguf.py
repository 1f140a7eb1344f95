"""`verify` for GGUF files: the metadata and tensors of the file, the weights that the engine has, and its outputs.

1. Metadata and tensors are compared with what the prepared model would be exported as now, byte by byte.
2. The engine itself dequantizes the file. Its weights must be the prepared model's, bit by bit.
3. The engine runs the texts of the data. It sums products in another order, and rounds inputs of layers to 8 bits as
   the prepared model does. A sum that is rounded otherwise can move such a code by one step, and everything after it,
   so outputs are not compared bit by bit: most must be equal up to the rounding of sums, and the others as close as
   those of the prepared model with random errors of this size.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fakequant._export.checkpoint_names import PreTrainedModel
from fakequant._export.gguf.architectures import ARCHITECTURES, metadata_of
from fakequant._export.gguf.base_file import differing_tensor
from fakequant._export.gguf.blocks import TYPES, blocks_of, grid_of_blocks, type_of, unpack
from fakequant._export.gguf.export_gguf import HASHES, NOTE, file_contents, layers_of
from fakequant._export.gguf.file import FileTensor, GgufFile, digest_of, field
from fakequant._export.gguf.file_tensors import ModelTensors
from fakequant._model.running import Data, evaluating, run
from fakequant._prepare.summary import summary
from fakequant._runtimes.session import Session
from fakequant._verify.rounding_bounds import bits_of
from fakequant._verify.verdict import OutputReport, TensorReport, Verification

# Metadata that does not come from the model, and that the hash of all metadata protects.
_FREE = ("tokenizer.", "general.name", "fakequant.")
# Runs with random errors, and their size at the inputs of layers, in units of the last place of their root mean square.
_REPETITIONS, _ULPS = 4, 2.0
# A position is equal up to the rounding of sums if its outputs are closer than this share of their root mean square.
_CLOSE, _FEW = 1e-6, 4
# How far outputs may be away: times the distance with random errors, or what a few codes explain, relative to them.
_TIMES, _CODES = 4.0, 0.01
# The share by which the perplexity may differ, and of positions at which the most likely token may.
_PERPLEXITY, _DISAGREEING = 1e-3, 5e-3


@torch.no_grad()
def verify_gguf(
    model: PreTrainedModel,
    path: str | os.PathLike[str],
    data: Data,
    session: type[Session],
    *,
    steps: int | None = None,
) -> Verification:
    """See `fakequant.verify`, which calls this for GGUF files.

    Raises ValueError if the file does not hold the layers and the metadata of the model, or if the model or the
    engine does not return the same for the same text each time.
    """
    assert session.run_tokens is not None
    file = GgufFile(path)
    with evaluating(model), torch.autocast("cpu", enabled=False):
        reports = compare_file(model, file)
        texts = _texts(model, data, steps)
        is_encoder = bool(getattr(ARCHITECTURES.get(model.config.model_type), "is_encoder", False))
        with session.run_tokens(
            path,
            [text.tolist() for text in texts],
            threads=torch.get_num_threads(),
            is_encoder=is_encoder,
            dequantizes=True,
        ) as ran:
            if not ran.repeats:
                raise ValueError(f"{session.name} does not return the same for the same text each time.")
            _compare_weights(file, GgufFile(ran.weights), reports, session)
        single = model if all(p.dtype == torch.float32 for p in model.parameters()) else copy.deepcopy(model).float()
        with session.own_functions(single) as functions:
            theirs = [torch.from_numpy(output) for output in ran.outputs]
            inputs = [single.get_submodule(layer.path) for layer in layers_of(single)]
            found = _compare_outputs(single, texts, theirs, inputs, is_encoder=is_encoder)
    known = summary(model)
    return Verification(
        target=session.name,
        runtime=session.key,
        tensors=list(reports.values()),
        kernels={report.path: file.tensors[name].type for name, report in reports.items() if name in file.tensors},
        outputs=found,
        skipped=dict(list(functions.items())[:1]),
        multiplications=known.multiplications,
        quantized_multiplications=known.quantized_multiplications,
        parameters=known.parameters,
        quantized_parameters=known.quantized_parameters,
    )


# --- the file --------------------------------------------------------------------------------------


def compare_file(model: PreTrainedModel, file: GgufFile) -> dict[str, TensorReport]:
    """Compares a file with what a prepared model would be exported as. Returns a report per quantized tensor, by name.

    Tensors in float that differ have reports too. Raises ValueError if the file is not of the model.
    """
    note = file.metadata.get(NOTE)
    if note is None:
        raise ValueError(
            f"{file.path} was not written by export_gguf, or was changed: it has no {NOTE}.\nExport the model again; "
            "fakequant.audit compares the weights of other files."
        )
    if note.value != digest_of(file.metadata, NOTE):
        raise ValueError(f"The metadata of {file.path} was changed after the export.\nExport the model again.")
    if HASHES in file.metadata:
        return _compare_over_base(model, file)
    contents = file_contents(model)
    for name in sorted({*contents.metadata, *file.metadata}):
        if not name.startswith(_FREE) and contents.metadata.get(name) != file.metadata.get(name):
            raise _of_other_model(
                file, f"{name} is {_of(file.metadata, name)}, and {_of(contents.metadata, name)} in the model"
            )
    expected = {tensor.name: tensor for tensor in contents.tensors}
    if set(expected) != set(file.tensors):
        name = sorted(set(expected) ^ set(file.tensors))[0]
        raise _of_other_model(file, f"it {'lacks' if name in expected else 'has also'} {name}")
    reports = _compare_tensors(file, expected, _paths(contents.model))
    _compare_with_training(contents.model, reports)
    return reports


def _compare_over_base(model: PreTrainedModel, file: GgufFile) -> dict[str, TensorReport]:
    if model.config.model_type in ARCHITECTURES:
        for name, value in metadata_of(model.config).items():
            there = file.metadata.get(f"{file.architecture}.{name}")
            if there is not None and there.value != field(value).value:
                raise _of_other_model(file, f"{name} is {there.value}, and {value} in the model")
    tensors = ModelTensors(model, layers_of(model), file.architecture, is_strict=False)
    noted = [entry.partition(" ")[::2] for entry in file.metadata[HASHES].value if entry]
    differing = differing_tensor(tensors, file, dict(noted))
    reports = _reports(file, _paths(tensors))
    if differing is not None:
        report = reports.setdefault(differing, TensorReport(differing, codes=1))
        report.prepared_differ, report.why_prepared = 1, f"{differing} in the file is not the model's tensor"
    else:
        _compare_with_training(tensors, reports)
    return reports


def _of_other_model(file: GgufFile, reason: str) -> ValueError:
    return ValueError(f"{file.path} does not belong to the model: {reason}.\nExport the model again.")


def _of(metadata: dict[str, Any], name: str) -> str:
    return f"{metadata[name].value!r:.100}" if name in metadata else "missing"


def _paths(tensors: ModelTensors) -> dict[str, str]:
    """Returns the paths of the quantized layers by the names of their tensors."""
    found = {place.name: tensors.layer(place) for place in tensors.places}
    return {name: layer.path for name, layer in found.items() if layer is not None}


def _reports(file: GgufFile, paths: dict[str, str]) -> dict[str, TensorReport]:
    return {
        name: TensorReport(f"{path}.weight", codes=int(np.prod(file.tensors[name].shape, dtype=np.int64)))
        for name, path in paths.items()
        if name in file.tensors
    }


def _compare_tensors(file: GgufFile, expected: dict[str, FileTensor], paths: dict[str, str]) -> dict[str, TensorReport]:
    reports = _reports(file, paths)
    for name, tensor in expected.items():
        stored = file.tensors[name]
        if (stored.type, stored.shape) != (tensor.type, tensor.shape):
            there, here = (f"{one.type} of shape {one.shape}" for one in (stored, tensor))
            raise _of_other_model(file, f"{name} is {there}, and {here} in the model")
        differing = int((stored.read() != tensor.read()).sum())
        if differing:
            report = reports.setdefault(name, TensorReport(name, codes=differing))
            report.prepared_differ, report.why_prepared = differing, f"the file has other bytes in {name}"
    return reports


def _compare_weights(
    file: GgufFile, engine: GgufFile, reports: dict[str, TensorReport], session: type[Session]
) -> None:
    """Compares the weights that the engine has dequantized with the values of the file's blocks."""
    for name, report in reports.items():
        tensor, theirs = file.tensors[name], engine.tensors.get(name)
        if tensor.type not in TYPES:
            continue
        data = tensor.read()
        ours = grid_of_blocks(tensor.type, unpack(tensor.type, data.reshape(-1, data.shape[-1]))).values
        if theirs is None or theirs.type != "F32" or theirs.shape != tensor.shape:
            report.runtime_differ, report.why_runtime = report.codes, f"{session.name} has no such tensor"
            continue
        # ggml has no -0 in MXFP4.
        found = torch.from_numpy(theirs.read().reshape(-1).view(np.float32).copy())
        differing = int((bits_of(found + 0.0) != bits_of(ours.reshape(-1) + 0.0)).sum())
        if differing:
            report.runtime_differ, report.why_runtime = differing, f"{session.name} has other values"


def _compare_with_training(tensors: ModelTensors, reports: dict[str, TensorReport]) -> None:
    """Compares the values of blocks, in the model's dtype, with the weights with which layers compute."""
    for place in tensors.places:
        layer = tensors.layer(place)
        if layer is None or place.name not in reports:
            continue
        kind = type_of(layer.spec)
        assert kind is not None
        weight = layer.values().contiguous()
        values = grid_of_blocks(kind, blocks_of(layer)).values.to(weight.dtype)
        differing = int((bits_of(values) != bits_of(weight)).sum())
        if differing:
            report = reports[place.name]
            report.prepared_differ, report.why_prepared = (
                differing,
                "the layer computes with other values than its blocks",
            )


# --- outputs ---------------------------------------------------------------------------------------


def _texts(model: PreTrainedModel, data: Data, steps: int | None) -> list[Tensor]:
    """Returns the texts of all batches, without padding, and the first token of each as a text of its own."""
    texts: list[Tensor] = []

    def call(*args: Any, **kwargs: Any) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, Tensor) or ids.is_floating_point():
            raise ValueError("Batches of `data` must have `input_ids`, because the engine takes tokens.")
        ids = ids.reshape(-1, ids.shape[-1])
        mask = kwargs.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        texts.extend(text[kept.bool()] for text, kept in zip(ids, mask, strict=True))

    run(model, data, steps, call=call)
    texts = [text for text in texts if len(text)]
    if not texts:
        raise ValueError("The batches of `data` are empty, so there is nothing to compare.")
    return [*texts, *(text[:1] for text in texts)]


def _compare_outputs(
    model: PreTrainedModel, texts: list[Tensor], theirs: list[Tensor], layers: list[nn.Module], *, is_encoder: bool
) -> OutputReport:
    """Compares outputs with the model's, and their distance with that of the model with random errors."""

    def outputs() -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for length in sorted({len(text) for text in texts}):
            numbers = [number for number, text in enumerate(texts) if len(text) == length]
            several = model(input_ids=torch.stack([texts[number] for number in numbers]))
            values = several.last_hidden_state if is_encoder else several.logits
            found |= dict(zip(numbers, values.float(), strict=True))
        return [found[number] for number in range(len(texts))]

    ours = outputs()
    if not all(map(torch.equal, ours, outputs())):
        raise ValueError("The prepared model does not return the same for the same text each time.")
    if any(a.shape != b.shape for a, b in zip(ours, theirs, strict=True)):
        raise ValueError(f"The model returns {tuple(ours[0].shape)} numbers and the engine {tuple(theirs[0].shape)}.")
    with _random_errors(layers):
        repeated = [_Distance(ours, outputs(), texts) for _ in range(_REPETITIONS)]
    found, known = _Distance(ours, theirs, texts), torch.cat(ours)
    report = OutputReport(
        numbers=known.numel(),
        runtime_difference=found.largest,
        largest=float(known.abs().max()),
        runtime_is_equal=found.largest == 0,
    )
    if not is_encoder:
        report.rows, report.agreeing = found.positions, found.agreeing
        report.perplexity, report.runtime_perplexity = found.perplexity, found.other_perplexity
    report.why = found.reason_beyond(repeated, is_encoder=is_encoder) or ""
    report.runtime_unexplained = int(bool(report.why))
    return report


@contextmanager
def _random_errors(layers: list[nn.Module]) -> Iterator[None]:
    """Context in which the inputs of layers have random errors of the size that sums in another order have."""
    generator = torch.Generator().manual_seed(0)

    def disturb(module: nn.Module, args: Any) -> Any:
        x, *rest = args
        if not x.is_floating_point():
            return args
        size = _ULPS * torch.finfo(x.dtype).eps * x.square().mean(-1, keepdim=True).sqrt()
        return x + size * torch.randn(x.shape, generator=generator, dtype=x.dtype), *rest

    handles = [layer.register_forward_pre_hook(disturb) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Distance:
    """How far outputs are from the model's, over all positions of all texts."""

    def __init__(self, ours: list[Tensor], theirs: list[Tensor], texts: list[Tensor]) -> None:
        a, b = torch.cat(ours).double(), torch.cat(theirs).double()
        size = a.square().mean(-1).sqrt()
        relative = (a - b).square().mean(-1).sqrt() / size.clamp(min=torch.finfo(torch.float32).tiny)
        self.positions = len(a)
        self.largest = float((a - b).abs().max())
        # The number of positions that are equal up to the rounding of sums; the others have another code somewhere.
        self.close = int((relative <= _CLOSE).sum())
        # NaN is infinitely far away.
        self.rms = float(relative.nan_to_num(torch.inf).square().mean().sqrt())
        self.agreeing = int((a.argmax(-1) == b.argmax(-1)).sum())
        self.perplexity, self.other_perplexity = (_perplexity(outputs, texts) for outputs in (ours, theirs))

    def reason_beyond(self, repeated: list["_Distance"], *, is_encoder: bool) -> str | None:
        """Returns why the distance is larger than that of runs with random errors. None if it is not."""
        close, rms = min(other.close for other in repeated), max(other.rms for other in repeated)
        if close >= _FEW and self.close < close / 2:
            return f"{self.close} of {self.positions} outputs are equal up to rounding, and {close} with random errors"
        allowed = max(_TIMES * rms, _CODES)
        if not self.rms <= allowed:
            return f"outputs are {self.rms:.3g} of their size away, and random errors explain {allowed:.3g}"
        if is_encoder:
            return None
        allowed = max(_TIMES * max(_ratio(other) for other in repeated), _PERPLEXITY)
        if not _ratio(self) <= allowed:
            return f"the perplexity is {self.other_perplexity:.6g} instead of {self.perplexity:.6g}"
        others = max(other.positions - other.agreeing for other in repeated)
        allowed = max(_TIMES * others, _DISAGREEING * self.positions) + 1
        if self.positions - self.agreeing > allowed:
            return f"the most likely token is another one at {self.positions - self.agreeing} positions"
        return None


def _ratio(distance: _Distance) -> float:
    """Returns by which share two perplexities differ."""
    return abs(distance.other_perplexity / distance.perplexity - 1)


def _perplexity(outputs: list[Tensor], texts: list[Tensor]) -> float:
    """Returns the perplexity of all next tokens. 1 if there are none."""
    pairs = [(output[:-1], text[1:]) for output, text in zip(outputs, texts, strict=True) if len(text) > 1]
    if not pairs or any(int(text.max()) >= output.shape[-1] for output, text in pairs):
        return 1.0
    logits, targets = torch.cat([a for a, _ in pairs]), torch.cat([b for _, b in pairs])
    return float(nn.functional.cross_entropy(logits.double(), targets).exp())
