"""Prepared recurrent layers: the float function, quantized products, states, and what is observed."""

import copy
import io
import pickle

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits, assert_same_state
from prepare_cases import off, randn

torch = pytest.importorskip("torch")
nn = torch.nn
rnn = nn.utils.rnn
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")
observers = pytest.importorskip("fakequant.observers")

pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")

# Sums of products are added in another order than in torch's kernels: a few units in the last place.
FEW_ULP = 16 * torch.finfo(torch.float32).eps

LAYERS = {
    "LSTM": (nn.LSTM, {}),
    "LSTM, two layers, both directions": (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
    "LSTM, batch first, no bias": (nn.LSTM, {"batch_first": True, "bias": False, "num_layers": 2}),
    "LSTM, projection": (nn.LSTM, {"proj_size": 2, "num_layers": 2, "bidirectional": True}),
    "GRU": (nn.GRU, {}),
    "GRU, batch first, both directions": (nn.GRU, {"batch_first": True, "num_layers": 2, "bidirectional": True}),
    "RNN, tanh": (nn.RNN, {"bidirectional": True}),
    "RNN, relu": (nn.RNN, {"nonlinearity": "relu", "batch_first": True}),
}
each_layer = pytest.mark.parametrize(("cls", "options"), LAYERS.values(), ids=LAYERS)
CELLS = {"LSTMCell": nn.LSTMCell, "GRUCell": nn.GRUCell, "RNNCell": nn.RNNCell}
each_cell = pytest.mark.parametrize("cls", CELLS.values(), ids=CELLS)


def build(cls, options=(), **more):
    torch.manual_seed(0)
    return cls(5, 4, **dict(options), **more)


def calibrated(layer, x, config=None):
    return fq.calibrate(fq.prepare(layer, config or recipes.int8(), x), [x], progress=False)


def leaves(result):
    """Returns the tensors of a result: of the sequence, then of the states."""
    y, states = result
    return [y.data if isinstance(y, rnn.PackedSequence) else y, *(states if isinstance(states, tuple) else (states,))]


def first_state(layer, batch, seed=5):
    number = layer.num_layers * (2 if layer.bidirectional else 1)
    h = randn(number, *batch, layer.proj_size or layer.hidden_size, seed=seed)
    return (h, randn(number, *batch, layer.hidden_size, seed=seed + 1)) if layer.mode == "LSTM" else h


def assert_close(expected, actual):
    for a, b in zip(expected, actual, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        torch.testing.assert_close(b, a, rtol=FEW_ULP, atol=FEW_ULP)


# --- the float function -----------------------------------------------------------------------------

INPUTS = {
    "sequences": lambda layer: (randn(3, 6, 5), first_state(layer, (3,) if layer.batch_first else (6,))),
    "one sequence": lambda layer: (randn(6, 5), first_state(layer, ())),
    "sorted": lambda layer: (rnn.pack_sequence([randn(n, 5, seed=n) for n in (6, 4, 4, 1)]), first_state(layer, (4,))),
    "not sorted": lambda layer: (
        rnn.pack_sequence([randn(n, 5, seed=n) for n in (2, 6, 1, 6)], enforce_sorted=False), first_state(layer, (4,)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("has_state", [False, True], ids=["no state", "a state"])
@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@each_layer
def test_without_quantizing_it_computes_the_float_function(cls, options, inputs, has_state):
    floats = build(cls, options)
    model = off(fq.prepare(copy.deepcopy(floats), recipes.int8(), randn(3, 6, 5)))
    x, state = inputs(floats)
    args = (x, state) if has_state else (x,)
    expected, actual = floats(*args), model(*args)
    assert_close(leaves(expected), leaves(actual))
    if isinstance(x, rnn.PackedSequence):
        for name in ("batch_sizes", "sorted_indices", "unsorted_indices"):
            a, b = getattr(expected[0], name), getattr(actual[0], name)
            assert (a is None and b is None) or torch.equal(a, b)


@each_layer
def test_without_quantizing_it_has_the_gradients_of_the_float_layer(cls, options):
    floats = build(cls, options)
    model = off(fq.prepare(copy.deepcopy(floats), recipes.int8(), randn(3, 6, 5)))
    found = []
    for layer in (floats, model):
        x = randn(3, 6, 5).requires_grad_()
        state = first_state(layer, (3,) if layer.batch_first else (6,))
        sum(y.square().sum() for y in leaves(layer(x, state))).backward()
        found.append([x.grad, *(layer.get_parameter(name).grad for name, _ in floats.named_parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


def test_dropout_between_layers_draws_the_numbers_of_the_float_layer():
    floats = build(nn.LSTM, num_layers=3, dropout=0.5, batch_first=True)
    model, x = off(fq.prepare(copy.deepcopy(floats), recipes.int8(), randn(3, 6, 5))), randn(3, 6, 5)
    found = []
    for layer in (floats, model):
        torch.manual_seed(1)
        found.append(leaves(layer(x)))
    assert_close(*found)
    assert not torch.equal(found[1][0], leaves(model(x))[0]), "no dropout"
    model.eval()
    assert_same_bits(model(x)[0], model(x)[0])


@pytest.mark.parametrize("shape", [(3, 5), (5,)], ids=["a batch", "one vector"])
@each_cell
def test_cell_without_quantizing_computes_the_float_function(cls, shape):
    floats = build(cls)
    model = off(fq.prepare(copy.deepcopy(floats), recipes.int8(), randn(*shape)))
    x, h = randn(*shape), randn(*shape[:-1], 4, seed=2)
    state = (h, -h) if cls is nn.LSTMCell else h
    for args in ((x,), (x, state)):
        expected, actual = floats(*args), model(*args)
        as_list = lambda y: list(y) if isinstance(y, tuple) else [y]  # noqa: E731
        assert_close(as_list(expected), as_list(actual))


# --- quantized products -----------------------------------------------------------------------------


def quantized_by_hand(layer, x):
    """Returns the results of a calibrated `nn.GRU` in evaluation, in formulas: all products of quantized tensors."""
    product = lambda part, x: nn.functional.linear(  # noqa: E731
        part.input_quantizer(x), part.weight_quantizer(part.weight), rounded_bias(part)
    )
    gates, h, results = product(layer.ih_l0, x), x.new_zeros(x.shape[1], layer.hidden_size), []
    for step in range(len(x)):
        (x_r, x_z, x_n), (h_r, h_z, h_n) = gates[step].chunk(3, -1), product(layer.hh_l0, h).chunk(3, -1)
        r, z = torch.sigmoid(x_r + h_r), torch.sigmoid(x_z + h_z)
        n = torch.tanh(x_n + r * h_n)
        h = (h - n) * z + n
        results.append(h)
    return torch.stack(results)


def rounded_bias(part):
    step = part.input_quantizer.scale * part.weight_quantizer.scale
    return (part.bias.double() / step.double()).round().float() * step


def test_the_products_are_those_of_quantized_tensors():
    layer, x = build(nn.GRU), randn(6, 3, 5)
    calibrated(layer, x).eval()
    torch.testing.assert_close(layer(x)[0], quantized_by_hand(layer, x), rtol=FEW_ULP, atol=FEW_ULP)
    assert not torch.allclose(layer(x)[0], build(nn.GRU)(x)[0], rtol=FEW_ULP, atol=FEW_ULP), "nothing is quantized"


@each_layer
def test_every_weight_has_a_quantized_product(cls, options):
    layer = fq.prepare(build(cls, options), recipes.int8(), randn(3, 6, 5))
    weights = [name for name, _ in layer.named_parameters() if "weight_" in name and "quantizer" not in name]
    products = [name for name, child in layer.named_children() if isinstance(child, fqnn.QuantizedLayer)]
    assert [f"weight_{name}" for name in products] == weights
    for name in products:
        part = layer.get_submodule(name)
        assert part.weight is layer.get_parameter(f"weight_{name}")
        assert (part.bias is None) == (not layer.bias or name.startswith("hr_"))
        assert list(part.parameters()) == []


def test_weight_of_the_hidden_state_is_quantized_once_per_sequence():
    layer, x, calls = build(nn.LSTM), randn(6, 3, 5), []
    calibrated(layer, x)
    layer.hh_l0.weight_quantizer.register_forward_hook(lambda *_: calls.append(1))
    layer.hh_l0.input_quantizer.register_forward_hook(lambda *_: calls.append(6))
    layer.eval()(x)
    assert calls == [1, *[6] * 6]


@pytest.mark.filterwarnings("ignore:Ranges found by `calibrate`")  # the first state is 0
@each_cell
def test_cell_quantizes_both_products(cls):
    cell, x = build(cls), randn(3, 5)
    floats = cell(x)
    calibrated(cell, x).eval()
    assert [name for name, child in cell.named_children() if isinstance(child, fqnn.QuantizedLayer)] == ["ih", "hh"]
    y = cell(x)
    first = lambda y: y[0] if isinstance(y, tuple) else y  # noqa: E731
    assert not torch.equal(first(y), first(floats))
    torch.testing.assert_close(first(y), first(floats), rtol=0, atol=0.02)


# --- what is observed -------------------------------------------------------------------------------


def hidden_states(layer, x):
    """Returns the inputs of the hidden product in float: the first state is 0."""
    y, _ = layer(x)
    return torch.cat([torch.zeros_like(y[:1]), y[:-1]])


def test_hidden_states_of_all_steps_are_observed_as_one_tensor():
    layer, x = build(nn.LSTM), randn(6, 3, 5)
    states = hidden_states(layer, x)
    calibrated(layer, x)
    quantizer = layer.hh_l0.input_quantizer
    torch.testing.assert_close(quantizer.running_max, states.max(), rtol=FEW_ULP, atol=0)
    torch.testing.assert_close(quantizer.running_min, states.min(), rtol=FEW_ULP, atol=0)
    assert quantizer.observing
    assert quantizer.quantizing


@pytest.mark.parametrize("quantizing", [True, False])
def test_training_moves_the_range_of_hidden_states_once_per_sequence(quantizing):
    layer, x = build(nn.GRU), randn(6, 3, 5)
    config = fq.QuantConfig(
        default=fq.LayerConfig(input=presets.uint8(), activation_observer=observers.MovingAverage(0.5))
    )
    calibrated(layer, x, config)
    quantizer = layer.hh_l0.input_quantizer
    quantizer.quantizing = quantizing
    before, seen = quantizer.running_max.clone(), []
    quantizer.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    layer.train()(3 * x)
    assert [len(states) for states in seen] == [3] * 6 + [18]
    assert_same_bits(torch.cat(seen[:6]), seen[6])
    assert_same_bits(before + 0.5 * (seen[6].max() - before), quantizer.running_max)
    assert quantizer.quantizing == quantizing
    assert quantizer.observing


def test_first_sequence_of_training_without_calibration_has_float_states():
    floats, x = build(nn.LSTM), randn(6, 3, 5)
    config = fq.QuantConfig(default=fq.LayerConfig(input=presets.uint8())).skip("ih*")
    layer = fq.prepare(copy.deepcopy(floats), config, x)
    assert_close(leaves(floats(x)), leaves(layer(x)))
    assert not torch.allclose(floats(x)[0], layer(x)[0], rtol=FEW_ULP, atol=FEW_ULP)


def test_failed_forward_pass_leaves_the_switches_as_they_were():
    layer, x = build(nn.LSTM), randn(6, 3, 5)
    calibrated(layer, x).train()
    state = copy.deepcopy(layer.state_dict())
    quantizer = layer.hh_l0.input_quantizer

    def fail(*_):
        raise RuntimeError("here")

    handle = quantizer.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="here"):
        layer(x)
    handle.remove()
    assert (quantizer.observing, quantizer.quantizing) == (True, True)
    for name in ("hh_l0.input_quantizer.running_max", "hh_l0.input_quantizer.switches"):
        assert_same_bits(state[name], layer.state_dict()[name])


def test_learned_scale_starts_from_the_states_of_all_steps():
    layer, x = build(nn.LSTM), randn(6, 3, 5)
    states = hidden_states(layer, x)
    calibrated(layer, x, recipes.lsq(4, first_last_bits=None))
    quantizer = layer.hh_l0.input_quantizer
    expected = copy.deepcopy(quantizer).initialize(states.flatten(0, 1))
    torch.testing.assert_close(quantizer.scale, expected.scale, rtol=FEW_ULP, atol=0)
    layer.train()(x)[0].sum().backward()
    assert bool(quantizer.step_size.grad.abs().sum() > 0)


# --- states and copies ------------------------------------------------------------------------------


@each_layer
def test_states_copies_and_the_way_back_keep_every_bit(cls, options):
    x = randn(3, 6, 5)
    floats, layer = build(cls, options), build(cls, options)
    state, result = copy.deepcopy(layer.state_dict()), leaves(floats(x))
    calibrated(layer, x).eval()
    assert isinstance(layer, cls)
    assert layer.load_state_dict(state, strict=True) == ([], [])
    y = leaves(layer(x))
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = fq.prepare(build(cls, options), recipes.int8(), x).eval()
    assert loaded.load_state_dict(torch.load(file, weights_only=True), strict=True) == ([], [])
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        for a, b in zip(y, leaves(other(x)), strict=True):
            assert_same_bits(a, b)
        assert other.hh_l0.owner is other
        assert other.hh_l0.weight is other.weight_hh_l0
    fq.unprepare(layer)
    assert type(layer) is cls
    assert list(layer.children()) == []
    assert set(vars(layer)) == set(vars(floats))
    assert_same_state(state, layer.state_dict())
    for a, b in zip(result, leaves(layer.train()(x)), strict=True):
        assert_same_bits(a, b)


def test_copy_does_not_share_weights_with_the_original():
    layer, x = build(nn.LSTM), randn(6, 3, 5)
    calibrated(layer, x).eval()
    y, other = layer(x)[0], copy.deepcopy(layer)
    with torch.no_grad():
        other.weight_hh_l0.zero_()
    assert_same_bits(y, layer(x)[0])
    assert not torch.equal(y, other(x)[0])


def test_model_moves_to_another_dtype_with_its_products():
    layer = fq.prepare(build(nn.LSTM), recipes.int8(), randn(6, 3, 5)).double()
    assert layer.hh_l0.weight.dtype == torch.float64
    assert layer(randn(6, 3, 5).double())[0].dtype == torch.float64


def test_functional_call_reaches_the_products():
    layer, x = off(fq.prepare(build(nn.GRU), recipes.int8(), randn(6, 3, 5))), randn(6, 3, 5)
    zeros = {name: torch.zeros_like(p) for name, p in layer.named_parameters()}
    y, _ = torch.func.functional_call(layer, zeros, (x,))
    assert_same_bits(torch.zeros_like(y), y)


# --- configs and reports ----------------------------------------------------------------------------


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


RULES = {
    "the layer": (recipes.int8().skip("lstm"), []),
    "its type": (recipes.int8().skip(type="LSTM"), []),
    "a product": (recipes.int8().skip("lstm.hh_l0"), ["ih_l0"]),
    "all products": (recipes.int8().skip("lstm.*"), []),
    "the layer, but for a product": (
        recipes.int8().skip("lstm").rule("lstm.ih_l0", weight=fq.QuantSpec(bits=4, axis=0)), ["ih_l0"],
    ),
    "everything, but for a product": (
        fq.QuantConfig().rule("head", weight=presets.int8()).rule("lstm.hh_l0", weight=presets.int8()), ["hh_l0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "products"), RULES.values(), ids=RULES)
def test_rules_name_the_layer_or_its_products(config, products):
    floats, x = Tagger(), randn(3, 6, 5)
    model = fq.prepare(Tagger(), config, x)
    assert [row.path for row in fq.summary(model).layers] == [*(f"lstm.{name}" for name in products), "head"]
    assert (type(model.lstm) is nn.LSTM) == (not products)
    assert_close([floats(x)], [off(model)(x)])
    assert not fq.summary(model).unmatched


def test_layer_with_an_attribute_named_like_a_product_stays_in_float():
    model = Tagger()
    model.lstm.hh_l0 = "mine"
    fq.prepare(model, recipes.int8(), randn(3, 6, 5))
    assert type(model.lstm) is nn.LSTM
    assert fq.summary(model).floats["lstm"] == "it already has an attribute `hh_l0`"


def test_first_layer_gets_more_bits_in_its_first_product():
    config = recipes.lsq(2)
    model = fq.prepare(Tagger(), config, randn(3, 6, 5))
    bits = {path: q.spec.bits for path, q in fqnn.named_quantizers(model) if path.endswith("weight_quantizer")}
    wide = config.first_last_bits
    assert list(bits.values()) == [wide, 2, wide]
    ruled = fq.prepare(Tagger(), config.rule(type="LSTM", weight=fq.QuantSpec(bits=4, axis=0)), randn(3, 6, 5))
    bits = {path: q.spec.bits for path, q in fqnn.named_quantizers(ruled) if path.endswith("weight_quantizer")}
    assert list(bits.values()) == [4, 4, wide]


def test_summary_counts_the_multiplications_of_the_products():
    model, x = Tagger(), randn(3, 6, 5)
    found = fq.summary(fq.prepare(model, recipes.int8().skip("lstm.hh_l0"), x))
    positions = 3 * 6
    assert found.multiplications == positions * (16 * 5 + 16 * 4 + 4 * 2)
    assert found.quantized_multiplications == positions * (16 * 5 + 4 * 2)
    assert found.parameters == sum(p.numel() for p in Tagger().parameters())


def test_result_of_the_layer_is_quantized_if_the_config_says_so():
    model, x = Tagger(), randn(3, 6, 5)
    calibrated(model, x, recipes.int8().rule(type="LSTM", output=presets.uint8())).eval()
    quantizer = model.lstm.output_quantizer
    y, (h, _) = model.lstm(x)
    assert_same_bits(y, quantizer(y))
    assert not torch.equal(h, quantizer(h))
    row = fq.summary(model).layers[0]
    assert (row.path, row.kind, row.output) == ("lstm", "LSTM", "uint8, per tensor")


class Residual(nn.Module):
    """Adds the results of a recurrent layer, and classifies its last state, which is not on a grid of the results."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(5, 5), nn.Linear(5, 2)

    def forward(self, x):
        y, (h, _) = self.lstm(x)
        return y + y.flip(0), self.head(h)


def test_results_that_are_added_stay_in_float():
    x = randn(6, 3, 5)
    model = fq.calibrate(fq.prepare(Residual(), recipes.int8(), x), [x], progress=False).eval()
    assert model.lstm.output_quantizer is None
    assert model.head.input_quantizer is not None
    for a, b in zip(model(x), fq.convert(model)(x), strict=True):  # without a warning of unused quantizers
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# --- errors -----------------------------------------------------------------------------------------

WRONG = {
    "4-D": (lambda: (randn(1, 2, 3, 5),), ValueError, "2D or 3D, got 4D"),
    "other features": (lambda: (randn(6, 3, 4),), RuntimeError, "Expected 5, got 4"),
    "no steps": (lambda: (randn(0, 3, 5),), RuntimeError, "larger than 0"),
    "state of another batch": (lambda: (randn(6, 3, 5), randn(1, 2, 4)), RuntimeError, r"\(1, 3, 4\), got \[1, 2, 4\]"),
    "3-D state, one sequence": (lambda: (randn(6, 5), randn(1, 1, 4)), RuntimeError, r"\(1, 4\), got \[1, 1, 4\]"),
}


@pytest.mark.parametrize(("args", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_arguments_raise_what_the_float_layer_raises(args, error, words):
    floats, layer = build(nn.GRU), fq.prepare(build(nn.GRU), recipes.int8(), randn(6, 3, 5))
    with pytest.raises(error):
        floats(*args())
    with pytest.raises(error, match=words):
        layer(*args())


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo reads it
def test_compiled_model_computes_the_same():
    model, x = Tagger(), randn(3, 6, 5)
    calibrated(model, x).train()
    other = copy.deepcopy(model)
    compiled = torch.compile(other, backend="eager")
    for mode in (True, False):
        y, z = compiled.train(mode)(x), model.train(mode)(x)
        assert_same_bits(z, y)
        assert_same_state(model.state_dict(), other.state_dict())
