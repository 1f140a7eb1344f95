"""`export_litert`: files run in LiteRT, and their codes and results are those of the golden model."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

import fakequant as fq
from fakequant import presets, recipes

pytest.importorskip("ai_edge_litert.interpreter")

from fakequant._export.litert.file import LitertFile, schema
from fakequant._runtimes.litert.running import Loaded


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def written(model, example, folder, config=None, **options):
    """Returns a prepared and calibrated model, the report of its file, and the path of that."""
    torch.manual_seed(0)
    config = recipes.int8(target="litert") if config is None else config
    model = fq.calibrate(fq.prepare(model.eval(), config, example), [example], progress=False)
    return model, fq.export_litert(model, folder / "m.tflite", example, **options), folder / "m.tflite"


def assert_same(model, path, *batches, ties=0):
    found = fq.verify(model, path, list(batches))
    assert found.ok, str(found)
    assert found.runtime == "litert"
    assert sum(t.runtime_differ for t in found.tensors) <= ties, str(found)
    return found


# Targets, and the bits of activations.
every_kernel = pytest.mark.parametrize(
    ("target", "bits"), [("litert", 8), ("litert", 16), ("litert-builtin", 8), ("litert-reference", 8)]
)


# --- layers ---------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Layers of all forms, on an image, a sequence and rows."""

    def __init__(self):
        super().__init__()
        self.strided, self.even = nn.Conv2d(4, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 2)
        self.depthwise, self.twice = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 16, 3, groups=8)
        self.dilated = nn.Conv2d(16, 8, 3, padding=2, dilation=2, groups=2)
        self.up, self.crop = nn.ConvTranspose2d(8, 6, 3, stride=2), nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1)
        self.sequence, self.same = nn.Conv1d(4, 8, 3, padding=1, stride=2), nn.Conv1d(8, 8, 3, padding="same", groups=8)
        self.longer, self.head = nn.ConvTranspose1d(8, 4, 2, stride=2), nn.Linear(4, 3)
        self.groups = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2)

    def forward(self, image: Tensor, sequence: Tensor) -> tuple[Tensor, ...]:
        x = F.relu6(self.strided(image))
        x = F.hardtanh(self.depthwise(F.relu(self.even(x))), -0.5, 0.25)
        x = self.crop(F.relu(self.up(self.dilated(self.twice(x)))))
        y = self.longer(self.same(F.relu(self.sequence(sequence))))
        return self.groups(x), self.head(y.transpose(1, 2))


@every_kernel
def test_layers(target, bits, tmp_path):
    x = randn(2, 4, 16, 16, generator=generator()), randn(2, 4, 9, generator=generator())
    model, report, path = written(Layers(), x, tmp_path, recipes.int8(target=target, activation_bits=bits))
    assert (report.share, {one.how for one in report.layers}) == (1.0, {f"int{bits}"})
    assert len(report.layers) == 13  # the groups of a transposed convolution are layers
    found = assert_same(model, path, x)
    assert found.outputs.runtime_is_equal
    assert found.floats == {}
    # The image and the first result; sequences have the channels last in front of the linear layer.
    assert len(report.transposes) == 3


def test_time_steps_share_their_weights(tmp_path):
    sizes = []
    for steps in (2, 6):
        _, _, path = written(nn.LSTM(64, 64, batch_first=True), torch.ones(1, steps, 64), tmp_path)
        sizes.append(path.stat().st_size)
    assert sizes[1] - sizes[0] < 4 * 64 * 64  # a quarter of one of the two weights, in bytes


def test_layers_without_outputs_on_a_grid_say_why(tmp_path):
    x = randn(3, 5, 4, generator=generator())
    _, report, _ = written(nn.LSTM(4, 6, batch_first=True), x, tmp_path)
    assert {one.why for one in report.layers} == {"its result is not quantized"}
    assert "its result is not quantized" in str(report)


def test_channels_without_weights_run_in_integers(tmp_path):
    layer = nn.Conv2d(4, 4, 1)
    nn.init.zeros_(layer.weight[:2].data)
    nn.init.zeros_(layer.bias[:2].data)
    x = randn(2, 4, 5, 5, generator=generator())
    model, report, path = written(nn.Sequential(layer, nn.ReLU()), x, tmp_path)
    assert report.share == 1.0
    assert_same(model, path, x)


