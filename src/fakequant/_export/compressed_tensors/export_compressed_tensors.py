"""`export_compressed_tensors`: writes a prepared transformers model as a folder with the codes that were trained."""

import dataclasses
import os
import re
from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager
from math import lcm
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._export.checkpoint_names import (
    EXTRA,
    PreTrainedModel,
    check_fits_class,
    stored_in_checkpoints,
)
from fakequant._export.compressed_tensors.cache import cache_scheme, cache_tensors
from fakequant._export.compressed_tensors.layer_tensors import in_dtype, offset_of, to_tensors
from fakequant._export.compressed_tensors.schemes import Scheme, scheme_of
from fakequant._export.prepared_layers import PreparedLayer, own_tensors, prepared_layers
from fakequant._model.running import check_module
from fakequant._prepare.attach import preparation
from fakequant._runtimes.transformers.target import TARGET
from fakequant._util.files import writing_folder
from fakequant._util.packages import require
from fakequant._util.shown import Shown
from fakequant._util.text import listed, table
from fakequant.nn._experts import ExpertProduct
from fakequant.nn._kv_cache import quantized_caches
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import float_class_of

# The method's name in config.json.
METHOD = "compressed-tensors"
# The number of codes that are made at once.
_PART = 1 << 20
# Matches the layers of experts in checkpoints.
_EXPERTS = r"re:.*\.experts\.\d+\.\w+$"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class CompressedTensorsExport(Shown):
    """The result of `export_compressed_tensors`. Prints as a table.

    Attributes:
        folder: The folder.
        format: The format of the quantized layers; "mixed-precision" if there are several.
        layers: The quantized layers, as the folder names them, each with the spec of its weight and its input.
        ignored: The layers of the same kinds that stay in float.
        bytes: The size of the tensors in the folder.
        float_bytes: The size of the same tensors in the model's dtype.
        quantized_bytes: The size of the quantized layers' tensors, which `bytes` includes.
        quantized_float_bytes: The size of the quantized weights in the model's dtype.
        cache: The spec of keys and values in the cache; "" if they stay in float.
    """

    folder: str
    format: str
    layers: dict[str, str]
    ignored: tuple[str, ...]
    bytes: int
    float_bytes: int
    quantized_bytes: int
    quantized_float_bytes: int
    cache: str = ""

    def __str__(self) -> str:
        specs = Counter(self.layers.values())
        share = self.quantized_bytes / max(self.quantized_float_bytes, 1)
        lines = [
            f"{Path(self.folder).name}: {self.format}, {self.bytes:,} bytes ({self.float_bytes:,} in float); quantized "
            f"layers {share:.1%} of their size in float",
            table(["layers", "weight and input"], [[number, spec] for spec, number in specs.items()]),
        ]
        if self.cache:
            lines.append(f"keys and values in the cache: {self.cache}")
        if self.ignored:
            lines.append(f"in float: {listed(self.ignored, most=8)}")
        return "\n".join(lines)


