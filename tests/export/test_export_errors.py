"""`export_onnx` refuses what it cannot export, and leaves an existing file unchanged."""

import os
import sys

import numpy as np
import pytest

import fakequant as fq
from fakequant import presets
from onnx_models import X86, calibrated, code_tensors, exported, randn, run, session

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
recipes = pytest.importorskip("fakequant.recipes")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("fakequant._runtimes.onnxruntime.running")
nn = torch.nn


@pytest.fixture(scope="module")
def small():
    return calibrated(nn.Sequential(nn.Linear(4, 2)), recipes.int8(target=X86), randn(3, 4))


def refused(error, message, model, path, example, **options):
    """Asserts that the export raises and leaves an existing file unchanged."""
    folder = path.parent
    there = folder.is_dir() and not path.is_dir()
    if there:
        path.write_bytes(b"old")
    with pytest.raises(error, match=message):
        fq.export_onnx(model, path, example, **options)
    if there:
        assert os.listdir(folder) == [path.name]
        assert path.read_bytes() == b"old"


def test_export_refuses_a_model_without_scales(tmp_path):
    model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), recipes.int8(), torch.ones(1, 4))
    message = r"0\.input_quantizer(.|\n)*fakequant\.calibrate"
    refused(RuntimeError, message, model, tmp_path / "m.onnx", randn(1, 4))


@pytest.mark.parametrize("model", [nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 2))], ids=["layer", "sequence"])
def test_export_refuses_a_float_model(model, tmp_path):
    refused(ValueError, r"fakequant\.prepare", model, tmp_path / "m.onnx", randn(1, 4))


def test_export_refuses_a_non_module(tmp_path):
    refused(TypeError, "nn.Module|Module", "model", tmp_path / "m.onnx", randn(1, 4))


def test_export_refuses_an_unknown_target(small, tmp_path):
    refused(ValueError, "generic", small, tmp_path / "m.onnx", randn(1, 4), target="toaster")
    refused(ValueError, "toaster", fq.convert(small), tmp_path / "m.onnx", randn(1, 4), target="toaster")


@pytest.mark.parametrize("example", [None, 1.5, "x", np.ones((1, 4))], ids=["None", "number", "text", "array"])
def test_export_refuses_an_example_that_is_not_a_tensor(example, small, tmp_path):
    refused(TypeError, "`example` must be a tensor", small, tmp_path / "m.onnx", example)


def test_export_to_a_missing_folder_names_it(small, tmp_path):
    with pytest.raises(FileNotFoundError, match="missing"):
        fq.export_onnx(small, tmp_path / "missing" / "m.onnx", randn(1, 4))
    assert not os.listdir(tmp_path)


