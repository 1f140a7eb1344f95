"""`convert`, `export_onnx` and `verify` depend on modules, parameters and buffers only.

A model, its deepcopy, its pickle and a freshly prepared model with its state give the same results, whether or not the
object has run before.
"""

import copy
import io
import pickle

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits
from model_zoo import RECIPES, ZOO, build, train
from thoroughness import ALL

torch = pytest.importorskip("torch")
nn = torch.nn
recipes = pytest.importorskip("fakequant.recipes")
conversion = pytest.importorskip("fakequant._convert.convert").conversion

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")


def linear_and_norm():
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Tokens(nn.Module):
    """A batch norm over tokens, with as many tokens as channels."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x):
        return self.head(self.norm(self.fc(x)))


MODELS = {
    **ZOO,
    "linear and norm": (linear_and_norm, torch.randn(16, 4, generator=torch.Generator().manual_seed(1))),
    "norm of tokens": (Tokens, torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(1))),
}


NAMES = ["int8", "int4_weight_only", "lsq"]


def copies_of(model, make, x, config):
    """Returns copies of a model, none of which has run."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    fresh = fq.prepare(build(make, x), config, x)
    fresh.load_state_dict(torch.load(file, weights_only=True), strict=True)
    found = {"deepcopy": copy.deepcopy(model), "reloaded": fresh}
    if not any(
        nn.utils.parametrize.is_parametrized(module) for module in model.modules()
    ):  # torch refuses to pickle it
        found["pickle"] = pickle.loads(pickle.dumps(model))
    return found


# Every model with one recipe. `make test-all` tries all pairs.
PAIRS = [(name, NAMES[number % len(NAMES)]) for number, name in enumerate(MODELS)]
if ALL:
    PAIRS = [(name, recipe) for name in MODELS for recipe in NAMES]


@pytest.mark.parametrize(("name", "recipe"), PAIRS)
def test_copies_convert_to_the_same_codes_scales_and_biases(name, recipe):
    (make, x), config = MODELS[name], RECIPES[recipe]
    model = fq.calibrate(fq.prepare(build(make, x), config, x), [x], progress=False)
    train(model, x)
    model.eval()
    copies = copies_of(model, make, x, config)  # before the model runs again
    golden = fq.convert(model)
    for name, twin in copies.items():
        other = fq.convert(twin)
        assert conversion(other) == conversion(golden), name
        assert list(other.state_dict()) == list(golden.state_dict()), name
        for key, value in golden.state_dict().items():
            assert_same_bits(value, other.state_dict()[key], name, key)
        assert [type(m).__name__ for m in other.modules()] == [type(m).__name__ for m in golden.modules()], name


def tokens_of(model):
    return {name: int(value) for name, value in model.state_dict().items() if "tokens" in name}


def test_a_layer_says_in_its_state_whether_it_has_tokens_and_loads_a_float_state():
    make, x = MODELS["norm of tokens"]
    config, other = recipes.int8(), torch.randn(16, 4)
    model = fq.calibrate(fq.prepare(make(), config, x), [x], progress=False)
    assert tokens_of(model) == {"fc.fakequant_tokens": 1}
    model.load_state_dict(make().state_dict(), strict=True)
    assert tokens_of(model) == {"fc.fakequant_tokens": 1}
    # A state that is loaded counts, and so does what is observed after it.
    vectors = fq.calibrate(fq.prepare(make(), config, x), [other], progress=False)
    assert tokens_of(vectors) == {"fc.fakequant_tokens": 0}
    model.load_state_dict(vectors.state_dict(), strict=True)
    assert tokens_of(model) == {"fc.fakequant_tokens": 0}
    model.train()(x)
    assert tokens_of(model) == {"fc.fakequant_tokens": 1}
    assert list(fq.unprepare(model).state_dict()) == list(make().state_dict())


def test_copies_export_the_same_file_and_verify(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    config = recipes.int8(target="onnxruntime-x86")
    make, x = MODELS["linear and norm"]
    model = build(make, x)
    for _ in range(5):
        model(x)
    model = fq.calibrate(fq.prepare(model, config, x), [x], progress=False).eval()
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    expected = (tmp_path / "model.onnx").read_bytes()
    for name, twin in copies_of(model, make, x, config).items():
        twin.eval()
        fq.export_onnx(twin, tmp_path / "twin.onnx", x)
        assert (tmp_path / "twin.onnx").read_bytes() == expected, name
        for _ in range(2):
            assert fq.verify(twin, tmp_path / "twin.onnx", [x]).ok, name
        assert fq.verify(model, tmp_path / "twin.onnx", [x]).ok, name
