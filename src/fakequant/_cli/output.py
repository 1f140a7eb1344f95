"""Output: stdout is for results only, stderr for everything else, and errors are one line: what is wrong; what to do.

A closed pipe does not cause a traceback.
"""

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import fakequant
from fakequant._runtimes import RUNTIMES

# The maximum length of a message.
LONGEST = 600
PACKAGE = str(Path(fakequant.__file__).parent)
# The extras that install packages, by import name.
EXTRAS = {
    "torch": "torch",
    "tqdm": "torch",
    "onnx": "onnx",
    "onnxscript": "onnx",
    "safetensors": "onnx",
    "matplotlib": "report",
    "jinja2": "report",
    "sklearn": "demo",
    **{runtime.package: runtime.extra for runtime in RUNTIMES.values()},
}
# The verbs with which the fix in an error message may begin.
_FIRST_VERB = r"^(Use|Pass|Export|Give|Make|Move|Install|Create|Remove|Run|Call)\b"


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


def shows_progress() -> bool:
    """Returns True if stderr is a terminal, where progress bars are shown."""
    return sys.stderr is not None and sys.stderr.isatty()


class UsageError(Exception):
    """An error of the user, with a message that needs no traceback."""


def one_line(error: BaseException, needed: str = "torch") -> str:
    """Returns the message of an error in one line. `needed` is the extra of the command that failed.

    >>> one_line(UsageError("There is no file 'a.py'.\\nUse another path."))
    "There is no file 'a.py'; use another path"
    >>> one_line(ZeroDivisionError("division by zero"))
    'ZeroDivisionError: division by zero; --debug shows where'
    """
    extra = missing_extra(error)
    if extra is not None:
        name = getattr(error, "name", "")
        # Every extra installs torch, and "demo" installs everything.
        extra = needed if extra == "torch" or needed == "demo" else extra
        return f'This needs {name}, which is not installed; use: pip install "fakequant[{extra}]"'
    if isinstance(error, SystemExit):
        return f"The code that was run called {called_exit(error)}; --debug shows where"
    if isinstance(error, OSError) and error.strerror:
        message = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
        return join(message)
    message = join("\n".join([str(error), *getattr(error, "__notes__", ())]))
    if isinstance(error, UsageError) or _is_ours(error):
        return message or type(error).__name__
    return f"{type(error).__name__}{message and f': {message}'}; --debug shows where"


def missing_extra(error: BaseException) -> str | None:
    """Returns the extra that installs the missing package, or None if the error has another cause."""
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return EXTRAS.get(error.name)
    return None


def called_exit(error: SystemExit) -> str:
    """Returns the call that raised the error, as source code.

    >>> called_exit(SystemExit(3))
    'sys.exit(3)'
    """
    return f"sys.exit({'' if error.code is None else repr(error.code)})"


def join(message: str, longest: int = LONGEST) -> str:
    """Joins the lines of a message into one sentence.

    >>> join("Two scales were given:\\n  a\\n  b\\nUse one.")
    'Two scales were given: a; b; use one'
    """
    joined = ""
    for line in filter(None, (" ".join(line.split()) for line in message.splitlines())):
        if not joined:
            joined = line
        elif joined.endswith((":", ",", ";")):
            joined += f" {line}"
        else:
            # A verb that began a sentence is lowered. Names keep their case.
            lower = re.sub(_FIRST_VERB, lambda word: word[0].lower(), line)
            joined = f"{joined.rstrip('.')}; {lower}"
    joined = joined if joined.endswith("...") else joined.rstrip(".")
    return joined if len(joined) <= longest else f"{joined[:longest]} ... (--debug shows all)"


def _is_ours(error: BaseException) -> bool:
    """Returns True if fakequant raised the error, so that its message is meant for users."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_code.co_filename.startswith(PACKAGE)
