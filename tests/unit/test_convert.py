"""Converted models: literal integers, exact sums, folded batch norms, files."""

import copy
import json

import pytest

import fakequant as fq
from fakequant import QuantSpec, presets
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
integer = pytest.importorskip("fakequant._convert.golden.integer_layer")
nn = torch.nn
recipes = pytest.importorskip("fakequant.recipes")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
arithmetic = pytest.importorskip("fakequant._convert.golden.sums_to_codes")
Grid = pytest.importorskip("fakequant._convert.golden.fixed_grid").Grid

RECIPES = {
    "int8": recipes.int8(),
    "int8 for x86": recipes.int8(target="onnxruntime-x86"),
    "int8_dynamic": recipes.int8_dynamic(),
    "int4_weight_only": recipes.int4_weight_only(4),
    "w4a8": recipes.w4a8(),
    "lsq": recipes.lsq(4),
}
each_recipe = pytest.mark.parametrize("config", RECIPES.values(), ids=RECIPES)


def same(expected, actual, *names):
    assert_same_bits(values.plain(expected).numpy(), values.plain(actual).numpy(), *names)


def linear_with(weight, bias, x_scale, x_zero, config=None):
    """A layer whose grids are given: weights that are codes times their scale, a range that gives x_scale."""
    layer = nn.Linear(len(weight[0]), len(weight))
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight))
        layer.bias.copy_(torch.tensor(bias))
    lo, hi = -x_zero * x_scale, (255 - x_zero) * x_scale
    config = config or recipes.int8().rule(activation_observer=fq.observers.Fixed(lo, hi))
    return fq.prepare(nn.Sequential(layer), config)


# --- literal integers -----------------------------------------------------------------------------------


def test_a_linear_layer_computes_these_integers():
    # Scales 1/8 and 1/4 per row, 1/2 for x with zero point 2.
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


def test_a_bias_is_rounded_to_the_scale_of_the_sums_half_to_even():
    model = linear_with([[127.0], [127.0], [127.0]], [0.25, 0.75, -0.25], 0.5, 0)
    assert fq.convert(model)[0].bias_codes.tolist() == [0, 2, 0]


def test_a_batch_norm_changes_scales_signs_and_biases():
    conv, norm = nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, eps=0.0)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([127.0, 127.0]).reshape(2, 1, 1, 1))
        conv.bias.copy_(torch.tensor([1.0, 2.0]))
        norm.weight.copy_(torch.tensor([2.0, -3.0]))
        norm.bias.copy_(torch.tensor([0.5, 1.0]))
        norm.running_mean.copy_(torch.tensor([3.0, 4.0]))
        norm.running_var.copy_(torch.tensor([4.0, 0.25]))
    config = recipes.int8().rule(activation_observer=fq.observers.Fixed(0.0, 255.0))
    golden = fq.convert(fq.prepare(nn.Sequential(conv, norm), config))
    assert golden[0].weight_codes.flatten().tolist() == [127, -127]
    assert golden[0].weight_scale.tolist() == [1.0, 6.0]
    # (1 - 3) * 1 + 0.5 = -1.5 at scale 1, (2 - 4) * -6 + 1 = 13 at scale 6
    assert golden[0].bias_codes.tolist() == [-2, 2]
    y = golden(torch.full((1, 1, 1, 1), 3.0))
    assert values.plain(y).flatten().tolist() == [3 * 127 - 2, (-3 * 127 + 2) * 6]
    assert fq._convert.convert.conversion(golden).folded == ["1"]


def test_a_channel_that_a_batch_norm_switches_off_is_its_bias():
    conv, norm = nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)
    with torch.no_grad():
        norm.weight.zero_()
        norm.bias.fill_(2.0)
    config = recipes.int8().rule(activation_observer=fq.observers.Fixed(0.0, 255.0))
    golden = fq.convert(fq.prepare(nn.Sequential(conv, norm), config))
    assert golden[0].weight_codes.tolist() == [[[[0]]]]
    assert golden[0].weight_scale.item() > 0


def test_a_code_without_an_opposite_keeps_its_batch_norm():
    conv, norm = nn.Conv2d(1, 1, (1, 2)), nn.BatchNorm2d(1)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([-7.5, 7.0]).reshape(1, 1, 1, 2))
        norm.weight.fill_(-1.0)
    config = fq.QuantConfig(default=fq.LayerConfig(weight=QuantSpec(bits=4, axis=0)))
    model = fq.prepare(nn.Sequential(conv, norm), config)
    golden = fq.convert(model)
    assert isinstance(golden[1], nn.BatchNorm2d)
    assert "cannot change its sign" in fq._convert.convert.conversion(golden).notes[0]
    x = torch.randn(2, 1, 3, 4)
    same(model.eval()(x).detach(), golden(x))


