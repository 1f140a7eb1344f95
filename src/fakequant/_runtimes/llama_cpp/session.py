"""GGUF files in llama.cpp. `verify` runs them with `running.run_gguf`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fakequant import presets
from fakequant._export.prepared_layers import grid_of
from fakequant._runtimes.llama_cpp import running
from fakequant._runtimes.llama_cpp.target import RUNTIME
from fakequant._runtimes.session import Session, starts_with
from fakequant.functional import quantize_dynamic
from fakequant.nn._quantized_layer import QuantizedLayer

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
        found: dict[str, str] = {}
        handles, modules = [], []
        for path, module in model.named_modules():
            if type(module).__name__ in _GELU:
                found[path] = "llama.cpp looks up GELU in a table of float16 values"
                modules.append(module)
                module.forward = _gelu
            elif isinstance(module, QuantizedLayer) and _has_rounded_sums(module):
                found[path] = "llama.cpp rounds the sums of input blocks to float16 for Q4_1"
                handles.append(module.register_forward_hook(_round_sums))
        try:
            yield found
        finally:
            for module in modules:
                del module.forward
            for handle in handles:
                handle.remove()


def _gelu(x: Tensor) -> Tensor:
    """Returns ggml's GELU: of x in float16, by the formula with tanh, and rounded to float16."""
    inside = nn.functional.gelu(x.half().float(), approximate="tanh").half().to(x.dtype)
    return torch.where(x <= -_END, torch.zeros_like(x), torch.where(x >= _END, x, inside))


def _has_rounded_sums(layer: QuantizedLayer) -> bool:
    quantizer = layer.weight_quantizer
    return quantizer is not None and quantizer.spec.ggml_type == "q4_1" and layer.input_quantizer is not None


def _round_sums(layer: Any, args: tuple[Tensor, ...], y: Tensor) -> Tensor:
    """Returns the output of a Q4_1 layer with products of offsets and sums of input blocks as ggml has them.

    The sum of a block, d * sum(codes) with d in float32, is rounded to float16.
    """
    x = args[0].float()
    codes, grid = quantize_dynamic(x, presets.q8_0_input())
    total = codes.to(torch.int32).unflatten(-1, (-1, 32)).sum(-1).float()
    d = grid.scale / 127
    rounded, exact = (d * total).half().float(), d.half().float() * total
    quantizer, weight = layer.weight_quantizer, layer._fakequant.kind.read_weight(layer)
    offset = grid_of(quantizer, weight).zero_point.half().float()
    added: Tensor = (rounded - exact) @ offset.T
    return y + added.to(y.dtype)


SESSION = LlamaCppSession
