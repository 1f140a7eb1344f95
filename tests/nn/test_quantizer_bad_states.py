"""Incomplete and invalid states of quantizers are refused; copies share nothing."""

import copy

import pytest

import fakequant as fq
from fakequant import QuantSpec, presets

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
nn = torch.nn
X = torch.linspace(-1, 3, 48).reshape(6, 8)


def prepared(recipe=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    return fq.calibrate(fq.prepare(model, recipe or fq.recipes.int8(), X), [X], progress=False)


# --- incomplete states ----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["0.weight_quantizer", "0.input_quantizer", "2.weight_quantizer"])
@pytest.mark.parametrize("recipe", [fq.recipes.int8(), fq.recipes.lsq(4)], ids=["int8", "lsq"])
def test_state_without_one_quantizer_lists_its_missing_keys(path, recipe):
    model = prepared(recipe)
    whole = model.state_dict()
    gone = [key for key in whole if key.startswith(path)]
    part = {key: value for key, value in whole.items() if key not in gone}
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(part)
    named = str(error.value).split("Missing key(s) in state_dict: ")[1].split(". ")[0]
    assert sorted(named.split(", ")) == sorted(f'"{key}"' for key in gone)
    assert sorted(model.load_state_dict(part, strict=False).missing_keys) == sorted(gone)


def test_loading_does_not_depend_on_earlier_loads():
    model = prepared()
    whole = model.state_dict()
    floats = {key: value for key, value in whole.items() if "quantizer" not in key}
    for _ in range(2):
        assert str(model.load_state_dict(floats)) == "<All keys matched successfully>"
        assert str(model.load_state_dict(whole)) == "<All keys matched successfully>"
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(floats | {"2.weight_quantizer.grid": whole["2.weight_quantizer.grid"]})
    assert str(model.load_state_dict(floats)) == "<All keys matched successfully>"


# --- invalid values -------------------------------------------------------------------------------

SCALES = {"-0.5": -0.5, "0": 0.0, "inf": torch.inf, "-inf": -torch.inf}


@pytest.mark.parametrize("value", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("key", ["0.input_quantizer.scale", "0.weight_quantizer.scale"])
def test_state_with_an_invalid_scale_is_refused_and_changes_nothing(key, value):
    model = prepared()
    state = copy.deepcopy(model.state_dict())
    before = copy.deepcopy(state)
    state[key].flatten()[-1] = value
    where = "" if state[key].dim() == 0 else " at index 5"
    path, name = key.rsplit(".", 1)
    message = rf"{path}: `{name}` is {value:g}{where} in the state, but a scale is finite and greater than 0"
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(state)
    after = model.get_submodule(path).state_dict()
    assert all(torch.equal(before[f"{path}.{name}"], value) for name, value in after.items())


def test_state_with_nan_scales_loads_as_not_observed():
    model = fq.prepare(nn.Sequential(nn.Linear(8, 6)), fq.recipes.int8(), torch.ones(1, 8))
    other = fq.prepare(nn.Sequential(nn.Linear(8, 6)), fq.recipes.int8(), torch.ones(1, 8))
    assert other.load_state_dict(model.state_dict()) is not None
    assert other[0].input_quantizer.scale.isnan()


LEARNED = {
    "LSQ": (lambda: fqnn.LearnedFakeQuantize(QuantSpec(bits=4)).initialize(X), "step_size", -1.0),
    "LSQ zero": (lambda: fqnn.LearnedFakeQuantize(QuantSpec(bits=4)).initialize(X), "step_size", 0.0),
    "LSQ+": (lambda: fqnn.LearnedFakeQuantize(presets.uint8()).initialize(X), "offset", 300.0),
    "LSQ+ NaN": (lambda: fqnn.LearnedFakeQuantize(presets.uint8()).initialize(X), "offset", torch.nan),
    "PACT": (lambda: fqnn.PACT(4), "alpha", -2.0),
}


@pytest.mark.parametrize(("make", "name", "value"), LEARNED.values(), ids=LEARNED)
def test_state_with_an_invalid_learned_value_is_refused(make, name, value):
    quantizer = make()
    state = copy.deepcopy(quantizer.state_dict())
    state[name].fill_(value)
    with pytest.raises(RuntimeError, match=rf"`{name}` is .*{value:g}.* in the state, but"):
        make().load_state_dict(state)


@pytest.mark.parametrize("value", [-1, 256])
def test_state_with_a_zero_point_outside_the_range_is_refused(value):
    quantizer = fqnn.FakeQuantize(presets.uint8())
    quantizer(X)
    state = copy.deepcopy(quantizer.state_dict())
    state["zero_point"].fill_(value)
    with pytest.raises(RuntimeError, match=rf"`zero_point` is {value} in the state, but it must be between 0 and 255"):
        quantizer.load_state_dict(state)


def test_state_with_a_nonzero_zero_point_of_a_symmetric_grid_is_refused():
    quantizer = fqnn.FakeQuantize(QuantSpec(axis=0), shape=X.shape)
    quantizer(X)
    state = copy.deepcopy(quantizer.state_dict())
    state["zero_point"][2] = 3
    with pytest.raises(RuntimeError, match=r"`zero_point` is 3 at index 2 in the state, .* between 0 and 0"):
        quantizer.load_state_dict(state)


DTYPES = [
    ("scale", torch.int8),
    ("scale", torch.bool),
    ("scale", torch.complex64),
    ("zero_point", torch.float32),
    ("switches", torch.float32),
    ("running_min", torch.int32),
]


@pytest.mark.parametrize(("name", "dtype"), DTYPES, ids=str)
@pytest.mark.parametrize("assign", [False, True])
def test_state_with_a_tensor_of_another_kind_of_dtype_is_refused(name, dtype, assign):
    quantizer = fqnn.FakeQuantize(presets.uint8())
    quantizer(X)
    state = quantizer.state_dict()
    state[name] = state[name].to(dtype)
    with pytest.raises(RuntimeError, match=rf"`{name}` holds {str(dtype)[6:]} in the state, and \w+ here"):
        quantizer.load_state_dict(state, assign=assign)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_state_with_other_float_and_integer_widths_is_converted(dtype):
    quantizer, other = (fqnn.FakeQuantize(presets.uint8()) for _ in range(2))
    quantizer(X)
    state = quantizer.state_dict()
    other.load_state_dict(state | {"scale": state["scale"].to(dtype), "zero_point": state["zero_point"].long()})
    assert (other.scale.dtype, other.zero_point.dtype) == (torch.float32, torch.int32)


# --- copies ---------------------------------------------------------------------------------------

KINDS = {
    "FakeQuantize": lambda: fqnn.FakeQuantize(presets.uint8()),
    "LSQ": lambda: fqnn.LearnedFakeQuantize(QuantSpec(bits=4)).initialize(X),
    "PACT": lambda: fqnn.PACT(4),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copied_quantizer_shares_no_tensor_or_switch(make, copied):
    quantizer = make()
    quantizer(X)
    twin = copied(quantizer)
    before = copy.deepcopy(quantizer.state_dict())
    twin.quantizing = False
    twin.frozen = True
    twin.reset_parameters()
    for module, expected in ((quantizer, (True, False)), (twin, (False, True))):
        module.train()
        assert (module.quantizing, module.frozen) == expected
        assert tuple(bool(s) for s in module.switches[1:3]) == expected
    assert all(torch.equal(before[name], value) for name, value in quantizer.state_dict().items())
    tensors = [{t.data_ptr() for t in (*m.parameters(), *m.buffers(), m._nonfinite)} for m in (quantizer, twin)]
    assert not tensors[0] & tensors[1]
