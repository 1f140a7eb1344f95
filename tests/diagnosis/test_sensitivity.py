"""`sensitivity`: scores of single layers and their ranking."""

import copy
import math

import numpy as np
import pytest

import fakequant as fq
from fakequant import LayerConfig, QuantConfig, presets, recipes
from fakequant.observers import MSE
from sensitivity_models import INT4, Block

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional


# --- a broken layer -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    """Images and labels for training and for testing."""
    datasets = pytest.importorskip("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 16
    y = torch.from_numpy(labels)
    return x[:1200], y[:1200], x[1200:1600], y[1200:1600]


@pytest.fixture(scope="module")
def cnn(digits):
    """A model trained briefly in float."""
    x, y, *_ = digits
    torch.manual_seed(0)
    model = nn.Sequential()
    for name, before, after, stride in (("a", 1, 8, 1), ("b", 8, 16, 2), ("c", 16, 16, 1)):
        model.add_module(f"conv_{name}", nn.Conv2d(before, after, 3, stride, padding=1, bias=False))
        model.add_module(f"norm_{name}", nn.BatchNorm2d(after))
        model.add_module(f"relu_{name}", nn.ReLU())
    model.add_module("flatten", nn.Flatten())
    model.add_module("head", nn.Linear(16 * 16, 10))
    for _ in range(4):
        for batch in torch.randperm(len(x)).split(50):
            loss = F.cross_entropy(model(x[batch]), y[batch])
            # torch's optimizers import its compiler, which is slower than this training.
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients):
                    parameter.sub_(0.1 * gradient)
    return model.eval()


def broken(model, layer, norm):
    """Returns an equivalent model whose weight channels differ too much in size for one scale."""
    model = copy.deepcopy(model)
    conv, norm = model.get_submodule(layer), model.get_submodule(norm)
    factor = torch.logspace(-3, 0, conv.out_channels)
    with torch.no_grad():
        conv.weight.mul_(factor.reshape(-1, 1, 1, 1))
        norm.running_mean.mul_(factor)
        norm.running_var.add_(norm.eps).mul_(factor**2).sub_(norm.eps)
    return model


def accuracy(images, labels):
    return lambda model: (model(images).argmax(1) == labels).float().mean()


def negative_loss(images, labels):
    return lambda model: -F.cross_entropy(model(images), labels)


@pytest.mark.parametrize("name", ["a", "b", "c"])
@pytest.mark.parametrize("score", [accuracy, negative_loss])
def test_sensitivity_ranks_the_broken_layer_first(cnn, digits, name, score):
    train, _, *test = digits
    model = broken(cnn, f"conv_{name}", f"norm_{name}")
    assert torch.allclose(model(test[0]), cnn(test[0]), atol=1e-3)
    assert accuracy(*test)(model) > 0.9
    found = fq.sensitivity(model, INT4, score(*test), data=[train], progress=False)
    assert found.layers[0].path == f"conv_{name}"
    assert found.layers[0].cost > 10 * max(layer.cost for layer in found.layers[1:])
    assert found.layers[0].gain == max(layer.gain for layer in found.layers)
    assert {layer.path for layer in found.layers} == {"conv_a", "conv_b", "conv_c", "head"}
    prepared = fq.calibrate(fq.prepare(copy.deepcopy(model), INT4, train), [train], progress=False)
    assert fq.compare(model, prepared, [test[0]], progress=False).worst == f"conv_{name}"
    # With that layer in higher precision the score is close to that of the float model.
    lost = found.float_score - found.quantized_score
    for precision in (None, LayerConfig(weight=presets.int8(), input=presets.uint8())):
        config = found.suggest(keep=1, precision=precision)
        kept = fq.calibrate(fq.prepare(copy.deepcopy(model), config, train), [train], progress=False)
        with torch.no_grad():
            assert found.float_score - float(score(*test)(kept.eval())) < lost / 5
    assert found.suggest(keep=1).rules[0].path == f"conv_{name}"


# --- scores ---------------------------------------------------------------------------------------


def only(config, path):
    """Returns a config that quantizes only the module at `path`."""
    return config.skip().rule(path)


def scored(model, config, data, evaluate):
    prepared = fq.prepare(copy.deepcopy(model), config, data[0])
    with torch.no_grad():
        return float(evaluate(fq.calibrate(prepared, data, progress=False).eval()))


def test_sensitivity_scores_equal_those_of_models_prepared_that_way():
    torch.manual_seed(0)
    model, data = Block().eval(), [torch.randn(8, 1, 6, 6)]
    config = recipes.w4a8(first_last_bits=None)
    target = torch.randn(8, 3)
    scores = []

    def evaluate(model):
        assert not model.training
        model(data[0])  # leaves nothing behind
        scores.append(-(model(data[0]) - target).square().mean())
        return scores[-1]

    found = fq.sensitivity(model, config, evaluate, data=data, progress=False)
    rows = {layer.path: layer for layer in found.layers}
    assert set(rows) == {"stem", "relu", "conv", "norm", "head"}
    assert len(scores) == 2 + 2 * len(rows)
    with torch.no_grad():
        in_float = float(evaluate(model))
    assert found.float_score == in_float
    quantized = scored(model, config, data, evaluate)
    assert found.quantized_score == quantized
    for path, row in rows.items():
        assert row.gain == scored(model, config.skip(path), data, evaluate) - quantized, path
        if row.weights:  # `prepare` refuses a model without quantized weights
            assert row.cost == in_float - scored(model, only(config, path), data, evaluate), path
    assert [row.cost for row in found.layers] == sorted((row.cost for row in found.layers), reverse=True)
    assert (rows["relu"].kind, rows["relu"].weights, rows["relu"].bits) == ("ReLU", 0, 8)
    assert rows["relu"].cost != 0
    assert (rows["conv"].kind, rows["conv"].weights, rows["conv"].bits) == ("Conv2d", 144, 4)


