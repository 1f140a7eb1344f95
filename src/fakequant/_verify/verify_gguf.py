"""`verify` for GGUF files: the metadata and tensors of the file, the weights that the engine has, and its outputs.

1. Metadata and tensors are compared with what the prepared model would be exported as now, byte by byte.
2. The engine itself dequantizes the file. Its weights must be the prepared model's, bit by bit.
3. The engine runs the texts of the data. It sums products in another order, and rounds inputs of layers to 8 bits as the
   prepared model does. A sum that is rounded otherwise can move such a code by one step, and everything after it, so outputs
   are not compared bit by bit: they must be as close to the prepared model's as that model's are to those of its copy that
   sums in float64.
"""

import copy
import os
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
from fakequant._verify.verdict import OutputReport, TensorReport, Verification

# Metadata that does not come from the model, and that the hash of all metadata protects.
_FREE = ("tokenizer.", "general.name", "fakequant.")
# How far outputs may be from the prepared model's: times the distance of its float64 copy, plus a share of their size.
_TIMES, _SHARE = 4.0, 1e-6
# The share of positions at which the most likely token must be the same, and of the perplexity by which it may differ.
_AGREEING, _PERPLEXITY = 0.995, 1e-3


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
            path, [text.tolist() for text in texts], threads=torch.get_num_threads(), is_encoder=is_encoder, dequantizes=True
        ) as ran:
            if not ran.repeats:
                raise ValueError(f"{session.name} does not return the same for the same text each time.")
            _compare_weights(file, GgufFile(ran.weights), reports, session)
        with session.own_functions(model) as functions:
            found = _compare_outputs(model, texts, [torch.from_numpy(output) for output in ran.outputs], is_encoder)
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
            raise _of_other_model(file, f"{name} is {_value(file, name)}, and {_of(contents.metadata, name)} in the model")
    expected = {tensor.name: tensor for tensor in contents.tensors}
    if set(expected) != set(file.tensors):
        name = sorted(set(expected) ^ set(file.tensors))[0]
        raise _of_other_model(file, f"it {'lacks' if name in expected else 'has also'} {name}")
    return _compare_tensors(file, expected, _paths(contents.model))


def _compare_over_base(model: PreTrainedModel, file: GgufFile) -> dict[str, TensorReport]:
    if model.config.model_type in ARCHITECTURES:
        for name, value in metadata_of(model.config).items():
            there = file.metadata.get(f"{file.architecture}.{name}")
            if there is not None and there.value != field(value).value:
                raise _of_other_model(file, f"{name} is {there.value}, and {value} in the model")
    tensors = ModelTensors(model, layers_of(model), file.architecture, is_strict=False)
    noted = [entry.split(" ") for entry in file.metadata[HASHES].value if entry]
    name = differing_tensor(tensors, file, {name: found for name, found in noted})
    reports = _reports(file, _paths(tensors))
    if name is not None:
        report = reports.setdefault(name, TensorReport(name, codes=1))
        report.prepared_differ, report.why_prepared = 1, f"{name} in the file is not the model's tensor"
    return reports


def _of_other_model(file: GgufFile, reason: str) -> ValueError:
    return ValueError(f"{file.path} does not belong to the model: {reason}.\nExport the model again.")


def _value(file: GgufFile, name: str) -> str:
    return _of(file.metadata, name)


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


def _compare_tensors(
    file: GgufFile, expected: dict[str, FileTensor], paths: dict[str, str]
) -> dict[str, TensorReport]:
    reports = _reports(file, paths)
    for name, tensor in expected.items():
        stored = file.tensors[name]
        if (stored.type, stored.shape) != (tensor.type, tensor.shape):
            raise _of_other_model(
                file, f"{name} is {stored.type} of shape {stored.shape}, and {tensor.type} of shape {tensor.shape} in the model"
            )
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
        differing = int((theirs.read().reshape(-1).view(np.int32) != ours.numpy().reshape(-1).view(np.int32)).sum())
        if differing:
            report.runtime_differ, report.why_runtime = differing, f"{session.name} has other values"


def weights_are_trained(model: PreTrainedModel) -> str | None:
    """Returns the path of a layer whose blocks have not the values with which the layer computes. None if all have."""
    for layer in layers_of(model):
        kind = type_of(layer.spec)
        assert kind is not None
        values = grid_of_blocks(kind, blocks_of(layer)).values
        weight = layer.values()
        same = values.to(weight.dtype).view(-1).view(torch.uint8), weight.contiguous().view(-1).view(torch.uint8)
        if not torch.equal(*same):
            return layer.path
    return None


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


def _compare_outputs(model: PreTrainedModel, texts: list[Tensor], theirs: list[Tensor], is_encoder: bool) -> OutputReport:
    found = OutputReport()
    single, double = copy.deepcopy(model).float(), copy.deepcopy(model).double()
    ours, exact = ([_output(other, text, is_encoder) for text in texts] for other in (single, double))
    for text, a, b in zip(texts, ours, (_output(single, text, is_encoder) for text in texts), strict=True):
        if not torch.equal(a, b):
            raise ValueError("The prepared model does not return the same for the same text each time.")
    size = max(float(output.abs().max()) for output in ours)
    found.largest = size
    for kind in ("texts", "tokens"):
        chosen = [i for i, text in enumerate(texts) if (i < len(texts) // 2) == (kind == "texts")]
        spread = _distance([ours[i] for i in chosen], [exact[i] for i in chosen])
        distance = _distance([ours[i] for i in chosen], [theirs[i] for i in chosen])
        found.numbers += sum(ours[i].numel() for i in chosen)
        for i in chosen:
            found.runtime_difference = max(found.runtime_difference, float((ours[i] - theirs[i]).abs().max()))
        allowed = _TIMES * spread + _SHARE * size
        if not distance <= allowed:
            found.runtime_unexplained += 1
            found.why = f"outputs of {kind} are {distance:.3g} away (rms), and rounding explains {allowed:.3g}"
    return found


def _output(model: nn.Module, text: Tensor, is_encoder: bool) -> Tensor:
    output = model(input_ids=text[None])
    value: Tensor = output.last_hidden_state if is_encoder else output.logits
    return value[0].float()


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Returns the root of the mean square difference."""
    return float((torch.cat(a).double() - torch.cat(b).double()).square().mean().sqrt())
