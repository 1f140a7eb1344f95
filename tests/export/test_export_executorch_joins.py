"""Concatenations in XNNPACK: operands share the grid of the result, in training and in the program.

XNNPACK moves codes without looking at their grid, so nothing that moves or limits codes may stand between two grids.
"""

import copy
import platform

import pytest

import fakequant as fq
from thoroughness import ALL, sampled

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
pytest.importorskip("executorch.exir")
recipes = pytest.importorskip("fakequant.recipes")

pytestmark = [
    pytest.mark.usefixtures("torch_on_one_thread"),
    pytest.mark.skipif(
        platform.machine().lower() not in ("x86_64", "amd64"), reason="the formulas are those of the x86 kernels"
    ),
]


class Net(nn.Module):
    """Convolutions with these numbers of input channels, each with 4 outputs, and a function of them and the input."""

    def __init__(self, function, *channels):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.layers = nn.ModuleList(nn.Conv2d(number, 4, 3, padding=1) for number in channels)

    def forward(self, x):
        return self.function(x, *self.layers)


def inception(x, a, b, c, d, e, f, last):
    """More operands than XNNPACK takes at once: results of a ReLU, a pool, a sum, a mean and a float operation."""
    added, input_too = F.relu(a(x) + b(x)), F.max_pool2d(F.relu(c(x)), 3, 1, 1)
    spread = d(x).mean((2, 3), keepdim=True).expand(-1, -1, 6, 6)
    return last(torch.cat([added, input_too, spread, torch.sigmoid(e(x)), f(x), x], 1))


def dense(x, a, b, c, last):
    """Features that are concatenated again and again, and the last time with themselves."""
    features = [a(x)]
    for layer in (b, c):
        features.append(F.relu(layer(torch.cat(features, 1))))
    return last(torch.cat([*features, features[1]], 1))


def skipping(x, a, b, c, last):
    """A U-Net: its skip connection is read by a pool and by a concatenation. The ReLU follows the concatenation."""
    skipped = F.relu(a(x))
    inner = F.interpolate(b(F.max_pool2d(skipped, 2)), scale_factor=2)
    return last(F.relu(torch.cat([skipped, c(inner)], 1)))


def axes(x, a, b, c, last):
    """Nested concatenations along other axes, parts of results, and a stack."""
    left, right = a(x).chunk(2, 1)
    tall = torch.cat([torch.cat([right, left], 1), b(x)[:, :, 1:]], 2)
    wide = torch.cat([tall, c(F.pad(x, (0, 0, 0, 5)))], -1)
    return last(torch.stack([wide, wide[:, :4]], 2).flatten(1, 2))


JOINS = {
    "three": (lambda x, a, b, c: c(torch.cat([a(x), b(x)], 1)), 4, 4, 8),
    "inception": (inception, 4, 4, 4, 4, 4, 4, 24),
    "dense": (dense, 4, 4, 8, 16),
    "skipping": (skipping, 4, 4, 4, 8),
    "axes": (axes, 4, 4, 4, 8),
}
# A ReLU, a pool, and a product of one tensor, after results that other operations read too.
BETWEEN_GRIDS = {
    "relu": (lambda x, a, b: (lambda h: b(F.relu(h)) + h)(a(x)), 4, 4),
    "pool": (lambda x, a, b: (lambda h: b(F.max_pool2d(F.relu(h), 3, 1, 1)) + h)(a(x)), 4, 4),
    "square": (lambda x, a, b: (lambda v: b(v * v))(a(F.relu(a(x)))), 4, 4),
}
RECIPES = {"int8": recipes.int8, "lsq": lambda target: recipes.lsq(3, target=target)}
X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))


def prepared(network, recipe="int8", example=X):
    model = fq.prepare(Net(*network).eval(), RECIPES[recipe](target="xnnpack"), example)
    return fq.calibrate(model, [X, X * 1.1], progress=False).eval()


def verified(model, folder):
    """Exports a model, runs the program, and returns how its operators are computed."""
    found = fq.export_executorch(model, folder / "m.pte", X)
    result = fq.verify(model, folder / "m.pte", [X])
    assert result.ok, str(result)
    assert result.outputs.runtime_is_equal
    return found


CASES = [("skipping", "lsq")]
if ALL:
    CASES = [*((name, "int8") for name in JOINS), ("dense", "lsq"), ("skipping", "lsq")]


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_concatenations_are_computed_in_integers(name, recipe, tmp_path):
    found = verified(prepared(JOINS[name], recipe), tmp_path)
    assert {one.how for one in (*found.layers, *found.additions)} == {"int8"}
    assert "cat" not in {one.name for one in found.others}


@pytest.mark.parametrize("name", sampled(BETWEEN_GRIDS, "square"))
def test_codes_are_not_limited_or_moved_between_two_grids(name, tmp_path):
    found = verified(prepared(BETWEEN_GRIDS[name], "lsq"), tmp_path)
    assert {one.how for one in (*found.layers, *found.additions)} == {"int8"}


def test_operands_are_trained_on_the_grid_of_the_result():
    model = prepared(JOINS["three"])
    assert [layer.output_quantizer is None for layer in model.layers] == [True, True, False]
    other = fq.prepare(
        Net(*JOINS["three"]), recipes.int8(target="xnnpack"), X
    )  # learns from the state what was recorded
    other.load_state_dict(model.state_dict())
    for same in (copy.deepcopy(model), other.eval()):
        assert torch.equal(same(X), model(X))
        assert torch.equal(fq.convert(same)(X), fq.convert(model)(X))


def test_operand_that_is_read_elsewhere_has_a_quantizer_of_its_own():
    model = prepared(JOINS["skipping"])
    # The skip connection, the input of the pool's reader, and the result; the other operand has the grid of the ReLU.
    assert [layer.output_quantizer is None for layer in model.layers[1:]] == [False, True, False]


def test_other_targets_quantize_every_operand():
    model = fq.prepare(Net(*JOINS["three"]), recipes.int8(target="onnxruntime-x86"), X)
    assert all(layer.output_quantizer is not None for layer in model.layers)
