"""Models and data on which the runtime differs and which `verify` once accepted."""

import collections
import dataclasses
import warnings

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
recipes = pytest.importorskip("fakequant.recipes")
explain = pytest.importorskip("fakequant._verify.explain_codes")
trials = pytest.importorskip("tamper_trials")

X86 = "onnxruntime-x86"


def has_vnni():
    with open("/proc/cpuinfo") as file:  # exists on Linux only, like the x86 kernels tested here
        return "vnni" in file.read()


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ready(model, x, config=None):
    return fq.calibrate(fq.prepare(model, config or recipes.int8(target=X86), x), [x], progress=False)


def exported(model, x, folder):
    path = folder / "model.onnx"
    fq.export_onnx(model, path, x)
    return path


class Masked(nn.Module):
    def __init__(self, fill):
        super().__init__()
        self.fc, self.fill = nn.Linear(64, 4), fill
        nn.init.ones_(self.fc.weight)
        self.register_buffer("mask", torch.tensor([False, False, False, True]))

    def forward(self, x):
        return self.fc(x).masked_fill(self.mask, self.fill)


FILLS = {"-inf": -torch.inf, "the lowest float": torch.finfo(torch.float32).min, "-1e9": -1e9, "nothing": 0.0}


@pytest.mark.skipif(has_vnni(), reason="sums do not saturate on this CPU")
@pytest.mark.parametrize("fill", FILLS.values(), ids=FILLS)
def test_verify_finds_differences_beside_masked_results(fill, tmp_path):
    torch.manual_seed(0)
    x = torch.rand(32, 64) * 0.2 + 0.8
    model = ready(Masked(fill), x, recipes.int8(target="onnxruntime-vnni"))
    found = fq.verify(model, exported(model, x, tmp_path), [x])
    assert not found.ok
    assert found.saturates
    assert found.outputs.runtime_unexplained == 3 * 32
    model = ready(Masked(fill), x)
    assert fq.verify(model, exported(model, x, tmp_path), [x]).ok


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


OFF = {
    "the last weight": "2.weight_quantizer",
    "the first weight": "0.weight_quantizer",
    "an input": "2.input_quantizer",
    "the first input": "0.input_quantizer",
}


@pytest.mark.parametrize("path", OFF.values(), ids=OFF)
def test_a_quantizer_that_is_switched_off_stays_in_float_with_a_warning(path, tmp_path):
    x = randn(64, 16)
    config = recipes.int8(target=X86).rule("*", weight=fq.QuantSpec(bits=2, axis=0))
    model = ready(mlp(), x, config)
    model.get_submodule(path).quantizing = False
    with pytest.warns(UserWarning, match=rf"{path} is switched off: its tensor stays in float"):
        golden = fq.convert(model)
    torch.testing.assert_close(golden(x), model.eval()(x), rtol=1e-5, atol=1e-6)  # sums in another order
    with pytest.warns(UserWarning, match="switched off"):
        file = exported(model, x, tmp_path)
    with pytest.warns(UserWarning, match="switched off"):
        assert fq.verify(model, file, [x], accuracy_level=1).ok  # a layer without input quantizer is weight-only


def test_a_model_with_all_quantizers_off_is_not_converted():
    model = ready(mlp(), randn(8, 16))
    fq.nn.switch_quantizers(model, quantizing=False)
    with pytest.raises(RuntimeError, match=r"All quantizers(.|\n)*switch_quantizers\(model, quantizing=True\)"):
        fq.convert(model)


def test_verify_compares_results_after_the_last_quantizer(tmp_path, monkeypatch):
    """Makes the prepared model differ from the golden model after the last quantizer."""
    x = randn(32, 16)
    model = ready(mlp(), x)
    path = exported(model, x, tmp_path)
    passes = pytest.importorskip("fakequant._verify.passes").Passes
    run = passes.run_prepared

    def a_little_off(self, inputs):
        y, codes = run(self, inputs)
        return y * 1.00001, codes

    monkeypatch.setattr(passes, "run_prepared", a_little_off)
    found = fq.verify(model, path, [x])
    assert not found.ok
    assert found.outputs.prepared_unexplained > 0
    assert "differ from the prepared model's" in found.verdict()


