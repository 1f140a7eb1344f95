"""Every opset, several inputs, shared layers, other layer types, and file sizes."""

import os
import warnings

import numpy as np
import pytest

import fakequant as fq
from fakequant import QuantSpec, presets
from onnx_models import (
    X86,
    calibrated,
    evaluate,
    exported,
    initializers,
    randn,
    run,
    signed,
    unsigned,
    with_trained_norms,
)

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
recipes = pytest.importorskip("fakequant.recipes")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
integer = pytest.importorskip("fakequant._convert.golden.integer_layer")
IntegerLayer = integer.IntegerLayer
nn = torch.nn
F = torch.nn.functional
LayerConfig, QuantConfig = fq.LayerConfig, fq.QuantConfig

# --- opsets and several inputs ----------------------------------------------------------------------


class TwoInputs(nn.Module):
    """Uses operators that differ between opsets: an unfolded batch norm, reductions, computed shapes."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.late = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 36, 5)

    def forward(self, x, shift):
        x = self.late(F.relu(self.norm(self.conv(x))))
        x = x + x.amax((2, 3), keepdim=True) * x.abs().mean(1, keepdim=True)
        return self.head(x.view(x.shape[0], -1)) + shift


@pytest.fixture(scope="module")
def two_inputs():
    torch.manual_seed(0)
    x, shift = randn(8, 3, 8, 8), randn(8, 5, seed=1)
    return calibrated(with_trained_norms(TwoInputs()), recipes.int8(target=X86), (x, shift))


@pytest.mark.parametrize("opset", [13, 17, 18, 25])
def test_every_opset_computes_the_same_results(opset, two_inputs, tmp_path):
    """The float batch norm may round differently, which moves a few codes by one step."""
    x, shift = randn(6, 3, 8, 8, seed=4), randn(6, 5, seed=5)
    proto = exported(two_inputs, tmp_path, (x[:1], shift[:1]), opset=opset)
    assert [node.op_type for node in proto.graph.node].count("BatchNormalization") == 1
    assert proto.ir_version == onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])
    expected = fq.convert(two_inputs)(x, shift).numpy()
    computed = [run(proto, x, shift), run(proto, x, shift, optimized=False)]
    if opset >= 19:
        computed.append(evaluate(proto, x, shift))
    for y in computed:
        (found,) = y.values()
        # Float sums in another order may move a code at a tie by one step of the output grid.
        np.testing.assert_allclose(found, expected, atol=0.01)
        assert np.median(np.abs(found - expected)) < 1e-5


class Heads(nn.Module):
    """Its code reads the lengths of two axes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 12)

    def forward(self, x):
        batch, length, _ = x.shape
        return self.fc(x).view(batch, length, 3, 4).transpose(1, 2).reshape(batch, 3, length * 4)


@pytest.mark.parametrize("opset", [13, 14, 15])
def test_lengths_that_are_read_at_run_time_exist_in_every_opset(opset, tmp_path):
    x = randn(2, 5, 8)
    model = calibrated(Heads(), recipes.int8(target=X86), x)
    path = tmp_path / "model.onnx"
    fq.export_onnx(model, path, x, opset=opset, dynamic_shapes=({0: "batch", 1: "length"},))
    found = fq.verify(model, path, [x, randn(3, 4, 8)])
    assert found.ok, found.verdict()


@pytest.mark.parametrize("opset", [12, 26, 0, -1, 21.0, "21", None, True])
def test_unsupported_opset_is_refused(opset, two_inputs, tmp_path):
    with pytest.raises((ValueError, TypeError), match=r"`opset` must be a number from 13 to 25, got"):
        fq.export_onnx(two_inputs, tmp_path / "m.onnx", (), opset=opset)
    assert not os.listdir(tmp_path)


