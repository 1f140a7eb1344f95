"""Models that are exported correctly but that `verify` once refused."""

import copy
import dataclasses

import pytest

import fakequant as fq
from thoroughness import ALL

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
recipes = pytest.importorskip("fakequant.recipes")
explain = pytest.importorskip("fakequant._verify.explain_codes")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
verification = pytest.importorskip("fakequant._verify.verdict")

X86 = "onnxruntime-x86"


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def trained(model, x, config, steps=0):
    torch.manual_seed(0)
    model = fq.calibrate(fq.prepare(model, config, x), [x], progress=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.02)
    for step in range(steps):
        results = model(randn(*x.shape, seed=step) * 2)
        results = results if isinstance(results, tuple) else (results,)
        sum(y.square().mean() for y in results).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def verified(model, x, folder, example=None):
    path = folder / "model.onnx"
    fq.export_onnx(model, path, x[:2] if example is None else example)
    found = fq.verify(model, path, [x])
    assert found.ok, found.verdict()
    return found


class PooledUNet(nn.Module):
    """A MaxPool feeds an addition and a convolution, after a ReLU with other consumers."""

    def __init__(self):
        super().__init__()
        self.stem, self.relu, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        self.conv, self.skip, self.fc = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Linear(8, 4)
        self.after = nn.ReLU()

    def forward(self, x):
        f = self.relu(self.stem(x))
        y = self.pool(f)
        z = self.after(self.conv(y) + y)
        return self.fc(z.mean((2, 3))), torch.cat([f, self.skip(f)], 1)


def test_the_input_grid_of_a_layer_is_that_of_the_nearest_quantizer(tmp_path):
    x = randn(8, 3, 16, 16)
    torch.manual_seed(0)
    model = trained(PooledUNet(), x, recipes.int8(target=X86), steps=12)
    assert model.conv._fakequant.input_grid is model.pool.output_quantizer
    assert model.skip._fakequant.input_grid is model.relu.output_quantizer
    assert not torch.equal(model.pool.output_quantizer.scale, model.relu.output_quantizer.scale)
    found = verified(model, x, tmp_path)
    assert found.kernels["conv"] == "QLinearConv"
    assert sum(t.runtime_differ for t in found.tensors) == 0


def test_saving_codes_keeps_gradients_after_a_pool_with_a_quantizer():
    x = randn(8, 3, 128, 128, seed=1)  # large enough to be saved as codes

    def gradients(save_codes):
        torch.manual_seed(0)
        config = dataclasses.replace(recipes.int8(), save_codes=save_codes)
        model = trained(PooledUNet(), randn(8, 3, 16, 16), config, steps=3).train()
        sum(y.square().mean() for y in model(x)).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    kept, floats = gradients(True), gradients(False)
    for name, gradient in floats.items():
        assert torch.equal(kept[name], gradient), name


class Shuffle(nn.Module):
    """Shuffles channels directly after a convolution."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        x = self.a(x)
        b, c, h, w = x.shape
        return self.b(x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, c, h, w))


class TiedAndUnused(nn.Module):
    """An embedding that is never called shares its weight with one that is called."""

    def __init__(self):
        super().__init__()
        self.shared, self.table, self.fc = nn.Embedding(10, 8), nn.Embedding(10, 8), nn.Linear(8, 3)
        self.table.weight = self.shared.weight

    def forward(self, ids):
        return self.fc(self.table(ids))


class Gated(nn.Module):
    """Float operations between grids, after which codes are at ties now and then."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(4)])

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(x + F.gelu(layer(x)) * torch.sigmoid(x))
        return x


IDS = torch.randint(0, 10, (16, 5), generator=torch.Generator().manual_seed(0))
MODELS = {
    "shuffle": (Shuffle, randn(8, 3, 8, 8)),
    "tied": (TiedAndUnused, IDS),
    "gated": (Gated, randn(64, 5, 32)),
    "squeeze": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
        randn(64, 3, 9, 9),
    ),
}
CONFIGS = {"int8": recipes.int8, "int8_dynamic": recipes.int8_dynamic, "w4a8": recipes.w4a8}
PAIRS = [("shuffle", "int8_dynamic"), ("tied", "int8"), ("gated", "int8"), ("squeeze", "int8_dynamic")]
if ALL:
    PAIRS = [(name, recipe) for name in MODELS for recipe in CONFIGS]


@pytest.mark.filterwarnings("ignore:No data reached the quantizers of shared:UserWarning")
@pytest.mark.parametrize(("name", "recipe"), PAIRS)
def test_verify_is_ok_for_models_that_once_gave_false_alarms(name, recipe, tmp_path):
    (make, x), recipe = MODELS[name], CONFIGS[recipe]
    torch.manual_seed(0)
    model = fq.calibrate(fq.prepare(make(), recipe(target=X86), x), [x], progress=False).eval()
    verified(model, x, tmp_path)


class Dead(nn.Module):
    """Calls a layer twice, and does not use the first result."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        self.a(x.flip(1) * 2)
        return self.b(F.relu(self.a(x)))


class TwoCalls(nn.Module):
    """Calls a quantizer on two tensors, and uses the results in the opposite order."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        first, second = self.a(x), self.a(x.flip(1) * 2)
        return self.b(F.relu(second)), self.b(F.relu(first))


CALLS = [(Dead, recipes.int8_dynamic), (TwoCalls, recipes.int8)]
if ALL:
    CALLS += [(Dead, recipes.int8), (TwoCalls, recipes.int8_dynamic)]


