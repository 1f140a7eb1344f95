"""Golden models: literal integers, exact sums, folded batch norms, rounding to the next grid."""

import copy

import pytest

import fakequant as fq
from convert_cases import grid, same
from fakequant import QuantSpec

torch = pytest.importorskip("torch")
integer = pytest.importorskip("fakequant._convert.golden.integer_layer")
nn = torch.nn
recipes = pytest.importorskip("fakequant.recipes")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
arithmetic = pytest.importorskip("fakequant._runtimes.arithmetic")


def linear_with(weight, bias, x_scale, x_zero, config=None):
    """Returns a prepared layer with the given weights, and the given scale and zero point of its input."""
    layer = nn.Linear(len(weight[0]), len(weight))
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        layer.bias.copy_(torch.tensor(bias))
    lo, hi = -x_zero * x_scale, (255 - x_zero) * x_scale
    config = config or recipes.int8().rule(activation_observer=fq.observers.Fixed(lo, hi))
    return fq.prepare(nn.Sequential(layer), config, torch.ones(1, len(weight[0])))


# --- literal integers -------------------------------------------------------------------------------


def test_linear_layer_computes_the_expected_integers():
    # The rows have scales 1/8 and 1/4; x has scale 1/2 and zero point 2.
    model = linear_with([[127 / 8, -3 / 8], [1 / 4, 127 / 4]], [5 / 16, -1.0], 0.5, 2)
    golden = fq.convert(model)
    layer = golden[0]
    assert layer.weight_codes.tolist() == [[127, -3], [1, 127]]
    assert layer.weight_scale.tolist() == [0.125, 0.25]
    assert layer.bias_codes.tolist() == [5, -8]
    assert layer.input_quantizer.zero_point.item() == 2
    y = layer(torch.tensor([[0.5, -1.0]]))  # codes 3 and 0, levels 1 and -2
    sums = y.origin.sums
    assert sums.tolist() == [[127 + 6 + 5, 1 - 254 - 8]]
    assert values.plain(y).tolist() == [[138 / 16, -261 / 8]]


def test_bias_is_rounded_half_to_even_at_the_scale_of_the_sums():
    model = linear_with([[127.0], [127.0], [127.0]], [0.25, 0.75, -0.25], 0.5, 0)
    assert fq.convert(model)[0].bias_codes.tolist() == [0, 2, 0]


def test_folded_batch_norm_changes_scales_signs_and_biases():
    conv, norm = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, eps=0.0)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([127.0, 127.0]).reshape(2, 1, 1, 1))
        conv.bias.copy_(torch.tensor([1.0, 2.0]))
        norm.weight.copy_(torch.tensor([2.0, -3.0]))
        norm.bias.copy_(torch.tensor([0.5, 1.0]))
        norm.running_mean.copy_(torch.tensor([3.0, 4.0]))
        norm.running_var.copy_(torch.tensor([4.0, 0.25]))
    config = recipes.int8().rule(activation_observer=fq.observers.Fixed(0.0, 255.0))
    golden = fq.convert(fq.prepare(nn.Sequential(conv, norm), config, torch.ones(1, 1, 1, 1)))
    assert golden[0].weight_codes.flatten().tolist() == [127, -127]
    assert golden[0].weight_scale.tolist() == [1.0, 6.0]
    # (1 - 3) * 1 + 0.5 = -1.5 at scale 1, (2 - 4) * -6 + 1 = 13 at scale 6
    assert golden[0].bias_codes.tolist() == [-2, 2]
    y = golden(torch.full((1, 1, 1, 1), 3.0))
    assert values.plain(y).flatten().tolist() == [3 * 127 - 2, (-3 * 127 + 2) * 6]
    assert fq._convert.convert.conversion(golden).folded == ["1"]


def test_channel_with_batch_norm_factor_zero_has_zero_codes():
    conv, norm = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.fill_(2.0)
    config = recipes.int8().rule(activation_observer=fq.observers.Fixed(0.0, 255.0))
    golden = fq.convert(fq.prepare(nn.Sequential(conv, norm), config, torch.ones(1, 1, 1, 1)))
    assert golden[0].weight_codes.tolist() == [[[[0]]]]
    assert golden[0].weight_scale.item() > 0


