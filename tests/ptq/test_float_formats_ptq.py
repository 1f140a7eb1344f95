"""Post-training methods on weights in float formats and with block scales."""

import copy

import pytest

import fakequant as fq
from fakequant import presets, ptq, recipes
from ptq_models import output_error, randn, ready

torch = pytest.importorskip("torch")
nn = torch.nn

from fakequant.ptq._gptq import solver_of  # noqa: E402
from fakequant.ptq._quadratic_error import Moments, RoundingProblem, descend  # noqa: E402

DATA = [randn(64, 48, seed=s) * torch.logspace(-1, 1, 48) for s in (1, 2)]
MXINT8 = fq.QuantConfig(default=fq.LayerConfig(weight=presets.mxint8(), input=presets.mxint8()))


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 64), nn.LayerNorm(64), nn.Linear(64, 33))


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    ("config", "format"), [(recipes.fp8(), "e4m3fn"), (recipes.nvfp4(), "e2m1")], ids=["fp8", "nvfp4"]
)
def test_adaround_leaves_float_formats_alone_and_says_why(config, format):
    made = ready(model(), DATA, config)
    before = state(made)
    found = ptq.adaround(made, DATA, progress=False)
    assert {row.reason for row in found.layers} == {f"its weight is in {format}, whose steps are not equal"}
    after = made.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


FLOATS = {
    "fp8": recipes.fp8(),
    "mxfp8": recipes.mxfp8(),
    "nvfp4": recipes.nvfp4(),
    "mxfp4": recipes.mxfp4_weight_only(),
    "mxfp6": fq.QuantConfig(default=fq.LayerConfig(weight=presets.mxfp6())),
    "fnuz": fq.QuantConfig(default=fq.LayerConfig(weight=fq.QuantSpec(format="e4m3fnuz", axis=0))),
}


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("config", FLOATS.values(), ids=FLOATS)
def test_gptq_rounds_to_values_of_a_float_format(config, act_order):
    floats = model().eval()
    made = ready(copy.deepcopy(floats), DATA, config)
    before = output_error(made, floats, DATA)
    layers = [layer for layer in made if isinstance(layer, nn.Linear)]
    for layer in layers:
        layer.weight_quantizer(layer.weight)  # its scales follow the weight until now
    scales = [layer.weight_quantizer.scale.clone() for layer in layers]
    found = ptq.gptq(made, DATA, act_order=act_order, progress=False)
    assert all(row.after >= row.before for row in found.layers)
    assert output_error(made, floats, DATA) < 0.7 * before
    for layer, scale in zip(layers, scales, strict=True):
        assert torch.equal(layer.weight_quantizer.scale, scale)
        assert torch.equal(layer.weight_quantizer(layer.weight), layer.weight)
    assert torch.equal(copy.deepcopy(made)(DATA[0]), made(DATA[0]))


def problem_of(format, inputs=6):
    """A weight of three outputs, and inputs that depend on each other."""
    spec, weight = fq.QuantSpec(format=format), randn(1, 3, inputs)
    x = (randn(40, inputs, seed=2) + 2 * randn(40, 1, seed=3)).double()
    a = (x.T @ x)[None]
    b = weight.double() @ a
    moments = Moments(weight, a, b, (b * weight).sum(-1))
    scale = torch.full(weight.shape, 0.5)
    return RoundingProblem(weight, scale, torch.zeros_like(scale), 0, 0, moments, spec)


@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("format", ["e2m1", "e3m2"])
def test_compensation_alone_lowers_the_error_on_a_float_grid(format, act_order):
    problem = problem_of(format, inputs=32)
    codes = solver_of(problem.moments.a, act_order)(problem)
    assert torch.isin(codes, torch.from_numpy(problem.float_grid.float_format.grid())).all()
    least = problem.moments.error(problem.values(problem.nearest()))
    assert problem.moments.error(problem.values(codes)).sum() < 0.9 * least.sum()


@pytest.mark.parametrize("format", ["e2m1", "e4m3fn"])
def test_codes_changed_one_by_one_reach_the_best_single_changes(format):
    """No weight can be moved to another value of the format with a smaller error."""
    problem = problem_of(format)
    moments, grid = problem.moments, torch.from_numpy(problem.float_grid.float_format.grid()).double()
    codes = descend(problem, problem.nearest()).double()
    assert torch.isin(codes, grid).all()
    least = moments.error(problem.values(codes))
    for k in range(6):
        for value in grid:
            other = codes.clone()
            other[..., k] = value
            assert (moments.error(problem.values(other)) >= least * (1 - 1e-9)).all()


@pytest.mark.parametrize("method", [ptq.adaround, ptq.gptq], ids=["adaround", "gptq"])
def test_rounding_works_on_integers_with_block_scales(method):
    floats = model().eval()
    made = ready(copy.deepcopy(floats), DATA, MXINT8)
    before = output_error(made, floats, DATA)
    scales = {path: q.scale.clone() for path, q in fq.nn.named_quantizers(made) if q.scale is not None}
    method(made, DATA, progress=False)
    assert output_error(made, floats, DATA) < 0.8 * before
    for path, q in fq.nn.named_quantizers(made):
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
