"""`compare`: exact numbers on small models, and that it leaves both models as they were."""

import copy
import math

import pytest

import fakequant as fq
from fakequant import recipes
from fakequant._diagnosis.compare import Errors

torch = pytest.importorskip("torch")
integer = pytest.importorskip("fakequant._convert.golden.integer_layer")
nn = torch.nn

# Scale 1: codes are the numbers.
UNIT = fq.QuantSpec(bits=4, narrow_range=True)


def decibels(signal, noise):
    return 10 * math.log10(signal / noise)


def sqnr(expected, result):
    expected, result = expected.double(), result.double()
    return decibels(float(expected.square().sum()), float((expected - result).square().sum()))


def pair(model, config=None, data=None):
    """The model, and a prepared copy."""
    prepared = fq.prepare(copy.deepcopy(model), config or recipes.int8())
    return model, prepared if data is None else fq.calibrate(prepared, data, progress=False)


def with_weights(*weights):
    layers = [nn.Linear(len(w[0]), len(w), bias=False) for w in weights]
    for layer, weight in zip(layers, weights):
        layer.weight.data = torch.tensor(weight)
    return nn.Sequential(*layers)


def on_unit_grid(**layer):
    """Inputs with scale 1; weights in float."""
    return fq.QuantConfig(
        default=fq.LayerConfig(input=UNIT, activation_observer=fq.observers.Fixed(-7.0, 7.0), **layer)
    )


def compared(*models, data, **options):
    found = fq.compare(*models, data, progress=False, **options)
    return {layer.path: layer for layer in found.layers}


