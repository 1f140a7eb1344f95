"""Post-training methods on weights in float formats and with block scales."""

import copy

import pytest
from ptq_models import output_error, randn, ready

import fakequant as fq
from fakequant import presets, ptq, recipes

torch = pytest.importorskip("torch")
nn = torch.nn

DATA = [randn(64, 48, seed=s) * torch.logspace(-1, 1, 48) for s in (1, 2)]
MXINT8 = fq.QuantConfig(default=fq.LayerConfig(weight=presets.mxint8(), input=presets.mxint8()))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 64), nn.LayerNorm(64), nn.Linear(64, 33))


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("method", [ptq.adaround, ptq.gptq], ids=["adaround", "gptq"])
@pytest.mark.parametrize(
    ("config", "format"), [(recipes.fp8(), "e4m3fn"), (recipes.nvfp4(), "e2m1")], ids=["fp8", "nvfp4"]
)
def test_rounding_leaves_float_formats_alone_and_says_why(method, config, format):
    made = ready(model(), DATA, config)
    before = state(made)
    found = method(made, DATA, progress=False)
    assert {row.reason for row in found.layers} == {f"its weight is in {format}, whose steps are not equal"}
    after = made.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("method", [ptq.adaround, ptq.gptq], ids=["adaround", "gptq"])
def test_rounding_works_on_integers_with_block_scales(method):
    floats = model().eval()
    made = ready(copy.deepcopy(floats), DATA, MXINT8)
    before = output_error(made, floats, DATA)
    scales = {path: q.scale.clone() for path, q in fq.nn.quantizers(made) if q.scale is not None}
    method(made, DATA, progress=False)
    assert output_error(made, floats, DATA) < 0.8 * before
    for path, q in fq.nn.quantizers(made):
        if path in scales:
            assert torch.equal(q.scale, scales[path]), path
    assert torch.equal(copy.deepcopy(made)(DATA[0]), made(DATA[0]))


@pytest.mark.parametrize("config", [recipes.fp8(), recipes.mxfp8(), recipes.nvfp4()], ids=["fp8", "mxfp8", "nvfp4"])
def test_correct_bias_lowers_the_error_of_float_formats(config):
    floats = model().eval()
    made = ready(copy.deepcopy(floats), DATA, config)
    before = output_error(made, floats, DATA)
    ptq.correct_bias(made, DATA, progress=False)
    assert output_error(made, floats, DATA) < before


@pytest.mark.parametrize("method", [ptq.smooth, ptq.equalize], ids=["smooth", "equalize"])
@pytest.mark.parametrize("config", [recipes.fp8(), recipes.mxfp8(), recipes.nvfp4()], ids=["fp8", "mxfp8", "nvfp4"])
def test_scaling_channels_keeps_the_float_model_and_changes_some_layer(method, config):
    floats = model().eval()
    made = ready(copy.deepcopy(floats), DATA, config)
    found = method(made, DATA, progress=False)
    assert any(row.reason is None for row in found.layers)
    fq.nn.switch_quantizers(made, observing=False, quantizing=False)
    torch.testing.assert_close(made(DATA[0]), floats(DATA[0]), rtol=1e-4, atol=1e-4)  # factors are not powers of two
