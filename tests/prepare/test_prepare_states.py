"""States and copies of prepared models; `unprepare` restores the float model."""

import copy
import io
import pickle

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits, assert_same_state
from prepare_cases import Mixed, each_recipe, randint

torch = pytest.importorskip("torch")
recipes = pytest.importorskip("fakequant.recipes")

TOKENS = randint(9, 3, 6)


def mixed(config, training=True):
    model = fq.prepare(Mixed(), config, TOKENS)
    return fq.calibrate(model, [TOKENS], progress=False).train(training)


# --- states -----------------------------------------------------------------------------------------


@each_recipe
def test_float_state_loads_strictly_into_a_prepared_model(config):
    saved = {
        name: value + 0.5 if value.is_floating_point() else value + 1 for name, value in Mixed().state_dict().items()
    }
    model = mixed(config)
    added = {n: v.clone() for n, v in model.state_dict().items() if "quant" in n}
    assert model.load_state_dict(saved, strict=True) == ([], [])
    for name, value in model.state_dict().items():
        assert_same_bits(added[name] if "quant" in name else saved[name], value, name)


@each_recipe
def test_prepared_state_loads_strictly_into_a_freshly_prepared_model(config):
    model = mixed(config, training=False)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = fq.prepare(Mixed(), config, TOKENS)
    with torch.no_grad():
        for p in fresh.parameters():
            p.fill_(0.25)
    assert fresh.load_state_dict(torch.load(file, weights_only=True), strict=True) == ([], [])
    assert_same_state(model.state_dict(), fresh.state_dict())
    assert_same_bits(model(TOKENS), fresh.eval()(TOKENS))


def test_prepared_state_of_another_config_is_refused():
    with pytest.raises(RuntimeError, match="spec"):
        mixed(recipes.w4a8()).load_state_dict(mixed(recipes.int8()).state_dict())


def test_prepared_state_does_not_load_strictly_into_a_float_model():
    with pytest.raises(RuntimeError, match="Unexpected"):
        Mixed().load_state_dict(mixed(recipes.int8()).state_dict(), strict=True)


@each_recipe
def test_unprepare_restores_the_float_model(config):
    floats = Mixed().eval()
    model = Mixed().eval()
    assert fq.unprepare(fq.prepare(model, config, TOKENS)) is model
    assert_same_state(floats.state_dict(), model.state_dict())
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            assert_same_bits(floats(TOKENS), model(TOKENS))
    fq.prepare(model, config, TOKENS)  # the model can be prepared again


def test_unprepare_keeps_the_trained_weights():
    model = mixed(recipes.lsq(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(TOKENS).square().mean().backward()
    optimizer.step()
    trained = {n: v.clone() for n, v in model.state_dict().items() if "quant" not in n}
    assert_same_state(trained, fq.unprepare(model).state_dict())


@pytest.mark.parametrize("what", [Mixed, lambda: mixed(recipes.int8()).encoder], ids=["float", "a part"])
def test_unprepare_of_an_unprepared_model_is_an_error(what):
    with pytest.raises(ValueError, match="not prepared"):
        fq.unprepare(what())


# --- copies -----------------------------------------------------------------------------------------


def through_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "torch.save": through_file,
}


@each_recipe
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copy_of_a_prepared_model_is_independent_and_equal(config, copied):
    model = mixed(config, training=False)
    other = copied(model)
    assert_same_state(model.state_dict(), other.state_dict())
    assert_same_bits(model(TOKENS), other(TOKENS))
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in other.named_modules()}
    assert other.head.weight is other.table.weight
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}
    before = copy.deepcopy(model.state_dict())
    fq.unprepare(other)
    assert_same_state(before, model.state_dict())
    assert_same_state(Mixed().state_dict(), other.state_dict())
    with pytest.raises(ValueError, match="already"):
        fq.prepare(model, config, TOKENS)
