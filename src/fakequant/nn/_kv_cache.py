"""Quantizers of the keys and values that attention stores in a cache.

Attention modules of transformers pass new keys and values, as they multiply them, to the cache that they are called
with, and compute with all that it returns:

    keys, values = past_key_values.update(keys, values, layer_idx)

A prepared module is called with a `QuantizedCache` instead, which quantizes before the cache stores. It is called with
one without a cache too, as in training. So attention computes with the same quantized keys and values in any case.
"""

import inspect
from typing import Any

from torch import Tensor, nn

from fakequant.nn._function_calls import not_watched
from fakequant.nn._records import find_record

# The children that quantize keys and values.
KEY, VALUE = CACHE_QUANTIZERS = ("key_quantizer", "value_quantizer")
# The names of the argument that is the cache.
_ARGUMENTS = ("past_key_values", "layer_past")


class QuantizedCache:
    """What a prepared attention module has in place of its cache, for one call.

    `cache` is None if the module is called without one.
    """

    def __init__(self, attention: nn.Module, cache: Any) -> None:
        self._attention, self._cache = attention, cache
        # Whether keys and values have been quantized.
        self._is_updated = False

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Returns all keys and values: those that the cache has, and the new ones, which are quantized first."""
        self._is_updated = True
        with not_watched():  # the code of quantizers and caches is not the code of the attention module
            keys = self._attention.get_submodule(KEY)(keys)
            values = self._attention.get_submodule(VALUE)(values)
            return (keys, values) if self._cache is None else self._cache.update(keys, values, *args, **kwargs)

    def __len__(self) -> int:
        return 0 if self._cache is None else len(self._cache)

    def __bool__(self) -> bool:
        return True  # attention has to call `update` in any case

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also before there is a cache, in a copy
            raise AttributeError(name)
        return getattr(self._cache, name)


def place_of_cache(cls: type[nn.Module]) -> tuple[str, int] | None:
    """Returns the name and the position of the argument of attention that is the cache, or None if there is none.

    >>> place_of_cache(nn.Linear) is None
    True
    """
    for number, name in enumerate(inspect.signature(cls.forward).parameters):
        if name in _ARGUMENTS:
            return name, number - 1  # without `self`
    return None


def caching_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the attention modules of a model that take a cache, by path.

    They have the attribute `layer_idx`, their place in the cache.

    >>> caching_modules(nn.Sequential(nn.Linear(2, 2)))
    {}
    """
    found = {
        path: module
        for path, module in model.named_modules()
        if getattr(module, "layer_idx", None) is not None and place_of_cache(type(module)) is not None
    }
    return {path: module for path, module in found.items() if not any(p.startswith(f"{path}.") for p in found)}


def quantized_caches(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Returns the quantizers of keys and values that are switched on, by the path of the module and their name."""
    found = {
        path: {name: getattr(module, name) for name in CACHE_QUANTIZERS if getattr(module, name).quantizing}
        for path, module in model.named_modules()
        if has_cache_quantizers(module)
    }
    return {path: quantizers for path, quantizers in found.items() if quantizers}


def has_cache_quantizers(module: nn.Module) -> bool:
    """Returns True for an attention module whose keys and values are quantized.

    >>> has_cache_quantizers(nn.Linear(2, 2))
    False
    """
    record = find_record(module)
    return record is not None and record.cache is not None


def replace_cache(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A forward pre-hook of attention modules: replaces the cache among the arguments, or the lack of one."""
    name, number = module._fakequant.cache
    if number < len(args):
        return (*args[:number], QuantizedCache(module, args[number]), *args[number + 1 :]), kwargs
    return args, {**kwargs, name: QuantizedCache(module, kwargs.get(name))}


def require_quantized(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """A forward hook of attention modules: raises RuntimeError if keys and values have not been quantized.

    Modules that read the keys and values of another layer from the cache get quantized ones.
    """
    caches = [value for value in (*args, *kwargs.values()) if isinstance(value, QuantizedCache)]
    if not all(cache._is_updated for cache in caches) and not getattr(module, "is_kv_shared_layer", False):
        raise RuntimeError(
            f"{type(module).__name__} has not passed its keys and values to `update` of its cache, so they are not "
            "quantized.\nPrepare the model with kv_cache=None."
        )
