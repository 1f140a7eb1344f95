"""Which results can be scaled per channel: read from the data flow, and checked on an example."""

import pytest

from fakequant.testing.assertions import assert_same_bits
from prepare_cases import randn

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional
links = pytest.importorskip("fakequant.ptq._links")
probe = pytest.importorskip("fakequant.ptq._rescaling")
passing = pytest.importorskip("fakequant.ptq._links")
recording = pytest.importorskip("fakequant._prepare.record_flow")


def found_in(model, x):
    """Returns {producer: users} of the links that pass the check, and the reasons."""
    model.eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = links.find_links(model, recording.record_flow(model, x))
    probe.drop_wrong_links(model, found, x)
    for name, parameter in model.named_parameters():
        assert_same_bits(before[name], parameter, name)
    return {link.path: list(link.users) for link in found.links}, found.reasons


class Pair(nn.Module):
    """Two layers, or a norm and a layer, with some code between them."""

    def __init__(self, first, second, between):
        super().__init__()
        self.first, self.second, self.between = first, second, between

    def forward(self, x):
        return self.between(self.first(x), self.second)


LINEAR = (lambda: nn.Linear(4, 6), lambda: nn.Linear(6, 3), (5, 4))
CONV = (lambda: nn.Conv2d(3, 6, 1), lambda: nn.Conv2d(6, 4, 1), (2, 3, 4, 4))
FLAT = (lambda: nn.Conv2d(3, 6, 1), lambda: nn.Linear(24, 4), (2, 3, 2, 2))
POOLED = (lambda: nn.Conv2d(3, 6, 1), lambda: nn.Linear(6, 4), (2, 3, 4, 4))
LINKED = {
    "relu": (*LINEAR, lambda y, f: f(F.relu(y))),
    "in place": (*LINEAR, lambda y, f: f(y.relu_())),
    "half of it": (*LINEAR, lambda y, f: f(0.5 * y)),
    "a product": (*LINEAR, lambda y, f: f(y * torch.ones(5, 6).cumsum(1))),
    "pools": (*CONV, lambda y, f: f(F.avg_pool2d(F.max_pool2d(y, 2), 2))),
    "padding": (*CONV, lambda y, f: f(F.pad(y, (1, 1)))),
    "flatten": (*FLAT, lambda y, f: f(y.flatten(1))),
    "view": (*FLAT, lambda y, f: f(F.leaky_relu(y).view(2, -1))),
    "mean": (*POOLED, lambda y, f: f(y.mean((2, 3)))),
    "permute": (*POOLED, lambda y, f: f(y.permute(0, 2, 3, 1))),
    "tokens": (*POOLED, lambda y, f: f(y.flatten(2).transpose(1, 2))),
}
NOT_LINKED = {
    "gelu": (*LINEAR, lambda y, f: f(F.gelu(y)), "gelu"),
    "relu6": (*LINEAR, lambda y, f: f(F.relu6(y)), "relu6"),
    "a residual": (*LINEAR, lambda y, f: f(y).sum() + y, "add does not pass on factors"),
    "returned": (*LINEAR, lambda y, f: (y, f(y)), "also returns"),
    "another use": (*LINEAR, lambda y, f: f(y) * y.abs().max(), "abs does not pass on factors"),
    "its square": (*LINEAR, lambda y, f: f(y * y), "two operands"),
    "a quotient": (*LINEAR, lambda y, f: f(torch.div(torch.ones(5, 6), y)), "does not scale its input"),
    "padding with ones": (*CONV, lambda y, f: f(F.pad(y, (1, 1), value=1.0)), "does not scale its input"),
    "mixed channels": (*LINEAR, lambda y, f: f(y.flip(-1)), "does not scale its input"),
    "another axis": (
        lambda: nn.Conv1d(3, 6, 1), lambda: nn.Linear(6, 6), (2, 3, 6), lambda y, f: f(y), "not the input channels",
    ),
    "called twice": (*LINEAR, lambda y, f: f(y) + f(torch.ones(5, 6)), "other inputs"),
}  # fmt: skip


@pytest.mark.parametrize(("first", "second", "shape", "between"), LINKED.values(), ids=LINKED)
def test_linked(first, second, shape, between):
    assert found_in(Pair(first(), second(), between), randn(*shape))[0] == {"first": ["second"]}


@pytest.mark.parametrize(("first", "second", "shape", "between", "words"), NOT_LINKED.values(), ids=NOT_LINKED)
def test_not_linked(first, second, shape, between, words):
    found, reasons = found_in(Pair(first(), second(), between), randn(*shape))
    assert found == {}
    assert words in reasons["second"]


class OneMore(nn.LayerNorm):
    def forward(self, x):
        return F.layer_norm(x, (6,), 1 + self.weight, self.bias)


NORMS = {
    "LayerNorm": (lambda: nn.LayerNorm(6), (2, 5, 6), True),
    "RMSNorm": (lambda: nn.RMSNorm(6), (2, 5, 6), True),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(6), (5, 6), True),
    "without weight": (lambda: nn.LayerNorm(6, elementwise_affine=False), (2, 5, 6), False),
    "1 + weight": (lambda: OneMore(6), (2, 5, 6), False),
}


@pytest.mark.parametrize(("make", "shape", "linked"), NORMS.values(), ids=NORMS)
def test_norms(make, shape, linked):
    found, reasons = found_in(nn.Sequential(make(), nn.Linear(6, 3)), randn(*shape))
    assert found == ({"0": ["1"]} if linked else {})
    assert linked or reasons["1"]


def test_group_norms_and_their_convolutions():
    model = nn.Sequential(nn.Conv2d(3, 6, 1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 4, 1))
    assert found_in(model, randn(2, 3, 4, 4))[0] == {"1": ["3"]}


def test_attention_with_one_input():
    class Model(nn.Module):
        def __init__(self, cross):
            super().__init__()
            self.norm, self.attention, self.cross = nn.LayerNorm(8), nn.MultiheadAttention(8, 2), cross

        def forward(self, x):
            y = self.norm(x)
            return self.attention(y, *((x, x) if self.cross else (y, y)), need_weights=False)[0]

    import fakequant as fq

    for cross in (False, True):
        model = fq.prepare(Model(cross), fq.recipes.int8(), randn(5, 2, 8))
        fq.nn.switch_quantizers(model, observing=False, quantizing=False)
        found, reasons = found_in(model, randn(5, 2, 8))
        assert found == ({} if cross else {"norm": ["attention"]})
        assert not cross or "several inputs" in reasons["attention"]


def test_shared_parameters_are_not_changed():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[4].weight = model[2].weight
    found, reasons = found_in(model, randn(3, 4))
    assert found == {}
    assert "shares its parameters" in reasons["2"]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((2, 6, 3, 4), (2, 72), (1, 12)),
        ((2, 5, 6), (10, 6), (1, 1)),
        ((2, 6, 1, 1), (2, 6), (1, 1)),
        ((2, 6, 4), (2, 2, 3, 4), None),
        ((2, 6), (12,), None),
    ],
)
def test_layouts_of_reshaped_tensors(before, after, expected):
    axis = 2 if before == (2, 5, 6) else 1
    assert passing._reshaped(before, after, passing.Layout(axis), 6) == expected
