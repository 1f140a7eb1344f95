"""`convert`: turns a prepared model into the golden model, which computes with integers."""

import copy
import dataclasses
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fakequant import _targets
from fakequant._backends.torch import tensor_functions
from fakequant._backends.torch.tensor_checks import block_shape
from fakequant._convert.float_biases import codes_of_float, float_of_codes
from fakequant._convert.fold_batch_norm import BatchNorm, can_fold, find_norm, fold, reason_not_foldable
from fakequant._convert.folded_norm import remove_norm
from fakequant._convert.golden.fixed_grid import Grid
from fakequant._convert.golden.integer_layer import (
    IntegerLayer,
    Integers,
    bias_scales,
    has_call_grids,
    is_integer,
    set_levels,
    set_weight,
    weight_levels,
)
from fakequant._convert.golden.tracked_codes import stripped
from fakequant._convert.left_in_float import leave_in_float
from fakequant._prepare.attach import attach_layer, forget_preparation, record_of, watch_callees
from fakequant._prepare.prepare import preparation
from fakequant.nn._batch_norm import bias_codes, widened_scale
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._learned_fake_quantize import LearnedFakeQuantize
from fakequant.nn._model_quantizers import quantizers
from fakequant.nn._owned_product import release_from_owner
from fakequant.nn._quantized_layer import Quantization, QuantizedLayer, input_grids_of
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import find_record
from fakequant.observers import Dynamic
from fakequant.spec import QuantSpec

# A layer whose class changes, from `QuantizedLayer` to `IntegerLayer`.
ChangingLayer: TypeAlias = Any


# Why a weight is not the trained one.
WIDENED = "the bias is too large for 32 bits at the scale of its weight, which was rounded to a larger scale"


@dataclasses.dataclass
class Conversion:
    """What `convert` did to a model. It is stored in the record of the golden model."""

    target: str
    # Paths of batch norms that were folded.
    folded: list[str]
    # Tensors that stay in float and batch norms that were not folded, and why.
    notes: list[str]


def convert(model: nn.Module, *, target: str | None = None, strict: bool = False) -> nn.Module:
    """Returns the golden model: a copy of a prepared model that stores integer codes and computes with them.

    Weights become codes and scales. Biases become integers with the scale of the sums that they are added to. Batch
    norms are folded into the layers before them. Scales of activations do not change.

    Products of codes are summed without rounding. The sums become codes of the next grid exactly as in the kernels of
    the target, so that codes can be compared with those of the runtime one by one.

    Weights in a float format (FP8, MX, NVFP4) become codes too, but their layers compute in float, as runtimes do, and
    their biases stay floats. Scales of MX and NVFP4 are those of the weight as it is now. A batch norm behind such a
    weight stays, because folding would take the scales out of their format.

    Args:
        model: A prepared and calibrated model. It is not changed.
        target: The runtime. If None, the target of the config.
        strict: If True, raise an error if a quantizer is switched off or has seen no data. If False, warn about it and
            leave its tensor in float.

    Raises:
        ValueError: If the model is not prepared, or was not trained for the target, or as `strict` says.
        RuntimeError: If the model is not calibrated, or all quantizers are switched off.

    >>> import fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8())
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> convert(model)[0].weight_codes.dtype
    torch.int8
    """
    made = preparation(model)
    goal = _targets.find(made.config.target if target is None else target)
    goal.require_layers(model)
    copied = copy.deepcopy(model).eval().requires_grad_(False)
    forget_preparation(copied)
    notes = leave_in_float(copied, strict=strict)
    pairs = {layer: norm for layer, norm in made.norms.items() if can_fold(copied, layer, norm)}
    grids = _make_grids(copied, goal)
    norms = {layer: find_norm(copied, norm) for layer, norm in pairs.items()}
    kept = _replace(copied, grids, norms, goal)
    folded = [norm for layer, norm in pairs.items() if layer not in kept]
    for path in folded:
        remove_norm(copied, path)
    watch_callees(copied)
    _require_target(copied, goal)
    notes += [f"{norm} stays a batch norm: {kept[layer]}" for layer, norm in pairs.items() if layer in kept]
    notes += [f"{path}: {WIDENED}" for path, module in copied.named_modules() if _is_widened(module)]
    record_of(copied).conversion = Conversion(goal.name, folded, notes)
    return_tensors(copied)
    return copied


def conversion(model: nn.Module) -> Conversion:
    """Returns what `convert` did to a model. Raises ValueError if the model is not converted."""
    found = find_conversion(model)
    if found is None:
        raise ValueError("The model is not converted.\nUse fakequant.convert(model).")
    return found


def find_conversion(model: nn.Module) -> Conversion | None:
    """Returns what `convert` did to a model, or None if the model is not converted."""
    record = find_record(model)
    return None if record is None else record.conversion


