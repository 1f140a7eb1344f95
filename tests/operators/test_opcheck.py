"""`torch.library.opcheck` for every operator of `torch.ops.fakequant`.

It compares an operator's schema, fake tensors (shapes, strides, dtypes), autograd and ahead-of-time compilation with
dynamic shapes with its results on real tensors.
"""

import pytest

from fakequant import QuantSpec
from thoroughness import ALL

torch = pytest.importorskip("torch")
library = pytest.importorskip("fakequant._backends.torch.operators")
observers = pytest.importorskip("fakequant.observers")
pytest.importorskip("fakequant.nn")  # which defines the operators of products

# From torch 2.15 on, opcheck reads `.grad` of every tensor, which warns if the tensor is not a leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

ops = torch.ops.fakequant
INT4 = (-8, 7)
ONNX = (*INT4, "onnx")
TENSOR = (*INT4, "torch_tensor")
CHANNEL = (*INT4, "torch_channel")
E4M3 = (0, 255, "e4m3fn")
E2M1 = (0, 15, "e2m1")
# Range searches of observers, which are operators so that compilers treat them as opaque.
SEARCHES = {"errors_on_bins", "errors_on_data", "divergence_on_bins"}
# Called by the decompositions for Inductor.
CHECKS = {"checked_scale"}
# Products of experts, whose numbers of rows are only known at run time, and products with exact sums.
PRODUCTS = {"grouped_linear", "grouped_outer", "integer_linear", "integer_grouped_linear", "integer_convolution"}
NAMES = {schema.split("(")[0] for schema in library.SCHEMAS} | SEARCHES | CHECKS | PRODUCTS
GRID = QuantSpec(bits=4, symmetric=False).to_numbers()
ROWS = QuantSpec(bits=4, axis=0).to_numbers()


def floats(*shape, dtype=torch.float32, grad=True):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return values.to(dtype).requires_grad_(grad)


def scales(*shape, grad=False, dtype=torch.float32):
    return (torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape) * 0.03).to(dtype).requires_grad_(grad)


def zeros(*shape, dtype=torch.int32, grad=False):
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 - 2).to(dtype).requires_grad_(grad)


def channels_last(*shape, **options):
    return floats(*shape, **options).detach().to(memory_format=torch.channels_last).requires_grad_()


def leaf(view):
    """Returns the view as a leaf of the graph with the same strides."""
    return view.detach().requires_grad_()


def permuted():
    return leaf(floats(8, 4, 6).permute(1, 2, 0))


def with_gaps():
    return leaf(floats(8, 6, 16)[::2, :, ::2])


def expanded():
    return leaf(floats(1, 6, 8).expand(4, 6, 8))


def candidates(*blocks):
    """Returns three candidate ranges per block."""
    hi = scales(3, *blocks)
    return -hi, hi


def bins(*blocks):
    """Returns counts and middles of the bins."""
    counts = torch.arange(torch.Size(blocks).numel() * 8).reshape(*blocks, 8)
    return counts, (torch.arange(8) - 3.5).expand(*blocks, 8).contiguous()


def packed_mask(x):
    return ops.fake_quantize_masked(x.detach(), scales(), None, *ONNX, True)[1]


def bool_mask(x):
    return ops.fake_quantize_masked(x.detach(), scales(), None, *ONNX, False)[1]


def on_grid(*shape, scale=0.5):
    """Returns levels from -8 to 7, times a scale."""
    return (codes(*shape).float() * scale).requires_grad_()


# The grids of an input and of a weight, and a bias without codes.
GRIDS = (torch.tensor(0.5), None, -8, 7, torch.tensor(0.5), None, -8, 7, None, 1.0)
# The group of each of four rows, and where the rows of each group end.
GROUPS = (torch.tensor([0, 2, 2, 2]), torch.tensor([1, 1, 4]))
BIAS_CODES = (*GRIDS[:8], torch.arange(3.0, dtype=torch.float64), 4.0)


def codes(*shape, dtype=torch.int8):
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 16 - 8).to(dtype)


def running(*shape):
    return torch.full(shape, torch.inf), torch.full(shape, -torch.inf)


def buffers(*shape):
    """Returns a running range, scale, zero point and the number of non-finite values, as a quantizer has them."""
    scale = torch.full(shape, torch.nan)
    return *running(*shape), scale, torch.zeros(shape, dtype=torch.int32), torch.zeros((), dtype=torch.int64)


