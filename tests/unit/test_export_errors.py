"""`export_onnx` refuses what it cannot export, and leaves an existing file unchanged."""

import os
import sys

import numpy as np
import pytest
from onnx_models import X86, calibrated, code_tensors, exported, randn, run, session

import fakequant as fq
from fakequant import presets

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
recipes = pytest.importorskip("fakequant.recipes")
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
nn = torch.nn


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
