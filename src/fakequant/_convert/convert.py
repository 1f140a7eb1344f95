"""`convert`: a prepared model as integers."""

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fakequant import _targets
from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.tensor_checks import block_shape
from fakequant._convert.fold_batch_norm import can_fold, fold, reason_not_foldable, remove_norm
from fakequant._convert.golden.fixed_grid import Grid
from fakequant._convert.golden.integer_layer import (
    IntegerLayer,
    Integers,
    bias_scale,
    is_integer,
    set_levels,
    set_weight,
    weight_levels,
)
from fakequant._convert.golden.tracked_codes import stripped
from fakequant._convert.left_in_float import leave_in_float
from fakequant._prepare.attach import attach_layer, forget_preparation, record_of
from fakequant._prepare.prepare import preparation
from fakequant.nn._batch_norm import bias_codes, widened_scale
from fakequant.nn._quantized_layer import Quantization, QuantizedLayer, input_grid_of
from fakequant.nn._quantizer import Quantizer, quantizers
from fakequant.nn._records import find_record
from fakequant.spec import QuantSpec


@dataclasses.dataclass
class Conversion:
    """What was done to a model, kept with it."""

    target: str
    # Batch norms that are part of a layer now.
    folded: list[str]
    notes: list[str]


def convert(model: nn.Module, *, target: str | None = None) -> nn.Module:
    """A copy of a prepared model that holds integer codes and computes with them: the golden model.

    Weights are codes and scales, biases are integers at the scale of the sums they are added to, batch
    batch norms are part of the layers before them, and scales stay as they are. Products of codes are
    summed without rounding and brought to the next grid as the kernels of the target do it, so that codes
    can be compared with those of the runtime one by one. `target` is that of the config, unless given.

    >>> import fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8())
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> convert(model)[0].weight_codes.dtype
    torch.int8
    """
    made = preparation(model)
    goal = _targets.find(made.config.target if target is None else target)
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    forget_preparation(copied)
    notes = leave_in_float(copied)
    pairs = {layer: norm for layer, norm in made.norms.items() if can_fold(copied, layer, norm)}
    grids = _make_grids(copied, goal)
    norms = {layer: copied.get_submodule(norm) for layer, norm in pairs.items()}
    kept = _replace(copied, grids, norms, goal)
    folded = [norm for layer, norm in pairs.items() if layer not in kept]
    for path in folded:
        remove_norm(copied, path)
    _require_target(copied, goal)
    notes += [f"{norm} stays a batch norm: {kept[layer]}" for layer, norm in pairs.items() if layer in kept]
    record_of(copied).conversion = Conversion(goal.name, folded, notes)
    return_tensors(copied)
    return copied


def conversion(model: nn.Module) -> Conversion:
    """What was done to a converted model."""
    found = find_conversion(model)
    if found is None:
        raise ValueError("The model is not converted.\nUse fakequant.convert(model).")
    return found


def find_conversion(model: nn.Module) -> Conversion | None:
    """What was done to a converted model; None if it is not one."""
    record = find_record(model)
    return None if record is None else record.conversion


def _require_target(model: nn.Module, target: _targets.Target) -> None:
    """That the target can compute what was trained."""
    wrong = []
    for path, module in model.named_modules():
        if isinstance(module, Grid):
            reason = target.reason_against_activation(module.spec)
            if module.spec.numerics != "onnx":
                reason = f"has the numerics {module.spec.numerics!r}, and runtimes compute 'onnx'"
        elif isinstance(module, IntegerLayer) and is_integer(module):
            reason = target.reason_against_weight(module._fakequant.weight_spec, weight_levels(module))
        else:
            reason = None
        if reason is not None:
            wrong.append(f"\n  {path} {reason}")
    if wrong:
        more = f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"The model was not trained for the target {target.name!r}:{''.join(wrong[:5])}{more}\n"
            f"Use prepare with a config that has target={target.name!r}, and train or calibrate it again."
        )


def _make_grids(model: nn.Module, target: _targets.Target) -> dict[Quantizer, Grid]:
    weights = {module.weight_quantizer for module in model.modules() if isinstance(module, QuantizedLayer)}
    made = {}
    for path, quantizer in quantizers(model):
        if quantizer in weights:
            continue
        options: dict[str, Any] = {"arithmetic": target.arithmetic, "path": path}
        if quantizer.is_dynamic:
            grid = Grid(quantizer.spec, None, None, eps=quantizer.eps, **options)  # type: ignore[arg-type]
        else:
            grid = Grid(quantizer.spec, *quantizer.qparams(), **options)
        made[quantizer] = grid
    return made


def _replace(
    model: nn.Module, grids: dict[Quantizer, Grid], norms: dict[str, nn.Module], target: _targets.Target
) -> dict[str, str]:
    """Makes every quantized layer an integer layer, and every other quantizer a grid.

    Returns the layers whose batch norm could not be folded, and why.
    """
    kept = {}
    for path, module in list(model.named_modules()):
        for name, quantizer in list(module._modules.items()):
            if isinstance(quantizer, Quantizer) and quantizer in grids:
                module._modules[name] = grids[quantizer]
        if isinstance(module, QuantizedLayer):
            source = module._fakequant.input_grid
            module._fakequant.input_grid = None if source is None else grids[source]
            reason = _make_integer(module, path, norms.get(path), target)
            if reason is not None:
                kept[path] = reason
    return kept