NEEDS_21 = {
    "groups": (LayerConfig(weight=presets.int4(group_size=4)), r"0\.weight: scales per group need opset 21"),
    "int16": (LayerConfig(input=presets.int16()), r"0\.input_quantizer: int16 needs opset 21"),
    "int16 weights": (LayerConfig(weight=QuantSpec(bits=16, axis=0)), r"0\.weight: int16 needs opset 21"),
}


@pytest.mark.parametrize(("layer", "message"), NEEDS_21.values(), ids=NEEDS_21)
def test_grid_that_an_opset_cannot_store_is_refused_by_name(layer, message, tmp_path):
    model = calibrated(nn.Sequential(nn.Linear(8, 4)), QuantConfig(default=layer), randn(4, 8))
    with pytest.raises(ValueError, match=f"{message}(.|\n)*Use opset=21"):
        fq.export_onnx(model, tmp_path / "m.onnx", randn(4, 8), opset=18)
    assert not os.listdir(tmp_path)


# --- shared layers ----------------------------------------------------------------------------------


class Shared(nn.Module):
    """One layer used with and without a ReLU before it, whose results are also outputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        return self.b(F.relu(y)), self.b(y), self.b(self.b(x)), y


SHARED = {
    "uint7": (unsigned(7), "generic"),
    "int8, stored signed": (signed(8), "generic"),
    "int8, stored unsigned": (signed(8), X86),
}


@pytest.mark.parametrize(("spec", "target"), SHARED.values(), ids=SHARED)
def test_shared_layer_with_and_without_relu_before_it_matches_the_golden_model(spec, target, tmp_path):
    torch.manual_seed(0)
    layer = LayerConfig(weight=QuantSpec(bits=7, narrow_range=True, axis=0), input=spec)
    model = calibrated(Shared(), QuantConfig(default=layer, target=target), randn(64, 8))
    x = randn(64, 8, seed=1)
    proto = exported(model, tmp_path, x[:1])
    for optimized in (True, False):
        found = run(proto, x, optimized=optimized)
        for expected, y in zip(fq.convert(model)(x), found.values(), strict=True):
            # Float layers sum in another order.
            np.testing.assert_allclose(y, values.plain(expected).numpy(), atol=1e-5)


def test_model_that_is_one_layer_has_names_without_a_leading_dot(tmp_path):
    model = calibrated(nn.Linear(8, 4), recipes.int8(target=X86), randn(4, 8))
    stored = initializers(exported(model, tmp_path, randn(1, 8)))
    assert set(stored) == {
        *("input_quantizer_scale", "input_quantizer_zero_point", "bias_codes", "bias_scale"),
        *("weight_codes", "weight_scale", "weight_zero_point"),
    }


def test_group_size_one_exports_a_scale_per_element(tmp_path):
    model = calibrated(nn.Sequential(nn.Linear(8, 4)), recipes.int4_weight_only(1), randn(4, 8))
    proto = exported(model, tmp_path, randn(1, 8))
    x = randn(3, 8, seed=1)
    # Eight floats are summed in another order.
    np.testing.assert_allclose(next(iter(run(proto, x).values())), fq.convert(model)(x).numpy(), atol=1e-6)


# --- other layers -----------------------------------------------------------------------------------


class Others(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.grouped = nn.Conv1d(16, 16, 3, padding=1, groups=4)
        self.act, self.norm = nn.ReLU(), nn.BatchNorm1d(16)
        self.up = nn.ConvTranspose1d(16, 8, 2, stride=2, groups=2)
        self.up2 = nn.ConvTranspose2d(8, 4, 3, stride=2)
        self.volume = nn.Conv3d(4, 2, 2)

    def forward(self, ids, other):
        x = self.table(ids)
        x, weights = self.attention(x, other, other)
        y = self.grouped(x.transpose(1, 2))
        y = self.norm(self.act(y))
        z = self.up(y)
        image = self.up2(z.unflatten(2, (3, 4)))
        return x, weights, y, z, image, self.volume(image.unflatten(3, (3, 3)))


def test_embedding_attention_and_other_convolutions_are_close_to_the_golden_model(tmp_path):
    """Float products (attention, transposed convolutions) are summed in another order, a few float32 steps.

    One code would be a few hundredths; with these inputs, none moves.
    """
    torch.manual_seed(0)
    ids, other = torch.arange(24).reshape(4, 6) % 20, randn(4, 5, 16)
    model = calibrated(with_trained_norms(Others()), recipes.int8(target=X86), (ids, other))
    inputs = {"ids": ids, "other": other}
    proto = exported(model, tmp_path, {name: x[:2] for name, x in inputs.items()})
    assert [i.name for i in proto.graph.input] == ["ids", "other"]
    assert [node.op_type for node in proto.graph.node].count("BatchNormalization") == 1
    golden = fq.convert(model)
    stored = initializers(proto)
    for path, layer in golden.named_modules():
        if isinstance(layer, IntegerLayer):
            assert stored[f"{path}.weight_codes"].dtype == np.int8, path
    expected = golden(**inputs)
    for found in (run(proto, ids, other), run(proto, ids, other, optimized=False)):
        for known, y in zip(expected, found.values(), strict=True):
            # Attention and unfolded layers sum floats in another order.
            np.testing.assert_allclose(y, values.plain(known).numpy(), atol=2e-5)


def test_embedding_bag_is_close_to_the_golden_model(tmp_path):
    """Float rows are summed in another order."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(12, 32, mode="sum"), nn.Linear(32, 3)

        def forward(self, ids):
            return self.head(self.bag(ids))

    torch.manual_seed(0)
    ids = torch.arange(24).reshape(4, 6) % 12
    model = calibrated(Bag(), recipes.int4_weight_only(16), ids)
    proto = exported(model, tmp_path, ids)
    for optimized in (True, False):
        (y,) = run(proto, ids, optimized=optimized).values()
        # Rows are summed in another order.
        np.testing.assert_allclose(y, values.plain(fq.convert(model)(ids)).numpy(), atol=1e-5)


