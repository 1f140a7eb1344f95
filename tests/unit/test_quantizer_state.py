"""States of quantizers: saved, loaded, copied and averaged; what does not fit says why."""

import copy
import io
import pickle
import warnings

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
observers = pytest.importorskip("fakequant.observers")
swa = pytest.importorskip("torch.optim.swa_utils")

torch.manual_seed(0)
X = torch.randn(6, 8)
WIDE = torch.linspace(-9, 9, 48).view(6, 8)
AFFINE, CHANNEL, GROUP = presets.uint4(), presets.int8(), presets.int4(group=4)
HISTOGRAM = observers.Histogram(bins=64, steps=8)
LEARNED_AFFINE = fq.QuantSpec(bits=4, symmetric=False, axis=0)
KINDS = {
    "MinMax": lambda **o: fqnn.FakeQuantize(AFFINE, observers.MinMax(), **o),
    "MovingAverage": lambda **o: fqnn.FakeQuantize(CHANNEL, observers.MovingAverage(0.3), shape=(6, 8), **o),
    "Dynamic": lambda **o: fqnn.FakeQuantize(GROUP, observers.Dynamic(), shape=(6, 8), **o),
    "token": lambda **o: fqnn.FakeQuantize(presets.int8_per_token(), **o),
    "Percentile": lambda **o: fqnn.FakeQuantize(CHANNEL, observers.Percentile(90.0, bins=64), shape=(6, 8), **o),
    "Histogram": lambda **o: fqnn.FakeQuantize(AFFINE, HISTOGRAM, **o),
    "MSE": lambda **o: fqnn.FakeQuantize(AFFINE, observers.MSE(steps=8), **o),
    "Entropy": lambda **o: fqnn.FakeQuantize(AFFINE, observers.Entropy(bins=64, steps=8), **o),
    "Fixed": lambda **o: fqnn.FakeQuantize(AFFINE, observers.Fixed(-1.0, 0.5), **o),
    "fused": lambda **o: fqnn.FusedFakeQuantize(fq.QuantSpec(symmetric=False, numerics="torch"), **o),
    "LSQ": lambda **o: fqnn.LearnedFakeQuantize(GROUP, shape=(6, 8), **o),
    "LSQ+": lambda **o: fqnn.LearnedFakeQuantize(LEARNED_AFFINE, shape=(6, 8), **o),
    "LSQ, fixed offset": lambda **o: fqnn.LearnedFakeQuantize(AFFINE, learn_zero_point=False, **o),
    "PACT": lambda **o: fqnn.PACT(4, 1.5, **o),
}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
OBSERVED = {name: make for name, make in KINDS.items() if not name.startswith(("token", "Fixed", "LSQ", "PACT"))}
SWITCHES = ("observing", "quantizing", "frozen")


def same(expected, actual, *names):
    assert expected.dtype == actual.dtype, names
    assert_same_bits(expected.detach().numpy(), actual.detach().numpy(), *names)


def same_state(expected, actual):
    assert list(expected) == list(actual)
    for name, value in expected.items():
        same(value, actual[name], name)


def trained(make):
    module = make()
    if isinstance(module, fqnn.LearnedFakeQuantize):
        module.initialize(X)
    module(X)
    module(X * 1.5)
    return module


