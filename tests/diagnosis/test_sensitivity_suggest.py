"""`Sensitivity.suggest`: configs that keep the most sensitive layers in higher precision."""

import copy
import dataclasses

import numpy as np
import pytest

import fakequant as fq
from fakequant import LayerConfig, QuantConfig, QuantSpec, presets, recipes
from fakequant._diagnosis.sensitivity_table import LayerSensitivity, Sensitivity
from sensitivity_models import INT4, INT8, Block

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional

SIZES = {"a": (8, 8), "b": (8, 16), "c": (16, 4), "d": (4, 4)}
ORDER = ["b", "d", "a", "c"]  # worst first
RULED = INT4.rule("?", weight=QuantSpec(bits=4))  # a config's own rules come after suggested ones


@pytest.fixture
def found():
    rows = [
        LayerSensitivity(path, "Linear", SIZES[path][0] * SIZES[path][1], 4, 0.5 - 0.1 * i, 0.1)
        for i, path in enumerate(ORDER)
    ]
    return Sensitivity(rows, 0.9, 0.1, RULED)


def named():
    model = nn.Sequential()
    for name, (before, after) in SIZES.items():
        model.add_module(name, nn.Linear(before, after))
    return model


def bits_of(config):
    """Returns the bits of every weight in a model prepared with the config, None for float."""
    prepared = fq.prepare(named(), config, torch.ones(1, next(iter(SIZES.values()))[0]))
    return {
        name: None if not hasattr(layer, "weight_quantizer") else layer.weight_quantizer.spec.bits
        for name, layer in prepared.named_children()
    }


@pytest.mark.parametrize("keep", range(4))
def test_suggest_keeps_the_worst_layers_in_higher_precision(found, keep):
    assert bits_of(found.suggest(keep=keep)) == {p: None if p in ORDER[:keep] else 4 for p in SIZES}
    config = found.suggest(keep=keep, precision=INT8)
    assert bits_of(config) == {p: 8 if p in ORDER[:keep] else 4 for p in SIZES}
    assert QuantConfig.from_json(config.to_json()) == config
    assert config.rules[keep:] == RULED.rules


def test_suggest_can_keep_all_layers_or_none(found):
    assert set(bits_of(found.suggest(keep=4, precision=INT8)).values()) == {8}
    assert found.suggest(keep=0) == RULED


def sizes_of_prefixes(high):
    def weights(path):
        return SIZES[path][0] * SIZES[path][1]

    return [sum(weights(p) * (high if p in ORDER[:n] else 4) for p in SIZES) for n in range(5)]


@pytest.mark.parametrize(("precision", "high"), [(INT8, 8), (None, 32)])
def test_suggest_keeps_as_many_of_the_worst_layers_as_fit_the_budget(found, precision, high):
    totals = sizes_of_prefixes(high)
    for n, total in enumerate(totals):
        for budget, expected in ((total, n), (total + 1, n), (total - 1, n - 1)):
            if expected < 0 or (precision is None and expected == 4):  # nothing would be quantized
                continue
            bits = bits_of(found.suggest(bits=budget, precision=precision))
            assert [p for p in ORDER if bits[p] != 4] == ORDER[:expected]
            assert sum(SIZES[p][0] * SIZES[p][1] * (bits[p] or 32) for p in SIZES) <= budget
    with pytest.raises(ValueError, match=f"have {totals[0]:,} bits with the config alone"):
        found.suggest(bits=totals[0] - 1, precision=precision)


def test_suggest_counts_bits_as_limited_by_the_target(found):
    found = dataclasses.replace(found, config=dataclasses.replace(RULED, target="onnxruntime-x86"))
    config = found.suggest(bits=sizes_of_prefixes(7)[4], precision=INT8)
    assert set(bits_of(config).values()) == {7}


def test_suggest_refuses_wrong_arguments(found):
    for arguments in ({}, {"keep": 1, "bits": 5000}, {"precision": INT8}):
        with pytest.raises(ValueError, match="either `keep`"):
            found.suggest(**arguments)
    for keep in (5, -1, 1.0, True):
        with pytest.raises(ValueError, match="number of layers, 0 to 4, got"):
            found.suggest(keep=keep)
    for bits in (-1, 1e6, True):
        with pytest.raises(ValueError, match="at least 0, got"):
            found.suggest(bits=bits)
    with pytest.raises(TypeError, match="must be a LayerConfig"):
        found.suggest(keep=1, precision=presets.int8())
    with pytest.raises(ValueError, match=r"weights of 2 bits, but b already has 4"):
        found.suggest(keep=1, precision=LayerConfig(weight=QuantSpec(bits=2)))


def test_suggest_keeps_an_attention_in_float_together_with_its_projection():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.fc = nn.MultiheadAttention(4, 2), nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(self.attention(x, x, x)[0])

    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 2, 4)
    scores = iter([1.0, 0.0, 0.0, 0.0, 0.5, 0.0, 0.75, 0.0])

    def evaluate(model):
        model(x)
        return next(scores)

    found = fq.sensitivity(model, recipes.w4a8(first_last_bits=None), evaluate, data=[x], progress=False)
    assert [(row.path, row.weights, row.part_of) for row in found.layers] == [
        ("attention", 48, None),
        ("attention.out_proj", 16, "attention"),
        ("fc", 16, None),
    ]
    # In float, the 48 weights of the attention bring the 16 of its projection along.
    enough = 64 * 32 + 16 * 4
    assert found.suggest(bits=enough - 1).rules == ()
    config = found.suggest(bits=enough)
    assert [rule.path for rule in config.rules] == ["attention", "attention.out_proj"]
    assert [layer.path for layer in fq.summary(fq.prepare(copy.deepcopy(model), config, x)).layers] == ["fc"]
    # In 8 bits the two are counted separately.
    precision = LayerConfig(weight=presets.int8(), input=presets.uint8())
    assert len(found.suggest(bits=48 * 8 + 32 * 4, precision=precision).rules) == 1


def test_suggest_keeps_modules_without_weights_in_float_at_no_cost():
    rows = [LayerSensitivity("relu", "ReLU", 0, 8, 0.5, 0.5), LayerSensitivity("conv", "Conv2d", 144, 4, 0.1, 0.1)]
    found = Sensitivity(rows, 0.9, 0.1, recipes.w4a8())
    config = found.suggest(bits=144 * 4, precision=INT8)
    assert [(rule.path, rule.use) for rule in config.rules] == [("relu", None)]
    prepared = fq.prepare(Block(), config, torch.ones(1, 1, 8, 8))
    assert not hasattr(prepared.relu, "output_quantizer")
    assert prepared.conv.input_quantizer is not None


def test_suggest_treats_paths_literally():
    model = nn.ModuleDict({"a*": nn.Linear(2, 2), "ab": nn.Linear(2, 2), "[c]": nn.Linear(2, 2)})
    rows = [LayerSensitivity(path, "Linear", 4, 4, 0.1, 0.1) for path in ("a*", "[c]", "ab")]
    prepared = fq.prepare(model, Sensitivity(rows, 0.9, 0.1, INT4).suggest(keep=2))
    assert [layer.path for layer in fq.summary(prepared).layers] == ["ab"]


def test_suggest_accepts_numpy_integers(found):
    assert found.suggest(keep=np.int64(1)) == found.suggest(keep=1)
    assert found.suggest(bits=np.int64(10**6)) == found.suggest(bits=10**6)