@torch.no_grad()
def export_compressed_tensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    tokenizer: Any = None,
    *,
    max_shard_size: int | str = "50GB",
) -> CompressedTensorsExport:
    """Writes a prepared transformers model as a folder that transformers, vLLM, SGLang and others load.

    The folder has the model's config, its generation config, and safetensors files in the format of compressed-tensors.
    Codes, scales and zero points are those with which the prepared model computes in evaluation: nothing is chosen
    again. The folder is written next to its place and moved there at the end, so it is complete or not there at all.

    Weights of `Linear` layers and of experts are stored as codes: integers of 2 to 8 bits per tensor,
    channel or group, FP8 per tensor, channel or block of rows, MXFP4, MXFP6, MXFP8 and NVFP4. Inputs are quantized by
    the engine: 8-bit integers and FP8 per tensor, with the scales of the model, or per token; FP8 per group, MX, and
    NVFP4 with the tensor's scale of the model. Keys and values in the cache are 8-bit integers or FP8, with the scales
    of the model. All other layers stay in float.

    Args:
        model: A prepared `transformers.PreTrainedModel`, calibrated if its inputs have fixed scales. It is not changed.
        folder: The folder to write. It must not exist, or be empty, or hold an earlier export.
        tokenizer: What `save_pretrained` writes beside the model: a tokenizer or a processor. None for nothing.
        max_shard_size: The largest size of a safetensors file, as in `save_pretrained`.

    Returns:
        A table of what was written.

    Raises:
        ValueError: If the model is not prepared, quantizes what the format cannot hold, or has other parameters than
            its class makes of its config. The message names the layer.

    Needs `pip install "fakequant[llm]"`.

    >>> import tempfile, fakequant as fq
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    >>> config = LlamaConfig(**sizes, num_attention_heads=2)
    >>> recipe = fq.recipes.int4_weight_only(target="compressed-tensors").skip("lm_head")
    >>> model = fq.prepare(LlamaForCausalLM(config), recipe)
    >>> folder = tempfile.mkdtemp() + "/llama-int4"
    >>> written = export_compressed_tensors(model, folder)
    >>> written.format, len(written.layers), written.ignored
    ('pack-quantized', 7, ('lm_head',))
    """
    check_module(model)
    transformers = require("transformers", "transformers", EXTRA)
    require("compressed_tensors", "compressed-tensors", EXTRA)
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(
            f"`model` must be a transformers.PreTrainedModel, because the folder has its config, got "
            f"{type(model).__name__}.\nUse fakequant.export_onnx or export_executorch for other models."
        )
    preparation(model)  # raises if the model is not prepared
    layers = list(prepared_layers(model, TARGET))
    if not layers:
        raise ValueError("No layer of the model has a quantized weight, so the folder would be the float model.")
    check_fits_class(model)
    with writing_folder(folder) as unfinished:
        contents = folder_contents(model, layers)
        report = _report(folder, model, contents)
        with _saved_as(model, contents.quantization):
            # A copy of the dict, from which transformers removes what it has written.
            model.save_pretrained(
                unfinished, state_dict=dict(contents.tensors), max_shard_size=max_shard_size, save_original_format=False
            )
        if tokenizer is not None:
            tokenizer.save_pretrained(unfinished)
    return report


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a folder holds."""

    # All tensors by their names in the folder.
    tensors: dict[str, Tensor]
    # The quantized layers by their names in the folder.
    layers: "dict[str, FolderLayer]"
    # The `quantization_config` of config.json.
    quantization: dict[str, Any]


def folder_contents(model: PreTrainedModel, layers: list[PreparedLayer]) -> Contents:
    """Returns what a folder of a prepared model holds. `layers` are all `prepared_layers` of the model."""
    tensors, stored = _state(model, layers)
    return Contents(tensors, stored, _quantization_config(model, layers, stored, tensors))


# --- tensors ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FolderLayer:
    """A layer of the folder."""

    tensors: dict[str, Tensor]
    scheme: Scheme
    # The number of elements of its weight.
    numel: int


def _state(model: PreTrainedModel, layers: list[PreparedLayer]) -> tuple[dict[str, Tensor], dict[str, FolderLayer]]:
    """Returns the tensors of the folder, and its quantized layers by their names there."""
    names = set(model.state_dict())
    state = {name: value.detach() for name, value in own_tensors(model) if name in names}
    quantized = {layer.name: layer for layer in layers}
    for name, layer in quantized.items():
        if name not in state:
            raise ValueError(
                f"{layer.path} cannot be stored in compressed-tensors: it shares its weight with another layer.\n"
                f"Use config.skip({layer.path!r}); with target='compressed-tensors', prepare does so."
            )
    written, rows = stored_in_checkpoints(model, state | cache_tensors(model), quantized)
    stored = {}
    for name, (source, numbers) in rows.items():
        layer, path = quantized[source], name.removesuffix(".weight")
        if numbers is None or path == name:
            raise ValueError(
                f"{layer.path} cannot be stored in compressed-tensors: checkpoints of {type(model).__name__} have its "
                f"weight as {name!r}, in a form without rows of codes.\nUse config.skip({layer.path!r})."
            )
        tensors = _tensors_of(layer, numbers, model.dtype)
        stored[path] = FolderLayer(tensors, scheme_of(layer), len(numbers) * layer.weight().shape[-1])
        written |= {f"{path}.{local}": tensor for local, tensor in tensors.items()}
    return written, stored


def _tensors_of(layer: PreparedLayer, rows: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns the tensors of some rows of a layer, with scales in the dtype of the model."""
    tensors = _weight_tensors(layer, rows)
    if layer.input is not None:
        tensors |= _input_tensors(layer.input)
    for name in ("weight_scale", "input_scale"):
        if name in tensors and tensors[name].dtype == torch.float32:
            tensors[name] = in_dtype(tensors[name], dtype, layer.path, name)
    return tensors


