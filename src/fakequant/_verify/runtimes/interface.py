"""`Runtime`: what `verify` needs from a runtime, whatever its files look like."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt
from torch import nn

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


class Runtime(Protocol):
    """An exported file that is loaded in a runtime, with all optimizations."""

    # The runtime as an argument of `verify`, and in messages.
    key: str
    name: str
    # What the file says about itself: its target, and the hash of the exported parameters. None if it does not say.
    target: str | None
    parameters: str | None
    # Whether the file is unchanged since it was exported.
    is_as_written: bool
    # The kernel of each layer, by path; the layers whose kernel computes with integers; and those that compute no
    # products, such as embeddings.
    kernels: dict[str, str]
    integers: set[str]
    lookups: set[str]
    # The paths of the quantizers whose scales are computed at run time.
    dynamic_paths: set[str]
    # Why codes of quantizers cannot be read, by path. Other quantizers without codes were merged with equal ones.
    unwatched: dict[str, str]
    # Whether the runtime can output wrong codes if it outputs those of many quantizers.
    may_misread: bool
    # The layers whose float inputs the runtime rounds by default, and the setting that prevents it.
    rounded: list[str]
    exact_setting: str

    # The number of threads that runs use.
    threads: int

    # Which result of the model each output of the file is, by name. None if the file does not say.
    results: list[str] | None

    # The operators of the file that draw random numbers.
    random_operators: Sequence[str]

    # Tensors that the file had when it was exported, and has no more under that name.
    missing: Sequence[str]

    # Whether the tensors of the file can be read.
    has_tensors: bool

    def watch(self, golden: nn.Module) -> None:
        """Takes the golden model of the file, before the first run."""

    def initializer(self, name: str) -> Array | None:
        """Returns the value of a tensor in the file. None if there is no such tensor."""

    def why_float(self, layer: str) -> str | None:
        """Returns why a layer that could run in integers has a float kernel. None if that is not known."""

    def find_kernels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Sets `kernels` and `integers` for a batch like this one, if they are not known yet. `run` does so too."""

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
        """Runs the file on a batch, with and without codes as outputs."""

    def run_unwatched(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Array]:
        """Runs only the file as it is on a batch, and returns its results."""

    def read_one_by_one(self) -> bool:
        """Makes runs read the codes of one quantizer at a time. Returns False if they do so already."""

    def run_with_rounding(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Array] | None:
        """Returns the results with the rounding that `rounded` is about. None if there is none."""
