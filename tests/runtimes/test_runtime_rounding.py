"""Quantizers of a model's inputs round at ties as the target does, in training, in evaluation, and after a reload."""

import copy
import pickle

import numpy as np
import pytest

import fakequant as fq
from fakequant import QuantSpec
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
runtimes = pytest.importorskip("fakequant._runtimes")
input_rounding = pytest.importorskip("fakequant._prepare.input_rounding")
openvino = pytest.importorskip("fakequant._runtimes.openvino.arithmetic")
xnnpack = pytest.importorskip("fakequant._runtimes.xnnpack.arithmetic")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
observers = pytest.importorskip("fakequant.observers")
quantizers = pytest.importorskip("fakequant.nn")
digit_models = pytest.importorskip("digit_models")

pytestmark = pytest.mark.usefixtures("torch_on_one_thread")

GOLDEN = {"openvino": openvino.OpenVino(), "xnnpack": xnnpack.Xnnpack()}
INF, NAN = float("inf"), float("nan")
# Not exact in binary: quotients that are ties on paper are not ties in float32.
SCALES = [0.1, 0.3, 0.7, 1.1, 0.21, 1 / 255, 1 / 3, 1 / 85]
SPECS = {
    "uint8": (QuantSpec(signed=False, symmetric=False), (0, 3, 128, 255)),
    "int8": (QuantSpec(), (0,)),
    "int8 affine": (QuantSpec(symmetric=False), (-128, -9, 127)),
    "int8 narrow": (QuantSpec(narrow_range=True), (0,)),
    "uint4": (QuantSpec(bits=4, signed=False, symmetric=False), (0, 7, 15)),
    "int4": (QuantSpec(bits=4), (0,)),
    "uint2": (QuantSpec(bits=2, signed=False, symmetric=False), (0, 1)),
    "int2": (QuantSpec(bits=2), (0,)),
}
ROUNDINGS = {name: runtimes.part(name, "rounding").ROUNDING for name in GOLDEN} | {None: None}
each_rule = pytest.mark.parametrize("rule", GOLDEN)
each_spec = pytest.mark.parametrize(("spec", "zero_points"), SPECS.values(), ids=SPECS)
each_kind = pytest.mark.parametrize("kind", ["FakeQuantize", "LearnedFakeQuantize"])


def grids(spec, zero_points):
    for scale in SCALES:
        for zero_point in zero_points:
            yield values.GridOf(torch.tensor(np.float32(scale)), torch.tensor(zero_point, dtype=torch.int32), spec)


def near_ties(scale):
    """Returns the ties of a grid, their neighbours, whole steps, and numbers beyond the range."""
    steps = np.arange(-300, 300)
    ties = ((steps + 0.5) * np.float64(scale)).astype(np.float32)
    up, down = np.nextafter(ties, np.float32(INF)), np.nextafter(ties, np.float32(-INF))
    others = np.float32([0, 1e-45, -1e-45, 1e30, -1e30, 3.4e38, -3.4e38])
    return torch.from_numpy(np.concatenate([ties, up, down, (steps * scale).astype(np.float32), others]))


def onnx_codes(x, grid):
    codes = torch.round(x.float() / grid.scale) + grid.zero_point
    return codes.clamp(grid.spec.qmin, grid.spec.qmax)


def moved(x, grid, rule):
    return ROUNDINGS[rule].moved(x, grid.scale, grid.zero_point, grid.spec)


# --- the function ---------------------------------------------------------------------------------


@each_rule
@each_spec
def test_moved_floats_have_the_codes_of_the_golden_model(rule, spec, zero_points):
    number = 0
    for grid in grids(spec, zero_points):
        x = near_ties(grid.scale.item())
        want, there = GOLDEN[rule].from_float(x, grid), moved(x, grid, rule)
        assert torch.equal(onnx_codes(there, grid), want), grid
        stays = want == onnx_codes(x, grid)
        assert_same_bits(there[stays], (x + 0)[stays], "a float whose code is that of ONNX")
        assert bool(((there - x).abs() <= 0.51 * grid.scale)[~stays].all())
        assert bool(((want - onnx_codes(x, grid)).abs() <= 1).all())
        number += int((~stays).sum())
    assert number > 0  # the rules differ


@each_rule
def test_rules_have_the_codes_of_the_golden_model_within_the_range(rule):
    for grid in grids(*SPECS["uint8"]):
        x = near_ties(grid.scale.item())
        codes = ROUNDINGS[rule].codes(x, grid.scale, grid.zero_point, grid.spec).clamp(0, 255)
        assert torch.equal(codes, GOLDEN[rule].from_float(x, grid))


