"""Runs a GGUF file in llama.cpp, in a process of its own: what was imported or set in this one has no effect.

    python -m fakequant._runtimes.llama_cpp.running FOLDER

FOLDER has the file `task.json`, and gets `result.npz`, and `float32.gguf` if dequantized weights are asked for. The
binding is cyllama. Keys and values are kept in float32 and attention is computed without its fused kernel, which rounds
to float16: these are settings of a session, and not part of a file.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
_TASK, _RESULT, _WEIGHTS = "task.json", "result.npz", "float32.gguf"
# ggml's and llama.cpp's numbers for float32, no fused attention, and no pooling.
_FLOAT32, _NEVER, _NO_POOLING = 0, 0, 0


class Ran(NamedTuple):
    """What llama.cpp has computed."""

    # For each text, one row of logits per token; of hidden states if the model is an encoder.
    outputs: list[Floats]
    # Whether a second run has returned the same bits.
    repeats: bool
    # A file with dequantized weights, in float32. It is deleted when the context ends.
    weights: Path | None


@contextmanager
def run_gguf(
    path: str | os.PathLike[str],
    texts: Sequence[Sequence[int]],
    *,
    threads: int,
    is_encoder: bool = False,
    dequantizes: bool = False,
) -> Iterator[Ran]:
    """Loads a file in llama.cpp, runs it, and yields the results.

    Args:
        path: The file.
        texts: The tokens of each text.
        threads: The number of threads.
        is_encoder: Whether hidden states are returned instead of logits.
        dequantizes: Whether llama.cpp also writes the file with float32 weights.

    Raises ValueError if llama.cpp cannot load or run the file.
    """
    task = {
        "path": str(Path(path).absolute()),
        "texts": [list(map(int, text)) for text in texts],
        "threads": threads,
        "is_encoder": is_encoder,
        "dequantizes": dequantizes,
    }
    with tempfile.TemporaryDirectory() as place:
        Path(place, _TASK).write_text(json.dumps(task))
        command = [sys.executable, "-m", __name__, place]
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it was killed"]
            told = [line for line in lines if "error" in line.lower() or "GGML_ASSERT" in line] or lines[-1:]
            raise ValueError(f"llama.cpp cannot load or run {path}: {told[0]}")
        with np.load(Path(place, _RESULT)) as found:
            outputs = [found[f"output{number}"] for number in range(len(texts))]
            repeats = bool(found["repeats"])
        yield Ran(outputs, repeats, Path(place, _WEIGHTS) if dequantizes else None)


# --- in the other process --------------------------------------------------------------------------


def _main(place: str) -> None:
    llama_cpp = import_module("cyllama.llama.llama_cpp")  # has no types

    class Model(llama_cpp.LlamaModel):  # type: ignore[name-defined, misc]
        """A model with the attribute that contexts of cyllama 0.2.18 read."""

        @property
        def n_vocab(self) -> int:
            number: int = self.get_vocab().n_vocab
            return number

    task = json.loads(Path(place, _TASK).read_text())
    options = llama_cpp.LlamaModelParams()
    options.n_gpu_layers, options.check_tensors = 0, True
    model = Model(task["path"], options, verbose=False)
    first, second = ([_run(llama_cpp, model, text, task) for text in task["texts"]] for _ in range(2))
    repeats = all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))
    found: dict[str, Any] = {f"output{number}": output for number, output in enumerate(first)}
    np.savez(Path(place, _RESULT), **found, repeats=repeats)
    if task["dequantizes"]:
        how = llama_cpp.LlamaModelQuantizeParams()
        how.ftype, how.allow_requantize, how.nthread = _FLOAT32, True, task["threads"]
        llama_cpp.model_quantize(task["path"], str(Path(place, _WEIGHTS)), how)


def _run(llama_cpp: Any, model: Any, text: list[int], task: dict[str, Any]) -> Floats:
    options = llama_cpp.LlamaContextParams()
    options.n_ctx = options.n_batch = options.n_ubatch = max(len(text), 32)
    options.n_threads = options.n_threads_batch = task["threads"]
    options.type_k = options.type_v = _FLOAT32
    options.flash_attn_type = _NEVER
    if task["is_encoder"]:
        options.embeddings, options.pooling_type = True, _NO_POOLING
    context = llama_cpp.LlamaContext(model, options, verbose=False)
    batch = llama_cpp.LlamaBatch(n_tokens=len(text), embd=0, n_seq_max=1)
    for position, token in enumerate(text):
        batch.add(token, position, [0], True)
    context.decode(batch)
    read = context.get_embeddings_ith if task["is_encoder"] else context.get_logits_ith
    return np.array([read(number) for number in range(len(text))], np.float32)


if __name__ == "__main__":
    _main(sys.argv[1])