def snapshot(*models):
    """All that must not change, to the bit."""
    return [
        (
            {name: value.clone() for name, value in model.state_dict().items()},
            [(type(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
            [sorted(m.__dict__) for m in model.modules()],
        )
        for model in models
    ]


def assert_same(before, after):
    for (old, *old_rest), (new, *new_rest) in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        for name, value in old.items():
            assert torch.equal(value, new[name]) or (value != value).all(), name
        assert old_rest == new_rest


# --- numbers --------------------------------------------------------------------------------------


def test_a_layer_by_itself_and_in_the_model():
    models = pair(with_weights([[1.25, 0.0], [0.0, 1.25]], [[4.0, 0.0]]), on_unit_grid())
    first, second = compared(*models, data=[torch.tensor([[1.25, -2.0]])]).values()
    # 1.25 becomes 1. The results are 1.5625, -2.5 and 1.25, -2.5.
    assert first.isolated.sqnr == pytest.approx(decibels(1.5625**2 + 2.5**2, 0.3125**2), rel=1e-12)
    assert first.accumulated == first.isolated
    assert first.isolated.max_steps == 0.25
    # By itself 1.5625 becomes 2, in the model 1.25 becomes 1; -2.5 becomes -2. 6.25 is 8 and 4.
    assert second.isolated.sqnr == pytest.approx(decibels(6.25**2, 1.75**2), rel=1e-12)
    assert second.accumulated.sqnr == pytest.approx(decibels(6.25**2, 2.25**2), rel=1e-12)
    assert (second.isolated.max_steps, second.accumulated.max_steps) == (0.5, 0.5625)
    assert second.isolated.clipped == second.accumulated.clipped == 0
    assert second.weight_sqnr is None


def test_sums_go_over_batches_and_at_most_steps_of_them():
    models = pair(with_weights([[4.0]]), on_unit_grid())
    data = [torch.tensor([[1.25], [9.0]]), torch.tensor([[3.0]]), torch.tensor([[100.0]])]
    found = compared(*models, data=iter(data), steps=2)["0"].isolated
    assert found.sqnr == pytest.approx(decibels(5.0**2 + 36.0**2 + 12.0**2, 1.0 + 8.0**2), rel=1e-12)
    assert found.max_steps == 2  # 9 becomes 7
    assert found.clipped == 1 / 3


def test_an_input_far_outside_its_range_is_clipped_everywhere():
    models = pair(with_weights([[1.0]]), on_unit_grid())
    found = compared(*models, data=[torch.tensor([[-70.0], [70.0]])])["0"]
    assert found.isolated.clipped == found.accumulated.clipped == 1.0
    assert found.isolated.max_steps == 63
    assert found.isolated.sqnr == pytest.approx(decibels(70.0**2, 63.0**2))


def test_steps_are_those_of_each_channel_or_token():
    per_channel = fq.QuantSpec(bits=4, narrow_range=True, axis=-1)
    layer = nn.Sequential(nn.Linear(2, 1, bias=False))
    prepared = fq.prepare(copy.deepcopy(layer), on_unit_grid())
    grid = fq.nn.FakeQuantize(per_channel, fq.observers.MinMax(), shape=(None, 2))
    grid(torch.tensor([[7.0, 70.0]]))
    prepared[0].input_quantizer = grid
    assert compared(layer, prepared, data=[torch.tensor([[1.4, 11.0]])])["0"].isolated.max_steps == pytest.approx(0.4)

    per_token = fq.QuantSpec(bits=4, narrow_range=True, axis=-1, group_size=-1)
    config = fq.QuantConfig(default=fq.LayerConfig(input=per_token, activation_observer=fq.observers.Dynamic()))
    data = [torch.tensor([[1.4, 7.0], [11.0, 70.0]])]
    found = compared(*pair(layer, config), data=data)["0"].isolated
    assert found.max_steps == pytest.approx(0.4)
    assert found.clipped == 0


def test_the_weight_is_compared_with_that_of_the_float_model():
    config = fq.QuantConfig(default=fq.LayerConfig(weight=UNIT, weight_observer=fq.observers.Fixed(-7.0, 7.0)))
    found = compared(*pair(with_weights([[1.25, -3.0]]), config), data=[torch.ones(1, 2)])["0"]
    assert found.weight_sqnr == pytest.approx(decibels(1.25**2 + 9, 0.25**2), rel=1e-12)
    assert found.isolated.max_steps is None
    assert found.isolated.clipped is None


def test_equal_models_differ_by_nothing():
    models = pair(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), data=[torch.randn(3, 4)])
    fq.nn.switch_quantizers(models[1], quantizing=False)
    for layer in compared(*models, data=[torch.randn(5, 4)]).values():
        assert layer.weight_sqnr == layer.isolated.sqnr == layer.accumulated.sqnr == math.inf
        assert layer.isolated.max_steps is None


def test_a_result_of_zeros_and_one_that_is_not_a_number():
    model, prepared = pair(with_weights([[0.0]], [[1.0]]), on_unit_grid())
    with torch.no_grad():
        prepared[0].weight.fill_(1.0)
    assert compared(model, prepared, data=[torch.ones(1, 1)])["0"].isolated.sqnr == -math.inf
    with torch.no_grad():
        prepared[0].weight.fill_(0.0)
        prepared[1].weight.fill_(torch.nan)
    found = fq.compare(model, prepared, [torch.ones(1, 1)], progress=False)
    assert found.layers[0].isolated.sqnr == math.inf
    assert math.isnan(found.layers[1].isolated.sqnr)
    assert found.worst == "1"
    # What is infinite in both is no difference.
    model, prepared = pair(with_weights([[3e38, 1.0]]), fq.QuantConfig(default=fq.LayerConfig(weight=UNIT)))
    fq.nn.switch_quantizers(prepared, quantizing=False)
    assert compared(model, prepared, data=[torch.full((1, 2), 10.0)])["0"].isolated.sqnr == math.inf


def test_the_worst_layer_is_the_one_that_goes_wrong_by_itself():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    data = [torch.randn(32, 16)]
    _, prepared = pair(model, data=data)
    prepared[1].input_quantizer.frozen = True  # else the scale follows from the range
    prepared[1].input_quantizer.scale.mul_(0.05)
    found = fq.compare(model, prepared, data, progress=False)
    assert found.worst == "1"
    assert found.to_dict()["worst"] == "1"
    assert found.to_dict()["layers"][1]["isolated"]["clipped"] > 0.5
    assert "Worst by itself: 1" in str(found)
    # By themselves the others are good; in the model those after it are not.
    assert all(layer.isolated.sqnr > 30 for layer in found.layers if layer.path != "1")
    assert found.layers[0].accumulated.sqnr > 30 > found.layers[2].accumulated.sqnr


# --- models of all kinds --------------------------------------------------------------------------


class Ways(nn.Module):
    """A layer called twice, one that is called for large inputs, one that is never called; results change in place."""

    def __init__(self):
        super().__init__()
        self.twice, self.sometimes, self.never = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x):
        x = self.twice(torch.relu_(self.twice(x)))
        return self.sometimes(x) if x.sum() > 1 else x


def test_layers_that_are_called_twice_sometimes_or_never():
    model = Ways()
    for layer in model.children():
        layer.weight.data = torch.eye(2)
    prepared = fq.prepare(copy.deepcopy(model), on_unit_grid())
    found = compared(model, prepared, data=[torch.tensor([[0.25, -3.0]])])
    # 0.25 becomes 0 and -3 stays; then 0.25 becomes 0 once more, or 0 stays.
    assert found["twice"].isolated.sqnr == pytest.approx(decibels(2 * 0.25**2 + 9, 2 * 0.25**2))
    assert found["twice"].accumulated.sqnr == pytest.approx(decibels(2 * 0.25**2 + 9, 2 * 0.25**2))
    assert found["sometimes"].isolated == found["never"].isolated == Errors(None, None, None)
    found = compared(model, prepared, data=[torch.tensor([[0.25, -3.0]]), torch.tensor([[3.25, -3.0]])])
    assert found["sometimes"].isolated.sqnr == pytest.approx(decibels(3.25**2, 0.25**2))
    # 1.25 goes on in float; the quantized model has 1 and does not call the layer.
    found = compared(model, prepared, data=[torch.tensor([[1.25, -3.0]])])
    assert found["sometimes"].isolated.sqnr is not None
    assert found["sometimes"].accumulated.sqnr is None
    assert "-" in str(fq.compare(model, prepared, [torch.ones(1, 2)], progress=False))


def test_results_of_another_shape_are_not_compared():
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
    assert found.accumulated == Errors(None, None, None)  # 1.25 is 1 there, and one row is left


def test_tables_have_indices_for_inputs():
    models = pair(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)), data=[torch.tensor([[0, 4]])])
    found = compared(*models, data=[torch.tensor([[1, 2, 3]])])
    assert found["0"].isolated.clipped is None
    assert found["0"].isolated.sqnr > 30
    assert found["1"].isolated.clipped is not None


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_with_the_layer_in_it(batch_first):
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


