"""`export_gguf`: writes a prepared transformers model as a GGUF file with the codes that were trained."""

import dataclasses
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fakequant._export.checkpoint_names import PreTrainedModel, check_fits_class
from fakequant._export.gguf.architectures import architecture_of, metadata_of
from fakequant._export.gguf.base_file import tensors_over_base
from fakequant._export.gguf.file import FileTensor, GgufFile, Metadata, digest_of, field, gguf, write
from fakequant._export.gguf.file_tensors import ModelTensors, file_tensors
from fakequant._export.gguf.tokenizers import tokenizer_metadata
from fakequant._export.prepared_layers import PreparedLayer, prepared_layers
from fakequant._model.running import check_module
from fakequant._prepare.attach import preparation
from fakequant._runtimes.llama_cpp.target import TARGET
from fakequant._util.files import writing
from fakequant._util.packages import require
from fakequant._util.shown import Shown
from fakequant._util.text import listed, table

# What `general.file_type` says, by the type of most tensors.
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q4_K": 14, "Q6_K": 18, "BF16": 32, "TQ2_0": 37,
               "MXFP4": 38}  # fmt: skip
_QUANTIZATION_VERSION = 2
# The SHA-256 of all other metadata, by which `verify` knows that the file is as it was written.
NOTE = "fakequant.metadata_sha256"
# Files over a base have the hashes of the tensors that the model alone does not determine.
HASHES = "fakequant.tensors_sha256"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        name: Its name in the file.
        source: Its name in the model; empty for one that the file adds.
        type: Its type, as ggml names it.
        spec: The spec of its layer. None for a tensor in float.
        shape: Its shape, in torch's order.
    """

    name: str
    source: str
    type: str
    spec: str | None
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class GgufExport(Shown):
    """The result of `export_gguf`. Prints as a table.

    Attributes:
        file: The file.
        architecture: The architecture, as llama.cpp names it.
        tensors: All tensors of the file.
        left_out: The tensors of the model that the file has no place for.
        bytes: The size of the tensors in the file.
        float_bytes: The size of the same tensors in the model's dtype.
    """

    file: str
    architecture: str
    tensors: list[GgufTensor]
    left_out: tuple[str, ...]
    bytes: int
    float_bytes: int

    def __str__(self) -> str:
        kinds = Counter((tensor.type, tensor.spec or "float") for tensor in self.tensors)
        lines = [
            f"{Path(self.file).name}: {self.architecture}, {self.bytes:,} bytes ({self.float_bytes:,} in float)",
            table(["tensors", "type", "spec"], [[number, *kind] for kind, number in kinds.items()]),
        ]
        if self.left_out:
            lines.append(f"not in the file: {listed(self.left_out, most=8)}")
        return "\n".join(lines)


@torch.no_grad()
def export_gguf(
    model: nn.Module,
    path: str | os.PathLike[str],
    base: str | os.PathLike[str] | None = None,
    tokenizer: Any = None,
) -> GgufExport:
    """Writes a prepared transformers model as a GGUF file for llama.cpp and the programs that are built on it.

    Codes and scales are those with which the prepared model computes in evaluation: nothing is chosen again. The file
    is written next to its place and moved there at the end, so it is complete or not there at all.

    Args:
        model: A prepared `transformers.PreTrainedModel`, prepared with `recipes.gguf`. It is not changed.
        path: The file to write.
        base: A float file of the same model that llama.cpp's converter has made: its metadata and its tokenizer are
            kept, and the tensors of quantized layers are replaced. It works for any model that the converter
            knows. None to write the metadata from the model's config, for Llama, Mistral, Mixtral, Qwen 2 and 3
            (with experts too), Gemma 2 and 3, and BERT.
        tokenizer: A fast tokenizer of transformers, if there is no `base`. Without it, the file has no vocabulary:
            llama.cpp loads it and takes tokens, but no text.

    Returns:
        A table of what was written.

    Raises:
        ValueError: If the model is not prepared, quantizes what a file cannot hold, or is not the model of `base`. The
            message names the layer.

    Needs `pip install "fakequant[gguf]"`.

    >>> import tempfile, fakequant as fq
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    >>> config = LlamaConfig(**sizes, num_attention_heads=2)
    >>> model = fq.prepare(LlamaForCausalLM(config), fq.recipes.gguf("q4_0"))
    >>> written = export_gguf(model, tempfile.mkdtemp() + "/model.gguf")
    >>> {tensor.name: tensor.type for tensor in written.tensors}["blk.0.ffn_up.weight"]
    'Q4_0'
    """
    contents = file_contents(model, base=base, tokenizer=tokenizer)
    check_fits_class(model)
    with writing(path) as unfinished:
        size = write(unfinished, contents.metadata, contents.tensors)
    return _report(path, contents, size)


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a file holds."""

    metadata: Metadata
    tensors: list[FileTensor]
    # The tensors of the model.
    model: ModelTensors
    # By the name of a tensor of the file: the tensor of the model that it comes from.
    sources: dict[str, str]
    left_out: tuple[str, ...] = ()

    @property
    def architecture(self) -> str:
        """The architecture, as llama.cpp names it."""
        return str(self.metadata["general.architecture"].value)


