"""`load_torch_ao_state`: a checkpoint of a model that torch.ao prepared, loaded into a prepared model.

Names in such checkpoints, for a layer at `conv` and a batch norm at `bn`, which eager mode and FX mode have fused:

    conv.weight, conv.bias           the parameters of the layer
    conv.bn.*                        the state of the batch norm
    conv.weight_fake_quant.*         the scale of the weight, after the batch norm was folded into it
    conv.activation_post_process.*   the range of the result, behind a fused batch norm and ReLU (eager mode)
    activation_post_process_3.*      the same (FX mode), in the order in which the graph computes results
"""

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._backends.checks import EPS
from fakequant._backends.torch import tensor_functions
from fakequant._moves import SAME_VALUES, SELECTING_NAMES, TRACED_MODULES, TRACED_NAMES
from fakequant._prepare.attach import preparation
from fakequant._prepare.flow_graph import Call, FlowGraph, norm_pairs
from fakequant._prepare.prepare import unprepare
from fakequant._prepare.record_flow import record_flow
from fakequant._util.text import listed
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._model_quantizers import named_quantizers, weight_quantizers
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer

_WEIGHT, _RESULT = "weight_fake_quant", "activation_post_process"
# The lowest and highest values of results, by the call, or by the path of the module that returned them.
_Ranges = dict[Any, tuple[Tensor, Tensor] | None]
# What computes values within the range of its operand, or is fused with the layer before.
_OF_SAME_RANGE = (
    nn.ReLU, nn.modules.batchnorm._BatchNorm, nn.Identity, nn.Dropout, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
)  # fmt: skip
_AVERAGES = ("mean", *(f"{name}_pool{n}d" for name in ("avg", "adaptive_avg") for n in (1, 2, 3)))
_SAME_RANGE = {"relu", "relu_", "dropout", *_AVERAGES, *TRACED_NAMES, *SELECTING_NAMES, *SAME_VALUES}
# A quantizer in a checkpoint, by its path: the names and values below it.
_Theirs = dict[str, dict[str, Tensor]]


@torch.no_grad()
def load_torch_ao_state(model: nn.Module, state: Mapping[str, Tensor] | nn.Module, example: Any) -> list[str]:
    """Loads the state of a model that `torch.ao` prepared for QAT, in eager or FX mode, with its ranges.

    Fused layers are taken apart: the batch norm of `conv.bn.weight` is found where the model has it. Weights get the
    scales that they were trained with, divided by the factors of the batch norm that torch.ao has folded into them
    first, so that `convert` finds the same codes. These scales are frozen. Ranges of activations are kept, and continue
    to follow the data in training. Histograms and fixed scales are no ranges. Weights of fewer than 8 bits keep their
    own scales.

    Args:
        model: The same network without stubs or with them, prepared by `prepare`.
        state: The state_dict of torch.ao's model, or that model.
        example: One batch, which shows whose result each range belongs to.

    Returns:
        The paths of the quantizers of activations for which the checkpoint has no range. `calibrate` them.

    Raises:
        ValueError: If parameters are missing or have other shapes. Then the model is unchanged.

    >>> import warnings, fakequant as fq
    >>> warnings.simplefilter("ignore")  # the deprecation warning of torch.ao
    >>> from torch.ao import quantization as ao
    >>> def network():
    ...     return nn.Sequential(ao.QuantStub(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> theirs = network().train()
    >>> theirs.qconfig = ao.get_default_qat_qconfig("x86")
    >>> theirs = ao.prepare_qat(theirs)
    >>> y = theirs(torch.randn(16, 4))
    >>> ours = fq.prepare(network(), fq.recipes.int8(), example=torch.randn(16, 4))
    >>> load_torch_ao_state(ours, theirs, torch.randn(16, 4))
    []
    >>> ours[1].input_quantizer.running_max == theirs[0].activation_post_process.activation_post_process.max_val
    tensor(True)
    """
    preparation(model)  # raises an error if the model is not prepared
    given = dict(state.state_dict() if isinstance(state, nn.Module) else state)
    float_model = unprepare(copy.deepcopy(model))
    graph = record_flow(float_model, example)
    norms = dict(norm_pairs(float_model, graph))
    theirs, floats = _split(given)
    if not theirs:
        raise ValueError(
            f"`state` has no quantizers of torch.ao: no name contains {_WEIGHT!r} or {_RESULT!r}.\n"
            "Use model.load_state_dict(state) before prepare."
        )
    _load_floats(model, floats, norms)
    for path, module in model.named_modules():
        if isinstance(module, QuantizedLayer) and f"{path}.{_WEIGHT}" in theirs:
            _set_weight_scale(module, theirs[f"{path}.{_WEIGHT}"], _norm_of(model, path, norms))
    ranges = _ranges(float_model, graph, theirs)
    lacking = []
    for path, quantizer, call in _activations(model, graph):
        found = _range_of(float_model, call, ranges)
        if found is None:
            lacking.append(path)
        else:
            _set_range(quantizer, *found)
    return lacking


