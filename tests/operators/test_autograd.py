"""The functions under autograd's features: saved tensors, hooks, changes in place, modes, tracing."""

from functools import partial

import pytest

import fakequant as fq
from fakequant import torch_ops
from straight_through import AFFINE, each_spec, make, torch

SPEC = AFFINE(axis=0)
FUNCTIONS = {
    "clipped": fq.fake_quantize,
    "pass": partial(fq.fake_quantize, gradient="pass"),
    "learned": fq.fake_quantize_learned,
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def leaf(t):
    return t.detach().clone().requires_grad_()


def forward(name, x, case, spec=SPEC):
    return FUNCTIONS[name](x, case.scale, case.zero_point, spec)


def gradient(name, case, dy, spec=SPEC):
    x = leaf(case.x)
    return torch.autograd.grad(forward(name, x, case, spec), x, dy)[0]


@pytest.fixture
def case():
    return make(SPEC)


@pytest.fixture
def dy():
    return torch.randn(5, 6)


# --- the graph ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kept"), [("clipped", 4), ("pass", 0), ("learned", 30 * 4 + 5 * 4 + 5 * 4)])
def test_functions_save_the_documented_number_of_bytes_for_the_backward_pass(case, dy, name, kept):
    """The hooks replace saved tensors by copies."""
    store = []

    def pack(t):
        store.append(t.clone())
        return len(store) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: store[i].clone()):
        x = leaf(case.x)
        y = forward(name, x, case)
    assert sum(t.nbytes for t in store) == kept
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], gradient(name, case, dy))


@each_function
def test_hooks_and_retained_graphs_work_on_results(case, dy, name):
    expected = gradient(name, case, dy)
    x = leaf(case.x)
    y = forward(name, x * 2 / 2, case)
    y.retain_grad()
    seen = []
    y.register_hook(lambda g: seen.append(g) or g * 2)
    y.grad_fn.register_prehook(lambda g: seen.append(g[0]))
    y.backward(dy, retain_graph=True)
    assert torch.equal(x.grad, 2 * expected)
    assert torch.equal(seen[0], dy)
    assert torch.equal(seen[1], 2 * dy)
    assert torch.equal(y.grad, 2 * dy)
    y.backward(dy)
    assert torch.equal(x.grad, 4 * expected)
    if name != "pass":
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            y.backward(dy)


def test_gradients_of_repeated_backward_passes_accumulate(case, dy):
    x, scale = leaf(case.x), leaf(case.scale)
    for _ in range(3):
        fq.fake_quantize_learned(x, scale, case.zero_point, SPEC).backward(dy)
    once = fq.fake_quantize_learned_backward(dy, case.x, case.scale, case.zero_point, SPEC)
    assert torch.equal(x.grad, once.dx + once.dx + once.dx)
    assert torch.equal(scale.grad, once.dscale + once.dscale + once.dscale)


