"""How a folder of compressed-tensors says that keys and values are quantized: `kv_cache_scheme`, and two scales.

model.layers.0.self_attn.k_scale    of keys      shape (1,), or (heads, 1, 1) with one scale per head
model.layers.0.self_attn.v_scale    of values
"""

from typing import Any

from torch import Tensor, nn

from fakequant._export.checkpoint_names import PreTrainedModel
from fakequant._export.compressed_tensors.layer_tensors import in_dtype
from fakequant._export.compressed_tensors.reading import Folder
from fakequant._export.compressed_tensors.schemes import Args, args_of_cache, spec_of
from fakequant._export.loaded_grids import LoadedGrid
from fakequant._util.text import listed
from fakequant.nn._kv_cache import CACHE_QUANTIZERS, caching_modules, quantized_caches
from fakequant.nn._model_quantizers import has_scale

# The names of the scales in an attention module.
_SCALES = dict(zip(CACHE_QUANTIZERS, ("k_scale", "v_scale"), strict=True))


def cache_scheme(model: PreTrainedModel) -> Args | None:
    """Returns the `kv_cache_scheme` of a prepared model. Raises ValueError if a folder cannot have it.

    The scheme is for all attention modules.
    """
    found = quantized_caches(model)
    if not found:
        return None
    left = [path for path in caching_modules(model) if len(found.get(path, ())) < len(CACHE_QUANTIZERS)]
    specs = {quantizer.spec for quantizers in found.values() for quantizer in quantizers.values()}
    if left or len(specs) > 1:
        names = listed(left or sorted(map(str, specs)))
        what = f"{names} keeps floats" if left else f"they have the specs {names}"
        raise ValueError(
            f"Keys and values have one scheme for the whole folder in compressed-tensors, but {what}.\n"
            "Quantize the keys and values of all attention modules in the same way, or leave all in float."
        )
    return args_of_cache(specs.pop())


def cache_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the scales of keys and values, by their names in the model."""
    tensors = {}
    for path, quantizers in quantized_caches(model).items():
        for name, quantizer in quantizers.items():
            if not has_scale(quantizer):
                raise ValueError(f"{path}.{name} has no scale yet.\nCalibrate or train the model first.")
            scale = quantizer.qparams().scale
            shape = (1,) if scale.dim() == 0 else (-1, 1, 1)
            tensors[f"{path}.{_SCALES[name]}"] = in_dtype(scale.reshape(shape), model.dtype, path, _SCALES[name])
    return tensors


def stored_cache(folder: Folder, model: nn.Module) -> dict[str, LoadedGrid]:
    """Returns the grids of keys and values that a folder has, by the path of the quantizer in the prepared model."""
    scheme: dict[str, Any] | None = folder.quantization.get("kv_cache_scheme")
    if scheme is None:
        return {}
    try:
        spec = spec_of(scheme, "cache")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"The kv_cache_scheme of {folder.path}: {error}.") from error
    found = {}
    for path in caching_modules(model):
        for quantizer, scale in _SCALES.items():
            name = f"{path}.{scale}"
            if name not in folder.files:
                raise ValueError(f"{folder.path} has a kv_cache_scheme, but no {name}.")
            value = folder.tensor(name).float()
            found[f"{path}.{quantizer}"] = LoadedGrid(spec=spec, scale=value.reshape(() if spec.axis is None else -1))
    return found