def _split(given: dict[str, Tensor]) -> tuple[_Theirs, dict[str, Tensor]]:
    """Returns the states of torch.ao's quantizers, and all other values by name."""
    theirs: _Theirs = {}
    floats = {}
    for name, value in given.items():
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part == _WEIGHT or part.startswith(_RESULT)), None)
        if place is None:
            floats[name] = value
        else:
            theirs.setdefault(".".join(parts[: place + 1]), {})[".".join(parts[place + 1 :])] = value
    return theirs, floats


def _load_floats(model: nn.Module, floats: dict[str, Tensor], norms: dict[str, str]) -> None:
    """Loads parameters and batch norms, under the names that they had before they were fused."""
    renamed = {}
    for name, value in floats.items():
        layer, fused, rest = name.rpartition(".bn.")
        renamed[f"{norms[layer]}.{rest}" if fused and layer in norms else name] = value
    own = {name: value for name, value in model.state_dict().items() if not _is_of_quantizer(name, model)}
    missing = [name for name in own if name not in renamed and not name.startswith("_")]
    unknown = [name for name in renamed if name not in own]
    if missing or unknown:
        parts = [f"it lacks {listed(missing)}"] * bool(missing) + [f"the model has no {listed(unknown)}"] * bool(
            unknown
        )
        raise ValueError(
            f"`state` does not fit the model: {', and '.join(parts)}.\\nUse the network that torch.ao has prepared."
        )
    wrong = [name for name, value in renamed.items() if own[name].shape != value.shape]
    if wrong:
        raise ValueError(
            f"{wrong[0]} has the shape {tuple(renamed[wrong[0]].shape)} in `state`, and "
            f"{tuple(own[wrong[0]].shape)} in the model.\nUse the network that torch.ao has prepared."
        )
    for name, value in renamed.items():
        own[name].copy_(value)


def _is_of_quantizer(name: str, model: nn.Module) -> bool:
    path = name.rpartition(".")[0]
    while path:
        if isinstance(model.get_submodule(path), Quantizer):
            return True
        path = path.rpartition(".")[0]
    # What `prepare` adds to a layer or to the model.
    return name.rpartition(".")[2].startswith(("_fakequant", "fakequant"))


def _norm_of(model: nn.Module, path: str, norms: dict[str, str]) -> Any:
    return model.get_submodule(norms[path]) if path in norms else None


def _set_weight_scale(layer: Any, theirs: dict[str, Tensor], norm: Any) -> None:
    """Gives a weight the scale of torch.ao, and its rounding, if both have 8 bits.

    In training, torch.ao's symmetric grids are affine for channels of one sign: they reach from 0 to the end. Here
    and in torch.ao's `convert` they reach as far on both sides, so their scale is twice as large.
    """
    quantizer, scale, zero_point = layer.weight_quantizer, theirs["scale"], theirs["zero_point"]
    one_sign = (zero_point == -128) | (zero_point == 127)
    if not isinstance(quantizer, FakeQuantize) or not bool((one_sign | (zero_point == 0)).all()):
        return
    scale = torch.where(one_sign, 2 * scale, scale)
    spec = quantizer.spec
    if spec.bits != 8 or not (spec.symmetric and spec.signed) or spec.granularity not in ("tensor", "channel"):
        return
    if norm is not None:
        factor = norm.weight / (norm.running_var + norm.eps).sqrt()
        if spec.axis is None or bool((factor == 0).any()):
            return
        scale = scale / factor.abs()
    if scale.numel() not in (1, quantizer.scale.numel()):
        return
    weight = layer._fakequant.kind.read_weight(layer)
    spec = dataclasses.replace(spec, narrow_range=False)
    made = FakeQuantize(
        spec, quantizer.observer, shape=tuple(weight.shape), gradient=quantizer.gradient, eps=quantizer.eps,
        sync=quantizer.sync, path=quantizer.path, device=quantizer.scale.device,
    )  # fmt: skip
    made.set_qparams(scale.expand(quantizer.scale.shape), torch.zeros_like(quantizer.zero_point))
    layer.weight_quantizer = made.train(quantizer.training)


# --- ranges of activations --------------------------------------------------------------------------