@pytest.mark.parametrize("changed", ["x", "scale", "mask"])
def test_changing_a_saved_tensor_in_place_is_an_error_in_the_backward_pass(case, dy, changed):
    x, scale = leaf(case.x), leaf(case.scale)
    if changed == "mask":
        y, mask = fq.fake_quantize(x, case.scale, case.zero_point, SPEC, mask="packed")
    else:
        y, mask = fq.fake_quantize_learned(x, scale, case.zero_point, SPEC), None
    with torch.no_grad():
        {"x": x, "scale": scale, "mask": mask}[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_changing_x_and_scale_in_place_is_allowed_if_only_the_mask_is_saved(case, dy):
    x, scale = leaf(case.x), case.scale.clone()
    y = fq.fake_quantize(x, scale, case.zero_point, SPEC)
    with torch.no_grad():
        x.zero_()
        scale.zero_()
    y.mul_(3).backward(dy)
    assert torch.equal(x.grad, gradient("clipped", case, 3 * dy))


def test_the_observing_operator_increments_the_version_of_its_running_range():
    low, high = torch.full((1,), torch.inf), torch.full((1,), -torch.inf)
    torch.ops.fakequant.observe_fake_quantize(
        torch.ones(3), low, high, -8, 7, "onnx", True, "any", "moving_average", 0.01, 1e-7, False
    )
    assert (low._version, high._version) == (1, 1)


# --- modes ----------------------------------------------------------------------------------------


@each_function
def test_results_without_a_graph_equal_those_with_one(case, name):
    x = leaf(case.x)
    expected = forward(name, x, case)
    assert expected.requires_grad
    with torch.no_grad():
        y = forward(name, x, case)
    assert not y.requires_grad
    assert torch.equal(y, expected)
    with torch.inference_mode():
        y = forward(name, x, case)
    assert y.is_inference()
    assert torch.equal(y, expected)
    assert torch.equal(forward(name, y.clone(), case), forward(name, expected.detach(), case))
    assert not forward(name, x.detach(), case).requires_grad


@each_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_autocast_does_not_change_results_and_gradients(name, dtype):
    case = make(SPEC)._replace(scale=torch.linspace(0.1001, 0.2003, 5))
    case, dy = case._replace(x=case.x.to(dtype)), torch.randn(5, 6).to(dtype)
    assert not torch.equal(case.scale.bfloat16().float(), case.scale)
    expected, dx = forward(name, case.x, case), gradient(name, case, dy)
    with torch.autocast("cpu", torch.bfloat16):
        y, dx_here = forward(name, case.x, case), gradient(name, case, dy)
        product = torch.mm(y.float(), y.float().T)
    assert y.dtype == dtype
    assert product.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    assert torch.equal(dx_here, dx)


@each_function
def test_anomaly_mode_keeps_gradients_and_reports_nan(case, dy, name):
    expected = gradient(name, case, dy)
    with torch.autograd.set_detect_anomaly(True):
        assert torch.equal(gradient(name, case, dy), expected)
        with (
            pytest.raises(RuntimeError, match="returned nan values"),
            pytest.warns(UserWarning, match="Error detected"),
        ):
            gradient(name, case, torch.full((5, 6), torch.nan))


X = torch.linspace(-1, 1, 32).reshape(4, 8)
INT4 = fq.QuantSpec(bits=4)
ALLOCATING = {
    "masked": lambda: fq.fake_quantize(X, torch.tensor(0.1, device="cpu"), 0, INT4, mask="packed"),
    "quantize": lambda: fq.quantize(X, 0.1, 0, INT4, packed=True),
    "min_max": lambda: fq.min_max(X),
    "choose_qparams": lambda: fq.choose_qparams(X.min(), X.max(), INT4),
    "learned": lambda: fq.fake_quantize_learned_backward(X, X, X[-1, -1:], 0, INT4),
    "observe": lambda: fq.observe_fake_quantize(X, INT4, X[0, :1].clone(), X[0, 1:2].clone())[2],
}


@pytest.mark.parametrize("function", ALLOCATING.values(), ids=ALLOCATING)
def test_results_are_on_the_device_of_the_input_not_on_the_default_device(function):
    with torch.device("meta"):
        result = function()
    assert {t.device.type for t in (result if isinstance(result, tuple) else (result,))} == {"cpu"}


@each_function
@each_spec
def test_batched_gradients_equal_a_loop(name, spec):
    case, many = make(spec), torch.randn(4, 5, 6)
    leaves = [v.clone().requires_grad_() for v in case[: 2 if name == "learned" else 1]]
    y = FUNCTIONS[name](*leaves, *case[len(leaves) :], spec)
    expected = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in many]
    result = torch.autograd.grad(y, leaves, many, is_grads_batched=True)
    for actual, loop in zip(result, zip(*expected), strict=True):
        assert torch.equal(actual, torch.stack(loop))


# --- torch.jit.trace ------------------------------------------------------------------------------

TRACED = {
    "channels": lambda x: fq.fake_quantize(x, torch.linspace(0.1, 0.2, 5), 0, fq.QuantSpec(bits=4, axis=0)),
    "scale as a number": lambda x: fq.fake_quantize(x, 0.1, 1, AFFINE()),
    "learned": lambda x: fq.fake_quantize_learned(x, torch.tensor(0.1), torch.tensor(0.4), AFFINE()),
    "quantize": lambda x: fq.quantize(x, 0.1, 1, AFFINE()),
    "dynamic range": lambda x: fq.fake_quantize(x, *fq.choose_qparams(fq.min_max(x), AFFINE()), AFFINE()),
    "min_max": lambda x: fq.min_max(x, fq.QuantSpec(axis=0)).min,
    "torch's per tensor": lambda x: torch_ops.fake_quantize_per_tensor_affine(x, 0.1, 1, -8, 7),
    "torch's per channel": lambda x: torch_ops.fake_quantize_per_channel_affine(
        x, torch.linspace(0.1, 0.2, 5), torch.zeros(5, dtype=torch.int32), 0, -8, 7
    ),
    "torch's learnable": lambda x: torch_ops.fake_quantize_learnable_per_tensor_affine(
        x, torch.tensor([0.1]), torch.tensor([1.0]), -8, 7
    ),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", TRACED)
def test_tracing_records_the_operator(name):
    function, x, other = TRACED[name], torch.randn(5, 6, requires_grad=True), torch.randn(5, 6, requires_grad=True)
    traced = torch.jit.trace(function, (x,))
    assert "fakequant::" in str(traced.graph)
    y, expected = traced(other), function(other)
    assert torch.equal(y, expected)
    if y.requires_grad:
        assert torch.equal(*(torch.autograd.grad(v.square().sum(), other)[0] for v in (y, expected)))
