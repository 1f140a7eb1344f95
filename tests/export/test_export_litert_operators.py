"""`export_litert`: results of integers, truth values and special floats have the bits of torch.

What LiteRT computes in another way, or has no kernel for, is refused.
"""

import types

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

import fakequant as fq
from fakequant import recipes
from fakequant.testing.assertions import assert_same_bits

pytest.importorskip("ai_edge_litert.interpreter")

from fakequant._runtimes.litert.running import Loaded, RuntimeFailure, arrays_of

pytestmark = pytest.mark.usefixtures("torch_on_one_thread")


class Net(nn.Module):
    """A layer, and a function of the inputs and the layer's result."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.layer = function, nn.Linear(8, 8)

    def forward(self, x: Tensor, i: Tensor) -> list[Tensor]:
        y = self.layer(x)
        return [y, *self.function(x, i, y)]


class Image(nn.Module):
    """A function between two layers."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.a, self.b = function, nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


X = randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
IDS = torch.tensor([[3, 1, 2, -4, 5], [2, 2, -3, 2**33, 0]])


def written(model, example, folder, **options):
    """Returns a prepared and calibrated model, the report of its file, and the path of that."""
    model = fq.prepare(model.eval(), recipes.int8(target="litert"), example)
    model = fq.calibrate(model, [example], progress=False)
    return model, fq.export_litert(model, folder / "m.tflite", example, **options), folder / "m.tflite"


def run(path, batch):
    return [torch.from_numpy(np.asarray(y)) for y in Loaded(path.read_bytes(), path)(arrays_of(batch))]


def assert_exact(function, folder, batch=(X, IDS), more=()):
    """Compares all results of a function with the golden model."""
    model, _, path = written(Net(function), batch, folder)
    for one in (batch, *more):
        found, expected = run(path, one), fq.convert(model)(*one)
        for number, (mine, its) in enumerate(zip(found, expected, strict=True)):
            assert_same_bits(its, mine, f"result {number}")


def test_casts(tmp_path):
    def casts(x, i, y):
        results = [y.float(), x.to(torch.float32), x.to("cpu"), x.type_as(y), (x > 0).float(), (x > 0).to(x.dtype)]
        results += [(20 * x).long(), (20 * x).int(), x.bool(), i.float(), i.int(), i.bool(), (i > 1).long()]
        return [one.clone() for one in results]

    assert_exact(casts, tmp_path)


