"""Where transformers stores the weights of a model in checkpoints: under other names, and in other forms.

transformers may keep weights in another form than checkpoints do: the weights of all experts in one tensor, for
example. Its own conversion shows where each row of a weight is stored, because it is given row numbers instead of
weights.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fakequant._util.packages import require

EXTRA = "llm"
PreTrainedModel: TypeAlias = Any
# Row numbers start here, so that they cannot be mistaken for the values of an integer buffer.
_FIRST_ROW = 1 << 60
# Each is there twice, because conversions drop axes of length 1.
_COLUMNS = 2


class Rows(NamedTuple):
    """Rows of a tensor of a model. A row is a vector along the last axis."""

    # The name of the tensor in the model.
    name: str
    # The numbers of its rows. None if they cannot be told: the checkpoint has the tensor in a form without these rows.
    rows: Tensor | None


class Stored(NamedTuple):
    """What a checkpoint of a model has."""

    # By name: the tensors that are stored as they are, or converted, but not by rows.
    tensors: dict[str, Tensor]
    # By name: where the rows of a tensor come from.
    rows: dict[str, Rows]


def stored_in_checkpoints(model: PreTrainedModel, state: Mapping[str, Tensor], by_rows: Iterable[str]) -> Stored:
    """Returns what a checkpoint has for the tensors in `state`.

    Args:
        model: The model.
        state: Tensors of the model by name.
        by_rows: The names of the tensors whose rows are to be found. Each has at least two axes.
    """
    state, starts, first = dict(state), {}, _FIRST_ROW
    for name in by_rows:
        *outer, _ = state[name].shape
        starts[first] = name
        number = prod(outer)
        state[name] = torch.arange(first, first + number).reshape(*outer, 1).expand(*outer, _COLUMNS)
        first += number
    loading = require("transformers.core_model_loading", "transformers", EXTRA)
    found = Stored({}, {})
    for name, value in loading.revert_weight_conversion(model, state).items():
        if value.dtype != torch.int64 or not value.numel() or int(value.flatten()[0]) < _FIRST_ROW:
            found.tensors[name] = value
            continue
        start = max(start for start in starts if start <= int(value.flatten()[0]))
        has_rows = value.dim() >= 2 and value.shape[-1] == _COLUMNS
        found.rows[name] = Rows(starts[start], value[..., 0].flatten() - start if has_rows else None)
    return found