@torch.no_grad()
def _make_integer(layer: Any, path: str, norm: nn.Module | None, target: _targets.Target) -> str | None:
    """Makes a quantized layer an integer layer, with its batch norm if that can be folded; returns why not."""
    before: Quantization = layer._fakequant
    kind, quantizer = before.kind, layer.weight_quantizer
    weight = getattr(layer, kind.weight_name).detach()
    bias = getattr(layer, kind.bias_name, None)
    layer._modules.pop("weight_quantizer", None)
    cls = before.float_class
    if parametrize.is_parametrized(layer):
        cls = cls.__bases__[0]
        del layer._modules["parametrizations"]
        layer._parameters[kind.weight_name] = nn.Parameter(weight, requires_grad=False)
    record = Integers(kind=kind, float_class=cls, path=path, input_grid=before.input_grid)
    attach_layer(layer, record, {})
    layer.register_buffer("bias_codes", None)
    if quantizer is None:
        return None
    spec, scale, zero_point = _scales_of(quantizer.eval(), weight)
    layer._parameters.pop(kind.weight_name, None)
    record.weight_shape, record.weight_spec = tuple(weight.shape), spec
    if is_integer(layer):
        record.weight_shift = min(_targets.find(before.target).weight_shift(spec), target.weight_shift(spec))
    layer.register_buffer("weight_scale", scale * 2.0**-record.weight_shift)
    layer.register_buffer("weight_zero_point", None if spec.symmetric else zero_point)
    layer.register_buffer("weight_codes", None)
    set_weight(layer, weight)
    reason = None if norm is None else reason_not_foldable(layer, norm, quantizer.has_tokens)
    if norm is not None and reason is None:
        bias = fold(layer, bias, norm)
    _set_bias(layer, bias)
    return reason


def _scales_of(quantizer: Any, weight: Tensor) -> tuple[QuantSpec, Tensor, Tensor]:
    """The grid of a weight; of a quantizer that finds its range at run time: now."""
    spec, shape = quantizer.spec, tuple(weight.shape)
    if spec.granularity != "token":
        quantizer(weight)
        return spec, *quantizer.qparams()
    # One scale for a whole axis: per channel, if there is one other axis, else in groups as long as the axis.
    seen = tensor_functions.min_max(weight, spec)
    scale, zero_point = tensor_functions.choose_qparams(seen.min, seen.max, spec, eps=quantizer.eps)
    axis = spec.axis % len(shape)
    others = sorted((a for a in range(len(shape)) if a != axis), key=lambda a: shape[a] == 1)
    if all(shape[a] == 1 for a in others[1:]):
        return dataclasses.replace(spec, axis=others[0], group_size=None), scale.reshape(-1), zero_point.reshape(-1)
    spec = dataclasses.replace(spec, group_size=shape[axis])
    blocks = block_shape(shape, spec)
    return spec, scale.reshape(blocks), zero_point.reshape(blocks)


def _set_bias(layer: Any, bias: Tensor | None) -> None:
    """As integers, if the scale of the sums is known; else as a float."""
    name = layer._fakequant.kind.bias_name
    if name in layer._parameters:
        layer._parameters[name] = None
    if bias is None:
        return
    if is_integer(layer):
        layer._parameters.pop(name, None)  # it is computed from the codes when it is read
        _widen(layer, input_grid_of(layer).scale, bias.detach())
        layer.bias_codes = bias_codes(bias.detach(), bias_scale(layer)).to(torch.int32)
    else:
        layer._parameters[name] = nn.Parameter(bias.detach().float(), requires_grad=False)


def _widen(layer: Any, x_scale: Tensor, bias: Tensor) -> None:
    """Gives channels whose bias would not fit 32 bits a larger scale; their weights are nothing beside it."""
    record = layer._fakequant
    if record.kind.channel_axis != 0:
        return
    needed = widened_scale(layer.weight_scale, x_scale, bias)
    if not bool((needed > layer.weight_scale).any()):
        return
    if layer.weight_zero_point is not None:
        raise ValueError(f"The bias of {record.path} does not fit 32 bits beside its weights.\nUse symmetric weights.")
    before = layer.weight_scale.expand_as(needed)
    levels = weight_levels(layer) * (before / needed).reshape(-1, *[1] * (len(record.weight_shape) - 1))
    record.weight_spec = dataclasses.replace(record.weight_spec, axis=0)
    layer.weight_scale = needed
    set_levels(layer, levels.round())


def return_tensors(model: nn.Module) -> None:
    """Makes a converted model return ordinary tensors; between its layers they remember where they come from."""
    model.register_forward_pre_hook(_strip_last)
    model.register_forward_hook(_strip)


def _strip(module: nn.Module, args: Any, result: Any) -> Any:
    return stripped(result)


def _strip_last(module: nn.Module, args: Any) -> None:
    """Hooks that were added later see what the model's own code returned: `verify` looks at a model of one layer."""
    for number, hook in module._forward_hooks.items():
        if hook is _strip:
            module._forward_hooks.move_to_end(number)  # type: ignore[attr-defined]
            return
