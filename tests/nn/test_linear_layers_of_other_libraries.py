"""Modules that are linear layers without deriving from nn.Linear, registered with a kind of `fakequant.nn.kinds`."""

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits
from prepare_cases import randn

torch = pytest.importorskip("torch")
nn = torch.nn
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")
registry = pytest.importorskip("fakequant.nn._layer_kinds")


class Dense(nn.Module):
    """A linear layer without the attribute `bias`."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(randn(outputs, inputs))

    def forward(self, x):
        return x @ self.weight.T


class Transposed(nn.Module):
    """A linear layer with a transposed weight."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(randn(outputs, inputs).T.clone()), nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


KINDS = {"Dense": (Dense, "Linear"), "Transposed": (Transposed, "TransposedLinear")}


@pytest.fixture(autouse=True)
def registered():
    before = dict(registry._KINDS)
    yield
    registry._KINDS.clear()
    registry._KINDS.update(before)


@pytest.mark.parametrize("by_name", [False, True], ids=["by class", "by name"])
@pytest.mark.parametrize(("cls", "kind"), KINDS.values(), ids=KINDS)
def test_foreign_linear_layer_computes_as_a_linear_layer(cls, kind, by_name, tmp_path):
    fqnn.register_layer_kind(f"{cls.__module__}.{cls.__qualname__}" if by_name else cls)(getattr(fqnn.kinds, kind))
    x, plain = randn(8, 6, seed=2), nn.Linear(6, 4, bias=cls is Transposed)
    with torch.no_grad():
        plain.weight.copy_(randn(4, 6))
        if plain.bias is not None:
            plain.bias.zero_()
    config = recipes.int8(target="onnxruntime-x86")
    ours, theirs = (
        fq.calibrate(fq.prepare(nn.Sequential(one), config, x), [x], progress=False).eval()
        for one in (cls(6, 4), plain)
    )
    assert_same_bits(theirs(x), ours(x))
    assert_same_bits(fq.convert(theirs)(x), fq.convert(ours)(x))
    fq.export_onnx(ours, tmp_path / "model.onnx", x[:1])
    found = fq.verify(ours, tmp_path / "model.onnx", [x])
    assert found.ok, found
    assert found.kernels["0"] in ("QGemm", "QLinearMatMul", "MatMulIntegerToFloat")


def test_module_without_a_matrix_stays_in_float():
    class Cube(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 2, 2))

    fqnn.register_layer_kind(Cube)(fqnn.kinds.Linear)
    model = fq.prepare(nn.Sequential(nn.Linear(2, 2), Cube()), recipes.int8_dynamic())
    assert fq.summary(model).floats == {"1": "the `weight` of Cube is not a matrix"}
