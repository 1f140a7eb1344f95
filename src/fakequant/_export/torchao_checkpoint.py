"""Reads checkpoints of torchao: state_dicts with its quantized tensors."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._export.loaded_grids import LoadedGrid, LoadedLayer, LoadedModel
from fakequant._util.packages import require
from fakequant.functional import dequantize
from fakequant.presets import int8_per_token
from fakequant.spec import WHOLE_AXIS, QuantSpec

# How torchao quantizes inputs at run time, by the name that a tensor of weights has for it.
_INPUTS = {
    "int8_asym_per_token": QuantSpec(symmetric=False, axis=-1, group_size=WHOLE_AXIS),
    "int8_sym_per_token": int8_per_token(),
}


def read_torchao(model: nn.Module, path: str | os.PathLike[str]) -> LoadedModel:
    """Returns the layers and tensors of a file that `torch.save(model.state_dict(), path)` wrote for a model of
    torchao.

    Raises ValueError if the file has no such tensors, or one of a kind that is not known here.
    """
    require("torchao.quantization", "torchao", "torchao")  # which allows torch.load to read its tensors
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} cannot be read as a checkpoint of tensors: {str(error).splitlines()[0]}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path} holds {type(state).__name__} instead of a state_dict.")  # noqa: TRY004
    layers, tensors, own = {}, {}, dict(model.named_parameters(remove_duplicate=False))
    missing = [name for name in own if name not in state]
    if missing:
        raise ValueError(
            f"{path} does not belong to the model: it has no {missing[0]}.\nUse the model that it was saved from."
        )
    for name, value in state.items():
        if type(value).__module__.startswith("torchao."):
            if name not in own or own[name].shape != value.shape:
                has = "no such tensor" if name not in own else f"the shape {tuple(own[name].shape)}"
                raise ValueError(f"{path} has {name} of the shape {tuple(value.shape)}, and the model has {has}.")
            layers[name.removesuffix(".weight")] = _layer(name, value)
        elif isinstance(value, Tensor):
            tensors[name] = value
    return LoadedModel(source=str(path), target="generic", layers=layers, tensors=tensors)


def _layer(name: str, value: Any) -> LoadedLayer:
    kind = type(value).__name__
    if kind == "Float8Tensor":
        spec, codes, zero_point = QuantSpec(format="e4m3fn", axis=0), value.qdata.view(torch.uint8), None
    elif kind in ("Int8Tensor", "IntxUnpackedToInt8Tensor"):
        bits = 8 if kind == "Int8Tensor" else int(str(value.target_dtype).removeprefix("torch.int"))
        codes, zero_point = value.qdata, value.zero_point
        is_symmetric = zero_point is None or not bool(zero_point.any())
        spec = QuantSpec(bits=bits, symmetric=is_symmetric, axis=-1, group_size=int(value.block_size[-1]))
    else:
        raise ValueError(
            f"{name} is a {kind} of torchao, whose codes are stored for one kind of kernel.\n"
            "Use Int8Tensor, IntxUnpackedToInt8Tensor or Float8Tensor, which hold plain codes."
        )
    scale = value.scale.float()
    blocks = codes.shape[-1] // scale.shape[-1] if scale.dim() == codes.dim() else codes.shape[-1]
    spec = _with_blocks(spec, tuple(scale.shape), tuple(codes.shape), blocks)
    scale = (
        scale.reshape(())
        if spec.granularity == "tensor"
        else scale.reshape(-1)
        if spec.granularity == "channel"
        else scale
    )
    points = None if spec.symmetric or zero_point is None else zero_point.to(torch.int32).reshape(scale.shape)
    return LoadedLayer(
        values=dequantize(codes, scale, 0 if points is None else points, spec),
        weight=LoadedGrid(spec=spec, scale=scale, zero_point=points),
        input=_input(name, value),
    )


def _with_blocks(spec: QuantSpec, scales: tuple[int, ...], shape: tuple[int, ...], block: int) -> QuantSpec:
    """Returns the spec with the granularity that the shape of the scales shows."""
    fields = spec.to_dict() | {"axis": None, "group_size": None}
    if len(scales) == len(shape) and block < shape[-1]:
        fields |= {"axis": -1, "group_size": block}
    elif max(scales, default=1) > 1:
        fields |= {"axis": 0}
    return QuantSpec.from_dict(fields)


def _input(name: str, value: Any) -> LoadedGrid | None:
    how = getattr(value, "activation_quantization", None)
    if how is None and getattr(value, "act_quant_kwargs", None) is not None:
        how = "int8_sym_per_token" if type(value).__name__ == "Int8Tensor" else type(value.act_quant_kwargs).__name__
    if how is None:
        return None
    if str(how) not in _INPUTS:
        raise ValueError(f"{name} quantizes its input as {how!r}, which fakequant has no grid for.")
    return LoadedGrid(spec=_INPUTS[str(how)])
