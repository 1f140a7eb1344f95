"""Compares results of models: their number, names and shapes, and how far their elements are apart."""

import torch
from torch import Tensor


def require_comparable(golden: list[Tensor], names: list[str], runtime: list[Tensor], noted: list[str] | None) -> None:
    """Raises ValueError if the results of a file are not of the same number, names, shapes and kinds as the model's.

    Args:
        golden: The results of the golden model.
        names: The names of these results.
        runtime: The results of the file.
        noted: Which results the outputs of the file are, by name. None if the file does not say.
    """
    if len(golden) != len(runtime):
        raise ValueError(
            f"The model returns {len(golden)} tensors and the file {len(runtime)}, so they cannot be compared.\n"
            "Export the model again."
        )
    if noted is not None and noted != names:
        raise ValueError(
            f"The model returns {', '.join(names)}, but the outputs of the file are {', '.join(noted)}, so they cannot "
            "be compared.\nExport the model again."
        )
    for number, (a, b) in enumerate(zip(golden, runtime, strict=True)):
        if a.shape != b.shape or a.is_floating_point() != b.is_floating_point():
            raise ValueError(
                f"Result {number} is {_kind(a)} in the model and {_kind(b)} in the file, so they cannot be compared.\n"
                "Export the model again."
            )


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype)[6:]} of shape {tuple(x.shape)}"


def is_same(a: Tensor, b: Tensor) -> bool:
    """Returns True if all elements are equal. NaN equals NaN."""
    if a.is_floating_point():
        return bool(((a == b) | (a.isnan() & b.isnan())).all())
    return torch.equal(a.to(b.dtype), b)


def beyond(a: Tensor, b: Tensor, tolerance: Tensor, unsteady: Tensor) -> Tensor:
    """Returns a mask of the elements that differ by more than the tolerance. Unsteady integers may differ."""
    if not a.is_floating_point():
        return (a != b) & ~unsteady
    differ = (a != b) & ~(a.isnan() & b.isnan())
    far = (a.double() - b.double()).abs()
    return differ & ~(far <= tolerance)  # also True if only one side is finite: `far` is inf or NaN


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Returns the largest difference, infinity if only one side is NaN."""
    if not a.numel():
        return 0.0
    a, b = a.double(), b.double()
    far = torch.where(a.isnan() != b.isnan(), torch.inf, (a - b).abs().nan_to_num(0, torch.inf))
    return float(torch.where(a == b, 0, far).max())
