"""Loads models, data and configs by name: FILE.py:NAME or MODULE:NAME."""

import contextlib
import difflib
import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fakequant._cli.output import UsageError, called_exit, join, missing_extra
from fakequant._util.text import listed

if TYPE_CHECKING:
    from torch import nn

    from fakequant.config import QuantConfig

HOW = "use FILE.py:NAME or MODULE:NAME"


def find(where: str) -> Any:
    """Returns the object that FILE.py:NAME or MODULE:NAME names.

    >>> find("math:pi")
    3.141592653589793
    """
    place, _, name = where.rpartition(":")
    if not place or not name:
        raise UsageError(f"{where!r} is not a name to load; {HOW}")
    module = _module(place)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [n for n in vars(module) if not n.startswith("_")])
        raise UsageError(f"{place} has no {name!r}; {'near: ' + ', '.join(near) if near else HOW}")
    return getattr(module, name)


def load_model(where: str, state: str | None = None, *, prepared: bool = True, option: str = "--state") -> "nn.Module":
    """Returns the named module, or the module that the named function returns.

    If `option` was given, it gets the state in the file `state`, which was saved after or before it was `prepared`.
    """
    found = find(where)
    import torch

    if not isinstance(found, torch.nn.Module):
        if not callable(found):
            raise UsageError(
                f"{where} is of type {type(found).__name__}; name a torch.nn.Module or a function that returns one"
            )
        found = _call(where, found)
        if not isinstance(found, torch.nn.Module):
            raise UsageError(f"{where}() returned {type(found).__name__}; it must return a torch.nn.Module")
    if state:
        load_state(found, state, option, prepared)
    return found


def load_data(where: str) -> Iterable[Any]:
    """Returns the named batches, or the batches that the named function returns."""
    found = find(where)
    import torch

    if callable(found) and not isinstance(found, Iterable):
        found = _call(where, found)
    # A torch module may be iterable too.
    if not isinstance(found, Iterable) or isinstance(found, (str, bytes, Mapping, torch.nn.Module)):
        raise UsageError(
            f"{where} is of type {type(found).__name__}; name batches, such as a DataLoader or a list of tensors, or a "
            "function that returns them"
        )
    with contextlib.suppress(TypeError):  # the length is unknown
        if isinstance(found, Sized) and len(found) == 0:
            raise UsageError(f"{where} has no batches; give it at least one")
    return found


def load_config(where: str) -> "QuantConfig":
    """Returns the named QuantConfig, or the one that the named function returns."""
    from fakequant.config import QuantConfig

    found = find(where)
    found = _call(where, found) if callable(found) else found
    if not isinstance(found, QuantConfig):
        raise UsageError(
            f"{where} is of type {type(found).__name__}; name a QuantConfig or a function that returns one"
        )
    return found


def load_state(model: "nn.Module", path: str, option: str = "--state", prepared: bool = True) -> None:
    """Loads a file that `torch.save(model.state_dict(), path)` wrote into the model."""
    import torch

    if not Path(path).is_file():
        raise UsageError(
            f"There is no file {path!r}; {option} needs a file written by torch.save(model.state_dict(), FILE)"
        )
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise UsageError(
            f"{path} cannot be read as a checkpoint of tensors; write it with torch.save(model.state_dict(), FILE)"
        ) from error
    if not isinstance(state, Mapping):
        raise UsageError(f"{path} holds {type(state).__name__}; write it with torch.save(model.state_dict(), FILE)")
    try:
        model.load_state_dict(state)
    except Exception as error:
        when = "after" if prepared else "before"
        raise UsageError(
            f"{path} does not fit the model: {_misfit(model, state, error)}; load a state of this model that was saved "
            f"{when} fakequant.prepare"
        ) from error


def _misfit(model: "nn.Module", state: Mapping[Any, Any], error: Exception) -> str:
    """Returns the names that only the model or only the state has, or torch's message if there are none."""
    from fakequant._prepare.attach import FLOW_BUFFER

    # A model that lacks or has the data flow loads any state.
    there, here = ([str(name) for name in names if name != FLOW_BUFFER] for names in (state, model.state_dict()))
    lacking = [name for name in here if name not in there]
    unknown = [name for name in there if name not in here]
    parts = [f"it lacks {listed(lacking)}"] if lacking else []
    parts += [f"the model has no {listed(unknown)}"] if unknown else []
    return ", and ".join(parts) or join(str(error), 300)


def folder_to_write(path: str) -> Path:
    """Returns the path of a folder that may not exist yet. Raises UsageError if it cannot be written.

    >>> folder_to_write("results/today").name
    'today'
    """
    folder = Path(path)
    there = next((p for p in (folder, *folder.absolute().parents) if p.exists()), Path("/"))
    if not there.is_dir():
        raise UsageError(f"{path!r} cannot be written: {str(there)!r} is a file; use another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"{path!r} cannot be written: permission denied; use a writable folder")
    return folder


def _module(place: str) -> ModuleType:
    if place.endswith(".py"):
        path = Path(place).resolve()
        if not path.is_file():
            raise UsageError(f"There is no file {place!r}; {HOW}")
        with _user_code(place):
            return _run(path)
    if not all(part.isidentifier() for part in place.split(".")):
        raise UsageError(f"{place!r} is neither a .py file nor the name of a module; {HOW}")
    _look_in(Path.cwd())
    with _user_code(place):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if missing_extra(error) is not None or not f"{place}.".startswith(f"{error.name}."):
                raise
            raise UsageError(f"There is no module {place!r}; {HOW}") from error


@functools.cache
def _run(path: Path) -> ModuleType:
    """Runs a file once and returns it as a module. It can import files next to it, like a script."""
    _look_in(path.parent)
    spec = importlib.util.spec_from_file_location(f"_fakequant_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _call(where: str, function: Callable[[], object]) -> object:
    with _user_code(where):
        return function()


@contextlib.contextmanager
def _user_code(where: str) -> Iterator[None]:
    """Hides this command's sys.argv from the user's code, and turns its errors into a UsageError that says where."""
    place = where.rpartition(":")[0] if ":" in where else where
    arguments, sys.argv = sys.argv, [place]
    try:
        yield
    except UsageError:
        raise
    except SystemExit as error:
        raise UsageError(
            f"{where} called {called_exit(error)}; move the code that only a script needs under "
            'if __name__ == "__main__":, or remove it'
        ) from error
    except Exception as error:
        if missing_extra(error) is not None:
            raise
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if _is_in(frame.filename, place)]
        at = f" in line {lines[-1]}" if lines else ""
        message = join(str(error), 300)
        raise UsageError(
            f"{where} raised {type(error).__name__}{at}{message and f': {message}'}\n--debug shows where"
        ) from error
    finally:
        sys.argv = arguments


def _is_in(file: str, place: str) -> bool:
    module = sys.modules.get(place)
    return Path(file) == Path(place).resolve() or (module is not None and file == getattr(module, "__file__", None))
