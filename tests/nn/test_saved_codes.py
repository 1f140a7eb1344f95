"""Quantized layers save codes for the backward pass, with the same gradients."""

import copy
import dataclasses
import math
import pickle

import pytest

import fakequant as fq
from fakequant import recipes
from fakequant.config import LayerConfig, QuantConfig
from fakequant.formats import FLOAT_FORMATS
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
saved_codes = pytest.importorskip("fakequant.nn._saved_codes")
nn = torch.nn

CONFIGS = {
    "int8": recipes.int8(),
    "dynamic": recipes.int8_dynamic(),
    "4 bits": recipes.w4a8().rule(input=fq.presets.uint4()),
    "2 bits, learned": recipes.lsq(2, first_last_bits=None),
    "weights only": recipes.int4_weight_only(8),
    "fp8": recipes.fp8(),
    "fp8, learned": QuantConfig(
        default=LayerConfig(weight=fq.presets.fp8_e4m3(axis=0), input=fq.presets.fp8_e5m2(), learned=True)
    ),
    "mxfp8": recipes.mxfp8(),
    "mxfp6": recipes.mxfp8().rule(weight=fq.presets.mxfp6(), input=fq.presets.mxfp6(format="e3m2")),
    "mxint8": recipes.mxfp8().rule(weight=fq.presets.mxint8(), input=fq.presets.mxint8()),
    "nvfp4": recipes.nvfp4(),
}
LAYERS = {
    "linear": (lambda: nn.Linear(64, 40), (33, 64)),
    "linear without bias, three axes": (lambda: nn.Linear(64, 40, bias=False), (3, 11, 64)),
    "linear, short blocks": (lambda: nn.Linear(40, 24), (9, 40)),
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
    fq.prepare(model, dataclasses.replace(config, save_codes=save_codes), x.nan_to_num())
    return fq.calibrate(model, [x.nan_to_num()], progress=False)


def step(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    (y * torch.linspace(-1, 1, y.numel()).reshape(y.shape)).sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


@by_layer
@by_config
def test_saving_codes_does_not_change_gradients(config, make, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3
    results = [step(prepared(make, config, x, on), x) for on in (True, False)]
    for with_codes, without in zip(*results, strict=True):
        assert_same_bits(with_codes, without)


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
        assert_same_bits(a.nan_to_num(), b.nan_to_num())


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
    assert_same_bits(*gradients)


@pytest.mark.parametrize("config", ["int8", "dynamic", "fp8", "mxfp8", "mxfp6", "mxint8", "nvfp4"])
@pytest.mark.parametrize("on", [True, False], ids=["codes", "floats"])
def test_saving_codes_frees_the_quantized_tensors(on, config):
    x, kept = torch.randn(8, 64), []
    model = prepared(lambda: nn.Linear(64, 4), CONFIGS[config], x, on)
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
        if on:
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
        else:
            model(x).sum().backward()
        gradients.append(model[0].weight.grad)
    assert_same_bits(*gradients)


def test_deepcopy_keeps_save_codes():
    model = fq.prepare(
        nn.Sequential(nn.Linear(4, 4)), dataclasses.replace(recipes.int8(), save_codes=False), torch.ones(1, 4)
    )
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


@pytest.mark.parametrize(
    ("config", "most"), [("fp8", 1.0), ("mxfp8", 1.0 + 4 / 32), ("mxfp6", 0.75 + 4 / 32), ("nvfp4", 0.5 + 4 / 16)]
)
def test_bytes_per_element_that_stay_for_the_backward_pass(config, most):
    x = torch.randn(64, 64)
    model = prepared(lambda: nn.Linear(64, 4), CONFIGS[config], x, True)
    found = []
    model[0].input_quantizer.register_forward_hook(lambda *a: found.append(saved_codes._encode(a[2], a[0], VIEW)))
    model(x)
    scale = found[0].scale
    assert (found[0].codes.nbytes + scale.nbytes * (scale.numel() > 1)) / x.numel() == most


VIEW = ((64, 64), (64, 1), 0)


def test_values_at_the_edges_of_float_formats_are_restored():
    edges = [0.0, -0.0, 2.0**-9, -(2.0**-9), 2.0**-10, 448, -448, 464, 500, math.inf, -math.inf, 1e-45, 1e30]
    x = torch.tensor(edges).repeat(8, 8)
    for spec in (fq.QuantSpec(format=name) for name in FLOAT_FORMATS):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            quantizer = fq.nn.FakeQuantize(spec, fq.observers.Fixed(-spec.largest, spec.largest)).eval()
            y = quantizer(x.to(dtype))
            view = (tuple(y.shape), y.stride(), 0)
            restored = saved_codes._encode(y, quantizer, view).restore()
            bits = torch.int32 if dtype == torch.float32 else torch.int16
            assert torch.equal(restored.view(bits), y.view(bits)), (spec, dtype)


class TestScalesOfTheLastTensor:
    """Quantizers that follow the data hand over the scales of the result that was computed last, and of no other."""

    def test_another_tensor_has_no_scales(self):
        quantizer = fq.nn.FakeQuantize(fq.presets.mxfp8())
        first = quantizer(torch.randn(2, 32))
        assert quantizer._qparams_for(first) is not None
        second = quantizer(torch.randn(2, 32) * 100)
        assert quantizer._qparams_for(first) is None
        assert quantizer._qparams_for(second) is not None
        assert quantizer._qparams_for(second.clone()) is None

    def test_scales_are_freed_with_the_result(self):
        quantizer = fq.nn.FakeQuantize(fq.presets.nvfp4())
        y = quantizer(torch.randn(2, 32))
        assert quantizer._last is not None
        del y
        assert quantizer._last is None

    def test_copies_and_pickles_do_not_hold_them(self):
        quantizer = fq.nn.FakeQuantize(fq.presets.nvfp4())
        y = quantizer(torch.randn(2, 32))
        for made in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer))):
            assert made._last is None
            assert made._qparams_for(y) is None
            made(torch.randn(2, 32))
        assert not [name for name in quantizer.state_dict() if "last" in name]

    def test_without_gradients_nothing_is_kept(self):
        quantizer = fq.nn.FakeQuantize(fq.presets.nvfp4())
        with torch.no_grad():
            y = quantizer(torch.randn(2, 32))
        assert quantizer._qparams_for(y) is None

    def test_nan_in_a_short_block_after_a_finite_tensor_is_not_encoded(self):
        quantizer = fq.nn.FakeQuantize(fq.presets.nvfp4())
        quantizer(torch.randn(2, 32))
        x = torch.randn(2, 40)
        x[1, 3] = math.nan
        with pytest.warns(RuntimeWarning, match="NaN or infinite"):
            y = quantizer(x)
        assert saved_codes._encode(y, quantizer, (tuple(y.shape), y.stride(), 0)) is None
