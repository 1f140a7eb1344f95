"""Reads folders of compressed-tensors: their config, and the tensors of each layer when they are asked for."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from fakequant._export.checkpoint_names import EXTRA
from fakequant._export.compressed_tensors.layer_tensors import Tensors, from_tensors
from fakequant._export.compressed_tensors.schemes import Scheme, spec_of
from fakequant._export.prepared_layers import StoredWeight
from fakequant._util.packages import require
from fakequant._util.text import listed, read_json, shortened

_CONFIG, _INDEX, _SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
# The tensor that a quantized layer has in any case.
_SCALE = ".weight_scale"


class Folder:
    """A folder with the safetensors files of a model and its config.

    Raises FileNotFoundError or ValueError, with the file and what to do, if the folder is not complete.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise FileNotFoundError(f"There is no folder {str(path)!r}.")
        self.config = self._json(_CONFIG)
        # The file of every tensor, by the tensor's name.
        self.files = self._files()

    def _json(self, name: str) -> dict[str, Any]:
        file = self.path / name
        if not file.is_file():
            raise FileNotFoundError(f"{self.path} has no {name}, so it is not the folder of a model.")
        try:
            found = read_json(file.read_text())
        except (ValueError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is damaged: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"{file} is damaged: it holds {shortened(repr(found))} instead of an object.")  # noqa: TRY004
        return found

    def _files(self) -> dict[str, str]:
        safetensors = require("safetensors", "safetensors", EXTRA)
        if (self.path / _INDEX).is_file():
            named = self._json(_INDEX).get("weight_map")
            if not isinstance(named, dict):
                raise ValueError(f"{self.path / _INDEX} is damaged: it has no `weight_map`.")
        else:
            named = None
        files: dict[str, str] = {}
        for name in sorted(set(map(str, named.values()))) if named is not None else [_SINGLE]:
            file = self.path / name
            if not file.is_file():
                raise FileNotFoundError(
                    f"{self.path} has no {name}{', which its index names' if named is not None else ''}.\n"
                    "Copy or download the whole folder again."
                )
            try:
                with safetensors.safe_open(file, framework="pt") as opened:
                    files |= dict.fromkeys(opened.keys(), name)
            except safetensors.SafetensorError as error:
                raise ValueError(f"{file} is damaged: {error}.\nCopy or download it again.") from error
        missing = [name for name in named or () if name not in files]
        if missing:
            raise ValueError(f"The files of {self.path} lack tensors that its index names: {listed(missing)}.")
        return files

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor."""
        safetensors = require("safetensors", "safetensors", EXTRA)
        with safetensors.safe_open(self.path / self.files[name], framework="pt") as opened:
            found: Tensor = opened.get_tensor(name)
            return found

    def tensors_of(self, layer: str) -> Tensors:
        """Returns the tensors of a layer by their names in the layer."""
        start = f"{layer}."
        names = [name for name in self.files if name.startswith(start) and "." not in name[len(start) :]]
        return {name[len(start) :]: self.tensor(name) for name in names}

    @property
    def quantization(self) -> dict[str, Any]:
        """The `quantization_config`. Raises ValueError if there is none of compressed-tensors."""
        found = self.config.get("quantization_config") or self.config.get("compression_config")
        method = found.get("quant_method") if isinstance(found, dict) else None
        if not isinstance(found, dict) or method != "compressed-tensors":
            has = "no quantization_config" if method is None else f"the quant_method {method!r}"
            raise ValueError(f"{self.path} has {has}; fakequant reads folders of compressed-tensors.")
        return found

    def layers(self) -> Iterator[str]:
        """Yields the names of the layers that are stored as codes."""
        for name in self.files:
            if name.endswith(_SCALE):
                yield name.removesuffix(_SCALE)

    def scheme(self, layer: str, *, is_linear: bool = True) -> Scheme:
        """Returns how a layer is quantized. Raises ValueError if no group of the config is for it.

        Args:
            layer: Its name.
            is_linear: Whether it is a Linear layer, for groups that name this class.
        """
        quantization = self.quantization
        groups = list((quantization.get("config_groups") or {}).values())
        ranked = [
            (rank, group)
            for group in groups
            for target in group.get("targets", ())
            if (rank := _rank(layer, target, "Linear" if is_linear else "Embedding")) is not None
        ]
        if not ranked:
            raise ValueError(f"{self.path} stores codes of {layer}, but no group of its quantization_config is for it.")
        group = min(ranked, key=lambda pair: pair[0])[1]
        try:
            inputs = group.get("input_activations")
            return Scheme(
                spec_of(group["weights"], "weight"),
                None if inputs is None else spec_of(inputs, "input"),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{layer} in {self.path}: {error}.") from error

    def weight(self, layer: str, *, is_linear: bool = True) -> tuple[StoredWeight, Scheme]:
        """Returns the codes and scales of a layer, and how it is quantized."""
        scheme = self.scheme(layer, is_linear=is_linear)
        try:
            return from_tensors(self.tensors_of(layer), scheme), scheme
        except (KeyError, RuntimeError, ValueError) as error:
            what = f"there is no {error.args[0]}" if isinstance(error, KeyError) else error
            raise ValueError(
                f"The tensors of {layer} in {self.path} do not have the format {scheme.format}: {what}."
            ) from error


def _rank(layer: str, target: str, cls: str) -> int | None:
    """Returns how closely a target names a layer: 0 by name, 1 by pattern, 2 by class, None not at all."""
    if target == layer:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target.removeprefix("re:"), layer) else None
    return 2 if target == cls else None
