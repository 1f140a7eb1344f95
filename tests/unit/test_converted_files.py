"""Files of converted models: what does not fit leaves the model as it was, and says why."""

import json
import os

import pytest

import fakequant as fq
from fakequant import presets

torch = pytest.importorskip("torch")
nn = torch.nn
safetensors = pytest.importorskip("safetensors")
save_file = pytest.importorskip("safetensors.torch").save_file
optional = pytest.importorskip("fakequant.workflow.optional")

X = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Counted(nn.Module):
    """Keeps something in the state that is no tensor."""

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
    return fq.convert(fq.calibrate(fq.prepare(model, config or fq.recipes.int8()), [x], progress=False))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "m.safetensors"
    fq.save_converted(converted(make(state={"seen": [1, 2.5, None]})), path)
    return path


def picture(model):
    """Everything that can be seen of a model."""
    tensors = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in model.state_dict().items()}
    modules = [
        (path, id(m), type(m), m.training, sorted(m.__dict__), list(m._modules), list(m._buffers), list(m._parameters))
        for path, m in model.named_modules()
    ]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return tensors, modules, hooks, [(id(p), p.requires_grad) for p in model.parameters()]


def refused(model, path, message, error=ValueError):
    before = picture(model)
    with pytest.raises(error, match=message):
        fq.load_converted(model, path)
    after = picture(model)
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
    """A copy of a file in which tensors or descriptions are others."""
    with safetensors.safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        described = json.loads(file.metadata()["fakequant"])
    described = change(tensors, described) or described
    text = described if isinstance(described, str) else json.dumps(described)
    save_file(tensors, folder / "changed.safetensors", metadata={"fakequant": text})
    return folder / "changed.safetensors"


def test_a_file_that_fits_is_loaded_with_what_modules_keep_beside_tensors(good):
    loaded = fq.load_converted(make(state="other"), good)
    assert loaded[4].state == {"seen": [1, 2.5, None]}
    assert torch.equal(loaded(X), converted(make(state={"seen": [1, 2.5, None]}))(X))


def test_what_modules_keep_may_be_a_tensor(tmp_path):
    fq.save_converted(converted(make(state=torch.arange(3))), tmp_path / "m.safetensors")
    assert fq.load_converted(make(state=torch.zeros(1)), tmp_path / "m.safetensors")[4].state.tolist() == [0, 1, 2]


@pytest.mark.parametrize("state", [{1, 2}, {1: 2}, object(), float("nan")], ids=["set", "keys", "object", "nan"])
def test_what_no_file_can_hold_is_refused_by_name(state, tmp_path):
    with pytest.raises(TypeError, match=r"4\._extra_state is \w+, which cannot be written(.|\n)*get_extra_state"):
        fq.save_converted(converted(make(state=state)), tmp_path / "m.safetensors")
    assert not os.listdir(tmp_path)


OTHERS = {
    "a layer of another size": (lambda: make(out=6), r"'7' is Linear of shape \(5, 4\) there and .*\(6, 4\) here"),
    "fewer modules": (lambda: make()[:5], r"'7' is Linear there and absent here"),
    "another kind": (lambda: nn.Sequential(nn.Linear(3, 3)), r"'0' is Conv2d there and Linear here"),
    "a converted model": (lambda: converted(make()), r"converted already(.|\n)*float model"),
    "a prepared model": (lambda: fq.prepare(make(), fq.recipes.int8()), r"prepared or(.|\n)*float model"),
}


@pytest.mark.parametrize(("model", "message"), OTHERS.values(), ids=OTHERS)
def test_another_model_is_left_as_it_was(model, message, good):
    refused(model(), good, message)


