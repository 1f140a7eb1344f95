"""`sensitivity(candidates=...)`: costs of weights at several widths."""

import copy
import dataclasses
import pickle

import pytest

import fakequant as fq
from fakequant import LayerConfig, QuantConfig, QuantSpec, presets, recipes
from fakequant.observers import MSE
from sensitivity_models import Block

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")
nn = torch.nn

WEIGHTS = QuantConfig(default=LayerConfig(weight=QuantSpec(bits=4, axis=0)))


def relative_error(model, quantized, data):
    with torch.no_grad():
        pairs = [(model(x).double(), quantized(x).double()) for x in data]
    noise = sum(float((y - z).square().sum()) for y, z in pairs)
    return noise / sum(float(y.square().sum()) for y, _ in pairs)


def measured(model, config, data, candidates=(2, 4, 8), **options):
    return fq.sensitivity(model, config, data=data, candidates=candidates, progress=False, **options)


def rows_of(found):
    return {layer.path: layer for layer in found.layers}


def specs_of(model, config, data):
    prepared = fq.calibrate(fq.prepare(copy.deepcopy(model), config, data[0]), data, progress=False)
    return {
        path: {n: getattr(layer, n).spec for n in ("weight_quantizer", "input_quantizer") if getattr(layer, n, None)}
        for path, layer in prepared.named_modules()
        if hasattr(layer, "weight_quantizer")
    }


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block().eval(), [torch.randn(8, 1, 6, 6) for _ in range(2)]


# --- what is measured -------------------------------------------------------------------------------


@pytest.mark.parametrize("observer", [None, MSE()])
def test_costs_are_errors_of_models_with_only_that_weight_quantized(block, observer):
    model, data = block
    config = recipes.w4a8(first_last_bits=None)
    default = dataclasses.replace(config.default, weight_observer=observer)
    config = dataclasses.replace(config, default=default, rules=())
    found = measured(model, config, data)
    assert found.measure == "output"
    for path in ("stem", "conv", "head"):
        row = rows_of(found)[path]
        assert list(row.costs) == [2, 4, 8]
        for bits, cost in row.costs.items():
            spec = dataclasses.replace(row.config.weight, bits=bits, narrow_range=bits == 8)
            only = QuantConfig().rule(path, weight=spec, weight_observer=observer)
            alone = fq.calibrate(fq.prepare(copy.deepcopy(model), only, data[0]), data, progress=False).eval()
            assert cost == relative_error(model, alone, data), (path, bits)
    assert rows_of(found)["relu"].costs is None


def test_cost_and_gain_are_those_without_candidates(block):
    model, data = block
    config = recipes.w4a8()

    def evaluate(model):
        return -model(data[0]).square().mean()

    plain = fq.sensitivity(model, config, evaluate, data=data, progress=False)
    found = measured(model, config, data, evaluate=evaluate)
    assert found.measure == plain.measure == "score"
    assert [(x.path, x.cost, x.gain) for x in found.layers] == [(x.path, x.cost, x.gain) for x in plain.layers]
    assert all(layer.costs is None for layer in plain.layers)
    assert (found.float_score, found.quantized_score) == (plain.float_score, plain.quantized_score)


def test_the_output_serves_as_a_score_without_labels(block):
    model, data = block
    config = recipes.w4a8(first_last_bits=None)
    found = fq.sensitivity(model, config, data=iter(data), progress=False)  # batches that can be read once
    prepared = fq.calibrate(fq.prepare(copy.deepcopy(model), config, data[0]), data, progress=False).eval()
    assert found.float_score == 0
    assert found.quantized_score == -relative_error(model, prepared, data)
    assert "relative squared errors" in str(found)


def test_costs_by_a_function_that_runs_the_model_are_those_of_its_batches(block):
    model, data = block

    def run(model):
        for x in data:
            model(x)

    dynamic = recipes.int4_weight_only(None)
    for measure in ("output", "second_order"):
        one, two = (rows_of(measured(model, dynamic, d, measure=measure)) for d in (data, run))
        assert {p: x.costs for p, x in one.items()} == {p: x.costs for p, x in two.items()}


def test_widths_leave_the_model_unchanged(block):
    model, data = block
    model.train()
    before = pickle.dumps(model.state_dict())
    for measure in ("output", "second_order"):
        state = torch.get_rng_state()
        found = measured(model, recipes.lsq(4), data, measure=measure)
        assert torch.equal(torch.get_rng_state(), state)
        assert found.layers[0].costs is not None
    assert pickle.dumps(model.state_dict()) == before
    assert all(module.training for module in model.modules())
    assert type(model.conv) is nn.Conv2d
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    again = pickle.loads(pickle.dumps(found))
    assert again == found == copy.deepcopy(found)
    assert again.suggest(bits=4) == found.suggest(bits=4)


