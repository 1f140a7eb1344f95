"""Opens an exported file and checks that it belongs to a model, so that no other file is compared or timed."""

import os

import torch
from torch import nn

from fakequant._convert.convert import conversion, convert
from fakequant._prepare.attach import link_norms
from fakequant._prepare.prepare import preparation
from fakequant._train.running import evaluating
from fakequant._verify.runtimes.interface import Runtime
from fakequant._verify.runtimes.opening import open_file
from fakequant._verify.same_parameters import require_same_parameters
from fakequant._verify.second_derivation import require_converted


@torch.no_grad()
def open_file_of(
    model: nn.Module, path: str | os.PathLike[str], runtime: str | None, threads: int = 1
) -> tuple[Runtime, nn.Module]:
    """Loads a file that was exported from a prepared model.

    Args:
        model: The prepared model.
        path: The file.
        runtime: The runtime, as in `verify`.
        threads: The number of threads, as in `open_file`.

    Returns:
        The file, and the golden model of `model` for the target of the file.

    Raises:
        ValueError: If the file does not belong to the model. See `open_file` for more.
    """
    link_norms(model)
    file = open_file(path, runtime, threads)
    golden = convert(model, target=file.target)
    folded = set(conversion(golden).folded)
    norms = {layer: norm for layer, norm in preparation(model).norms.items() if norm in folded}
    with evaluating(model):
        require_converted(model, golden, norms)
    require_same_parameters(golden, file, path)
    file.watch(golden)
    return file, golden
