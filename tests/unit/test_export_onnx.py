"""Exported models: the codes of every range, the file's contents, equality with the golden model, errors.

An export takes seconds, so that models are few and hold many cases each.
"""

import copy
import os
import sys
import warnings

import numpy as np
import pytest

import fakequant as fq
from fakequant import QuantSpec, presets
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
reference = pytest.importorskip("onnx.reference")
recipes = pytest.importorskip("fakequant.recipes")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
integer = pytest.importorskip("fakequant._convert.golden.integer_layer")
IntegerLayer = integer.IntegerLayer
nn = torch.nn
F = torch.nn.functional
Fixed, LayerConfig, QuantConfig = fq.observers.Fixed, fq.LayerConfig, fq.QuantConfig

X86 = "onnxruntime-x86"
INTEGER_KERNELS = {"QLinearConv", "QGemm", "QLinearMatMul", "MatMulIntegerToFloat"}
FLOAT_KERNELS = {"Conv", "Gemm", "MatMul", "FusedConv", "FusedGemm", "FusedMatMul", "ConvTranspose"}


# --- helpers --------------------------------------------------------------------------------------------


def session(model, *, optimized=True, save_to=None):
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if save_to is not None:
        options.optimized_model_filepath = str(save_to)
    source = model if isinstance(model, (str, bytes)) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model, *inputs, optimized=True):
    """Every output by its name."""
    made = session(model, optimized=optimized)
    feeds = {i.name: np.asarray(values.plain(x)) for i, x in zip(made.get_inputs(), inputs, strict=True)}
    return dict(zip([o.name for o in made.get_outputs()], made.run(None, feeds), strict=True))


def evaluate(model, *inputs):
    """The same in the reference evaluator, which knows QuantizeLinear from opset 19 on."""
    made = reference.ReferenceEvaluator(model)
    feeds = {name: np.asarray(values.plain(x)) for name, x in zip(made.input_names, inputs, strict=True)}
    with np.errstate(all="ignore"):  # infinite results are meant
        return dict(zip(made.output_names, made.run(None, feeds), strict=True))


def exposed(model, *endings):
    """The model with the tensors as outputs whose names end so."""
    model = copy.deepcopy(model)
    infos = {v.name: v for v in (*model.graph.value_info, *model.graph.output)}
    names = [n for node in model.graph.node for n in node.output if n.endswith(endings)]
    del model.graph.output[:]
    model.graph.output.extend(infos[name] for name in names)
    return model


def code_tensors(model):
    """By quantizer: the tensor with its codes, and what was added to them."""
    found = {}
    for node in model.graph.node:
        props = {p.key: p.value for p in node.metadata_props}
        if "fakequant.quantizer" in props:
            assert node.output[0].endswith("_quantized")
            for path in props["fakequant.quantizer"].split("\n"):
                found.setdefault(path, (node.output[0], int(props["fakequant.offset"])))
    return found


def initializers(model):
    return {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}


def opset_of(model):
    return {o.domain: o.version for o in model.opset_import}


def calibrated(model, config, data):
    model = fq.prepare(model, config)
    return fq.calibrate(model, data if callable(data) else [data], progress=False)


def exported(model, folder, example, name="model.onnx", **options):
    """The file, loaded; nothing else is in the folder but what was there."""
    before = set(os.listdir(folder))
    fq.export_onnx(model, folder / name, example, **options)
    assert set(os.listdir(folder)) == before | {name}
    model = onnx.load(folder / name)
    onnx.checker.check_model(model, full_check=True)
    assert opset_of(model) == {"": options.get("opset", 21)}
    assert not model.functions
    return model


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same(expected, actual, *names):
    assert_same_bits(values.plain(expected).detach().numpy(), np.asarray(actual), *names)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("exported")


# --- every range: codes of activations and of weights -----------------------------------------------------


def signed(bits, **fields):
    return QuantSpec(bits=bits, **fields)


def unsigned(bits, **fields):
    return QuantSpec(bits=bits, signed=False, symmetric=False, **fields)


def group(bits, size, **fields):
    return QuantSpec(bits=bits, axis=-1, group_size=size, **fields)


# Of an input, and of a weight.
INPUTS = {
    **{f"int{b}": signed(b) for b in range(2, 9)},
    **{f"uint{b}": unsigned(b) for b in range(2, 9)},
    "int4_narrow": signed(4, narrow_range=True),
    "int8_narrow": signed(8, narrow_range=True),
    "int8_affine": signed(8, symmetric=False),
    "int5_affine_narrow": signed(5, symmetric=False, narrow_range=True),
    "int16": signed(16),
    "int16_narrow": signed(16, narrow_range=True),
    "int12_affine": signed(12, symmetric=False),
    "uint16": unsigned(16),
    "uint9": unsigned(9),
}
WEIGHTS = [
    *(signed(b, axis=0) for b in range(2, 9)),
    *(unsigned(b, axis=0) for b in range(2, 9)),
    signed(4, narrow_range=True, axis=0), signed(8, narrow_range=True), signed(8, symmetric=False, axis=0),
    group(4, 16), group(4, 32), group(4, 128), group(2, 32), group(8, 16, narrow_range=True), group(3, 128),
]  # fmt: skip
MORE_WEIGHTS = {
    "rows": (unsigned(8), signed(4, axis=0, group_size=2)),
    "int16_weight": (unsigned(8), signed(16, axis=0)),
    "uint4_group": (unsigned(8), unsigned(4, axis=-1, group_size=32)),
    "uint2_group": (unsigned(8), unsigned(2, axis=-1, group_size=64)),
}
RANGES = {name: (x, w) for (name, x), w in zip(INPUTS.items(), WEIGHTS, strict=True)}