def test_all_inputs_of_an_attention_count():
    model = Crossed()
    x, memory = torch.ones(1, 2, 4), torch.ones(1, 6, 4)
    prepared = fq.calibrate(fq.prepare(copy.deepcopy(model), recipes.int8()), [(x, memory)], progress=False)
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
    """A residual network with statistics and factors of its own, a prepared copy, and data."""
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
def test_results_between_layers_have_rows(residual):
    model, prepared, data = residual
    found = compared(model, prepared, data=data)
    assert list(found) == ["stem", "relu", "conv", "norm", "head"]
    assert (found["relu"].kind, found["relu"].weight_sqnr) == ("ReLU", None)
    assert found["relu"].isolated.clipped == 0
    assert 0 < found["relu"].isolated.max_steps <= 0.5001
    # The convolution has no quantizer of its own for its input; by itself it is on the grid all the same.
    assert prepared.conv.input_quantizer is None
    assert 0 < found["conv"].isolated.max_steps <= 0.5001
    y = model.relu(model.stem_norm(model.stem(data[0])))
    result = prepared.norm.forward(prepared.conv(prepared.relu.output_quantizer(y)))  # before its own quantizer
    assert found["conv"].isolated.sqnr == pytest.approx(sqnr(model.norm(model.conv(y)), result))