@pytest.mark.parametrize(("make", "recipe"), CALLS)
def test_codes_are_compared_with_those_of_the_same_call(make, recipe, tmp_path):
    torch.manual_seed(0)
    x = randn(16, 8)
    model = fq.calibrate(fq.prepare(make(), recipe(target=X86), x), [x], progress=False).eval()
    found = verified(model, x, tmp_path)
    assert sum(t.runtime_differ for t in found.tensors) == 0


def test_verify_tolerates_the_effect_of_flipped_codes_in_deep_dynamic_models(tmp_path):
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())]
    x = randn(64, 64)
    model = fq.prepare(nn.Sequential(*layers, nn.Linear(64, 10)), recipes.int8_dynamic()).eval()
    verified(model, x, tmp_path)


def test_the_largest_magnitude_of_a_token_may_be_rounded_either_way(tmp_path):
    # Divided by its symmetric scale it is 127.5, a tie, whatever it is.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 12, 1), nn.Linear(7, 12), nn.ReLU(), nn.Linear(12, 12), nn.Conv2d(12, 2, 2))
    x = torch.randint(-8, 9, (24, 8, 7, 7), generator=torch.Generator().manual_seed(0)) / 4
    # With exact sums, the prepared and the golden model agree here.
    config = dataclasses.replace(recipes.int8_dynamic(), sums="float")
    model = fq.calibrate(fq.prepare(model, config, x), [x], progress=False).eval()
    found = verified(model, x, tmp_path)
    assert sum(t.prepared_differ for t in found.tensors) > 0


def test_rounding_of_a_folded_norm_is_measured_in_the_prepared_model(tmp_path):
    # The golden model adds an integer bias of 0; the norm of the prepared model subtracts two numbers of 50,000.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 4, 3, padding=1, groups=4), nn.BatchNorm1d(4))
    conv, norm = model
    x = randn(16, 4, 5)
    x[:, 0] = 0
    conv.bias.data.fill_(50000.3)
    norm.running_mean.fill_(50000.1)
    norm.running_var.fill_(1e12)
    model = fq.calibrate(fq.prepare(model, recipes.lsq(4), x), [x], progress=False).eval()
    found = verified(model, x, tmp_path)
    assert found.outputs.prepared_difference > 0


def test_a_code_at_a_tie_is_explained_as_a_tie_even_if_a_reciprocal_explains_it():
    """The codes are one step apart and within rounding of the middle."""
    grid = values.GridOf(
        torch.tensor(0.7), torch.tensor(0, dtype=torch.int32), fq.QuantSpec(bits=8, signed=False, symmetric=False)
    )
    x = (torch.arange(255) + 0.5) * grid.scale
    divided = values.quantized(x, grid)
    multiplied = torch.round(x * (1 / grid.scale)).clamp(0, 255)
    differ = divided != multiplied
    assert bool(differ.any())
    tolerance = x.double().abs() * 2.0**-22
    assert torch.equal(explain.ties(x, grid, tolerance, divided, multiplied), differ)
    assert not explain.ties(x, grid, tolerance, divided, divided + 2).any()  # two steps
    assert not explain.ties(x + 0.01, grid, tolerance, divided, multiplied).any()  # not at the middle


def test_the_verdict_names_the_first_failure_and_not_tensors_with_ties():
    ties = verification.TensorReport("early", codes=100_000, runtime_differ=2, runtime_steps=1, runtime_ties=2)
    wrong = verification.TensorReport("late", codes=100_000, prepared_differ=3, prepared_steps=1, why_prepared="odd")
    out = verification.OutputReport(numbers=1)
    found = verification.Verification("generic", [ties, wrong], {}, out, {})
    assert not found.ok
    assert "first at late" in found.verdict()
    assert "early" not in found.verdict()
    assert verification.Verification("generic", [ties], {}, out, {}).ok


class OwnCode(nn.Module):
    """Multiplies by the weight of a layer in float, and has a layer that is never called."""

    def __init__(self):
        super().__init__()
        self.qkv, self.bias = nn.Linear(4, 12, bias=False), nn.Parameter(torch.zeros(12))
        self.out, self.unused = nn.Linear(12, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(x @ self.qkv.weight.T + self.bias)


def test_layers_that_no_data_reaches_stay_in_float_with_a_warning(tmp_path):
    torch.manual_seed(0)
    x = randn(32, 4)
    model = fq.prepare(OwnCode(), recipes.int8(target=X86), x)
    with pytest.warns(UserWarning, match=r"qkv(.|\n)*unused"):
        model = fq.calibrate(model, [x], progress=False).eval()
    expected = copy.deepcopy(model)(x)
    with pytest.warns(UserWarning, match=r"qkv\.weight_quantizer has seen no data(.|\n)*config\.skip"):
        golden = fq.convert(model)
    torch.testing.assert_close(golden(x), expected, rtol=1e-5, atol=1e-6)  # sums in another order
    with pytest.warns(UserWarning, match="has seen no data"):
        verified(model, x, tmp_path)


def test_an_export_error_advises_on_dynamic_batch_only_if_that_helps(tmp_path):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            return y if float(y.sum()) > 0 else -y  # a branch on data cannot be exported

    x = randn(8, 4)
    model = fq.calibrate(fq.prepare(Odd(), recipes.int8(), x), [x], progress=False)
    with pytest.raises(ValueError, match="cannot export the model") as error:
        fq.export_onnx(model, tmp_path / "m.onnx", x)
    assert "dynamic_batch" not in str(error.value)
