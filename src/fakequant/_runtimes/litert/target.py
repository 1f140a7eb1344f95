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
TARGETS = (
    Target(
        name="litert",
        runtime=RUNTIME,
        weights=WeightRules(is_symmetric=True, is_at_most_8_bits=True),
        activations=ActivationRules(is_at_most_8_bits=True, dynamic_spec=TOKEN_SPEC),
        fusions=Fusions(needs_results=True, needs_all_results=True, joins_on_one_grid=True, has_integer_products=False),
        arithmetic="litert",
        has_quantized_caches=False,
        has_own_rounding=True,
        has_volumes=False,
    ),
)