@pytest.mark.parametrize("rows", [slice(None), slice(3, 4)], ids=["everywhere", "one row"])
def test_verify_reports_a_nan_that_only_the_runtime_quantizes_and_names_its_quantizer(rows, tmp_path):
    x = randn(64, 16)
    model = ready(mlp(), x)
    path = exported(model, x, tmp_path)
    x[rows, 0] = torch.nan
    found = fq.verify(model, path, [x])
    assert not found.ok
    assert found.tensors[0].why_runtime == explain.NAN
    assert found.tensors[0].runtime_differ == len(x[rows])
    assert f"first at 0.input_quantizer: {explain.NAN}" in found.verdict()


def test_verify_accepts_a_nan_that_all_models_return(tmp_path):
    class Log(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 4)

        def forward(self, x):
            return torch.log(self.fc(x))

    x = randn(32, 16)
    model = ready(Log(), x)
    found = fq.verify(model, exported(model, x, tmp_path), [x])
    assert found.ok
    assert torch.isnan(model.eval()(x)).any()


def test_verify_refuses_empty_data(tmp_path):
    model = ready(mlp(), randn(8, 16))
    path = exported(model, randn(8, 16), tmp_path)
    with pytest.raises(ValueError, match="empty, so there is nothing to compare"):
        fq.verify(model, path, [torch.empty(0, 16)])
    assert fq.verify(model, path, [torch.empty(0, 16), randn(4, 16)]).ok


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    parts: tuple
    nothing: None = None


Pair = collections.namedtuple("Pair", ["first", "second"])
torch.export.register_dataclass(Output, serialized_type_name="test_false_ok.Output")
RETURNS = {
    "tensor": (lambda y: y, 1),
    "dataclass": (lambda y: Output(y, (torch.tanh(y), y > 0)), 3),
    "named tuple": (lambda y: Pair(torch.tanh(y), y), 2),
    "nested": (lambda y: {"a": [y, {"b": (y * 2,)}], "c": y.argmax(-1)}, 3),
    "bools": (lambda y: (y > 0, y), 2),
}