# --- operators ------------------------------------------------------------------------------------


class Operators(nn.Module):
    """Float operators, and those that move codes, behind a layer with codes."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(4, 4, 1), nn.Linear(8, 8)
        self.prelu, self.group, self.layer = nn.PReLU(4), nn.GroupNorm(2, 4), nn.LayerNorm(8)
        self.norm = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gru = nn.GRU(8, 4, batch_first=True)

    def forward(self, image: Tensor, tokens: Tensor) -> list[Tensor]:
        x, y = self.conv(image), self.fc(tokens)
        unary = [
            F.relu, F.relu6, F.hardtanh, F.hardswish, F.hardsigmoid, F.gelu, F.silu, F.tanh, F.sigmoid, F.elu, F.selu,
            F.mish, F.softplus, F.leaky_relu, torch.exp, torch.abs, torch.neg, torch.square, torch.sin, torch.cos,
        ]  # fmt: skip
        results = [one(x) for one in unary]
        results += [F.gelu(y, approximate="tanh"), F.elu(x, 0.5), torch.clamp(x, -0.3, 0.4), x.clamp(min=0.1)]
        results += [(x.abs() + 1).log(), (x.abs() + 1).sqrt(), (x.abs() + 1).rsqrt(), (x.abs() + 1) ** 1.5, 1 / (x + 9)]
        results += [self.prelu(x), self.group(x), self.layer(y), self.norm(x.sigmoid())]
        results += [x.softmax(1), y.softmax(-1), y.log_softmax(1)]
        results += [self.attention(y, y, y)[0], self.gru(y)[0]]
        results += [x + x.flip(2), x - y.mean(), x * x.mean((2, 3), keepdim=True), x / 3, 2 - x, x + y[:, :4, :1, None]]
        results += [torch.maximum(x, -x), torch.where(x > 0.1, x, -x), x.masked_fill(x < 0, 0.5)]
        results += [x.sum(1), x.amax((2, 3)), x.amin(3, keepdim=True), y.cumsum(1), y.var(1), y.std(-1)]
        results += [F.max_pool2d(x, 2), F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 3, 2, ceil_mode=True)]
        results += [F.avg_pool2d(x, 2), F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)]
        results += [F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (3, 5)), F.adaptive_max_pool2d(x, 2)]
        results += [F.max_pool1d(y, 2), F.avg_pool1d(y, 2)]
        results += [F.interpolate(x, scale_factor=2), F.interpolate(x, (5, 9), mode="bilinear")]
        results += [F.interpolate(x, (13, 9), mode="bilinear", align_corners=True)]
        results += [F.pad(x, (1, 2, 0, 1)), F.pad(x, (1, 1), value=2.0), F.pad(x, (1, 1, 1, 1), mode="reflect")]
        results += [torch.cat([x, x.relu()], 1), torch.stack([y, -y], 1), torch.cat([x, -x], 3)]
        results += [x.reshape(2, -1), x.flatten(2), x.permute(0, 2, 3, 1), y.transpose(1, 2), x.unsqueeze(1), y[:, 0]]
        results += [x[:, 1:3], x[:, :, ::2], *y.chunk(2, -1), *y.unbind(1), *x.split([1, 3], 1), y.roll(1, 1)]
        results += [y.expand(3, 2, 6, 8), x.repeat(1, 2, 1, 1), y[:, torch.tensor([2, 0, -1])]]
        results += [F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.channel_shuffle(x, 2)]
        results += [y @ y.transpose(1, 2), torch.einsum("bij,bkj->bik", y, y), F.normalize(y, dim=-1)]
        results += [y.unflatten(-1, (2, 4)).transpose(1, 2).reshape(4, 6, 4)]
        return [one + 0.0 for one in results]


@pytest.mark.parametrize("bits", [8, 16])
def test_operators(bits, tmp_path):
    """Every result is compared. Of 16 bits, some are at ties after float operators."""
    x = randn(2, 4, 8, 8, generator=generator()), randn(2, 6, 8, generator=generator())
    model, _, path = written(Operators(), x, tmp_path, recipes.int8(target="litert", activation_bits=bits))
    assert_same(model, path, x, ties=0 if bits == 8 else 4)


def test_operators_that_the_reference_does_not_have_are_named(tmp_path):
    x = randn(2, 4, generator=generator())
    model = nn.Sequential(nn.Linear(4, 4), nn.ELU(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="find op for builtin opcode 'ELU'"):
        written(model, x, tmp_path, recipes.int8(target="litert-reference"))


class Codes(nn.Module):
    """Operators that compute or move codes."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, y = F.relu(self.a(x)), self.b(x)
        x = F.relu(x + y) * y.mean((2, 3), keepdim=True)
        x = torch.cat([x, y], 1)[:, 2:6]
        x = F.pad(F.max_pool2d(x, 2), (1, 1, 1, 1))
        x = self.c(F.interpolate(x, scale_factor=2.0))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize(
    ("target", "bits"),
    [("litert", 8), ("litert", 5), ("litert", 16), ("litert-builtin", 5), ("litert-reference", 8)],
)
def test_codes(target, bits, tmp_path):
    """Additions, products, means and concatenations compute with codes; 5 bits are limited afterwards."""
    grid = presets.int16() if bits == 16 else fq.QuantSpec(bits=bits, signed=False, symmetric=False)
    config = fq.QuantConfig(default=fq.LayerConfig(weight=presets.int8(), input=grid), operands=grid, target=target)
    x = randn(3, 4, 8, 8, generator=generator())
    model, report, path = written(Codes(), x, tmp_path, config)
    assert report.share == 1.0
    assert_same(model, path, x, randn(3, 4, 8, 8, generator=generator(1)))
    if bits > 5:
        assert report.others == ()


