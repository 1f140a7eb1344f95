"""Small models with known errors, prepared copies, and snapshots of models, for the tests of `compare`."""

import copy
import math

import pytest

import fakequant as fq
from fakequant import recipes

torch = pytest.importorskip("torch")
nn = torch.nn


# With scale 1 the codes are the values.
UNIT = fq.QuantSpec(bits=4, narrow_range=True)


def decibels(signal, noise):
    return 10 * math.log10(signal / noise)


def sqnr(expected, result):
    expected, result = expected.double(), result.double()
    return decibels(float(expected.square().sum()), float((expected - result).square().sum()))


def pair(model, config=None, data=None):
    """Returns the model and a prepared copy, calibrated if `data` is given."""
    example = None if data is None else data[0]
    prepared = fq.prepare(copy.deepcopy(model), config or recipes.int8(), example)
    return model, prepared if data is None else fq.calibrate(prepared, data, progress=False)


def with_weights(*weights):
    layers = [nn.Linear(len(w[0]), len(w), bias=False) for w in weights]
    for layer, weight in zip(layers, weights):
        layer.weight.data = torch.tensor(weight)
    return nn.Sequential(*layers)


def on_unit_grid(**layer):
    """Returns a config with inputs of scale 1 and float weights."""
    return fq.QuantConfig(
        default=fq.LayerConfig(input=UNIT, activation_observer=fq.observers.Fixed(-7.0, 7.0), **layer)
    )


def compared(*models, data, **options):
    found = fq.compare(*models, data, progress=False, **options)
    return {layer.path: layer for layer in found.layers}


def snapshot(*models):
    """Returns everything about models that `compare` must not change."""
    return [
        (
            {name: value.clone() for name, value in model.state_dict().items()},
            [(type(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
            [sorted(m.__dict__) for m in model.modules()],
        )
        for model in models
    ]


def assert_same(before, after):
    for (old, *old_rest), (new, *new_rest) in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        for name, value in old.items():
            assert torch.equal(value, new[name]) or (value != value).all(), name
        assert old_rest == new_rest
