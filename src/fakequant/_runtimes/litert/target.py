"""The target of LiteRT."""

from fakequant._runtimes.target import ActivationRules, Fusions, Runtime, Target, WeightRules
from fakequant.spec import QuantSpec

RUNTIME = Runtime(
    key="litert",
    name="LiteRT",
    room="litert",
    package="ai_edge_litert",
    extra="litert",
    exporter="export_litert",
    suffix=".tflite",
)
# The grid of a token whose scale the kernels compute at run time.
TOKEN_SPEC = QuantSpec(bits=8, signed=True, symmetric=False).per_token()


def _target(name: str, arithmetic: str, *, has_tokens: bool = False) -> Target:
    return Target(
        name=name,
        runtime=RUNTIME,
        weights=WeightRules(is_symmetric=True, is_at_most_8_bits=True),
        activations=ActivationRules(
            is_at_most_8_bits=True,
            has_symmetric_int16=True,
            has_dynamic_scales=has_tokens,
            dynamic_spec=TOKEN_SPEC if has_tokens else None,
        ),
        fusions=Fusions(needs_results=True, needs_all_results=True, joins_on_one_grid=True, has_integer_products=False),
        arithmetic=arithmetic,
        wide_arithmetic="litert/builtin" if arithmetic == "litert" else None,
        has_quantized_caches=False,
        has_own_rounding=True,
        has_volumes=False,
    )


# The kernels of XNNPACK, which LiteRT uses unless it is told otherwise, and its own: those that are optimized, and the
# plain ones, which LiteRT for Microcontrollers has too. XNNPACK has none for 16 bits: the optimized ones compute these.
TARGETS = (
    _target("litert", "litert", has_tokens=True),
    _target("litert-builtin", "litert/builtin"),
    _target("litert-reference", "litert/reference"),
)
