"""`compare` on models of many kinds: shared layers, attention, batch norms, converted models."""

import copy

import pytest

import fakequant as fq
from comparing import assert_same, compared, decibels, on_unit_grid, pair, snapshot, sqnr
from fakequant import recipes
from fakequant._diagnosis.compare import Errors

torch = pytest.importorskip("torch")
integer = pytest.importorskip("fakequant._convert.golden.integer_layer")
nn = torch.nn


class Ways(nn.Module):
    """Calls one layer twice, one only for large inputs and one never, and changes a result in place."""

    def __init__(self):
        super().__init__()
        self.twice, self.sometimes, self.never = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x):
        x = self.twice(torch.relu_(self.twice(x)))
        return self.sometimes(x) if x.sum() > 1 else x


def test_compare_handles_layers_called_twice_sometimes_or_never():
    model = Ways()
    for layer in model.children():
        layer.weight.data = torch.eye(2)
    prepared = fq.prepare(copy.deepcopy(model), on_unit_grid())
    found = compared(model, prepared, data=[torch.tensor([[0.25, -3.0]])])
    # 0.25 becomes 0 and -3 stays. In the second call 0.25 becomes 0 again, or 0 stays.
    assert found["twice"].isolated.sqnr == pytest.approx(decibels(2 * 0.25**2 + 9, 2 * 0.25**2))
    assert found["twice"].accumulated.sqnr == pytest.approx(decibels(2 * 0.25**2 + 9, 2 * 0.25**2))
    assert found["sometimes"].isolated == found["never"].isolated == Errors(None, None, None)
    found = compared(model, prepared, data=[torch.tensor([[0.25, -3.0]]), torch.tensor([[3.25, -3.0]])])
    assert found["sometimes"].isolated.sqnr == pytest.approx(decibels(3.25**2, 0.25**2))
    # The float model calls the layer with 1.25; the quantized model has 1 and does not call it.
    found = compared(model, prepared, data=[torch.tensor([[1.25, -3.0]])])
    assert found["sometimes"].isolated.sqnr is not None
    assert found["sometimes"].accumulated.sqnr is None
    assert "-" in str(fq.compare(model, prepared, [torch.ones(1, 2)], progress=False))


def test_compare_skips_results_of_another_shape():
    class Selecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (nn.Linear(1, 1, bias=False) for _ in range(2))

        def forward(self, x):
            x = self.first(x)
            return self.second(x[x > 1].unsqueeze(1))

    model = Selecting()
    for layer in model.children():
        layer.weight.data = torch.ones(1, 1)
    found = compared(*pair(model, on_unit_grid()), data=[torch.tensor([[1.25], [3.25]])])["second"]
    assert found.isolated.sqnr == pytest.approx(decibels(1.25**2 + 3.25**2, 2 * 0.25**2))
    assert found.accumulated == Errors(None, None, None)  # 1.25 becomes 1 in the model, which leaves one row


def test_compare_handles_embeddings_whose_inputs_are_indices():
    models = pair(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)), data=[torch.tensor([[0, 4]])])
    found = compared(*models, data=[torch.tensor([[1, 2, 3]])])
    assert found["0"].isolated.clipped is None
    assert found["0"].isolated.sqnr > 30
    assert found["1"].isolated.clipped is not None


@pytest.mark.parametrize("batch_first", [True, False])
def test_compare_handles_attention_and_its_output_projection(batch_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first)
    x = torch.randn(3, 3, 8)
    padding = torch.tensor([[False, False, True]] * 3)
    data = [{"src": x, "src_key_padding_mask": padding}]
    model, prepared = pair(model, data=data)
    expected = model.eval()(**data[0])
    model.train()
    before = snapshot(model, prepared)
    found = compared(model, prepared, data=data)
    assert_same(before, snapshot(model, prepared))
    assert torch.equal(model.eval()(**data[0]), expected)
    names = ("self_attn", "self_attn.out_proj", "linear1", "linear2")
    for path in (f"layers.{i}.{name}" for i in range(2) for name in names):
        assert found[path].isolated.sqnr > 25, path
        assert found[path].accumulated.sqnr > 20, path
        assert found[path].isolated.clipped is not None
    assert found["layers.0.self_attn"].kind == "MultiheadAttention"


