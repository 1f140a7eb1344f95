"""Exports a prepared model and runs it in ONNX Runtime."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from fakequant._convert.convert import convert
from fakequant._demo.data import Digits
from fakequant._onnx.export_onnx import export_onnx
from fakequant._verify.runtimes.onnxruntime import OnnxRuntime
from fakequant._verify.verdict import Verification
from fakequant._verify.verify import verify


@dataclasses.dataclass(frozen=True)
class Deployed:
    """An exported model: its accuracy, size and verification."""

    # On the test images in ONNX Runtime, in percent.
    accuracy: float
    # The size of codes, scales and biases.
    bytes: int
    onnx_bytes: int
    verification: Verification

    @property
    def codes(self) -> int:
        """The number of compared codes."""
        return sum(tensor.codes for tensor in self.verification.tensors)

    @property
    def differing_codes(self) -> int:
        """The number of codes of the runtime that differ from the golden model's."""
        return sum(tensor.runtime_differ for tensor in self.verification.tensors)

    @property
    def why(self) -> str:
        """Why the integer model differs from the prepared one. Empty if they are equal, except for a few ties."""
        reasons = [t.why_prepared for t in self.verification.tensors if not t.is_equal_but_for_ties]
        return "; ".join(dict.fromkeys(reasons))


def export(model: nn.Module, path: Path, digits: Digits) -> None:
    export_onnx(model, path, digits.test_images[:2])


def check(model: nn.Module, path: Path, digits: Digits, batches: Iterable[Tensor]) -> Deployed:
    """Runs the file on the test images and compares every code. `batches` are the same images in batches."""
    found = verify(model, path, batches)
    scores = OnnxRuntime(path).run((digits.test_images.numpy(),), {}).results[0]
    right = np.mean(scores.argmax(1) == digits.test_labels.numpy())
    tensors = convert(model).state_dict().values()
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return Deployed(float(right) * 100, size, path.stat().st_size, found)
