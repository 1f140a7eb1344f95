"""`export_litert`: writes a model to a .tflite file for LiteRT."""

import os

from torch import Tensor, nn

from fakequant._backends.torch.torch_private import pytree
from fakequant._convert.convert import conversion, find_conversion
from fakequant._export.example import (
    converted,
    inputs_of,
    repeated,
    require_float32,
    require_suffix,
    results_of,
    without_autocast,
)
from fakequant._export.litert.file import schema
from fakequant._export.litert.program import file_of, make_graph
from fakequant._export.litert.report import LitertExport, report_of
from fakequant._model.running import Args, Batch, Kwargs, check_module
from fakequant._prepare.attach import preparation
from fakequant._runtimes.litert.running import RESOLVERS, Loaded, RuntimeFailure, arrays_of, import_runtime
from fakequant._runtimes.litert.target import TARGETS
from fakequant._util.files import writing


def export_litert(
    model: nn.Module,
    path: str | os.PathLike[str],
    example: Batch,
    *,
    dynamic_batch: bool = False,
    strict: bool = False,
) -> LitertExport:
    """Writes a prepared or converted model to a .tflite file for LiteRT. The model is not changed.

    LiteRT computes a layer in integers if its input and its result are quantized, so prepare the model for the target
    "litert". Everything else is computed in float, between operators that quantize and dequantize. Weights of integer
    layers are stored in bytes, or in 4 bits if they have no more and the scales of the input are computed at run time;
    others are stored as floats. Convolutions have the channels last. Axes are moved only where an operator needs
    another order. The signature of the file has the names of the model's inputs and results.

    Args:
        model: A prepared and calibrated model, or one that was converted for the target "litert".
        path: The file to write. It appears only when it is complete.
        example: One batch, as `prepare` takes it: a tensor, a dict of keyword arguments, or a tuple, of which only the
            arguments that `forward` requires are passed. Arguments that are no tensors are constants of the file.
        dynamic_batch: Whether the first axis of every input may have any length. If False, it has that of the example.
        strict: As in `convert`. Ignored if the model is converted already.

    Returns:
        Which operators are computed in integers, and why others are not. Print it.

    Needs `pip install "fakequant[litert]"`.

    >>> import tempfile, torch, fakequant as fq
    >>> model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(target="litert"), torch.ones(1, 4))
    >>> model = fq.calibrate(model, [torch.ones(3, 4)], progress=False)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(export_litert(model, f"{folder}/model.tflite", torch.ones(1, 4)))  # doctest: +ELLIPSIS
    8 multiplications: 100.0% in integers
    layers in integers: 1 of 1
    transposes: 0
    bytes: ... of the file, 20 of tensors at a time
    batches: the length of the example
    """
    check_module(model)
    require_suffix(path, "export_litert")
    args, kwargs = inputs_of(model, example)
    import_runtime()
    schema()
    with writing(path) as unfinished, without_autocast():
        golden = converted(model, _target_of(model), strict).eval()
        resolver = RESOLVERS[conversion(golden).target]
        require_float32(golden, args, kwargs)
        leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        names, results = results_of(golden, args, kwargs)
        graph = make_graph(golden, args, kwargs, names, has_any_batch=dynamic_batch)
        data = file_of(golden, graph, names)
        _require_running(args, kwargs, results, data, resolver)
        if dynamic_batch:
            args, kwargs = repeated((args, kwargs), len(next(x for x in leaves if x.dim())) + 1)
            _require_running(args, kwargs, results_of(golden, args, kwargs)[1], data, resolver)
        unfinished.write_bytes(data)
    return report_of(graph, len(data), has_any_batch=dynamic_batch)


def _target_of(model: nn.Module) -> str:
    """Returns the target of a model. If it is not one of LiteRT's, returns the one of the default kernels."""
    made = find_conversion(model)
    own = preparation(model).config.target if made is None else made.target
    return own if own in RESOLVERS else TARGETS[0].name


def _require_running(args: Args, kwargs: Kwargs, results: list[Tensor], data: bytes, resolver: str) -> None:
    """Raises ValueError if LiteRT cannot load or run a file, or if its results have other shapes."""
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    try:
        found = Loaded(data, "the file", resolver=resolver)(arrays_of(inputs))
    except RuntimeFailure as error:
        raise ValueError(
            f"The model cannot be exported: LiteRT cannot run the file that was made of it: {error.reason}\n"
            "Use other operations there, or leave the layer in float with config.skip(...)."
        ) from error
    shapes, expected = [tuple(y.shape) for y in found], [tuple(y.shape) for y in results]
    if shapes != expected:
        raise ValueError(
            f"The model cannot be exported: the file returns tensors of the shapes {shapes}, and the golden model of "
            f"{expected}.\nThis is a bug in fakequant. Please report it."
        )
