"""Files of converted models that do not fit are refused with the reason and leave the model unchanged."""

import json
import os

import pytest

import fakequant as fq
from fakequant import presets

torch = pytest.importorskip("torch")
nn = torch.nn
safetensors = pytest.importorskip("safetensors")
save_file = pytest.importorskip("safetensors.torch").save_file
optional = pytest.importorskip("fakequant._util.files")
files = pytest.importorskip("fakequant._convert.converted_files")

X = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Counted(nn.Module):
    """Has an extra state that is not a tensor."""

    def __init__(self, state=None):
        super().__init__()
        self.state = state

    def forward(self, x):
        return x

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        if state == "bad":
            raise RuntimeError("not this")
        self.state = state


def make(out=5, state=None, norm=4):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.GroupNorm(2, norm), Counted(state),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, out),
    )  # fmt: skip


def converted(model, x=X, config=None):
    return fq.convert(fq.calibrate(fq.prepare(model, config or fq.recipes.int8(), x), [x], progress=False))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "m.safetensors"
    fq.save_converted(converted(make(state={"seen": [1, 2.5, None]})), path)
    return path


def snapshot(model):
    """Returns tensors, modules, hooks and parameters of a model for comparison."""
    tensors = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in model.state_dict().items()}
    modules = [
        (path, id(m), type(m), m.training, sorted(m.__dict__), list(m._modules), list(m._buffers), list(m._parameters))
        for path, m in model.named_modules()
    ]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return tensors, modules, hooks, [(id(p), p.requires_grad) for p in model.parameters()]


def refused(model, path, message, error=ValueError):
    before = snapshot(model)
    with pytest.raises(error, match=message):
        fq.load_converted(model, path)
    after = snapshot(model)
    assert before[1:] == after[1:]
    assert before[0].keys() == after[0].keys()
    for name, value in before[0].items():
        other = after[0][name]
        same = (
            value.equal(other)
            if isinstance(value, torch.Tensor) and not value.isnan().any()
            else str(value) == str(other)
        )
        assert same, name


def changed(path, folder, change):
    """Writes a copy of a file with changed tensors or metadata, and a matching checksum."""
    with safetensors.safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        described = json.loads(file.metadata()["fakequant"])
    described = change(tensors, described) or described
    text = described if isinstance(described, str) else json.dumps(described)
    metadata = {"fakequant": text, "checksum": files.checksum(text, tensors)}
    save_file(tensors, folder / "changed.safetensors", metadata=metadata)
    return folder / "changed.safetensors"


def test_matching_file_loads_with_extra_states(good):
    loaded = fq.load_converted(make(state="other"), good)
    assert loaded[4].state == {"seen": [1, 2.5, None]}
    assert torch.equal(loaded(X), converted(make(state={"seen": [1, 2.5, None]}))(X))


def test_extra_state_can_be_a_tensor(tmp_path):
    fq.save_converted(converted(make(state=torch.arange(3))), tmp_path / "m.safetensors")
    assert fq.load_converted(make(state=torch.zeros(1)), tmp_path / "m.safetensors")[4].state.tolist() == [0, 1, 2]


@pytest.mark.parametrize("state", [{1, 2}, {1: 2}, object(), float("nan")], ids=["set", "keys", "object", "nan"])
def test_extra_state_that_is_not_json_is_refused_by_name(state, tmp_path):
    with pytest.raises(TypeError, match=r"4\._extra_state is \w+, which cannot be written(.|\n)*get_extra_state"):
        fq.save_converted(converted(make(state=state)), tmp_path / "m.safetensors")
    assert not os.listdir(tmp_path)


OTHERS = {
    "a layer of another size": (
        lambda: make(out=6),
        r"'7' is Linear of shape \(5, 4\) in the file but .*\(6, 4\) in the model",
    ),
    "fewer modules": (lambda: make()[:5], r"'7' is Linear in the file but absent in the model"),
    "another layer type": (
        lambda: nn.Sequential(nn.Linear(3, 3)),
        r"'0' is Conv2d in the file but Linear in the model",
    ),
    "a converted model": (lambda: converted(make()), r"converted already(.|\n)*float model"),
    "a prepared model": (
        lambda: fq.prepare(make(), fq.recipes.int8(), torch.ones(1, 3, 8, 8)),
        r"prepared or(.|\n)*float model",
    ),
}


@pytest.mark.parametrize(("model", "message"), OTHERS.values(), ids=OTHERS)
def test_loading_into_another_model_is_refused_and_leaves_it_unchanged(model, message, good):
    refused(model(), good, message)


def test_float_tensor_of_another_shape_is_refused_before_any_change(good):
    model = make()
    model[3] = nn.GroupNorm(2, 6)
    refused(model, good, r"'3\.weight' is of shape \(4,\) in the file but of \(6,\) in the model(.|\n)*architecture")


