"""LoRA on prepared models: the layer quantizes the sum of its weight and its adapters, which is what will run.

    y = operator(quantize(x), quantize(W + scaling * B @ A), bias)

PEFT replaces a layer by a tuner layer, with the layer as its child `base_layer` and the adapters as other children. It
adds `scaling * B(A(x))` to the output of the layer, which nothing computes once the adapters are merged.
`quantize_adapters` gives tuner layers another forward pass. Merging adds the same matrix to the same weight, so that no
code changes.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fakequant._util.text import listed
from fakequant.nn._frozen_weights import Keeping
from fakequant.nn._packed_weights import PackedLayer, given_weight, pack, require_packable, unpack
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._records import DerivedModule, derived_class

# The class that all tuner layers of PEFT are derived from, and the child that is not an adapter.
TUNER, BASE = "BaseTunerLayer", "base_layer"


def tuner_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the path and the module of every tuner layer of PEFT in a model."""
    for path, module in model.named_modules():
        if any(cls.__name__ == TUNER for cls in type(module).__mro__):
            yield path, module


# While a layer runs with a sum as its weight, other threads must not run it.
_LOCK = threading.RLock()


def _one_thread() -> AbstractContextManager[object]:
    return nullcontext() if torch.compiler.is_compiling() else _LOCK