X = floats(3, 5, 7)
CASES = {
    "fake_quantize": {
        "tensor": (X, scales(), None, *ONNX, True),
        "pass": (X, scales(1), zeros(1), *ONNX, False),
        "channel": (X, scales(1, 5, 1), zeros(1, 5, 1), *ONNX, True),
        "group": (floats(4, 6, 8), scales(4, 6, 2), zeros(4, 6, 2, dtype=torch.int64), *ONNX, True),
        "inference": (X.detach(), scales(1, 5, 1), None, *ONNX, True),
        "bfloat16": (floats(3, 5, dtype=torch.bfloat16), scales(1, 5), None, -8, 7, "half_away", True),
        "float16": (floats(3, 5, dtype=torch.float16), scales(), zeros(dtype=torch.int64), *TENSOR, True),
        "float64": (floats(3, 5, dtype=torch.float64), scales(3, 1, dtype=torch.float64), zeros(3, 1), *ONNX, True),
        "float zero point": (X, scales(1, 5, 1), zeros(1, 5, 1, dtype=torch.float32), *CHANNEL, True),
        "float16 zero point": (X, scales(1, 5, 1), zeros(1, 5, 1, dtype=torch.float16), *CHANNEL, True),
        "channels last": (channels_last(2, 3, 4, 5), scales(1, 3, 1, 1), zeros(1, 3, 1, 1), *ONNX, True),
        "permuted groups": (permuted(), scales(4, 6, 2), None, *ONNX, True),
        "gaps": (with_gaps(), scales(1, 6, 1), None, *ONNX, True),
        "expanded": (expanded(), scales(4, 1, 1), None, *ONNX, True),
        "empty": (floats(0, 5), scales(1, 5), None, *ONNX, True),
    },
    "fake_quantize_masked": {
        "packed": (X, scales(1, 5, 1), zeros(1, 5, 1), *CHANNEL, True),
        "bool": (X, scales(1, 5, 1), zeros(1, 5, 1), *CHANNEL, False),
        "inference": (X.detach(), scales(), None, *ONNX, True),
        "bfloat16 groups": (floats(4, 8, dtype=torch.bfloat16), scales(4, 2), None, *ONNX, True),
        "channels last packed": (channels_last(2, 3, 4, 5), scales(1, 3, 1, 1), None, *ONNX, True),
        "channels last bool": (channels_last(2, 3, 4, 5), scales(1, 3, 1, 1), None, *ONNX, False),
        "gaps": (with_gaps(), scales(), None, *ONNX, True),
    },
    "mask_backward": {
        "packed": (X, packed_mask(X), None, False),
        "bool": (X, bool_mask(X), None, True),
        "bfloat16": (X.detach().bfloat16().requires_grad_(), packed_mask(X), None, True),
        "order": (channels_last(2, 3, 4, 5), packed_mask(channels_last(2, 3, 4, 5)), (0, 2, 3, 1), False),
        "order, other dy": (floats(2, 3, 4, 5), packed_mask(channels_last(2, 3, 4, 5)), (0, 2, 3, 1), True),
        "order, expanded dy": (leaf(torch.ones(()).expand(3, 5, 7)), packed_mask(X), (1, 0, 2), True),
        "other bool": (floats(2, 3, 4, 5), bool_mask(channels_last(2, 3, 4, 5)), None, False),
    },
    "fake_quantize_learned": {
        "tensor": (X, scales(1, grad=True), zeros(1, dtype=torch.float32, grad=True), *TENSOR, 0.5),
        "channel": (X, scales(1, 5, 1, grad=True), None, *ONNX, 0.5),
        "group": (floats(4, 8), scales(4, 2, grad=True), zeros(4, 2, dtype=torch.float32, grad=True), *ONNX, 1.0),
        "scale only": (X.detach(), scales(1, 5, 1, grad=True), zeros(1, 5, 1), *ONNX, 1.0),
        "channels last": (channels_last(2, 3, 4, 5), scales(1, 3, 1, 1, grad=True), None, *ONNX, 1.0),
    },
    "learned_backward": {
        "tensor": (X, floats(3, 5, 7), scales(1, grad=True), zeros(1, dtype=torch.float32, grad=True), *TENSOR, 0.5),
        "channel": (X, floats(3, 5, 7), scales(1, 5, 1, grad=True), None, *ONNX, 0.5),
        "float64": (
            floats(4, 8, dtype=torch.float64),
            floats(4, 8, dtype=torch.float64),
            scales(4, 2, dtype=torch.float64, grad=True),
            zeros(4, 2, dtype=torch.float32, grad=True),
            *ONNX,
            1.0,
        ),
        "channels last": (
            floats(2, 3, 4, 5),
            channels_last(2, 3, 4, 5),
            scales(1, 3, 1, 1, grad=True),
            None,
            *ONNX,
            1.0,
        ),
        "permuted groups": (floats(4, 6, 8), permuted(), scales(4, 6, 2, grad=True), None, *ONNX, 1.0),
        "permuted scales": (floats(4, 6), floats(4, 6), leaf(scales(3, 4).t()), None, *ONNX, 1.0),
    },
    "quantize": {
        "tensor": (X, scales(), None, *ONNX, torch.int8),
        "FP8": (X, scales(1, 5, 1), None, *E4M3, torch.uint8),
        "uint16": (X, scales(1, 5, 1), None, 0, 65535, "half_away", torch.uint16),
        "channels last": (channels_last(2, 3, 4, 5), scales(1, 3, 1, 1), None, *ONNX, torch.int8),
    },
    "quantize_packed": {
        "4 bits": (X, scales(1, 5, 1), zeros(1, 5, 1), *ONNX, 4),
        "2 bits": (with_gaps(), scales(), None, 0, 3, "onnx", 2),
        "6 bits": (X, scales(1, 5, 1), None, 0, 63, "e2m3", 6),
    },
    "dequantize": {
        "channel": (codes(3, 5, 7), scales(1, 5, 1), zeros(1, 5, 1), *ONNX, torch.float32),
        "bfloat16": (codes(4, 8), scales(4, 2), None, *ONNX, torch.bfloat16),
        "permuted": (codes(8, 4).t(), scales(4, 2), None, *ONNX, torch.float64),
        "FP8": (codes(3, 5, 7).abs().to(torch.uint8), scales(1, 5, 1), None, *E4M3, torch.float32),
    },
    "dequantize_packed": {
        "4 bits": (codes(53, dtype=torch.uint8), scales(1, 5, 1), None, *ONNX, (3, 5, 7), 4, torch.float32),
        "2 bits": (codes(27, dtype=torch.uint8), scales(), None, 0, 3, "onnx", (3, 5, 7), 2, torch.float16),
        "6 bits": (codes(79, dtype=torch.uint8), scales(), None, 0, 63, "e3m2", (3, 5, 7), 6, torch.float32),
    },
    "min_max": {
        "tensor": (X, ()),
        "channel": (channels_last(2, 3, 4, 5), (1, 3, 1, 1)),
        "group": (permuted(), (4, 6, 2)),
        "float64": (floats(3, 5, dtype=torch.float64), (3, 1)),
        "empty": (floats(0, 5), (1, 5)),
    },
    "choose_qparams": {
        "one": (torch.tensor(-0.1), torch.tensor(0.4), 0, 255, "onnx", False, "any", 1e-7),
        "symmetric": (-scales(4, 3), scales(3, 4).t(), *ONNX, True, "any", 1e-7),
        "power of two": (-scales(4, 3), scales(3, 4).t(), *E2M1, True, "rceil", 1e-7),
        "NVFP4": (-scales(4, 3), scales(3, 4).t(), *E2M1, True, "e4m3fn", 1e-7),
    },
    "checked_scale": {
        "one": (scales(), None, *INT4),
        "rows": (scales(3, 4, dtype=torch.float64).t(), zeros(3, 4).t(), *INT4),
    },
    "grouped_linear": {
        "one group empty": (floats(7, 3), floats(4, 2, 3), torch.tensor([2, 2, 6, 7])),
        "rows behind the last group": (floats(7, 3), floats(2, 2, 3), torch.tensor([1, 5], dtype=torch.int32)),
        "transposed": (leaf(floats(3, 7).t()), leaf(floats(4, 3, 2).transpose(1, 2)), torch.tensor([2, 2, 6, 7])),
        "no rows": (floats(0, 3), floats(2, 2, 3), torch.tensor([0, 0])),
    },
    "grouped_outer": {
        "one group empty": (floats(7, 2), floats(7, 3), torch.tensor([2, 2, 6, 7])),
        "transposed": (leaf(floats(2, 7).t()), leaf(floats(3, 7).t()), torch.tensor([2, 7])),
    },
    "integer_linear": {
        "tokens": (on_grid(2, 4, 5), on_grid(3, 5), floats(3), *GRIDS),
        "bias codes": (on_grid(4, 5), on_grid(3, 5), floats(3), *BIAS_CODES),
        "no bias": (on_grid(4, 5), on_grid(3, 5), None, *GRIDS),
    },
    "integer_grouped_linear": {
        "one group empty": (on_grid(4, 5), on_grid(9, 5), floats(9), *GROUPS, *GRIDS),
        "no bias": (on_grid(4, 5), on_grid(9, 5), None, *GROUPS, *GRIDS),
    },
    "integer_convolution": {
        "image": (on_grid(2, 4, 7, 7), on_grid(3, 4, 3, 3), floats(3), *GRIDS, [1, 2], [1, 0], [1, 1], 1),
        "groups": (on_grid(2, 6, 9), on_grid(3, 2, 3), None, *GRIDS, [1], [1], [2], 3),
        "bias codes": (on_grid(2, 4, 7, 7), on_grid(3, 4, 1, 1), floats(3), *BIAS_CODES, [1, 1], [0, 0], [1, 1], 1),
    },
    "errors_on_bins": {
        "one": (*bins(), *candidates(), GRID, 2.0),
        "rows": (*bins(5), *candidates(5), ROWS, 1.5),
    },
    "divergence_on_bins": {
        "one": (*bins(), *candidates(), GRID),
        "rows": (*bins(5), *candidates(5), ROWS),
    },
    "errors_on_data": {
        "one": (floats(4, 6, grad=False), *candidates(), GRID),
        "rows": (floats(5, 6, grad=False, dtype=torch.bfloat16), *candidates(5), ROWS),
    },
    "observe_fake_quantize": {
        "clipped": (X, *running(1), *ONNX, True, "any", "moving_average", 0.01, 1e-7, True),
        "pass": (X, *running(1), *TENSOR, False, "any", "moving_average", 0.01, 1e-7, False),
        "channel": (
            channels_last(2, 3, 4, 5),
            *running(1, 3, 1, 1),
            *CHANNEL,
            True,
            "any",
            "min_max",
            0.01,
            1e-7,
            True,
        ),
        "group": (permuted(), *running(4, 6, 2), *ONNX, True, "any", "moving_average", 0.01, 1e-7, True),
        "inference": (X.detach(), *running(1, 5, 1), *ONNX, True, "any", "dynamic", 0.01, 1e-7, False),
        "MXFP4": (permuted(), *running(4, 6, 2), *E2M1, True, "floor", "dynamic", 0.01, 1e-7, True),
        "NVFP4": (X, *running(3, 5, 1), *E2M1, True, "e4m3fn", "dynamic", 0.01, 1e-7, False),
    },
    "observe_into": {
        "clipped": (X, *buffers(), *ONNX, True, "any", "moving_average", 0.01, 1e-7, True),
        "channel": (
            channels_last(2, 3, 4, 5),
            *buffers(1, 3, 1, 1),
            *CHANNEL,
            True,
            "any",
            "min_max",
            0.01,
            1e-7,
            False,
        ),
    },
}


def test_every_registered_operator_has_an_opcheck_case():
    assert CASES.keys() == NAMES
    registered = torch._C._dispatch_get_all_op_names()
    assert {name.split("::")[1] for name in registered if name.startswith("fakequant::")} == NAMES


TRIED = {f"{name}: {case}": (name, case) for name, cases in CASES.items() for case in cases}
if not ALL:  # slow; a scale per tensor and permuted groups are tried
    for case in ("float64", "permuted scales", "channels last", "channel"):
        del TRIED[f"learned_backward: {case}"]


@pytest.mark.parametrize(("name", "case"), TRIED.values(), ids=TRIED)
def test_operators_pass_opcheck(name, case):
    torch.library.opcheck(getattr(ops, name).default, CASES[name][case])