def _require_target(model: nn.Module, target: _targets.Target) -> None:
    """Raises ValueError if the target cannot compute with a grid of the model exactly."""
    wrong, has_format = [], True
    for path, module in model.named_modules():
        spec = module.spec if isinstance(module, Grid) else _weight_spec_of(module)
        if spec is not None and not target.has_format(spec):
            reason: str | None = f"is {spec}, but the kernels of {target.name} compute with integers"
            has_format = False
        elif isinstance(module, Grid):
            reason = target.reason_against_activation(module.spec)
            if module.scale is None and not target.has_dynamic_scales:
                reason = f"computes its scale at run time, and {target.name} has integer kernels for fixed ones only"
            if module.spec.numerics != "onnx":
                reason = f"has the numerics {module.spec.numerics!r}, but runtimes compute 'onnx'"
        elif isinstance(module, IntegerLayer) and is_integer(module):
            reason = target.reason_against_weight(module._fakequant.weight_spec, weight_levels(module))
        else:
            reason = None
        if reason is not None:
            wrong.append(f"\n  {path} {reason}")
    if wrong:
        more = f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        advice = f"Use prepare with a config that has target={target.name!r}, and train or calibrate it again."
        if not has_format:
            advice = (
                "Float formats, MX and NVFP4 run where export_onnx with target='generic' takes them. Use an integer "
                f"recipe, such as recipes.int8(target={target.name!r}), for this target."
            )
        raise ValueError(
            f"The model was not trained for the target {target.name!r}:{''.join(wrong[:5])}{more}\n{advice}"
        )


def _weight_spec_of(module: nn.Module) -> QuantSpec | None:
    return module._fakequant.weight_spec if isinstance(module, IntegerLayer) else None


def _make_grids(model: nn.Module, target: _targets.Target) -> dict[Quantizer, Grid]:
    """Returns a fixed grid for every quantizer of an activation."""
    weights = {module.weight_quantizer for module in model.modules() if isinstance(module, QuantizedLayer)}
    made = {}
    for path, quantizer in quantizers(model):
        if quantizer in weights:
            continue
        arithmetic = target.arithmetic
        if isinstance(quantizer, FakeQuantize) and quantizer.is_dynamic:
            _require_min_max(path, quantizer)
            grid = Grid(quantizer.spec, None, None, arithmetic=arithmetic, eps=quantizer.eps, path=path)
        else:
            grid = Grid(quantizer.spec, *quantizer.qparams(), arithmetic=arithmetic, path=path)
        made[quantizer] = grid
    return made


def _require_min_max(path: str, quantizer: FakeQuantize) -> None:
    """Raises ValueError if a dynamic quantizer has another range than the minimum and maximum of the tensor."""
    if type(quantizer.observer) is not Dynamic:
        raise ValueError(
            f"{path} has the dynamic observer {quantizer.observer}, and runtimes compute dynamic ranges as minimum and "
            "maximum only.\nUse observers.Dynamic(), or an observer that is not dynamic."
        )


def _replace(
    model: nn.Module, grids: dict[Quantizer, Grid], norms: dict[str, BatchNorm], target: _targets.Target
) -> dict[str, str]:
    """Replaces quantized layers by integer layers, and quantizers of activations by grids.

    Args:
        model: The copy of the prepared model.
        grids: The grids that replace quantizers.
        norms: The batch norms to fold, by the path of the layer.
        target: The runtime.

    Returns:
        Why batch norms could not be folded, by the path of the layer.
    """
    modules = list(model.named_modules())
    for _, module in modules:
        for name, quantizer in list(module._modules.items()):
            if isinstance(quantizer, Quantizer) and quantizer in grids:
                module._modules[name] = grids[quantizer]
        if isinstance(module, CallQuantizers):
            module.borrowed = {turn: grids[quantizer] for turn, quantizer in module.borrowed.items()}
    kept = {}
    for path, module in modules:
        if isinstance(module, QuantizedLayer):
            source = module._fakequant.input_grid
            input_grid = None if source is None else grids[source]
            reason = _make_integer(module, path, input_grid, norms.get(path), target)
            if reason is not None:
                kept[path] = reason
    return kept


@torch.no_grad()
def _make_integer(
    layer: ChangingLayer, path: str, input_grid: Grid | None, norm: BatchNorm | None, target: _targets.Target
) -> str | None:
    """Turns a quantized layer into an integer layer, and folds its batch norm if possible.

    Args:
        layer: The quantized layer.
        path: Its path in the model.
        input_grid: The grid of the module that computes the input, if the layer has no input quantizer.
        norm: The batch norm that follows it, or None.
        target: The runtime.

    Returns:
        Why the batch norm could not be folded. None if it was folded, or if `norm` is None.
    """
    before: Quantization = layer._fakequant
    kind, quantizer = before.kind, layer.weight_quantizer
    weight = kind.read_weight(layer).detach()
    bias = getattr(layer, kind.bias_name, None)
    layer._modules.pop("weight_quantizer", None)
    cls = before.float_class
    if parametrize.is_parametrized(layer):
        cls = cls.__bases__[0]
        del layer._modules["parametrizations"]
        layer._parameters[kind.weight_name] = nn.Parameter(weight, requires_grad=False)
    record = Integers(kind=kind, float_class=cls, path=path, input_grid=input_grid)
    attach_layer(layer, record, {})
    layer.register_buffer("bias_codes", None)
    if quantizer is None:
        return None
    spec, scale, zero_point = _scales_of(quantizer.eval(), weight)
    layer._parameters.pop(kind.weight_name, None)
    release_from_owner(layer, kind.weight_name)
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
    _set_bias(layer, bias, target)
    return reason