def put(name, value):
    return lambda tensors, described: tensors.__setitem__(name, value)


def drop(name):
    return lambda tensors, described: tensors.__delitem__(name)


def say(*path, value):
    def change(tensors, described):
        *way, last = path
        for key in way:
            described = described[key]
        described[last] = value

    return change


DAMAGED = {
    "a missing tensor": (drop("3.weight"), r"'3\.weight' is absent in the file"),
    "missing codes": (drop("0.weight_codes"), r"it has no 0\.weight_codes(.|\n)*save_converted"),
    "a missing scale": (drop("0.input_quantizer.scale"), r"0\.input_quantizer\.scale(.|\n)*save_converted"),
    "an extra tensor": (put("8.weight", torch.ones(1)), r"'8\.weight' is present in the file but absent in the model"),
    "codes of another shape": (put("7.weight_codes", torch.zeros(5, 3, dtype=torch.int8)), r"'7\.weight_codes'"),
    "scales of another shape": (put("7.weight_scale", torch.ones(2)), r"'7\.weight_scale' is of shape \(2,\)"),
    "a bias of another shape": (put("7.bias_codes", torch.ones(2, dtype=torch.int32)), r"'7\.bias_codes'"),
    "invalid JSON": (lambda tensors, described: "{", r"is not JSON(.|\n)*save_converted"),
    "JSON that is not an object": (
        lambda tensors, described: "3",
        r"has format 3; this version of fakequant reads 1 and 2",
    ),
    "another format": (say("format", value=9), r"has format 9; this version of fakequant reads 1 and 2"),
    "missing layers": (say("layers", value=None), r"its description lacks layers"),
    "an unknown target": (say("target", value="toaster"), r"damaged(.|\n)*toaster"),
    "an unknown arithmetic": (say("grids", "7.input_quantizer", "arithmetic", value="odd"), r"damaged(.|\n)*odd"),
    "an invalid spec": (say("layers", "7", "weight", "spec", value={"bits": 99}), r"damaged(.|\n)*bits"),
    "an input from nowhere": (say("inputs_from", value={"7": "x"}), r"damaged(.|\n)*'x'"),
    "a missing batch norm": (say("folded", value=["99"]), r"'99' is a module in the file but absent"),
    "a layer without a kind": (say("layers", "7", value={}), r"damaged(.|\n)*kind"),
    "invalid extra states": (say("extra_states", value=5), r"its description lacks extra_states"),
    "a number in place of a tensor": (say("extra_states", "3.weight", value=5), r"3\.weight is not a tensor"),
    "a scale in place of a tensor": (
        say("extra_states", "7.weight_scale", value=5),
        r"7\.weight_scale is not a tensor",
    ),
    "deeply nested JSON": (lambda tensors, described: "[" * 100_000, r"is not JSON(.|\n)*save_converted"),
}


def of(name, change):
    """Returns a change that replaces a tensor by a function of it."""
    return lambda tensors, described: tensors.__setitem__(name, change(tensors[name]))


def to(dtype):
    return lambda value: value.to(dtype)


def first(number):
    """Returns a change that replaces the first element."""

    def change(value):
        value = value.clone()
        value.view(-1)[0] = number
        return value

    return change