class Returns(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.fc, self.result = nn.Linear(16, 4), result

    def forward(self, x):
        return self.result(self.fc(x))


@pytest.mark.parametrize(("result", "number"), RETURNS.values(), ids=RETURNS)
def test_verify_compares_every_leaf_of_the_result(result, number, tmp_path):
    torch.manual_seed(0)
    x = randn(32, 16)
    model = ready(Returns(result), x)
    path = exported(model, x, tmp_path)
    found = fq.verify(model, path, [x])
    assert found.ok
    assert found.outputs.numbers == sum(
        y.numel() for y in torch.utils._pytree.tree_leaves(model.eval()(x)) if y is not None
    )
    # Change one number of one result at a time.
    file = onnx.load(path)
    for place in range(number):
        changed = onnx.ModelProto()
        changed.CopyFrom(file)
        change_first_element(changed, changed.graph.output[place].name)
        onnx.save(changed, tmp_path / "changed.onnx")
        assert not fq.verify(model, tmp_path / "changed.onnx", [x]).ok, place


def change_first_element(file, name):
    """Adds one to, or inverts, the first element of a result."""
    for node in file.graph.node:
        node.output[:] = [f"{name}_before" if output == name else output for output in node.output]
        node.input[:] = [f"{name}_before" if value == name else value for value in node.input]
    make, tensor = onnx.helper.make_node, onnx.helper.make_tensor
    value = next(output for output in file.graph.output if output.name == name)
    shape = make("Shape", [f"{name}_before"], [f"{name}_shape"])
    file.graph.initializer.append(tensor(f"{name}_zero", onnx.TensorProto.INT64, [1], [0]))
    kind = value.type.tensor_type.elem_type
    number = make(
        "ConstantOfShape", [f"{name}_shape"], [f"{name}_zeros"], value=tensor("v", onnx.TensorProto.FLOAT, [1], [0.0])
    )
    flat = make("Constant", [], [f"{name}_flat"], value=tensor("f", onnx.TensorProto.INT64, [1], [-1]))
    line = make("Reshape", [f"{name}_zeros", f"{name}_flat"], [f"{name}_line"])
    one = make("Constant", [], [f"{name}_one"], value=tensor("o", onnx.TensorProto.FLOAT, [1], [1.0]))
    put = make("ScatterElements", [f"{name}_line", f"{name}_zero", f"{name}_one"], [f"{name}_put"])
    back = make("Reshape", [f"{name}_put", f"{name}_shape"], [f"{name}_back"])
    cast = make("Cast", [f"{name}_back"], [f"{name}_cast"], to=kind)
    change = make("Xor" if kind == onnx.TensorProto.BOOL else "Add", [f"{name}_before", f"{name}_cast"], [name])
    file.graph.node.extend([shape, number, flat, line, one, put, back, cast, change])


def test_verify_refuses_results_of_unknown_types():
    leaves = pytest.importorskip("fakequant._model.leaves")

    class Odd:
        pass

    with pytest.raises(TypeError, match=r"returns a Odd(.|\n)*register"):
        leaves.tensors((torch.ones(1), Odd()))


def test_verify_refuses_a_file_with_another_number_of_results(tmp_path):
    x = randn(8, 16)
    model = ready(Returns(lambda y: (y, torch.tanh(y))), x)
    file = onnx.load(exported(model, x, tmp_path))
    del file.graph.output[1]
    onnx.save(file, tmp_path / "fewer.onnx")
    with pytest.raises(ValueError, match="returns 2 tensors and the file 1"):
        fq.verify(model, tmp_path / "fewer.onnx", [x])


def renamed(file, names):
    """Returns a file in which values have other names."""
    made = onnx.ModelProto()
    made.CopyFrom(file)
    for node in made.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*made.graph.output, *made.graph.initializer):
        value.name = names.get(value.name, value.name)
    return made


def test_verify_refuses_outputs_with_swapped_names(tmp_path):
    torch.manual_seed(0)
    x = randn(8, 16)
    model = ready(Returns(lambda y: {"up": torch.exp(y), "down": torch.exp(-y)}), x)
    file = onnx.load(exported(model, x, tmp_path))
    assert [value.name for value in file.graph.output] == ["up", "down"]
    swapped = trials.refreshed(renamed(file, {"up": "down", "down": "up"}))
    onnx.save(swapped, tmp_path / "swapped.onnx")
    with pytest.raises(ValueError, match="returns up, down, but the outputs of the file are down, up"):
        fq.verify(model, tmp_path / "swapped.onnx", [x])


class SmallNorm(nn.Module):
    """A norm at the end whose weight is so small that all of its results are."""

    def __init__(self, norm, size):
        super().__init__()
        self.fc, self.norm = nn.Linear(16, 16), norm
        nn.init.constant_(norm.weight, size)

    def forward(self, x):
        return self.norm(self.fc(x))


NORMS = {
    "layer norm": (lambda: nn.LayerNorm(16), "LayerNormalization"),
    "group norm": (lambda: nn.GroupNorm(4, 16), "GroupNormalization"),
}