def test_code_without_an_opposite_keeps_its_batch_norm_unfolded():
    conv, norm = nn.Conv2d(1, 1, (1, 2)), nn.BatchNorm2d(1)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([-7.5, 7.0]).reshape(1, 1, 1, 2))
        norm.weight.fill_(-1.0)
    config = fq.QuantConfig(default=fq.LayerConfig(weight=QuantSpec(bits=4, axis=0)))
    model = fq.prepare(nn.Sequential(conv, norm), config, torch.ones(1, 1, 3, 4))
    golden = fq.convert(model)
    assert isinstance(golden[1], nn.BatchNorm2d)
    assert "cannot change its sign" in fq._convert.convert.conversion(golden).notes[0]
    x = torch.randn(2, 1, 3, 4)
    same(model.eval()(x).detach(), golden(x))


# --- exact sums -------------------------------------------------------------------------------------


def largest(config):
    """Returns a layer and an input with the largest possible sums."""
    model = nn.Sequential(nn.Linear(4096, 3))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    x = torch.full((2, 4096), 1.0)
    x[1, 0] = 0.0
    model = fq.prepare(model, config, x)
    return fq.calibrate(model, [x], progress=False), x


def test_sums_beyond_float32_are_exact():
    model, x = largest(recipes.int8())
    sums = fq.convert(model)[0](x).origin.sums
    bias = fq.convert(model)[0].bias_codes.long()
    assert sums.long().tolist() == [(4096 * 255 * 127 + bias).tolist(), (4095 * 255 * 127 + bias).tolist()]


def test_sums_are_exact_with_reduced_matmul_precision():
    model, x = largest(recipes.w4a8())
    expected = fq.convert(model)[0](x).origin.sums.double()
    torch.set_float32_matmul_precision("medium")
    try:
        found = fq.convert(model)[0](x).origin.sums
    finally:
        torch.set_float32_matmul_precision("highest")
    assert found.dtype == torch.float64
    assert torch.equal(found, expected)


SHAPES = {
    "Conv1d": (nn.Conv1d(4, 6, 3, padding=1, groups=2), (2, 4, 9)),
    "Conv2d": (nn.Conv2d(4, 6, 3, stride=2, padding=1), (2, 4, 7, 7)),
    "Conv2d, circular": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), (2, 4, 7, 7)),
    "Conv2d, unbatched": (nn.Conv2d(4, 6, 3), (4, 7, 7)),
    "Conv3d": (nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
    "ConvTranspose1d": (nn.ConvTranspose1d(4, 6, 3, groups=2), (2, 4, 9)),
    "ConvTranspose2d": (nn.ConvTranspose2d(4, 6, 3, stride=2), (2, 4, 5, 5)),
    "Linear": (nn.Linear(8, 5), (3, 8)),
    "Linear, of tokens": (nn.Linear(8, 5), (2, 3, 8)),
    "Linear, without bias": (nn.Linear(8, 5, bias=False), (3, 8)),
}


