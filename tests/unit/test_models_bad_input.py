"""Bad input of whole models: an error or a listing that says what to do, and the model as it was before the call."""

import copy
import json

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
nn = torch.nn
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = randn(6, 4)


class Counts(nn.Module):
    """Counts its calls, as caches and embeddings that follow an average do, in evaluation too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.gain


def five():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))


def prepared(config=None, calibrated=False):
    model = fq.prepare(small(), config or recipes.int8())
    return calibrate(model, [X]) if calibrated else model


def calibrate(model, data, *args):
    return fq.calibrate(model, data, *args, progress=False)


class Picture:
    """Everything a model is: classes, attributes, hooks, tensors and their bits, modes, switches; and torch's mode."""

    def __init__(self, model):
        self.modules = {name: (module, type(module)) for name, module in model.named_modules()}
        self.attributes = {name: self._attributes(module) for name, module in model.named_modules()}
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self.tensors = {name: (t, None if t.is_meta else t.detach().clone(), t.requires_grad) for name, t in tensors}
        self.counts = {path: (q.nonfinite, q._told) for path, q in fqnn.quantizers(model)}
        self.grad_mode = torch.is_grad_enabled()

    @staticmethod
    def _attributes(module):
        """With hooks by their number, and without what is as the class says."""
        skipped = ("saw_only_finite", "_nonfinite", "_parameters", "_buffers")
        nothing = object()
        return {
            name: list(value.items()) if hasattr(value, "items") else value
            for name, value in vars(module).items()
            if name not in skipped and value is not getattr(type(module), name, nothing)
        }

    def assert_unchanged(self, model):
        now = Picture(model)
        assert now.modules == self.modules
        assert now.attributes == self.attributes
        assert now.counts == self.counts
        assert now.grad_mode == self.grad_mode
        assert list(now.tensors) == list(self.tensors)
        for name, (tensor, value, requires_grad) in self.tensors.items():
            assert now.tensors[name][0] is tensor, name
            assert tensor.requires_grad == requires_grad, name
            assert tensor.grad is None, name
            if value is not None:
                assert_same_bits(value.numpy(), tensor.detach().numpy(), name)


def assert_refused(model, action, error, *words):
    """`action` fails with all these words in its message, and the model is what it was."""
    before = Picture(model)
    with pytest.raises(error) as caught:
        action()
    for word in words:
        assert word in str(caught.value), f"the message does not say {word!r}: {caught.value}"
    before.assert_unchanged(model)


# --- a config that matches nothing --------------------------------------------------------------------

NAMED = {"encoder": nn.Linear, "head": nn.Linear}


def named():
    return nn.ModuleDict({name: make(4, 4) for name, make in NAMED.items()})


NOTHING = {
    "a path with a typo": (fq.QuantConfig().rule("haed", weight=presets.int8()), ["path='haed'", "near: head"]),
    "another case": (fq.QuantConfig().rule("HEAD*", weight=presets.int8()), ["path='HEAD*'", "matches nothing"]),
    "a type that is not there": (fq.QuantConfig().rule(type="Conv2d", weight=presets.int8()), ["type='Conv2d'"]),
    "a string that is no type": (fq.QuantConfig().rule(type="linear", weight=presets.int8()), ["type='linear'"]),
    "nothing at all": (fq.QuantConfig(), ["encoder: the config says so", "head: the config says so"]),
    "a rule without specs": (fq.QuantConfig().rule("head"), ["head: the config has no spec for any of its tensors"]),
}


@pytest.mark.parametrize(("config", "words"), NOTHING.values(), ids=NOTHING)
def test_a_config_that_matches_nothing_is_refused_with_the_reasons(config, words):
    model = named()
    assert_refused(model, lambda: fq.prepare(model, config), ValueError, "Nothing in the model", *words)


def test_one_rule_of_two_that_matches_nothing_is_listed():
    with pytest.warns(UserWarning, match="match no module"):
        model = fq.prepare(named(), recipes.int8().skip("haed").rule(type="linear", weight=presets.int4(group=None)))
    text = str(fq.summary(model))
    assert "Rule(path='haed', type=None)" in text
    assert "Rule(path='*', type='linear')" in text
    assert len(fq.summary(model).layers) == 2


# --- models that cannot be prepared -------------------------------------------------------------------


