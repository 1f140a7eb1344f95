"""GGUF files in llama.cpp. `verify` runs them with `running.run_gguf`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from fakequant._runtimes.llama_cpp import running
from fakequant._runtimes.llama_cpp.target import RUNTIME
from fakequant._runtimes.session import Session, starts_with

# Classes of modules that compute GELU, in torch and transformers.
_GELU = ("GELU", "GELUActivation", "NewGELUActivation", "GELUTanh", "PytorchGELUTanh", "FastGELUActivation")
# Beyond it, GELU is 0 or the identity.
_END = 10.0


class LlamaCppSession(Session):
    """A file that llama.cpp loads."""

    key, name = RUNTIME.key, RUNTIME.name
    dequantizes = True
    run_tokens = staticmethod(running.run_gguf)

    @classmethod
    def opens(cls, path: str | os.PathLike[str]) -> bool:
        """Returns True for a GGUF file."""
        return starts_with(path, b"GGUF")

    @staticmethod
    @contextmanager
    def own_functions(model: nn.Module) -> Iterator[dict[str, str]]:
        """Context in which a model computes functions as llama.cpp does. Yields what these are, by path."""
        found = [(path, module) for path, module in model.named_modules() if type(module).__name__ in _GELU]
        for _, module in found:
            module.forward = partial(_gelu)
        try:
            yield dict.fromkeys((path for path, _ in found), "llama.cpp looks up GELU in a table of float16 values")
        finally:
            for _, module in found:
                del module.forward


def _gelu(x: Tensor) -> Tensor:
    """Returns ggml's GELU: of x in float16, by the formula with tanh, and rounded to float16."""
    inside = nn.functional.gelu(x.half().float(), approximate="tanh").half().to(x.dtype)
    return torch.where(x <= -_END, torch.zeros_like(x), torch.where(x >= _END, x, inside))


SESSION = LlamaCppSession
