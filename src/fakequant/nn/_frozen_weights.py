"""`frozen_weights`: a context in which evaluation quantizes every weight once instead of in every call."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fakequant._backends.torch.plain_memory import has_no_modes


class Keeper:
    """Keeps the last result of a computation, for as long as the tensors that it was computed from are the same.

    It belongs to one `frozen_weights` context or to several that overlap, and is never copied or saved.
    """

    def __init__(self) -> None:
        # How many contexts are open.
        self.depth = 0
        self._last: _Kept | None = None

    def get(self, sources: Sequence[Tensor], settings: tuple[Any, ...], compute: Callable[[], Tensor]) -> Tensor:
        """Returns the result of `compute`, which depends on the tensors in `sources` and on `settings` alone."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not all(map(_has_version, sources)):
            return compute()
        if not has_no_modes():  # these may see or change what is computed
            return compute()
        last = self._last  # read once: another thread may replace it
        if last is not None and last.is_of(sources, settings):
            return last.result
        self._last = None  # before computing, so that two results never take memory at the same time
        result = compute()
        if type(result) is Tensor:
            self._last = _Kept(sources, settings, result)
        return result

    def forget(self) -> None:
        """Drops the result."""
        self._last = None


# Several threads may open contexts of one model.
_OPENING = threading.Lock()


class Keeping:
    """The base of what has a `Keeper` within `frozen_weights`. Its `__getstate__` must leave it out."""

    keeper: Keeper | None = None


class _Kept:
    """A result, and what tells whether it is outdated."""

    def __init__(self, sources: Sequence[Tensor], settings: tuple[Any, ...], result: Tensor) -> None:
        # Aliases keep the memory of the sources alive, so that no other tensor can have the same address.
        self.aliases = [source.detach() for source in sources]
        self.versions = [source._version for source in sources]
        self.settings, self.result = settings, result

    def is_of(self, sources: Sequence[Tensor], settings: tuple[Any, ...]) -> bool:
        """Returns True if the result was computed from these tensors, and none of them has been written to since."""
        return (
            settings == self.settings
            and len(sources) == len(self.aliases)
            and all(map(_is_same, sources, self.aliases, self.versions))
        )


def _has_version(source: Tensor) -> bool:
    return type(source) in (Tensor, nn.Parameter) and not source.is_inference()


def _is_same(source: Tensor, alias: Tensor, version: int) -> bool:
    return (
        source._version == version
        and source.data_ptr() == alias.data_ptr()
        and source.dtype is alias.dtype
        and source.shape == alias.shape
        and source.stride() == alias.stride()
    )


@contextmanager
def frozen_weights(model: nn.Module) -> Iterator[None]:
    """A context in which the weights of a prepared model do not change, so that evaluation quantizes each only once.

    Evaluation quantizes every weight in every call. A language model that generates text is called for every token, and
    then quantizing takes most of the time. Within this context, each layer keeps its quantized weight: one more
    copy of the weights in float, until the context ends. Results have the same bits as without the context.

    Training, calls with gradients, `torch.compile` and transforms of `torch.func` quantize as usual. Optimizer steps,
    `load_state_dict`, `model.to(...)` and other changes are noticed, and the weight is quantized again. Only writes
    through `.data`, such as `weight.data.copy_(x)`, cannot be noticed, as autograd does not notice them either: make
    them outside of the context.

    Args:
        model: A prepared model, or a module that contains prepared layers.

    >>> import fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(32, 8)), fq.recipes.int4_weight_only()).eval()
    >>> x = torch.ones(1, 32)
    >>> with torch.no_grad(), frozen_weights(model):      # of a language model: model.generate(...)
    ...     outputs = [model(x) for _ in range(3)]
    >>> bool((outputs[2] == model(x)).all())
    True
    """
    parts: list[Any] = [part for module in model.modules() for part in (module, module.__dict__.get("_fakequant"))]
    keeping = [part for part in parts if isinstance(part, Keeping)]
    keepers: list[Keeper] = []
    with _OPENING:
        for part in keeping:
            part.keeper = part.keeper or Keeper()
            part.keeper.depth += 1
            keepers.append(part.keeper)

    def forget(*_: Any) -> None:
        for keeper in keepers:
            keeper.forget()

    handle = register_optimizer_step_post_hook(forget)  # fused optimizers do not raise versions
    try:
        yield
    finally:
        handle.remove()
        with _OPENING:
            for part, keeper in zip(keeping, keepers, strict=True):
                keeper.depth -= 1
                if not keeper.depth:
                    part.keeper = None
