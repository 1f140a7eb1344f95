"""`distill`: a loss that makes a quantized model compute what a float model does."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fakequant._backends.torch.torch_private import pytree
from fakequant._model.running import check_module
from fakequant._prepare.attach import is_prepared
from fakequant._prepare.prepare import unprepare
from fakequant._train.compared_outputs import LayerResults, matched

OUTPUTS = ("kl", "mse", None)
# The number of class scores that are compared at a time: 16 MB in float32.
_PART = 1 << 22


def distill(
    student: nn.Module,
    teacher: nn.Module | None = None,
    *,
    outputs: Literal["kl", "mse"] | None = "kl",
    temperature: float = 1.0,
    class_axis: int = -1,
    layers: Sequence[str] | Mapping[str, str] = (),
    layer_weight: float = 1.0,
) -> "Distillation":
    """Returns a loss that compares the outputs of a model with the outputs of a teacher on the same inputs.

    Add it to the loss of the task. It takes the model's output and its inputs, and runs only the teacher:

        y = model(x)
        loss = criterion(y, target) + distill(y, x)

    The teacher runs in evaluation mode and without gradients. Its mode, parameters and buffers stay as they are, and it
    is not part of the student: not of its parameters, its state, its copies or its pickles.

    The loss is the sum of

        outputs="kl"     temperature^2 * mean(sum(p * log(p / q))),  p, q = softmax(teacher or student / temperature)
        outputs="mse"    mean((student - teacher)^2)
        layers           layer_weight * mean over layers of  mean((student - teacher)^2) / mean(teacher^2)

    "kl" is for class scores before the softmax. The sum is over the classes, the mean over everything else. The loss is
    computed in float32 or float64, also under autocast. More than four million scores, as language models have, are
    compared in parts, so that only the scores themselves are kept for the backward pass.

    An output is a tensor, or an object with tensors. If it has `logits`, as in transformers, only these are compared.
    Otherwise all float tensors in its dicts, tuples, lists and dataclasses are compared.

    Args:
        student: The model that is trained. It may be wrapped for several ranks or compiled.
        teacher: The model that it should follow. If None, the float model that `student` was prepared from, as a copy
            with its present weights: call `distill` before training then. The copy moves to the device of its inputs.
        outputs: How the outputs of the models are compared. If None, they are not.
        temperature: Divides the class scores. Above 1, the small probabilities of the teacher count for more.
        class_axis: The axis of the classes.
        layers: The paths of layers whose outputs are compared too, or a dict from paths in the student to paths in the
            teacher. Create the loss before a compiled student runs for the first time.
        layer_weight: The factor of the part of the loss that compares layers.

    >>> import fakequant as fq
    >>> seed = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> x, labels = torch.randn(16, 4), torch.arange(16) % 3
    >>> model = fq.calibrate(fq.prepare(model, fq.recipes.lsq(2), example=x), [x], progress=False)
    >>> like_float = distill(model, temperature=2.0)
    >>> y = model(x)
    >>> loss = nn.functional.cross_entropy(y, labels) + like_float(y, x)
    >>> loss.backward()
    """
    check_module(student, "student")
    _check_numbers(outputs, temperature, class_axis, layer_weight)
    is_own_copy = teacher is None
    if teacher is None:
        teacher = _float_copy(_unwrapped(student))
    check_module(teacher, "teacher")
    _check_apart(_unwrapped(student), _unwrapped(teacher))
    pairs = _pairs(layers)
    for name, model, paths in (("student", student, pairs), ("teacher", teacher, pairs.values())):
        for path in paths:
            _check_path(_unwrapped(model), path, name)
    if outputs is None and not pairs:
        raise ValueError(
            "There is nothing to compare: `outputs` is None and `layers` is empty.\n"
            'Use outputs="kl" for class scores, outputs="mse" for other results, or name some layers.'
        )
    return Distillation(
        student=student,
        teacher=teacher,
        is_own_copy=is_own_copy,
        outputs=outputs,
        temperature=float(temperature),
        class_axis=class_axis,
        layers=pairs,
        layer_weight=float(layer_weight),
    )


class Distillation:
    """The loss that `distill` returns: `loss = distillation(y, *inputs)`, where `y = student(*inputs)`.

    Hooks on the layers that are compared are removed by `remove()`, and when this object is deleted.
    """

    teacher: nn.Module

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        is_own_copy: bool,
        outputs: str | None,
        temperature: float,
        class_axis: int,
        layers: dict[str, str],
        layer_weight: float,
    ) -> None:
        self._made_from = (student, teacher, is_own_copy, outputs, temperature, class_axis, layers, layer_weight)
        self.teacher = teacher
        self._is_own_copy = is_own_copy
        self.outputs = outputs
        self.temperature = temperature
        self.class_axis = class_axis
        self.layers = layers
        self.layer_weight = layer_weight
        self._of_student = LayerResults(_unwrapped(student), layers)
        self._of_teacher = LayerResults(_unwrapped(teacher), dict.fromkeys(layers.values()))

    def __call__(self, result: Any, *inputs: Any, **named_inputs: Any) -> Tensor:
        """Returns the loss, a tensor without axes.

        Args:
            result: What the student returned.
            inputs: What it was called with. The teacher is called with the same.
            named_inputs: The same, by keyword.
        """
        if not inputs and not named_inputs:
            raise TypeError("The inputs of the student are missing.\nPass them after its result: distillation(y, x).")
        # Taken before the teacher runs, so that nothing is left if it raises.
        of_student = self._of_student.take()
        if self._is_own_copy:
            _move_along(self.teacher, inputs, named_inputs)
        with torch.no_grad(), _evaluating(self.teacher):
            aim = self.teacher(*inputs, **named_inputs)
        of_teacher = self._of_teacher.take()
        parts: list[Tensor] = []
        if self.outputs is not None:
            compare = self._divergence if self.outputs == "kl" else _squared_error
            parts += [compare(y, t) for y, t in matched(result, aim, "the results of the models")]
        for path, other in self.layers.items():
            parts.append(self.layer_weight / len(self.layers) * _layer_error(path, of_student[path], of_teacher[other]))
        return torch.stack(parts).sum()

    def remove(self) -> None:
        """Removes the hooks from the layers that are compared. The loss cannot be computed any more."""
        self._of_student.remove()
        self._of_teacher.remove()

    def __reduce__(self) -> tuple[Any, ...]:
        return Distillation, self._made_from

    def _divergence(self, y: Tensor, aim: Tensor) -> Tensor:
        if not -y.dim() <= self.class_axis < y.dim() or y.shape[self.class_axis] == 1:
            raise ValueError(
                f"A result of shape {tuple(y.shape)} has no scores of several classes on axis {self.class_axis}.\n"
                'Use distill(..., outputs="mse") for results that are not class scores, or another `class_axis`.'
            )
        if self.class_axis % y.dim() == y.dim() - 1 and y.numel() > _PART:
            # A part at a time, which is computed again in the backward pass: a language model has many classes, and
            # the steps of the formula would keep several tensors as large as all scores.
            rows = max(_PART // y.shape[-1], 1)
            parts = zip(y.flatten(0, -2).split(rows), aim.flatten(0, -2).split(rows), strict=True)
            sums = torch.cat([checkpoint(self._sums, *part, -1, use_reentrant=False) for part in parts])
        else:
            sums = self._sums(y, aim, self.class_axis)
        return sums.mean() * self.temperature**2

    def _sums(self, y: Tensor, aim: Tensor, axis: int) -> Tensor:
        """Returns the divergence of every row: all scores along an axis."""
        log_p, log_q = ((x / self.temperature).log_softmax(axis) for x in (aim, y))
        # Classes that are excluded by a score of -inf add nothing, instead of 0 * (inf - inf).
        return torch.where(log_p == -math.inf, 0.0, log_p.exp() * (log_p - log_q)).sum(axis)


# --- comparing outputs ------------------------------------------------------------------------------


def _squared_error(y: Tensor, aim: Tensor) -> Tensor:
    return (y - aim).square().mean()


def _layer_error(path: str, calls: list[Any], aims: list[Any]) -> Tensor:
    """Returns the mean relative squared error of a layer over its calls and outputs."""
    if not calls:
        raise RuntimeError(
            f"The layer '{path}' of the student has not run since the last loss.\n"
            "Call the student once before each loss. If it is compiled, call `distill` before it runs for the first "
            "time: compiled code ignores hooks that are added later."
        )
    if len(calls) != len(aims):
        raise ValueError(
            f"The layer '{path}' ran {len(calls)} times in the student and {len(aims)} times in the teacher.\n"
            "Choose layers that run equally often in both."
        )
    errors = []
    for call, target in zip(calls, aims, strict=True):
        for y, aim in matched(call, target, f"the results of the layer '{path}'"):
            power = aim.square().mean()
            errors.append(_squared_error(y, aim) / torch.where(power > 0, power, 1.0))
    return torch.stack(errors).mean()


# --- models -----------------------------------------------------------------------------------------


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which the model is in evaluation mode. Restores the mode of every module."""
    training = [module for module in model.modules() if module.training]
    if training:
        model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model inside the wrappers of torch.compile and DistributedDataParallel."""
    while True:
        if isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        else:
            return model


def _float_copy(student: nn.Module) -> nn.Module:
    if not any(is_prepared(module) for module in student.modules()):
        raise ValueError(
            "The student is not prepared, so a copy of it would be its own teacher.\n"
            "Pass a teacher, or use fakequant.prepare(model, config) first."
        )
    teacher = copy.deepcopy(student)
    for module in [module for module in teacher.modules() if is_prepared(module)]:
        unprepare(module)
    return teacher.requires_grad_(False).eval()


def _move_along(teacher: nn.Module, *inputs: Any) -> None:
    """Moves a teacher to the device of its inputs: the student may have been moved after `distill`."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    held = next(chain(teacher.parameters(), teacher.buffers()), None)
    if tensors and held is not None and held.device != tensors[0].device:
        teacher.to(tensors[0].device)