def snapshot(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def through_a_file(state, **options):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


def assert_same_module(expected, actual):
    """They compute the same from now on, and go on observing alike."""
    same_state(expected.state_dict(), actual.state_dict())
    assert str(expected) == str(actual)
    for training in (False, True, False):
        same(expected.train(training)(WIDE), actual.train(training)(WIDE), "y")
        same_state(expected.state_dict(), actual.state_dict())


# --- save and load --------------------------------------------------------------------------------


@each_kind
def test_a_state_goes_through_a_file(make):
    module, other = trained(make), make()
    assert str(other.load_state_dict(through_a_file(module.state_dict()))) == "<All keys matched successfully>"
    assert_same_module(module, other)


@each_kind
def test_a_state_of_nothing_yet_loads_too(make):
    module, other = make(), trained(make)
    other.load_state_dict(through_a_file(module.state_dict()))
    same_state(make().state_dict(), other.state_dict())
    if module.state_dict().keys() & {"running_min"} and module.scale.isnan().any():
        with pytest.raises(RuntimeError, match="has not observed a finite value"):
            other.eval().qparams()


@each_kind
def test_a_state_holds_tensors_only_in_shapes_that_never_change(make):
    new, module = make(), trained(make)
    state = module.state_dict()
    assert all(type(value) in (torch.Tensor, torch.nn.Parameter) for value in state.values())
    assert all(value.is_contiguous() for value in state.values())
    addresses = [value.data_ptr() for value in state.values()]
    assert len(set(addresses)) == len(addresses), "no two share memory"

    def describe(m):
        return {name: (value.shape, value.dtype) for name, value in (*m.state_dict().items(), *m.named_buffers())}

    before = describe(new)
    assert describe(module) == before
    module.half().eval()(WIDE)
    module.load_state_dict(state)
    assert describe(module) == before


@each_kind
@pytest.mark.parametrize("on", [(False, True, False), (False, False, True), (True, True, True)], ids=str)
def test_switches_are_part_of_the_state(make, on):
    module, other = trained(make), trained(make)
    fqnn.switch_quantizers(module, **dict(zip(SWITCHES, on, strict=True)))
    if module.is_initialized:  # a learned scale, which is not observed again
        on = (False, *on[1:])
    other.load_state_dict(through_a_file(module.state_dict()))
    assert (other.observing, other.quantizing, other.frozen) == on
    assert all(type(getattr(other, name)) is bool for name in SWITCHES)
    assert other.switches.tolist() == [*on, False]
    assert_same_module(module, other)


@each_kind
def test_a_state_loads_into_a_frozen_quantizer(make):
    module, other = trained(make), make()
    other.load_state_dict(trained(make).state_dict())
    other.frozen = True
    other(WIDE)
    other.load_state_dict(module.state_dict())
    assert not other.frozen
    assert_same_module(module, other)


@pytest.mark.parametrize("make", OBSERVED.values(), ids=OBSERVED)
def test_what_was_only_observed_is_in_the_state(make):
    module, twin = make(), make()
    module.quantizing = False
    for m in (module, twin):
        m(X)
        m(X * 1.5)
    other = make()
    other.load_state_dict(through_a_file(module.state_dict()))
    fqnn.switch_quantizers(other, quantizing=True)
    same_state(twin.state_dict(), other.state_dict())
    same(twin.eval()(WIDE), other.eval()(WIDE), "y")


@each_kind
def test_loading_does_not_tie_two_modules_together(make):
    module, other = trained(make), make()
    state = module.state_dict()
    other.load_state_dict(state)
    before = snapshot(module)
    other.train()(WIDE * 7)
    fqnn.switch_quantizers(other, quantizing=False)
    same_state(before, module.state_dict())


# --- assign=True and the meta device --------------------------------------------------------------


@each_kind
def test_assigned_states_work_like_copied_ones(make):
    module, other = trained(make), make()
    other.load_state_dict(through_a_file(module.state_dict()), assign=True)
    assert_same_module(module, other)


@each_kind
def test_a_state_assigned_to_a_model_on_the_meta_device_is_all_it_needs(make):
    """As large models are loaded: nothing is left without memory."""
    module, other = trained(make), make(device="meta")
    other.load_state_dict(through_a_file(module.state_dict()), assign=True)
    assert not any(value.is_meta for value in (*other.buffers(), *other.parameters()))
    assert other.nonfinite == 0
    assert_same_module(module, other)
    x = WIDE.clone()
    x[0, 0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert other.train()(x)[0, 0].isnan()


def test_an_assigned_state_in_half_precision_leaves_scales_float32():
    module, other = trained(KINDS["MinMax"]), KINDS["MinMax"]()
    state = {k: v.half() if v.is_floating_point() else v for k, v in module.state_dict().items()}
    other.load_state_dict(state, assign=True)
    assert {v.dtype for v in (other.scale, other.running_min, other.running_max)} == {torch.float32}
    same(state["scale"].float(), other.scale, "scale")


# --- copies ---------------------------------------------------------------------------------------

COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "twice": lambda m: copy.deepcopy(copy.deepcopy(m)),
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@each_kind
def test_copies_are_equal_and_apart(make, copied):
    module = trained(make)
    fqnn.switch_quantizers(module, frozen=True)
    other = copied(module)
    assert other.spec == module.spec
    before = snapshot(module)
    fqnn.switch_quantizers(other, frozen=False, quantizing=False)
    other(WIDE * 5)
    same_state(before, module.state_dict())
    assert (module.frozen, module.quantizing) == (True, True)
    assert_same_module(module, copied(module))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_know_their_path_and_what_is_pending(copied):
    module = fqnn.FakeQuantize(AFFINE, HISTOGRAM, path="a.b")
    module.quantizing = False
    with pytest.warns(RuntimeWarning, match="at a.b has observed 1 value"):
        module(torch.cat([X.flatten(), torch.tensor([torch.nan])]))
    other = copied(module)  # a search is due
    assert (other.path, other.nonfinite) == ("a.b", 1)
    same_state(module.state_dict(), other.state_dict())
    other.quantizing = True
    same(module.qparams().scale, other.qparams().scale, "scale")
    other(torch.tensor([torch.nan, 1.0]))
    assert (module.nonfinite, other.nonfinite) == (1, 2)


def test_a_copy_in_the_same_process_keeps_its_process_group():
    group = object()
    module = fqnn.FakeQuantize(AFFINE, process_group=group)
    assert copy.copy(module).process_group is group
    assert copy.deepcopy(torch.nn.Sequential(torch.nn.Linear(2, 2), module))[1].process_group is not None
    assert pickle.loads(pickle.dumps(module)).process_group is None


# --- averaged models ------------------------------------------------------------------------------


def in_a_model(make):
    return torch.nn.Sequential(torch.nn.Linear(8, 8), make())


AVERAGES = {"mean": {}, "EMA": {"multi_avg_fn": swa.get_ema_multi_avg_fn(0.9)}}


@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
@each_kind
def test_an_averaged_model_has_the_buffers_of_its_model(make, average):
    model = in_a_model(make)
    ema = swa.AveragedModel(model, **average)
    for step in range(3):
        if isinstance(model[1], fqnn.LearnedFakeQuantize) and step == 0:
            model[1].initialize(X)
        model[1](X * (step + 1))
        ema.update_parameters(model)
    for name, value in model[1].named_buffers():
        same(value, dict(ema.module[1].named_buffers())[name], name)
    same(model[1].eval()(WIDE), ema.eval().module[1](WIDE), "y")


@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize(
    "make", [KINDS["MinMax"], KINDS["MovingAverage"], KINDS["LSQ+"]], ids=["MinMax", "MovingAverage", "LSQ+"]
)
def test_averaged_buffers_still_make_a_quantizer(make, average):
    """A scale between those of the steps, a zero point within the range, and a spec that is not averaged."""
    model = in_a_model(make)
    ema = swa.AveragedModel(model, use_buffers=True, **average)
    for step in range(4):
        if isinstance(model[1], fqnn.LearnedFakeQuantize) and step == 0:
            model[1].initialize(X)
        model[1](X * (step + 1))
        ema.update_parameters(model)
    averaged = ema.eval().module[1]
    same(model[1].grid, averaged.grid, "grid")
    same(model[1].switches, averaged.switches, "switches")
    scale, zero_point = averaged.qparams()
    assert (scale > 0).all()
    assert scale.isfinite().all()
    assert averaged.spec.qmin <= zero_point.min() <= zero_point.max() <= averaged.spec.qmax
    assert averaged(WIDE).isfinite().all()
    make().load_state_dict(averaged.state_dict())


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_an_averaged_model_follows_the_switches_of_its_model(mode):
    model = in_a_model(KINDS["MinMax"])
    fqnn.switch_quantizers(model, quantizing=False)
    model[1](X)
    ema = getattr(swa.AveragedModel(model), mode)()
    ema.update_parameters(model)
    fqnn.switch_quantizers(model, quantizing=True, frozen=True)
    ema.update_parameters(model)
    ema.eval()
    assert str(ema.module[1]) == str(model[1])
    same(model.eval()[1](WIDE), ema.module[1](WIDE), "y")


def test_an_averaged_model_knows_what_was_observed_and_not_searched_yet():
    model = in_a_model(KINDS["Histogram"])
    fqnn.switch_quantizers(model, quantizing=False)
    ema = swa.AveragedModel(model)
    model[1](X)
    ema.update_parameters(model)
    fqnn.switch_quantizers(model, quantizing=True)
    fqnn.switch_quantizers(ema.eval(), quantizing=True)
    same(model[1].eval()(WIDE), ema.module[1](WIDE), "y")


# --- models with and without quantizers -----------------------------------------------------------


@each_kind
def test_the_state_of_a_float_model_loads_strictly_and_leaves_quantizers_alone(make):
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), trained(make))
    before = snapshot(model[1])
    model.load_state_dict(plain.state_dict(), strict=True)
    same(plain[0].weight, model[0].weight, "weight")
    same_state(before, model[1].state_dict())
    assert_same_module(trained(make), model[1])


