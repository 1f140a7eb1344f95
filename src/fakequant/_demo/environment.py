"""Makes runs reproducible, and restores the settings of the process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Sets one thread, deterministic algorithms, float32 and a seed. Restores all settings at the end.

    One thread, because float sums depend on the number of threads.

    >>> before = torch.get_num_threads()
    >>> with reproducible(0):
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(seed)
            torch.set_num_threads(1)
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(True)
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)


def writable_folder(folder: str | os.PathLike[str]) -> Path:
    """Creates the folder if necessary and returns its path. Raises OSError if it cannot be written.

    >>> writable_folder(__file__)
    Traceback (most recent call last):
    NotADirectoryError: ...environment.py' is a file, not a folder for the results. Use another path.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{str(path)!r} is a file, not a folder for the results. Use another path.")
    trial = path / f"trial.{os.getpid()}.unfinished"
    try:
        path.mkdir(parents=True, exist_ok=True)
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise type(error)(
            f"The folder {str(path)!r} cannot be written: {error.strerror}. Use a writable folder."
        ) from error
    return path