def _check_numbers(outputs: Any, temperature: Any, class_axis: Any, layer_weight: Any) -> None:
    if outputs not in OUTPUTS:
        raise ValueError(f'`outputs` must be "kl" (class scores), "mse" (other results) or None, got {outputs!r}.')
    if not _is_number(temperature) or not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be a finite number > 0, got {temperature!r}.")
    if type(class_axis) is not int:
        raise TypeError(f"`class_axis` must be an int, got {class_axis!r}.")
    if not _is_number(layer_weight) or not 0 <= layer_weight < math.inf:
        raise ValueError(f"`layer_weight` must be a finite number >= 0, got {layer_weight!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_apart(student: nn.Module, teacher: nn.Module) -> None:
    of_student = dict.fromkeys(student.modules())
    shared = next((path for path, module in teacher.named_modules() if module in of_student), None)
    if shared is not None:
        what = f"share the module '{shared}'" if shared else "are the same model"
        raise ValueError(
            f"Student and teacher {what}. `prepare` changes models in place.\n"
            "Use teacher = copy.deepcopy(model) before `prepare`, or distill(student), which copies the float model."
        )


def _pairs(layers: Any) -> dict[str, str]:
    """Returns the paths of layers in the student, each with the path in the teacher."""
    if isinstance(layers, str) or not isinstance(layers, (Sequence, Mapping)):
        raise TypeError(
            "`layers` must be a list of paths, or a dict from paths in the student to paths in the teacher, got "
            f"{layers!r}."
        )
    pairs = dict(layers) if isinstance(layers, Mapping) else {path: path for path in layers}
    if not all(isinstance(path, str) for path in (*pairs, *pairs.values())):
        raise TypeError(f"Paths in `layers` must be strings such as 'encoder.layer.0', got {layers!r}.")
    return pairs


def _check_path(model: nn.Module, path: str, name: str) -> None:
    paths = [path for path, _ in model.named_modules()]
    if path not in paths:
        near = get_close_matches(path, paths, n=3)
        hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "See `named_modules()` of the model."
        raise ValueError(f"The {name} has no layer {path!r}.\n{hint}")
