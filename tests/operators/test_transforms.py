"""`torch.func` and forward mode: a batch is one kernel call, and derivatives are straight-through."""

from functools import partial

import pytest

import fakequant as fq
from fakequant import torch_ops
from straight_through import AFFINE, Case, each_shape, each_spec, inside, make, straight_through, torch

kernels = pytest.importorskip("fakequant._backends.torch.tensor_kernels")
forward_ad = pytest.importorskip("torch.autograd.forward_ad")
grad, jacfwd, jacrev, jvp, vjp, vmap = (
    getattr(torch.func, name) for name in ("grad", "jacfwd", "jacrev", "jvp", "vjp", "vmap")
)

# torch's `linearize` warns about constants it folds.
pytestmark = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")

BATCH = 6


def clipped(case, spec):
    """Returns clipped fake quantization as a function of x."""
    return lambda x: fq.fake_quantize(x, case.scale, case.zero_point, spec)


@pytest.fixture
def calls(monkeypatch):
    """Collects the names of the kernels that run."""
    names, native = [], kernels._native

    class Counting:
        def __getattr__(self, name):
            if not name.startswith("first_"):
                names.append(name)
            return getattr(native, name)

    monkeypatch.setattr(kernels, "_native", Counting())
    return names


# --- vmap -----------------------------------------------------------------------------------------

FUNCTIONS = {
    "clipped": fq.fake_quantize,
    "pass": partial(fq.fake_quantize, gradient="pass"),
    "learned": fq.fake_quantize_learned,
    "mask": lambda *a: fq.fake_quantize(*a, mask="bool")[1],
    "quantize": fq.quantize,
    "dequantize": lambda x, *grid: fq.dequantize((x * 5).clamp(-8, 7).to(torch.int8), *grid),
    "learned backward": lambda x, *grid: torch.cat(
        [t.flatten() for t in fq.fake_quantize_learned_backward(x.cos(), x, *grid)]
    ),
}


@each_spec
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
@pytest.mark.parametrize("batched", ["x", "scale", "x scale", "x zero_point", "x scale zero_point"])
def test_vmap_equals_a_loop_in_one_kernel_call(calls, function, spec, batched):
    in_dims = tuple(0 if name in batched.split() else None for name in Case._fields)
    case = Case(*(v if at == 0 else v[0] for v, at in zip(make(spec, batch=(BATCH,)), in_dims)))
    expected = [function(*(v if at is None else v[i] for v, at in zip(case, in_dims)), spec) for i in range(BATCH)]
    calls.clear()
    assert torch.equal(vmap(lambda *a: function(*a, spec), in_dims=in_dims)(*case), torch.stack(expected))
    assert len(calls) == 1, calls


@each_spec
@pytest.mark.parametrize("at", [0, 1, 2, -1])
def test_vmap_over_any_axis_equals_a_loop(calls, spec, at):
    case, many = make(spec), torch.randn(BATCH, 5, 6)
    expected = torch.stack([clipped(case, spec)(x) for x in many], at)
    calls.clear()
    assert torch.equal(vmap(clipped(case, spec), in_dims=at, out_dims=at)(many.movedim(0, at)), expected)
    assert calls == ["fake_quantize"]


@each_spec
@pytest.mark.parametrize("function", [fq.fake_quantize, fq.fake_quantize_learned], ids=["clipped", "learned"])
def test_nested_vmap_equals_a_loop_in_one_kernel_call(calls, function, spec):
    many = make(spec, batch=(3, 2))
    expected = torch.stack([function(*many.at((i, j)), spec) for i in range(3) for j in range(2)])
    calls.clear()
    result = vmap(vmap(lambda *a: function(*a, spec)))(*many)
    assert torch.equal(result.flatten(0, 1), expected)
    assert len(calls) == 1


def test_vmap_of_ranges_and_packed_codes_equals_a_loop(calls):
    spec, many = AFFINE(axis=0), torch.randn(BATCH, 4, 6)

    def round_trip(x):
        scale, zero_point = fq.choose_qparams(fq.min_max(x, spec), spec)
        codes = fq.quantize(x, scale, zero_point, spec, packed=True)
        return codes, fq.dequantize(codes, scale, zero_point, spec, shape=(4, 6))

    expected = [round_trip(x) for x in many]
    calls.clear()
    for result, loop in zip(vmap(round_trip)(many), zip(*expected)):
        assert torch.equal(result, torch.stack(loop))
    assert calls == ["min_max", "choose_qparams", "quantize", "dequantize"]