def test_integers(tmp_path):
    def integers(x, i, y):
        results = [-i, i.abs(), i**2, i.square(), i.clamp(0, 3), i.clamp(min=1), F.relu(i - 2), ~i]
        results += [
            torch.maximum(i, i * 2),
            torch.minimum(i, 3 - i),
            torch.add(i, i, alpha=3),
            torch.sub(i, 2, alpha=3),
        ]
        results += [torch.add(x, i[..., None], alpha=3), i % 3, i.remainder(-3), i / 4, i.int() // 3, i.int().abs()]
        results += [torch.div(i.int(), 3, rounding_mode="trunc"), i.sum(1), i.int().sum(1), i.cumsum(1), i.amax(1)]
        results += [(i > 2).sum(1), (i > 2).cumsum(1), i.sqrt(), F.one_hot(i[:, :3].abs(), 8)]
        results += [torch.where(i > 2, i, 0), torch.clamp(i, min=i - 1, max=torch.tensor(2)), i.clamp(0.5, 2.5)]
        results += [torch.maximum(i, 2 * i)[..., None] + x]  # a kernel for floats reads integers as floats
        return results

    assert_exact(integers, tmp_path)


def test_truth_values(tmp_path):
    def truths(x, i, y):
        a, b = i > 1, x[..., 0] > 0
        results = [a & b, a | b, a ^ b, ~a, a == b, a != b, torch.logical_and(i, b), torch.logical_xor(i, b), a & True]
        return [*results, a * b, a + b, x.log().isnan(), a.any(1), a.all(1), b.any(), i.any(1, keepdim=True)]

    assert_exact(truths, tmp_path)


def test_comparisons_of_integers_with_fractions(tmp_path):
    assert_exact(lambda x, i, y: [i < 2.5, i <= 2.5, i > -3.5, i == 2.5, i != 2, i[..., None] < x], tmp_path)


def test_divisions_of_floats(tmp_path):
    """The quotient of 1.0 and 0.1 is rounded to 10, but torch says that 0.1 fits 9 times into 1.0."""
    x = torch.arange(-40, 40).reshape(2, 5, 8) * 0.1
    x[0, 0, :3] = torch.tensor([1.0, -0.0, 0.3])

    def divisions(x, i, y):
        floors = [x // 0.1, x // -0.3, x // (x + 9)]
        results = [one + 0.0 for one in floors]  # the sign of a zero may differ
        results += [torch.div(x, 0.1, rounding_mode="trunc"), torch.div(x, x + 9, rounding_mode="trunc"), x.trunc()]
        results += [torch.div(x.double(), 0.25, rounding_mode="trunc").float(), (x.double() // 0.25).float() + 0.0]
        return [*results, torch.remainder(x, 0.3), torch.remainder(x, -0.7), x % (x + 9)]

    assert_exact(divisions, tmp_path, (x, IDS))


def test_mean_of_the_tokens_in_a_mask(tmp_path):
    mask = torch.tensor([[1, 1, 0, 1, 1], [0, 0, 0, 0, 0]])

    def pooled(x, i, y):
        return [i.sum(1).clamp(min=1), (x * i.unsqueeze(-1)).sum(1) / i.sum(1, keepdim=True).clamp(min=1)]

    assert_exact(pooled, tmp_path, (X.round(), mask))


def test_extremes_and_vectors(tmp_path):
    def extremes(x, i, y):
        v = x[0, 0]
        results = [*x.min(1), *x.max(2, True), x.argmin(1), x.max(), x.min(), x.clamp(torch.tensor(0.1), x.abs())]
        return [*results, x @ v, v @ v, x[0] @ v, x[0, :, 0] @ x, F.linear(x, v), 2.0 ** x.round()]

    assert_exact(extremes, tmp_path, ((4 * X).round(), IDS))


def test_negative_indices(tmp_path):
    some, others = (torch.tensor(ids) for ids in ([0, -1, 3], [-5, 4, -2]))
    assert_exact(lambda x, i, y: [x[:, i], x[:, i.int()]], tmp_path, (X, some), [(X, others)])
    with pytest.raises(RuntimeFailure, match=r"out of bounds Node number(.|\n)*indices that are in range") as caught:
        run(tmp_path / "m.tflite", (X, torch.tensor([0, 1, 5])))
    assert "dynamic_batch" not in str(caught.value)


# --- images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "operator"),
    [
        ({"scale_factor": 2}, "RESIZE_NEAREST_NEIGHBOR"),
        ({"size": (13, 11)}, "RESIZE_NEAREST_NEIGHBOR"),
        ({"scale_factor": 1.3}, "GATHER"),
        ({"scale_factor": (2.7, 0.7)}, "GATHER"),
        ({"scale_factor": 1.5, "mode": "bilinear", "recompute_scale_factor": True}, "RESIZE_BILINEAR"),
        ({"scale_factor": (1.2, 2), "mode": "bilinear"}, "RESIZE_BILINEAR"),
    ],
)
def test_images_of_other_sizes(options, operator, tmp_path):
    x = randn(2, 4, 5, 7, generator=torch.Generator().manual_seed(0))
    model, report, path = written(Image(lambda y: F.interpolate(y, **options)), x, tmp_path)
    assert operator in report.operators
    found = fq.verify(model, path, [x])
    assert found.ok, str(found)
    assert sum(t.runtime_differ for t in found.tensors) == 0, str(found)


def test_instance_norm(tmp_path):
    x = randn(3, 4, 5, 7, generator=torch.Generator().manual_seed(0))
    norm = nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.InstanceNorm2d(4, track_running_stats=True))
    norm[0].weight.data, norm[0].bias.data = torch.arange(1.0, 5.0), torch.arange(4.0)
    norm[1].running_mean[:], norm[1].running_var[:] = torch.arange(4.0), torch.arange(1.0, 5.0)
    model, _, path = written(Image(norm.eval()), x[:2], tmp_path, dynamic_batch=True)
    found = fq.verify(model, path, [x, x[:1]])
    assert found.ok, str(found)


# --- attention ------------------------------------------------------------------------------------

ROWS = torch.ones(5, 5, dtype=torch.bool)
ROWS[2] = False
PER_KEY = torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).bool()


@pytest.mark.parametrize(
    ("mask", "is_input", "empty"),
    [
        (ROWS, True, (slice(None), 2)),
        (ROWS, False, (slice(None), 2)),
        (torch.zeros(5, 5).masked_fill(~ROWS, -torch.inf), True, (slice(None), 2)),
        (torch.zeros(5, 5).masked_fill(~ROWS, -torch.inf), False, (slice(None), 2)),
        (PER_KEY[:, None, :], True, (1,)),
    ],
)
def test_rows_in_which_everything_is_masked(mask, is_input, empty, tmp_path):
    def attend(x, i, y):
        return [F.scaled_dot_product_attention(x, y, y, attn_mask=i if is_input else mask)]

    model, _, path = written(Net(attend), (X, mask), tmp_path)
    _, found = run(path, (X, mask))
    _, expected = fq.convert(model)(X, mask)
    assert (found[empty] == 0).all()
    torch.testing.assert_close(found, expected)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, x: Tensor, is_padding: Tensor) -> Tensor:
        return self.layer(x, src_key_padding_mask=is_padding)


