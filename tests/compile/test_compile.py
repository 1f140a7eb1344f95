"""Compiled, exported and traced functions are one graph with our operators, and have eager's bits."""

import shutil

import pytest

import fakequant as fq
from fakequant import torch_ops
from straight_through import AFFINE, torch
from thoroughness import only_in_test_all

checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
CompileCounter = pytest.importorskip("torch._dynamo.testing").CompileCounterWithBackend
make_fx = pytest.importorskip("torch.fx.experimental.proxy_tensor").make_fx
FakeTensorMode = pytest.importorskip("torch._subclasses").FakeTensorMode

CHANNEL, LAST = AFFINE(axis=0), AFFINE(axis=-1)
GROUP, TOKEN = fq.QuantSpec(bits=4, axis=-1, group_size=4), fq.QuantSpec(axis=-1, group_size=-1)
torch.manual_seed(0)
X, DY = torch.randn(6, 8), torch.randn(6, 8)
ONE, ONE_ZERO = torch.tensor([0.1]), torch.tensor([1], dtype=torch.int32)
SCALE, ZERO = torch.linspace(0.05, 0.3, 6), torch.tensor([-3, -2, 0, 1, 2, 3], dtype=torch.int32)
GROUPS = torch.linspace(0.05, 0.3, 12).reshape(6, 2)
PACKED, BOOL = (fq.fake_quantize(X, SCALE, ZERO, CHANNEL, mask=form)[1] for form in ("packed", "bool"))
CODES, PACKED_CODES = (fq.quantize(X, SCALE, ZERO, CHANNEL, packed=packed) for packed in (False, True))
QUANTIZER = fq.FakeQuantizer.q4()
QUANTIZER.calibrate(X)