def _weight_tensors(layer: PreparedLayer, rows: Tensor) -> dict[str, Tensor]:
    """Returns the tensors of some rows of a weight, made in parts: codes and ranges take memory of their own."""
    scheme, spec, known = scheme_of(layer), layer.spec, layer.known_grid()
    # Zero points are packed by 32 rows, and blocks are whole.
    step = lcm(32, spec.group_rows or 1)
    step *= max(_PART // (step * layer.weight().shape[-1]), 1)
    if spec.scale_format == "e4m3fn" or len(rows) <= step:
        return to_tensors(layer.stored(rows, known), scheme)
    whole: dict[str, Tensor] = {}
    lengths: dict[str, int] = {}
    for start in range(0, len(rows), step):
        for name, part in to_tensors(layer.stored(rows[start : start + step], known), scheme).items():
            if part.dim() < 2:  # the same in all parts, or the shape of the part
                whole[name] = part
                continue
            if start == 0:
                whole[name] = part.new_empty((-(-len(part) * len(rows) // step), *part.shape[1:]))
                lengths[name] = len(part)
            at = start // step * lengths[name]
            whole[name][at : at + len(part)] = part
    if "weight_shape" in whole:
        whole["weight_shape"] = torch.tensor([len(rows), layer.weight().shape[-1]])
    return whole


def _input_tensors(quantizer: Quantizer) -> dict[str, Tensor]:
    """Returns the tensors of an input with a fixed scale. Codes of unsigned grids are moved by half the range."""
    scale, zero_point = quantizer.qparams()
    spec = quantizer.spec
    if spec.scale_format == "e4m3fn":
        return {"input_global_scale": scale.reshape(1).clone()}
    tensors = {"input_scale": scale.reshape(1).clone()}
    if not spec.symmetric:
        tensors["input_zero_point"] = (zero_point.reshape(1) - offset_of(spec)).to(torch.int8)
    return tensors


# --- config.json -----------------------------------------------------------------------------------


def _quantization_config(
    model: PreTrainedModel, layers: list[PreparedLayer], stored: dict[str, FolderLayer], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Returns the `quantization_config`: the scheme of the most layers for all of "Linear", others by name."""
    schemes: dict[Scheme, list[str]] = {}
    for path, layer in stored.items():
        schemes.setdefault(layer.scheme, []).append(path)
    of_linear = Counter(scheme_of(layer) for layer in layers if not isinstance(layer.layer, ExpertProduct))
    most = max(of_linear, key=lambda scheme: of_linear[scheme], default=None)
    of_experts = {scheme_of(layer) for layer in layers if isinstance(layer.layer, ExpertProduct)}
    groups = {}
    # transformers uses the first group for experts, unless the pattern of another group mentions them.
    for number, (scheme, paths) in enumerate(sorted(schemes.items(), key=lambda item: item[0] != most)):
        targets = paths
        if scheme == most:
            targets = ["Linear"]
        elif of_experts == {scheme}:
            targets = [_EXPERTS, *(path for path in paths if not _is_expert(path))]
        groups[f"group_{number}"] = scheme.to_dict(targets)
    formats = {scheme.format for scheme in schemes}
    return {
        "quant_method": METHOD,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": _ignored(model, stored, tensors),
        "kv_cache_scheme": cache_scheme(model),
        "global_compression_ratio": None,
    }


def _is_expert(path: str) -> bool:
    return re.match(_EXPERTS.removeprefix("re:"), path) is not None


def _ignored(model: PreTrainedModel, stored: Container[str], tensors: dict[str, Tensor]) -> list[str]:
    """Returns the layers that stay in float but that engines may take for one of "Linear": also routers of experts,
    and experts, which are layers only in the folder."""
    found = []
    for path, module in model.named_modules():
        weight = module._parameters.get("weight")
        is_matrix = weight is not None and weight.dim() == 2
        if is_matrix and path not in stored and not issubclass(float_class_of(module), nn.Embedding):
            found.append(path)
    paths = (name.removesuffix(".weight") for name in tensors if name.endswith(".weight"))
    return [*found, *(path for path in paths if _is_expert(path) and path not in stored and path not in found)]


@contextmanager
def _saved_as(model: PreTrainedModel, quantization: dict[str, Any]) -> Iterator[None]:
    """Context in which the model's config has a `quantization_config`, and its class has its own name."""
    config, cls = model.config, type(model)
    before = {
        name: config.__dict__[name]
        for name in ("quantization_config", "architectures", "dtype")
        if name in config.__dict__
    }
    try:
        model.__class__ = float_class_of(model)
        config.quantization_config = quantization
        yield
    finally:
        model.__class__ = cls
        for name in ("quantization_config", "architectures", "dtype"):
            config.__dict__.pop(name, None)
        config.__dict__.update(before)


def _report(folder: str | os.PathLike[str], model: PreTrainedModel, contents: Contents) -> CompressedTensorsExport:
    layers = contents.layers
    stored = sum(tensor.nbytes for layer in layers.values() for tensor in layer.tensors.values())
    in_float = sum(layer.numel for layer in layers.values()) * torch.empty((), dtype=model.dtype).element_size()
    everything = sum(tensor.nbytes for tensor in contents.tensors.values())
    return CompressedTensorsExport(
        folder=str(folder),
        format=contents.quantization["format"],
        layers={path: str(layer.scheme) for path, layer in layers.items()},
        ignored=tuple(contents.quantization["ignore"]),
        bytes=everything,
        float_bytes=everything - stored + in_float,
        quantized_bytes=stored,
        quantized_float_bytes=in_float,
        cache=next((str(q.spec) for found in quantized_caches(model).values() for q in found.values()), ""),
    )
