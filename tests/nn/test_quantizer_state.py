"""States of quantizers: saved, loaded, assigned, and found in models."""

import warnings

import pytest

import fakequant as fq
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits, assert_same_state
from quantizer_kinds import AFFINE, KINDS, WIDE, X, assert_same_module, each_kind, snapshot, through_a_file, trained

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
observers = pytest.importorskip("fakequant.observers")

OBSERVED = {name: make for name, make in KINDS.items() if not name.startswith(("token", "Fixed", "LSQ", "PACT"))}
SWITCHES = ("observing", "quantizing", "frozen")


# --- save and load ----------------------------------------------------------------------------------


@each_kind
def test_state_saved_to_a_file_loads_into_an_equal_quantizer(make):
    module, other = trained(make), make()
    assert str(other.load_state_dict(through_a_file(module.state_dict()))) == "<All keys matched successfully>"
    assert_same_module(module, other)


@each_kind
def test_state_of_a_fresh_quantizer_loads_into_a_trained_one(make):
    module, other = make(), trained(make)
    other.load_state_dict(through_a_file(module.state_dict()))
    assert_same_state(make().state_dict(), other.state_dict())
    if module.state_dict().keys() & {"running_min"} and module.scale.isnan().any():
        with pytest.raises(RuntimeError, match="has not observed a finite value"):
            other.eval().qparams()


@each_kind
def test_state_holds_plain_tensors_of_constant_shape(make):
    new, module = make(), trained(make)
    state = module.state_dict()
    assert all(type(value) in (torch.Tensor, torch.nn.Parameter) for value in state.values())
    assert all(value.is_contiguous() for value in state.values())
    addresses = [value.data_ptr() for value in state.values()]
    assert len(set(addresses)) == len(addresses), "tensors share memory"

    def describe(m):
        return {name: (value.shape, value.dtype) for name, value in (*m.state_dict().items(), *m.named_buffers())}

    before = describe(new)
    assert describe(module) == before
    module.half().eval()(WIDE)
    module.load_state_dict(state)
    assert describe(module) == before


@each_kind
@pytest.mark.parametrize("on", [(False, True, False), (False, False, True), (True, True, True)], ids=str)
def test_quantizer_state_contains_the_switches(make, on):
    module, other = trained(make), trained(make)
    fqnn.switch_quantizers(module, **dict(zip(SWITCHES, on, strict=True)))
    if module.is_initialized:  # a learned scale is not observed again
        on = (False, *on[1:])
    other.load_state_dict(through_a_file(module.state_dict()))
    assert (other.observing, other.quantizing, other.frozen) == on
    assert all(type(getattr(other, name)) is bool for name in SWITCHES)
    assert other.switches.tolist() == [*on, False]
    assert_same_module(module, other)


@each_kind
def test_state_loads_into_a_frozen_quantizer(make):
    module, other = trained(make), make()
    other.load_state_dict(trained(make).state_dict())
    other.frozen = True
    other(WIDE)
    other.load_state_dict(module.state_dict())
    assert not other.frozen
    assert_same_module(module, other)


@pytest.mark.parametrize("make", OBSERVED.values(), ids=OBSERVED)
def test_state_contains_observations_made_without_quantizing(make):
    module, twin = make(), make()
    module.quantizing = False
    for m in (module, twin):
        m(X)
        m(X * 1.5)
    other = make()
    other.load_state_dict(through_a_file(module.state_dict()))
    fqnn.switch_quantizers(other, quantizing=True)
    assert_same_state(twin.state_dict(), other.state_dict())
    assert_same_bits(twin.eval()(WIDE), other.eval()(WIDE), "y")


@each_kind
def test_loading_a_state_copies_it(make):
    module, other = trained(make), make()
    state = module.state_dict()
    other.load_state_dict(state)
    before = snapshot(module)
    other.train()(WIDE * 7)
    fqnn.switch_quantizers(other, quantizing=False)
    assert_same_state(before, module.state_dict())


# --- assign=True and the meta device ----------------------------------------------------------------


@each_kind
def test_assigned_state_works_like_a_copied_one(make):
    module, other = trained(make), make()
    other.load_state_dict(through_a_file(module.state_dict()), assign=True)
    assert_same_module(module, other)


@each_kind
def test_state_assigned_to_a_meta_quantizer_is_complete(make):
    """Large models are loaded this way; no tensor is left on the meta device."""
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


def test_assigned_half_precision_state_leaves_scales_float32():
    module, other = trained(KINDS["MinMax"]), KINDS["MinMax"]()
    state = {k: v.half() if v.is_floating_point() else v for k, v in module.state_dict().items()}
    other.load_state_dict(state, assign=True)
    assert {v.dtype for v in (other.scale, other.running_min, other.running_max)} == {torch.float32}
    assert_same_bits(state["scale"].float(), other.scale, "scale")


# --- models with and without quantizers -------------------------------------------------------------


@each_kind
def test_float_state_loads_strictly_and_leaves_quantizers_unchanged(make):
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), trained(make))
    before = snapshot(model[1])
    model.load_state_dict(plain.state_dict(), strict=True)
    assert_same_bits(plain[0].weight, model[0].weight, "weight")
    assert_same_state(before, model[1].state_dict())
    assert_same_module(trained(make), model[1])