class Ranges(nn.Module):
    """A layer for each, which sees its own part of the input."""

    def __init__(self, names):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(256, 4) for name in names})

    def forward(self, x):
        return torch.stack([layer(x[:, i]) for i, layer in enumerate(self.layers.values())], 1)


def ranges(specs, target):
    torch.manual_seed(0)
    config = QuantConfig(target=target)
    for name, (x, weight) in specs.items():
        # Scales that are no powers of two; of affine grids a zero point within the range.
        step = 0.1 + 0.001 * x.bits
        low = x.qmin if x.symmetric else x.qmin - (x.qmin + x.levels // 3)
        observer = Fixed(low * step, (low + x.levels - 1) * step)
        config = config.rule(f"layers.{name}", weight=weight, input=x, activation_observer=observer)
    return fq.calibrate(fq.prepare(Ranges(specs), config), [torch.zeros(1, len(specs), 256)], progress=False)


def hostile(scale, zero_point, spec):
    """Every tie near the range and a float either side, and numbers far away; in rows of 256."""
    ends = [spec.qmin - int(zero_point), spec.qmax - int(zero_point)]
    near = range(-150, 151) if spec.bits <= 8 else range(-60, 61)
    k = np.array(sorted({*near, *(end + d for end in ends for d in range(-30, 31))}), dtype=np.float32)
    ties = ((k + np.float32(0.5)) * np.float32(scale)).astype(np.float32)
    infinite = np.float32(np.inf)
    far = np.array([0.0, -0.0, 1e-45, -1e-45, 1e9, -1e9, 3e38, -3e38, infinite, -infinite], dtype=np.float32)
    x = np.concatenate([ties, np.nextafter(ties, infinite), np.nextafter(ties, -infinite), k * np.float32(scale), far])
    return np.resize(x, (8, 256))


def check_ranges(model, specs, proto, execute, largest=np.inf):
    golden = fq.convert(model)
    grids = {name: golden.layers[name].input_quantizer for name in specs}
    x = np.stack([hostile(g.scale, g.zero_point, g.spec) for g in grids.values()], 1).clip(-largest, largest)
    tensors = code_tensors(proto)
    assert sorted(tensors) == sorted(f"layers.{name}.input_quantizer" for name in specs)
    found = execute(exposed(proto, "input_quantizer_quantized"), torch.from_numpy(x))
    stored = initializers(proto)
    for i, (name, grid) in enumerate(grids.items()):
        path = f"layers.{name}.input_quantizer"
        expected = fq.quantize(x[:, i], grid.scale.numpy(), grid.zero_point.numpy(), grid.spec)
        if not grid.spec.symmetric:
            assert grid.spec.qmin < int(grid.zero_point) < grid.spec.qmax, name
        tensor, offset = tensors[path]
        codes = found[tensor].astype(np.int64) - offset
        assert codes.min() == grid.spec.qmin, name
        assert codes.max() == grid.spec.qmax, name
        np.testing.assert_array_equal(codes, expected.astype(np.int64), err_msg=name)
        assert_same_bits(grid.scale.numpy(), stored[f"{path}_scale"], name)
        assert int(stored[f"{path}_zero_point"]) - offset == int(grid.zero_point), name
    for name, (_, spec) in specs.items():
        check_weight(golden.layers[name], spec, f"layers.{name}", proto, stored)
    found = execute(exposed(proto, ".weight_dequantized"), torch.from_numpy(x))
    for name in specs:
        same(integer.float_weight(golden.layers[name]), found[f"layers.{name}.weight_dequantized"], name)


def check_weight(layer, spec, path, proto, stored):
    """Codes, scales and the place they are for."""
    zero = 0 if layer.weight_zero_point is None else layer.weight_zero_point
    times = 2**layer._fakequant.weight_shift
    codes = fq.quantize(integer.float_weight(layer), layer.weight_scale * times, zero, spec).numpy()
    found = stored[f"{path}.weight_codes"]
    np.testing.assert_array_equal(found.astype(np.int64), codes.astype(np.int64) * times, err_msg=path)
    assert found.astype(np.int64).min() >= spec.qmin * times
    assert_same_bits(layer.weight_scale.numpy().ravel(), stored[f"{path}.weight_scale"].ravel(), path)
    node = next(n for n in proto.graph.node if f"{path}.weight_codes" in n.input)
    assert node.op_type == "DequantizeLinear"
    attributes = {a.name: a.i for a in node.attribute}
    if spec.granularity == "group":
        assert attributes["block_size"] == spec.group_size
    kinds = onnx.TensorProto
    kind = next(i.data_type for i in proto.graph.initializer if i.name == f"{path}.weight_codes")
    opset = opset_of(proto)[""]
    if integer.is_integer(layer) and spec.bits <= 8:  # kernels take bytes
        assert kind == (kinds.INT8 if spec.signed else kinds.UINT8)
    elif spec.bits == 4 and opset >= 21:
        assert kind == (kinds.INT4 if spec.signed else kinds.UINT4)
    elif spec.bits == 2 and opset >= 25:
        assert kind == (kinds.INT2 if spec.signed else kinds.UINT2)


def test_every_range_has_equal_codes_in_onnxruntime(folder):
    specs = RANGES
    model = ranges(specs, "generic")
    proto = exported(model, folder, torch.zeros(2, len(specs), 256), "ranges.onnx")
    check_ranges(model, specs, proto, lambda m, x: run(m, x, optimized=False))
    check_ranges(model, specs, proto, run)


def test_two_bits_have_a_type_of_their_own_from_opset_25(folder):
    specs = {name: RANGES[name] for name in ("int2", "uint2", "uint4", "uint9")}
    specs |= {**MORE_WEIGHTS, "int2_group": (presets.int16(), group(2, 32))}
    model = ranges(specs, "generic")
    proto = exported(model, folder, torch.zeros(2, len(specs), 256), "two_bits.onnx", opset=25)
    check_ranges(model, specs, proto, evaluate, largest=1e7)  # it makes int32 of x / scale before it clips
    check_ranges(model, specs, proto, lambda m, x: run(m, x, optimized=False))


@pytest.mark.parametrize("weight", [signed(2, axis=0), unsigned(2, axis=0)], ids=str)
def test_two_bits_beside_a_quantized_input_are_loaded_with_all_optimizations(weight, tmp_path):
    """ONNX Runtime 1.31 makes a QGemm of such a layer, which then does not take 2 bits."""
    config = QuantConfig(default=LayerConfig(weight=weight, input=presets.uint8()))
    model = calibrated(nn.Sequential(nn.Linear(8, 4)), config, randn(4, 8))
    session(exported(model, tmp_path, randn(1, 8), opset=25))


def test_codes_stored_as_unsigned_numbers_are_equal_at_the_lowest_opset(folder):
    names = ("int2", "uint3", "int7", "int8", "int8_narrow", "int5_affine_narrow")
    specs = {name: (INPUTS[name], signed(8, narrow_range=True, axis=0)) for name in names}
    model = ranges(specs, "onnxruntime-vnni")
    proto = exported(model, folder, torch.zeros(2, len(specs), 256), "unsigned.onnx", opset=13)
    for tensor, _ in code_tensors(proto).values():
        kind = next(v.type.tensor_type.elem_type for v in proto.graph.value_info if v.name == tensor)
        assert kind == onnx.TensorProto.UINT8
    check_ranges(model, specs, proto, lambda m, x: run(m, x, optimized=False))
    check_ranges(model, specs, proto, run)


# --- a CNN for x86, as it comes from training ----------------------------------------------------------------


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU())
        self.pointwise = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.BatchNorm2d(8))
        self.act = nn.ReLU()
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.left, self.right = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.act2 = nn.ReLU()
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.hidden, self.head = nn.Linear(8, 16), nn.Linear(16, 5)
        self.tokens = nn.Linear(8, 3)

    def forward(self, x):
        x = self.stem(x)
        x = self.act(x + self.pointwise(self.depthwise(x)))
        x = self.pool(F.relu(self.twice(F.relu(self.twice(x)))))
        x = self.act2(self.left(x) + self.right(x))  # two readers of one tensor
        tokens = self.tokens(x.permute(0, 2, 3, 1).flatten(1, 2))
        return self.head(F.relu(self.hidden(self.mean(x).flatten(1)))), tokens


