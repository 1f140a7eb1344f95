"""A zoo of models: each is prepared, calibrated, trained, copied, saved, loaded and unprepared."""

import copy
import io

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits, assert_same_state
from model_zoo import GPT, RECIPES, ZOO, Recurrent, Twice, build, train, transformer_encoder
from thoroughness import ALL

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")

PAIRS = [(name, recipe) for name in ZOO for recipe in RECIPES]
# Every model with a third of the recipes, and every recipe with a third of the models.
PAIRS = PAIRS if ALL else PAIRS[::3]
each_model = pytest.mark.parametrize(("make", "x"), ZOO.values(), ids=ZOO)
pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")


@pytest.mark.parametrize(("name", "recipe"), PAIRS)
def test_model_is_prepared_trained_saved_and_restored(name, recipe):
    (make, x), config = ZOO[name], RECIPES[recipe]
    model, floats = build(make, x), build(make, x)
    float_state = copy.deepcopy(model.state_dict())
    expected = floats.eval()(x)
    assert fq.prepare(model, config, x) is model
    assert model.load_state_dict(float_state, strict=True) == ([], [])
    fq.calibrate(model, [x], progress=False)
    with torch.no_grad():
        assert not torch.equal(copy.deepcopy(model).eval()(x), expected), "nothing is quantized"

    # Every parameter that learns in the float model learns here.
    learns = train(model, x)
    assert [name for name in learns if "quantizer" not in name] == train(floats, x)

    model.eval()
    y = model(x)
    with torch.no_grad():
        assert_same_bits(y, model(x), "without gradients")
    other = copy.deepcopy(model)
    assert_same_bits(y, other(x), "deepcopy")

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = fq.prepare(build(make, x), config, x)
    assert fresh.load_state_dict(torch.load(file, weights_only=True), strict=True) == ([], [])
    assert_same_bits(y, fresh.eval()(x), "loaded")
    assert_same_state(model.state_dict(), fresh.state_dict())

    for back in (model, other):
        fq.unprepare(back).load_state_dict(float_state, strict=True)
        assert_same_state(float_state, back.state_dict())
        assert_same_bits(expected, back.eval()(x), "unprepared")
        with torch.no_grad():
            assert_same_bits(build(make, x).eval()(x), back(x), "unprepared, without gradients")
        assert {n: type(m).__name__ for n, m in back.named_modules()} == {
            n: type(m).__name__ for n, m in build(make, x).named_modules()
        }


@each_model
def test_zoo_models_use_every_quantizer(make, x):
    model = fq.prepare(build(make, x), recipes.int8(), x)
    fq.calibrate(model, [x], progress=False)
    unused = [path for path, quantizer in fqnn.named_quantizers(model) if not torch.isfinite(quantizer.scale).all()]
    assert unused == []


@each_model
def test_model_with_quantizers_off_computes_in_float(make, x):
    floats, model = build(make, x).eval(), fq.prepare(build(make, x), recipes.int8(), x).eval()
    fqnn.switch_quantizers(model, observing=False, quantizing=False)
    # Attention adds its mask outside the product, which rounds differently.
    # A recurrent layer adds the products of input and hidden state in another order than torch's kernel.
    tolerance = 1e-5 if make in (GPT, transformer_encoder, Recurrent) else 0
    torch.testing.assert_close(model(x), floats(x), rtol=tolerance, atol=tolerance)


def test_module_used_twice_has_one_weight_and_a_quantizer_for_each_input():
    model = fq.prepare(Twice(), recipes.int8(), torch.ones(2, 4))
    assert model.again is model.fc
    paths = [path for path, _ in fqnn.named_quantizers(model)]
    assert paths[:3] == ["fc.weight_quantizer", "fc.input_quantizer.0", "fc.input_quantizer.1"]
    assert len(paths) == 5


def test_tied_weights_are_trained_by_both_layers():
    model = fq.calibrate(fq.prepare(build(*ZOO["GPT"]), recipes.lsq(4), ZOO["GPT"][1]), [ZOO["GPT"][1]], progress=False)
    before = model.tokens.weight.detach().clone()
    train(model, ZOO["GPT"][1])
    assert model.head.weight is model.tokens.weight
    unseen = [i for i in range(50) if i not in ZOO["GPT"][1]]
    assert not torch.equal(before[unseen], model.head.weight[unseen])  # only the head trains these rows