# --- exact sums -----------------------------------------------------------------------------------------


def largest(config):
    """A layer and an input that make the largest sums there are."""
    model = nn.Sequential(nn.Linear(4096, 3))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    model = fq.prepare(model, config)
    x = torch.full((2, 4096), 1.0)
    x[1, 0] = 0.0
    return fq.calibrate(model, [x], progress=False), x


def test_sums_beyond_float32_are_exact():
    model, x = largest(recipes.int8())
    sums = fq.convert(model)[0](x).origin.sums
    bias = fq.convert(model)[0].bias_codes.long()
    assert sums.long().tolist() == [(4096 * 255 * 127 + bias).tolist(), (4095 * 255 * 127 + bias).tolist()]


def test_sums_are_exact_if_torch_may_multiply_less_exactly():
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
def test_a_layer_computes_the_sums_of_its_codes(layer, shape):
    """With everything in float64: codes are small integers there, and scales exact products."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    model = fq.calibrate(fq.prepare(nn.Sequential(copy.deepcopy(layer)), recipes.int8()), [x], progress=False)
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
    # And what it stands for is what the prepared model computes, but for the rounding of the bias.
    step = float((grid.scale * made.weight_scale).max())
    assert float((model.eval()(x).detach() - values.plain(y)).abs().max()) < step


# --- to the next grid -----------------------------------------------------------------------------------


def grid(scale, zero_point, spec=None):
    return values.GridOf(torch.tensor(scale), torch.tensor(zero_point, dtype=torch.int32), spec or presets.uint8())


def test_onnxruntime_rounds_once_where_the_graph_rounds_three_times():
    """sums * (scale / s) is a tie where (sums * scale) / s is not: half to even against one step more."""
    scale, out = torch.tensor(0.1), grid(0.2, 0)
    sums = torch.arange(0.0, 500.0)
    once = arithmetic.ARITHMETICS["onnxruntime"].from_sums(sums, scale, out)
    thrice = arithmetic.ARITHMETICS["reference"].from_sums(sums, scale, out)
    differ = (once != thrice).nonzero().flatten()
    assert len(differ) > 0
    assert (once - thrice).abs().max() == 1
    assert all(sums[i] * (scale / out.scale) % 1 == 0.5 for i in differ)


@pytest.mark.parametrize("name", ["reference", "onnxruntime"])
def test_codes_stay_within_the_range(name):
    rule, out = arithmetic.ARITHMETICS[name], grid(0.5, 100, QuantSpec(bits=7, signed=False, symmetric=False))
    q = rule.from_sums(torch.tensor([-(2.0**40), -1.0, 0.0, 2.0**40]), torch.tensor(0.25), out)
    assert q.tolist() == [0, 100, 100, 127]


def test_a_sum_of_two_grids_is_computed_from_codes():
    a_grid, b_grid, out = grid(0.5, 3), grid(0.25, 7), grid(0.75, 1)
    a, b = torch.tensor([0.5, 2.0]), torch.tensor([0.25, -1.0])
    q = arithmetic.ARITHMETICS["onnxruntime"].from_addition(a, a_grid, b, b_grid, out)
    assert q.tolist() == [2, 2]  # 0.75 / 0.75 + 1, 1 / 0.75 + 1


def test_a_mean_is_that_of_the_integers():
    x_grid, out = grid(0.1, 2), grid(0.1, 0)
    codes = torch.arange(16.0).reshape(1, 1, 4, 4)
    x = (codes - 2) * x_grid.scale
    q = arithmetic.ARITHMETICS["onnxruntime"].from_average(x, x_grid, (2, 3), out)
    assert q.tolist() == [[[[6]]]]  # 5.5, to the even


# --- what a value remembers -------------------------------------------------------------------------------


def on_grid(x):
    return Grid(presets.uint8(), torch.tensor(0.1), torch.tensor(10, dtype=torch.int32))(x)


KEEPS = {
    "reshape": lambda x: x.reshape(2, -1),
    "flatten": lambda x: torch.flatten(x, 1),
    "nn.Flatten": nn.Flatten(),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "transpose": lambda x: x.transpose(1, 2),
    "max_pool2d": nn.MaxPool2d(2),
    "relu": nn.ReLU(),
    "F.relu": nn.functional.relu,
    "dropout": nn.Dropout(0.5).eval(),
    "contiguous": lambda x: x.contiguous(),
    "slice": lambda x: x[:, :2],
}


@pytest.mark.parametrize("move", KEEPS.values(), ids=KEEPS)
def test_what_moves_elements_keeps_the_grid(move):
    x = on_grid(torch.randn(2, 3, 4, 4))
    y = move(x)
    assert isinstance(values.origin_of(y), values.OnGrid)
    same(move(values.plain(x)), y)
    same(y, on_grid(values.plain(y)))  # it is on the grid


@pytest.mark.parametrize("move", KEEPS.values(), ids=KEEPS)
def test_what_moves_elements_moves_the_sums(move):
    scale = torch.tensor([0.1, 0.2, 0.3]).reshape(-1, 1, 1)
    sums = torch.randint(-1000, 1000, (2, 3, 4, 4)).float()
    x = values.track(sums * scale, values.Accumulated(sums, scale))
    rule, out = arithmetic.ARITHMETICS["reference"], grid(0.7, 100)
    moved = move(x)
    assert torch.equal(moved.origin.codes(rule, out), values.quantized(values.plain(moved), out))


def add_in_place(x, y):
    x += y
    return x


IN_PLACE = {
    "+=": (add_in_place, torch.add),
    "add_": (lambda x, y: x.add_(y), torch.add),
    "add_, its result unused": (lambda x, y: (x.add_(y), x)[1], torch.add),
    "relu_": (lambda x, y: torch.relu_(x), lambda x, y: torch.relu(x)),
    "nn.ReLU(inplace=True), its result unused": (lambda x, y: (nn.ReLU(inplace=True)(x), x)[1], lambda x, y: x.relu()),
    "mul_": (lambda x, y: (x.mul_(2), x)[1], lambda x, y: x * 2),
    "setitem": (lambda x, y: (x.__setitem__(0, 5.0), x)[1], None),
}


@pytest.mark.parametrize(("change", "plain"), IN_PLACE.values(), ids=IN_PLACE)
def test_a_value_that_is_changed_in_place_does_not_remember_what_it_was(change, plain):
    out = grid(0.37, 100)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    changed = change(on_grid(x), on_grid(y))
    if plain is not None:
        expected = plain(values.plain(on_grid(x)), values.plain(on_grid(y)))
        assert torch.equal(values.plain(changed), expected)
    origin = values.origin_of(changed)
    codes = values.quantized(values.plain(changed), out)
    if origin is not None:
        assert torch.equal(origin.codes(arithmetic.ARITHMETICS["reference"], out), codes)


def test_a_value_that_is_changed_through_a_view_does_not_remember_what_it_was():
    x = on_grid(torch.randn(4, 6))
    values.plain(x).view(-1).mul_(0.5)
    assert values.origin_of(x) is None
    a, b, c = (on_grid(torch.randn(2, 2)) for _ in range(3))
    torch.add(a, b, out=c)
    assert values.origin_of(c) is None
    assert isinstance(values.origin_of(a), values.OnGrid)


def test_arguments_may_have_names():
    assert isinstance(values.origin_of(torch.flatten(input=on_grid(torch.randn(2, 3, 4)), start_dim=1)), values.OnGrid)


def test_sums_that_a_relu_changes_in_place_are_rectified():
    sums = torch.randint(-100, 100, (4, 6)).float()
    x = values.track(sums * 0.5, values.Accumulated(sums, torch.tensor(0.5)))
    nn.ReLU(inplace=True)(x)
    out = grid(0.7, 100)
    assert torch.equal(x.origin.codes(arithmetic.ARITHMETICS["reference"], out), values.quantized(values.plain(x), out))


FORGETS = {
    "product": lambda x: x * 2,
    "sigmoid": torch.sigmoid,
    "sum with a number": lambda x: x + 1,
    "dropout": nn.Dropout(0.5),
}


@pytest.mark.parametrize("forget", FORGETS.values(), ids=FORGETS)
def test_everything_else_forgets(forget):
    assert values.origin_of(forget(on_grid(torch.randn(2, 3)))) is None


# --- whole models -----------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.conv, self.norm, self.act = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.pool(self.act(x + self.norm(self.conv(x)))).flatten(1))


def trained_norms(model):
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for value in (module.weight.data, module.bias.data, module.running_mean):
                value.copy_(torch.randn(value.shape, generator=generator))
            module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.5)
    return model


MODELS = {
    "residual": (lambda: trained_norms(Residual()), torch.randn(16, 3, 8, 8)),
    "perceptron": (lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(64, 16)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 4)), torch.randint(0, 12, (4, 6))),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1),
        torch.randn(4, 6, 16),
    ),
}
each_model = pytest.mark.parametrize(("make", "x"), MODELS.values(), ids=MODELS)


def prepared(make, x, config):
    torch.manual_seed(0)
    return fq.calibrate(fq.prepare(make(), config), [x], progress=False)


@each_recipe
@each_model
def test_the_prepared_model_is_as_it_was(make, x, config):
    model = prepared(make, x, config)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    fq.convert(model)(x)
    assert [module.training for module in model.modules()] == modes
    for name, value in model.state_dict().items():
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num()), name


@each_recipe
@each_model
def test_no_weight_of_a_quantized_layer_is_left_in_float(make, x, config):
    golden = fq.convert(prepared(make, x, config))
    layers = [m for m in golden.modules() if isinstance(m, integer.IntegerLayer)]
    assert layers
    for layer in layers:
        assert layer._fakequant.kind.weight_name not in layer._parameters
        assert not layer.weight_codes.is_floating_point()


@each_recipe
@each_model
def test_a_file_gives_the_same_model_back(make, x, config, tmp_path):
    pytest.importorskip("safetensors")
    golden = fq.convert(prepared(make, x, config))
    fq.save_converted(golden, tmp_path / "model.safetensors")
    loaded = fq.load_converted(make(), tmp_path / "model.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    assert set(loaded.state_dict()) == set(golden.state_dict())
    same(golden(x), loaded(x))


@each_recipe
@each_model
def test_a_copy_computes_the_same(make, x, config):
    golden = fq.convert(prepared(make, x, config))
    same(golden(x), copy.deepcopy(golden)(x))


def test_attention_of_other_keys_and_values_is_converted():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    query, other = torch.randn(2, 3, 16), torch.randn(2, 5, 16)
    model = fq.prepare(model, recipes.int8())
    fq.calibrate(model, lambda m: m(query, other, other), progress=False)
    golden = fq.convert(model)
    difference = (model.eval()(query, other, other)[0].detach() - golden(query, other, other)[0]).abs().max()
    assert float(difference) < 0.02  # a few steps of the last grids


def test_weights_that_are_computed_become_codes():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 4)))
    x = torch.randn(5, 8)
    model = fq.calibrate(fq.prepare(model, recipes.int8()), [x], progress=False)
    golden = fq.convert(model)
    assert not any("parametrizations" in name for name in golden.state_dict())
    assert float((model.eval()(x).detach() - golden(x)).abs().max()) < 0.01


# --- errors -------------------------------------------------------------------------------------------------


def test_a_model_without_scales_is_refused_by_name():
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), recipes.int8())
    with pytest.raises(RuntimeError, match=r"0\.input_quantizer, 1\.input_quantizer(.|\n)*fakequant\.calibrate"):
        fq.convert(model)


def test_a_float_model_is_refused():
    with pytest.raises(ValueError, match=r"fakequant\.prepare"):
        fq.convert(nn.Linear(2, 2))


def test_an_unknown_target_is_refused():
    model = prepared(*MODELS["perceptron"], recipes.int8())
    with pytest.raises(ValueError, match="generic"):
        fq.convert(model, target="toaster")


def test_only_converted_models_are_saved(tmp_path):
    with pytest.raises(ValueError, match=r"fakequant\.convert"):
        fq.save_converted(nn.Linear(2, 2), tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_nothing(tmp_path):
    golden = fq.convert(prepared(*MODELS["perceptron"], recipes.int8()))
    with pytest.raises(FileNotFoundError, match="missing"):
        fq.save_converted(golden, tmp_path / "missing" / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_model_is_refused_and_says_where(tmp_path):
    fq.save_converted(fq.convert(prepared(*MODELS["perceptron"], recipes.int8())), tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match=r"'0' is Linear there and Conv2d here"):
        fq.load_converted(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Linear(32, 4)), tmp_path / "m.safetensors")


def test_a_file_of_somebody_else_is_refused(tmp_path):
    save = pytest.importorskip("safetensors.torch").save_file
    save({"weight": torch.zeros(2)}, tmp_path / "m.safetensors")
    with pytest.raises(ValueError, match="not written by"):
        fq.load_converted(nn.Linear(2, 2), tmp_path / "m.safetensors")


def test_the_file_says_what_every_tensor_is(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    fq.save_converted(fq.convert(prepared(*MODELS["residual"], recipes.w4a8())), tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        described = json.loads(file.metadata()["fakequant"])
    assert described["target"] == "generic"
    assert QuantSpec.from_dict(described["layers"]["conv"]["weight"]["spec"]).bits == 4
    assert QuantSpec.from_dict(described["grids"]["head.input_quantizer"]["spec"]) == presets.uint8()
    assert described["inputs_from"] == {"conv": "stem.2.output_quantizer"}


def test_sums_are_wide_where_convolutions_may_round(monkeypatch):
    from fakequant._convert.golden import integer_layer as layer

    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.Flatten(), nn.Linear(1, 1))
    golden = fq.convert(fq.calibrate(fq.prepare(model, recipes.int8()), [torch.ones(1, 1, 3, 3)], progress=False))

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


def test_a_large_bias_widens_the_sums():
    for bias, dtype in ((1.0, torch.float32), (2.0**24, torch.float64)):
        golden = fq.convert(linear_with([[127.0]], [bias], 1.0, 0))
        layer = golden[0]
        assert integer._wide_enough(layer, layer.input_quantizer, integer.weight_levels(layer)) == dtype