def compiled(function, backend="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=backend, **options)


def assert_same(expected, actual):
    """Asserts equal bits, strides and `requires_grad`."""
    for e, a in zip(*((r if isinstance(r, tuple) else (r,)) for r in (expected, actual)), strict=True):
        assert (e.dtype, e.shape, e.stride(), e.requires_grad) == (a.dtype, a.shape, a.stride(), a.requires_grad)
        e, a = (t.detach().contiguous().flatten().view(torch.uint8) for t in (e, a))
        assert torch.equal(e, a)


def observe(x):
    low, high = torch.full((1,), torch.inf), torch.full((1,), -torch.inf)
    return *fq.observe_fake_quantize(x, AFFINE(), low, high, mask="packed"), low, high


def fused(function):
    def run(x):
        on = torch.ones(1, dtype=torch.int64)
        state = [torch.full((1,), torch.inf), torch.full((1,), -torch.inf), torch.ones(1), torch.zeros(1).int()]
        result = function(x, on, on, *state, 0.01, 0, 255, -1, False, False)
        return *(result if isinstance(result, tuple) else (result,)), *state

    return run


OWN = {
    "scale as a number": lambda x: fq.fake_quantize(x, 0.1, 1, AFFINE()),
    "tensor": lambda x: fq.fake_quantize(x, ONE, ONE_ZERO, AFFINE()),
    "channel": lambda x: fq.fake_quantize(x, SCALE, ZERO, CHANNEL),
    "group": lambda x: fq.fake_quantize(x, GROUPS, 0, GROUP),
    "pass": lambda x: fq.fake_quantize(x, SCALE, 0, TOKEN, gradient="pass"),
    "packed mask": lambda x: fq.fake_quantize(x, SCALE, ZERO, CHANNEL, mask="packed"),
    "bool mask": lambda x: fq.fake_quantize(x, SCALE, ZERO, CHANNEL, mask="bool"),
    "backward": lambda x: fq.fake_quantize_backward(x, PACKED, CHANNEL),
    "backward bool": lambda x: fq.fake_quantize_backward(x, BOOL, CHANNEL),
    "learned": lambda x: fq.fake_quantize_learned(x, SCALE, ZERO + 0.3, CHANNEL, grad_factor=0.3),
    "learned backward": lambda x: tuple(fq.fake_quantize_learned_backward(x, X, SCALE, ZERO, CHANNEL)),
    "round zero point": lambda x: fq.round_zero_point(x, CHANNEL),
    "quantize": lambda x: fq.quantize(x, SCALE, ZERO, CHANNEL),
    "quantize packed": lambda x: fq.quantize(x, SCALE, ZERO, CHANNEL, packed=True),
    "dequantize": lambda x: fq.dequantize(CODES, SCALE, ZERO, CHANNEL) * x,
    "dequantize packed": lambda x: fq.dequantize(PACKED_CODES, SCALE, ZERO, CHANNEL, shape=(6, 8)) * x,
    "range": lambda x: tuple(fq.min_max(x, GROUP)),
    "dynamic": lambda x: fq.fake_quantize(x, *fq.choose_qparams(fq.min_max(x, TOKEN), TOKEN), TOKEN),
    "observe": observe,
    "quantizer": lambda x: QUANTIZER.forward(x),
    "quantizer backward": lambda x: QUANTIZER.backward_clamped(x, X),
}
NAMED = {
    "per_tensor": lambda x: torch_ops.fake_quantize_per_tensor_affine(x, 0.1, 1, -8, 7),
    "per_tensor, tensors": lambda x: torch_ops.fake_quantize_per_tensor_affine(x, ONE, ONE_ZERO, -8, 7),
    "per_tensor_cachemask": lambda x: torch_ops.fake_quantize_per_tensor_affine_cachemask(x, 0.1, 1, -8, 7),
    "per_tensor_cachemask_tensor_qparams": lambda x: torch_ops.fake_quantize_per_tensor_affine_cachemask_tensor_qparams(
        x, ONE, ONE_ZERO, torch.ones(1).long(), -8, 7
    ),
    "per_tensor_cachemask_backward": lambda x: torch_ops.fake_quantize_per_tensor_affine_cachemask_backward(x, BOOL),
    "per_channel": lambda x: torch_ops.fake_quantize_per_channel_affine(x, SCALE, ZERO, 0, -8, 7),
    "per_channel_cachemask": lambda x: torch_ops.fake_quantize_per_channel_affine_cachemask(x, SCALE, ZERO, 0, -8, 7),
    "per_channel_cachemask_backward": lambda x: torch_ops.fake_quantize_per_channel_affine_cachemask_backward(x, BOOL),
    "learnable_per_tensor": lambda x: torch_ops.fake_quantize_learnable_per_tensor_affine(
        x, ONE, ONE_ZERO + 0.3, -8, 7, 0.5
    ),
    "learnable_per_channel": lambda x: torch_ops.fake_quantize_learnable_per_channel_affine(
        x, SCALE, ZERO + 0.3, 0, -8, 7
    ),
    "fused": fused(torch_ops.fused_moving_avg_obs_fake_quant),
    "fused_helper": fused(torch_ops.fused_moving_avg_obs_fq_helper),
}
FUNCTIONS = OWN | NAMED


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compiled_functions_have_eager_bits_forward_and_backward(name):
    function = FUNCTIONS[name]
    x, other = (X.clone().requires_grad_() for _ in range(2))
    expected, actual = function(x), compiled(function)(other)
    assert_same(expected, actual)
    y, z = (r[0] if isinstance(r, tuple) else r for r in (expected, actual))
    if y.requires_grad:
        dy = DY.expand_as(y)
        assert_same(torch.autograd.grad(y, x, dy), torch.autograd.grad(z, other, dy))


@pytest.mark.parametrize(
    ("function", "grid"),
    [
        (torch_ops.fake_quantize_learnable_per_tensor_affine_backward, (ONE, ONE_ZERO.float())),
        (torch_ops.fake_quantize_learnable_per_channel_affine_backward, (SCALE, ZERO.float(), 0)),
    ],
)
def test_compiled_learnable_backward_has_eager_dx_and_nearly_its_sums(function, grid):
    """Compiled code runs torch's operators, whose sums may differ in the last bit."""
    expected, actual = (run(DY, X, *grid, -8, 7, 0.5) for run in (function, compiled(function)))
    assert_same(expected[0], actual[0])
    torch.testing.assert_close(actual, expected)


needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, only_in_test_all])])
def test_compiled_gradients_of_learned_scales_have_eager_bits(backend):
    def function(x, scale, zero_point):
        return torch.relu(fq.fake_quantize_learned(OWN["channel"](x * 2), scale, zero_point, CHANNEL))

    leaves, others = ([t.clone().requires_grad_() for t in (X, SCALE, ZERO + 0.3)] for _ in range(2))
    expected, actual = function(*leaves), compiled(function, backend)(*others)
    assert_same(expected, actual)
    assert_same(torch.autograd.grad(expected, leaves, DY), torch.autograd.grad(actual, others, DY))