def test_modules_that_change_their_input_in_place():
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
def test_a_converted_model_with_its_batch_norms_folded(residual):
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
    # Before and after `convert` the weights have the factors of the batch norm in them.
    factor = (model.norm.weight / (model.norm.running_var + model.norm.eps).sqrt()).reshape(-1, 1, 1, 1)
    expected = sqnr(model.conv.weight * factor, integer.float_weight(golden.conv))
    assert found["conv"].weight_sqnr == pytest.approx(expected, abs=1e-3)
    assert trained["conv"].weight_sqnr == pytest.approx(expected, abs=1e-3)


def test_errors_of_channels_that_a_batch_norm_makes_large_again_count():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(2, eps=1e-12)
    model, x = nn.Sequential(nn.Linear(8, 2, bias=False), norm, nn.Linear(2, 2)).eval(), torch.randn(64, 8)
    with torch.no_grad():
        model[0].weight[0] *= 1e-3
        model[1].running_var[0] = 1e-6
    one_scale = fq.QuantConfig(default=fq.LayerConfig(weight=fq.QuantSpec(bits=4)))
    found = fq.compare(*pair(model, one_scale), [x], progress=False)
    assert found.worst == "0"
    assert found.layers[0].isolated.sqnr < 10 < found.layers[1].isolated.sqnr
    assert found.layers[0].weight_sqnr < 10
    # Of tokens another axis is normalized, and the weights have nothing to do with it.
    tokens = [torch.randn(4, 2, 8)]
    model = nn.Sequential(nn.Linear(8, 2, bias=False), nn.BatchNorm1d(2)).eval()
    with torch.no_grad():
        model[1].running_var[0] = 1e-6
    _, prepared = pair(model, one_scale)
    found = compared(model, prepared, data=tokens)["0"]
    weight = fq.nn.quantized_weight(prepared[0]).detach()
    assert found.weight_sqnr == pytest.approx(sqnr(model[0].weight.detach(), weight))
    with torch.no_grad():
        assert found.isolated.sqnr == pytest.approx(sqnr(model(tokens[0]), prepared(tokens[0])))


def test_a_model_of_one_layer_and_one_that_was_unprepared():
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


# --- nothing changes ------------------------------------------------------------------------------


