"""Exporting and running ONNX files in tests."""

import os

import numpy as np
import pytest

import fakequant as fq
from fakequant import QuantSpec
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
reference = pytest.importorskip("onnx.reference")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
nn = torch.nn

X86 = "onnxruntime-x86"


def session(model, *, optimized=True, save_to=None, level=1):
    options = ort.SessionOptions()
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if level is not None:
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", str(level))
    if save_to is not None:
        options.optimized_model_filepath = str(save_to)
    source = model if isinstance(model, (str, bytes)) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model, *inputs, optimized=True):
    """Returns the outputs of ONNX Runtime by name."""
    made = session(model, optimized=optimized)
    feeds = {i.name: np.asarray(values.plain(x)) for i, x in zip(made.get_inputs(), inputs, strict=True)}
    return dict(zip([o.name for o in made.get_outputs()], made.run(None, feeds), strict=True))


def evaluate(model, *inputs):
    """Returns the outputs of ONNX's reference evaluator, which supports QuantizeLinear from opset 19 on."""
    made = reference.ReferenceEvaluator(model)
    feeds = {name: np.asarray(values.plain(x)) for name, x in zip(made.input_names, inputs, strict=True)}
    with np.errstate(all="ignore"):  # infinite results are expected
        return dict(zip(made.output_names, made.run(None, feeds), strict=True))


def code_tensors(model):
    """Returns the code tensor of every quantizer, and the offset that was added to its codes."""
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


def calibrated(model, config, x):
    return fq.calibrate(fq.prepare(model, config, x), [x], progress=False)


def exported(model, folder, example, name="model.onnx", **options):
    """Exports a model and loads the file. Asserts that the export writes nothing else."""
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


def signed(bits, **fields):
    return QuantSpec(bits=bits, **fields)


def unsigned(bits, **fields):
    return QuantSpec(bits=bits, signed=False, symmetric=False, **fields)


def with_trained_norms(model, seed=0):
    """Gives batch norms random statistics, and factors of both signs."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for value in (module.weight.data, module.bias.data, module.running_mean):
                value.copy_(torch.randn(value.shape, generator=generator))
            module.running_var.copy_(torch.rand(module.running_var.shape, generator=generator) + 0.5)
    return model
