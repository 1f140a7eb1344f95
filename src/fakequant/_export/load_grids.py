"""`load_grids`: sets up the grids of a quantized checkpoint as quantizers, over its dequantized weights."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._export.compressed_tensors.loading import read_folder
from fakequant._export.gguf.loading import is_gguf, read_gguf
from fakequant._export.loaded_grids import LoadedGrid, LoadedModel
from fakequant._export.torchao_checkpoint import read_torchao
from fakequant._model.running import check_module
from fakequant._prepare.attach import preparation
from fakequant._prepare.prepare import prepare, unprepare
from fakequant.config import LayerConfig, QuantConfig, Rule
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer


@torch.no_grad()
def load_grids(
    model: nn.Module, source: str | os.PathLike[str], example: Any = None, *, learned: bool = False
) -> nn.Module:
    """Prepares a float model with the grids of a quantized checkpoint, in place, and returns it.

    Weights become the dequantized weights of the checkpoint, and quantizers get its specs, scales and zero points, so
    that training continues on the grid that was published. Exporting the model without a training step gives the same
    codes.

    Args:
        model: The float model that the checkpoint was made from. Its parameters are overwritten.
        source: A folder of compressed-tensors, written by `export_compressed_tensors`, llm-compressor or others; a
            GGUF file, written by `export_gguf` or llama-quantize; or a file with the state_dict of a model that torchao
            has quantized.
        example: One batch, as in `prepare`. Needed if a layer is called several times.
        learned: If True, scales are trained with the model (LSQ), starting with the checkpoint's scales. If False,
            they stay fixed.

    Raises:
        FileNotFoundError: If the folder or one of its files is missing.
        ValueError: If the checkpoint is damaged, is for another model, or has a grid that fakequant does not have.
            The model is not changed then.

    >>> import tempfile, fakequant as fq
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    >>> config = LlamaConfig(**sizes, num_attention_heads=2)
    >>> model = fq.prepare(LlamaForCausalLM(config), fq.recipes.int4_weight_only(target="compressed-tensors"))
    >>> folder = tempfile.mkdtemp() + "/llama-int4"
    >>> written = fq.export_compressed_tensors(model, folder)
    >>> again = load_grids(LlamaForCausalLM(config), folder)
    >>> print(again.model.layers[0].mlp.up_proj.weight_quantizer.spec)
    int4, per group of 32 on axis -1
    """
    check_module(model)
    stored = _read(model, source)
    if not stored.layers:
        raise ValueError(f"{source} has no quantized layers, so there are no grids to load.")
    _require_fit(model, stored)
    rules = tuple(
        Rule(
            path=path.translate(_LITERAL),
            use=LayerConfig(
                weight=layer.weight.spec, input=None if layer.input is None else layer.input.spec, learned=learned
            ),
        )
        for path, layer in stored.layers.items()
    )
    cache = next((grid.spec for grid in stored.cache.values()), None)
    prepare(model, QuantConfig(rules=rules, target=stored.target, kv_cache=cache), example)
    _require_quantized(model, stored)
    own = _own_tensors(model)
    for name, value in stored.tensors.items():
        own[name].copy_(value)
    for name, kind in stored.dequantized.items():
        warnings.warn(
            f"{name} is {kind} in {stored.source}, for which fakequant has no grid: it stays in float.", stacklevel=2
        )
    for path, layer in stored.layers.items():
        prepared = model.get_submodule(path)
        assert isinstance(prepared, QuantizedLayer)
        _weight_of(prepared).copy_(layer.values)
        assert prepared.weight_quantizer is not None
        _set(prepared.weight_quantizer, layer.weight)
        if layer.input is not None and layer.input.scale is not None:
            _set(prepared.input_quantizer, layer.input)
    for path, grid in stored.cache.items():
        quantizer = model.get_submodule(path)
        assert isinstance(quantizer, Quantizer)
        _set(quantizer, grid)
    return model


# Characters with a meaning in patterns of rules, as patterns that match only themselves.
_LITERAL = str.maketrans({"[": "[[]", "*": "[*]", "?": "[?]"})


def _read(model: nn.Module, source: str | os.PathLike[str]) -> LoadedModel:
    if not Path(source).exists():
        raise FileNotFoundError(f"There is no file or folder {str(source)!r}.")
    if Path(source).is_dir():
        return read_folder(model, source)
    return read_gguf(model, source) if is_gguf(source) else read_torchao(model, source)


def _require_fit(model: nn.Module, stored: LoadedModel) -> None:
    """Raises ValueError if a tensor of the checkpoint has no place in the model, or one of another shape."""
    own = _own_tensors(model)
    for name, value in stored.tensors.items():
        if name not in own or own[name].shape != value.shape:
            has = "no such tensor" if name not in own else f"the shape {tuple(own[name].shape)}"
            raise ValueError(
                f"{stored.source} has {name} of the shape {tuple(value.shape)}, and the model has {has}.\n"
                "Create the model from the config of the checkpoint."
            )


def _require_quantized(model: nn.Module, stored: LoadedModel) -> None:
    """Raises ValueError if a layer of the checkpoint stays in float, and restores the float model."""
    for path, layer in stored.layers.items():
        prepared = model.get_submodule(path) if path not in preparation(model).floats else None
        if (
            isinstance(prepared, QuantizedLayer)
            and prepared.weight_quantizer is not None
            and (layer.input is None or prepared.input_quantizer is not None)
        ):
            continue
        reason = preparation(model).floats.get(path, "its input stays in float")
        unprepare(model)
        raise ValueError(f"{stored.source} stores {path} as codes, which fakequant has no place for: {reason}.")


def _own_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters and buffers of a model by all of their names: tied ones have several."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def _weight_of(layer: Any) -> Tensor:
    """Returns the parameter that holds a layer's weight. The weight of a product of experts belongs to its owner."""
    names = getattr(layer, "names", None)
    weight: Tensor
    if names is not None:
        weight = getattr(layer.owner, names["weight"])
    else:
        weight = getattr(layer, layer._fakequant.kind.weight_name)
    return weight


def _set(quantizer: Quantizer, grid: LoadedGrid) -> None:
    assert grid.scale is not None
    zero_point = torch.zeros_like(grid.scale, dtype=torch.int32) if grid.zero_point is None else grid.zero_point
    quantizer.set_qparams(grid.scale, zero_point)
