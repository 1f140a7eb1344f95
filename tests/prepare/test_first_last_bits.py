"""`first_last_bits`: the first and the last layer, in execution order, have more bits than the others."""

import copy
import io

import pytest

import fakequant as fq
from fakequant import QuantSpec, presets
from fakequant.testing.assertions import assert_same_bits, assert_same_state

torch = pytest.importorskip("torch")
nn = torch.nn
recipes = pytest.importorskip("fakequant.recipes")

RECIPES = {"lsq": recipes.lsq(2), "w4a8": recipes.w4a8()}
by_recipe = pytest.mark.parametrize("config", RECIPES.values(), ids=RECIPES)


class Chain(nn.Module):
    """Three layers registered as a, b, c and called as c, a, b."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        if x.sum() > 1e9:
            return x
        return self.b(self.a(self.c(x).relu()).relu())


def make(config):
    return fq.prepare(Chain(), config, data()[0])


def bits(model):
    """Returns the bits of the weight and input of every layer."""
    return {
        path: (m.weight_quantizer.spec.bits, m.input_quantizer and m.input_quantizer.spec.bits)
        for path, m in model.named_modules()
        if hasattr(m, "weight_quantizer")
    }


def data(batches=2):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 6, generator=generator) for _ in range(batches)]


def calibrate(model, batches=None):
    return fq.calibrate(model, data() if batches is None else batches, progress=False)


EXPECTED = {
    "lsq": {"a": (2, 2), "b": (8, 8), "c": (8, 8)},
    "w4a8": {"a": (4, 8), "b": (8, 8), "c": (8, 8)},
}


@pytest.mark.parametrize("name", RECIPES)
def test_first_and_last_layer_get_more_bits(name):
    model = make(RECIPES[name])
    assert bits(model) == EXPECTED[name]
    assert model.b.weight_quantizer.spec == narrow(8)
    calibrate(model)
    assert bits(model) == EXPECTED[name]


def narrow(bits):
    return QuantSpec(bits=bits, narrow_range=True, axis=0)


@by_recipe
def test_first_last_bits_none_is_off_and_never_lowers_bits(config):
    plain = fq.QuantConfig.from_dict({**config.to_dict(), "first_last_bits": None})
    assert len(set(bits(make(plain)).values())) == 1
    assert set(bits(make(recipes.lsq(8))).values()) == {(8, 8)}
    assert make(recipes.lsq(8)).b.weight_quantizer.spec == QuantSpec(bits=8, axis=0)
    three = fq.QuantConfig.from_dict({**config.to_dict(), "first_last_bits": 3})
    assert bits(make(three))["c"] == ((3, 3) if config.default.learned else (4, 8))


def test_widened_learned_weight_starts_with_the_8_bit_scale():
    model = make(recipes.lsq(2))
    weight = Chain().b.weight
    expected = fq.nn.LearnedFakeQuantize(narrow(8), shape=weight.shape).initialize(weight)
    assert_same_bits(expected.scale, model.b.weight_quantizer.scale)


def test_first_last_bits_respect_the_limits_of_the_target():
    model = make(recipes.lsq(2, target="onnxruntime-x86"))
    assert bits(model)["c"] == (7, 8)
    model = make(recipes.w4a8(target="tensorrt"))
    assert model.c.input_quantizer.spec == QuantSpec(bits=8)


def test_explicit_rule_overrides_first_last_bits():
    config = recipes.lsq(2).rule("c", weight=QuantSpec(bits=3, axis=0))
    assert bits(make(config)) == {"a": (2, 2), "b": (8, 8), "c": (3, 2)}
    assert bits(make(recipes.lsq(2).skip("c"))) == {"a": (2, 2), "b": (8, 8)}
    assert bits(calibrate(make(recipes.lsq(2).skip("c")))) == {"a": (2, 2), "b": (8, 8)}


def test_single_layer_is_both_first_and_last():
    for model in (nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))):
        model = calibrate(fq.prepare(model, recipes.lsq(2), torch.randn(3, 4)), [torch.randn(3, 4)])
        assert set(bits(model).values()) == {(8, 8)}


def test_first_last_bits_do_not_widen_operands():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            return y + self.b(y)

    model = fq.prepare(Residual(), recipes.lsq(2), torch.randn(3, 4))
    assert [model.a.output_quantizer.spec.bits, model.b.output_quantizer.spec.bits] == [2, 2]
    assert bits(model) == {"a": (8, 8), "b": (8, 8)}


def test_embedding_counts_as_one_layer_and_attention_as_two():
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.MultiheadAttention(8, 2, batch_first=True)
            self.fc, self.words = nn.Linear(8, 8), nn.Embedding(10, 8)

        def forward(self, x):
            x = self.fc(self.words(x))
            return self.out(x, x, x)[0]

    model = fq.prepare(Text(), recipes.lsq(2), torch.ones(2, 3, dtype=torch.int64))
    found = {path: m.weight_quantizer.spec.bits for path, m in model.named_modules() if hasattr(m, "weight_quantizer")}
    assert found == {"out": 2, "out.out_proj": 8, "fc": 2, "words": 8}


# --- states ---------------------------------------------------------------------------------------


@by_recipe
def test_state_loads_into_wrapped_copied_and_pickled_models(config):
    model = calibrate(make(config))
    copied = copy.deepcopy(make(config))
    copied.load_state_dict(model.state_dict())
    wrapped = nn.ModuleDict({"inner": make(config)})
    wrapped.load_state_dict({f"inner.{key}": value for key, value in model.state_dict().items()})
    file = io.BytesIO()
    torch.save(make(config), file)
    file.seek(0)
    pickled = torch.load(file, weights_only=False)
    pickled.load_state_dict(model.state_dict())
    for again in (copied, wrapped["inner"], pickled):
        assert_same_state(model.state_dict(), again.state_dict())


def test_state_of_a_config_with_other_bits_is_refused():
    with pytest.raises(RuntimeError, match="spec"):
        make(recipes.lsq(2)).load_state_dict(calibrate(make(recipes.lsq(3))).state_dict())


def test_loading_a_float_state_changes_no_bits():
    model = make(recipes.lsq(2))
    model.load_state_dict(Chain().state_dict(), strict=False)
    assert bits(model) == EXPECTED["lsq"]


def test_unprepare_removes_the_load_hook():
    model = fq.unprepare(make(recipes.lsq(2)))
    assert not model._load_state_dict_pre_hooks
    model.load_state_dict(Chain().state_dict())


# --- the config -----------------------------------------------------------------------------------


def test_first_last_bits_are_saved_with_the_config_and_default_to_none():
    for config in (recipes.lsq(2), recipes.w4a8(first_last_bits=6), recipes.int8()):
        assert fq.QuantConfig.from_json(config.to_json()) == config
    fields = recipes.lsq(2).to_dict()
    assert fields.pop("first_last_bits") == 8
    assert fq.QuantConfig.from_dict(fields).first_last_bits is None
    assert recipes.int8().first_last_bits is None


@pytest.mark.parametrize("value", [0, 1, 17, -8, 8.0, "8", True], ids=repr)
def test_invalid_first_last_bits_are_refused(value):
    with pytest.raises(ValueError, match="`first_last_bits` must be a number of bits from 2 to 16"):
        fq.QuantConfig(default=fq.LayerConfig(weight=presets.int8()), first_last_bits=value)