def _scales_of(quantizer: FakeQuantize | LearnedFakeQuantize, weight: Tensor) -> tuple[QuantSpec, Tensor, Tensor]:
    """Returns the spec, the scale and the zero point of a weight."""
    spec, shape = quantizer.spec, tuple(weight.shape)
    if spec.granularity != "token":
        quantizer(weight)  # a dynamic quantizer computes its scale now
        return spec, *quantizer.qparams()
    # One scale per whole axis is the same as one per channel if there is only one other axis. Otherwise it is the
    # same as groups as long as the axis.
    seen = tensor_functions.min_max(weight, spec)
    scale, zero_point = tensor_functions.choose_qparams(seen.min, seen.max, spec, eps=quantizer.eps)
    assert spec.axis is not None
    axis = spec.axis % len(shape)
    others = sorted((a for a in range(len(shape)) if a != axis), key=lambda a: shape[a] == 1)
    if all(shape[a] == 1 for a in others[1:]):
        return dataclasses.replace(spec, axis=others[0], group_size=None), scale.reshape(-1), zero_point.reshape(-1)
    spec = dataclasses.replace(spec, group_size=shape[axis])
    blocks = block_shape(shape, spec)
    return spec, scale.reshape(blocks), zero_point.reshape(blocks)


def _set_bias(layer: IntegerLayer, bias: Tensor | None, target: _targets.Target) -> None:
    """Stores the bias of a layer, as integers if the scale of the sums is known and otherwise as floats."""
    name = layer._fakequant.kind.bias_name
    release_from_owner(layer, name)
    if name in layer._parameters:
        layer._parameters[name] = None
    if bias is None:
        return
    if is_integer(layer):
        layer._parameters.pop(name, None)  # it is computed from the codes when it is read
        _widen(layer, min(grid.scale for grid in input_grids_of(layer)), bias.detach())
        codes = [_rounded_bias(bias.detach(), scale, target) for scale in bias_scales(layer)]
        layer.bias_codes = torch.stack(codes) if has_call_grids(layer) else codes[0]
    else:
        layer._parameters[name] = nn.Parameter(bias.detach().float(), requires_grad=False)


def _rounded_bias(bias: Tensor, scale: Tensor, target: _targets.Target) -> Tensor:
    """Returns the codes of a bias at the scale of the sums."""
    codes = bias_codes(bias, scale).to(torch.int32)
    return codes_of_float(float_of_codes(codes, scale), scale) if target.has_float_biases else codes


def _is_widened(module: nn.Module) -> bool:
    return isinstance(module, IntegerLayer) and module._fakequant.is_widened


def _widen(layer: IntegerLayer, x_scale: Tensor, bias: Tensor) -> None:
    """Increases the weight scale of channels whose bias would not fit in 32 bits.

    Only needed if the bias is so much larger than the weights that losing bits of them makes no difference.
    """
    record = layer._fakequant
    if record.kind.channel_axis != 0:
        return
    needed = widened_scale(layer.weight_scale, x_scale, bias)
    if not bool((needed > layer.weight_scale).any()):
        return
    if layer.weight_zero_point is not None:
        raise ValueError(
            f"The bias of {record.path} does not fit in 32 bits at the scale of its sums.\nUse symmetric weights."
        )
    before = layer.weight_scale.expand_as(needed)
    levels = weight_levels(layer) * (before / needed).reshape(-1, *[1] * (len(record.weight_shape) - 1))
    record.weight_spec, record.is_widened = dataclasses.replace(record.weight_spec, axis=0), True
    layer.weight_scale = needed
    set_levels(layer, levels.round())


def return_tensors(model: nn.Module) -> None:
    """Adds hooks with which a golden model returns ordinary tensors instead of tracked ones."""
    model.register_forward_pre_hook(_strip_last)
    model.register_forward_hook(_strip)


def _strip(module: nn.Module, args: Any, result: Any) -> Any:
    return stripped(result)


def _strip_last(module: nn.Module, args: Any) -> None:
    """Moves `_strip` behind hooks that were added later, so that they still see tracked tensors.

    `verify` needs this for models that are a single layer.
    """
    for number, hook in module._forward_hooks.items():
        if hook is _strip:
            module._forward_hooks.move_to_end(number)  # type: ignore[attr-defined]
            return