def with_trained_norms(model, seed=0):
    """Factors of either sign."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for value in (module.weight.data, module.bias.data, module.running_mean):
                value.copy_(torch.randn(value.shape, generator=generator))
            module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.5)
    return model


def make_cnn():
    torch.manual_seed(0)
    # A range that the ReLU before `head` does not need: its zero point is not the lowest code.
    config = recipes.int8(target=X86).rule("head", activation_observer=Fixed(-0.5, 1.5))
    return calibrated(with_trained_norms(Cnn()), config, randn(64, 3, 16, 16))


@pytest.fixture(scope="module")
def cnn(folder):
    model = make_cnn()
    return model, exported(model, folder, randn(1, 3, 16, 16), "cnn.onnx")


def check_equal_to_golden(model, proto, *inputs):
    expected = fq.convert(model)(*inputs)
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = run(proto, *inputs)
    for (name, y), known in zip(found.items(), expected, strict=True):
        same(known, y, name)


def test_a_cnn_gives_the_bits_of_the_golden_model(cnn):
    model, proto = cnn
    golden = fq.convert(model)
    assert (golden.stem[0].weight_scale != model.stem[0].weight_quantizer.qparams()[0]).all()  # it is folded
    assert any(bool((m.weight < 0).any()) for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    assert int(golden.head.input_quantizer.zero_point) > 0
    check_equal_to_golden(model, proto, randn(256, 3, 16, 16, seed=1))
    check_equal_to_golden(model, proto, 100 * randn(3, 3, 16, 16, seed=2))  # everything is clipped


def test_all_layers_of_a_cnn_run_as_integer_kernels(cnn, tmp_path):
    _, proto = cnn
    session(proto, save_to=tmp_path / "optimized.onnx")
    operations = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert sum(op in INTEGER_KERNELS for op in operations) == 10
    assert not FLOAT_KERNELS & set(operations)
    assert operations.count("QLinearAdd") == 2
    assert operations.count("QLinearGlobalAveragePool") == 1


def test_readers_behind_a_move_do_not_keep_a_layer_in_float(tmp_path):
    """Both have the same grid, because they see the same numbers."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.conv = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
            self.other, self.head = nn.Linear(4, 3), nn.Linear(36, 3)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.stem(x)), 2)
            return self.other(self.conv(x).flatten(1)), self.head(x.flatten(1))

    torch.manual_seed(0)
    x = randn(16, 3, 8, 8)
    model = calibrated(Net(), recipes.int8(target=X86), x)
    golden = fq.convert(model)
    assert golden.conv.input_quantizer.scale == golden.head.input_quantizer.scale
    proto = exported(model, tmp_path, x)
    check_equal_to_golden(model, proto, x)
    session(proto, save_to=tmp_path / "optimized.onnx")
    assert not FLOAT_KERNELS & {node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node}


