"""Folders of compressed-tensors in transformers. `verify_weights` runs them with `running.run_folder`."""

import json
import os
from pathlib import Path

from fakequant._runtimes.session import Session
from fakequant._runtimes.transformers.target import RUNTIME


class TransformersSession(Session):
    """A folder that transformers loads."""

    key, name = RUNTIME.key, RUNTIME.name
    is_folder = True
    dequantizes = True

    @classmethod
    def opens(cls, path: str | os.PathLike[str]) -> bool:
        """Returns True for a folder whose config names compressed-tensors."""
        file = Path(path, "config.json")
        if not file.is_file():
            return False
        try:
            config = json.loads(file.read_text())
        except (ValueError, UnicodeDecodeError):
            return True  # the folder of a model, whose damage is reported when it is read
        return isinstance(config, dict) and "quantization_config" in config


SESSION = TransformersSession
