"""`torch.ops.fakequant`: the operators that compilers, transforms and other devices use.

Every operator has a schema, a CPU kernel, kernels for GPUs (`gpu_kernels`), a formula for all other devices, a shape
rule for fake and meta tensors, a `vmap` rule that calls the kernel once, and an autograd rule. Scales have one entry
per block, see `tensor_blocks`. Autocast does not change the dtype of their arguments: the kernels compute in float32
anyway, and a scale must not be rounded.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fakequant import _kernels
from fakequant._backends.torch import formula, gpu_kernels, gradients, inductor, routes, tensor_kernels, vmap_rules
from fakequant._backends.torch.gradients import levels_of
from fakequant._backends.torch.routes import Kernels, ThreeTensors, ops, with_grid
from fakequant._backends.torch.tensor_kernels import Grid, Observed, ObserverOptions, zero_dtype
from fakequant._backends.torch.torch_annotations import Library, Operator, Results
from fakequant._backends.torch.torch_private import BelowADInplaceOrView, SingleLevelFunction, single_level_functions

_GRID = "Tensor scale, Tensor? zero_point, int qmin, int qmax, str numerics"
SCHEMAS = (
    f"fake_quantize(Tensor x, {_GRID}, bool clipped) -> Tensor",
    f"fake_quantize_masked(Tensor x, {_GRID}, bool packed) -> (Tensor y, Tensor mask)",
    "mask_backward(Tensor dy, Tensor mask, int[]? order, bool multiply) -> Tensor",
    f"fake_quantize_learned(Tensor x, {_GRID}, float? grad_factor) -> Tensor",
    f"learned_backward(Tensor dy, Tensor x, {_GRID}, float? grad_factor)"
    " -> (Tensor dx, Tensor dscale, Tensor dzero_point)",
    f"quantize(Tensor x, {_GRID}, ScalarType dtype) -> Tensor",
    f"quantize_packed(Tensor x, {_GRID}, int bits) -> Tensor",
    f"dequantize(Tensor q, {_GRID}, ScalarType dtype) -> Tensor",
    f"dequantize_packed(Tensor q, {_GRID}, SymInt[] shape, int bits, ScalarType dtype) -> Tensor",
    "min_max(Tensor x, SymInt[] blocks) -> (Tensor lo, Tensor hi, Tensor counts)",
    "choose_qparams(Tensor lo, Tensor hi, int qmin, int qmax, str numerics, bool symmetric, str scale_rule, float eps)"
    " -> (Tensor scale, Tensor zero_point)",
    "observe_fake_quantize(Tensor x, Tensor(a!) running_min, Tensor(b!) running_max, int qmin, int qmax, str numerics,"
    " bool symmetric, str scale_rule, str update, float averaging_constant, float eps, bool clipped)"
    " -> (Tensor y, Tensor mask, Tensor scale, Tensor zero_point, Tensor nonfinite)",
    # The same with the buffers of a quantizer.
    "observe_into(Tensor x, Tensor(a!) running_min, Tensor(b!) running_max, Tensor(c!) scale, Tensor(d!) zero_point,"
    " Tensor(e!) nonfinite, int qmin, int qmax, str numerics, bool symmetric, str scale_rule, str update,"
    " float averaging_constant, float eps, bool clipped) -> (Tensor y, Tensor mask)",
)
# How many tensors these operators change, after `x`.
_CHANGED = {"observe_fake_quantize": 2, "observe_into": 5}

_LIBRARY = Library("fakequant", "DEF")
for _schema in SCHEMAS:
    _LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


# --- kernels --------------------------------------------------------------------------------------


def _implementations(run: Kernels) -> dict[str, Operator]:
    """Returns the implementations of the operators by name, in terms of the functions of `run`."""

    def fake_quantize(x: Tensor, grid: Grid, clipped: bool) -> Tensor:
        return run.fake_quantize(x, grid, _kernels.MASK_NONE)[0]

    def fake_quantize_masked(x: Tensor, grid: Grid, packed: bool) -> tuple[Tensor, Tensor | None]:
        return run.fake_quantize(x, grid, _kernels.MASK_PACKED if packed else _kernels.MASK_BYTES)

    def mask_backward(dy: Tensor, mask: Tensor, order: list[int] | None, multiply: bool) -> Tensor:
        return run.mask_backward(dy, mask, None if order is None else tuple(order), multiply)

    def dequantize_packed(q: Tensor, grid: Grid, shape: list[int], bits: int, dtype: torch.dtype) -> Tensor:
        return run.dequantize_packed(q, grid, tuple(shape), bits, dtype)

    def min_max(x: Tensor, blocks: list[int]) -> ThreeTensors:
        return run.min_max(x, tuple(blocks))

    def observe_fake_quantize(x: Tensor, running_min: Tensor, running_max: Tensor, *options: Any) -> tuple[Tensor, ...]:
        result = run.observe_fake_quantize(x, running_min, running_max, ObserverOptions(*options))
        y, mask, *others = result
        return y, _some_mask(mask, x), *others

    def observe_into(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        own: Operator = getattr(run, "observe_into", partial(routes.observe_into, run))
        y, mask = own(x, *arguments[:5], ObserverOptions(*arguments[5:]))
        return y, _some_mask(mask, x)

    return {
        "fake_quantize": with_grid(fake_quantize),
        "fake_quantize_masked": with_grid(fake_quantize_masked),
        "mask_backward": mask_backward,
        "fake_quantize_learned": with_grid(partial(routes.fake_quantize_learned, run)),
        "learned_backward": with_grid(partial(routes.learned_backward, run), after=2),
        "quantize": with_grid(run.quantize),
        "quantize_packed": with_grid(run.quantize_packed),
        "dequantize": with_grid(run.dequantize),
        "dequantize_packed": with_grid(dequantize_packed),
        "min_max": min_max,
        "choose_qparams": run.choose_qparams,
        "observe_fake_quantize": observe_fake_quantize,
        "observe_into": observe_into,
    }


def _some_mask(mask: Tensor | None, x: Tensor) -> Tensor:
    return x.new_empty(0, dtype=torch.uint8) if mask is None else mask


for _name, _function in _implementations(tensor_kernels).items():
    _LIBRARY.impl(_name, _function, "CPU")
# By name. torch calls AMD's GPUs CUDA too.
ON_GPU = _implementations(gpu_kernels)
for _name, _function in ON_GPU.items():
    _LIBRARY.impl(_name, _function, "CUDA")
for _name, _function in _implementations(formula).items():
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    for _key in ("AutocastCPU", "AutocastCUDA"):
        _LIBRARY.impl(_name, torch.library.fallthrough_kernel, _key)


# --- shapes ---------------------------------------------------------------------------------------


def _bytes_for(x: Tensor, bits: int) -> Tensor:
    return x.new_empty((x.numel() * bits + 7) // 8, dtype=torch.uint8)


def _fake_masked(x: Tensor, grid: Grid, packed: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), _bytes_for(x, 1) if packed else torch.empty_like(x, dtype=torch.bool)


def _fake_mask_backward(dy: Tensor, mask: Tensor, order: list[int] | None, multiply: bool) -> Tensor:
    return tensor_kernels.empty_gradient(dy, mask, None if order is None else tuple(order))


def _fake_learned_backward(dy: Tensor, x: Tensor, grid: Grid, grad_factor: float | None) -> ThreeTensors:
    assert isinstance(grid.scale, Tensor)
    return torch.empty_like(x), grid.scale.new_empty(grid.scale.shape), grid.scale.new_empty(grid.scale.shape)


def _fake_min_max(x: Tensor, blocks: list[int]) -> ThreeTensors:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    counts = x.new_empty((3, *blocks), dtype=torch.int64)
    return x.new_empty(blocks, dtype=dtype), x.new_empty(blocks, dtype=dtype), counts


def _fake_observe(x: Tensor, running_min: Tensor, running_max: Tensor, *options: Any) -> tuple[Tensor, ...]:
    mask = _bytes_for(x, 1) if ObserverOptions(*options).clipped else x.new_empty(0, dtype=torch.uint8)
    scale = x.new_empty(running_min.shape, dtype=torch.float32)
    zero_point = x.new_empty(running_min.shape, dtype=zero_dtype(ObserverOptions(*options).scale_rule))
    return torch.empty_like(x), mask, scale, zero_point, x.new_empty((), dtype=torch.int64)


def _fake_observe_into(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    is_clipped = ObserverOptions(*arguments[5:]).clipped
    return torch.empty_like(x), _bytes_for(x, 1) if is_clipped else x.new_empty(0, dtype=torch.uint8)


_FAKE: dict[str, Operator] = {
    "fake_quantize": lambda x, *_: torch.empty_like(x),
    "fake_quantize_masked": with_grid(_fake_masked),
    "mask_backward": _fake_mask_backward,
    "fake_quantize_learned": lambda x, *_: torch.empty_like(x),
    "learned_backward": with_grid(_fake_learned_backward, after=2),
    "quantize": with_grid(lambda x, grid, dtype: torch.empty_like(x, dtype=dtype)),
    "quantize_packed": with_grid(lambda x, grid, bits: _bytes_for(x, bits)),
    "dequantize": with_grid(lambda q, grid, dtype: torch.empty_like(q, dtype=dtype)),
    "dequantize_packed": with_grid(lambda q, grid, shape, bits, dtype: q.new_empty(shape, dtype=dtype)),
    "min_max": _fake_min_max,
    "choose_qparams": lambda lo, hi, *options: (
        lo.new_empty(lo.shape, dtype=torch.float32),
        lo.new_empty(lo.shape, dtype=zero_dtype(options[-2])),
    ),
    "observe_fake_quantize": _fake_observe,
    "observe_into": _fake_observe_into,
}
_DECOMPOSITIONS = inductor.decompositions(_implementations(formula))


def _fake_and_decomposed(fake: Operator) -> Operator:
    """Returns a shape rule that also gives Inductor the decompositions.

    Compilers call shape rules before they lower a graph, which is when Inductor needs the decompositions.
    """

    def run(*args: Any) -> Results:
        inductor.offer(_DECOMPOSITIONS)
        return fake(*args)

    return run


for _name, _function in _FAKE.items():
    torch.library.register_fake(f"fakequant::{_name}", _fake_and_decomposed(_function), lib=_LIBRARY)


# --- derivatives ----------------------------------------------------------------------------------


def _apply(function: type[SingleLevelFunction], *args: Any) -> Results:
    """Applies an autograd function. The dispatcher has already split nested transforms into single levels."""
    with single_level_functions():
        return function.apply(*args)


def _straight_through(x: Tensor, grid: Grid, mask_kind: int) -> Results:
    """Returns y and its mask. The gradient is clipped if there is a mask."""
    gradients.refuse_gradient("fake_quantize", scale=grid.scale, zero_point=grid.zero_point)

    def run(x: Tensor) -> tuple[Tensor, Tensor | None]:
        return routes.dispatched_fake_quantize(x, grid, mask_kind)

    is_clipped = mask_kind != _kernels.MASK_NONE
    return _apply(gradients.StraightThrough, x, run, is_clipped, gradients.multiplies(grid.numerics))


def _autograd_fake_quantize(x: Tensor, grid: Grid, clipped: bool) -> Results:
    if gradients.is_differentiating(x, grid.scale, grid.zero_point):
        return _straight_through(x, grid, _kernels.MASK_PACKED if clipped else _kernels.MASK_NONE)[0]
    return routes.below_autograd(ops.fake_quantize, x, *grid, clipped)


def _autograd_fake_quantize_masked(x: Tensor, grid: Grid, packed: bool) -> Results:
    if gradients.is_differentiating(x, grid.scale, grid.zero_point):
        return _straight_through(x, grid, _kernels.MASK_PACKED if packed else _kernels.MASK_BYTES)
    return routes.below_autograd(ops.fake_quantize_masked, x, *grid, packed)


def _autograd_mask_backward(dy: Tensor, mask: Tensor, order: list[int] | None, multiply: bool) -> Results:
    if gradients.is_differentiating(dy):
        return _apply(gradients.Masked, dy, mask, order, multiply, routes.dispatched_mask_backward)
    return routes.below_autograd(ops.mask_backward, dy, mask, order, multiply)


def _autograd_learned(x: Tensor, grid: Grid, grad_factor: float | None) -> Results:
    scale, zero_point = grid.scale, grid.zero_point
    if gradients.is_differentiating(x, scale, zero_point):
        run = routes.dispatched_learned
        return _apply(gradients.Learned, x, scale, zero_point, levels_of(grid), grad_factor, run)
    return routes.below_autograd(ops.fake_quantize_learned, x, *grid, grad_factor)


def _autograd_learned_backward(dy: Tensor, x: Tensor, grid: Grid, grad_factor: float | None) -> Results:
    scale, zero_point = grid.scale, grid.zero_point
    if gradients.is_differentiating(dy, x, scale, zero_point):
        run = routes.dispatched_learned_backward
        return _apply(gradients.LearnedGradient, dy, x, scale, zero_point, levels_of(grid), grad_factor, run)
    return routes.below_autograd(ops.learned_backward, dy, x, *grid, grad_factor)


def _autograd_observe(x: Tensor, running_min: Tensor, running_max: Tensor, *rest: Any) -> Results:
    if gradients.is_differentiating(x):
        options = ObserverOptions(*rest)

        def run(x: Tensor) -> Observed:
            return routes.dispatched_observe(x, running_min, running_max, options)

        return _apply(gradients.StraightThrough, x, run, options.clipped, gradients.multiplies(options.numerics))
    return routes.below_autograd(ops.observe_fake_quantize, x, running_min, running_max, *rest)


def _autograd_observe_into(x: Tensor, *arguments: Any) -> Results:
    if gradients.is_differentiating(x):
        state, options = arguments[:5], ObserverOptions(*arguments[5:])

        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            return routes.dispatched_observe_into(x, state, options)

        return _apply(gradients.StraightThrough, x, run, options.clipped, gradients.multiplies(options.numerics))
    return routes.below_autograd(ops.observe_into, x, *arguments)


def _constant(name: str, has_grid: bool) -> Operator:
    """Returns the autograd rule of an operator without a derivative, for codes and ranges."""
    operator = getattr(ops, name).default

    def run(*args: Any) -> Results:
        if has_grid:
            gradients.refuse_gradient(name, scale=args[1], zero_point=args[2])
        return routes.below_autograd(operator, *args)

    return run


_AUTOGRAD: dict[str, Operator] = {
    "fake_quantize": with_grid(_autograd_fake_quantize),
    "fake_quantize_masked": with_grid(_autograd_fake_quantize_masked),
    "mask_backward": _autograd_mask_backward,
    "fake_quantize_learned": with_grid(_autograd_learned),
    "learned_backward": with_grid(_autograd_learned_backward, after=2),
    "observe_fake_quantize": _autograd_observe,
    "observe_into": _autograd_observe_into,
    "quantize": _constant("quantize", has_grid=True),
    "quantize_packed": _constant("quantize_packed", has_grid=True),
    "dequantize": _constant("dequantize", has_grid=True),
    "dequantize_packed": _constant("dequantize_packed", has_grid=True),
    "min_max": _constant("min_max", has_grid=False),
    "choose_qparams": _constant("choose_qparams", has_grid=False),
}
for _name, _function in _AUTOGRAD.items():
    _LIBRARY.impl(_name, _function, "Autograd")


def _counting_changes(name: str, number: int) -> Operator:
    def run(x: Tensor, *arguments: Any) -> Results:
        routes.count_changes(*arguments[:number])
        with BelowADInplaceOrView():
            return getattr(ops, name)(x, *arguments)

    return run


for _name, _number in _CHANGED.items():
    _LIBRARY.impl(_name, _counting_changes(_name, _number), "ADInplaceOrView")


def add(schema: str, fake: Operator) -> Callable[[Operator], Operator]:
    """Returns a decorator that defines one more operator, for all devices and without a derivative."""
    name = schema.split("(")[0]

    def decorate(function: Operator) -> Operator:
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fakequant::{name}", fake, lib=_LIBRARY)
        operator: Operator = getattr(ops, name).default
        return operator

    return decorate


_LIBRARY.define("checked_scale(Tensor scale, Tensor? zero_point, int qmin, int qmax) -> Tensor")
_LIBRARY.impl("checked_scale", tensor_kernels.checked_scale, "CPU")
torch.library.register_fake("fakequant::checked_scale", lambda scale, *_: scale.new_empty(scale.shape), lib=_LIBRARY)

for _name, _function in vmap_rules.RULES.items():
    torch.library.register_vmap(f"fakequant::{_name}", _function, lib=_LIBRARY)
