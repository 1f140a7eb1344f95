"""Opens an exported file and checks that it belongs to a model, so that no other file is compared or timed."""

import os
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from fakequant._backends.torch.tensor_kernels import dtype_name
from fakequant._convert.convert import conversion, converted_view
from fakequant._export.notes import digest_of_parameters
from fakequant._model.running import evaluating
from fakequant._prepare.attach import link_norms, preparation
from fakequant._runtimes.session import Array, Session, open_file, session_for
from fakequant._verify.second_derivation import require_converted


def check_accuracy_level(level: object) -> None:
    """Raises ValueError unless `level` is 1, or None for the default of the runtime."""
    if level not in (None, 1):
        raise ValueError(f"`accuracy_level` must be 1, or None for the default of the runtime, got {level!r}.")


@torch.no_grad()
def open_file_of(
    model: nn.Module, path: str | os.PathLike[str], runtime: str | None, threads: int = 1
) -> tuple[Session, nn.Module]:
    """Loads a file that was exported from a prepared model.

    Returns:
        The file, and the golden model of `model` for the target of the file.

    Raises:
        ValueError: If the file does not belong to the model. See `open_file` for more.
    """
    session = session_for(path, runtime)
    if session.dequantizes:
        raise ValueError(
            f"{path} is for {session.name}, which multiplies dequantized weights and is no faster than the float "
            "model.\nMeasure the time in the engine that will run it."
        )
    link_norms(model)
    file = open_file(path, session.key, threads)
    golden = converted_view(model, target=file.target)
    folded = set(conversion(golden).folded)
    norms = {layer: norm for layer, norm in preparation(model).norms.items() if norm in folded}
    with evaluating(model):
        require_converted(model, golden, norms)
    require_same_parameters(golden, file, path)
    file.watch(golden)
    return file, golden


def require_same_parameters(golden: nn.Module, runtime: Session, path: str | os.PathLike[str]) -> None:
    """Raises ValueError if a tensor of the file differs from that of the golden model."""
    # The results of a file that was changed openly must be equal bit by bit, whatever its tensors are called.
    if runtime.missing and runtime.is_as_written:
        _refuse(path, f"it was exported with the tensor {runtime.missing[0]}, which it does not have")
    tensors = runtime.tensors(golden)
    if tensors is not None:
        is_empty = True
        for name, there, here in tensors:
            is_empty = False
            if not _same_bits(there, here):
                _refuse(path, f"{name} is different in the file")
        if is_empty:
            _refuse(path, "it contains none of the model's tensors")
    if runtime.parameters is not None and runtime.parameters != digest_of_parameters(golden):
        _refuse(path, "a parameter is different in the file")


def _same_bits(there: Array, here: Tensor) -> bool:
    array = here.detach().cpu().numpy()
    if there.size != array.size:
        return False
    there, array = there.ravel(), array.ravel()
    if array.dtype == np.float32 and there.dtype != np.float32:
        there = there.astype(np.float32)  # exact: of a type with fewer bits
    if array.dtype == np.float32 and there.dtype == np.float32:
        there, array = there.view(np.int32), array.view(np.int32)
    return np.array_equal(there, array)


def _refuse(path: str | os.PathLike[str], reason: str) -> NoReturn:
    raise ValueError(
        f"{path} does not belong to the model: {reason}.\nExport the model again, or pass the model that was exported."
    )


def require_comparable(golden: list[Tensor], names: list[str], runtime: list[Tensor], noted: list[str] | None) -> None:
    """Raises ValueError if the results of a file are not of the same number, names, shapes and kinds as the model's.

    `noted` says which results the outputs of the file are, by name. It is None if the file does not say.
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
                f"Result {number} is {kind_of(a)} in the model and {kind_of(b)} in the file, so they cannot be "
                "compared.\nExport the model again."
            )


def kind_of(x: Tensor) -> str:
    """Returns the dtype and the shape of a tensor, for messages."""
    return f"{dtype_name(x.dtype)} of shape {tuple(x.shape)}"