def test_sensitivity_leaves_the_model_unchanged():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(8, 4)
    fq.sensitivity(model, recipes.lsq(4), lambda model: model(x).sum(), data=[x], progress=False)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert [m.training for m in model.modules()] == [True, True, False, True]
    assert [type(m) for m in model] == [nn.Linear, nn.BatchNorm1d, nn.Linear]


def ranked(model, config, scores):
    """Returns the sensitivity of a model whose evaluations give `scores` in order."""
    x, scores = torch.ones(1, 2), iter(scores)

    def evaluate(model):
        model(x)
        return next(scores)

    return fq.sensitivity(model, config, evaluate, data=[x], progress=False)


def test_sensitivity_ranks_ties_by_gain_then_by_order():
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    # The scores are in float, with all quantized, then for each layer alone and left out.
    found = ranked(model, INT4, [1.0, 0.5, 0.75, 0.5, 0.75, 0.625, 0.5, 0.5, 0.75, 0.5])
    assert [(x.path, x.cost, x.gain) for x in found.layers] == [
        ("2", 0.5, 0.0),
        ("1", 0.25, 0.125),
        ("0", 0.25, 0.0),
        ("3", 0.25, 0.0),
    ]
    assert (found.float_score, found.quantized_score) == (1.0, 0.5)
    assert "gain if left out" in str(found)
    assert "score in float 1, with all quantized 0.5" in str(found)
    read = found.to_dict()
    assert read["layers"][0]["path"] == "2"
    assert QuantConfig.from_dict(read["config"]) == INT4


@pytest.mark.parametrize("number", [1, 0.5, np.float32(0.5), np.array(0.5), torch.tensor([0.5])])
def test_sensitivity_accepts_scores_of_any_number_type(number):
    found = ranked(nn.Sequential(nn.Linear(2, 2)), INT4, [number] * 4)
    assert type(found.float_score) is float
    assert found.layers[0].cost == 0.0


def test_sensitivity_needs_data_only_for_quantizers_that_observe():
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(3, 4)

    def evaluate(model):
        return model(x).sum()

    for config in (recipes.int8_dynamic(), recipes.int4_weight_only(4)):
        assert fq.sensitivity(model, config, evaluate, progress=False).layers[0].path == "0"
    with pytest.raises(ValueError, match=r"needs batches(.|\n)*Pass `data`"):
        fq.sensitivity(model, recipes.int8(), evaluate, progress=False)
    with pytest.raises(ValueError, match=r"0\.input_quantizer have no scale(.|\n)*Pass `data`"):
        fq.sensitivity(model, QuantConfig(default=recipes.int8().default), evaluate, progress=False)
    searched = QuantConfig(default=LayerConfig(weight=presets.int8(), weight_observer=MSE()))
    with pytest.raises(ValueError, match=r"0\.weight_quantizer have no scale"):
        fq.sensitivity(model, searched, evaluate, progress=False)
    assert fq.sensitivity(model, searched, evaluate, data=[x], progress=False).layers[0].bits == 8


def test_sensitivity_shows_a_progress_bar_of_evaluations(capsys):
    model, x = nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    fq.sensitivity(model, recipes.int4_weight_only(2), lambda model: model(x).sum(), progress=False)
    assert capsys.readouterr().err == ""
    fq.sensitivity(model, recipes.int4_weight_only(2), lambda model: model(x).sum())
    assert "/4 [" in capsys.readouterr().err


def test_sensitivity_starts_every_evaluation_from_the_same_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    x, states = torch.randn(8, 4), []

    def evaluate(model):
        states.append({n: v.clone() for n, v in model.state_dict().items() if "switches" not in n})
        return model.train()(10 * x).sum()  # changes ranges and batch norm statistics

    fq.sensitivity(model, recipes.int8(), evaluate, data=[x], progress=False)
    assert len(states) == 6
    assert all(torch.equal(state[name], value) for state in states for name, value in states[0].items())


# --- bad input ------------------------------------------------------------------------------------


def test_sensitivity_names_the_layer_whose_score_is_not_a_number():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match="nan with only 1 quantized"):
        ranked(model, INT4, [1.0, 0.5, 0.5, 0.5, math.nan])
    with pytest.raises(ValueError, match="-inf with all but 0 quantized"):
        ranked(model, INT4, [1.0, 0.5, 0.5, -math.inf])
    with pytest.raises(ValueError, match="nan with nothing quantized"):
        ranked(model, INT4, [math.nan])
    for score in (None, "0.9", (0.9, 0.1), torch.ones(2), True):
        with pytest.raises(TypeError, match=f"must return a number.*got {type(score).__name__} with everything"):
            ranked(model, INT4, [1.0, score])


def test_sensitivity_refuses_wrong_arguments():
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="function that takes a model"):
        fq.sensitivity(model, INT4, 0.9)
    with pytest.raises(TypeError, match="QuantConfig"):
        fq.sensitivity(model, "int4", lambda model: 0.0)
    with pytest.raises(ValueError, match="prepared already"):
        fq.sensitivity(fq.prepare(copy.deepcopy(model), INT4), INT4, lambda model: 0.0)
    with pytest.raises(ValueError, match="no batches"):
        fq.sensitivity(model, INT4, lambda model: 0.0, data=[], progress=False)
    with pytest.raises(ValueError, match="did not run the model"):
        fq.sensitivity(model, INT4, lambda _: model(torch.ones(1, 2)).sum(), data=[torch.ones(1, 2)], progress=False)