def test_without_optimizations_and_in_the_reference_evaluator_a_cnn_is_near(cnn):
    """Every code may be a step off where sums are rounded elsewhere: nearly all are not."""
    model, proto = cnn
    x = randn(8, 3, 16, 16, seed=3)
    for y in (run(proto, x, optimized=False), evaluate(proto, x)):
        for expected, found in zip(fq.convert(model)(x), y.values(), strict=True):
            difference = np.abs(values.plain(expected).numpy() - found)
            assert np.median(difference) < 1e-5
            assert difference.max() < 0.05


def test_the_file_of_a_cnn_has_integers_for_weights_and_no_batch_norm(cnn):
    model, proto = cnn
    golden = fq.convert(model)
    assert "BatchNormalization" not in {node.op_type for node in proto.graph.node}
    stored = initializers(proto)
    layers = {path: m for path, m in golden.named_modules() if isinstance(m, IntegerLayer)}
    assert len(layers) == 9
    for path, layer in layers.items():
        np.testing.assert_array_equal(
            stored[f"{path}.weight_codes"], integer.weight_levels(layer).numpy(), err_msg=path
        )
        assert stored[f"{path}.weight_codes"].dtype == np.int8
        assert np.abs(stored[f"{path}.weight_codes"].astype(int)).max() <= 64
        same(layer.weight_scale, stored[f"{path}.weight_scale"], path)
        grid = layer.input_quantizer or layer._fakequant.input_grid
        assert stored[f"{path}.bias_codes"].dtype == np.int32
        np.testing.assert_array_equal(stored[f"{path}.bias_codes"], layer.bias_codes.numpy(), err_msg=path)
        expected = np.float32(grid.scale.numpy()) * layer.weight_scale.numpy()
        assert_same_bits(expected, stored[f"{path}.bias_scale"], path)
    # No float in the file has as many elements as a weight.
    floats = {name: array.size for name, array in stored.items() if array.dtype == np.float32}
    assert max(floats.values()) <= 16
    assert all(name.endswith(("_scale", "_low", "_high")) for name in floats), floats


def test_tensors_have_the_paths_of_their_modules(cnn):
    model, proto = cnn
    paths = [path for path, _ in model.named_modules() if path]
    for name, array in initializers(proto).items():
        if array.dtype != np.int64:  # a shape
            assert any(name.startswith((f"{path}.", f"{path}_")) for path in paths), name
    names = {name for node in proto.graph.node for name in node.output}
    assert {"stem.0.weight_dequantized", "stem.2.output_quantizer_quantized", "head.input_quantizer_quantized"} <= names
    assert {"twice.input_quantizer_quantized", "twice.input_quantizer_2_quantized"} <= names
    assert [i.name for i in proto.graph.input] == ["x"]
    assert not any(p.key.startswith("pkg.") for node in proto.graph.node for p in node.metadata_props)
    assert b"/site-packages/" not in proto.SerializeToString()