SCALES = ("0.weight_scale", "7.weight_scale", "0.input_quantizer.scale")
POINTS = ("0.input_quantizer.zero_point", "7.input_quantizer.zero_point")
BAD_VALUES = {
    **{
        f"{name} {number}": (of(name, first(number)), rf"{name} has the value .*must be positive and finite")
        for name in SCALES
        for number in (float("nan"), float("inf"), 0.0, -0.01)
    },
    **{
        f"{name} {dtype}": (of(name, to(dtype)), rf"{name} is {str(dtype)[6:]}, but must be float32")
        for name in SCALES
        for dtype in (torch.int8, torch.bool, torch.float16, torch.float64)
    },
    **{
        f"{name} {number}": (of(name, first(number)), rf"{name} has the value .*must be from 0 to 255")
        for name in POINTS
        for number in (2**31 - 1, -(2**31), -1, 256)
    },
    **{f"{name} int64": (of(name, to(torch.int64)), rf"{name} is int64, but must be int32") for name in POINTS},
    "zero points of another shape": (of(POINTS[0], lambda v: v.reshape(1)), r"zero_point has shape \(1,\)"),
    "grid per channel": (
        lambda t, d: [t.__setitem__(f"0.input_quantizer.{n}", t[f"0.input_quantizer.{n}"].reshape(1)) for n in
                      ("scale", "zero_point")] and None, r"0\.input_quantizer\.scale has shape \(1,\)",
    ),
    "code out of range": (of("7.weight_codes", first(-128)), r"7\.weight_codes has the value -128.*from -127 to 127"),
    "codes of another dtype": (of("7.weight_codes", to(torch.int32)), r"7\.weight_codes is int32, but must be int8"),
    "fewer bits": (say("layers", "7", "weight", "spec", "bits", value=7), r"7\.weight_codes has the value"),
    "a bias in float": (of("7.bias_codes", to(torch.float32)), r"7\.bias_codes is float32, but must be int32"),
    "a bias of 64 bits": (of("7.bias_codes", to(torch.int64)), r"7\.bias_codes is int64, but must be int32"),
    "a float of another dtype": (
        of("3.weight", to(torch.float16)),
        r"3\.weight is float16 in the file but float32 in the model",
    ),
    "a grid of fewer bits": (say("grids", "0.input_quantizer", "spec", "bits", value=2), r"must be from 0 to 3"),
    **{
        f"eps {eps!r}": (say("grids", "0.input_quantizer", "eps", value=eps), r"0\.input_quantizer has `eps`")
        for eps in ("x", None, -1.0, 0.0, float("inf"), float("nan"), True, [1])
    },
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_invalid_values_in_a_file_are_refused(change, message, good, tmp_path):
    refused(make(state="mine"), changed(good, tmp_path, change), message)


def test_packed_codes_outside_the_range_are_refused(tmp_path):
    spec = fq.QuantSpec(bits=4, narrow_range=True, axis=0)
    config = fq.QuantConfig(default=fq.LayerConfig(weight=spec))
    path = tmp_path / "m.safetensors"
    fq.save_converted(fq.convert(fq.prepare(make(), config)), path)
    fq.load_converted(make(), path)
    refused(make(), changed(path, tmp_path, of("7.weight_codes", first(0x88))), r"7\.weight_codes has the value -8")


@pytest.mark.parametrize(("change", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_file_is_refused_and_leaves_the_model_unchanged(change, message, good, tmp_path):
    refused(make(state="mine"), changed(good, tmp_path, change), message)


def test_module_that_refuses_its_state_leaves_the_model_unchanged(good, tmp_path):
    path = changed(good, tmp_path, say("extra_states", "4._extra_state", value="bad"))
    refused(make(state="mine"), path, "not this", RuntimeError)


def test_truncated_foreign_and_missing_files_are_refused(good, tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(good.read_bytes()[:-10])
    refused(make(), path, r"is damaged, or is not a safetensors file(.|\n)*save_converted")
    path.write_bytes(b"not at all")
    refused(make(), path, r"is damaged, or is not a safetensors file")
    save_file({"0.weight": torch.zeros(4, 3, 3, 3)}, path)
    refused(make(), path, r"not written by fakequant\.save_converted(.|\n)*load_state_dict")
    refused(make(), tmp_path / "missing.safetensors", r"There is no file .*missing", FileNotFoundError)


def test_quantizer_placed_by_the_user_is_saved_and_loaded(tmp_path):
    def own():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), fq.nn.FakeQuantize(presets.uint8()), nn.Sigmoid(), nn.Linear(8, 4))

    x = X.reshape(-1, 8)
    golden = converted(own(), x)
    fq.save_converted(golden, tmp_path / "m.safetensors")
    loaded = fq.load_converted(own(), tmp_path / "m.safetensors")
    assert set(loaded.state_dict()) == set(golden.state_dict())
    assert torch.equal(loaded(x), golden(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head, self.norm = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False), nn.LayerNorm(32)
        self.head.weight = self.table.weight
        self.register_buffer("same", self.norm.weight.detach()[:4])  # shares memory with a part of another tensor

    def forward(self, x):
        return self.head(self.norm(self.table(x)))


@pytest.mark.parametrize("weight", ["int8", "mxfp4"])
def test_tied_weights_are_stored_and_loaded_once(weight, tmp_path):
    x = torch.arange(6)[None]
    spec = fq.QuantSpec(axis=0) if weight == "int8" else presets.mxfp4()
    config = fq.QuantConfig(default=fq.LayerConfig(weight=spec))
    golden = fq.convert(fq.calibrate(fq.prepare(Tied().eval(), config, x), [x], progress=False))
    fq.save_converted(golden, tmp_path / "m.safetensors")
    with safetensors.safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert [name for name in file.keys() if name.endswith("weight_codes")] == ["table.weight_codes"]  # noqa: SIM118
    model = Tied()
    norm = model.norm.weight
    loaded = fq.load_converted(model, tmp_path / "m.safetensors")
    assert loaded.head.weight_codes.data_ptr() == loaded.table.weight_codes.data_ptr()
    assert loaded.norm.weight is norm
    assert torch.equal(loaded(x), golden(x))


class InPlace(nn.Module):
    """Loads its extra state in place."""

    def __init__(self):
        super().__init__()
        self.seen = [1, 2]

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen[:] = state


def test_extra_state_changed_in_place_is_restored_on_failure():
    model = InPlace()

    def fail():
        with files._unchanged_on_failure(model, {}):
            model.set_extra_state([9])
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    assert model.seen == [1, 2]
