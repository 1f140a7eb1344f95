"""Output: stdout is for results only, stderr for everything else. A closed pipe does not cause a traceback."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def only_for_results() -> Iterator[None]:
    """Redirects everything that is printed to stderr, including output from C.

    >>> with only_for_results():
    ...     print("loading")
    """
    kept = _redirect_descriptor()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


def _redirect_descriptor() -> int | None:
    """Points descriptor 1 at stderr and returns a copy of the old one.

    Returns None if stdout is not descriptor 1, because it is captured.
    """
    try:
        if sys.stdout.fileno() != 1:
            return None
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    except (AttributeError, OSError):  # closed, or without a descriptor
        return None
    return kept


def write(text: str) -> None:
    """Prints to stdout, with escapes for characters that it cannot encode."""
    if sys.stdout is None:
        return
    try:
        try:
            print(text)
        except UnicodeEncodeError:
            print(text.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding))
        sys.stdout.flush()
    except OSError as error:
        _let_go()
        # A closed pipe is not an error. Windows reports it as EINVAL.
        if error.errno not in (errno.EPIPE, errno.EINVAL):
            raise


def flush() -> None:
    """Flushes what argparse has written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _let_go()


def complain(text: str) -> None:
    with contextlib.suppress(OSError):
        if sys.stderr is not None:
            print(text.rstrip(), file=sys.stderr, flush=True)


def _let_go() -> None:
    """Points stdout at the null device, because the interpreter flushes it once more at exit and must not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