class Counter(nn.Module):
    """Changes in evaluation too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


# A range per tensor that is found at run time is kept until the next.
DYNAMIC = fq.QuantConfig(
    default=fq.LayerConfig(
        weight=fq.presets.int8(), input=fq.presets.uint8(), activation_observer=fq.observers.Dynamic()
    )
)


@pytest.mark.parametrize(
    "config", [recipes.int8(), recipes.int8_dynamic(), DYNAMIC, recipes.lsq(4)], ids=["8", "token", "dynamic", "lsq"]
)
def test_looking_changes_nothing(config):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), Counter(), nn.Linear(4, 2)).train()
    model[1].eval()
    model, prepared = pair(model, config, data=[torch.randn(8, 4)])
    before = snapshot(model, prepared)
    first = fq.compare(model, prepared, [torch.randn(5, 4) * 100], progress=False)
    assert_same(before, snapshot(model, prepared))
    assert first.layers[0].isolated.sqnr is not None

    def breaks():
        yield torch.randn(5, 4)
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        fq.compare(model, prepared, breaks(), progress=False)
    with pytest.raises(RuntimeError):
        fq.compare(model, prepared, [torch.randn(5, 4), torch.randn(5, 3)], progress=False)
    assert_same(before, snapshot(model, prepared))


def test_a_bar_is_shown_if_wanted(capsys):
    models = pair(nn.Linear(2, 2), data=[torch.ones(1, 2)])
    fq.compare(*models, [torch.ones(1, 2)], progress=False)
    assert capsys.readouterr().err == ""
    fq.compare(*models, [torch.ones(1, 2)])
    assert "compare" in capsys.readouterr().err


# --- bad input ------------------------------------------------------------------------------------


def test_errors_say_what_is_wrong():
    model, prepared = pair(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), data=[torch.ones(1, 4)])
    data = [torch.ones(1, 4)]
    with pytest.raises(ValueError, match="no quantized layers"):
        fq.compare(model, copy.deepcopy(model), data)
    with pytest.raises(ValueError, match=r"`float_model` is quantized: 0 has(.|\n)*unprepare"):
        fq.compare(prepared, prepared, data)
    with pytest.raises(ValueError, match=r"not the same: `float_model` has no 0, 1\.(.|\n)*without wrappers"):
        fq.compare(nn.ModuleDict({"module": model}), prepared, data)
    other = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"0 has a weight of shape \(3, 4\)(.|\n)*\(4, 4\)"):
        fq.compare(other, prepared, data)
    with pytest.raises(ValueError, match="0 has no weight"):
        fq.compare(nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), prepared, data)
    with pytest.raises(ValueError, match="no batches"):
        fq.compare(model, prepared, [], progress=False)
    with pytest.raises(ValueError, match="no batches"):
        fq.compare(model, prepared, data, steps=0, progress=False)
    with pytest.raises(TypeError, match="not a function"):
        fq.compare(model, prepared, lambda model: model(data[0]))
    with pytest.raises(TypeError, match=r"`quantized_model` must be a torch\.nn\.Module"):
        fq.compare(model, "prepared", data)
    with pytest.raises(TypeError, match=r"`float_model` must be a torch\.nn\.Module"):
        fq.compare("model", prepared, data)
    with pytest.raises(ValueError, match=r"not empty"):
        fq.compare(model, prepared, [torch.ones(0, 4)], progress=False)


def test_layers_that_no_data_reaches_are_no_comparison():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x):
            return x

    model = Idle()
    with pytest.raises(ValueError, match="No quantized layer was given values"):
        fq.compare(*pair(model), [torch.ones(1, 2)], progress=False)


def test_a_model_that_is_not_calibrated_says_which_scale_is_missing():
    with pytest.raises(RuntimeError, match=r"0\.input_quantizer"):
        fq.compare(*pair(nn.Sequential(nn.Linear(2, 2))), [torch.ones(1, 2)], progress=False)


@pytest.mark.parametrize("config", [recipes.int8(), recipes.lsq(4)], ids=["int8", "lsq"])
def test_a_backward_pass_may_come_after_looking(config):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model, prepared = pair(model, config, data=[torch.randn(8, 4)])
    loss = prepared.train()(torch.randn(8, 4)).sum()
    fq.compare(model, prepared, [torch.randn(5, 4)], progress=False)
    fq.health(prepared, [torch.randn(5, 4)])
    loss.backward()  # needs running means and learned scales that nobody wrote to
    assert prepared[0].weight.grad is not None


def test_buffers_that_are_replaced_come_back():
    class Replacing(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", None)

        def forward(self, x):
            self.calls, self.last = self.calls + 1, x
            return self.fc(x)

    prepared = fq.prepare(Replacing(), recipes.int8())
    with pytest.raises(TypeError, match="A batch must be"):
        fq.calibrate(prepared, [torch.ones(1, 4), "no batch"], progress=False)
    assert (prepared.calls, prepared.last) == (0, None)
    model, prepared = pair(Replacing(), data=[torch.ones(1, 4)])
    calls = prepared.calls
    fq.compare(model, prepared, [torch.ones(1, 4)], progress=False)
    fq.health(prepared, [torch.ones(1, 4)])
    assert prepared.calls is calls
    assert (calls, model.calls, model.last) == (1, 0, None)


def test_models_that_change_their_own_input_in_place():
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
def test_a_module_that_only_quantizes_its_result_is_not_blamed_for_the_layers_in_it():
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
    found = compared(model, prepared, data=[x])["encoder"]
    y = model.encoder(x)
    assert found.isolated.sqnr == pytest.approx(sqnr(y, prepared.encoder.output_quantizer.eval()(y)))
    assert found.accumulated.sqnr < found.isolated.sqnr


@pytest.mark.parametrize("nan_at", [0, 1])
def test_steps_that_are_no_number_are_not_lost(nan_at):
    data = [torch.ones(1, 4), torch.ones(1, 4)]
    model, prepared = pair(nn.Sequential(nn.Linear(4, 2)), data=data)
    data[nan_at] = torch.full((1, 4), math.nan)
    assert math.isnan(compared(model, prepared, data=data)["0"].isolated.max_steps)
