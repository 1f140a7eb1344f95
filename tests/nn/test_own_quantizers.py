"""Quantizers of the user's own classes, in configs: they train, are saved, exported, or refused with a reason."""

import copy
import io
import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

import torch
from torch import nn

import fakequant as fq
import own_quantizers as own

X = torch.randn(32, 12, generator=torch.Generator().manual_seed(0))
SPECS = {
    "OtherGradient": fq.QuantSpec(bits=4, axis=0),
    "Stochastic": fq.QuantSpec(bits=4, narrow_range=True, axis=0),
    "Ternary": fq.QuantSpec(bits=2, narrow_range=True),
    "DoReFaLike": fq.QuantSpec(bits=4, narrow_range=True),
    "PowersOfTwo": fq.QuantSpec(bits=4, narrow_range=True, axis=0),
}


def network(name=None):
    torch.manual_seed(0)
    # It cannot be folded into float weights, and verify compares weights bit by bit only without one.
    norm = nn.Identity() if name in ("PowersOfTwo", "OtherGradient") else nn.BatchNorm1d(16)
    return nn.Sequential(nn.Linear(12, 16), norm, nn.ReLU(), nn.Linear(16, 3))


def config(name):
    base = fq.recipes.int8(target="onnxruntime-x86")
    return base.rule("0", weight=SPECS[name], weight_quantizer=getattr(own, name))


def trained(name):
    model = fq.calibrate(fq.prepare(network(name), config(name), X), [X], progress=False).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    before = model[0].weight.detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
    assert not torch.equal(before, model[0].weight)
    return model.eval()


@pytest.fixture(scope="module", params=SPECS)
def made(request, tmp_path_factory):
    model = trained(request.param)
    path = tmp_path_factory.mktemp("own") / "model.onnx"
    fq.export_onnx(model, path, X)
    return request.param, model, path


def test_own_quantizers_train_and_are_exported(made):
    name, model, path = made
    assert type(model[0].weight_quantizer) is getattr(own, name)
    found = fq.verify(model, path, [X])
    assert found.ok, found.problem
    assert ("0" in found.floats) == (name == "PowersOfTwo")
    if name == "PowersOfTwo":
        weight = fq.convert(model)[0].weight
        assert torch.equal(weight, model[0].weight_quantizer(model[0].weight))
        assert {len(row.unique()) for row in weight} <= set(range(2, 16))
    if name == "Ternary":
        quantizer, weight = model[0].weight_quantizer, model[0].weight
        assert set((quantizer(weight) / quantizer.scale).round().unique().tolist()) == {-1, 0, 1}


def test_own_quantizers_survive_copies_states_and_json(made):
    name, model, _ = made
    expected = model(X)
    assert torch.equal(copy.deepcopy(model)(X), expected)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False)(X), expected)
    read = fq.QuantConfig.from_json(config(name).to_json())
    assert read == config(name)
    assert json.loads(read.to_json())["rules"][0]["use"]["weight_quantizer"] == f"own_quantizers:{name}"
    again = fq.prepare(network(name), read, X)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.eval()(X), expected)


def test_gradients_are_those_of_the_class():
    x = torch.randn(3, 4, requires_grad=True)
    own.OtherGradient(fq.QuantSpec(bits=4, axis=0), shape=(3, 4))(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 0.5))


def test_activations_that_runtimes_do_not_compute_are_refused():
    for spec, cls, words in (
        (fq.presets.uint8(), own.Rounder, "and runtimes"),
        (fq.QuantSpec(bits=4), own.PowersOfTwo, "steps that are not equal"),
    ):
        use = fq.recipes.int8().rule("0", input=spec, activation_quantizer=cls)
        model = fq.calibrate(fq.prepare(network(), use, X), [X], progress=False)
        with pytest.raises(ValueError, match=words):
            fq.convert(model)
    use = fq.recipes.int8().rule("0", activation_quantizer=own.OtherGradient)
    model = fq.calibrate(fq.prepare(network(), use, X), [X], progress=False)
    assert type(model[0].input_quantizer) is own.OtherGradient
    fq.convert(model)


def test_weights_that_are_not_on_their_grid_are_refused():
    class Wrong(own.PowersOfTwo):
        has_equal_steps = True

    use = fq.recipes.int8().rule("0", weight=SPECS["PowersOfTwo"], weight_quantizer=Wrong)
    with pytest.raises(ValueError, match="defined in a function"):
        use.to_json()
    model = fq.calibrate(fq.prepare(network(), use, X), [X], progress=False)
    with pytest.raises(ValueError, match="has_equal_steps = False"):
        fq.convert(model)


def test_wrong_classes_are_refused():
    with pytest.raises(TypeError, match="weight_quantizer"):
        fq.LayerConfig(weight_quantizer="Ternary")
    with pytest.raises(TypeError, match=r"derived from nn\.FakeQuantize"):
        fq.prepare(network(), fq.recipes.int8().rule("0", weight_quantizer=nn.Linear), X)
    for name in ("own_quantizers:None_", "no_such_module:A", "own_quantizers"):
        with pytest.raises(ValueError, match="no class"):
            fq.LayerConfig.from_dict({"weight_quantizer": name})


@pytest.mark.parametrize("name", ["PowersOfTwo", "DoReFaLike"])
def test_gradients_do_not_depend_on_saved_codes(name):
    x, found = (
        torch.randn(512, 512, generator=torch.Generator().manual_seed(1)),
        [],
    )  # large enough to be saved as codes
    for save_codes in (True, False):
        torch.manual_seed(0)
        use = fq.QuantConfig(
            default=fq.LayerConfig(weight=SPECS[name], weight_quantizer=getattr(own, name)), save_codes=save_codes
        )
        layer = fq.prepare(nn.Sequential(nn.Linear(512, 512)), use)
        y = x.clone().requires_grad_()
        layer(y).square().mean().backward()
        found.append(y.grad)
    assert torch.equal(*found)