@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@every_kernel
def test_padding_moves_codes(mode, target, bits, tmp_path):
    x = randn(2, 4, 6, 6, generator=generator())
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode=mode), nn.ReLU())
    config = recipes.int8(target=target, activation_bits=bits)
    model, report, path = written(model, x, tmp_path, config)
    assert {one.how for one in report.layers} == {f"int{bits}"}
    assert report.others == ()
    assert_same(model, path, x)


def test_codes_of_8_and_16_bits_in_one_model(tmp_path):
    """A kernel has codes of one width. Between them, codes become floats."""
    x = randn(3, 4, 8, 8, generator=generator())
    config = recipes.int8(target="litert", activation_bits=16).rule(path="b", input=presets.uint8())
    config = config.rule(path="head", input=presets.uint8(), output=presets.uint8())
    model, report, path = written(Codes(), x, tmp_path, config)
    assert {one.how for one in report.layers} == {"int8", "int16", "float"}
    assert_same(model, path, x, randn(3, 4, 8, 8, generator=generator(1)), ties=2)


def test_sums_of_16_bit_activations_beyond_32_bits(tmp_path):
    """The file then has sums and a bias of 64 bits, which the kernels of convolutions round more coarsely."""
    layer = nn.Conv2d(1024, 4, 1)
    layer.weight.data = layer.weight.data.sign()
    x = randn(2, 1024, 3, 3, generator=generator()).abs()
    config = recipes.int8(target="litert", activation_bits=16)
    model, _, path = written(nn.Sequential(layer, nn.ReLU()), x, tmp_path, config)
    assert schema().TensorType.INT64 in [tensor.type for tensor in LitertFile(path).graph.tensors]
    found = fq.verify(model, path, [x])
    assert found.is_exact
    assert found.tensors[1].prepared_rounded == found.tensors[1].prepared_differ > 0


# --- recipes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
def test_dynamic_inputs(bits, tmp_path):
    weight = fq.QuantSpec(bits=bits, axis=0)
    inputs = presets.int8_dynamic_input() if hasattr(presets, "int8_dynamic_input") else None
    config = recipes.int8_dynamic(target="litert")
    if inputs is None:
        import dataclasses

        config = dataclasses.replace(config, default=dataclasses.replace(config.default, weight=weight))
    x = randn(7, 16, generator=generator())
    model, report, path = written(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5)), x, tmp_path, config)
    assert {one.how for one in report.layers} == {"dynamic"}
    assert report.bytes < 6000 - (8 - bits) * 60
    assert_same(model, path, x, randn(7, 16, generator=generator(1)))