def test_scales_of_activations_are_those_of_training(cnn):
    model, proto = cnn
    stored = initializers(proto)
    known = {path: q for path, q in fq.nn.quantizers(model) if not path.endswith("weight_quantizer")}
    assert set(known) <= set(code_tensors(proto))
    for path in known:
        if f"{path}_scale" not in stored:  # of two equal grids of one tensor one is there
            assert path in ("left.input_quantizer", "right.input_quantizer")
            continue
        scale, zero_point = known[path].qparams()
        same(scale, stored[f"{path}_scale"], path)
        assert int(stored[f"{path}_zero_point"]) == int(zero_point)


# --- a perceptron: the file, the model, the example ---------------------------------------------------------


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


@pytest.fixture(scope="module")
def mlp(folder):
    model = calibrated(perceptron(), recipes.int8(target=X86), randn(64, 16)).train()
    model(randn(8, 16)).square().sum().backward()
    before = copy.deepcopy(model)
    for old, new in zip(before.parameters(), model.parameters(), strict=True):
        old.grad = new.grad.clone()
    proto = exported(model, folder, randn(1, 16), "mlp.onnx")
    return model, before, proto


def test_a_perceptron_gives_the_bits_of_the_golden_model_for_every_batch_size(mlp, tmp_path):
    model, _, proto = mlp
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    assert proto.graph.output[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    for n in (1, 2, 1000):
        check_equal_to_golden(model, proto, randn(n, 16, seed=n))
    session(proto, save_to=tmp_path / "optimized.onnx")
    operations = [node.op_type for node in onnx.load(tmp_path / "optimized.onnx").graph.node]
    assert operations.count("QGemm") == 3
    assert set(operations) <= {"QuantizeLinear", "QGemm", "DequantizeLinear"}


def test_the_model_is_as_it_was_and_trains_on(mlp):
    model, before, _ = mlp
    assert set(model.state_dict()) == set(before.state_dict())
    for name, value in before.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert [m.training for m in model.modules()] == [m.training for m in before.modules()]
    assert model.__dict__.keys() == before.__dict__.keys()
    for (name, old), (_, new) in zip(before.named_parameters(), model.named_parameters(), strict=True):
        assert new.requires_grad == old.requires_grad, name
        assert torch.equal(new.grad, old.grad), name
    trained = copy.deepcopy(model)
    trained.zero_grad()
    trained(randn(8, 16)).square().sum().backward()
    assert all(p.grad is not None for p in trained.parameters())


def test_a_converted_model_gives_the_same_file_and_needs_no_runtime(mlp, folder, tmp_path, monkeypatch):
    model, _, _ = mlp
    golden = fq.convert(model)
    before = {name: value.clone() for name, value in golden.state_dict().items()}
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    exported(golden, tmp_path, randn(1, 16))
    assert (tmp_path / "model.onnx").read_bytes() == (folder / "mlp.onnx").read_bytes()
    assert {name: v.tolist() for name, v in golden.state_dict().items()} == {k: v.tolist() for k, v in before.items()}


def test_a_file_that_was_there_is_replaced_by_the_same_bytes(mlp, folder, tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"old")
    fq.export_onnx(mlp[0], str(tmp_path / "model.onnx"), randn(5, 16))  # another batch
    assert (tmp_path / "model.onnx").read_bytes() == (folder / "mlp.onnx").read_bytes()


# --- opsets, and more than one input -----------------------------------------------------------------------


class TwoInputs(nn.Module):
    """Operators that differ between opsets: a batch norm that stays, reductions, shapes that are computed."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.late = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 36, 5)

    def forward(self, x, shift):
        x = self.late(F.relu(self.norm(self.conv(x))))
        x = x + x.amax((2, 3), keepdim=True) * x.abs().mean(1, keepdim=True)
        return self.head(x.view(x.shape[0], -1)) + shift


@pytest.fixture(scope="module")
def two_inputs():
    torch.manual_seed(0)
    x, shift = randn(8, 3, 8, 8), randn(8, 5, seed=1)
    return calibrated(with_trained_norms(TwoInputs()), recipes.int8(target=X86), lambda m: m(x, shift))


@pytest.mark.parametrize("opset", [13, 17, 18, 25])
def test_every_opset_computes_the_same(opset, two_inputs, tmp_path):
    """The batch norm that stays in float may round otherwise: a code may be a step off, few are."""
    x, shift = randn(6, 3, 8, 8, seed=4), randn(6, 5, seed=5)
    proto = exported(two_inputs, tmp_path, (x[:1], shift[:1]), opset=opset)
    assert [node.op_type for node in proto.graph.node].count("BatchNormalization") == 1
    assert proto.ir_version == onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])
    expected = fq.convert(two_inputs)(x, shift).numpy()
    computed = [run(proto, x, shift), run(proto, x, shift, optimized=False)]
    if opset >= 19:
        computed.append(evaluate(proto, x, shift))
    for y in computed:
        (found,) = y.values()
        # Float sums in another order may put a code on the other side of a tie: one step of the last grid.
        np.testing.assert_allclose(found, expected, atol=0.01)
        assert np.median(np.abs(found - expected)) < 1e-5


@pytest.mark.parametrize("opset", [12, 26, 0, -1, 21.0, "21", None, True])
def test_an_opset_that_cannot_be_written_is_refused(opset, two_inputs, tmp_path):
    with pytest.raises((ValueError, TypeError), match=r"`opset` must be a number from 13 to 25, got"):
        fq.export_onnx(two_inputs, tmp_path / "m.onnx", (), opset=opset)
    assert not os.listdir(tmp_path)


NEEDS_21 = {
    "groups": (LayerConfig(weight=presets.int4(group=4)), r"0\.weight: scales per group need opset 21"),
    "int16": (LayerConfig(input=presets.int16()), r"0\.input_quantizer: int16 needs opset 21"),
    "int16 weights": (LayerConfig(weight=QuantSpec(bits=16, axis=0)), r"0\.weight: int16 needs opset 21"),
}


@pytest.mark.parametrize(("layer", "message"), NEEDS_21.values(), ids=NEEDS_21)
def test_what_an_opset_has_no_way_to_write_is_refused_by_name(layer, message, tmp_path):
    model = calibrated(nn.Sequential(nn.Linear(8, 4)), QuantConfig(default=layer), randn(4, 8))
    with pytest.raises(ValueError, match=f"{message}(.|\n)*Use opset=21"):
        fq.export_onnx(model, tmp_path / "m.onnx", randn(4, 8), opset=18)
    assert not os.listdir(tmp_path)


# --- one module, several places ---------------------------------------------------------------------------


class Shared(nn.Module):
    """One layer, after a ReLU and after none; results that are read as floats too."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        return self.b(F.relu(y)), self.b(y), self.b(self.b(x)), y


SHARED = {
    "uint7": (unsigned(7), "generic"),
    "int8, stored as it is": (signed(8), "generic"),
    "int8, stored unsigned": (signed(8), X86),
}


@pytest.mark.parametrize(("spec", "target"), SHARED.values(), ids=SHARED)
def test_a_layer_after_a_relu_and_after_none_has_both_ranges(spec, target, tmp_path):
    torch.manual_seed(0)
    layer = LayerConfig(weight=QuantSpec(bits=7, narrow_range=True, axis=0), input=spec)
    model = calibrated(Shared(), QuantConfig(default=layer, target=target), randn(64, 8))
    x = randn(64, 8, seed=1)
    proto = exported(model, tmp_path, x[:1])
    for optimized in (True, False):
        found = run(proto, x, optimized=optimized)
        for expected, y in zip(fq.convert(model)(x), found.values(), strict=True):
            # Layers that compute in float, in another order.
            np.testing.assert_allclose(y, values.plain(expected).numpy(), atol=1e-5)


def test_a_model_that_is_one_layer_has_names_without_dots_before_them(tmp_path):
    model = calibrated(nn.Linear(8, 4), recipes.int8(target=X86), randn(4, 8))
    stored = initializers(exported(model, tmp_path, randn(1, 8)))
    assert set(stored) == {
        *("input_quantizer_scale", "input_quantizer_zero_point", "bias_codes", "bias_scale"),
        *("weight_codes", "weight_scale", "weight_zero_point"),
    }


def test_groups_of_one_are_scales_per_element(tmp_path):
    model = calibrated(nn.Sequential(nn.Linear(8, 4)), recipes.int4_weight_only(1), randn(4, 8))
    proto = exported(model, tmp_path, randn(1, 8))
    x = randn(3, 8, seed=1)
    # Eight floats are summed in another order.
    np.testing.assert_allclose(next(iter(run(proto, x).values())), fq.convert(model)(x).numpy(), atol=1e-6)


# --- other layers -----------------------------------------------------------------------------------------


class Others(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.grouped = nn.Conv1d(16, 16, 3, padding=1, groups=4)
        self.act, self.norm = nn.ReLU(), nn.BatchNorm1d(16)
        self.up = nn.ConvTranspose1d(16, 8, 2, stride=2, groups=2)
        self.up2 = nn.ConvTranspose2d(8, 4, 3, stride=2)
        self.volume = nn.Conv3d(4, 2, 2)

    def forward(self, ids, other):
        x = self.table(ids)
        x, weights = self.attention(x, other, other)
        y = self.grouped(x.transpose(1, 2))
        y = self.norm(self.act(y))
        z = self.up(y)
        image = self.up2(z.unflatten(2, (3, 4)))
        return x, weights, y, z, image, self.volume(image.unflatten(3, (3, 3)))


def test_other_layers_are_near_the_golden_model(tmp_path):
    """Products of floats (attention, transposed convolutions) are summed in another order: a few float32 steps.

    A code that such a difference moves is a step of a few hundredths here; with these inputs none does.
    """
    torch.manual_seed(0)
    ids, other = torch.arange(24).reshape(4, 6) % 20, randn(4, 5, 16)
    model = calibrated(with_trained_norms(Others()), recipes.int8(target=X86), lambda m: m(ids, other))
    inputs = {"ids": ids, "other": other}
    proto = exported(model, tmp_path, {name: x[:2] for name, x in inputs.items()})
    assert [i.name for i in proto.graph.input] == ["ids", "other"]
    assert [node.op_type for node in proto.graph.node].count("BatchNormalization") == 1
    golden = fq.convert(model)
    stored = initializers(proto)
    for path, layer in golden.named_modules():
        if isinstance(layer, IntegerLayer):
            assert stored[f"{path}.weight_codes"].dtype == np.int8, path
    expected = golden(**inputs)
    for found in (run(proto, ids, other), run(proto, ids, other, optimized=False)):
        for known, y in zip(expected, found.values(), strict=True):
            # Attention and unfolded layers compute in float, in another order.
            np.testing.assert_allclose(y, values.plain(known).numpy(), atol=2e-5)


def test_bags_of_rows_are_near_the_golden_model(tmp_path):
    """Sums of floats in another order."""

    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(12, 32, mode="sum"), nn.Linear(32, 3)

        def forward(self, ids):
            return self.head(self.bag(ids))

    torch.manual_seed(0)
    ids = torch.arange(24).reshape(4, 6) % 12
    model = calibrated(Bag(), recipes.int4_weight_only(16), ids)
    proto = exported(model, tmp_path, ids)
    for optimized in (True, False):
        (y,) = run(proto, ids, optimized=optimized).values()
        # Rows are summed in another order.
        np.testing.assert_allclose(y, values.plain(fq.convert(model)(ids)).numpy(), atol=1e-5)


def test_ranges_that_are_found_at_run_time_are_near_the_golden_model(tmp_path):
    """In float, as the graph says; a step of 1/127 where a tie falls otherwise."""
    torch.manual_seed(0)
    x = randn(4, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Linear(6, 5))
    model = calibrated(model, recipes.int8_dynamic(), x)
    proto = exported(model, tmp_path, x[:1])
    (y,) = run(proto, x).values()
    # Ranges are found in float at run time, and sums computed from them.
    np.testing.assert_allclose(y, values.plain(fq.convert(model)(x)).numpy(), atol=1e-4)


# --- sizes ------------------------------------------------------------------------------------------------


SIZES = {"int8": (recipes.int8(), 0.27), "int4 in groups of 32": (recipes.int4_weight_only(32), 0.16)}


def large():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512))


