"""Weights with one scale per whole axis (group_size=-1) or per block of rows convert to channels or groups."""

import pytest

import fakequant as fq
from fakequant import QuantSpec, presets
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
integer = pytest.importorskip("fakequant._convert.golden.integer_layer")
nn = torch.nn


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


WHOLE = QuantSpec(axis=-1, group_size=-1, narrow_range=True)
AFFINE = QuantSpec(axis=-1, group_size=-1, bits=4, signed=False, symmetric=False)
# fmt: off
LAYERS = {
    "Linear": (nn.Linear(8, 4), randn(5, 8), WHOLE, QuantSpec(axis=0, narrow_range=True), True),
    "Linear, affine": (nn.Linear(8, 4), randn(5, 8), AFFINE, None, True),
    "Linear, the other axis": (nn.Linear(8, 4), randn(5, 8), QuantSpec(axis=0, group_size=-1), None, False),
    "Linear, one row": (nn.Linear(8, 1), randn(5, 8), WHOLE, None, True),
    "Conv2d, 1x1": (nn.Conv2d(3, 4, 1), randn(2, 3, 5, 5), QuantSpec(axis=1, group_size=-1), None, True),
    "Conv2d": (nn.Conv2d(3, 4, 3), randn(2, 3, 5, 5), QuantSpec(axis=1, group_size=-1), None, False),
    "Linear, blocks": (nn.Linear(8, 4), randn(5, 8), QuantSpec(axis=-1, group_size=4, group_rows=2),
                       QuantSpec(axis=-1, group_size=4), False),
    "Linear, shorter blocks": (nn.Linear(10, 5), randn(5, 10),
                               QuantSpec(symmetric=False, axis=1, group_size=4, group_rows=3),
                               QuantSpec(symmetric=False, axis=1, group_size=2), False),
    "Linear, FP8 in blocks": (nn.Linear(8, 4), randn(5, 8), presets.fp8_e4m3(group_size=16, group_rows=3), None, False),
    "Embedding": (nn.Embedding(9, 4), torch.arange(9).reshape(3, 3), WHOLE, None, False),
}
# fmt: on


@pytest.mark.parametrize(("layer", "x", "spec", "same", "is_integer"), LAYERS.values(), ids=LAYERS)
def test_weights_convert_to_channels_or_groups(layer, x, spec, same, is_integer):
    activations = None if isinstance(layer, nn.Embedding) else presets.uint8()
    config = fq.QuantConfig(default=fq.LayerConfig(weight=spec, input=activations))
    model = fq.prepare(nn.Sequential(type(layer)(*args_of(layer))), config, x)
    model.load_state_dict({f"0.{name}": value for name, value in layer.state_dict().items()}, strict=False)
    fq.calibrate(model, [x], progress=False)
    golden = fq.convert(model)
    made = golden[0]
    assert made._fakequant.weight_spec.group_size != -1
    assert integer.is_integer(made) == is_integer
    if same is not None:
        assert made._fakequant.weight_spec == same
    trained = model.eval()[0].weight_quantizer(layer.weight).detach()
    assert_same_bits(trained, integer.float_weight(made))
    step = float(made.weight_scale.max()) * (1 if activations is None else float(made.input_quantizer.scale))
    assert float((golden(x) - model(x).detach()).abs().max()) <= step  # the rounding of the bias


def args_of(layer):
    if isinstance(layer, nn.Linear):
        return layer.in_features, layer.out_features
    if isinstance(layer, nn.Embedding):
        return layer.num_embeddings, layer.embedding_dim
    return layer.in_channels, layer.out_channels, layer.kernel_size


def test_whole_axis_model_is_saved_and_loaded(tmp_path):
    pytest.importorskip("safetensors")
    x = randn(5, 8)
    config = fq.QuantConfig(default=fq.LayerConfig(weight=AFFINE, input=presets.uint8()))
    model = fq.prepare(nn.Sequential(nn.Linear(8, 4)), config, x)
    golden = fq.convert(fq.calibrate(model, [x], progress=False))
    fq.save_converted(golden, tmp_path / "m.safetensors")
    loaded = fq.load_converted(nn.Sequential(nn.Linear(8, 4)), tmp_path / "m.safetensors")
    assert torch.equal(golden(x), loaded(x))
