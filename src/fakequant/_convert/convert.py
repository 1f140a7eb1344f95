"""`convert`: turns a prepared model into the golden model, which computes with integers."""

import copy
import dataclasses
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fakequant import _runtimes
from fakequant._backends.torch import tensor_functions
from fakequant._convert.convert_layer import make_integer
from fakequant._convert.fold_batch_norm import BatchNorm, find_norm, remove_norm
from fakequant._convert.golden.integer_layer import (
    IntegerLayer,
    is_integer,
    weight_levels,
)
from fakequant._convert.golden.quantizer import GoldenQuantizer
from fakequant._convert.golden.tracked_codes import stripped
from fakequant._prepare.attach import forget_preparation, preparation, record_of, watch_callees
from fakequant._prepare.flow_graph import can_fold
from fakequant._runtimes.target import Target
from fakequant._util.text import indented, listed
from fakequant.nn._adapters import require_merged
from fakequant.nn._call_quantizers import CallQuantizers, quantizers_in
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._input_factors import has_factors
from fakequant.nn._kv_cache import CACHE_QUANTIZERS
from fakequant.nn._model_quantizers import has_scale, named_quantizers, unreached_layers, weight_quantizers
from fakequant.nn._quantized_layer import ATTENTION_QUANTIZERS, QUANTIZERS, QuantizedLayer
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import find_record
from fakequant.nn._tensor_scale import TensorScaleFakeQuantize
from fakequant.observers import Dynamic
from fakequant.spec import QuantSpec

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

    >>> import torch, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(), example=torch.ones(1, 4))
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> convert(model)[0].weight_codes.dtype
    torch.int8
    """
    golden = converted_view(model, target=target, strict=strict)
    for parameter in golden.parameters():  # also where a module has it in a list
        parameter.data = parameter.detach().clone()
    return golden


def converted_view(model: nn.Module, *, target: str | None = None, strict: bool = False) -> nn.Module:
    """Returns what `convert` returns, but floats that stay floats share their memory with the model.

    For exporters and `verify`, which change neither model. Weights that become codes are never copied as floats.
    """
    made = preparation(model)
    require_merged(model)
    goal = _runtimes.find(made.config.target if target is None else target)
    goal.require_layers(model)
    _refuse_ggml_types(model, goal)
    versions = _versions(model)
    # `deepcopy` takes what it has copied already from this dict, so parameters are shared instead of copied.
    shared: dict[int, Any] = {id(p): _fixed(p.detach()) for p in model.parameters() if type(p) is nn.Parameter}
    copied = copy.deepcopy(model, shared).eval().requires_grad_(False)
    forget_preparation(copied)
    notes = _leave_in_float(copied, strict=strict)
    pairs = {layer: norm for layer, norm in made.norms.items() if can_fold(copied, layer, norm)}
    grids = _make_grids(copied, goal)
    norms = {layer: find_norm(copied, norm) for layer, norm in pairs.items()}
    kept = _replace(copied, grids, norms, goal)
    _share_codes(model, copied)
    folded = [norm for layer, norm in pairs.items() if layer not in kept]
    for path in folded:
        remove_norm(copied, path)
    watch_callees(copied)
    _require_target(copied, goal)
    notes += [f"{norm} stays a batch norm: {kept[layer]}" for layer, norm in pairs.items() if layer in kept]
    layers = [(path, module) for path, module in copied.named_modules() if isinstance(module, IntegerLayer)]
    notes += [f"{path}: {WIDENED}" for path, layer in layers if layer._fakequant.is_widened]
    record_of(copied).conversion = Conversion(goal.name, folded, notes)
    return_tensors(copied)
    assert versions == _versions(model), "the conversion has written to the model"
    return copied


def _share_codes(model: nn.Module, golden: nn.Module) -> None:
    """Makes layers of the golden model that have one weight in the model, and the same codes, share these too."""
    layers: dict[int, list[IntegerLayer]] = {}
    for path, layer in golden.named_modules():
        if not isinstance(layer, IntegerLayer) or layer._fakequant.weight_spec is None:
            continue
        weight = model.get_submodule(path)._parameters.get(layer._fakequant.kind.weight_name)
        if weight is None:
            continue
        same = layers.setdefault(id(weight), [])
        for other in same:
            for name in ("weight_codes", "weight_scale", "weight_zero_point"):
                own, given = layer._buffers.get(name), other._buffers.get(name)
                if own is not None and given is not None and torch.equal(own, given):
                    layer._buffers[name] = given
        same.append(layer)


def _versions(model: nn.Module) -> list[int]:
    return [p._version for p in model.parameters() if not p.is_inference()]


def _fixed(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


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


def _leave_in_float(model: nn.Module, *, strict: bool) -> list[str]:
    """Removes the quantizers that do not quantize from a copy of a prepared model, in place.

    These are quantizers that are switched off, and quantizers that no data has reached. Warns about them, or raises
    ValueError if `strict` is True.

    Returns:
        One note per removed quantizer.
    """
    _require_any(model)
    reasons = {path: "is switched off" for path, quantizer in named_quantizers(model) if not quantizer.quantizing}
    out = {model.get_submodule(path) for path in reasons}
    paths = {quantizer: path for path, quantizer in named_quantizers(model)}
    for layer in unreached_layers(model).values():
        for name in (*QUANTIZERS, *ATTENTION_QUANTIZERS):
            for quantizer in quantizers_in(layer._modules.get(name)):
                if quantizer not in out:
                    out.add(quantizer)
                    reasons[paths[quantizer]] = "has seen no data"
    of_weights = weight_quantizers(model)
    for path, quantizer in named_quantizers(model):
        if quantizer not in out and quantizer not in of_weights and not has_scale(quantizer):
            out.add(quantizer)
            reasons[path] = "has seen no data"
    for module in model.modules():
        for name, child in list(module._modules.items()):
            if child in out:
                module._modules[name] = None
        if isinstance(module, QuantizedLayer) and module._fakequant.input_grid in out:
            module._fakequant.input_grid = None
        if isinstance(module, CallQuantizers):
            module.borrowed = {turn: quantizer for turn, quantizer in module.borrowed.items() if quantizer not in out}
    notes = [f"{path} {reason}: its tensor stays in float" for path, reason in reasons.items()]
    if notes:
        shown = indented(notes)
        if strict:
            raise ValueError(f"Some tensors would not be quantized in the converted model:\n{shown}\n{_ADVICE}")
        warnings.warn(
            f"Some tensors are not quantized in the converted model, just as in the prepared model:\n{shown}\n"
            f"{_ADVICE}",
            UserWarning,
            stacklevel=4,
        )
    return notes


_ADVICE = (
    "Switch quantizers on with fakequant.nn.switch_quantizers(model, quantizing=True). Layers that are never called "
    "cannot be quantized: use config.skip(path)."
)


def _require_any(model: nn.Module) -> None:
    """Raises RuntimeError if all quantizers are switched off, or if no activation has a scale."""
    found = dict(named_quantizers(model))
    if not any(quantizer.quantizing for quantizer in found.values()):
        raise RuntimeError(
            "All quantizers of the model are switched off: the converted model would be the float model.\n"
            "Use fakequant.nn.switch_quantizers(model, quantizing=True) first."
        )
    of_weights = weight_quantizers(model)
    static = {path: q for path, q in found.items() if not q.is_dynamic and q not in of_weights}
    missing = [path for path, quantizer in static.items() if not has_scale(quantizer)]
    if missing and len(missing) == len(static):
        raise RuntimeError(
            f"The model is not calibrated: {listed(missing)} have no scale.\n"
            "Use fakequant.calibrate(model, data), or train the model, before you convert it."
        )


def _require_target(model: nn.Module, target: Target) -> None:
    """Raises ValueError if the target cannot compute with a grid of the model exactly."""
    wrong, has_format = [], True
    for path, module in model.named_modules():
        spec = module.spec if isinstance(module, GoldenQuantizer) else _weight_spec_of(module)
        if path.rpartition(".")[2] in CACHE_QUANTIZERS and not target.has_quantized_caches:
            reason: str | None = f"quantizes what a cache stores, and files of {target.name} have no place for it"
        elif isinstance(module, IntegerLayer) and has_factors(module) and not target.multiplies_inputs:
            reason = f"multiplies its input, as smooth(insert=True) does, and {target.name} cannot do so in float"
        elif spec is not None and not target.has_format(spec):
            reason = f"is {spec}, but the kernels of {target.name} compute with integers"
            has_format = False
        elif isinstance(module, GoldenQuantizer):
            reason = target.reason_against_activation(module.spec)
            if module.scale is None and not target.activations.has_dynamic_scales:
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


def _make_grids(model: nn.Module, target: Target) -> dict[Quantizer, GoldenQuantizer]:
    """Returns the golden quantizer of every activation, fixed or dynamic."""
    weights = weight_quantizers(model)
    made = {}
    for path, quantizer in named_quantizers(model):
        if quantizer in weights:
            continue
        arithmetic = target.arithmetic_of(quantizer.spec)
        if quantizer.is_own_class:
            _require_grid(path, quantizer)
        if isinstance(quantizer, TensorScaleFakeQuantize):
            raise ValueError(  # noqa: TRY004
                f"{path} has a calibrated scale for its tensor, under which block scales follow the data. Only folders "
                "of compressed-tensors have a place for it.\nUse export_compressed_tensors, or target='generic'."
            )
        if isinstance(quantizer, FakeQuantize) and quantizer.is_dynamic:
            _require_min_max(path, quantizer)
            grid = GoldenQuantizer(quantizer.spec, None, None, arithmetic=arithmetic, eps=quantizer.eps, path=path)
        else:
            grid = GoldenQuantizer(quantizer.spec, *quantizer.qparams(), arithmetic=arithmetic, path=path)
        made[quantizer] = grid
    return made


def _require_grid(path: str, quantizer: Quantizer) -> None:
    """Raises ValueError if an activation's quantizer of the user's class computes something else than runtimes do."""
    spec, name = quantizer.spec, type(quantizer).__name__
    reason = None
    if not quantizer.has_equal_steps:
        reason = "has steps that are not equal"
    elif spec.granularity != "tensor" or quantizer.is_dynamic:
        reason = f"is {spec}, and only fixed scales per tensor can be compared with what runtimes compute"
    else:
        scale, zero_point = quantizer.qparams()
        # Ends, codes, ties and values beside them, and beyond the ends.
        places = torch.arange(-8, 2 ** min(spec.bits, 10) + 8, dtype=torch.float32)[:, None]
        x = ((places + spec.qmin - zero_point + torch.tensor([-0.25, 0.0, 0.25, 0.5])) * scale).flatten()
        expected = tensor_functions.fake_quantize(x, scale, zero_point, spec)
        found = quantizer.eval()(x)
        far = (found - expected).abs() > 0.25 * scale
        if bool(far.any()):
            worst = int(far.nonzero()[0])
            reason = f"returns {float(found[worst]):g} for {float(x[worst]):g}, and runtimes {float(expected[worst]):g}"
    if reason is not None:
        raise ValueError(
            f"{path} has a quantizer of the class {name}, which {reason}.\nRuntimes compute fake_quantize(x, scale, "
            "zero_point, spec) for activations. Return that in evaluation mode, or use the class for weights."
        )


def _refuse_ggml_types(model: nn.Module, target: Target) -> None:
    """Raises ValueError for block types of ggml, which are stored from the prepared model."""
    for path, quantizer in named_quantizers(model):
        if quantizer.spec.ggml_type is not None:
            raise ValueError(
                f"{path} has a block type of ggml ({quantizer.spec}), and a converted model has none.\n"
                f"Export the prepared model: fakequant.{target.runtime.exporter}."
            )


def _require_min_max(path: str, quantizer: FakeQuantize) -> None:
    """Raises ValueError if a dynamic quantizer has another range than the minimum and maximum of the tensor."""
    if type(quantizer.observer) is not Dynamic:
        raise ValueError(
            f"{path} has the dynamic observer {quantizer.observer}, and runtimes compute dynamic ranges as minimum and "
            "maximum only.\nUse observers.Dynamic(), or an observer that is not dynamic."
        )


def _replace(
    model: nn.Module, grids: dict[Quantizer, GoldenQuantizer], norms: dict[str, BatchNorm], target: Target
) -> dict[str, str]:
    """Replaces quantized layers by integer layers, and quantizers of activations by grids.

    `norms` has the batch norms to fold, by the path of the layer.

    Returns:
        Why batch norms could not be folded, by the path of the layer.
    """
    modules = list(model.named_modules())
    for _, module in modules:
        for name, quantizer in list(module._modules.items()):
            if isinstance(quantizer, Quantizer) and quantizer in grids:
                module._modules[name] = grids[quantizer]
                grids[quantizer].is_plain = name in CACHE_QUANTIZERS
        if isinstance(module, CallQuantizers):
            module.borrowed = {turn: grids[quantizer] for turn, quantizer in module.borrowed.items()}
    kept = {}
    for path, module in modules:
        if isinstance(module, QuantizedLayer):
            source = module._fakequant.input_grid
            input_grid = None if source is None else grids[source]
            reason = make_integer(module, path, input_grid, norms.get(path), target)
            if reason is not None:
                kept[path] = reason
    return kept


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
