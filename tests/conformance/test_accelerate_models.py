"""Under `accelerate`, modules, whole models and torch's tools on top of autograd compute the same bits."""

import pytest

import fakequant
from accelerated import (  # noqa: F401
    assert_same_tensors,
    compare,
    counted_kernels,
    decelerated,
    float32,
    int32,
    int64,
)
from torch_bridge import torch

from torch.ao import quantization as tq  # isort: skip
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize  # isort: skip
from torch.ao.quantization.quantize_fx import prepare_qat_fx  # isort: skip

# torch.ao is deprecated and warns in many ways.
pytestmark = [pytest.mark.usefixtures("torch_on_one_thread"), pytest.mark.filterwarnings("ignore")]


def batches(*shape, count=6):
    """Yields batches of changing ranges, the last one in another memory format."""
    generator = torch.Generator().manual_seed(3)
    for step in range(count):
        x = torch.randn(shape, generator=generator) * (0.1, 1, 30)[step % 3]
        yield x.transpose(0, -1).contiguous().transpose(0, -1) if step == count - 1 else x


# --- modules of torch.ao ------------------------------------------------------------------

MODULES = {
    "FakeQuantize, per tensor affine": tq.default_fake_quant,
    "FakeQuantize, per channel symmetric": tq.default_per_channel_weight_fake_quant,
    "FakeQuantize, histogram": tq.fake_quantize.default_histogram_fake_quant,
    "FakeQuantize, float zero points": tq.fake_quantize.default_embedding_fake_quant,
    "FusedMovingAvgObsFakeQuantize, per tensor": tq.default_fused_act_fake_quant,
    "FusedMovingAvgObsFakeQuantize, per channel": tq.default_fused_per_channel_wt_fake_quant,
}


def module_steps(make):
    """Returns outputs, gradients and states of steps that observe, quantize, do both or neither."""
    module, results = make(), []
    switches = [(1, 1), (1, 1), (1, 0), (0, 1), (0, 0), (1, 1)]
    for x, (observe, quantize) in zip(batches(8, 6), switches, strict=True):
        module.enable_observer(observe)
        module.enable_fake_quant(quantize)
        x = x.detach().requires_grad_()
        y = module(x)
        results += [y, *torch.autograd.grad(y, x, torch.linspace(-1, 1, 48).reshape(8, 6))]
        results += [value.clone() for value in module.state_dict().values()]
    return results


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_accelerated_torch_ao_modules_keep_their_bits(make):
    compare(module_steps, make)


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_accelerated_torch_ao_modules_run_on_our_kernels(make):
    module = make()
    module(x)  # torch initializes empty state itself
    with counted_kernels() as calls, fakequant.accelerate():
        with_gradient(module)
    assert len(calls) == 2
    assert all(ours for _, ours in calls), calls


def learnable(per_channel, **options):
    if per_channel:
        observer, scheme = tq.MovingAveragePerChannelMinMaxObserver, torch.per_channel_affine
        options |= dict(channel_len=8)
    else:
        observer, scheme = tq.MovingAverageMinMaxObserver, torch.per_tensor_affine
    options = dict(quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=scheme, **options)
    return _LearnableFakeQuantize(observer, **options)


def learnable_steps(per_channel, options):
    """Runs steps that estimate scale and zero point, then steps that learn them.

    Returns outputs, input gradients and states, and separately the gradients that are sums.
    """
    module, results, sums = learnable(per_channel, **options), [], []
    for step, x in enumerate(batches(8, 6)):
        if step == 3:
            module.enable_param_learning()
        x = x.detach().requires_grad_()
        y = module(x)
        leaves = [x, module.scale, module.zero_point]
        dx, *learned = torch.autograd.grad(y, leaves if step >= 3 else leaves[:1], torch.ones_like(y))
        results += [y, dx, *(value.clone() for value in module.state_dict().values())]
        sums += learned
    return results, sums


LEARNABLE = [
    pytest.param(dict(use_grad_scaling=True), id="grad scaling"),
    pytest.param({}, id="no grad scaling"),
]


@pytest.mark.parametrize("options", LEARNABLE)
@pytest.mark.parametrize("per_channel", [False, True], ids=["per_tensor", "per_channel"])
def test_an_accelerated_learnable_module_keeps_its_bits_and_nearly_its_sums(per_channel, options):
    expected, expected_sums = learnable_steps(per_channel, options)
    with fakequant.accelerate():
        actual, actual_sums = learnable_steps(per_channel, options)
    assert_same_tensors(expected, actual)
    assert len(actual_sums) == 6
    # Long sums: torch adds in float32, in an order that depends on its threads.
    torch.testing.assert_close(actual_sums, expected_sums, rtol=1e-5, atol=1e-5)


# --- models -------------------------------------------------------------------------------


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def convolutions():
    layers = torch.nn.Conv2d(1, 6, 3), torch.nn.BatchNorm2d(6), torch.nn.ReLU(), torch.nn.Conv2d(6, 4, 2)
    return torch.nn.Sequential(*layers, torch.nn.Flatten()).to(memory_format=torch.channels_last)


