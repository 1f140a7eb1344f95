"""`Steps`: a product that is computed once per step of a sequence."""

import torch
from torch import Tensor

from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import Operands
from fakequant.nn._recurrent_product import RecurrentProduct


class Steps:
    """The calls of one product over the steps of a sequence. Use it in a `with` statement.

    The weight is quantized once. The inputs of all steps are observed together, as one tensor, after the last step:
    the range of a hidden state grows from step to step, so that ranges of single steps say little. A quantizer that
    observes therefore quantizes with the range of the sequences before. If it has none yet, the inputs of this
    sequence stay in float.
    """

    def __init__(self, product: RecurrentProduct) -> None:
        self._product = product
        self._operands: Operands | None = None
        self._observing: Quantizer | None = None
        self._quantizing = False
        self._seen: list[Tensor] = []
        if isinstance(product, QuantizedLayer):
            self._operands = product._fakequant.operands(product)
            quantizer = product.input_quantizer
            if isinstance(quantizer, Quantizer) and _observes(quantizer):
                self._observing, self._quantizing = quantizer, quantizer.quantizing
                if isinstance(quantizer, FakeQuantize):
                    quantizer.restore_scale()
                self._can_quantize = _has_scale(quantizer)

    def __call__(self, x: Tensor) -> Tensor:
        """Returns the product of `x`."""
        if self._observing is not None:
            self._seen.append(x.detach().flatten(0, -2))
        y: Tensor = self._product(x, self._operands)
        return y

    def __enter__(self) -> "Steps":
        if self._observing is not None:
            # Not through the switches: these are saved with the state.
            self._observing._observing = False
            self._observing._quantizing = self._quantizing and self._can_quantize
        return self

    def __exit__(self, *error: object) -> None:
        quantizer = self._observing
        if quantizer is None:
            return
        quantizer._observing, quantizer._quantizing = True, self._quantizing
        if error[0] is None and self._seen:
            with torch.no_grad():
                quantizer(torch.cat(self._seen))


def _observes(quantizer: Quantizer) -> bool:
    """Returns True if a static quantizer observes its next tensor."""
    return quantizer.observing and quantizer.training and not quantizer.frozen and not quantizer.is_dynamic


def _has_scale(quantizer: Quantizer) -> bool:
    """Returns True if a quantizer can quantize: it has observed something before, or its scale is initialized."""
    try:
        quantizer.qparams()
    except RuntimeError:
        return False
    return True
