"""Operations that only move or select elements. Their result is on the same grid as their input.

The table is used in three places:

    prepare        a layer shares the quantizer of the module that computed its input, through moves in between
    golden model   the codes of a tensor are moved in the same way as the tensor
    export         a quantizer that follows a move is repeated before the move
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A function or method of torch. They differ in what they take and return.
TorchFunction: TypeAlias = Callable[..., Any]


class Move(NamedTuple):
    """A group of operations. They are named as in `torch`, `torch.nn.functional` or `torch.Tensor`."""

    # Operations that `prepare` and the golden model recognize.
    traced: tuple[str, ...] = ()
    # Operations that only the golden model recognizes.
    golden_only: tuple[str, ...] = ()
    # Modules that `prepare` recognizes.
    modules: tuple[type[nn.Module], ...] = ()
    # The ONNX operators of the group, if the exporter repeats quantizers before them.
    onnx: tuple[str, ...] = ()
    # If True, runtimes quantize a layer's sums of products before the move and move codes. If False, they move floats.
    moves_codes: bool = True


_POOLS = ("max_pool1d", "max_pool2d", "max_pool3d")
_ADAPTIVE_POOLS = tuple(f"adaptive_{name}" for name in _POOLS)

MOVES = (
    Move(
        traced=_POOLS,
        golden_only=(*(f"{name}_with_indices" for name in (*_POOLS, *_ADAPTIVE_POOLS)), *_ADAPTIVE_POOLS),
        modules=(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
        onnx=("MaxPool",),
    ),
    Move(
        traced=("flatten", "reshape", "view"),
        golden_only=("reshape_as", "view_as", "ravel", "unflatten"),
        modules=(nn.Flatten, nn.Unflatten),
        onnx=("Reshape", "Flatten"),
    ),
    Move(
        traced=("permute", "transpose"),
        golden_only=("t", "movedim", "moveaxis", "swapaxes", "swapdims"),
        onnx=("Transpose",),
    ),
    Move(traced=("squeeze", "unsqueeze"), onnx=("Squeeze", "Unsqueeze")),
    # Exported as Reshape and Transpose.
    Move(golden_only=("pixel_unshuffle", "channel_shuffle", "native_channel_shuffle")),
    # Exported as Slice. ONNX Runtime itself moves quantizers before it.
    Move(golden_only=("narrow", "flip", "fliplr", "flipud", "__getitem__")),
    # Operations that split, select or copy. Runtimes dequantize the sums of a layer before them.
    Move(
        golden_only=(
            "chunk", "split", "split_with_sizes", "tensor_split", "hsplit", "vsplit", "dsplit", "unbind",
            "unsafe_chunk", "unsafe_split", "select", "index_select", "gather", "take_along_dim", "take",
            "masked_select", "rot90", "roll", "repeat", "repeat_interleave", "tile", "expand", "expand_as",
            "broadcast_to", "pixel_shuffle",
        ),
        moves_codes=False,
    ),
)  # fmt: skip

# Operations whose result equals their input.
SAME_VALUES = ("contiguous", "clone", "detach")


def named(*names: str) -> list[TorchFunction]:
    """Returns all functions of `torch` and `torch.nn.functional` and all tensor methods with these names."""
    return [getattr(place, name) for place in (torch, Tensor, F) for name in names if hasattr(place, name)]


_TRACED = [name for move in MOVES for name in move.traced]
TRACED_NAMES = {*_TRACED, "contiguous"}
# Operations whose results contain elements of their operand only. Runtimes move floats there.
SELECTING_NAMES = {name.strip("_") for move in MOVES for name in move.golden_only}
# The moves before which runtimes dequantize the sums of a layer.
SPLITTING_NAMES = {name for move in MOVES if not move.moves_codes for name in move.golden_only}
TRACED_MODULES: tuple[type[nn.Module], ...] = (nn.Identity, *(module for move in MOVES for module in move.modules))
ONNX_MOVES = {name for move in MOVES for name in move.onnx}
# The functions that `__torch_function__` receives: those that move codes of sums, and those that only move codes of
# tensors that are on a grid already.
MOVES_OF_CODES = [
    *named(
        *(name for move in MOVES if move.moves_codes for name in (*move.traced, *move.golden_only) if name[0] != "_")
    ),
    *(Tensor.__getitem__, Tensor.T.__get__, Tensor.mT.__get__),  # type: ignore[attr-defined]
]
MOVES_OF_VALUES = named(*(name for move in MOVES if not move.moves_codes for name in move.golden_only))
