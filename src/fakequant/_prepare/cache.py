"""Which attention modules get quantizers for the keys and values that they store in a cache."""

import dataclasses

from torch import nn

from fakequant import _runtimes
from fakequant._backends.torch.tensor_kernels import dtype_name
from fakequant._prepare.plan import check_free
from fakequant.config import QuantConfig
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._kv_cache import CACHE_QUANTIZERS, caching_modules
from fakequant.observers import Dynamic, MovingAverage
from fakequant.spec import QuantSpec

# The axis of the heads: keys and values have the shape (batch, heads, tokens, features).
HEADS = 1


def plan_cache(model: nn.Module, config: QuantConfig) -> dict[str, dict[str, FakeQuantize]]:
    """Returns new quantizers for attention modules, by path and name. Raises ValueError if there can be none."""
    if config.kv_cache is None:
        return {}
    modules = {path: module for path, module in caching_modules(model).items() if not _is_skipped(path, module, config)}
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            "`kv_cache` is for decoders: this model has an encoder too, whose keys and values it caches in another "
            "way.\nUse kv_cache=None."
        )
    if not modules:
        raise ValueError(
            "`kv_cache` is set, but no module of the model takes a cache: an attention module of transformers has the "
            "attribute `layer_idx` and the argument `past_key_values`.\nUse kv_cache=None."
        )
    for module in modules.values():
        check_free(module, CACHE_QUANTIZERS)
    return {
        path: {name: _make(path, name, module, config) for name in CACHE_QUANTIZERS} for path, module in modules.items()
    }


def _is_skipped(path: str, module: nn.Module, config: QuantConfig) -> bool:
    use, number = config.find(path, module)
    return use is None and number is not None


def _make(path: str, name: str, module: nn.Module, config: QuantConfig) -> FakeQuantize:
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    dtype = "float32" if parameter is None else dtype_name(parameter.dtype)
    spec = _fitted(config, dtype)
    features = getattr(module, "head_dim", None)
    if isinstance(features, int) and spec.granularity == "group" and features % (spec.group_size or 1):
        raise ValueError(f"{path} has {features} features per head, which groups of {spec.group_size} do not divide.")
    follows_data = spec.granularity in ("token", "group")
    shape: tuple[int | None, ...] = (None, None, None, None)
    if spec.granularity == "channel":
        shape = (None, _number_of_heads(path, module), None, None)
    made = FakeQuantize(
        spec,
        Dynamic() if follows_data else MovingAverage(),
        shape=None if follows_data else shape,
        path=f"{path}.{name}" if path else name,
        device=None if parameter is None else parameter.device,
    )
    return made.train(module.training)


def _fitted(config: QuantConfig, dtype: str) -> QuantSpec:
    """Returns the spec adapted to the target. Raises ValueError if keys and values cannot have it."""
    assert config.kv_cache is not None
    target, spec = _runtimes.find(config.target), config.kv_cache
    # Negative axes count from the last one, so that specs are equal if they mean the same.
    if spec.axis is not None and spec.axis < 0 and spec.granularity == "channel":
        spec = dataclasses.replace(spec, axis=4 + spec.axis)
    reason = reason_against(spec)
    if not target.has_quantized_caches:
        reason = f"files of {target.name} have no place for it"
    if reason is None and target.engine is not None:
        reason = target.engine.reason_against_cache(spec)
    if reason is not None:
        raise ValueError(f"`kv_cache` cannot be {spec} with target={target.name!r}: {reason}.")
    return target.fit_activation(spec) if target.engine is None else target.engine.with_scales_in(spec, dtype)


def reason_against(spec: QuantSpec) -> str | None:
    """Returns why keys and values cannot have a spec, or None if they can.

    >>> reason_against(QuantSpec(axis=HEADS)), reason_against(QuantSpec().per_token())
    (None, None)
    """
    if spec.scale_format == "e4m3fn":
        return "its scales depend on the whole tensor, so a token would change when others follow"
    is_along_features = spec.axis in (-1, 3) and spec.group_rows is None
    if spec.granularity == "tensor" or (spec.granularity == "channel" and spec.axis == HEADS):
        return None
    if spec.granularity in ("token", "group") and is_along_features:
        return None
    return (
        "keys and values have the shape (batch, heads, tokens, features), and one scale per tensor, per head (axis=1), "
        "per token (spec.per_token()) or per group of features (axis=-1, group_size=32)"
    )


def _number_of_heads(path: str, module: nn.Module) -> int:
    config = getattr(module, "config", None)
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1  # Falcon and GPT-BigCode: one head of keys and values for all queries
    for name in ("num_key_value_heads", "num_attention_heads"):
        number = getattr(config, name, None)
        if isinstance(number, int):
            return number
    raise ValueError(
        f"{path} has no config with the number of its heads, which one scale per head needs.\n"
        "Use one scale per tensor or per token."
    )
