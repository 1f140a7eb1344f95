"""Runs a folder in transformers, in a process of its own: what was imported or patched in this one has no effect.

    python -m fakequant._runtimes.transformers.running FOLDER

FOLDER has the file `task`, and gets the file `result`; both are written by `torch.save`. The process imports nothing
of fakequant but this file.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# The name of a tensor, and its dtype, shape and SHA-256.
Digests = dict[str, tuple[str, tuple[int, ...], str]]
_TASK, _RESULT = "task", "result"


class Layer(NamedTuple):
    """What transformers has made of a layer that it quantizes."""

    # The format of its tensors, and how its weight and its input are quantized, as dicts of compressed-tensors.
    format: str
    weight: dict[str, Any]
    input: dict[str, Any] | None


class Ran(NamedTuple):
    """What transformers has loaded and computed."""

    # The layers that it quantizes, by path.
    layers: dict[str, Layer]
    # Names of tensors that the model lacks or that the folder has too many, as transformers reports them.
    problems: list[str]
    # All parameters and buffers, with dequantized weights, and those that differ from the expected ones.
    digests: Digests
    differing: dict[str, Tensor]
    # The outputs for each batch, and whether a second run has returned the same bits.
    outputs: list[Any]
    repeats: bool
    # Inputs and outputs of the watched layers for each batch, by path.
    calls: list[dict[str, list[tuple[Tensor, Tensor]]]]


def run_folder(
    folder: str | os.PathLike[str],
    batches: list[tuple[tuple[Any, ...], dict[str, Any]]],
    *,
    architecture: str,
    dtype: torch.dtype,
    attention: str | None,
    expected: Digests,
    watched: Iterable[str] = (),
) -> Ran:
    """Loads a folder in transformers and runs it.

    Args:
        folder: The folder.
        batches: The arguments of each call, by position and by name.
        architecture: The name of the model's class in transformers.
        dtype: The dtype to load the model in.
        attention: The implementation of attention, as in `from_pretrained`.
        expected: The parameters and buffers that the model should have.
        watched: Paths of layers whose inputs and outputs are returned.

    Raises ValueError if transformers cannot load or run the folder.
    """
    task = {
        "folder": str(Path(folder).absolute()),
        "batches": batches,
        "architecture": architecture,
        "dtype": dtype,
        "attention": attention,
        "expected": expected,
        "watched": list(watched),
        "threads": torch.get_num_threads(),
    }
    with tempfile.TemporaryDirectory() as place:
        torch.save(task, Path(place, _TASK))
        environment = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, "-m", __name__, place]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.strip().splitlines() if line.strip()] or ["it was killed"]
            raise ValueError(f"transformers cannot load or run {folder}: {lines[-1]}")
        found = torch.load(Path(place, _RESULT), weights_only=False)
        found["layers"] = {path: Layer(*layer) for path, layer in found["layers"].items()}
        return Ran(**found)


def digest(value: Tensor) -> tuple[str, tuple[int, ...], str]:
    """Returns the dtype, the shape and the SHA-256 of a tensor.

    >>> digest(torch.ones(2))[:2]
    ('torch.float32', (2,))
    """
    flat = value.detach().cpu().contiguous().reshape(-1)
    if flat.numel() == 1:  # whose stride may be any number, also in a contiguous tensor
        flat = flat.clone(memory_format=torch.contiguous_format)
    data = flat.view(torch.uint8).numpy().data
    return str(value.dtype), tuple(value.shape), hashlib.sha256(data).hexdigest()


# --- in the other process --------------------------------------------------------------------------


def _main(place: str) -> None:
    import transformers

    task = torch.load(Path(place, _TASK), weights_only=True)
    torch.set_num_threads(task["threads"])
    cls = getattr(transformers, task["architecture"])
    options = {"attn_implementation": task["attention"]} if task["attention"] else {}
    model, info = cls.from_pretrained(task["folder"], dtype=task["dtype"], output_loading_info=True, **options)
    model.eval()
    layers = dict(_layers(model))
    outputs, calls, repeats = [], [], True
    with torch.no_grad():
        for args, kwargs in task["batches"]:
            with _watching(model, task["watched"]) as seen:
                outputs.append(output_tensors(model(*_copied(args), **_copied(kwargs))))
            calls.append(seen)
            again = output_tensors(model(*_copied(args), **_copied(kwargs)))
            repeats &= all(map(_is_same, outputs[-1].values(), again.values()))
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        digests = {name: digest(value) for name, value in named.items()}
    expected = task["expected"]
    differing = {
        name: value.detach() for name, value in named.items() if expected.get(name, digests[name]) != digests[name]
    }
    torch.save(
        {
            "layers": layers,
            "problems": [
                f"{kind.replace('_', ' ')}: {name}" for kind in _KINDS for name in sorted(map(str, info.get(kind, ())))
            ],
            "digests": digests,
            "differing": differing,
            "outputs": outputs,
            "repeats": repeats,
            "calls": calls,
        },
        Path(place, _RESULT),
    )


_KINDS = ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")


def _layers(model: nn.Module) -> Iterator[tuple[str, tuple[str, dict[str, Any], dict[str, Any] | None]]]:
    for path, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            inputs = scheme.input_activations
            weight = scheme.weights.model_dump(mode="json") if scheme.weights is not None else {}
            form = str(getattr(scheme.format, "value", scheme.format))
            yield path, (form, weight, None if inputs is None else inputs.model_dump(mode="json"))


@contextlib.contextmanager
def _watching(model: nn.Module, paths: list[str]) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def keep(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen.setdefault(path, []).append((args[0].clone(), output.clone()))

        return hook

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def output_tensors(output: Any) -> dict[str, Tensor]:
    """Returns the tensors of a model's output by name. Caches of keys and values are left out."""
    items = (
        output.items() if hasattr(output, "items") else enumerate(output if isinstance(output, tuple) else (output,))
    )
    return {str(name): value for name, value in items if isinstance(value, Tensor)}


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _copied(part) for name, part in value.items()}
    return type(value)(map(_copied, value)) if isinstance(value, (tuple, list)) else value


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and digest(a) == digest(b)


if __name__ == "__main__":
    _main(sys.argv[1])
