"""Sessions: exported files in a runtime. `Session` is what `verify` and `latency` need, whatever the files look like.

`open_file` finds the session for a file, or for a folder: it asks those of all rooms.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
from torch import Tensor, nn

from fakequant._model.running import Args, Kwargs
from fakequant._runtimes import RUNTIMES, TARGETS, part
from fakequant._util.files import size_of
from fakequant.testing.timing import Contender, all_times

Array = npt.NDArray[Any]  # of any dtype that a file has


class Run(NamedTuple):
    """What a file computed from one batch."""

    # The results of the run that also outputs codes, and of the other one. Outputting codes prevents some
    # optimizations of a runtime.
    watched: list[Array]
    results: list[Array]
    # Codes by the path of the quantizer and the number of its call, which starts at 0. A file does not compute calls
    # whose results are not used.
    codes: dict[str, dict[int, Array]]
    # The scales and zero points that were computed at run time, in the same way.
    qparams: dict[str, dict[int, tuple[Array, Array]]]


class Session:
    """An exported file that is loaded in a runtime, with all optimizations. The sessions of rooms are derived from it.

    Args:
        path: The file.
        threads: The number of threads that runs use.
    """

    # The runtime as an argument of `verify`, and in messages.
    key: str
    name: str
    # Whether exporters write folders for this runtime.
    is_folder = False
    # Whether the runtime multiplies dequantized weights. Then `verify` compares weights and outputs instead of codes.
    dequantizes = False
    # Runs texts of tokens, for files that take no other inputs; see `running.py` of the room. None for all others.
    run_tokens: Callable[..., Any] | None = None
    # Whether the runtime can output wrong codes if it outputs those of many quantizers.
    may_misread = False
    # What the file says about itself: its target, and the hash of the exported parameters. None if it does not say.
    target: str | None
    parameters: str | None
    # Which result of the model each output of the file is, by name. None if the file does not say.
    results: list[str] | None
    # Whether the file is unchanged since it was exported.
    is_as_written: bool
    # Tensors that the file had when it was exported, and no longer has under that name.
    missing: Sequence[str] = ()
    # The operators of the file that draw random numbers.
    random_operators: Sequence[str] = ()
    # How to prevent the runtime from rounding the float inputs of the layers in `rounded`.
    exact_setting = ""

    def __init__(self, path: str | os.PathLike[str], threads: int) -> None:
        if not (Path(path).is_dir() if self.is_folder else Path(path).is_file()):
            raise FileNotFoundError(f"There is no {'folder' if self.is_folder else 'file'} {str(path)!r}.")
        self.path, self.threads = path, threads
        # The kernel of each layer, by path; the layers whose kernel computes with integers; and those that compute no
        # products, such as embeddings.
        self.kernels: dict[str, str] = {}
        self.integers: set[str] = set()
        self.lookups: set[str] = set()
        # Embeddings whose kernel needs the whole table as floats, at every call.
        self.whole_tables: set[str] = set()
        # The paths of the quantizers whose scales are computed at run time.
        self.dynamic_paths: set[str] = set()
        # Why codes of quantizers cannot be read, by path. Other quantizers without codes were merged with equal ones.
        self.unwatched: dict[str, str] = {}
        # The layers whose float inputs the runtime rounds by default.
        self.rounded: list[str] = []

    @classmethod
    def opens(cls, path: str | os.PathLike[str]) -> bool:
        """Returns True if `path` is a file or folder that an exporter wrote for this runtime.

        All runtimes are asked about a file, so this imports their packages only if the file has the right format.
        """
        raise NotImplementedError

    @staticmethod
    @contextmanager
    def own_functions(model: nn.Module) -> Iterator[dict[str, str]]:
        """Context in which a model computes functions as the runtime does. Yields what these are, by path."""
        yield {}

    def size(self) -> int:
        """Returns the size of the file in bytes, with all files that belong to it."""
        return size_of(self.path)

    def watch(self, golden: nn.Module) -> None:
        """Takes the golden model of the file, before the first run."""

    def tensors(self, golden: nn.Module) -> Iterator[tuple[str, Array, Tensor]] | None:
        """Yields the tensors that the golden model and the file both have: the name, the file's and the model's value.

        Returns None if the tensors of the file cannot be read.
        """
        return None

    def why_float(self, layer: str) -> str | None:
        """Returns why a layer that could run in integers has a float kernel. None if that is not known."""
        return None

    def find_kernels(self, args: Args, kwargs: Kwargs) -> None:
        """Sets `kernels` and `integers` for a batch like this one, if they are not known yet. `run` does so too."""

    def run(self, args: Args, kwargs: Kwargs) -> Run:
        """Runs the file on a batch, with and without codes as outputs."""
        raise NotImplementedError

    def run_unwatched(self, args: Args, kwargs: Kwargs) -> list[Array]:
        """Runs only the file as it is on a batch, and returns its results."""
        raise NotImplementedError

    def run_with_rounding(self, args: Args, kwargs: Kwargs) -> list[Array] | None:
        """Returns the results with the rounding that `rounded` is about. None if there is none."""
        return None

    def results_at(self, *, exact_level: bool) -> Callable[[Args, Kwargs], list[Array] | None]:
        """Returns the function that runs only the file.

        With `exact_level`, the runtime is kept from rounding the float inputs of the layers in `rounded`.
        """
        return self.run_unwatched if exact_level or not self.rounded else self.run_with_rounding

    def read_one_by_one(self) -> bool:
        """Makes runs read the codes of one quantizer at a time. Returns False if nothing changes."""
        return False

    def write_float(self, model: nn.Module, args: Args, kwargs: Kwargs, folder: Path) -> Path:
        """Writes a float model to a file like this one, for `latency`, and returns its path in `folder`."""
        raise NotImplementedError

    def times_with(
        self,
        other: Path,
        args: Args,
        kwargs: Kwargs,
        *,
        threads: int,
        seconds: float,
        exact_level: bool,
    ) -> tuple[list[float], list[float]]:
        """Runs this file and another one in turns, and returns the times of both, in seconds per call."""
        opened = type(self)(other, threads)
        contenders: dict[str, Contender] = {
            "this": partial(self.results_at(exact_level=exact_level), args, kwargs),
            "other": partial(opened.run_unwatched, args, kwargs),
        }
        times = all_times(contenders, seconds=seconds)
        return times["this"], times["other"]


def open_file(path: str | os.PathLike[str], runtime: str | None = None, threads: int = 1) -> Session:
    """Loads a file or folder in the runtime that it was written for, or in another one.

    Args:
        path: The file or folder.
        runtime: A key of `RUNTIMES`. If None, the runtime whose session opens it.
        threads: The number of threads. Some runtimes always use the threads of a pool.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the runtime is unknown, or cannot load the file.
        ImportError: If the runtime is not installed.
    """
    return session_for(path, runtime)(path, threads)


def session_for(path: str | os.PathLike[str], runtime: str | None = None) -> type[Session]:
    """Returns the session of the runtime that a file or folder was written for, or of another one."""
    if runtime is None:
        # If no session opens the file, the one of the generic target says what is wrong with it.
        runtime = next((key for key in RUNTIMES if _session(key).opens(path)), TARGETS["generic"].runtime.key)
    if not isinstance(runtime, str) or runtime not in RUNTIMES:
        raise ValueError(f"`runtime` must be one of {', '.join(RUNTIMES)}, or None, got {runtime!r}.")
    return _session(runtime)


def _session(runtime: str) -> type[Session]:
    found: type[Session] = part(RUNTIMES[runtime].room, "session").SESSION
    return found


def starts_with(path: str | os.PathLike[str], signature: bytes, offset: int = 0) -> bool:
    """Returns True if `path` is a file that has these bytes at `offset`, by which its format is known."""
    if not Path(path).is_file():
        return False
    with Path(path).open("rb") as file:
        return file.read(offset + len(signature))[offset:] == signature