# --- the second-order estimate ----------------------------------------------------------------------


def test_the_estimate_is_exact_if_outputs_depend_on_one_weight_each():
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(1, 16, bias=False)), list(torch.randn(6, 1, 1))
    config = QuantConfig(default=LayerConfig(weight=QuantSpec(bits=4)))
    exact = measured(model, config, data).layers[0]
    estimate = measured(model, config, data, measure="second_order").layers[0]
    assert estimate.costs == pytest.approx(exact.costs, rel=1e-5)  # outputs are rounded to float32
    assert estimate.cost == estimate.gain == estimate.costs[4]


def test_the_estimate_adds_up_the_calls_of_a_layer():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(1, 16, bias=False)

        def forward(self, x):
            return self.fc(x) + self.fc(2 * x)

    torch.manual_seed(0)
    model, data = Twice(), list(torch.randn(6, 1, 1))
    exact, estimate = (measured(model, WEIGHTS, data, measure=m).layers[0] for m in ("output", "second_order"))
    assert estimate.costs == pytest.approx(exact.costs, rel=1e-5)  # outputs are rounded to float32


def test_the_estimate_is_near_the_measured_error_of_a_small_network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    data = [torch.randn(8, 16) for _ in range(32)]
    exact, estimate = (rows_of(measured(model, WEIGHTS, data, measure=m)) for m in ("output", "second_order"))
    for path, row in exact.items():
        for bits in (4, 8):  # errors of 2 bits are not small
            assert 0.5 < estimate[path].costs[bits] / row.costs[bits] < 2, (path, bits)


def test_the_estimate_evaluates_nothing_per_layer_and_width(block):
    model, data = block
    calls = []

    def run(model):
        calls.append(model)
        model(data[0])

    measured(model, recipes.int4_weight_only(None), run, measure="second_order", candidates=(2, 3, 4, 5, 6, 8))
    assert len(calls) <= 2  # calibration and the backward pass


# --- which widths -----------------------------------------------------------------------------------


def test_the_first_and_the_last_layer_keep_their_bits_and_the_bits_of_their_inputs(block):
    model, data = block
    config = recipes.lsq(2)  # 8 bits for weights and inputs of the first and the last layer
    rows = rows_of(measured(model, config, data))
    assert [list(rows[p].costs) for p in ("stem", "conv", "head")] == [[8], [2, 4, 8], [8]]
    assert list(rows_of(measured(model, config, data, candidates=(2, 4)))["stem"].costs) == [8]
    found = measured(model, config, data, candidates=(2, 8, 12))
    assert list(rows_of(found)["head"].costs) == [8, 12]
    before, after = specs_of(model, config, data), specs_of(model, found.suggest(bits=12), data)
    for path in ("stem", "conv", "head"):
        assert after[path]["weight_quantizer"].bits == 12
        assert after[path].get("input_quantizer") == before[path].get("input_quantizer")
    with pytest.raises(ValueError, match=r"too small(.|\n)*first_last_bits=None"):
        found.suggest(bits=2)


def test_widths_that_the_target_does_not_have_are_those_it_has_instead(block):
    model, data = block
    config = dataclasses.replace(recipes.w4a8(first_last_bits=None), target="onnxruntime-x86")
    found = measured(model, config, data)
    assert list(rows_of(found)["conv"].costs) == [2, 4, 7]
    specs = specs_of(model, found.suggest(bits=7), data)
    assert {spec["weight_quantizer"].bits for spec in specs.values()} == {7}


