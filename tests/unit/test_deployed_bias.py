"""In evaluation a prepared model has the biases that integers will have, so that its codes are those that will run."""

import copy

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
recipes = pytest.importorskip("fakequant.recipes")
fqnn = pytest.importorskip("fakequant.nn")


def prepared(model, x, config=None):
    return fq.calibrate(fq.prepare(model, config or recipes.int8()), [x], progress=False)


def layer(bias, x_range=255.0):
    """Weights of scale 1 and an input of scale x_range / 255."""
    made = nn.Linear(2, len(bias))
    with torch.no_grad():
        made.weight.copy_(torch.tensor([[127.0, 1.0]]).expand(len(bias), 2))
        made.bias.copy_(torch.tensor(bias))
    config = recipes.int8().rule(activation_observer=fq.observers.Fixed(0.0, x_range))
    return fq.prepare(nn.Sequential(made), config)


def test_a_bias_is_rounded_to_the_scale_of_the_sums():
    model = layer([0.4, 0.6, 2.5])
    x = torch.tensor([[1.0, 0.0]])
    assert model.eval()(x).tolist() == [[127.0, 128.0, 129.0]]
    assert torch.equal(model.train()(x), 127 + torch.tensor([[0.4, 0.6, 2.5]]))


def test_its_gradient_passes():
    model = layer([0.4, 0.6]).eval()
    model(torch.ones(3, 2)).sum().backward()
    assert model[0].bias.grad.tolist() == [3.0, 3.0]


def test_a_normalization_is_taken_into_account():
    conv, norm = nn.Conv2d(1, 1, 1, bias=False), nn.BatchNorm2d(1, eps=0.0)
    with torch.no_grad():
        conv.weight.fill_(127.0)
        norm.weight.fill_(-0.5)
        norm.bias.fill_(0.3)
        norm.running_mean.fill_(1.0)
        norm.running_var.fill_(1.0)
    config = recipes.int8().rule(activation_observer=fq.observers.Fixed(0.0, 255.0))
    model = fq.prepare(nn.Sequential(conv, norm), config).eval()
    # Folded: scale 0.5, bias (0 - 1) * -0.5 + 0.3 = 0.8, which is 2 steps.
    assert model(torch.zeros(1, 1, 1, 1)).item() == pytest.approx(1.0, abs=1e-6)
    assert fq.convert(model)[0].bias_codes.tolist() == [2]


@pytest.mark.parametrize("config", [recipes.int4_weight_only(2), recipes.int8_dynamic()], ids=["weights", "dynamic"])
def test_a_bias_that_stays_a_float_is_left_alone(config):
    torch.manual_seed(0)
    x = torch.randn(5, 4)
    model = prepared(nn.Sequential(nn.Linear(4, 3)), x, config)
    fqnn.set_state(model, frozen=True)
    assert torch.equal(model.train()(x), model.eval()(x))


def result_at(model, path, x):
    seen = []
    handle = model.get_submodule(path).register_forward_hook(lambda module, args, y: seen.append(y))
    model(x)
    handle.remove()
    return seen[0].detach().as_subclass(torch.Tensor)


def test_codes_of_prepared_and_converted_models_are_equal_but_for_ties():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip
    with torch.no_grad():
        model[1].weight.normal_()
        model[1].running_var.uniform_(0.5, 2.0)
    x = torch.randn(64, 3, 8, 8)
    model = prepared(model, x).eval()
    golden = fq.convert(model)
    differ = total = 0
    for path in ("3.input_quantizer", "6.input_quantizer"):
        seen = [result_at(m, path, x) for m in (model, golden)]
        differ += int((seen[0] != seen[1]).sum())
        total += seen[0].numel()
    assert differ <= 1e-4 * total


def test_copies_and_unprepared_models_have_their_own():
    model = prepared(nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)), torch.randn(2, 1, 3, 3))
    copied = copy.deepcopy(model)
    assert copied[0].norm is copied[1]
    assert "norm" not in fq.unprepare(model)[0].__dict__