class Crossed(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x, memory):
        return self.attention(x, key=memory, value=memory, need_weights=False)[0]


def test_compare_counts_all_inputs_of_an_attention():
    model = Crossed()
    x, memory = torch.ones(1, 2, 4), torch.ones(1, 6, 4)
    prepared = fq.calibrate(
        fq.prepare(copy.deepcopy(model), recipes.int8(), (x, memory)), [(x, memory)], progress=False
    )
    found = compared(model, prepared, data=[(x, 2 * memory)])["attention"]
    assert found.isolated.clipped == 6 / 8
    assert found.accumulated.clipped == 6 / 8


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.stem_norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.relu(self.stem_norm(self.stem(x)))
        return self.head((x + self.norm(self.conv(x))).mean((2, 3)))


@pytest.fixture(scope="module")
def residual():
    """A residual network with random batch norm statistics, a prepared copy, and data."""
    torch.manual_seed(0)
    model, data = Residual(), [torch.randn(16, 1, 6, 6)]
    with torch.no_grad():
        for norm in (model.stem_norm, model.norm):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.01, 10)
            norm.weight.uniform_(-3, 3)
            norm.bias.normal_()
    return *pair(model.eval(), data=data), data


@torch.no_grad()
def test_compare_lists_quantized_results_between_layers(residual):
    model, prepared, data = residual
    found = compared(model, prepared, data=data)
    assert list(found) == ["stem", "relu", "conv", "norm", "head"]
    assert (found["relu"].kind, found["relu"].weight_sqnr) == ("ReLU", None)
    assert found["relu"].isolated.clipped == 0
    assert 0 < found["relu"].isolated.max_steps <= 0.5001
    # The convolution has no input quantizer, but in isolation its input is on the ReLU's grid.
    assert prepared.conv.input_quantizer is None
    assert 0 < found["conv"].isolated.max_steps <= 0.5001
    y = model.relu(model.stem_norm(model.stem(data[0])))
    result = prepared.norm.forward(
        prepared.conv(prepared.relu.output_quantizer(y))
    )  # without the norm's output quantizer
    assert found["conv"].isolated.sqnr == pytest.approx(sqnr(model.norm(model.conv(y)), result))


def test_compare_handles_modules_that_change_their_input_in_place():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.act, self.fc = nn.LeakyReLU(0.5, inplace=True), nn.Linear(3, 3, bias=False)

        def forward(self, x):
            x = self.act(x + 0.0)
            return x + self.fc(x)

    x = torch.tensor([[-4.0, 3.0, 1.3]])
    model, prepared = pair(Model(), data=[x])
    found = compared(model, prepared, data=[x])
    y = torch.tensor([[-2.0, 3.0, 1.3]])
    assert found["act"].isolated.sqnr == pytest.approx(sqnr(y, prepared.act.output_quantizer.eval()(y)))
    assert found["act"].isolated == found["act"].accumulated


@torch.no_grad()
def test_compare_handles_converted_models_with_folded_batch_norms(residual):
    model, prepared, data = residual
    golden = fq.convert(prepared)
    before = snapshot(model, golden)
    found, trained = compared(model, golden, data=data), compared(model, prepared, data=data)
    assert_same(before, snapshot(model, golden))
    assert list(found) == list(trained)
    for path, layer in found.items():
        assert layer.kind == trained[path].kind
        assert layer.isolated.sqnr > 25, path
        assert layer.accumulated.sqnr > 25, path
        assert layer.isolated.max_steps is not None
    # Where no batch norm is folded, the golden model computes what the prepared one does.
    assert found["head"].isolated.sqnr == pytest.approx(trained["head"].isolated.sqnr, abs=1e-3)
    assert found["relu"].isolated == trained["relu"].isolated
    # Weights are compared with the batch norm's factors folded in, before and after `convert`.
    factor = (model.norm.weight / (model.norm.running_var + model.norm.eps).sqrt()).reshape(-1, 1, 1, 1)
    expected = sqnr(model.conv.weight * factor, integer.float_weight(golden.conv))
    assert found["conv"].weight_sqnr == pytest.approx(expected, abs=1e-3)
    assert trained["conv"].weight_sqnr == pytest.approx(expected, abs=1e-3)


