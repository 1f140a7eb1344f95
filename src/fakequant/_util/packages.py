"""Imports of optional packages."""

import importlib
from typing import Any


def require(module: str, package: str, extra: str = "onnx") -> Any:
    """Imports and returns a module. Raises ImportError with the command that installs it if it is missing.

    `package` contains the module, and `extra` is the extra of fakequant that installs it.

    >>> require("json", "json").__name__
    'json'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f'This needs {package}, which is not installed.\nUse: pip install "fakequant[{extra}]"'
        ) from error
