"""Operations that only move or select elements: a tensor that was on a grid is on it afterwards.

The table is used in three places:

    prepare        a layer needs no quantizer for its input if the module that computed its elements has one
    golden model   codes of a tensor are moved like the tensor itself
    export         a quantizer behind a move is repeated before it
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Move(NamedTuple):
    """A group of operations. Names are those of functions of torch and of `torch.nn.functional`, and of methods."""

    # Those that `prepare` follows a value through.
    traced: tuple[str, ...] = ()
    # Those that only the golden model knows.
    others: tuple[str, ...] = ()
    modules: tuple[type[nn.Module], ...] = ()
    # What the operations are in an exported file, if the exporter repeats quantizers before them.
    onnx: tuple[str, ...] = ()
    # Whether a runtime computes codes before the move, also of sums of products.
    moves_codes: bool = True


_POOLS = ("max_pool1d", "max_pool2d", "max_pool3d")
_ADAPTIVE_POOLS = tuple(f"adaptive_{name}" for name in _POOLS)

MOVES = (
    Move(
        traced=_POOLS,
        others=(*(f"{name}_with_indices" for name in (*_POOLS, *_ADAPTIVE_POOLS)), *_ADAPTIVE_POOLS),
        modules=(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        onnx=("MaxPool",),
    ),
    Move(
        traced=("flatten", "reshape", "view"),
        others=("reshape_as", "view_as", "ravel", "unflatten"),
        modules=(nn.Flatten, nn.Unflatten),
        onnx=("Reshape", "Flatten"),
    ),
    Move(
        traced=("permute", "transpose"),
        others=("t", "movedim", "moveaxis", "swapaxes", "swapdims"),
        onnx=("Transpose",),
    ),
    Move(traced=("squeeze", "unsqueeze"), onnx=("Squeeze", "Unsqueeze")),
    # Reshape and Transpose in a file.
    Move(others=("pixel_unshuffle", "channel_shuffle", "native_channel_shuffle")),
    # Slice in a file, which ONNX Runtime itself passes a quantizer through.
    Move(others=("narrow", "flip", "fliplr", "flipud", "__getitem__")),
    # Pieces, and copies in other places. A runtime has made floats of sums before them.
    Move(
        others=(
            "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind",
            "unsafe_chunk", "unsafe_split", "select", "index_select", "gather", "take_along_dim", "take",
            "masked_select", "rot90", "roll", "repeat", "repeat_interleave", "tile", "expand", "expand_as",
            "broadcast_to", "pixel_shuffle",
        ),
        moves_codes=False,
    ),
)  # fmt: skip

# Results have the values of the input, in the same places.
SAME_VALUES = ("contiguous", "clone", "detach")


def named(*names: str) -> list[Any]:
    """The functions and methods of torch with these names, wherever there are such."""
    return [getattr(place, name) for place in (torch, Tensor, F) for name in names if hasattr(place, name)]


_TRACED = [name for move in MOVES for name in move.traced]
TRACED_NAMES = {*_TRACED, "contiguous"}
TRACED_MODULES: tuple[type[nn.Module], ...] = (nn.Identity, *(module for move in MOVES for module in move.modules))
ONNX_MOVES = {name for move in MOVES for name in move.onnx}
# The same as functions that tensors dispatch to: of sums of products too, and of tensors on a grid only.
MOVES_OF_CODES = [
    *named(*(name for move in MOVES if move.moves_codes for name in (*move.traced, *move.others) if name[0] != "_")),
    *(Tensor.__getitem__, Tensor.T.__get__, Tensor.mT.__get__),  # type: ignore[attr-defined]
]
MOVES_OF_VALUES = named(*(name for move in MOVES if not move.moves_codes for name in move.others))