@pytest.fixture(scope="module")
def float_size(folder):
    path = folder / "float.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls what torch deprecates
        torch.onnx.export(large(), (randn(2, 1024),), path, dynamo=True, external_data=False, verbose=False)
    return path.stat().st_size


@pytest.mark.parametrize(("config", "limit"), SIZES.values(), ids=SIZES)
def test_a_file_is_as_small_as_its_codes(config, limit, float_size, tmp_path):
    model = calibrated(large(), config, randn(8, 1024))
    proto = exported(model, tmp_path, randn(2, 1024))
    assert (tmp_path / "model.onnx").stat().st_size <= limit * float_size
    x = randn(8, 1024, seed=1)
    (y,) = run(proto, x, optimized=False).values()
    # Sums of 1024 floats in another order; with 8 bits a code of the layer between may be a step off.
    np.testing.assert_allclose(y, values.plain(fq.convert(model)(x)).numpy(), atol=1e-2)
    stored = initializers(proto)
    assert sum(a.size for a in stored.values() if a.dtype == np.float32) <= 1024 * 1536 / 32 + 4000


# --- errors ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    return calibrated(nn.Sequential(nn.Linear(4, 2)), recipes.int8(target=X86), randn(3, 4))


def refused(error, message, model, path, example, **options):
    """And a file that was there before is there still."""
    folder = path.parent
    there = folder.is_dir() and not path.is_dir()
    if there:
        path.write_bytes(b"old")
    with pytest.raises(error, match=message):
        fq.export_onnx(model, path, example, **options)
    if there:
        assert os.listdir(folder) == [path.name]
        assert path.read_bytes() == b"old"


