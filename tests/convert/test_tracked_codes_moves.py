"""Moving or selecting elements of a tracked tensor keeps them on their grid; other operations do not."""

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
arithmetic = pytest.importorskip("fakequant._runtimes.arithmetic")
Grid = pytest.importorskip("fakequant._convert.golden.quantizer").GoldenQuantizer


def randn(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def on_grid(x):
    return Grid(presets.uint8(), torch.tensor(0.1), torch.tensor(10, dtype=torch.int32))(x)


def parts(result):
    """Returns the float tensors of a result, without indices."""
    every = result if isinstance(result, (tuple, list)) else [result]
    return [part for part in every if part.is_floating_point()]


INDEX = torch.tensor([2, 0, 0])
# Operations on a tensor of shape (2, 4, 6, 6).
SELECTS = {
    "dropout1d": lambda x: F.dropout1d(x[0], training=False),
    "nn.Dropout1d": lambda x: nn.Dropout1d().eval()(x[0]),
    "nn.Dropout2d": nn.Dropout2d().eval(),
    "nn.Dropout3d": nn.Dropout3d().eval(),
    "nn.AlphaDropout": nn.AlphaDropout().eval(),
    "nn.FeatureAlphaDropout": nn.FeatureAlphaDropout().eval(),
    "F.alpha_dropout, default": F.alpha_dropout,
    "torch.dropout": lambda x: torch.dropout(x, 0.5, False),
    "torch.dropout, named": lambda x: torch.dropout(x, p=0.5, train=False),
    "torch.feature_dropout": lambda x: torch.feature_dropout(x, 0.5, False),
    "nn.MaxPool1d": lambda x: nn.MaxPool1d(2)(x[0]),
    "nn.MaxPool2d, padded": nn.MaxPool2d(3, stride=2, padding=1),
    "nn.MaxPool2d, with indices": nn.MaxPool2d(2, return_indices=True),
    "nn.MaxPool3d": nn.MaxPool3d(2),
    "torch.max_pool1d": lambda x: torch.max_pool1d(x[0], 2),
    "torch.max_pool2d": lambda x: torch.max_pool2d(x, 3, padding=1),
    "torch.max_pool3d": lambda x: torch.max_pool3d(x, 2),
    "torch.max_pool1d_with_indices": lambda x: torch.max_pool1d_with_indices(x[0], 2),
    "F.max_pool2d, every argument": lambda x: F.max_pool2d(x, 2, 1, 0, 1, False, False),
    "nn.AdaptiveMaxPool1d": lambda x: nn.AdaptiveMaxPool1d(2)(x[0]),
    "nn.AdaptiveMaxPool2d": nn.AdaptiveMaxPool2d(4),
    "nn.AdaptiveMaxPool2d, with indices": nn.AdaptiveMaxPool2d(1, return_indices=True),
    "nn.AdaptiveMaxPool3d": nn.AdaptiveMaxPool3d(2),
    "torch.adaptive_max_pool1d": lambda x: torch.adaptive_max_pool1d(x[0], 2),
    "chunk": lambda x: x.chunk(2, dim=1),
    "torch.chunk": lambda x: torch.chunk(x, 2, 1),
    "split": lambda x: x.split(3, dim=1),
    "torch.split": lambda x: torch.split(x, [1, 3], 1),
    "unbind": lambda x: x.unbind(1),
    "torch.unbind": torch.unbind,
    "iteration": list,
    "tensor_split": lambda x: x.tensor_split(3, dim=2),
    "hsplit": lambda x: torch.hsplit(x, 2),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "select": lambda x: torch.select(x, 1, 2),
    "index_select": lambda x: x.index_select(1, INDEX),
    "gather": lambda x: torch.gather(x, 1, INDEX.reshape(1, 3, 1, 1).expand(2, 3, 6, 6)),
    "take_along_dim": lambda x: torch.take_along_dim(x, INDEX.reshape(1, 3, 1, 1), 1),
    "flip": lambda x: x.flip(2, 3),
    "roll": lambda x: torch.roll(x, 2, 3),
    "rot90": lambda x: torch.rot90(x, 1, (2, 3)),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "expand": lambda x: x[:, :1].expand(-1, 4, -1, -1),
    "movedim": lambda x: x.movedim(1, -1),
    "moveaxis": lambda x: torch.moveaxis(x, 0, 1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "T": lambda x: x[0, 0].T,
    "mT": lambda x: x.mT,
    "t": lambda x: x[0, 0].t(),
    "view_as": lambda x: x.view_as(torch.empty(8, 36)),
    "contiguous": lambda x: x.contiguous(memory_format=torch.channels_last),
    "clone": torch.clone,
    "detach": lambda x: x.detach(),
    "nn.PixelShuffle": nn.PixelShuffle(2),
    "nn.PixelUnshuffle": nn.PixelUnshuffle(2),
    "nn.ChannelShuffle": nn.ChannelShuffle(2),
    "index of a tensor": lambda x: x[:, INDEX],
    "index of a mask": lambda x: x[torch.arange(288).reshape(2, 4, 6, 6) % 3 == 0],
    "index of None and an ellipsis": lambda x: x[None, ..., 1:],
}


@pytest.mark.parametrize("move", SELECTS.values(), ids=SELECTS)
def test_moved_or_selected_elements_stay_on_the_grid(move):
    x = on_grid(randn(2, 4, 6, 6))
    result, expected = parts(move(x)), parts(move(values.plain(x)))
    assert len(result) == len(expected)
    for y, plain in zip(result, expected, strict=True):
        origin = values.origin_of(y)
        assert isinstance(origin, values.OnGrid)
        assert_same_bits(plain.numpy(), values.plain(y).numpy())
        assert_same_bits(plain.numpy(), values.plain(origin.value).numpy())
        assert_same_bits(plain.numpy(), values.plain(on_grid(plain)).numpy())


@pytest.mark.parametrize("move", SELECTS.values(), ids=SELECTS)
def test_moved_sums_have_the_codes_of_the_unmoved_ones(move):
    """The result has the same codes or no known origin."""
    scale = torch.tensor([0.1, 0.2, 0.3, 0.4]).reshape(-1, 1, 1)
    sums = torch.randint(-1000, 1000, (2, 4, 6, 6), generator=torch.Generator().manual_seed(0)).float()
    x = values.track(sums * scale, values.Accumulated(sums, scale))
    rule = arithmetic.arithmetics()["onnxruntime"]
    out = values.GridOf(torch.tensor(0.7), torch.tensor(100, dtype=torch.int32), presets.uint8())
    codes = parts(move(rule.from_sums(sums, scale, out)))
    for y, expected in zip(parts(move(x)), codes, strict=True):
        origin = values.origin_of(y)
        assert origin is None or torch.equal(origin.codes(rule, out), expected)


FORGETS = {
    "dropout in training": nn.Dropout(0.5),
    "dropout2d in training": F.dropout2d,
    "alpha_dropout in training": lambda x: F.alpha_dropout(x, training=True),
    "torch.dropout in training": lambda x: torch.dropout(x, 0.5, True),
    "avg_pool2d, rounded up": nn.AvgPool2d(4, ceil_mode=True),
    "avg_pool2d, another divisor": nn.AvgPool2d(2, divisor_override=3),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "norm": lambda x: F.layer_norm(x, (6,)),
    "argmax": lambda x: x.argmax(1),
}


@pytest.mark.parametrize("change", FORGETS.values(), ids=FORGETS)
def test_operations_that_change_values_drop_the_grid(change):
    assert values.origin_of(change(on_grid(randn(2, 4, 6, 6)))) is None


def test_average_pools_and_products_remember_their_operands():
    x = on_grid(randn(2, 4, 6, 6))
    assert values.origin_of(nn.AvgPool2d(3, padding=1)(x)).windows == ((3, 3), (3, 3), (1, 1), True)
    assert isinstance(values.origin_of(x * x[:, :1]), values.Multiplied)
    assert values.origin_of(x * 2) is None


def test_pieces_of_per_token_tensors_drop_the_grid():
    x = Grid(presets.int8_per_token(), None, None)(randn(2, 4, 6))
    assert isinstance(values.origin_of(x), values.OnGrid)
    assert all(values.origin_of(piece) is None for piece in x.chunk(2, dim=1))
    assert isinstance(values.origin_of(nn.Dropout1d().eval()(x)), values.OnGrid)


LATER = {
    "a copy": lambda x, y: x.clone(),
    "a sum": lambda x, y: x + y,
    "a mean": lambda x, y: x.mean((2, 3)),
    "the largest of a sum": lambda x, y: F.max_pool2d(x + y, 2),
}


@pytest.mark.parametrize("compute", LATER.values(), ids=LATER)
def test_result_keeps_its_codes_when_its_input_changes_in_place_later(compute):
    out = Grid(presets.uint8(), torch.tensor(0.37), torch.tensor(100, dtype=torch.int32))
    x, y = on_grid(randn(2, 4, 6, 6)), on_grid(randn(2, 4, 6, 6).flip(0))
    result = compute(x, y)
    expected = values.plain(out(values.plain(result).clone()))
    x.relu_().mul_(3)
    assert_same_bits(expected.numpy(), values.plain(out(result)).numpy())


class Shuffled(nn.Module):
    """A ShuffleNet block: channels are shuffled and split, and one half goes through a layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()), nn.Conv2d(4, 4, 1)
        self.quantize = fq.nn.FakeQuantize(presets.uint8())
        self.drop, self.shuffle = nn.Dropout2d(), nn.ChannelShuffle(2)

    def forward(self, x):
        a, b = self.shuffle(self.drop(self.quantize(self.stem(x)))).chunk(2, dim=1)
        return a + self.conv(b)


def test_layer_behind_chunk_and_shuffle_receives_codes():
    torch.manual_seed(0)
    x = randn(2, 3, 6, 6)
    model = fq.calibrate(fq.prepare(Shuffled(), fq.recipes.int8(target="onnxruntime-x86"), x), [x], progress=False)
    golden = fq.convert(model)
    found = []
    golden.conv.register_forward_pre_hook(lambda module, args: found.append(values.origin_of(args[0])))
    golden(x)
    assert isinstance(found[0], values.OnGrid)
