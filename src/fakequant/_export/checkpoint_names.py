"""Where transformers stores the weights of a model in checkpoints: under other names, and in other forms.

transformers may keep weights in another form than checkpoints do: the weights of all experts in one tensor, for
example. Its own conversion shows where each row of a weight is stored, because it is given row numbers instead of
weights.
"""

import copy
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fakequant._export.prepared_layers import own_tensors
from fakequant._util.packages import require
from fakequant._util.text import listed
from fakequant.nn._records import float_class_of

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


def check_fits_class(model: PreTrainedModel) -> None:
    """Raises ValueError if the class of a prepared model makes other parameters or norms than the model has.

    What loads a checkpoint makes the model from its class and its config, and would leave them out or choose others.
    """
    cls = float_class_of(model)
    with torch.device("meta"):
        made = cls(copy.deepcopy(model.config))
    there, here = set(made.state_dict()), set(model.state_dict())
    own = {name for name, _ in own_tensors(model)} & here
    norms = {path for path, module in made.named_modules() if isinstance(module, nn.LayerNorm)}
    other = [path for path, m in model.named_modules() if path in norms and not isinstance(m, nn.LayerNorm)]
    found = {
        "has": sorted(own - there),
        "lacks": sorted(there - here),
        "does not compute LayerNorm in": other,
    }
    if any(found.values()):
        differences = "; ".join(f"{what} {listed(names)}" for what, names in found.items() if names)
        raise ValueError(
            f"The model is not what {cls.__name__} makes of its config: it {differences}. What loads it would compute "
            "something else.\nExport the model as its class makes it: `rotate` changes models with LayerNorm, so leave "
            "it out. Or use export_onnx, which stores the graph of the model."
        )


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
