"""Makes timm and torchvision importable beside a build of torch that torchvision was not compiled for.

torchvision's wheels are compiled for one build of torch with CUDA. Beside any other build, such as one for CPUs, its
library of operators does not load. Its Python code then describes operators that do not exist, and `import torchvision`
raises RuntimeError. The models of timm and torchvision use none of these operators, so it is enough to declare them,
without an implementation.

transformers and lightning import torchvision if it is installed, and would fail in the same way. So both packages are
not installed beside them, but in the folder `zoo` of the virtual environment.
"""

import ctypes
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

# The operators that torchvision describes whether or not its library was loaded.
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # an operator exists as long as its library


def find_vision_packages() -> None:
    """Adds the folder of the packages to the path, and declares operators of torchvision that do not load."""
    folder = Path(sys.prefix) / "zoo"
    if folder.is_dir() and str(folder) not in sys.path:
        sys.path.append(str(folder))
    found = find_spec("torchvision")
    if found is None or found.origin is None or _declared:
        return
    try:
        for library in Path(found.origin).parent.glob("_C*.so"):
            ctypes.CDLL(str(library))
    except OSError:
        _declared.append(torch.library.Library("torchvision", "DEF"))
        for signature in _OPERATORS:
            _declared[0].define(signature)