@pytest.mark.parametrize("make", OBSERVED.values(), ids=OBSERVED)
def test_loading_a_float_state_keeps_the_calibration(make):
    model, twin = torch.nn.Sequential(torch.nn.Linear(8, 8), make()), make()
    for m in (model[1], twin):
        m.quantizing = False
        m(X)
    model.load_state_dict(torch.nn.Sequential(torch.nn.Linear(8, 8)).state_dict())
    fqnn.switch_quantizers(model, quantizing=True)
    twin.quantizing = True
    assert_same_bits(twin.eval()(WIDE), model.eval()[1](WIDE), "y")


@pytest.mark.parametrize("name", ["LSQ", "LSQ+", "PACT"])
def test_loading_a_float_state_keeps_learned_scales_frozen(name):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), trained(KINDS[name]))
    expected = model[1](WIDE)
    model[1].frozen = True
    with torch.no_grad():  # an optimizer step
        for parameter in model[1].parameters():
            parameter.add_(1)
    model.load_state_dict(torch.nn.Sequential(torch.nn.Linear(8, 8)).state_dict())
    assert_same_bits(expected, model[1](WIDE), "y")


@each_kind
def test_incomplete_state_is_an_error(make):
    module, other = trained(make), make()
    state = module.state_dict()
    for name in state:
        part = {key: value for key, value in state.items() if key != name}
        with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{name}"'):
            other.load_state_dict(part)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "other"'):
        other.load_state_dict(state | {"other": torch.ones(1)})


# --- functions on models ----------------------------------------------------------------------------


def a_model():
    shared = fqnn.FakeQuantize(AFFINE)
    return torch.nn.ModuleDict(
        {
            "a": torch.nn.Sequential(torch.nn.Linear(8, 8), shared, torch.nn.Sequential(KINDS["LSQ"]())),
            "b": KINDS["PACT"](),
            "again": shared,
        }
    )


def test_quantizers_yields_each_quantizer_once_with_its_path():
    model = a_model()
    assert [path for path, _ in fqnn.named_quantizers(model)] == ["a.1", "a.2.0", "b"]
    assert all(model.get_submodule(path) is module for path, module in fqnn.named_quantizers(model))
    assert list(fqnn.named_quantizers(torch.nn.Linear(2, 2))) == []
    assert [path for path, _ in fqnn.named_quantizers(model["b"])] == [""]


def test_name_quantizers_sets_paths_that_are_not_saved():
    model, other = a_model(), a_model()
    fqnn.name_quantizers(model)
    assert [module.path for _, module in fqnn.named_quantizers(model)] == ["a.1", "a.2.0", "b"]
    other.load_state_dict(model.state_dict())
    assert [module.path for _, module in fqnn.named_quantizers(other)] == [None, None, None]
    with pytest.raises(RuntimeError, match=r"FakeQuantize at a\.1 has not observed"):
        model.eval()["a"](X)
    with pytest.raises(RuntimeError, match=r"LearnedFakeQuantize at a\.2\.0 has no scale yet"):
        model["a"][2](X)


def test_switch_quantizers_changes_only_the_given_switches():
    model = a_model()
    for name in SWITCHES:
        before = [[getattr(m, s) for s in SWITCHES] for _, m in fqnn.named_quantizers(model)]
        fqnn.switch_quantizers(model, **{name: True})
        fqnn.switch_quantizers(model, **{name: False})
        for (_, module), values in zip(fqnn.named_quantizers(model), before, strict=True):
            expected = [False if s == name else value for s, value in zip(SWITCHES, values, strict=True)]
            assert [getattr(module, s) for s in SWITCHES] == expected
            assert module.switches.tolist() == [*expected, False]
    with pytest.raises(TypeError, match="`frozen` is a switch: True or False, got 1"):
        fqnn.switch_quantizers(model, frozen=1)


def test_scale_is_nan_until_a_due_search_is_run():
    quantizer = fqnn.FakeQuantize(presets.uint8(), observers.Histogram())
    quantizer.quantizing = False
    quantizer(torch.linspace(-1, 1, 9))
    first = quantizer.qparams().scale
    quantizer(torch.linspace(-50, 50, 9))
    assert quantizer.scale.isnan()
    assert quantizer.qparams().scale > 10 * first
    assert quantizer.scale == quantizer.qparams().scale


def test_default_observer_is_dynamic_for_weights_and_a_moving_average_for_activations():
    assert fqnn.FakeQuantize(presets.int8(), shape=(4, 2)).observer == observers.Dynamic()
    assert fqnn.FakeQuantize(presets.int4(group_size=2), shape=(4, 2)).observer == observers.Dynamic()
    assert fqnn.FakeQuantize(presets.int8_per_token()).observer == observers.Dynamic()
    assert fqnn.FakeQuantize(presets.uint8()).observer == observers.MovingAverage()
    assert fqnn.FakeQuantize(fq.QuantSpec()).observer == observers.MovingAverage()
