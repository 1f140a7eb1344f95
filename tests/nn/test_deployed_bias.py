"""In evaluation, a prepared model rounds biases as the golden model does, so that its codes are the same."""

import copy

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
recipes = pytest.importorskip("fakequant.recipes")
fqnn = pytest.importorskip("fakequant.nn")
W4A8, LSQ2 = recipes.w4a8(first_last_bits=None), recipes.lsq(2, first_last_bits=None)


def prepared(model, x, config=None):
    return fq.calibrate(fq.prepare(model, config or recipes.int8(), x), [x], progress=False)


def layer(bias, x_range=255.0):
    """Returns a prepared layer with weights of scale 1 and an input of scale x_range / 255."""
    made = nn.Linear(2, len(bias))
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[127.0, 1.0]]).expand(len(bias), 2))
        made.bias.copy_(torch.tensor(bias))
    config = recipes.int8().rule(activation_observer=fq.observers.Fixed(0.0, x_range))
    return fq.prepare(nn.Sequential(made), config, torch.ones(1, 2))


def test_evaluation_rounds_the_bias_to_the_scale_of_the_sums():
    model = layer([0.4, 0.6, 2.5])
    x = torch.tensor([[1.0, 0.0]])
    assert model.eval()(x).tolist() == [[127.0, 128.0, 129.0]]
    assert torch.equal(model.train()(x), 127 + torch.tensor([[0.4, 0.6, 2.5]]))


def test_rounded_bias_passes_the_gradient():
    model = layer([0.4, 0.6]).eval()
    model(torch.ones(3, 2)).sum().backward()
    assert model[0].bias.grad.tolist() == [3.0, 3.0]


def test_rounded_bias_accounts_for_the_folded_batch_norm():
    conv, norm = nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1, eps=0.0)
    with torch.no_grad():
        conv.weight.fill_(127.0)
        norm.weight.fill_(-0.5)
        norm.bias.fill_(0.3)
        norm.running_mean.fill_(1.0)
        norm.running_var.fill_(1.0)
    config = recipes.int8().rule(activation_observer=fq.observers.Fixed(0.0, 255.0))
    model = fq.prepare(nn.Sequential(conv, norm), config, torch.ones(1, 1, 1, 1)).eval()
    # Folded: scale 0.5, bias (0 - 1) * -0.5 + 0.3 = 0.8, which is 2 steps.
    assert model(torch.zeros(1, 1, 1, 1)).item() == pytest.approx(1.0, abs=1e-6)
    assert fq.convert(model)[0].bias_codes.tolist() == [2]


@pytest.mark.parametrize("config", [recipes.int4_weight_only(2), recipes.int8_dynamic()], ids=["weights", "dynamic"])
def test_float_bias_is_not_rounded(config):
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    model = prepared(nn.Sequential(nn.Linear(4, 3)), x, config)
    fqnn.switch_quantizers(model, frozen=True)
    assert torch.equal(model.train()(x), model.eval()(x))


def result_at(model, path, x):
    seen = []
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, y: seen.append(y))
    model(x)
    handle.remove()
    return seen[0].detach().as_subclass(torch.Tensor)