def test_preparing_twice_is_refused_with_the_way_back():
    model = prepared(calibrated=True)
    assert_refused(model, lambda: fq.prepare(model, recipes.lsq(4)), ValueError, "already", "0", "unprepare(model)")


def test_a_model_with_a_prepared_part_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), prepared())
    assert_refused(model, lambda: fq.prepare(model, recipes.int8()), ValueError, "already", "1.0")


@pytest.mark.parametrize("recipe", [recipes.int8(), recipes.lsq(4)], ids=["int8", "lsq"])
@pytest.mark.parametrize("part", [None, "4"], ids=["all of it", "the last layer"])
def test_a_model_on_meta_is_refused_with_the_parameter_and_the_fix(recipe, part):
    model = small()
    (model if part is None else model.get_submodule(part)).to("meta")
    first = f"{part or '0'}.weight"
    assert_refused(model, lambda: fq.prepare(model, recipe), ValueError, first, "meta", "to_empty", "load its state")


@pytest.mark.parametrize("recipe", [recipes.int8(), recipes.lsq(4)], ids=["int8", "lsq"])
def test_a_lazy_layer_beside_others_is_listed_and_stays_lazy(recipe):
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3))
    fq.prepare(model, recipe)
    assert type(model[1]) is nn.LazyLinear
    assert "no shape yet" in fq.summary(model).floats["1"]
    assert "run the model once" in str(fq.summary(model))


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(3), lambda: nn.LazyConv2d(3, 3)], ids=["Linear", "Conv2d"])
def test_a_model_of_lazy_layers_only_is_refused_with_the_fix(make):
    model = nn.Sequential(make())
    with pytest.raises(ValueError, match="no shape yet; run the model once first"):
        fq.prepare(model, recipes.int8())
    assert nn.parameter.is_lazy(model[0].weight)


# --- rules for what cannot be quantized ---------------------------------------------------------------


def with_others():
    return nn.ModuleDict(
        {"fc": nn.Linear(4, 4), "lstm": nn.LSTM(4, 4), "norm": nn.BatchNorm2d(4), "relu": nn.ReLU(), "own": Own()}
    )


CANNOT = {
    "LSTM": ("lstm", "recurrent"),
    "BatchNorm2d": ("norm", "batch norm"),
    "Own": ("own", "Own is not a supported layer type"),
    "ReLU": ("relu", "ReLU"),
}
each_type = pytest.mark.parametrize(("kind", "path", "reason"), [(k, *v) for k, v in CANNOT.items()], ids=CANNOT)


@each_type
def test_a_config_only_for_what_cannot_be_quantized_is_refused_with_the_reason(kind, path, reason):
    model, config = with_others(), fq.QuantConfig().rule(type=kind, weight=presets.int8())
    assert_refused(model, lambda: fq.prepare(model, config), ValueError, "Nothing in the model", path, reason)


@each_type
def test_a_rule_for_what_cannot_be_quantized_is_listed_with_the_reason(kind, path, reason):
    model = with_others()
    before = Picture(model.get_submodule(path))
    fq.prepare(model, recipes.int8().rule(type=kind, weight=presets.int8()))
    text = str(fq.summary(model))
    assert path in text
    assert reason in text
    before.assert_unchanged(model.get_submodule(path))


@pytest.mark.parametrize("kind", [nn.LSTM, 3, nn.ReLU()], ids=["a class", "a number", "a module"])
def test_a_type_that_is_no_name_is_a_type_error_with_an_example(kind):
    with pytest.raises(TypeError, match=r"`type` must be the name of a class, such as 'Linear', got"):
        recipes.int8().rule(type=kind, weight=presets.int8())


MISFITS = {
    "groups that do not divide": (presets.int4(group=3), ["`group_size` 3 does not divide", "length 4"]),
    "an axis that is not there": (fq.QuantSpec(axis=5), ["5"]),
}


@pytest.mark.parametrize(("spec", "words"), MISFITS.values(), ids=MISFITS)
def test_a_rule_with_a_spec_that_does_not_fit_its_layer_is_listed_with_the_sizes(spec, words):
    with pytest.warns(UserWarning, match="does not fit"):
        model = fq.prepare(five(), recipes.int8().rule("2", weight=spec))
    found = fq.summary(model)
    assert [layer.path for layer in found.layers] == ["0", "1", "3", "4"]
    for word in words:
        assert word in found.floats["2"]
    assert type(model[2]) is nn.Linear
    calibrate(model, [X])


