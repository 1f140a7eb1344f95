"""`ptq.equalize`: the same function in float, with weights whose channels have similar ranges."""

import copy

import pytest

from fakequant.testing.assertions import assert_same_bits
from smooth_cases import (
    IMAGES,
    PER_TENSOR,
    TOKENS,
    assert_travels,
    assert_unchanged,
    encoder,
    failing,
    network,
    prepared,
    randn,
    state,
)

torch = pytest.importorskip("torch")
nn = torch.nn
fq = pytest.importorskip("fakequant")
channels = pytest.importorskip("fakequant.ptq._channels")


def uneven(*layers):
    """Returns a chain of layers whose output channels have different ranges."""
    torch.manual_seed(0)
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        for layer in model:
            if isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd)):
                view = channels.by_channel(layer)
                steps = torch.logspace(-1, 1, view.shape[1]).reshape(1, -1, *[1] * (view.dim() - 2))
                view.mul_(steps)
    return model


CHAINS = {
    "linear": (lambda: uneven(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), (5, 4)),
    "groups": (
        lambda: uneven(nn.Conv2d(4, 6, 1, groups=2), nn.LeakyReLU(0.1), nn.Conv2d(6, 9, 3, groups=3)),
        (2, 4, 5, 5),
    ),
    "depthwise": (lambda: uneven(nn.Conv1d(3, 6, 1), nn.ReLU(), nn.Conv1d(6, 6, 3, groups=6)), (2, 3, 7)),
    "transposed": (
        lambda: uneven(nn.ConvTranspose2d(3, 4, 2), nn.PReLU(4), nn.ConvTranspose2d(4, 6, 2, groups=2)),
        (2, 3, 4, 4),
    ),
    "3-D": (lambda: uneven(nn.Conv3d(2, 4, 1), nn.MaxPool3d(2), nn.Conv3d(4, 2, 1)), (2, 2, 4, 4, 4)),
}


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize(("make", "shape"), CHAINS.values(), ids=CHAINS)
def test_ranges_become_alike_and_the_function_stays(make, shape, calibrated):
    x, model = randn(*shape), make()
    expected = model(x)
    for powers_of_two in (True, False):
        quantized = prepared(model, [x], PER_TENSOR, calibrated=calibrated)
        changes = fq.ptq.equalize(quantized, [x], powers_of_two=powers_of_two, progress=False)
        assert changes.changed == ["0", "2"]
        first, second = channels.output_ranges(quantized[0]), channels.input_ranges(quantized[2])
        # The same for all channels, up to the rounding of factors: by half a power of two each way, squared.
        ratio = (first / second).log2()
        assert ratio.max() - ratio.min() <= (2.01 if powers_of_two else 0.05)
        found = fq.unprepare(quantized).eval()(x)
        if powers_of_two:
            assert_same_bits(expected, found)
        else:  # factors are rounded, and so are the weights: some units in the last place of sums of 20 products
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_batch_norms_take_the_factors_of_folded_layers():
    model = network()
    expected = model(IMAGES[1])
    quantized = prepared(model, IMAGES, PER_TENSOR)
    first = quantized[0].weight.detach().clone()
    before = channels.input_ranges(quantized[3])
    changes = fq.ptq.equalize(quantized, IMAGES, progress=False)
    assert changes.changed == ["3", "6", "11"]
    assert torch.equal(quantized[0].weight, first)
    ranges = channels.input_ranges(quantized[3])
    assert before.max() / before.min() > 50
    assert ranges.max() / ranges.min() <= 1.01
    assert changes.layers[1].after > changes.layers[1].before + 5
    found = fq.unprepare(quantized).eval()(IMAGES[1])
    assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()  # sums of at most 72 products, four layers


def test_reasons():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d, self.e = (nn.Linear(4, 4) for _ in range(5))
            self.relu, self.relu6 = nn.ReLU(), nn.ReLU6()

        def forward(self, x):
            x = self.relu(self.a(x))
            x = x + self.relu(self.b(x))
            return self.e(torch.clamp(self.d(self.relu6(self.c(x))), 0, 1))

    quantized = prepared(Model(), [randn(3, 4)], PER_TENSOR, calibrated=False)
    reasons = {row.path: row.reason for row in fq.ptq.equalize(quantized, [randn(3, 4)], progress=False).layers}
    assert reasons == {
        "a": "its input is an input of the model",
        "b": "the result of a cannot be scaled: add does not pass on factors",
        "c": "its input is a result of add",
        "d": "its input is a result of relu6, ReLU6",
        "e": "its input is a result of clamp",
    }
    quantized = prepared(encoder(), TOKENS)
    reasons = {row.path: row.reason for row in fq.ptq.equalize(quantized, TOKENS, progress=False).layers}
    assert reasons["q"] == "norm1 stands before it, LayerNorm, which is not folded into a layer"
    assert reasons["down"] is None


def test_channels_without_values_keep_their_factor():
    model = uneven(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight[1] = 0
        model[2].weight[:, 2] = 0
    quantized = prepared(model, [randn(3, 4)], PER_TENSOR, calibrated=False)
    fq.ptq.equalize(quantized, [randn(3, 4)], progress=False)
    assert torch.equal(quantized[2].weight[:, 1:], model[2].weight[:, 1:])
    assert torch.equal(quantized[0].weight[2], model[0].weight[2])


def test_equalized_models_travel():
    quantized = prepared(network(), IMAGES, PER_TENSOR)
    fq.ptq.equalize(quantized, IMAGES, progress=False)
    assert_travels(quantized, prepared(network(), IMAGES, PER_TENSOR), IMAGES[0])


def test_exported_and_verified(tmp_path):
    quantized = prepared(network(), IMAGES, fq.recipes.int8(target="onnxruntime-x86"))
    fq.ptq.equalize(quantized, IMAGES, progress=False)
    fq.export_onnx(quantized, tmp_path / "model.onnx", IMAGES[0])
    assert fq.verify(quantized, tmp_path / "model.onnx", IMAGES).ok


def test_an_error_undoes_everything():
    quantized = prepared(network(), IMAGES, fq.recipes.lsq(4)).train()
    before = state(quantized)
    with pytest.raises(RuntimeError, match="no more data"):
        fq.ptq.equalize(quantized, failing(IMAGES, 2), progress=False)  # while the ranges are found again
    assert_unchanged(before, quantized)


def test_bad_arguments():
    quantized = prepared(network(), IMAGES, PER_TENSOR)
    before = state(quantized)
    with pytest.raises(TypeError, match="`powers_of_two` must be True or False"):
        fq.ptq.equalize(quantized, IMAGES, powers_of_two=None)
    with pytest.raises(ValueError, match="no batches"):
        fq.ptq.equalize(quantized, [])
    assert_unchanged(before, quantized)
    with pytest.raises(ValueError, match="not prepared"):
        fq.ptq.equalize(network(), IMAGES)


def test_copies_are_equalized_alike():
    first = prepared(network(), IMAGES, PER_TENSOR)
    second = copy.deepcopy(first)
    for model in (first, second):
        fq.ptq.equalize(model, IMAGES, progress=False)
    assert_same_bits(first(IMAGES[0]), second(IMAGES[0]))
