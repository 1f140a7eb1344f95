"""Versions, instruction set and threads of this installation, for bug reports."""

import dataclasses
import platform
import sys
from importlib.util import find_spec

import ml_dtypes
import numpy as np

from fakequant import _native
from fakequant._torch_releases import NEWEST, OLDEST, describe, is_tested
from fakequant._util.shown import Shown


@dataclasses.dataclass(frozen=True, repr=False)
class Info(Shown):
    """The result of `info()`."""

    version: str
    # The instruction set in use, those that this CPU can run, and those that were compiled.
    target: str
    supported_targets: tuple[str, ...]
    compiled_targets: tuple[str, ...]
    num_threads: int
    python: str
    numpy: str
    ml_dtypes: str
    machine: str
    # None if not installed.
    torch: str | None

    def __str__(self) -> str:
        others = [
            t if t in self.supported_targets else f"{t} (not on this CPU)"
            for t in self.compiled_targets
            if t != self.target
        ]
        rows = {
            "fakequant": self.version,
            "target": self.target + (f"   also compiled in: {', '.join(others)}" if others else ""),
            "threads": str(self.num_threads),
            "python": f"{self.python} on {self.machine}",
            "numpy": self.numpy,
            "ml_dtypes": self.ml_dtypes,
            "torch": self.torch or "not installed",
        }
        return "\n".join(f"{name:<10} {value}" for name, value in rows.items())


def info() -> Info:
    """Returns the installed versions, the instruction set in use and the number of threads.

    >>> import fakequant
    >>> fakequant.info().target in fakequant.info().supported_targets
    True
    """
    from importlib.metadata import version  # imported here because it is slower to import than the package

    return Info(
        version=version("fakequant"),
        target=_native.target(),
        supported_targets=tuple(_native.supported_targets()),
        compiled_targets=tuple(_native.compiled_targets()),
        num_threads=_native.get_num_threads(),
        python=platform.python_version(),
        numpy=np.__version__,
        ml_dtypes=ml_dtypes.__version__,
        machine=f"{platform.system()} {platform.machine()}",
        torch=_torch(),
    )


def _torch() -> str | None:
    """Returns torch's version and the kind of autograd nodes used with it, without importing torch."""
    from importlib.metadata import PackageNotFoundError, version

    torch = sys.modules.get("torch")
    if torch is None:
        try:
            number = version("torch")
        except PackageNotFoundError:
            return None
    else:
        number = torch.__version__
    nodes = sys.modules.get("fakequant._backends.torch.compiled_nodes")
    if nodes is not None:
        compiled = nodes.compiled is not None
    else:  # not imported yet: look for a compiled module for this version
        name = f"fakequant._autograd_{number.split('+')[0].replace('.', '_')}"
        compiled = find_spec(name) is not None
    known = "" if is_tested(number) else f" (tested: {describe(OLDEST)} to {describe(NEWEST)})"
    return f"{number}{known}, autograd nodes {'compiled' if compiled else 'in Python'}"