def train(make, shape, prepare):
    """Returns the losses of 20 SGD steps on fixed data, and all parameters and buffers at the end."""
    torch.manual_seed(0)
    data, labels = torch.randn(32, *shape), torch.randint(4, (32,))
    model = prepare(make().train(), data)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(data), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    assert losses[-1] < losses[0] * 0.8
    return [*losses, *model.state_dict().values()]


def prepared_by_fx(model, data):
    return prepare_qat_fx(model, tq.get_default_qat_qconfig_mapping("x86"), (data,))


@pytest.mark.parametrize(("make", "shape"), [(mlp, (8,)), (convolutions, (1, 4, 4))], ids=["mlp", "convolutions"])
def test_training_an_fx_prepared_model_gives_the_same_bits_when_accelerated(make, shape):
    compare(train, make, shape, prepared_by_fx)


def test_an_fx_prepared_model_trains_on_our_kernels():
    with counted_kernels() as calls, fakequant.accelerate():
        train(mlp, (8,), prepared_by_fx)
    # torch initializes the empty state of the two weights itself.
    assert [name for name, ours in calls if not ours] == ["_fused_moving_avg_obs_fq_helper"] * 2


def test_training_a_pt2e_prepared_model_gives_the_same_bits_when_accelerated():
    quantize = pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    x86 = pytest.importorskip("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")

    def prepared(model, data):
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config(is_qat=True))
        exported = torch.export.export(model, (data,)).module()
        return quantize.prepare_qat_pt2e(exported, quantizer)

    compare(train, mlp, (8,), prepared)


# --- on top of autograd -------------------------------------------------------------------

x, dy = torch.linspace(-2, 2, 24).reshape(4, 6), torch.linspace(-1, 1, 24).reshape(4, 6)


def per_tensor(x):
    return torch.fake_quantize_per_tensor_affine(x, 0.1, 1, -8, 7)


def per_channel(x):
    return torch.fake_quantize_per_channel_affine(x, float32(0.1, 0.2, 0.3, 1), int32(0, 1, -8, 7), 0, -8, 7)


def fused(x):
    state = torch.full((1,), torch.inf), torch.full((1,), -torch.inf), torch.ones(1), int32(0)
    return torch.fused_moving_avg_obs_fake_quant(x, int64(1), int64(1), *state, 0.01, 0, 255, -1)


def learned(x):
    return torch._fake_quantize_learnable_per_tensor_affine(x, float32(0.1), float32(1.3), -8, 7, 0.5)


FUNCTIONS = [per_tensor, per_channel, fused, learned]
by_function = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
by_masked_function = pytest.mark.parametrize("function", FUNCTIONS[:3], ids=lambda f: f.__name__)


def with_gradient(function):
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    return y, *torch.autograd.grad(y, leaf, dy)


@by_masked_function
def test_accelerated_functions_save_torchs_mask(function):
    def mask():
        return [function(x.clone().requires_grad_()).grad_fn._saved_mask]

    compare(mask)


@by_function
def test_saved_tensor_hooks_see_the_same_tensors_when_accelerated(function):
    seen = []

    def run():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t.clone(), lambda t: t):
            results = with_gradient(function)
        saved = seen.copy()
        seen.clear()
        return [*results, *saved]

    compare(run)


@by_function
def test_checkpointed_accelerated_functions_keep_their_bits(function):
    compare(with_gradient, lambda x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False))


@by_masked_function
def test_double_backward_of_accelerated_functions_keeps_its_bits(function):
    def run():
        leaf, gradient = x.clone().requires_grad_(), dy.clone().requires_grad_()
        (dx,) = torch.autograd.grad(function(leaf), leaf, gradient, create_graph=True)
        return dx, *torch.autograd.grad(dx.square().sum(), gradient)

    compare(run)


def test_a_second_derivative_that_torch_refuses_raises_the_same_error_when_accelerated():
    def run():
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(learned(leaf).square().sum(), leaf, create_graph=True)
        torch.autograd.grad(dx.sum(), leaf)

    with pytest.raises(RuntimeError) as torchs:
        run()
    with fakequant.accelerate(), pytest.raises(RuntimeError) as ours:
        run()
    assert str(ours.value) == str(torchs.value)


@by_function
def test_compiled_accelerated_functions_keep_their_bits(function):
    def run():
        torch._dynamo.reset()
        return with_gradient(torch.compile(lambda x: function(x * 2) + 1, backend="aot_eager", fullgraph=True))

    compare(run)


@pytest.mark.parametrize("function", [per_tensor, per_channel], ids=lambda f: f.__name__)
def test_functional_transforms_of_accelerated_functions_keep_their_bits(function):
    compare(lambda: [torch.func.grad(lambda x: (function(x) * dy).sum())(x)])
    compare(lambda: [torch.vmap(function)(torch.stack([x, x * 0.3]))])
    compare(lambda: [torch.func.jacrev(function)(x)])


@by_function
def test_accelerated_functions_keep_their_bits_in_inference_mode_and_traced(function):
    def inferred():
        with torch.inference_mode():
            return [function(x.clone())]

    compare(inferred)
    compare(lambda: [torch.jit.trace(function, x)(x * 0.7)])