NAMED = {
    "per tensor": lambda x: torch_ops.fake_quantize_per_tensor_affine(x, 0.2, 1, -8, 7),
    "per channel": lambda x: torch_ops.fake_quantize_per_channel_affine(
        x, torch.linspace(0.1, 0.3, 5), torch.zeros(5, dtype=torch.int32), 0, -8, 7
    ),
    "learnable": lambda x: torch_ops.fake_quantize_learnable_per_tensor_affine(
        x, torch.tensor([0.2]), torch.tensor([1.0]), -8, 7
    ),
}


@pytest.mark.parametrize("function", NAMED.values(), ids=NAMED)
def test_vmap_of_functions_with_torchs_names_equals_a_loop(calls, function):
    many, dy = torch.randn(BATCH, 5, 6), torch.randn(5, 6)
    outputs, gradients = zip(*(vjp_by_backward(function, x, dy) for x in many))
    calls.clear()
    assert torch.equal(vmap(function)(many), torch.stack(outputs))
    assert len(calls) == 1
    assert torch.equal(vmap(grad(lambda x: (function(x) * dy).sum()))(many), torch.stack(gradients))


def vjp_by_backward(function, x, dy):
    x = x.clone().requires_grad_()
    y = function(x)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


@pytest.mark.parametrize("elements", [64, pytest.param(60)])
def test_vmap_of_backward_over_packed_masks_equals_a_loop(elements):
    spec, x, dy = AFFINE(), torch.randn(10, elements), torch.randn(10, elements)
    masks = [fq.fake_quantize(v, 0.2, 0, spec, mask="packed")[1] for v in x]
    expected = [fq.fake_quantize_backward(d, m, spec) for d, m in zip(dy, masks)]
    backward = lambda d, m: fq.fake_quantize_backward(d, m, spec)  # noqa: E731
    assert torch.equal(vmap(backward, in_dims=(0, None))(dy, masks[0])[0], expected[0])
    assert torch.equal(vmap(backward)(dy, torch.stack(masks)), torch.stack(expected))


@pytest.mark.parametrize("elements", [64, 60])
def test_packed_masks_under_vmap_equal_a_loop(elements):
    x, spec = torch.randn(7, elements), AFFINE()
    pack = lambda v: fq.fake_quantize(v, 0.2, 0, spec, mask="packed")[1]  # noqa: E731
    assert torch.equal(vmap(pack)(x), torch.stack([pack(v) for v in x]))


def test_vmap_of_functions_without_a_batched_form_raises():
    x, spec = torch.randn(2, 5), fq.QuantSpec(bits=4)
    with pytest.raises(NotImplementedError, match="share one running range"):
        vmap(lambda v: fq.observe_fake_quantize(v, spec, torch.ones(1), torch.ones(1)).y)(x)
    with pytest.raises(NotImplementedError, match="whole bytes per example, got 5 codes of 4 bits"):
        vmap(lambda v: fq.quantize(v, 0.1, 0, spec, packed=True))(x)


# --- first derivatives ----------------------------------------------------------------------------


@each_spec
@each_shape
def test_derivatives_of_clipped_fake_quantization_are_straight_through(spec, shape):
    case = make(spec, shape)
    f, x, t, keep = clipped(case, spec), case.x, torch.randn(shape), inside(case, spec)
    assert keep.any()
    assert not keep.all()
    expected, jacobian = torch.where(keep, t, 0), torch.diag(keep.flatten().float())
    assert torch.equal(grad(lambda x: (f(x) * t).sum())(x), expected)
    assert torch.equal(jvp(f, (x,), (t,))[1], expected)
    assert torch.equal(torch.func.linearize(f, x)[1](t), expected)
    assert torch.equal(jacrev(f)(x).reshape(jacobian.shape), jacobian)
    assert torch.equal(jacfwd(f)(x).reshape(jacobian.shape), jacobian)
    with forward_ad.dual_level():
        y, tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, t)))
    assert torch.equal(y, f(x))
    assert torch.equal(tangent, expected)


def test_vjp_of_fake_quantize_gives_its_result_and_clipped_gradient():
    case, spec, t = make(AFFINE()), AFFINE(), torch.randn(5, 6)
    y, pull_back = vjp(clipped(case, spec), case.x)
    assert torch.equal(y, clipped(case, spec)(case.x))
    assert torch.equal(pull_back(t)[0], torch.where(inside(case, spec), t, 0))


def test_derivatives_with_gradient_pass_are_the_identity():
    x, t = torch.randn(5, 6), torch.randn(5, 6)
    f = partial(fq.fake_quantize, scale=0.1, zero_point=0, spec=AFFINE(), gradient="pass")
    assert torch.equal(grad(lambda x: (f(x) * t).sum())(x), t)
    assert torch.equal(jvp(f, (x,), (t,))[1], t)
    assert torch.equal(vjp(f, x)[1](t)[0], t)
    assert torch.equal(jacfwd(f)(x).reshape(30, 30), torch.eye(30))


