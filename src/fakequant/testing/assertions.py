"""Comparisons without a tolerance, of arrays, tensors, states and models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

if TYPE_CHECKING:
    from torch import Tensor, nn


def bits(a: ArrayLike | Tensor) -> np.ndarray:
    """Returns the bits of an array or tensor as unsigned integers, after replacing every NaN by the same NaN.

    >>> bits(np.float32([1, -0.0])).tolist() == [0x3F800000, 0x80000000]
    True
    """
    a = _as_array(a)
    if a.dtype.kind in "iub":
        return a.astype(np.uint8) if a.dtype == bool else a.view(f"u{a.itemsize}")
    # The types of ml_dtypes have kind "V", but np.isnan accepts them.
    one_nan = np.full((), np.nan, a.dtype)
    return np.where(np.isnan(a), one_nan, a).view(f"u{a.itemsize}")


def assert_same_bits(expected: ArrayLike | Tensor, actual: ArrayLike | Tensor, *names: object) -> None:
    """Raises AssertionError unless both arrays have the same dtype, shape and bits.

    -0.0 differs from +0.0. NaN equals NaN, whatever its payload. The message starts with `names`. An array may be
    compared with a tensor. Strides, devices and gradients of tensors are not compared.

    >>> assert_same_bits(np.float16([0.0]), np.float16([-0.0]), "y")
    Traceback (most recent call last):
    AssertionError: y: 1 of 1 differ, first at (0,): expected 0.0 (0x0000), got -0.0 (0x8000)
    """
    expected, actual = _as_array(expected), _as_array(actual)
    if expected.dtype != actual.dtype:
        raise AssertionError(f"{_join(names)}: expected dtype {expected.dtype}, got {actual.dtype}")
    if expected.shape != actual.shape:
        raise AssertionError(f"{_join(names)}: expected shape {expected.shape}, got {actual.shape}")
    left, right = bits(expected), bits(actual)
    differ = left != right
    if differ.any():
        at = tuple(int(i) for i in np.argwhere(differ)[0])
        width = 2 + 2 * left.itemsize
        raise AssertionError(
            f"{_join(names)}: {int(differ.sum())} of {differ.size} differ, first at {at}: "
            f"expected {expected[at]} ({int(left[at]):#0{width}x}), "
            f"got {actual[at]} ({int(right[at]):#0{width}x})"
        )


def assert_same_state(
    expected: Mapping[str, Any] | nn.Module, actual: Mapping[str, Any] | nn.Module, *names: object
) -> None:
    """Raises AssertionError unless two states have the same names in the same order, and the same bits.

    A state is a mapping to arrays, tensors or None, or a module, whose `state_dict()` is compared.

    >>> assert_same_state({"scale": np.float32([1])}, {"scale": np.float32([2])}, "loaded")
    Traceback (most recent call last):
    AssertionError: loaded, scale: 1 of 1 differ, first at (0,): expected 1.0 (0x3f800000), got 2.0 (0x40000000)
    """
    expected, actual = (state if isinstance(state, Mapping) else state.state_dict() for state in (expected, actual))
    if list(expected) != list(actual):
        raise AssertionError(f"{_join(names)}: expected the names {list(expected)}, got {list(actual)}")
    for name, value in expected.items():
        found = actual[name]
        if value is None or found is None:
            if value is not found:
                raise AssertionError(f"{_join((*names, name))}: expected {value}, got {found}")
        else:
            assert_same_bits(value, found, *names, name)


def assert_same_model(expected: nn.Module, actual: nn.Module, *names: object) -> None:
    """Raises AssertionError unless two models have the same bits in parameters, their gradients, and all buffers.

    Buffers that `state_dict()` leaves out are compared too. The message starts with `names`.
    """
    assert_same_state(_tensors(expected), _tensors(actual), *names)


def _tensors(model: nn.Module) -> dict[str, Tensor | None]:
    parameters = dict(model.named_parameters())
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in parameters.items()}
    return {**dict(model.named_buffers()), **parameters, **gradients}


def _as_array(a: ArrayLike | Tensor) -> np.ndarray:
    """Returns an array, or the values of a tensor in an array of the same dtype."""
    if not hasattr(a, "detach"):
        return np.asarray(a)
    import torch

    tensor = a.detach().cpu().resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if not (name == "bfloat16" or name.startswith("float8")):
        return np.asarray(tensor.numpy())
    integers = torch.int16 if name == "bfloat16" else torch.uint8
    return np.asarray(tensor.contiguous().view(integers).numpy()).view(getattr(ml_dtypes, name))


def _join(names: tuple[object, ...]) -> str:
    return ", ".join(map(str, names)) or "arrays"