def test_dynamic_ranges_are_close_to_the_golden_model(tmp_path):
    """The graph computes in float; a tie may fall to the other side, one step of 1/127."""
    torch.manual_seed(0)
    x = randn(4, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Linear(6, 5))
    model = calibrated(model, recipes.int8_dynamic(), x)
    proto = exported(model, tmp_path, x[:1])
    (y,) = run(proto, x).values()
    # Ranges and sums are computed in float at run time.
    np.testing.assert_allclose(y, values.plain(fq.convert(model)(x)).numpy(), atol=1e-4)


# --- sizes ------------------------------------------------------------------------------------------

SIZES = {"int8": (recipes.int8(), 0.27), "int4 in groups of 32": (recipes.int4_weight_only(32), 0.16)}


def large():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512))


@pytest.fixture(scope="module")
def float_size(folder):
    path = folder / "float.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls functions that it deprecates
        torch.onnx.export(large(), (randn(2, 1024),), path, dynamo=True, external_data=False, verbose=False)
    return path.stat().st_size


@pytest.mark.parametrize(("config", "limit"), SIZES.values(), ids=SIZES)
def test_file_size_is_that_of_the_codes(config, limit, float_size, tmp_path):
    model = calibrated(large(), config, randn(8, 1024))
    proto = exported(model, tmp_path, randn(2, 1024))
    assert (tmp_path / "model.onnx").stat().st_size <= limit * float_size
    x = randn(8, 1024, seed=1)
    (y,) = run(proto, x, optimized=False).values()
    # Sums of 1024 floats in another order; with 8 bits, a code of the hidden layer may be one step off.
    np.testing.assert_allclose(y, values.plain(fq.convert(model)(x)).numpy(), atol=1e-2)
    stored = initializers(proto)
    assert sum(a.size for a in stored.values() if a.dtype == np.float32) <= 1024 * 1536 / 32 + 4000