@pytest.mark.parametrize("make", OBSERVED.values(), ids=OBSERVED)
def test_the_state_of_a_float_model_does_not_undo_a_calibration(make):
    model, twin = torch.nn.Sequential(torch.nn.Linear(8, 8), make()), make()
    for m in (model[1], twin):
        m.quantizing = False
        m(X)
    model.load_state_dict(torch.nn.Sequential(torch.nn.Linear(8, 8)).state_dict())
    fqnn.switch_quantizers(model, quantizing=True)
    twin.quantizing = True
    same(twin.eval()(WIDE), model.eval()[1](WIDE), "y")


@pytest.mark.parametrize("name", ["LSQ", "LSQ+", "PACT"])
def test_the_state_of_a_float_model_does_not_undo_freezing(name):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), trained(KINDS[name]))
    expected = model[1](WIDE)
    model[1].frozen = True
    with torch.no_grad():  # an optimizer that goes on
        for parameter in model[1].parameters():
            parameter.add_(1)
    model.load_state_dict(torch.nn.Sequential(torch.nn.Linear(8, 8)).state_dict())
    same(expected, model[1](WIDE), "y")


@each_kind
def test_a_part_of_a_state_is_an_error(make):
    module, other = trained(make), make()
    state = module.state_dict()
    for name in state:
        part = {key: value for key, value in state.items() if key != name}
        with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{name}"'):
            other.load_state_dict(part)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "other"'):
        other.load_state_dict(state | {"other": torch.ones(1)})