@pytest.mark.parametrize(("layer", "shape"), SHAPES.values(), ids=SHAPES)
def test_layer_computes_the_sums_of_its_codes(layer, shape):
    """The expected sums are computed in float64, where they are exact."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    model = fq.calibrate(fq.prepare(nn.Sequential(copy.deepcopy(layer)), recipes.int8(), x), [x], progress=False)
    golden = fq.convert(model)
    made = golden[0]
    y = made(x)
    grid = made.input_quantizer
    levels = (x.double() / grid.scale.double()).round().clamp(-float(grid.zero_point), 255 - float(grid.zero_point))
    plain = copy.deepcopy(layer).double()
    with torch.no_grad():
        plain.weight.copy_(integer.weight_levels(made).double())
        if plain.bias is not None:
            plain.bias.copy_(made.bias_codes.double())
        expected = plain(levels)
    assert torch.equal(y.origin.sums.double(), expected)
    # The values are those of the prepared model, except for the rounding of the bias.
    step = float((grid.scale * made.weight_scale).max())
    assert float((model.eval()(x).detach() - values.plain(y)).abs().max()) < step


# --- to the next grid -------------------------------------------------------------------------------


def test_onnxruntime_arithmetic_rounds_once_where_the_reference_rounds_three_times():
    """Where sums * (scale / s) is a tie and (sums * scale) / s is not, the codes differ by one."""
    scale, out = torch.tensor(0.1), grid(0.2, 0)
    sums = torch.arange(0.0, 500.0)
    once = arithmetic.arithmetics()["onnxruntime"].from_sums(sums, scale, out)
    thrice = arithmetic.arithmetics()["reference"].from_sums(sums, scale, out)
    differ = (once != thrice).nonzero().flatten()
    assert len(differ) > 0
    assert (once - thrice).abs().max() == 1
    assert all(sums[i] * (scale / out.scale) % 1 == 0.5 for i in differ)


@pytest.mark.parametrize("name", ["reference", "onnxruntime"])
def test_codes_from_sums_stay_within_the_range(name):
    rule, out = arithmetic.arithmetics()[name], grid(0.5, 100, QuantSpec(bits=7, signed=False, symmetric=False))
    q = rule.from_sums(torch.tensor([-(2.0**40), -1.0, 0.0, 2.0**40]), torch.tensor(0.25), out)
    assert q.tolist() == [0, 100, 100, 127]


def test_addition_of_two_grids_is_computed_from_codes():
    a_grid, b_grid, out = grid(0.5, 3), grid(0.25, 7), grid(0.75, 1)
    a, b = torch.tensor([0.5, 2.0]), torch.tensor([0.25, -1.0])
    q = arithmetic.arithmetics()["onnxruntime"].from_addition(a, a_grid, b, b_grid, out)
    assert q.tolist() == [2, 2]  # 0.75 / 0.75 + 1, 1 / 0.75 + 1


def test_mean_is_computed_from_integers():
    x_grid, out = grid(0.1, 2), grid(0.1, 0)
    codes = torch.arange(16.0).reshape(1, 1, 4, 4)
    x = (codes - 2) * x_grid.scale
    q = arithmetic.arithmetics()["onnxruntime"].from_average(x, x_grid, (2, 3), out)
    assert q.tolist() == [[[[6]]]]  # 5.5, rounded half to even


def test_convolution_sums_use_float64_where_float32_kernels_may_round(monkeypatch):
    from fakequant._convert.golden import integer_layer as layer

    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten(), nn.Linear(1, 1))
    golden = fq.convert(
        fq.calibrate(
            fq.prepare(model, recipes.int8(), torch.ones(1, 1, 3, 3)), [torch.ones(1, 1, 3, 3)], progress=False
        )
    )

    def types():
        seen = []
        original = layer._wide_enough
        monkeypatch.setattr(layer, "_wide_enough", lambda *a: seen.append(original(*a)) or seen[-1])
        golden(torch.ones(1, 1, 3, 3))
        monkeypatch.setattr(layer, "_wide_enough", original)
        return seen

    monkeypatch.setattr(layer, "_DIRECT_CONVOLUTIONS", True)
    assert types() == [torch.float32, torch.float32]
    monkeypatch.setattr(layer, "_DIRECT_CONVOLUTIONS", False)
    assert types() == [torch.float64, torch.float32]


def test_large_bias_widens_the_sums_to_float64():
    for bias, dtype in ((1.0, torch.float32), (2.0**24, torch.float64)):
        golden = fq.convert(linear_with([[127.0]], [bias], 1.0, 0))
        layer = golden[0]
        weight = integer.weight_levels(layer)
        assert integer._wide_enough(weight, integer.largest_sum(layer, layer.input_quantizer, weight)) == dtype


def test_bias_that_needs_more_than_32_bits_rounds_its_weights_to_a_larger_scale_with_a_note():
    golden = fq.convert(linear_with([[127.0]], [2.0**33], 1.0, 0))
    assert golden[0].weight_scale.item() > 1
    assert "0: the bias is too large for 32 bits" in fq._convert.convert.conversion(golden).notes[0]
    golden = fq.convert(linear_with([[127.0]], [1.0], 1.0, 0))
    assert golden[0].weight_scale.item() == 1
    assert not fq._convert.convert.conversion(golden).notes