def test_a_model_without_scales_is_refused(tmp_path):
    model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), recipes.int8())
    message = r"0\.input_quantizer(.|\n)*fakequant\.calibrate"
    refused(RuntimeError, message, model, tmp_path / "m.onnx", randn(1, 4))


@pytest.mark.parametrize("model", [nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2))], ids=["layer", "sequence"])
def test_a_float_model_is_refused(model, tmp_path):
    refused(ValueError, r"fakequant\.prepare", model, tmp_path / "m.onnx", randn(1, 4))


def test_what_is_no_model_is_refused(tmp_path):
    refused(TypeError, "nn.Module|Module", "model", tmp_path / "m.onnx", randn(1, 4))


def test_an_unknown_target_is_refused(small, tmp_path):
    refused(ValueError, "generic", small, tmp_path / "m.onnx", randn(1, 4), target="toaster")
    refused(ValueError, "toaster", fq.convert(small), tmp_path / "m.onnx", randn(1, 4), target="toaster")


@pytest.mark.parametrize("example", [None, 1.5, "x", np.ones((1, 4))], ids=["None", "number", "text", "array"])
def test_an_example_that_is_no_tensor_is_refused(example, small, tmp_path):
    refused(TypeError, "`example_inputs` must be a tensor", small, tmp_path / "m.onnx", example)


