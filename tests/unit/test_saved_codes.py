"""Quantized layers save codes for the backward pass, with the same gradients."""

import copy
import dataclasses
import math

import pytest

import fakequant as fq
from fakequant import recipes

torch = pytest.importorskip("torch")
saved_codes = pytest.importorskip("fakequant.nn._saved_codes")
nn = torch.nn

CONFIGS = {
    "int8": recipes.int8(),
    "dynamic": recipes.int8_dynamic(),
    "4 bits": recipes.w4a8().rule(input=fq.presets.uint4()),
    "2 bits, learned": recipes.lsq(2, first_last_bits=None),
    "weights only": recipes.int4_weight_only(8),
}
LAYERS = {
    "linear": (lambda: nn.Linear(64, 40), (33, 64)),
    "linear without bias, three axes": (lambda: nn.Linear(64, 40, bias=False), (3, 11, 64)),
    "linear, one row": (lambda: nn.Linear(64, 40), (64,)),
    "conv": (lambda: nn.Conv2d(8, 16, 3, padding=1), (2, 8, 9, 9)),
    "conv, reflected": (lambda: nn.Conv2d(8, 16, 3, padding=1, padding_mode="reflect"), (2, 8, 9, 9)),
    "grouped conv": (lambda: nn.Conv1d(8, 16, 3, groups=4), (2, 8, 20)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 16, 3, stride=2), (2, 8, 9, 9)),
}
by_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
by_layer = pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=LAYERS)


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(saved_codes, "_SMALLEST", 1)


def prepared(make, config, x, save_codes):
    torch.manual_seed(0)
    model = nn.Sequential(make())
    fq.prepare(model, dataclasses.replace(config, save_codes=save_codes))
    return fq.calibrate(model, [x.nan_to_num()], progress=False)


def step(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def same_bits(a, b):
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@by_layer
@by_config
def test_saving_codes_does_not_change_gradients(config, make, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    results = [step(prepared(make, config, x, on), x) for on in (True, False)]
    for with_codes, without in zip(*results, strict=True):
        assert same_bits(with_codes, without)


@by_config
def test_saving_codes_keeps_nan(config):
    x = torch.randn(8, 64)
    x[3, 5] = math.nan
    with pytest.warns(RuntimeWarning) if config.default.input and not config.default.learned else _nothing():
        with_codes = step(prepared(lambda: nn.Linear(64, 4), config, x, True), x)
    with pytest.warns(RuntimeWarning) if config.default.input and not config.default.learned else _nothing():
        without = step(prepared(lambda: nn.Linear(64, 4), config, x, False), x)
    for a, b in zip(with_codes, without, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert same_bits(a.nan_to_num(), b.nan_to_num())


class _nothing:
    def __enter__(self):
        return None

    def __exit__(self, *_):
        return None


def test_weight_changed_before_backward_is_an_error():
    x = torch.randn(8, 64)
    model = prepared(lambda: nn.Linear(64, 4), CONFIGS["int8"], x, True)
    loss = model(x.requires_grad_()).sum()
    with torch.no_grad():
        model[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_scales_moved_before_backward_do_not_change_gradients():
    x = torch.randn(8, 64)
    gradients = []
    for on in (True, False):
        model = prepared(lambda: nn.Linear(64, 4), CONFIGS["int8"], x, on)
        loss = model(x).sum()
        model(x * 100)  # moves the range
        loss.backward()
        gradients.append(model[0].weight.grad)
    assert same_bits(*gradients)


@pytest.mark.parametrize("on", [True, False], ids=["codes", "floats"])
def test_saving_codes_frees_the_quantized_tensors(on):
    x, kept = torch.randn(8, 64), []
    model = prepared(lambda: nn.Linear(64, 4), CONFIGS["int8"], x, on)
    for quantizer in (model[0].input_quantizer, model[0].weight_quantizer):
        quantizer.register_forward_hook(lambda *a: kept.append(a[2].untyped_storage()._weak_ref()))
    y = model(x.requires_grad_())
    assert [torch.UntypedStorage._expired(reference) for reference in kept] == [on, on]
    y.sum().backward()


def test_other_saved_tensor_hooks_receive_float_tensors():
    x = torch.randn(8, 64)
    model = prepared(lambda: nn.Linear(64, 4), CONFIGS["int8"], x, True)
    shapes = []

    def pack(t):
        shapes.append((tuple(t.shape), t.dtype))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = model(x.clone().requires_grad_())
    assert ((8, 64), torch.float32) in shapes
    y.sum().backward()


def test_checkpointing_with_saved_codes_gives_the_same_gradients():
    x = torch.randn(8, 64)
    gradients = []
    for on in (True, False):
        model = prepared(lambda: nn.Linear(64, 4), CONFIGS["int8"], x, True)
        fq.nn.switch_quantizers(model, frozen=True)  # the forward pass runs twice
        if on:
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
        else:
            model(x).sum().backward()
        gradients.append(model[0].weight.grad)
    assert same_bits(*gradients)


def test_deepcopy_keeps_save_codes():
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4)), dataclasses.replace(recipes.int8(), save_codes=False))
    assert not copy.deepcopy(model)[0]._fakequant.save_codes
    assert "_fakequant" not in fq.unprepare(model)[0].__dict__


def test_saving_codes_reads_a_parametrized_weight_once():
    x, results = torch.randn(8, 64), []
    for on in (True, False):
        model = prepared(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(64, 4)), CONFIGS["int8"], x, on)
        model.train()
        results.append([*step(model, x), *model.buffers()])
    for with_codes, without in zip(*results, strict=True):
        assert torch.equal(with_codes, without)
