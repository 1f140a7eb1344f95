"""What `verify` keeps of weights for the passes of the golden model."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant._convert.golden import integer_layer
from fakequant._convert.golden.integer_layer import IntegerLayer, KeptWeights, weight_levels

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    prepared = fq.prepare(network, fq.recipes.int8(target="onnxruntime-x86"), X)
    return fq.calibrate(prepared, [X], progress=False)


def test_nothing_is_kept_after_verify(model, tmp_path, monkeypatch):
    kept = []
    find = KeptWeights.find

    def watched(self, layer, what, compute):
        value = find(self, layer, what, compute)
        kept.append((weakref.ref(layer), weakref.ref(value)))
        return value

    monkeypatch.setattr(KeptWeights, "find", watched)
    path = tmp_path / "model.onnx"
    fq.export_onnx(model, path, X)
    gc.disable()
    try:
        assert fq.verify(model, path, [X]).ok
        assert kept
        assert all(value() is None for _, value in kept)
    finally:
        gc.enable()
    assert integer_layer._in_use.get() is None
    copy.deepcopy(model)


def test_verify_sees_weights_that_changed_between_two_calls(model, tmp_path):
    path = tmp_path / "model.onnx"
    fq.export_onnx(model, path, X)
    assert fq.verify(model, path, [X]).ok
    with torch.no_grad():
        model[0].weight.mul_(-1)
    with pytest.raises(ValueError, match="does not belong to the model"):
        fq.verify(model, path, [X])
    fq.export_onnx(model, path, X)
    assert fq.verify(model, path, [X]).ok


@pytest.mark.parametrize("change", ["in place", "replaced", "result"])
def test_a_changed_weight_is_computed_again(model, change):
    layer = next(m for m in fq.convert(model).modules() if isinstance(m, IntegerLayer))
    size = len(pickle.dumps(layer.state_dict()))
    with KeptWeights().in_use():
        before = weight_levels(layer)
        assert weight_levels(layer) is before
        expected = before.clone()
        if change == "in place":
            layer.weight_codes.neg_()
            expected = -expected
        elif change == "replaced":
            layer.weight_codes = -layer.weight_codes
            expected = -expected
        else:
            before.zero_()
        assert torch.equal(weight_levels(layer), expected)
    assert weight_levels(layer) is not weight_levels(layer)
    assert len(pickle.dumps(layer.state_dict())) == size
    assert all(not isinstance(value, KeptWeights) for value in vars(layer).values())
