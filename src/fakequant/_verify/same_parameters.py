"""Checks that a file was exported from a model: all codes, scales, biases and float parameters must be equal."""

import os
from typing import Any, NoReturn

import numpy as np
from torch import Tensor, nn

from fakequant._convert.golden.fixed_grid import Grid
from fakequant._convert.golden.integer_layer import IntegerLayer
from fakequant._onnx.exported_modules import Stored, bias_name, part_name, stored_parts, stored_tensors
from fakequant._onnx.fingerprint import digest_of_parameters
from fakequant._onnx.stored_formats import stored_format
from fakequant._verify.runtimes.interface import Array, Runtime
from fakequant.nn._expert_product import ExpertProduct


def require_same_parameters(golden: nn.Module, runtime: Runtime, path: str | os.PathLike[str]) -> None:
    """Raises ValueError if a tensor of the file differs from that of the golden model."""
    # The results of a file that was changed openly must be equal bit by bit, whatever its tensors are called.
    if runtime.missing and runtime.is_as_written:
        _refuse(path, f"it was exported with the tensor {runtime.missing[0]}, which it does not have")
    found = not runtime.has_tensors
    for module_path, module in golden.named_modules():
        for name, value in _tensors_of(module, module_path).items() if runtime.has_tensors else ():
            there = runtime.initializer(name)
            # A tensor is absent if it is not used, or was merged with an equal one.
            if there is not None and not _same_bits(there, value):
                _refuse(path, f"{name} is different in the file")
            found |= there is not None
    if not found:
        _refuse(path, "it contains none of the model's tensors")
    if runtime.parameters is not None and runtime.parameters != digest_of_parameters(golden):
        _refuse(path, "a parameter is different in the file")


def _tensors_of(module: nn.Module, path: str) -> dict[str, Tensor]:
    """Returns the tensors of a module by their names in a file."""
    start = f"{path}." if path else ""
    found: dict[str, Tensor] = {
        f"{start}{name}": value for name, value in module._parameters.items() if value is not None
    }
    if isinstance(module, Grid):
        if module.scale is not None and module.zero_point is not None:
            found[f"{path}_scale"] = module.scale
        return found
    if isinstance(module, IntegerLayer) and module._fakequant.weight_spec is not None:
        if not module._fakequant.weight_spec.is_integer:
            stored = stored_format(module)
            # Codes are compared as values: some formats are stored in the type of another one.
            return found | {f"{start}weight_codes": stored.values(), f"{start}weight_scale": stored.scale}
        exported = stored_tensors(module, 8)
        if isinstance(module, ExpertProduct):
            return found | _parts_of(module, exported, start)
        found |= {f"{start}weight_codes": exported.codes, f"{start}weight_scale": exported.scale}
        if exported.zero_point is not None:
            found[f"{start}weight_zero_point"] = exported.zero_point
        for call, (codes, scale) in enumerate(exported.biases):
            bias = start + bias_name(module, call)
            found |= {f"{bias}_codes": codes, f"{bias}_scale": scale}
    return found


def _parts_of(product: Any, exported: Stored, start: str) -> dict[str, Tensor]:
    """Returns the tensors of a product of experts by name. A file stores them for each expert by itself."""
    found: dict[str, Tensor] = {}
    for number, part in enumerate(stored_parts(product, exported, product.owner.num_experts)):
        for tensor, values in (("weight", part.weight), ("bias", part.bias)):
            for name, value in zip(("codes", "scale", "zero_point"), values or (), strict=False):
                if isinstance(value, Tensor):
                    found[f"{start}{tensor}{part_name(number)}_{name}"] = value
    return found


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
