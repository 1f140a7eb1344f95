"""The targets of OpenVINO."""

from fakequant._runtimes.target import ActivationRules, Fusions, Runtime, Target, WeightRules

RUNTIME = Runtime(key="openvino", name="OpenVINO", room="openvino", package="openvino", extra="openvino")


def _target(name: str, weight_bits: int) -> Target:
    return Target(
        name=name,
        runtime=RUNTIME,
        # OpenVINO 2026.4 multiplies wrongly by 4-bit matrices with an odd number of inputs above 16.
        weights=WeightRules(bits=weight_bits, is_symmetric=True, packs_odd_rows=False),
        activations=ActivationRules(is_stored_unsigned=True, has_dynamic_scales=False),
        # OpenVINO 2026.4 also multiplies the result of a convolution by its scale twice if it is read as codes and as
        # floats. `adds_in_layers` makes such results codes for all readers.
        fusions=Fusions(needs_results=True, adds_in_layers=True, has_integer_products=False),
        arithmetic="openvino",
        has_own_rounding=True,
    )


TARGETS = (_target("openvino-vnni", 8), _target("openvino", 7))