def test_export_refuses_a_path_below_a_file(small, tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(OSError, match="file"):
        fq.export_onnx(small, tmp_path / "file" / "m.onnx", randn(1, 4))
    assert (tmp_path / "file").read_bytes() == b"old"


def test_export_refuses_a_path_that_is_a_folder(small, tmp_path):
    (tmp_path / "m.onnx").mkdir()
    with pytest.raises(IsADirectoryError, match=r"m\.onnx"):
        fq.export_onnx(small, tmp_path / "m.onnx", randn(1, 4))
    assert os.listdir(tmp_path) == ["m.onnx"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a read-only folder")
def test_export_refuses_a_read_only_folder(small):
    with pytest.raises(OSError, match=r"m\.onnx"):
        fq.export_onnx(small, "/proc/self/m.onnx", randn(1, 4))


class DependsOnData(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x if x.sum().item() > 0 else -x)


def test_model_that_torch_cannot_export_leaves_no_file(tmp_path):
    model = calibrated(DependsOnData(), recipes.int8(target=X86), randn(3, 4))
    refused(Exception, "export", model, tmp_path / "m.onnx", randn(2, 4))


class Pooling(nn.Module):
    """A call that torch's exporter has no translation for."""

    def forward(self, x):
        return nn.functional.adaptive_max_pool2d(x, 3, return_indices=True)[0]


class Branching(nn.Module):
    """Code that depends on the data, so it cannot be traced."""

    def forward(self, x):
        return x + 1 if x.sum() > 0 else x


@pytest.mark.parametrize("kind", [Pooling, Branching])
@pytest.mark.parametrize("dynamic", [True, False])
def test_model_that_torch_cannot_export_names_the_module(kind, dynamic, tmp_path):
    model, x = nn.Sequential(nn.Conv2d(2, 2, 1), nn.Sequential(nn.ReLU(), kind())), torch.randn(2, 2, 5, 5)
    model = fq.calibrate(fq.prepare(model, recipes.int8(), x), [x], progress=False)
    message = r"torch's exporter cannot export the model: (.|\n)*This is in '1\.1'"
    refused(ValueError, message, model, tmp_path / "model.onnx", x, dynamic_batch=dynamic)


def test_example_of_the_wrong_shape_leaves_no_file(small, tmp_path):
    refused(Exception, "export", small, tmp_path / "m.onnx", randn(2, 5))


def test_export_refuses_weights_beyond_the_range_of_the_target(tmp_path):
    model = calibrated(nn.Sequential(nn.Linear(4, 2)), recipes.int8(), randn(3, 4))
    message = r"(?s)0 has weights up to 127.*only up to 64.*prepare with a config that has target='onnxruntime-x86'"
    refused(ValueError, message, model, tmp_path / "m.onnx", randn(1, 4), target=X86)


def test_export_refuses_activations_that_the_target_does_not_support(small, tmp_path):
    message = r"(?s)0\.input_quantizer is affine \(uint8, per tensor\).*symmetric.*target='tensorrt'"
    refused(ValueError, message, small, tmp_path / "m.onnx", randn(1, 4), target="tensorrt")


def test_export_refuses_a_model_converted_for_another_target(small, tmp_path):
    message = r"converted for the target 'onnxruntime-x86', not for 'generic'(.|\n)*fakequant\.convert"
    refused(ValueError, message, fq.convert(small), tmp_path / "m.onnx", randn(1, 4), target="generic")


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnx_ir"])
def test_export_names_a_missing_package_and_how_to_install_it(package, small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    message = rf'{package.replace("onnx_ir", "onnxscript")}, which(.|\n)*pip install "fakequant\[onnx\]"'
    refused(ImportError, message, small, tmp_path / "m.onnx", randn(1, 4))


def test_saving_without_safetensors_names_it_and_how_to_install_it(small, tmp_path, monkeypatch):
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
def test_float64_and_bfloat16_models_export_or_are_refused_with_the_dtype(dtype, tmp_path):
    """QuantizeLinear does not accept float64, and its scale has the dtype of its input."""
    model = calibrated(nn.Sequential(nn.Linear(4, 2)).to(dtype), recipes.int8(target=X86), randn(3, 4).to(dtype))
    try:
        fq.export_onnx(model, tmp_path / "m.onnx", randn(1, 4).to(dtype))
    except (ValueError, TypeError) as error:
        assert str(dtype)[6:] in str(error)  # noqa: PT017
        assert not os.listdir(tmp_path)
    else:
        session(str(tmp_path / "m.onnx"))


def test_quantizer_placed_by_the_user_is_exported(tmp_path):
    """The model contains a `FakeQuantize` that `prepare` did not add."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), fq.nn.FakeQuantize(presets.uint8()), nn.Sigmoid(), nn.Linear(8, 4))
    model = calibrated(model, recipes.int8(target=X86), randn(16, 8))
    proto = exported(model, tmp_path, randn(1, 8))
    assert "1" in code_tensors(proto)
    x = randn(16, 8, seed=1)
    (y,) = run(proto, x).values()
    # The sigmoid between the layers computes in float.
    np.testing.assert_allclose(y, values.plain(fq.convert(model)(x)).numpy(), atol=1e-5)


# --- the file is run before it is written ---------------------------------------------------------


def test_file_that_the_runtime_refuses_is_not_written(small, tmp_path, monkeypatch):
    def refuse(path, feed):
        names = [node.name for node in onnx.load(path).graph.node if node.op_type == "Gemm"]
        raise RuntimeError(f"[ONNXRuntimeError] : 10 : no kernel for Gemm in node ({names[0]})")

    monkeypatch.setattr(onnxruntime, "run_once", refuse)
    message = r"ONNX Runtime refuses the file, so it is not written: .*no kernel for Gemm(.|\n)*This is in '0'\.\n"
    refused(ValueError, message, small, tmp_path / "model.onnx", randn(1, 4))


def test_file_with_results_of_other_shapes_is_not_written(small, tmp_path, monkeypatch):
    monkeypatch.setattr(onnxruntime, "run_once", lambda path, feed: [np.zeros((1, 3), np.float32)])
    message = r"Result 0 is float32 of shape \(1, 2\) in the model and float32 of shape \(1, 3\) in ONNX Runtime"
    refused(ValueError, message, small, tmp_path / "model.onnx", randn(1, 4))


def test_export_does_not_need_the_runtime(small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    fq.export_onnx(small, tmp_path / "model.onnx", randn(1, 4))
    assert (tmp_path / "model.onnx").exists()