def test_a_float_tensor_of_another_shape_is_found_before_anything_changes(good):
    model = make()
    model[3] = nn.GroupNorm(2, 6)
    refused(model, good, r"'3\.weight' is of shape \(4,\) there and of \(6,\) here(.|\n)*architecture")


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
    "a missing tensor": (drop("3.weight"), r"'3\.weight' is absent there"),
    "missing codes": (drop("0.weight_codes"), r"it has no 0\.weight_codes(.|\n)*save_converted"),
    "a missing scale": (drop("0.input_quantizer.scale"), r"0\.input_quantizer\.scale(.|\n)*save_converted"),
    "one tensor more": (put("8.weight", torch.ones(1)), r"'8\.weight' is there there and absent here"),
    "codes of another shape": (put("7.weight_codes", torch.zeros(5, 3, dtype=torch.int8)), r"'7\.weight_codes'"),
    "scales of another shape": (put("7.weight_scale", torch.ones(2)), r"'7\.weight_scale' is of shape \(2,\)"),
    "a bias of another shape": (put("7.bias_codes", torch.ones(2, dtype=torch.int32)), r"'7\.bias_codes'"),
    "no JSON": (lambda tensors, described: "{", r"no JSON(.|\n)*save_converted"),
    "no object": (lambda tensors, described: "3", r"has format 3; this version of fakequant reads 1"),
    "another format": (say("format", value=9), r"has format 9; this version of fakequant reads 1"),
    "no layers": (say("layers", value=None), r"does not say layers"),
    "an unknown target": (say("target", value="toaster"), r"damaged(.|\n)*toaster"),
    "an unknown arithmetic": (say("grids", "7.input_quantizer", "arithmetic", value="odd"), r"damaged(.|\n)*odd"),
    "a spec that is none": (say("layers", "7", "weight", "spec", value={"bits": 99}), r"damaged(.|\n)*bits"),
    "an input from nowhere": (say("inputs_from", value={"7": "x"}), r"damaged(.|\n)*'x'"),
    "a normalization that is not there": (say("folded", value=["99"]), r"'99' is a module there and absent"),
    "a layer without a kind": (say("layers", "7", value={}), r"damaged(.|\n)*kind"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_leaves_the_model_as_it_was(change, message, good, tmp_path):
    refused(make(state="mine"), changed(good, tmp_path, change), message)


def test_a_module_that_refuses_its_state_leaves_the_model_as_it_was(good, tmp_path):
    path = changed(good, tmp_path, say("extra_states", "4._extra_state", value="bad"))
    refused(make(state="mine"), path, "not this", RuntimeError)


def test_a_file_that_is_cut_off_or_no_such_file_or_not_there_is_refused(good, tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(good.read_bytes()[:-10])
    refused(make(), path, r"is damaged, or no safetensors file(.|\n)*save_converted")
    path.write_bytes(b"not at all")
    refused(make(), path, r"is damaged, or no safetensors file")
    save_file({"0.weight": torch.zeros(4, 3, 3, 3)}, path)
    refused(make(), path, r"not written by fakequant\.save_converted(.|\n)*load_state_dict")
    refused(make(), tmp_path / "missing.safetensors", r"There is no file .*missing", FileNotFoundError)


def test_a_quantizer_of_the_users_own_is_loaded_into_its_place(tmp_path):
    def own():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), fq.nn.FakeQuantize(presets.uint8()), nn.Sigmoid(), nn.Linear(8, 4))

    x = X.reshape(-1, 8)
    golden = converted(own(), x)
    fq.save_converted(golden, tmp_path / "m.safetensors")
    loaded = fq.load_converted(own(), tmp_path / "m.safetensors")
    assert set(loaded.state_dict()) == set(golden.state_dict())
    assert torch.equal(loaded(x), golden(x))


# --- writing ------------------------------------------------------------------------------------------------


def write_half(path):
    with optional.writing(path) as unfinished:
        unfinished.write_bytes(b"half")
        raise RuntimeError("no more")


def test_an_unfinished_file_has_the_name_of_its_process_and_goes_away(tmp_path):
    with optional.writing(tmp_path / "m.bin") as unfinished:
        assert os.listdir(tmp_path) == [unfinished.name]
        assert str(os.getpid()) in unfinished.name
        unfinished.write_bytes(b"new")
    assert os.listdir(tmp_path) == ["m.bin"]
    with pytest.raises(RuntimeError, match="no more"):
        write_half(tmp_path / "m.bin")
    assert os.listdir(tmp_path) == ["m.bin"]
    assert (tmp_path / "m.bin").read_bytes() == b"new"


PLACES = {
    "a folder that is not there": ("missing/m.bin", r"no folder .*missing"),
    "a folder": (".", "is a folder"),
    "a path below a file": ("file/m.bin", r"no folder .*file"),
}


@pytest.mark.parametrize(("place", "message"), PLACES.values(), ids=PLACES)
def test_a_place_that_cannot_be_written_to_is_refused_before_the_work(place, message, tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    began = []
    with pytest.raises(OSError, match=message), optional.writing(tmp_path / place):
        began.append(True)
    assert not began
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder in which nobody can write")
def test_a_folder_in_which_nobody_can_write_is_refused_before_the_work(monkeypatch):
    began = []
    message = r"(?s)/proc/self/m\.bin' cannot be written.*Use a path"
    with pytest.raises(OSError, match=message), optional.writing("/proc/self/m.bin"):
        began.append(True)
    assert not began
    export = pytest.importorskip("fakequant.workflow.export_onnx")
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    monkeypatch.setattr(export, "convert", lambda *args, **kwargs: began.append(True))
    model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8())
    with pytest.raises(OSError, match="cannot be written"):
        fq.export_onnx(model, "/proc/self/m.onnx", torch.ones(1, 4))
    assert not began


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="needs a device")
def test_a_device_is_not_replaced_by_a_file():
    with pytest.raises(OSError, match="neither a file"), optional.writing("/dev/null"):
        pass


class InPlace(nn.Module):
    """Keeps its extra state in one list."""

    def __init__(self):
        super().__init__()
        self.seen = [1, 2]

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen[:] = state


def test_extra_state_that_is_changed_in_place_is_put_back():
    files = pytest.importorskip("fakequant.workflow.files")
    model = InPlace()

    def fail():
        with files._unchanged_on_failure(model, {}):
            model.set_extra_state([9])
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail()
    assert model.seen == [1, 2]