# --- states that do not fit -----------------------------------------------------------------------

MISFITS = {
    "granularity": (CHANNEL, presets.int8(group=4)),
    "tensor to channel": (fq.QuantSpec(), fq.QuantSpec(axis=0)),
    "bits": (GROUP, presets.int2(group=4)),
    "axis": (CHANNEL, presets.int8(axis=1)),
    "sign": (AFFINE, fq.QuantSpec(bits=4, symmetric=False)),
    "symmetry": (fq.QuantSpec(bits=4), fq.QuantSpec(bits=4, symmetric=False)),
    "narrow": (fq.QuantSpec(bits=8), fq.QuantSpec(bits=8, narrow_range=True)),
    "numerics": (fq.QuantSpec(), fq.QuantSpec(numerics="torch")),
    "group": (GROUP, presets.int4(group=8)),
}


@pytest.mark.parametrize("kind", [fqnn.FakeQuantize, fqnn.LearnedFakeQuantize], ids=["observed", "learned"])
@pytest.mark.parametrize(("saved", "here"), MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
def test_the_state_of_another_spec_is_refused_by_name_and_nothing_changes(saved, here, kind, strict):
    theirs = torch.nn.ModuleDict({"act": kind(saved, shape=(8, 8))})
    ours = torch.nn.ModuleDict({"act": kind(here, shape=(8, 8))})
    if kind is fqnn.LearnedFakeQuantize:
        ours["act"].initialize(torch.randn(8, 8))
    else:
        ours["act"](torch.randn(8, 8))
    before = snapshot(ours)
    with pytest.raises(RuntimeError) as caught:
        ours.load_state_dict(theirs.state_dict(), strict=strict)
    message = str(caught.value)
    assert "act: the state is of a quantizer with the spec" in message
    assert f"({saved})" in message
    assert f"({here})" in message
    assert "size mismatch" not in message
    same_state(before, ours.state_dict())


@pytest.mark.parametrize("kind", [fqnn.FakeQuantize, fqnn.LearnedFakeQuantize], ids=["observed", "learned"])
def test_the_state_of_other_channels_is_refused_with_the_spec(kind):
    ours, theirs = (kind(CHANNEL, shape=(channels, 8), path="layer.weight") for channels in (6, 5))
    before = snapshot(ours)
    with pytest.raises(RuntimeError, match=r"has shape \(5,\) in the state and \(6,\) here, where the spec is \(int8"):
        ours.load_state_dict(theirs.state_dict())
    same_state(before, ours.state_dict())


FORMATS = {
    "another": torch.tensor([2, 4, 0, 0, 0, -(2**31), -(2**31), 1], dtype=torch.int32),
    "longer": torch.tensor([2, *range(12)], dtype=torch.int32),
    "none": torch.zeros(8, dtype=torch.int32),
    "empty": torch.zeros(0, dtype=torch.int32),
    "a number": torch.tensor(3, dtype=torch.int32),
    "impossible bits": torch.tensor([1, 99, 0, 0, 0, -(2**31), -(2**31), 1], dtype=torch.int32),
    "impossible numerics": torch.tensor([1, 4, 0, 0, 0, -(2**31), -(2**31), 9], dtype=torch.int32),
    "too short": torch.tensor([1, 4, 0], dtype=torch.int32),
}


@pytest.mark.parametrize("grid", FORMATS.values(), ids=FORMATS)
def test_another_format_is_refused_with_the_path(grid):
    """Whatever is in it: other modules have buffers called grid, too."""
    model = torch.nn.ModuleDict({"act": fqnn.FakeQuantize(AFFINE)})
    state = snapshot(model) | {"act.grid": grid}
    with pytest.raises(RuntimeError, match=r"Error\(s\) in loading state_dict for ModuleDict:\s+act: "):
        model.load_state_dict(state)


def test_the_state_of_another_observer_is_refused():
    minmax, histogram = (fqnn.FakeQuantize(AFFINE, o) for o in (observers.MinMax(), HISTOGRAM))
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "exponent", "counts"'):
        histogram.load_state_dict(minmax.state_dict())
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "exponent", "counts"'):
        minmax.load_state_dict(histogram.state_dict())


def test_other_bins_are_refused():
    ours, theirs = (fqnn.FakeQuantize(AFFINE, observers.Percentile(bins=n)) for n in (64, 128))
    with pytest.raises(RuntimeError, match=r"`counts` has shape \(128,\) in the state and \(64,\) here"):
        ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.5, 0.0], ids=str)