def _ranges(model: nn.Module, graph: FlowGraph, theirs: _Theirs) -> _Ranges:
    """Returns the lowest and highest value of results, by the call, or by the path of the module that returned them."""
    found: _Ranges = {}
    for path, state in theirs.items():
        owner, _, name = path.rpartition(".")
        if name == _RESULT:
            found[owner] = _ends(state)
    inputs = list(dict.fromkeys(source for call in graph.calls for source in call.inputs if source.kind == "input"))
    stubs = [path for path in found if type(model.get_submodule(path)).__name__ == "QuantStub"]
    if len(inputs) == len(stubs) == 1:
        found[inputs[0]] = found[stubs[0]]
    numbered = sorted((path for path in theirs if "." not in path and path.startswith(f"{_RESULT}_")), key=_number)
    units = [*inputs, *_units(model, graph, theirs)]
    if len(units) == len(numbered):  # otherwise it is not known which is which
        found |= {unit: _ends(theirs[path]) for unit, path in zip(units, numbered, strict=True)}
    return found


def _number(path: str) -> int:
    return int(path.removeprefix(f"{_RESULT}_"))


def _units(model: nn.Module, graph: FlowGraph, theirs: _Theirs) -> list[Call]:
    """Returns the calls whose results FX mode quantizes, in order: all but those that are fused with the one before."""
    units: list[Call] = []
    fused: set[Call] = set()
    for call in graph.calls:
        if call in fused or call.kind not in ("module", "function"):
            continue
        if call.kind == "module" and f"{call.path}.{_WEIGHT}" in theirs:
            fused |= set(_fused_behind(model, call))
        if _is_relu(model, call) and units and call.inputs == [units[-1]]:
            units[-1] = call  # of an addition
        else:
            units.append(call)
    return units


def _is_relu(model: nn.Module, call: Call) -> bool:
    is_module = call.kind == "module" and isinstance(model.get_submodule(call.path), nn.ReLU)
    return is_module or call.function_name in ("relu", "relu_")


def _fused_behind(model: nn.Module, call: Call) -> Iterator[Call]:
    """Yields the batch norm and the ReLU behind a layer."""
    while len(call.users) == 1:
        call = call.users[0]
        is_norm = call.kind == "module" and isinstance(model.get_submodule(call.path), nn.modules.batchnorm._BatchNorm)
        if not (is_norm or _is_relu(model, call)):
            return
        yield call


def _range_of(model: nn.Module, call: Call | None, ranges: _Ranges) -> tuple[Tensor, Tensor] | None:
    """Returns the range of a call's result: its own, or that of the result from which it was computed."""
    while call is not None:
        found = ranges.get(call) or ranges.get(call.path) if call.kind == "module" else ranges.get(call)
        if found is not None:
            return found
        for path in (*call.returned_by, call.path.rpartition(".")[0]):  # the second: in nn.quantized.FloatFunctional
            if path in ranges:
                return ranges[path]
        call = call.inputs[0] if len(call.inputs) == 1 and _keeps_range(model, call) else None
    return None


def _keeps_range(model: nn.Module, call: Call) -> bool:
    """Returns True if a call computes what torch.ao gives the range of its operand, or fuses with the layer before."""
    if call.kind == "module":
        module = model.get_submodule(call.path)
        return isinstance(module, _OF_SAME_RANGE) or type(module) in TRACED_MODULES
    return call.function_name in _SAME_RANGE


def _activations(model: nn.Module, graph: FlowGraph) -> Iterator[tuple[str, Quantizer, Call | None]]:
    """Yields the quantizers of activations, each with the call whose result it quantizes."""
    of_weights = weight_quantizers(model)
    calls = {call.path: call for call in graph.calls if call.kind == "module"}
    for path, quantizer in named_quantizers(model):
        if quantizer in of_weights or quantizer.is_dynamic:
            continue
        owner, _, name = path.rpartition(".")
        call = calls.get(owner)
        if name == "input_quantizer":
            call = call.inputs[0] if call is not None and call.inputs else None
        elif name != "output_quantizer":
            call = next((c for c in graph.calls if c.kind == "function" and path.endswith(f".{c.key}")), None)
        yield path, quantizer, call


def _ends(state: dict[str, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Returns the range of an activation, or None if its observer has none: histograms, and scales that are fixed."""
    lo, hi = (state.get(f"{_RESULT}.{end}_val") for end in ("min", "max"))
    if lo is None or hi is None or lo.numel() != 1:
        return None
    return lo, hi


def _set_range(quantizer: Any, lo: Tensor, hi: Tensor) -> None:
    if not bool(lo.isfinite() & hi.isfinite()):  # nothing was observed
        return
    if isinstance(quantizer, FakeQuantize) and set(quantizer._names) == {"running_min", "running_max"}:
        quantizer.running_min.fill_(float(lo))
        quantizer.running_max.fill_(float(hi))
        quantizer.refresh()
        quantizer._stale = False
    else:
        found = tensor_functions.choose_qparams(lo.reshape(()), hi.reshape(()), quantizer.spec, eps=EPS)
        quantizer.set_qparams(*found)