def file_contents(
    model: PreTrainedModel, *, base: str | os.PathLike[str] | None = None, tokenizer: Any = None
) -> Contents:
    """Returns what a file of a prepared model holds."""
    layers = layers_of(model)
    if base is not None:
        if tokenizer is not None:
            raise ValueError("`tokenizer` must be None with `base`, whose tokenizer the file has.")
        return _over_base(model, layers, GgufFile(base))
    known = architecture_of(model.config)
    values = metadata_of(model.config)
    tensors = ModelTensors(model, layers, known.name, known.leaves_out)
    written = file_tensors(model, tensors, known)
    metadata = {
        "general.architecture": field(known.name),
        "general.type": field("model"),
        "general.name": field(getattr(model.config, "name_or_path", "") or known.name),
        "general.quantization_version": field(_QUANTIZATION_VERSION),
        "general.file_type": field(_file_type(written)),
        **{f"{known.name}.{name}": field(value) for name, value in values.items()},
        **tokenizer_metadata(tokenizer, model.config),
        **({"tokenizer.ggml.token_type_count": field(model.config.type_vocab_size)} if known.is_encoder else {}),
    }
    left_out = tuple(name for name in model.state_dict() if known.leaves_out and name.endswith(known.leaves_out))
    return _noted(Contents(metadata, written, tensors, _sources(tensors), left_out))


def _over_base(model: PreTrainedModel, layers: list[PreparedLayer], base: GgufFile) -> Contents:
    tensors, written, hashes = tensors_over_base(model, layers, base)
    metadata = {**base.metadata, "general.file_type": field(_file_type(written))}
    metadata[HASHES] = field([f"{name} {found}" for name, found in hashes.items()] or [""])
    return _noted(Contents(metadata, written, tensors, _sources(tensors)))


def layers_of(model: PreTrainedModel) -> list[PreparedLayer]:
    """Returns the quantized layers of a prepared transformers model. Raises an error if it cannot be exported."""
    check_module(model)
    transformers = require("transformers", "transformers", TARGET.runtime.extra)
    gguf()
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(
            f"`model` must be a transformers.PreTrainedModel, because the file has its sizes, got "
            f"{type(model).__name__}.\nUse fakequant.export_onnx or export_executorch for other models."
        )
    preparation(model)  # raises if the model is not prepared
    layers = list(prepared_layers(model, TARGET))
    if not layers:
        raise ValueError("No layer of the model has a quantized weight, so the file would be the float model.")
    return layers


def _sources(tensors: ModelTensors) -> dict[str, str]:
    return {place.name: tensors.source(place) for place in tensors.places}


def _noted(contents: Contents) -> Contents:
    metadata = {name: value for name, value in contents.metadata.items() if name != NOTE}
    metadata[NOTE] = field(digest_of(metadata, NOTE))
    return dataclasses.replace(contents, metadata=metadata)


def _file_type(tensors: list[FileTensor]) -> int:
    kinds = Counter(tensor.type for tensor in tensors if len(tensor.shape) > 1)
    return _FILE_TYPES.get(kinds.most_common(1)[0][0], 0)


def _report(path: str | os.PathLike[str], contents: Contents, size: int) -> GgufExport:
    tensors = []
    for tensor in contents.tensors:
        source = contents.sources.get(tensor.name, "")
        layer = contents.model.layers.get(source)
        tensors.append(
            GgufTensor(
                name=tensor.name,
                source=source,
                type=tensor.type,
                spec=None if layer is None else str(layer.spec),
                shape=tensor.shape,
            )
        )
    values = contents.model.values
    return GgufExport(
        file=str(path),
        architecture=contents.architecture,
        tensors=tensors,
        left_out=contents.left_out,
        bytes=size,
        float_bytes=sum(value.nbytes for value in values.values()),
    )
