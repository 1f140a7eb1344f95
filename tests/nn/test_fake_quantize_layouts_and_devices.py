"""`nn.FakeQuantize` on every memory layout, the meta device and fake tensors."""

import itertools
from contextlib import nullcontext

import pytest

import fakequant as fq
from fake_quantize_cases import (
    AFFINE,
    BATCHES,
    assert_unchanged,
    each_observer,
    each_running,
    run,
    state_of,
    without_compiled_nodes,
)
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits, assert_same_state

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
observers = pytest.importorskip("fakequant.observers")
FakeTensorMode = pytest.importorskip("torch._subclasses").FakeTensorMode

# --- layouts ----------------------------------------------------------------------------------------

torch.manual_seed(0)
IMAGE = torch.randn(2, 3, 4, 5)
LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "gaps": lambda x: torch.stack([x, x * 9], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
    "negated": lambda x: torch._neg_view((-x).contiguous()),
}
IMAGE_SPECS = {
    "tensor": AFFINE,
    "channel": fq.QuantSpec(bits=4, symmetric=False, axis=1),
    "last axis": fq.QuantSpec(bits=4, axis=-1),
    "group": fq.QuantSpec(bits=4, axis=1, group_size=3),
    "block": fq.QuantSpec(bits=4, axis=-1, group_size=5, group_rows=2),
    "last group": fq.QuantSpec(bits=4, axis=-1, group_size=5),
    "token": presets.int8_per_token(),
}


@pytest.mark.parametrize("way", [nullcontext, without_compiled_nodes], ids=["nodes", "Python"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("spec", IMAGE_SPECS.values(), ids=IMAGE_SPECS)
def test_memory_layout_does_not_change_values_or_gradients(spec, layout, way):
    observer = None if spec.granularity == "token" else observers.MovingAverage(0.3)
    module, twin = (fqnn.FakeQuantize(spec, observer, shape=IMAGE.shape) for _ in range(2))
    for training, scale in ((True, 1.0), (True, 4.0), (False, 9.0)):
        x = layout(IMAGE * scale).requires_grad_()
        dy = torch.randn(x.shape)
        expected = run(twin.train(training), x.detach().clone(memory_format=torch.contiguous_format), dy)
        with way():
            y = module.train(training)(x)
            (dx,) = torch.autograd.grad(y, x, dy)
        assert_same_bits(expected[0], y.contiguous(), "y")
        assert_same_bits(expected[1], dx.contiguous(), "dx")
        assert y.stride() == torch.empty_like(x).stride()
    assert_same_state(twin, module)


# --- other devices, fake tensors --------------------------------------------------------------------


@each_observer
def test_meta_quantizer_returns_meta_tensors(observer):
    module = fqnn.FakeQuantize(AFFINE, observer, device="meta")
    for training, quantizing in itertools.product([True, False], repeat=2):
        module.train(training).quantizing = quantizing
        y = module(torch.empty(6, 8, device="meta"))
        assert (y.shape, y.device.type) == ((6, 8), "meta")
    assert {v.device.type for v in module.state_dict().values()} == {"meta"}


@each_observer
def test_quantizer_from_the_meta_device_equals_a_new_one_after_reset(observer):
    new = fqnn.FakeQuantize(AFFINE, observer)
    module = fqnn.FakeQuantize(AFFINE, observer, device="meta").to_empty(device="cpu")
    for value in module.buffers():  # uninitialized memory
        value.fill_(77)
    module.reset_parameters()
    assert_same_state(new, module)
    assert module.nonfinite == 0
    for m in (new, module):
        m.eval()
        m.train()
    assert str(new) == str(module)
    assert_same_bits(new(BATCHES[0]), module(BATCHES[0]), "y")
    assert_same_state(new, module)


@each_observer
def test_reset_parameters_forgets_observations_and_keeps_the_switches(observer):
    module = fqnn.FakeQuantize(AFFINE, observer)
    module(BATCHES[0])
    module.quantizing = False
    module(BATCHES[1])
    module.reset_parameters()
    module.quantizing = True
    assert_same_state(fqnn.FakeQuantize(AFFINE, observer), module)


@each_running
def test_fake_tensors_get_shapes_and_leave_real_quantizers_unchanged(observer):
    module = fqnn.FakeQuantize(AFFINE, observer)
    module(BATCHES[0])
    before = state_of(module)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = fqnn.FakeQuantize(AFFINE, observer)
        for training in (True, False):
            x = torch.empty(6, 8, requires_grad=True)
            y = fake.train(training)(x)
            assert (y.shape, y.requires_grad) == ((6, 8), True)
    assert_unchanged(before, module)


def test_functional_call_updates_the_buffers_passed_to_it():
    module, twin = (fqnn.FakeQuantize(AFFINE) for _ in range(2))
    before = state_of(module)
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    y = torch.func.functional_call(module, buffers, (BATCHES[0],))
    assert_same_bits(twin(BATCHES[0]), y, "y")
    assert_unchanged(before, module)
    for name, value in twin.named_buffers():
        assert_same_bits(value, buffers[name], name)
