"""`calibrate`, `Schedule` and `health` on bad data: an error with the fix, and an unchanged model."""

import re

import pytest

import fakequant as fq
from model_snapshots import Snapshot, X, assert_refused, calibrate, prepared, randn, small

torch = pytest.importorskip("torch")
nn = torch.nn
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")


class Counts(nn.Module):
    """Counts its calls in a buffer, in evaluation too."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


# --- calibrate --------------------------------------------------------------------------------------

EMPTY = {
    "an empty list": lambda: ([],),
    "an exhausted generator": lambda: ((x for x in ()),),
    "zero steps": lambda: ([X], 0),
    "a function that does not run the model": lambda: (lambda model: None,),
    "empty batches": lambda: ([X[:0], X[:0]],),
}


@pytest.mark.parametrize("recipe", [recipes.int8(), recipes.lsq(4)], ids=["int8", "lsq"])
@pytest.mark.parametrize("data", EMPTY.values(), ids=EMPTY)
def test_calibrate_without_data_is_refused(data, recipe):
    model = prepared(recipe)
    assert_refused(model, lambda: calibrate(model, *data()), ValueError, "nothing to calibrate with")


@pytest.mark.parametrize("steps", [-1, 2.5, "3"], ids=repr)
def test_calibrate_refuses_invalid_steps(steps):
    model = prepared()
    assert_refused(model, lambda: calibrate(model, [X], steps), (ValueError, TypeError), "`steps`", repr(steps))


@pytest.mark.parametrize("data", [None, 3, torch.tensor(1.0)], ids=["None", "a number", "a scalar"])
def test_calibrate_refuses_data_that_is_not_iterable(data):
    model = prepared()
    assert_refused(model, lambda: calibrate(model, data), TypeError, "`data`")


def test_calibrate_refuses_a_single_dict_and_suggests_a_list():
    model = prepared()
    assert_refused(model, lambda: calibrate(model, {"input": X}), TypeError, "got one dict", "[batch]")


HALF_WAY = {
    "wrong shape": (lambda: randn(3, 7), RuntimeError, "7"),
    "integers": (lambda: torch.ones(3, 4, dtype=torch.int64), TypeError, "int64"),
    "NumPy": (lambda: X.numpy(), TypeError, "ndarray"),
    "a wrong key": (lambda: {"inptu": X}, TypeError, "inptu"),
    "a key that is not a string": (lambda: {1: X}, TypeError, "strings"),
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
    """Sets modes and switches that no single call would restore."""
    model.train()
    model[1].eval()
    model[4].eval()
    model[4].weight_quantizer.quantizing = False
    return model


@pytest.mark.parametrize(("batch", "error", "word"), HALF_WAY.values(), ids=HALF_WAY)
@each_config
def test_bad_batch_halfway_leaves_the_model_unchanged(batch, error, word, config):
    model = odd_modes(prepared(config))
    assert_refused(model, lambda: calibrate(model, [X, 9 * X, batch(), X]), error, word)


@each_config
def test_bad_batch_after_a_calibration_leaves_its_ranges(config):
    model = odd_modes(prepared(config, calibrated=True))
    # If every scale is learned, there is nothing left to calibrate, which raises ValueError.
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
def test_interruption_leaves_the_model_unchanged(data, error, config):
    model = odd_modes(prepared(config))
    assert_refused(model, lambda: calibrate(model, data(error)), error)


@pytest.mark.filterwarnings("ignore:.*NaN or infinite:RuntimeWarning")
@each_config
def test_nan_before_a_bad_batch_is_not_counted(config):
    model = odd_modes(prepared(config))
    half = X.clone()
    half[0] = torch.nan
    assert_refused(model, lambda: calibrate(model, [half, randn(3, 7)]), RuntimeError)


def test_failed_calibration_inside_no_grad_leaves_no_grad_active():
    model = prepared()
    with torch.no_grad():
        assert_refused(model, lambda: calibrate(model, [X, randn(3, 7)]), RuntimeError)


def test_failed_calibration_restores_buffers_of_the_model():
    model = fq.prepare(nn.Sequential(Counts(), nn.Linear(4, 4)), recipes.int8(), X)
    assert_refused(model, lambda: calibrate(model, [X, randn(3, 7)]), RuntimeError)


def test_calibrate_refuses_a_model_without_quantizers_with_the_fix():
    model = small()
    assert_refused(
        model, lambda: calibrate(model, [X]), ValueError, "no quantizers", "fakequant.prepare(model, config)"
    )


def test_calibrate_refuses_a_frozen_model_with_the_reason():
    model = prepared(calibrated=True)
    fqnn.switch_quantizers(model, frozen=True)
    assert_refused(model, lambda: calibrate(model, [X]), ValueError, "frozen")


# --- schedule ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quantize_from", "freeze_ranges_at", "freeze_norms_at"])
@pytest.mark.parametrize("value", [-1, True], ids=repr)
def test_schedule_refuses_an_invalid_step_and_switches_nothing(name, value):
    model = prepared()
    assert_refused(model, lambda: fq.Schedule(model, **{name: value}), ValueError, f"`{name}`", repr(value), "steps")


def test_schedule_takes_keyword_arguments_only():
    with pytest.raises(TypeError):
        fq.Schedule(prepared(), 1, 2, 3)


def test_schedule_refuses_a_model_without_quantizers_with_the_fix():
    model = small()
    action = lambda: fq.Schedule(model, quantize_from=1, freeze_norms_at=0)  # noqa: E731
    assert_refused(model, action, ValueError, "fakequant.prepare")


@pytest.mark.parametrize("state", [{}, {"steps": -3}, {"steps": "x"}, {"steps": None}], ids=repr)
def test_schedule_refuses_an_invalid_state(state):
    model = prepared()
    schedule = fq.Schedule(model, quantize_from=2)
    assert_refused(model, lambda: schedule.load_state_dict(state), (ValueError, TypeError), "steps")
    assert schedule.steps == 0


# --- health and summary -----------------------------------------------------------------------------


def test_health_refuses_a_model_without_quantizers_with_the_fix():
    model = small()
    assert_refused(model, lambda: fq.health(model, [X]), ValueError, "fakequant.prepare")


def test_health_without_batches_reports_clipped_as_none():
    model = prepared(calibrated=True)
    before = Snapshot(model)
    found = fq.health(model, [])
    assert found.to_dict()["0.input_quantizer"]["clipped"] is None
    before.assert_unchanged(model)


def test_health_refuses_a_model_without_scales_and_names_the_quantizer():
    model = prepared()
    assert_refused(model, lambda: fq.health(model, [X]), RuntimeError, "0.input_quantizer", "calibrate it first")


WATCHED = {name: HALF_WAY[name] for name in ("wrong shape", "NumPy", "a wrong key")}


@pytest.mark.parametrize(("batch", "error", "word"), WATCHED.values(), ids=WATCHED)
@each_config
def test_health_with_a_bad_batch_leaves_the_model_unchanged(batch, error, word, config):
    model = odd_modes(prepared(config, calibrated=True))
    assert_refused(model, lambda: fq.health(model, [X, 9 * X, batch()]), error, word)


def test_health_with_a_bad_batch_leaves_buffers_of_dynamic_quantizers_unchanged():
    model = fq.prepare(nn.Sequential(nn.Conv1d(4, 4, 1)), recipes.int8_dynamic())
    x = randn(2, 4, 3)
    calibrate(model, [x])
    assert_refused(model, lambda: fq.health(model, [9 * x, X[:, :3]]), RuntimeError)


@pytest.mark.parametrize("call", [fq.summary, fq.unprepare], ids=["summary", "unprepare"])
@pytest.mark.parametrize("part", [None, "1"], ids=["float", "a part"])
def test_summary_and_unprepare_refuse_a_model_that_is_not_prepared(call, part):
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
def test_functions_on_models_refuse_a_non_module(call):
    with pytest.raises(TypeError, match="`model` must be"):
        call()


def notes_of(call):
    """Returns the notes of the error that a call raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return getattr(caught.value, "__notes__", [])