def test_a_learned_scale_survives_being_saved_after_a_step_that_spoiled_it(bad):
    module = trained(KINDS["LSQ"])
    with torch.no_grad():
        module.step_size.fill_(bad)
    expected = module.qparams().scale
    other = KINDS["LSQ"]()
    other.load_state_dict(through_a_file(module.state_dict()))
    same(expected, other.qparams().scale, "scale")
    assert (expected > 0).all()
    same(module(WIDE), other(WIDE), "y")


# --- functions on models --------------------------------------------------------------------------


def a_model():
    shared = fqnn.FakeQuantize(AFFINE)
    return torch.nn.ModuleDict(
        {
            "a": torch.nn.Sequential(torch.nn.Linear(8, 8), shared, torch.nn.Sequential(KINDS["LSQ"]())),
            "b": KINDS["PACT"](),
            "again": shared,
        }
    )


def test_quantizers_are_found_with_their_paths_each_once():
    model = a_model()
    assert [path for path, _ in fqnn.quantizers(model)] == ["a.1", "a.2.0", "b"]
    assert all(model.get_submodule(path) is module for path, module in fqnn.quantizers(model))
    assert list(fqnn.quantizers(torch.nn.Linear(2, 2))) == []
    assert [path for path, _ in fqnn.quantizers(model["b"])] == [""]