def test_padding_of_sequences(tmp_path):
    model, _, path = written(Encoder(), (X, ~PER_KEY), tmp_path, dynamic_batch=True)
    found = fq.verify(model, path, [(X, ~PER_KEY), (X[:1], PER_KEY[:1])])
    assert found.ok, str(found)


def test_masks_with_something_in_every_row_cost_one_addition(tmp_path):
    def attend(x, i, y):
        return [F.scaled_dot_product_attention(x, y, y, is_causal=True)]

    _, report, _ = written(Net(attend), (X, IDS), tmp_path)
    assert (report.operators["ADD"], report.operators["MUL"]) == (1, 1)  # the scale of the query is a product


# --- signatures and refusals ----------------------------------------------------------------------


class AnyNumber(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.forward = types.MethodType(forward, self)


@pytest.mark.parametrize(
    "forward", [lambda self, *inputs: self.layer(inputs[0]), lambda self, x, *inputs: self.layer(x)]
)
def test_any_number_of_arguments(forward, tmp_path):
    model, report, path = written(AnyNumber(forward), X, tmp_path, dynamic_batch=True)
    assert report.has_any_batch
    assert fq.verify(model, path, [X, X[:1]]).ok


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, i, y: [i // 2], "The model needs the operator FLOOR_DIV on int64(.|\n)*only on float32, int32"),
        (lambda x, i, y: [i @ i.T], "BATCH_MATMUL on int64"),
        (lambda x, i, y: [i & 3], "bitwise_and.Scalar of integers, which fakequant cannot translate to LiteRT"),
        (lambda x, i, y: [x.half().float()], "The model computes with float16(.|\n)*Use float32"),
        (lambda x, i, y: x.topk(3), "aten.topk.default, which fakequant cannot translate to LiteRT"),
        (
            lambda x, i, y: [x.reshape(2, 5, 2, 2, 2, 1, 1).softmax(4)],
            "operator SOFTMAX on a tensor with 7 axes; LiteRT takes at most 6(.|\n)*reshape",
        ),
        (
            lambda x, i, y: [F.interpolate(x[None], scale_factor=1.5, mode="bilinear")],
            r"an image of 5 x 8 by the factors \(1.5, 1.5\)(.|\n)*recompute_scale_factor=True",
        ),
    ],
)
def test_refusals(function, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        written(Net(function), (X, IDS), tmp_path)