def test_errors_of_the_model_say_which_batch_it_was_and_which_argument_got_what(tmp_path):
    model, wrong = prepared(), X[:, :1]
    got = f"Sequential.forward(input) got input: float32 of shape {tuple(wrong.shape)}."
    said = f"This happened with batch 2 of `data`: {got} Not passed: float32 of shape {tuple(X.shape)}."
    assert notes_of(lambda: calibrate(model, [X, (wrong, X)])) == [said]
    (note,) = notes_of(lambda: calibrate(model, [{"x": X}]))
    assert note == (
        f"This happened with batch 1 of `data`: Sequential.forward(input) got x: float32 of shape {tuple(X.shape)}."
    )
    assert notes_of(lambda: fq.prepare(small(), recipes.int8(), wrong)) == [f"This happened with `example`: {got}"]
    calibrate(model, [X])
    with pytest.raises(ValueError, match=re.escape(got)):
        fq.export_onnx(model, tmp_path / "model.onnx", wrong)


@pytest.mark.parametrize("rest", [(), (X,)])
def test_batches_with_the_target_first_are_refused_with_the_fix(rest):
    labels = torch.zeros(len(X), dtype=torch.long)
    said = (
        "seems to be (target, input)",
        f"got input: int64 of shape ({len(X)},). Not passed: float32",
        "(x, y) for y, x",
    )
    model = prepared()
    assert_refused(model, lambda: calibrate(model, [X, (labels, X, *rest)]), ValueError, "batch 2 of `data`", *said)
    model = small()
    assert_refused(model, lambda: fq.prepare(model, recipes.int8(), [labels, X]), ValueError, "`example`", *said)


def test_a_numpy_batch_is_refused_with_the_fix():
    model = prepared()
    assert_refused(model, lambda: calibrate(model, [X.numpy()]), TypeError, "got ndarray", "torch.from_numpy(batch)")