@each_rule
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_short_floats_have_the_codes_of_the_golden_model(rule, dtype):
    """Codes far from zero have no ties in these types, and a code may lie between two of their floats."""
    for grid in grids(*SPECS["uint4"]):
        x = torch.cat([(torch.arange(-40, 40) + 0.5) * grid.scale, near_ties(grid.scale.item())[:600]]).to(dtype)
        there = moved(x, grid, rule)
        assert there.dtype == dtype
        assert torch.equal(onnx_codes(there, grid), GOLDEN[rule].from_float(x.float(), grid))


@each_rule
def test_what_is_not_finite_does_not_move(rule):
    x = torch.tensor([NAN, INF, -INF])
    for grid in grids(*SPECS["uint8"]):
        assert_same_bits(moved(x, grid, rule), x)


@each_rule
def test_gradient_of_the_move_is_that_of_the_identity(rule):
    for grid in grids(*SPECS["int8 affine"]):
        x = near_ties(grid.scale.item()).requires_grad_()
        factors = torch.arange(len(x)).float()
        moved(x, grid, rule).backward(factors)
        assert torch.equal(x.grad, factors)


# --- quantizers -----------------------------------------------------------------------------------


def quantizer(kind, scale, rule):
    """Returns a quantizer to uint8 with this scale, and a zero point of 100."""
    spec = SPECS["uint8"][0]
    low, high = -100 * scale, 155 * scale
    if kind == "FakeQuantize":
        made = quantizers.FakeQuantize(spec, observers.Fixed(low, high))
    else:
        made = quantizers.LearnedFakeQuantize(spec, init=observers.MinMax()).initialize(torch.tensor([low, high]))
    made.rounding = ROUNDINGS[rule]
    return made


def grid_of(made):
    return values.GridOf(made.scale.detach(), made.zero_point, made.spec)


def codes_of(made, y):
    grid = grid_of(made)
    return torch.round(y.float() / grid.scale) + grid.zero_point


@each_rule
@each_kind
@pytest.mark.parametrize("scale", SCALES)
def test_quantizers_have_the_codes_of_the_golden_model(rule, kind, scale):
    made = quantizer(kind, scale, rule)
    x = near_ties(made.scale.item())
    want = GOLDEN[rule].from_float(x, grid_of(made))
    for mode in (True, False):  # a step of training has the codes of evaluation
        y = made.train(mode)(x)
        assert torch.equal(codes_of(made, y), want)
    without = quantizer(kind, scale, None).eval()
    assert torch.equal(without.scale, made.scale)
    same = want == onnx_codes(x, grid_of(made))
    assert_same_bits(y[same], without(x)[same])


@each_rule
@each_kind
def test_gradient_is_1_within_the_range_and_0_outside(rule, kind):
    for scale in SCALES:
        made = quantizer(kind, scale, rule)
        x = near_ties(made.scale.item()).requires_grad_()
        made(x).backward(torch.full_like(x, 3))
        steps = torch.round(x.detach() / made.scale.detach()) + made.zero_point
        # Beside an end of the range, the side on which a tie lies is that of either rule.
        inside, outside = (steps >= 0) & (steps <= 255), (steps < -1) | (steps > 256)
        assert set(x.grad[inside].tolist()) == {3}
        assert set(x.grad[outside].tolist()) == {0}
        assert set(x.grad.tolist()) == {0, 3}


@each_rule
@each_kind
def test_gradient_is_that_without_the_rule_where_nothing_moves(rule, kind):
    for scale in SCALES:
        grads = []
        for made in (quantizer(kind, scale, rule), quantizer(kind, scale, None)):
            x = near_ties(made.scale.item()).requires_grad_()
            made(x).backward(torch.full_like(x, 3))
            grads.append(x.grad)
        still = moved(x.detach(), grid_of(made), rule) == x.detach()
        assert torch.equal(grads[0][still], grads[1][still])


@each_rule
@each_kind
def test_quantizers_treat_nan_and_infinity_as_without_the_rule(rule, kind):
    x = torch.tensor([NAN, INF, -INF, 0.5])
    for mode in (True, False):
        with_rule, without = (quantizer(kind, 0.1, one).train(mode)(x).detach() for one in (rule, None))
        assert_same_bits(with_rule, without)


