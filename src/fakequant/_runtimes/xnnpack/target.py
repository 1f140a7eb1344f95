"""The target of ExecuTorch with XNNPACK."""

from fakequant._runtimes.target import ActivationRules, Fusions, Runtime, Target, WeightRules
from fakequant.spec import QuantSpec

RUNTIME = Runtime(
    key="executorch",
    name="ExecuTorch",
    room="xnnpack",
    package="executorch",
    extra="executorch",
    exporter="export_executorch",
    suffix=".pte",
)
# The grid of a token whose scale the kernels compute at run time.
TOKEN_SPEC = QuantSpec(bits=8, signed=True, symmetric=False).per_token()
TARGETS = (
    Target(
        name="xnnpack",
        runtime=RUNTIME,
        weights=WeightRules(is_symmetric=True, is_at_most_8_bits=True, has_float_biases=True),
        activations=ActivationRules(is_at_most_8_bits=True, dynamic_spec=TOKEN_SPEC),
        fusions=Fusions(needs_results=True, needs_all_results=True, joins_on_one_grid=True, has_integer_products=False),
        arithmetic="xnnpack",
        has_quantized_caches=False,
        has_own_rounding=True,
        has_volumes=False,
    ),
)
