"""The targets of ONNX Runtime."""

from fakequant._runtimes.target import (
    DYNAMIC_SPEC,
    SMALLEST_DYNAMIC_SCALE,
    ActivationRules,
    Fusions,
    Runtime,
    Target,
    WeightRules,
)

RUNTIME = Runtime(key="onnxruntime", name="ONNX Runtime", room="onnxruntime", package="onnxruntime", extra="onnx")


def _target(name: str, weight_bits: int) -> Target:
    return Target(
        name=name,
        runtime=RUNTIME,
        weights=WeightRules(bits=weight_bits),
        activations=ActivationRules(
            is_stored_unsigned=True, dynamic_spec=DYNAMIC_SPEC, smallest_dynamic_scale=SMALLEST_DYNAMIC_SCALE
        ),
        fusions=Fusions(needs_results=True, needs_convolution_results=True),
        arithmetic="onnxruntime",
    )


TARGETS = (_target("onnxruntime-vnni", 8), _target("onnxruntime-x86", 7))
