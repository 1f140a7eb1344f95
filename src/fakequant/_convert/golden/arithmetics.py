"""The arithmetic of each runtime, by the name that a target refers to."""

from fakequant._convert.golden.openvino_arithmetic import OpenVino
from fakequant._convert.golden.sums_to_codes import OnnxRuntime, Reference
from fakequant._convert.golden.tracked_codes import Arithmetic
from fakequant._convert.golden.xnnpack_arithmetic import Xnnpack

ARITHMETICS: dict[str, Arithmetic] = {
    "reference": Reference(),
    "onnxruntime": OnnxRuntime(),
    "openvino": OpenVino(),
    "xnnpack": Xnnpack(),
}
