"""How much of a model is quantized, and how much of that a runtime computes in integers."""

from collections.abc import Container
from typing import NamedTuple

from torch import nn

from fakequant.nn._quantized_layer import QuantizedLayer


class Amount(NamedTuple):
    """A part of a model: its multiplications on the example of `prepare`, and its parameters."""

    multiplications: int
    parameters: int


def shares_in_words(everything: Amount, quantized: Amount, integer: Amount | None = None) -> str:
    """Returns the lines that open `summary`, `check`, `verify` and the report.

    Multiplications are left out if they are not known, because `prepare` had no example.

    Args:
        everything: The whole model.
        quantized: Multiplications with a quantized weight and a quantized input; parameters that are quantized.
        integer: The part of these that a runtime computes in integers. None if no runtime was asked.

    >>> print(shares_in_words(Amount(2000, 400), Amount(1900, 390), Amount(1800, 380)))
    quantized: 95.0% of 2,000 multiplications, 97.5% of 400 parameters
    in integers in this runtime: 90.0% of the multiplications, 95.0% of the parameters
    """
    parameters = f"{quantized.parameters / max(everything.parameters, 1):.1%} of {everything.parameters:,} parameters"
    number = f"{everything.multiplications:,}"
    if not everything.multiplications:
        words = parameters
    elif quantized.parameters and not quantized.multiplications:
        words = f"weights only, {parameters}; the inputs of {number} multiplications are floats"
    else:
        words = (
            f"{quantized.multiplications / everything.multiplications:.1%} of {number} multiplications, {parameters}"
        )
    return "\n".join([f"quantized: {words}", *_in_integers(everything, integer)])


def _in_integers(everything: Amount, integer: Amount | None) -> list[str]:
    if integer is None:
        return []
    words = [f"{integer.parameters / max(everything.parameters, 1):.1%} of the parameters"]
    if everything.multiplications:
        words.insert(0, f"{integer.multiplications / everything.multiplications:.1%} of the multiplications")
    return [f"in integers in this runtime: {', '.join(words)}"]


def quantized_parameters(model: nn.Module, without: Container[str] = ()) -> int:
    """Returns the number of parameters of a prepared model that are weights of quantized layers.

    A weight that several layers share counts once.

    Args:
        model: A prepared model.
        without: Paths of layers whose weights do not count, not even if another layer shares them.
    """
    sizes: dict[int, int] = {}
    left_out = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, QuantizedLayer) and module.weight_quantizer is not None:
            name = module._fakequant.kind.weight_name
            own = module._parameters.get(name)
            key = id(module if own is None else own)  # a parametrized weight is computed anew whenever it is read
            sizes[key] = getattr(module, name).numel()
            left_out |= {key} if path in without else set()
    return sum(size for key, size in sizes.items() if key not in left_out)