def test_names_are_for_messages_and_no_part_of_the_state():
    model, other = a_model(), a_model()
    fqnn.name_quantizers(model)
    assert [module.path for _, module in fqnn.quantizers(model)] == ["a.1", "a.2.0", "b"]
    other.load_state_dict(model.state_dict())
    assert [module.path for _, module in fqnn.quantizers(other)] == [None, None, None]
    with pytest.raises(RuntimeError, match=r"FakeQuantize at a\.1 has not observed"):
        model.eval()["a"](X)
    with pytest.raises(RuntimeError, match=r"LearnedFakeQuantize at a\.2\.0 has no scale yet"):
        model["a"][2](X)


def test_set_state_sets_what_is_given_and_leaves_the_rest():
    model = a_model()
    for name in SWITCHES:
        before = [[getattr(m, s) for s in SWITCHES] for _, m in fqnn.quantizers(model)]
        fqnn.switch_quantizers(model, **{name: True})
        fqnn.switch_quantizers(model, **{name: False})
        for (_, module), values in zip(fqnn.quantizers(model), before, strict=True):
            expected = [False if s == name else value for s, value in zip(SWITCHES, values, strict=True)]
            assert [getattr(module, s) for s in SWITCHES] == expected
            assert module.switches.tolist() == [*expected, False]
    with pytest.raises(TypeError, match="`frozen` is a switch: True or False, got 1"):
        fqnn.switch_quantizers(model, frozen=1)


def test_an_averaged_model_has_the_zero_point_of_its_averaged_range():
    model = torch.nn.Sequential(fqnn.FakeQuantize(presets.uint8(), observers.MovingAverage(0.5)))
    average = swa.AveragedModel(model, use_buffers=True, multi_avg_fn=swa.get_ema_multi_avg_fn(0.9))
    for step in range(60):
        model(torch.linspace(-2.0, 1.0, 9) + step / 20)
        average.update_parameters(model)
    quantizer = average.module[0]
    average.eval()
    expected = fq.choose_qparams(quantizer.running_min, quantizer.running_max, quantizer.spec)
    assert_same_bits(expected.scale.numpy(), quantizer.scale.numpy())
    assert_same_bits(expected.zero_point.numpy(), quantizer.zero_point.numpy())


def test_what_is_old_is_not_a_scale():
    quantizer = fqnn.FakeQuantize(presets.uint8(), observers.Histogram())
    quantizer.quantizing = False
    quantizer(torch.linspace(-1, 1, 9))
    first = quantizer.qparams().scale
    quantizer(torch.linspace(-50, 50, 9))
    assert quantizer.scale.isnan()
    assert quantizer.qparams().scale > 10 * first
    assert quantizer.scale == quantizer.qparams().scale


def test_the_default_observer_of_weights_has_no_memory():
    assert fqnn.FakeQuantize(presets.int8(), shape=(4, 2)).observer == observers.Dynamic()
    assert fqnn.FakeQuantize(presets.int4(group=2), shape=(4, 2)).observer == observers.Dynamic()
    assert fqnn.FakeQuantize(presets.int8_per_token()).observer == observers.Dynamic()
    assert fqnn.FakeQuantize(presets.uint8()).observer == observers.MovingAverage()
    assert fqnn.FakeQuantize(fq.QuantSpec()).observer == observers.MovingAverage()