# --- half-way in prepare ------------------------------------------------------------------------------


class Registered(nn.Linear):
    """Of a class that nothing can be derived from without being asked for more."""

    def __init_subclass__(cls, **options):
        if "name" not in options:
            raise TypeError("name your layer: class Mine(Registered, name=...)")


def third_has_no_values():
    model = five()
    nn.init.constant_(model[2].weight, torch.nan)
    return model


def third_has_a_class_of_its_own():
    model = five()
    model[2] = Registered(4, 4)
    return model


@pytest.mark.filterwarnings("ignore:.*NaN or infinite:RuntimeWarning")
@pytest.mark.parametrize("make", [third_has_no_values, third_has_a_class_of_its_own], ids=["NaN", "class"])
def test_what_fails_at_the_third_layer_leaves_the_others_as_they_were_or_is_listed(make):
    model = make()
    model[0].register_forward_hook(lambda *_: None)
    before = Picture(model)
    try:
        fq.prepare(model, recipes.lsq(4))
    except (ValueError, TypeError, RuntimeError) as error:
        assert "2" in str(error), "the message does not say where"  # noqa: PT017
        before.assert_unchanged(model)
    else:
        assert "2" in fq.summary(model).floats


# --- calibrate ----------------------------------------------------------------------------------------

EMPTY = {
    "a list of nothing": lambda: ([],),
    "an exhausted generator": lambda: ((x for x in ()),),
    "no steps": lambda: ([X], 0),
    "a function that does not run the model": lambda: (lambda model: None,),
    "batches of no rows": lambda: ([X[:0], X[:0]],),
}


@pytest.mark.parametrize("recipe", [recipes.int8(), recipes.lsq(4)], ids=["int8", "lsq"])
@pytest.mark.parametrize("data", EMPTY.values(), ids=EMPTY)
def test_calibrating_with_nothing_is_refused(data, recipe):
    model = prepared(recipe)
    assert_refused(model, lambda: calibrate(model, *data()), ValueError, "nothing to calibrate with")


@pytest.mark.parametrize("steps", [-1, 2.5, "3"], ids=repr)
def test_steps_that_are_no_number_of_steps_are_refused(steps):
    model = prepared()
    assert_refused(model, lambda: calibrate(model, [X], steps), (ValueError, TypeError), "`steps`", repr(steps))


@pytest.mark.parametrize("data", [None, 3, torch.tensor(1.0)], ids=["None", "a number", "a scalar"])
def test_data_that_is_no_data_is_refused(data):
    model = prepared()
    assert_refused(model, lambda: calibrate(model, data), TypeError, "`data`")


def test_a_single_batch_that_is_a_dict_is_refused():
    model = prepared()
    assert_refused(model, lambda: calibrate(model, {"input": X}), TypeError, "got one dict", "[batch]")