@each_spec
@each_shape
def test_per_example_gradients_take_two_kernel_calls(calls, spec, shape):
    many, dy = make(spec, shape, batch=(BATCH,)), torch.randn(BATCH, *shape)
    keep = torch.stack([inside(many.at(i), spec) for i in range(BATCH)])
    product = lambda x, s, z, dy: (fq.fake_quantize(x, s, z, spec) * dy).sum()  # noqa: E731
    calls.clear()
    assert torch.equal(vmap(grad(product))(*many, dy), torch.where(keep, dy, 0))
    assert calls == ["fake_quantize", "mask_backward"]
    assert torch.equal(grad(lambda x: vmap(product)(x, *many[1:], dy).sum())(many.x), torch.where(keep, dy, 0))


@each_spec
def test_learned_jacobians_equal_straight_through_autograd(spec):
    case = make(spec, dtype=torch.float64, fraction=True)
    f = partial(fq.fake_quantize_learned, spec=spec)
    expected = jacrev(partial(straight_through, spec=spec), argnums=(0, 1, 2))(*case)
    for jacobian in (jacrev(f, argnums=(0, 1, 2)), jacfwd(f, argnums=(0, 1, 2))):
        for actual, wanted in zip(jacobian(*case), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)
    tangents = Case(*(torch.randn_like(v) for v in case))
    wanted = jvp(partial(straight_through, spec=spec), case, tangents)[1]
    torch.testing.assert_close(jvp(f, case, tangents)[1], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batched", [(0, 0, 0), (0, None, None), (None, 0, None)], ids=str)
@each_spec
def test_learned_per_example_gradients_equal_a_loop_in_two_kernel_calls(calls, spec, batched):
    case = make(spec, batch=(BATCH,), fraction=True)
    case = Case(*(v if at == 0 else v[0] for v, at in zip(case, batched)))
    every = grad(lambda *a: fq.fake_quantize_learned(*a, spec).square().sum(), argnums=(0, 1, 2))
    expected = [every(*(v if at is None else v[i] for v, at in zip(case, batched))) for i in range(BATCH)]
    calls.clear()
    for result, loop in zip(vmap(every, in_dims=batched)(*case), zip(*expected), strict=True):
        assert torch.equal(result, torch.stack(loop))
    assert calls == ["fake_quantize", "learned_backward"]


@pytest.mark.parametrize("scale", [(), (1,)], ids=str)
@pytest.mark.parametrize("zero_point", [(), (1,)], ids=str)
def test_gradients_of_one_scale_have_its_shape(scale, zero_point):
    shapes = [
        g.shape
        for g in grad(lambda s, z: fq.fake_quantize_learned(torch.ones(3), s, z, AFFINE()).sum(), argnums=(0, 1))(
            torch.full(scale, 0.1), torch.full(zero_point, 0.3)
        )
    ]
    assert shapes == [scale, zero_point]


@pytest.mark.parametrize(
    "mode",
    [grad, pytest.param(jacfwd)],
    ids=["reverse", "forward"],
)
def test_differentiating_a_fixed_scale_raises(mode):
    with pytest.raises(RuntimeError, match="Use `fake_quantize_learned`"):
        mode(lambda s: fq.fake_quantize(torch.ones(3), s, 0, AFFINE()).sum())(torch.tensor(0.1))


def test_a_forward_tangent_of_a_fixed_scale_raises():
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="Use `fake_quantize_learned`"):
        fq.fake_quantize(torch.ones(3), forward_ad.make_dual(torch.tensor(0.1), torch.tensor(1.0)), 0, AFFINE())


def test_functional_call_gives_the_per_example_gradients_of_a_loop():
    class Layer(torch.nn.Linear):
        def forward(self, x):
            return torch.nn.functional.linear(x, fq.fake_quantize(self.weight, 0.1, 0, fq.QuantSpec(bits=3)), self.bias)

    layer, inputs = Layer(6, 5), torch.randn(BATCH, 6)
    loss = lambda parameters, x: torch.func.functional_call(layer, parameters, (x,)).square().sum()  # noqa: E731
    per_example = vmap(grad(loss), in_dims=(None, 0))(dict(layer.named_parameters()), inputs)
    for i, x in enumerate(inputs):
        layer.zero_grad()
        layer(x).square().sum().backward()
        torch.testing.assert_close(per_example["weight"][i], layer.weight.grad)


@pytest.mark.parametrize("transform", [grad, jacrev, jacfwd], ids=["grad", "jacrev", "jacfwd"])
def test_transforms_of_fake_quantizer_give_gradients_of_one(transform):
    x = torch.randn(5, 6)
    assert torch.equal(transform(lambda v: fq.FakeQuantizer.q4().forward(v).sum())(x), torch.ones(5, 6))