EIGHT = torch.linspace(0.1, 0.3, 8)
DYNAMIC = {
    "tensor": OWN["scale as a number"],
    "channel": lambda x: fq.fake_quantize(x, EIGHT, 0, LAST),
    "learned": lambda x: fq.fake_quantize_learned(x, EIGHT, 0, LAST),
    "static scale": lambda x: fq.fake_quantize(x, torch.full((8,), 0.1), 0, LAST),
    "range per token": OWN["dynamic"],
    "packed codes": lambda x: fq.dequantize(
        fq.quantize(x, 0.1, 0, AFFINE(), packed=True), 0.1, 0, AFFINE(), shape=tuple(x.shape)
    ),
    "torch's per tensor": NAMED["per_tensor"],
    "torch's per channel": lambda x: torch_ops.fake_quantize_per_channel_affine(
        x, EIGHT, torch.zeros(8).int(), 1, -8, 7
    ),
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_functions_are_not_recompiled_for_other_batch_sizes(name):
    counter, counts = CompileCounter("aot_eager"), []
    run = compiled(DYNAMIC[name], counter, dynamic=True)
    for batch in (2, 3, 17, 64):
        x = torch.randn(batch, 8, requires_grad=True)
        expected, actual = DYNAMIC[name](x), run(x)
        assert_same(expected, actual)
        if actual.requires_grad:
            assert_same(*(torch.autograd.grad(y.square().sum(), x) for y in (expected, actual)))
        counts.append(counter.frame_count)
    assert counts == counts[:1] * 4


class Layer(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 6)
        self.scale = torch.nn.Parameter(torch.full((6,), 0.1))

    def forward(self, x):
        weight = fq.fake_quantize_learned(self.weight, self.scale, 0, fq.QuantSpec(bits=4, axis=0), grad_factor=0.1)
        x = fq.fake_quantize(x, 0.05, 3, AFFINE(signed=False))
        return torch.nn.functional.linear(x, weight, self.bias)


def train(layer, step):
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    for x in torch.randn(5, 4, 8, generator=torch.Generator().manual_seed(2)):
        optimizer.zero_grad()
        step(x).square().sum().backward()
        optimizer.step()
    return tuple(p.detach().clone() for p in layer.parameters())


def test_training_a_compiled_layer_gives_eager_parameters():
    torch.manual_seed(3)
    eager, other = Layer(), Layer()
    other.load_state_dict(eager.state_dict())
    assert_same(train(eager, eager), train(other, compiled(other)))
    assert (eager.scale != 0.1).all()


# torch does not compile reentrant checkpoints.
@pytest.mark.parametrize(
    ("reentrant", "wrap"),
    [(False, lambda f: f), (True, lambda f: f), (False, compiled)],
    ids=["eager", "eager reentrant", "compiled"],
)
def test_activation_checkpointing_keeps_gradients(reentrant, wrap):
    torch.manual_seed(4)
    layer, x = Layer(), X.clone().requires_grad_()
    inputs = (x, *layer.parameters())
    expected = torch.autograd.grad(layer(x).square().sum(), inputs)
    wrap(lambda x: checkpoint(layer, x, use_reentrant=reentrant))(x).square().sum().backward()
    assert_same(expected, tuple(t.grad for t in inputs))


def test_compiled_functions_keep_channels_last_bits_and_strides():
    scale = torch.linspace(0.1, 0.3, 3)
    function = lambda x: fq.fake_quantize(x, scale, 0, AFFINE(axis=1), mask="packed")  # noqa: E731
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    other = x.detach().clone().requires_grad_()
    (y, mask), (z, other_mask) = function(x), compiled(function)(other)
    assert_same((y, mask), (z, other_mask))
    for dy in (torch.randn(2, 3, 4, 5), torch.randn_like(y)):
        expected, actual = (torch.autograd.grad(r, v, dy, retain_graph=True)[0] for r, v in ((y, x), (z, other)))
        assert torch.equal(expected, actual)


# --- export and tracing ---------------------------------------------------------------------------

EXPORTED = ["scale as a number", "channel", "learned", "dynamic", "per_tensor", "per_channel", "learnable_per_tensor"]


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def our_operators(graph):
    return [node.target.name() for node in graph.nodes if "fakequant" in str(node.target)]


# Raised by torch in `run_decompositions`.
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", EXPORTED)
def test_exported_functions_have_eager_bits_and_keep_our_operators(name):
    function = FUNCTIONS[name]
    program = torch.export.export(Module(function), (X,))
    assert_same(function(DY), program.module()(DY))
    assert our_operators(program.run_decompositions().graph) == our_operators(program.graph) != []


@pytest.mark.parametrize("strict", [False, True], ids=["non-strict", "strict"])
@pytest.mark.parametrize("name", ["tensor", "channel", "learned", "torch's per tensor", "torch's per channel"])
def test_functions_exported_with_a_dynamic_batch_have_eager_bits(name, strict):
    shapes = {"x": {0: torch.export.Dim("batch", min=2)}}
    program = torch.export.export(Module(DYNAMIC[name]), (X,), dynamic_shapes=shapes, strict=strict)
    assert our_operators(program.graph)
    for rows in (2, 5, 40):
        x = torch.randn(rows, 8)
        assert_same(DYNAMIC[name](x), program.module()(x))


@pytest.mark.parametrize("name", EXPORTED)
def test_functions_under_make_fx_and_fake_tensors_keep_our_operators_and_shapes(name):
    function = FUNCTIONS[name]
    traced, real = make_fx(function)(X), function(DY)
    assert our_operators(traced.graph)
    assert_same(real, traced(DY))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = function(mode.from_tensor(DY))
    assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


# --- errors ---------------------------------------------------------------------------------------


def test_compiled_functions_check_scale_and_zero_point_at_run_time():
    run = compiled(lambda x, s, z: fq.fake_quantize(x, s, z, CHANNEL))
    assert_same(run(X, SCALE, ZERO), fq.fake_quantize(X, SCALE, ZERO, CHANNEL))
    with pytest.raises(ValueError, match="`scale` must be finite and greater than 0 in float32, got 0"):
        run(X, torch.zeros(6), ZERO)
    with pytest.raises(ValueError, match="`zero_point` must be between -8 and 7"):
        run(X, SCALE, ZERO + 9)


def test_compiled_choose_qparams_refuses_an_infinite_range_at_run_time():
    def choose(low, high):
        return fq.choose_qparams(low, high, AFFINE()).scale

    for run in (choose, compiled(choose)):
        with pytest.raises(ValueError, match="must be finite with lo <= hi"):
            run(torch.tensor(torch.inf), X[0, 0])