HALF_WAY = {
    "wrong shape": (lambda: randn(3, 7), RuntimeError, "7"),
    "integers": (lambda: torch.ones(3, 4, dtype=torch.int64), TypeError, "int64"),
    "NumPy": (lambda: X.numpy(), TypeError, "ndarray"),
    "a wrong key": (lambda: {"inptu": X}, TypeError, "inptu"),
    "a key that is no string": (lambda: {1: X}, TypeError, "strings"),
    "an empty tuple": (lambda: (), TypeError, "input"),
    "text": (lambda: ("text",), TypeError, "str"),
}
CONFIGS = {
    "int8": recipes.int8(),
    "lsq": recipes.lsq(4),
    "int8_dynamic": recipes.int8_dynamic(),
    "searched": recipes.int8().rule(activation_observer=fq.observers.Histogram(bins=64, steps=8)),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def odd_modes(model):
    """Modes and switches that no single call would give back."""
    model.train()
    model[1].eval()
    model[4].eval()
    model[4].weight_quantizer.quantizing = False
    return model


@pytest.mark.parametrize(("batch", "error", "word"), HALF_WAY.values(), ids=HALF_WAY)
@each_config
def test_a_bad_batch_half_way_leaves_the_model_as_it_was(batch, error, word, config):
    model = odd_modes(prepared(config))
    assert_refused(model, lambda: calibrate(model, [X, 9 * X, batch(), X]), error, word)


@each_config
def test_a_bad_batch_after_a_calibration_leaves_its_ranges(config):
    model = odd_modes(prepared(config, calibrated=True))
    # Where every scale is learned there is nothing left to calibrate, which is an error of its own.
    assert_refused(model, lambda: calibrate(model, [9 * X, randn(3, 7)]), (RuntimeError, ValueError))


def interrupted(error):
    def run(model):
        model(9 * X)
        raise error

    return run


def interrupted_generator(error):
    yield 9 * X
    raise error


@pytest.mark.parametrize("data", [interrupted, interrupted_generator], ids=["function", "generator"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError], ids=lambda e: e.__name__)
@each_config
def test_an_interruption_leaves_the_model_as_it_was(data, error, config):
    model = odd_modes(prepared(config))
    assert_refused(model, lambda: calibrate(model, data(error)), error)


@pytest.mark.filterwarnings("ignore:.*NaN or infinite:RuntimeWarning")
@each_config
def test_nan_before_a_bad_batch_is_not_remembered(config):
    model = odd_modes(prepared(config))
    half = X.clone()
    half[0] = torch.nan
    assert_refused(model, lambda: calibrate(model, [half, randn(3, 7)]), RuntimeError)


def test_an_interruption_inside_no_grad_stays_inside_no_grad():
    model = prepared()
    with torch.no_grad():
        assert_refused(model, lambda: calibrate(model, [X, randn(3, 7)]), RuntimeError)


def test_buffers_of_the_model_itself_are_as_before_a_bad_batch():
    model = fq.prepare(nn.Sequential(Counts(), nn.Linear(4, 4)), recipes.int8())
    assert_refused(model, lambda: calibrate(model, [X, randn(3, 7)]), RuntimeError)


def test_a_model_without_quantizers_is_refused_with_the_fix():
    model = small()
    assert_refused(
        model, lambda: calibrate(model, [X]), ValueError, "no quantizers", "fakequant.prepare(model, config)"
    )


def test_a_frozen_model_is_refused_with_the_reason():
    model = prepared(calibrated=True)
    fqnn.switch_quantizers(model, frozen=True)
    assert_refused(model, lambda: calibrate(model, [X]), ValueError, "frozen")


# --- schedule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quantize_from", "freeze_ranges_at", "freeze_norms_at"])
@pytest.mark.parametrize("value", [-1, True], ids=repr)
def test_a_step_that_is_no_step_is_refused_and_nothing_is_switched(name, value):
    model = prepared()
    assert_refused(model, lambda: fq.Schedule(model, **{name: value}), ValueError, f"`{name}`", repr(value), "steps")


def test_a_schedule_of_positions_is_a_type_error():
    with pytest.raises(TypeError):
        fq.Schedule(prepared(), 1, 2, 3)


def test_a_schedule_for_a_model_without_quantizers_is_refused_with_the_fix():
    model = small()
    action = lambda: fq.Schedule(model, quantize_from=1, freeze_norms_at=0)  # noqa: E731
    assert_refused(model, action, ValueError, "fakequant.prepare")


@pytest.mark.parametrize("state", [{}, {"steps": -3}, {"steps": "x"}, {"steps": None}], ids=repr)
def test_a_state_that_is_none_of_a_schedule_is_refused(state):
    model = prepared()
    schedule = fq.Schedule(model, quantize_from=2)
    assert_refused(model, lambda: schedule.load_state_dict(state), (ValueError, TypeError), "steps")
    assert schedule.steps == 0


# --- health and summary -------------------------------------------------------------------------------


def test_health_of_a_model_without_quantizers_is_refused_with_the_fix():
    model = small()
    assert_refused(model, lambda: fq.health(model, [X]), ValueError, "fakequant.prepare")


def test_health_with_data_of_nothing_says_that_nothing_is_known():
    model = prepared(calibrated=True)
    before = Picture(model)
    found = fq.health(model, [])
    assert found.to_dict()["0.input_quantizer"]["clipped"] is None
    before.assert_unchanged(model)


def test_health_of_a_model_without_scales_says_which_and_what_to_do():
    model = prepared()
    assert_refused(model, lambda: fq.health(model, [X]), RuntimeError, "0.input_quantizer", "calibrate it first")


WATCHED = {name: HALF_WAY[name] for name in ("wrong shape", "NumPy", "a wrong key")}


@pytest.mark.parametrize(("batch", "error", "word"), WATCHED.values(), ids=WATCHED)
@each_config
def test_health_with_a_bad_batch_leaves_the_model_as_it_was(batch, error, word, config):
    model = odd_modes(prepared(config, calibrated=True))
    assert_refused(model, lambda: fq.health(model, [X, 9 * X, batch()]), error, word)


def test_health_of_a_convolution_with_ranges_found_at_run_time_leaves_its_buffers():
    model = fq.prepare(nn.Sequential(nn.Conv1d(4, 4, 1)), recipes.int8_dynamic())
    x = randn(2, 4, 3)
    calibrate(model, [x])
    assert_refused(model, lambda: fq.health(model, [9 * x, X[:, :3]]), RuntimeError)


@pytest.mark.parametrize("call", [fq.summary, fq.unprepare], ids=["summary", "unprepare"])
@pytest.mark.parametrize("part", [None, "1"], ids=["float", "a part"])
def test_what_is_not_prepared_is_refused_with_the_way(call, part):
    model = small() if part is None else nn.Sequential(nn.ReLU(), prepared())
    assert_refused(model, lambda: call(model), ValueError, "not prepared", "fakequant.prepare")


CALLS = {
    "calibrate": lambda: calibrate(None, [X]),
    "Schedule": lambda: fq.Schedule(None, quantize_from=1),
    "health": lambda: fq.health(None),
    "summary": lambda: fq.summary(None),
    "unprepare": lambda: fq.unprepare(None),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_no_module_is_a_type_error(call):
    with pytest.raises(TypeError, match="`model` must be"):
        call()


# --- configs from text --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "{", '{"default": }', "int8"], ids=repr)
def test_broken_json_is_a_value_error_that_says_where(text):
    with pytest.raises(ValueError, match=r"line 1 column \d+"):
        fq.QuantConfig.from_json(text)


WRONG = {
    "rules: a number": ({"rules": 3}, "rules"),
    "rules: null": ({"rules": None}, "rules"),
    "rules: an object": ({"rules": {"path": "a"}}, "`rules` must be a list"),
    "rules: strings": ({"rules": ["head"]}, "Rule is read from a dict"),
    "rules: a path that is a number": ({"rules": [{"path": 3}]}, "`path` must be a path"),
    "target: a list": ({"target": ["generic"]}, "`target` must be one of"),
    "target: null": ({"target": None}, "`target` must be one of generic"),
    "a spec: a number": ({"default": {"weight": 8}}, "QuantSpec"),
    "a spec: its name": ({"operands": "uint8"}, "QuantSpec"),
    "a spec: too many bits": ({"default": {"weight": {"bits": 99}}}, "`bits` must be between 2 and 32"),
    "an observer: its name": ({"default": {"weight_observer": "MinMax"}}, "bserver"),
    "an observer: nothing": ({"default": {"weight_observer": {}}}, "`kind` must be one of"),
    "save_codes: a number": ({"save_codes": 1}, "`save_codes` must be True or False, got 1"),
    "a recipe": ({"int8": {}}, "no field 'int8'; it has default, rules"),
}


@pytest.mark.parametrize(("fields", "words"), WRONG.values(), ids=WRONG)
def test_json_with_a_field_of_the_wrong_kind_says_which(fields, words):
    with pytest.raises((ValueError, TypeError), match=words):
        fq.QuantConfig.from_json(json.dumps(fields))


def test_reading_a_config_leaves_what_it_is_read_from():
    fields = recipes.int8().skip("head").to_dict()
    before = copy.deepcopy(fields)
    fq.QuantConfig.from_dict(fields)
    assert fields == before


@pytest.mark.parametrize("bits", [0, 1, 33, "4", 2.0], ids=repr)
def test_a_recipe_with_impossible_bits_is_refused(bits):
    with pytest.raises((ValueError, TypeError), match=rf"`bits` must be .*, got {bits!r}"):
        recipes.lsq(bits)


@pytest.mark.parametrize("group", [0, "x", 2.5], ids=repr)
def test_a_recipe_with_impossible_groups_is_refused(group):
    with pytest.raises((ValueError, TypeError), match=rf"`group_size` must be .*, got {group!r}"):
        recipes.int4_weight_only(group)
