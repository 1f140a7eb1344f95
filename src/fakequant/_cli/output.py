"""stdout is for results, stderr for all else; a closed pipe does not end in a traceback."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def only_for_results() -> Iterator[None]:
    """While it lasts, what anyone prints goes to stderr, also if it is printed from C.

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
    """A copy of descriptor 1, which is that of stderr now. None: stdout is not 1, because someone captures it."""
    try:
        if sys.stdout.fileno() != 1:
            return None
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    except (AttributeError, OSError):  # closed, or not of the operating system
        return None
    return kept


def write(text: str) -> None:
    """To stdout, in what it can encode."""
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
        # A closed pipe is not an error: the exit code says the rest. Windows calls it an invalid argument.
        if error.errno not in (errno.EPIPE, errno.EINVAL):
            raise


def flush() -> None:
    """What was written before, by argparse."""
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
    """The interpreter flushes stdout once more when it ends, and must not fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
