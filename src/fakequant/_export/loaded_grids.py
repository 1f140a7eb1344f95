"""What a checkpoint says about a quantized layer, whatever its format: for `load_grids` and `audit`."""

import dataclasses

from torch import Tensor

from fakequant.spec import QuantSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedGrid:
    """The grid of one tensor. Scale and zero point are None if they are computed at run time."""

    spec: QuantSpec
    # float32 and int32, one entry per block.
    scale: Tensor | None = None
    zero_point: Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedLayer:
    """A quantized layer: its dequantized weight, in the shape that the model has, and its grids."""

    values: Tensor
    weight: LoadedGrid
    input: LoadedGrid | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A quantized checkpoint, with the paths and names of a model."""

    # For messages.
    source: str
    # The target that the checkpoint is for.
    target: str
    # By the path of the layer in the float model; products of experts have the paths of a prepared model.
    layers: dict[str, LoadedLayer]
    # All other parameters and buffers, by name.
    tensors: dict[str, Tensor]
    # The grids of keys and values in caches, by the path of the quantizer in a prepared model.
    cache: dict[str, LoadedGrid] = dataclasses.field(default_factory=dict)
    # The names in `tensors` whose values were codes of a type that has no grid here, each with that type.
    dequantized: dict[str, str] = dataclasses.field(default_factory=dict)