@pytest.mark.parametrize("size", [1e-4, 1.0])
@pytest.mark.parametrize(("norm", "operator"), NORMS.values(), ids=NORMS)
def test_verify_refuses_changed_norms_whose_results_are_small(norm, operator, size, tmp_path):
    torch.manual_seed(0)
    x = randn(32, 16)
    model = ready(SmallNorm(norm(), size), x)
    path = exported(model, x, tmp_path)
    assert fq.verify(model, path, [x]).ok
    file = onnx.load(path)
    for number, node in enumerate(file.graph.node):
        for place, attribute in enumerate(node.attribute):
            if attribute.name == "epsilon":
                changed = onnx.ModelProto()
                changed.CopyFrom(file)
                changed.graph.node[number].attribute[place].f = 100 * attribute.f
                assert not trials.says_ok(model, trials.refreshed(changed), x, tmp_path / "epsilon.onnx")
    # A tensor that is renamed and changed counts as missing, not as merged with an equal one.
    weight = next(t for t in file.graph.initializer if t.name == "norm.weight" or t.name.startswith("norm.weight"))
    other = renamed(file, {weight.name: "another"})
    array = onnx.numpy_helper.to_array(weight) * np.float32(1.01)
    next(t for t in other.graph.initializer if t.name == "another").CopyFrom(
        onnx.numpy_helper.from_array(array.astype(np.float32), "another")
    )
    onnx.save(trials.refreshed(other), tmp_path / "weight.onnx")
    with pytest.raises(ValueError, match=r"exported with the tensor norm\.weight"):
        fq.verify(model, tmp_path / "weight.onnx", [x])


class OwnUse(nn.Module):
    """Calls a layer, and uses its weight in its own code too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(self.a(x) @ self.a.weight.T)


def test_a_weight_that_other_code_uses_in_float_is_noted_and_named(tmp_path):
    torch.manual_seed(0)
    x = randn(32, 16)
    config = recipes.int8(target=X86)
    model = fq.calibrate(fq.prepare(OwnUse(), config, x), [x], progress=False)
    (note,) = fq.summary(model).notes
    assert note.startswith("a: other code also uses its weight (get 0)")
    found = fq.verify(model, exported(model, x, tmp_path), [x])
    assert not found.ok
    assert explain.READ_WEIGHT in found.verdict()
    model = fq.calibrate(fq.prepare(OwnUse(), config.skip("a"), x), [x], progress=False)
    assert fq.summary(model).notes == []
    assert fq.verify(model, exported(model, x, tmp_path), [x]).ok


def test_verify_names_sums_that_overflow_32_bits(tmp_path):
    """140,000 products of 255 and 64 are more than 2^31."""
    model = nn.Sequential(nn.Linear(140_000, 1, bias=False), nn.Linear(1, 1))
    nn.init.ones_(model[0].weight)
    x = torch.ones(2, 140_000)
    model = ready(model, x)
    found = fq.verify(model, exported(model, x, tmp_path), [x])
    assert not found.ok
    assert found.overflows
    assert not found.saturates
    assert "do not fit in 32 bits" in found.verdict()


def test_verify_names_the_shape_a_file_accepts_if_a_batch_does_not_fit(tmp_path):
    x = randn(2, 5, 16)
    model = ready(Returns(lambda y: y), x)
    path = exported(model, x, tmp_path)
    with pytest.raises(
        ValueError, match=r"cannot run the file on this batch(.|\n)*takes x of shape \['batch', 5, 16\]"
    ):
        fq.verify(model, path, [randn(2, 7, 16)])


def test_verify_refuses_a_file_with_incomplete_metadata(tmp_path):
    x = randn(2, 16)
    model = ready(mlp(), x)
    file = onnx.load(exported(model, x, tmp_path))
    for node in file.graph.node:
        kept = [p for p in node.metadata_props if p.key != "fakequant.offset"]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    onnx.save(file, tmp_path / "odd.onnx")
    with pytest.raises(ValueError, match=r"damaged(.|\n)*fakequant\.offset"):
        fq.verify(model, tmp_path / "odd.onnx", [x])


def test_verify_computes_in_float32_inside_autocast(tmp_path):
    x = randn(32, 16)
    model = ready(mlp(), x)
    path = exported(model, x, tmp_path)
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings():
        assert fq.verify(model, path, [x]).ok