def test_a_folder_that_is_not_there_is_named(small, tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        fq.export_onnx(small, tmp_path / "missing" / "m.onnx", randn(1, 4))
    assert not os.listdir(tmp_path)


def test_a_path_below_a_file_is_refused(small, tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(OSError, match="file"):
        fq.export_onnx(small, tmp_path / "file" / "m.onnx", randn(1, 4))
    assert (tmp_path / "file").read_bytes() == b"old"


def test_a_path_that_is_a_folder_is_refused(small, tmp_path):
    (tmp_path / "m.onnx").mkdir()
    with pytest.raises(IsADirectoryError, match=r"m\.onnx"):
        fq.export_onnx(small, tmp_path / "m.onnx", randn(1, 4))
    assert os.listdir(tmp_path) == ["m.onnx"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder in which nobody can write")
def test_a_folder_that_cannot_be_written_to_is_refused(small):
    with pytest.raises(OSError, match=r"m\.onnx"):
        fq.export_onnx(small, "/proc/self/m.onnx", randn(1, 4))


class DependsOnData(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x if x.sum().item() > 0 else -x)


def test_a_model_that_torch_cannot_export_leaves_no_file(tmp_path):
    model = calibrated(DependsOnData(), recipes.int8(target=X86), randn(3, 4))
    refused(Exception, "export", model, tmp_path / "m.onnx", randn(2, 4))


def test_an_example_that_the_model_does_not_take_leaves_no_file(small, tmp_path):
    refused(Exception, "export", small, tmp_path / "m.onnx", randn(2, 5))


def test_weights_that_a_target_cannot_sum_are_refused(tmp_path):
    model = calibrated(nn.Sequential(nn.Linear(4, 2)), recipes.int8(), randn(3, 4))
    message = r"(?s)0 has weights up to 127.*only up to 64.*prepare with a config that has target='onnxruntime-x86'"
    refused(ValueError, message, model, tmp_path / "m.onnx", randn(1, 4), target=X86)


def test_activations_that_a_target_does_not_have_are_refused(small, tmp_path):
    message = r"(?s)0\.input_quantizer is affine \(uint8, per tensor\).*symmetric.*target='tensorrt'"
    refused(ValueError, message, small, tmp_path / "m.onnx", randn(1, 4), target="tensorrt")


def test_a_model_that_was_converted_for_another_target_is_refused(small, tmp_path):
    message = r"converted for the target 'onnxruntime-x86', not for 'generic'(.|\n)*fakequant\.convert"
    refused(ValueError, message, fq.convert(small), tmp_path / "m.onnx", randn(1, 4), target="generic")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnx_ir"])
def test_a_missing_package_is_named_with_the_command_that_installs_it(package, small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    message = rf'{package.replace("onnx_ir", "onnxscript")}, which(.|\n)*pip install "fakequant\[onnx\]"'
    refused(ImportError, message, small, tmp_path / "m.onnx", randn(1, 4))


def test_missing_safetensors_is_named_with_the_command_that_installs_it(small, tmp_path, monkeypatch):
    pytest.importorskip("safetensors.torch")
    golden = fq.convert(small)
    fq.save_converted(golden, tmp_path / "m.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    message = r'safetensors, which(.|\n)*pip install "fakequant\[onnx\]"'
    with pytest.raises(ImportError, match=message):
        fq.save_converted(golden, tmp_path / "other.safetensors")
    with pytest.raises(ImportError, match=message):
        fq.load_converted(nn.Sequential(nn.Linear(4, 2)), tmp_path / "m.safetensors")
    assert os.listdir(tmp_path) == ["m.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_model_in_another_float_type_is_refused_with_a_reason_or_exported(dtype, tmp_path):
    """QuantizeLinear takes no float64, and its scale has the type of its input."""
    model = calibrated(nn.Sequential(nn.Linear(4, 2)).to(dtype), recipes.int8(target=X86), randn(3, 4).to(dtype))
    try:
        fq.export_onnx(model, tmp_path / "m.onnx", randn(1, 4).to(dtype))
    except (ValueError, TypeError) as error:
        assert str(dtype)[6:] in str(error)  # noqa: PT017
        assert not os.listdir(tmp_path)
    else:
        session(str(tmp_path / "m.onnx"))


def test_a_quantizer_of_the_users_own_is_part_of_the_file(tmp_path):
    """A `FakeQuantize` that stands in the model by itself, not in one of our layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), fq.nn.FakeQuantize(presets.uint8()), nn.Sigmoid(), nn.Linear(8, 4))
    model = calibrated(model, recipes.int8(target=X86), randn(16, 8))
    proto = exported(model, tmp_path, randn(1, 8))
    assert "1" in code_tensors(proto)
    x = randn(16, 8, seed=1)
    (y,) = run(proto, x).values()
    # A sigmoid in float stands between.
    np.testing.assert_allclose(y, values.plain(fq.convert(model)(x)).numpy(), atol=1e-5)