def test_compare_measures_errors_after_the_batch_norm():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(2, eps=1e-12)
    model, x = nn.Sequential(nn.Linear(8, 2, bias=False), norm, nn.Linear(2, 2)).eval(), torch.randn(64, 8)
    with torch.no_grad():
        model[0].weight[0] *= 1e-3
        model[1].running_var[0] = 1e-6
    one_scale = fq.QuantConfig(default=fq.LayerConfig(weight=fq.QuantSpec(bits=4)))
    found = fq.compare(*pair(model, one_scale, [x]), [x], progress=False)
    assert found.worst == "0"
    assert found.layers[0].isolated.sqnr < 10 < found.layers[1].isolated.sqnr
    assert found.layers[0].weight_sqnr < 10
    # On 3-D inputs the batch norm normalizes another axis and cannot be folded into the weights.
    tokens = [torch.randn(4, 2, 8)]
    model = nn.Sequential(nn.Linear(8, 2, bias=False), nn.BatchNorm1d(2)).eval()
    with torch.no_grad():
        model[1].running_var[0] = 1e-6
    _, prepared = pair(model, one_scale, tokens)
    found = compared(model, prepared, data=tokens)["0"]
    weight = fq.nn.quantized_weight(prepared[0]).detach()
    assert found.weight_sqnr == pytest.approx(sqnr(model[0].weight.detach(), weight))
    with torch.no_grad():
        assert found.isolated.sqnr == pytest.approx(sqnr(model(tokens[0]), prepared(tokens[0])))


def test_compare_accepts_a_single_layer_and_an_unprepared_model():
    torch.manual_seed(0)
    x = [torch.randn(3, 4)]
    model, prepared = pair(nn.Linear(4, 2), data=x)
    found = fq.compare(model, prepared, x, progress=False)
    assert found.worst == ""
    assert "the model" in str(found)
    again = fq.unprepare(copy.deepcopy(prepared))
    assert fq.compare(again, prepared, x, progress=False) == fq.compare(model, prepared, x, progress=False)
    golden = fq.convert(prepared)
    assert fq.compare(model, golden, x, progress=False).layers[0].isolated.sqnr > 25


def test_compare_handles_models_that_change_their_input_in_place():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x.sub_(5).div_(3))

    torch.manual_seed(0)
    x = torch.randn(8, 4) * 3 + 5
    model, prepared = pair(Model(), data=[x.clone()])
    found = compared(model, prepared, data=[x.clone()])["fc"]
    assert found.isolated == found.accumulated


@torch.no_grad()
def test_compare_does_not_blame_a_module_for_errors_of_layers_inside_it():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.encoder(x).mean(1))

    torch.manual_seed(0)
    x = torch.randn(4, 3, 8)
    model, prepared = pair(Model().eval(), recipes.lsq(4), data=[x])
    found = compared(model, prepared, data=[x])["encoder.layers.1.dropout2"]
    seen = []
    handle = model.encoder.layers[1].dropout2.register_forward_hook(lambda module, args, y: seen.append(y))
    model(x)
    handle.remove()
    quantizer = prepared.encoder.layers[1].dropout2.output_quantizer.eval()
    assert found.isolated.sqnr == pytest.approx(sqnr(seen[0], quantizer(seen[0])))
    assert found.accumulated.sqnr < found.isolated.sqnr