class Tied(nn.Module):
    """A language model whose embedding and last layer share a weight."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.body(self.embedding(x)).relu())


@pytest.mark.parametrize("measure", ["output", "second_order"])
def test_layers_that_share_a_weight_have_one_width(measure):
    torch.manual_seed(0)
    model, data = Tied(), [torch.randint(0, 20, (4, 6)) for _ in range(3)]
    found = measured(model, WEIGHTS, data, measure=measure)
    rows = rows_of(found)
    assert rows["head"].tied_to == "embedding"
    assert rows["head"].costs == rows["embedding"].costs
    if measure == "output":
        both = QuantConfig().rule("head", weight=QuantSpec(bits=2, axis=0))
        both = both.rule("embedding", weight=QuantSpec(bits=2, axis=0))
        prepared = fq.prepare(copy.deepcopy(model), both).eval()
        assert rows["head"].costs[2] == relative_error(model, prepared, data)
    # The shared weight counts once: 160 at 4 bits and 64 at 8.
    tight = (160 * 2 + 64 * 8) / 224
    for bits in (2, tight, 4, 8):
        specs = specs_of(model, found.suggest(bits=bits), data)
        widths = {path: spec["weight_quantizer"].bits for path, spec in specs.items()}
        assert widths["head"] == widths["embedding"]
        assert widths["head"] * 160 + widths["body"] * 64 <= bits * 224
    times = {path: {2: 1.0, 4: 2.0, 8: 3.0} for path in ("embedding", "body", "head")}
    assert found.suggest(latency=3.0, times=times) == found.suggest(bits=2)


def test_an_attention_and_its_projection_have_a_width_each():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.fc = nn.MultiheadAttention(8, 2), nn.Linear(8, 4)

        def forward(self, x):
            return self.fc(self.attention(x, x, x)[0])

    torch.manual_seed(0)
    model, data = Model(), [torch.randn(5, 2, 8)]
    for measure in ("output", "second_order"):
        found = measured(model, recipes.w4a8(first_last_bits=None), data, measure=measure)
        rows = rows_of(found)
        assert rows["attention.out_proj"].part_of == "attention"
        assert all(rows[p].costs[2] > rows[p].costs[8] > 0 for p in ("attention", "attention.out_proj", "fc"))
        specs = specs_of(model, found.suggest(bits=8), data)
        assert {spec["weight_quantizer"].bits for spec in specs.values()} == {8}


def test_a_rule_keeps_everything_but_the_bits(block):
    model, data = block
    config = recipes.w4a8(first_last_bits=None).skip("head")
    config = config.rule("conv", weight=QuantSpec(bits=4, axis=1, group_size=2), weight_observer=MSE(steps=20))
    config = config.rule(type="Conv2d", path="ste?", weight=presets.int8(), input=None, learned=True)
    found = measured(model, config, data)
    assert set(rows_of(found)) >= {"stem", "conv"}
    assert "head" not in rows_of(found)
    assert found.suggest(bits=(4 * 144 + 8 * 36) / 180, precision=None).rules[-len(config.rules) :] == config.rules
    two = found.suggest(bits=2)
    assert [rule.path for rule in two.rules[:2]] in (["conv", "stem"], ["stem", "conv"])
    uses = {rule.path: rule.use for rule in two.rules[:2]}
    conv, stem = config.rules[1].use, config.rules[0].use
    assert uses["conv"] == dataclasses.replace(conv, weight=dataclasses.replace(conv.weight, bits=2))
    # Only 8 bits have a narrow range, as in the presets.
    full = dataclasses.replace(stem.weight, bits=2, narrow_range=False)
    assert uses["stem"] == dataclasses.replace(stem, weight=full)


def test_a_rule_has_the_axis_of_the_config_not_that_of_the_stored_weight():
    model, data = nn.Sequential(nn.ConvTranspose2d(2, 4, 3)), [torch.randn(1, 2, 4, 4)]
    [rule] = measured(model, WEIGHTS, data).suggest(bits=8).rules
    assert rule.use.weight == presets.int8()
    assert specs_of(model, WEIGHTS.rule("0", weight=rule.use.weight), data)["0"]["weight_quantizer"].axis == 1


# --- bad input --------------------------------------------------------------------------------------


def test_sensitivity_refuses_wrong_widths_and_measures(block):
    model, data = block
    for candidates in ((), (0,), (2.0,), (True,), (17,), "48"):
        with pytest.raises((TypeError, ValueError), match=r"`candidates` must be numbers of bits"):
            measured(model, WEIGHTS, data, candidates)
    with pytest.raises(ValueError, match=r"signed weights .* at least 2 bits, got the candidate 1"):
        measured(model, WEIGHTS, data, (1, 2))
    with pytest.raises(ValueError, match="`measure` must be one of score, output, second_order"):
        measured(model, WEIGHTS, data, measure="hessian")
    with pytest.raises(ValueError, match="got measure='output' with `evaluate`"):
        measured(model, WEIGHTS, data, measure="output", evaluate=lambda model: 0.0)
    with pytest.raises(ValueError, match="got measure='score' without `evaluate`"):
        measured(model, WEIGHTS, data, measure="score")
    with pytest.raises(ValueError, match="Pass `evaluate`"):
        measured(model, WEIGHTS, None)
    with pytest.raises(ValueError, match="Pass `candidates`"):
        measured(model, WEIGHTS, data, None, measure="second_order")
    with pytest.raises(ValueError, match="has no gradient"):
        measured(model, WEIGHTS, torch.no_grad()(lambda m: m(data[0])), measure="second_order")
    with pytest.raises(ValueError, match=r"is 0 for all of `data`"):
        measured(nn.Sequential(nn.Linear(2, 2, bias=False)), WEIGHTS, [torch.zeros(1, 2)])