@pytest.mark.parametrize("signs", ["mixed", "positive"])
@pytest.mark.parametrize("config", [recipes.int8(), W4A8, LSQ2], ids=["int8", "w4a8", "lsq2"])
def test_codes_of_prepared_and_converted_models_are_equal_except_ties(config, signs):
    """w4a8 and lsq(2) are not narrow-range: a batch norm with a negative factor cannot be folded."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    with torch.no_grad():
        model[1].weight.normal_()
        if signs == "positive":
            model[1].weight.abs_()
        model[1].bias.normal_()
        model[1].running_var.uniform_(0.5, 2.0)
    x = torch.randn(64, 3, 8, 8)
    model = prepared(model, x, config).eval()
    golden = fq.convert(model)
    is_kept = isinstance(golden[1], nn.BatchNorm2d)
    assert is_kept == (signs == "mixed" and config in (W4A8, LSQ2))
    differ = total = 0
    for path in ("3.input_quantizer", "6.input_quantizer"):
        seen = [result_at(m, path, x) for m in (model, golden)]
        differ += int((seen[0] != seen[1]).sum())
        total += seen[0].numel()
    assert differ <= 1e-4 * total


def test_copies_refer_to_their_own_batch_norm():
    model = prepared(nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)), torch.randn(2, 1, 3, 3))
    copied = copy.deepcopy(model)
    assert copied[0]._fakequant.norm is copied[1]
    assert "norm" not in fq.unprepare(model)[0].__dict__


# --- small factors and batch norms that do not fold -----------------------------------------------------


@pytest.mark.parametrize("gamma", [0.0, 1e-9, 1e-6, -1e-9])
def test_batch_norm_shift_survives_a_small_factor(gamma):
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)
    with torch.no_grad():
        norm.weight.fill_(gamma)
        norm.bias.fill_(1.0)
    x = torch.randn(4, 2, 5, 5)
    model = prepared(nn.Sequential(conv, norm), x).eval()
    expected = torch.ones(4, 3, 5, 5)
    assert (model(x) - expected).abs().max() < 1e-3
    assert (fq.convert(model)(x) - expected).abs().max() < 1e-3


def test_bias_beside_tiny_weights_survives():
    made = nn.Linear(4, 2)
    with torch.no_grad():
        made.weight.fill_(1e-7)
        made.bias.fill_(50.0)
    x = torch.randn(8, 4)
    model = prepared(nn.Sequential(made), x).eval()
    assert (model(x) - 50).abs().max() < 1e-4
    assert (fq.convert(model)(x) - 50).abs().max() < 1e-4


def test_batch_norm_over_tokens_is_not_folded():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].weight.normal_()
    float_model, x = copy.deepcopy(model).eval(), torch.randn(4, 16, 8)
    model = prepared(model, x).eval()
    golden = fq.convert(model)
    assert isinstance(golden[1], nn.BatchNorm1d)
    assert (golden(x) - float_model(x)).abs().max() < 0.1
    assert (model(x) - float_model(x)).abs().max() < 0.1


def test_batch_norm_of_another_length_is_not_folded():
    x = torch.randn(4, 5, 8)
    model = prepared(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(5)), x).eval()
    assert model(x).shape == fq.convert(model)(x).shape == (4, 5, 16)


def test_weights_with_scales_per_input_channel_keep_their_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with torch.no_grad():
        model[1].weight.normal_()
    float_model, x = copy.deepcopy(model).eval(), torch.randn(16, 8)
    config = recipes.int8().rule(weight=fq.QuantSpec(bits=8, narrow_range=True, axis=1))
    golden = fq.convert(prepared(model, x, config))
    assert isinstance(golden[1], nn.BatchNorm1d)
    assert (golden(x) - float_model(x)).abs().max() < 0.1


class Untraceable(nn.Module):
    def __init__(self):
        super().__init__()
        conv = nn.Conv2d(2, 2, 1)
        self.body = nn.Sequential(conv, nn.BatchNorm2d(2), conv, nn.BatchNorm2d(2))

    def forward(self, x):
        return self.body(x) if x.sum() < 1e9 else x


def test_shared_layer_keeps_both_batch_norms():
    torch.manual_seed(0)
    model = Untraceable()
    with torch.no_grad():
        for norm in (model.body[1], model.body[3]):
            norm.running_mean.normal_()
            norm.weight.normal_()
    x = torch.randn(4, 2, 3, 3)
    model = prepared(model, x).eval()
    assert (fq.convert(model)(x) - model(x)).abs().max() < 0.02


def test_bfloat16_layer_with_batch_norm_is_evaluated():
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))
    x = torch.randn(4, 2, 5, 5)
    model = prepared(model, x).eval()
    model[0].bfloat16()
    assert model[0](x.bfloat16()).dtype == torch.bfloat16


def test_replaced_batch_norm_is_found():
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5, 5)
    model = prepared(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), x)
    model[1] = nn.BatchNorm2d(4)
    nn.init.normal_(model[1].bias)
    assert fq.calibrate(model, [x], progress=False)[0]._fakequant.norm is model[1]
    golden = fq.convert(model)
    same = model.eval()(x) - golden(x)
    assert same.abs().max() < 1e-5  # float sums against integer sums; half a step of the bias is at least 1e-4


class WithoutDoubles(torch.Tensor):
    """A tensor that claims to be on a device without float64."""

    device = torch.device("mps")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_bias_is_rounded_on_the_cpu_for_devices_without_float64():
    from fakequant.nn._folding import rounded_bias

    bias = torch.tensor([0.4, 0.6]).as_subclass(WithoutDoubles)
    scale = torch.tensor(1.0)
    assert type(rounded_bias(bias, scale, scale, None)) is torch.Tensor
    assert rounded_bias(bias, scale, scale, None).tolist() == [0.0, 1.0]