@each_rule
@each_kind
def test_quantizers_of_bfloat16_have_the_codes_of_the_golden_model(rule, kind):
    made = quantizer(kind, 0.1, rule).eval()
    x = ((torch.arange(-20, 20) + 0.5) * made.scale.detach()).bfloat16()
    y = made(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(codes_of(made, y), GOLDEN[rule].from_float(x.float(), grid_of(made)))


@each_rule
def test_training_observes_and_then_rounds_as_the_runtime(rule):
    """With a range that follows the data, the codes of a step are those of its new scale."""
    made = quantizers.FakeQuantize(SPECS["uint8"][0], observers.MovingAverage(0.5))
    made.rounding = ROUNDINGS[rule]
    for seed in range(3):
        x = digit_models.digits(16, seed) * (1 + seed / 7)
        y = made.train()(x)
        assert torch.equal(codes_of(made, y), GOLDEN[rule].from_float(x, grid_of(made)))
        assert_same_bits(made.eval()(x), y)


# --- models ---------------------------------------------------------------------------------------

FIRST = {"mlp": "1", "residual": "stem", "depthwise": "0", "encoder": "embed"}
TARGETS = {"openvino": "openvino", "openvino-vnni": "openvino", "xnnpack": "xnnpack"}
MANY = digit_models.digits(64, 3)


def first_quantizer(model, name):
    return model.get_submodule(FIRST[name]).input_quantizer


def input_codes(model, name):
    """Returns the bits of the quantized input of a model, and those of its result."""
    seen = []
    handle = first_quantizer(model, name).register_forward_hook(lambda module, args, y: seen.append(y))
    with torch.no_grad():
        y = model.eval()(MANY)
    handle.remove()
    return seen[0].numpy().tobytes(), y.numpy().tobytes()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", FIRST)
def test_only_quantizers_of_inputs_have_a_rule(name, target):
    model = digit_models.prepared(name, "int8", target)
    assert input_rounding.rounded_quantizers(model) == [f"{FIRST[name]}.input_quantizer"]
    assert first_quantizer(model, name).rounding is ROUNDINGS[TARGETS[target]]
    for other in ("generic", "onnxruntime-x86", "onnxruntime-vnni", "tensorrt"):
        assert input_rounding.rounded_quantizers(digit_models.prepared(name, "int8", other)) == []


@pytest.mark.parametrize("target", ["openvino", "xnnpack"])
@pytest.mark.parametrize(("name", "recipe"), [("mlp", "lsq"), ("residual", "int8"), ("encoder", "w4a8")])
def test_rule_survives_copies_and_saved_states(name, recipe, target):
    model = digit_models.calibrated(name, recipe, target)
    with torch.no_grad():  # a scale at which the rules differ
        quantizer = first_quantizer(model, name)
        pixels = [k / 16 / (n + 0.5) for n in range(128) for k in (3, 7, 11, 13)]  # some pixels are ties
        set_scale(quantizer, next(scale for scale in pixels if differs(scale, quantizer, TARGETS[target])))
    want = input_codes(model, name)
    copies = {"deepcopy": copy.deepcopy(model), "pickle": pickle.loads(pickle.dumps(model))}
    copies["state"] = digit_models.prepared(name, recipe, target)
    copies["state"].load_state_dict(model.state_dict())
    for how, one in copies.items():
        assert first_quantizer(one, name).rounding is ROUNDINGS[TARGETS[target]], how
        assert input_codes(one, name) == want, how
        assert input_codes(one.train(), name) == want, how
    first_quantizer(model, name).rounding = None
    assert input_codes(model, name)[0] != want[0]  # what is tested is not void


def differs(scale, quantizer, rule):
    """Returns True if the rule gives the images other codes than ONNX does, at this scale."""
    grid = values.GridOf(torch.tensor(np.float32(scale)), quantizer.zero_point, quantizer.spec)
    return not torch.equal(GOLDEN[rule].from_float(MANY, grid), onnx_codes(MANY, grid))


def set_scale(quantizer, scale):
    quantizer.frozen = True
    with torch.no_grad():
        if isinstance(quantizer, quantizers.LearnedFakeQuantize):
            quantizer.step_size.fill_(scale)
            quantizer.last_scale.fill_(scale)
        else:
            quantizer.scale.fill_(scale)
    assert quantizer.scale.item() == np.float32(scale)


@pytest.mark.parametrize("target", ["openvino", "xnnpack"])
def test_golden_model_has_the_input_codes_of_the_prepared_model(target):
    model = digit_models.calibrated("mlp", "int8", target)
    golden, seen = fq.convert(model), []
    for one in (golden, model):
        first_quantizer(one, "mlp").register_forward_hook(lambda module, args, y: seen.append(values.plain(y)))
        one.eval()(MANY)
    assert_same_bits(seen[0], seen[1])


class Branching(torch.nn.Module):
    """Only an example shows what its layers read."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 8), torch.nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x.flatten(1))
        return self.second(torch.relu(x) if x.sum() > -1e9 else x)


@pytest.mark.parametrize("target", ["openvino", "xnnpack"])
def test_rule_of_a_model_with_branches_is_saved(target):
    config = fq.recipes.int8(target=target)
    model = fq.prepare(Branching(), config, MANY)
    fq.calibrate(model, [MANY], progress=False)
    assert input_rounding.rounded_quantizers(model) == ["first.input_quantizer"]
    again = fq.prepare(Branching(), config, MANY)
    again.load_state_dict(model.state_dict())
    assert input_rounding.rounded_quantizers(again) == ["first.input_quantizer"]
    with torch.no_grad():
        assert_same_bits(again.eval()(MANY), model.eval()(MANY))