def test_embedding(tmp_path):
    ids = torch.arange(10).reshape(2, 5)
    table = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 4))
    model, report, path = written(table, ids, tmp_path)
    assert report.operators["GATHER"] >= 1
    assert_same(model, path, ids, ids + 2)


class Steps(nn.Module):
    """The first state has a row per sequence, which are the same."""

    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])


@pytest.mark.parametrize(("network", "shape"), [(Codes, (4, 8, 8)), (Steps, (3, 4))])
def test_batches_of_any_length(network, shape, tmp_path):
    """The file is the same for examples of all lengths."""
    one, three = (randn(n, *shape, generator=generator(n)) for n in (1, 3))
    model, report, path = written(network(), one, tmp_path, dynamic_batch=True)
    assert report.has_any_batch
    assert_same(model, path, one, three)
    fq.export_litert(model, tmp_path / "other.tflite", three, dynamic_batch=True)
    assert (tmp_path / "other.tflite").read_bytes() == path.read_bytes()


# --- the file -------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"sum": self.left(a) + self.right(b), "right": self.right(b)}


def test_signature_has_the_names_of_the_model(tmp_path):
    batch = {"b": randn(2, 4, generator=generator()), "a": randn(2, 4, generator=generator(1))}
    model, _, path = written(Named(), batch, tmp_path)
    loaded = Loaded(path.read_bytes(), path)
    runner = loaded.interpreter.get_signature_runner()
    assert list(runner.get_input_details()) == ["a", "b"]
    found = runner(**{name: value.numpy() for name, value in batch.items()})
    expected = fq.convert(model)(**batch)
    assert {name: tuple(value.shape) for name, value in found.items()} == {"sum": (2, 3), "right": (2, 3)}
    torch.testing.assert_close(torch.from_numpy(found["sum"]), expected["sum"])
    assert_same(model, path, batch)


def test_buffers_are_aligned(tmp_path):
    """Kernels read weights where they are in the file."""
    x = randn(2, 4, generator=generator())
    _, _, path = written(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5)), x, tmp_path)
    file = LitertFile(path)
    for buffer in file.model.buffers:
        data = None if buffer.data is None else bytes(buffer.data)
        assert not data or len(data) < 8 or file.data.index(data) % 16 == 0


def test_equal_models_have_equal_files(tmp_path):
    x = randn(2, 4, generator=generator())
    model, _, path = written(nn.Linear(4, 3), x, tmp_path)
    fq.export_litert(model, tmp_path / "again.tflite", x)
    assert (tmp_path / "again.tflite").read_bytes() == path.read_bytes()


class Odd(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.fc, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))


DYNAMIC = {"dynamic_batch": True}


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (torch.linalg.svdvals, {}, "The model calls aten.*svd.*, which fakequant cannot translate to LiteRT"),
        (
            lambda x: x + torch.arange(x.shape[0])[:, None],
            DYNAMIC,
            "constant as long as the batch(.|\n)*dynamic_batch=False",
        ),
        (lambda x: x + torch.arange(len(x))[:, None], DYNAMIC, "to be a constant(.|\n)*dynamic_batch=False"),
        (lambda x: torch.cat([x, torch.zeros_like(x)], 1), DYNAMIC, "constant as long as the batch"),
        (lambda x: (x, torch.ones_like(x)), DYNAMIC, "constant as long as the batch"),
    ],
)
def test_models_that_cannot_be_exported(function, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        written(Odd(function), randn(3, 4, generator=generator()), tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_paths_of_other_formats(tmp_path):
    model = fq.prepare(nn.Linear(4, 3), recipes.int8(target="litert"), torch.ones(1, 4))
    with pytest.raises(ValueError, match=r"\.onnx files have another format(.|\n)*export_onnx"):
        fq.export_litert(model, tmp_path / "m.onnx", torch.ones(1, 4))