class QuantizedAdapters(DerivedModule, Keeping):
    """The base of tuner layers whose adapters are part of the quantized weight."""

    if TYPE_CHECKING:  # what PEFT's class has
        base_layer: Any
        lora_A: Any
        lora_B: Any
        scaling: dict[str, float]
        active_adapters: list[str]
        disable_adapters: bool
        merged: bool

        def get_delta_weight(self, adapter: str) -> Tensor:
            """Returns the matrix that an adapter adds to the weight."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Runs the layer with the sum of its weight and the active adapters. Dropout of adapters is not applied."""
        if kwargs.get("adapter_names") is not None:
            raise ValueError(
                "`adapter_names` chooses adapters for each sample, and a quantized weight has one sum for all.\n"
                "Use `set_adapter` and one call for each adapter."
            )
        adapters = self._summed()
        if not adapters:
            return super().forward(x, *args, **kwargs)
        base = self.base_layer
        if not isinstance(base, PackedLayer):
            with _one_thread():
                return functional_call(base, {"weight": self._kept_sum(adapters)}, (x, *args), kwargs)

        def run(*args: Any, **kwargs: Any) -> Any:
            with _one_thread(), given_weight(base, self._kept_sum(adapters)):
                return base(*args, **kwargs)

        if not torch.is_grad_enabled():
            return run(x, *args, **kwargs)
        # Computed again in the backward pass: otherwise the sums of all layers would be kept, as floats.
        return checkpoint(run, x, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight, as the forward pass does. With `safe_merge` the sums must be finite.

        A weight that was held as codes becomes floats.
        """
        if safe_merge:  # which PEFT itself rounds in another way, in 16-bit floats
            names = self.active_adapters if adapter_names is None else adapter_names
            with torch.no_grad():
                total = self._sum(self.base_layer.weight, [name for name in names if name in self.lora_A])
            if not bool(total.isfinite().all()):
                raise ValueError("The sum of the weight and its adapters is not finite, so it is not merged.")
        if isinstance(self.base_layer, PackedLayer):
            unpack(self.base_layer)
        super().merge(False, adapter_names)  # type: ignore[misc]

    def _summed(self) -> list[str]:
        """Returns the names of the adapters that are part of the weight now."""
        if self.disable_adapters or self.merged:
            return []
        names = [name for name in self.active_adapters if name in self.lora_A]
        for name in names:
            _require_plain(self, name)
        return names

    def _kept_sum(self, adapters: list[str]) -> Tensor:
        base, keeper = self.base_layer, self.keeper
        if keeper is None:
            return self._sum(base.weight, adapters)
        weights = base.packed_tensors() if isinstance(base, PackedLayer) else [base.weight]
        factors = [part[name].weight for name in adapters for part in (self.lora_A, self.lora_B)]
        settings = tuple((name, self.scaling[name]) for name in adapters)
        return keeper.get((*weights, *factors), settings, lambda: self._sum(base.weight, adapters))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "keeper"}

    def _sum(self, weight: Tensor, adapters: list[str]) -> Tensor:
        # One after the other, and each sum in the dtype of the weight: the steps of PEFT's `merge`.
        for name in adapters:
            weight = (weight + self.get_delta_weight(name)).to(weight.dtype)
        return weight


def quantize_adapters(model: nn.Module, *, packed: bool = False) -> nn.Module:
    """Makes LoRA adapters part of the quantized weights of a prepared model, in place, and returns the model.

    Prepare the model first, then add adapters with PEFT, then call this function. A layer with adapters then computes
    with the quantized sum of its weight and its adapters, so that the adapters learn what will run. After training,
    `merge_and_unload` returns the prepared model with the codes that were trained, bit for bit. Merge before you
    convert or export.

    Ranges of weights follow the sums in training. Call the function again after loading other adapters for evaluation.

    Args:
        model: A prepared model with adapters: the result of `peft.get_peft_model`, or a model with `add_adapter`.
        packed: Whether layers with adapters hold their own weight as packed codes, until it is merged. The weight is
            replaced by its values on the grid, W := dequantize(quantize(W)), and the scales are frozen, so that packing
            changes no output of adapters that are still 0. 4-bit weights in groups of 32 then take 0.16 of their memory
            in float32. The sum is computed again in the backward pass.

    Raises:
        ValueError: If no quantized layer has LoRA adapters, or if adapters change more than the weight: DoRA and other
            variants, and adapters with a bias. With `packed`, if a weight cannot be held as codes.

    >>> import fakequant as fq
    >>> from peft import LoraConfig, get_peft_model
    >>> model = fq.prepare(nn.Sequential(nn.Linear(32, 8)), fq.recipes.int4_weight_only())
    >>> model = quantize_adapters(get_peft_model(model, LoraConfig(target_modules=["0"], r=2, init_lora_weights=False)))
    >>> x = torch.randn(3, 32)
    >>> before = model.eval()(x)
    >>> merged = model.merge_and_unload()
    >>> type(merged[0]).__name__, bool((merged(x) == before).all())
    ('QuantizedLinear', True)
    """
    tuners: list[tuple[str, Any]] = list(tuner_layers(model))
    found = [(path, tuner) for path, tuner in tuners if is_quantized(getattr(tuner, BASE, None))]
    if not found:
        raise ValueError(
            "No quantized layer of the model has adapters.\n"
            "Use fakequant.prepare(model, ...), then peft.get_peft_model(model, LoraConfig(...)), then this function."
        )
    for path, tuner in found:
        for name in _adapter_names(path, tuner):
            _require_plain(tuner, name, path)
    dropped = [path for path, tuner in found if any(getattr(p, "p", 0) for p in tuner.lora_dropout.values())]
    if dropped:
        warnings.warn(
            f"The dropout of adapters is not applied: {listed(dropped)}. It drops inputs of adapters, which are part "
            "of the weight here.\nUse LoraConfig(lora_dropout=0.0) to silence this.",
            UserWarning,
            stacklevel=2,
        )
    unpacked = [
        (path, tuner.base_layer)
        for path, tuner in found
        if packed and not tuner.merged and not isinstance(tuner.base_layer, PackedLayer)
    ]
    for path, layer in unpacked:
        require_packable(path, layer)
    for _, layer in unpacked:
        pack(layer)
    for _, tuner in found:
        if not isinstance(tuner, QuantizedAdapters):
            tuner.__class__ = _adapted_class(type(tuner))
        tuner.__dict__.pop("merge", None)  # that of `prepare`, which refuses
        _observe(tuner)
    return model


def is_quantized(layer: Any) -> bool:
    """Returns True for a layer whose weight is quantized."""
    return isinstance(layer, QuantizedLayer) and getattr(layer, "weight_quantizer", None) is not None


def require_merged(model: nn.Module) -> None:
    """Raises ValueError if a quantized weight has adapters that are not merged."""
    for path, tuner in tuner_layers(model):
        if isinstance(tuner, QuantizedAdapters) and tuner._summed():
            raise ValueError(
                f"The adapters of {path or 'the model'} are part of its quantized weight, but not merged into it.\n"
                "Use model = model.merge_and_unload() first. The codes stay the same."
            )


def float_adapters(model: nn.Module) -> None:
    """Undoes `quantize_adapters`."""
    for _, tuner in tuner_layers(model):
        if isinstance(tuner, QuantizedAdapters):
            tuner.__class__ = tuner._made_by[1]


def _adapted_class(cls: type[nn.Module]) -> type[QuantizedAdapters]:
    return derived_class(QuantizedAdapters, cls, f"Quantized{cls.__name__}", (_adapted_class, cls), __module__=__name__)


def _adapter_names(path: str, tuner: Any) -> list[str]:
    if not hasattr(tuner, "lora_A") or not hasattr(tuner, "get_delta_weight"):
        raise ValueError(
            f"The adapters of {path or 'the model'} ({type(tuner).__name__}) are not LoRA adapters of a linear layer "
            "or a convolution, so they cannot be part of a quantized weight.\nLeave the layer out of `target_modules`."
        )
    return list(tuner.lora_A)


def _require_plain(tuner: Any, name: str, path: str = "") -> None:
    kind = type(tuner.lora_variant[name]).__name__ if name in getattr(tuner, "lora_variant", {}) else None
    if kind is None and getattr(tuner, "lora_bias", {}).get(name):
        kind = "lora_bias=True"
    if kind is not None:
        raise ValueError(
            f"The adapter {name!r}{f' of {path}' if path else ''} is not plain LoRA ({kind}): it does more than add a "
            "matrix to the weight.\nUse LoraConfig without variants such as use_dora, and with lora_bias=False."
        )


@torch.no_grad()
def _observe(tuner: QuantizedAdapters) -> None:
    """Gives the quantizer of the weight the range of the sum, unless its scale is fixed or learned."""
    quantizer = tuner.base_layer.weight_quantizer
    was_training = quantizer.training
    quantizer.train()(tuner._sum(tuner.base_layer.weight, tuner._summed()))
    quantizer.train(was_training)
