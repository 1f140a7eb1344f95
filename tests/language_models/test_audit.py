"""`audit`: folders and ONNX files, of this and of other exporters, against the trained weights."""

import json

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fakequant as fq
from fakequant import recipes
from tiny_language_models import CASES, EXPERTS, batch, make, prepared, tensors_of


@pytest.mark.parametrize(
    ("name", "case"),
    [*(("llama", case) for case in CASES), *((name, "int4 groups") for name in EXPERTS), ("bert", "w8a8 static")],
)
def test_a_folder_has_the_trained_weights(name, case, tmp_path):
    model = prepared(name, case)
    written = fq.export_compressed_tensors(model, tmp_path / "folder")
    found = fq.audit(model, tmp_path / "folder")
    assert found.ok
    assert all(layer.moved == layer.differing == 0 and layer.steps == 0 for layer in found.layers)
    assert sum(layer.elements for layer in found.layers) >= len(written.layers)
    assert f"{len(found.layers)} of {len(found.layers)} layers have the trained values" in str(found)


def test_a_folder_of_another_state_of_training_has_moved_weights(tmp_path):
    model = prepared()
    fq.export_compressed_tensors(model, tmp_path / "folder")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.add_(0.01 * torch.randn(96, 64))
    found = fq.audit(model, tmp_path / "folder")
    assert not found.ok
    assert [layer.path for layer in found.layers if not layer.is_equal] == ["model.layers.1.mlp.up_proj"]
    layer = next(layer for layer in found.layers if not layer.is_equal)
    assert 0 < layer.moved <= layer.differing <= layer.elements == 96 * 64
    assert layer.steps > 0.25
    assert layer.error > 0.5


def test_one_code_that_was_changed_has_moved_by_one_step(tmp_path):
    model = prepared()
    fq.export_compressed_tensors(model, tmp_path / "folder")
    tensors = tensors_of(tmp_path / "folder")
    tensors["lm_head.weight_packed"][0, 0] ^= 1
    save_file(tensors, tmp_path / "folder/model.safetensors")
    found = fq.audit(model, tmp_path / "folder")
    wrong = [layer for layer in found.layers if not layer.is_equal]
    assert [(layer.path, layer.moved, layer.differing) for layer in wrong] == [("lm_head", 1, 1)]
    assert wrong[0].steps == pytest.approx(1)


def test_the_result_can_be_written_as_json(tmp_path):
    model = prepared()
    fq.export_compressed_tensors(model, tmp_path / "folder")
    found = json.loads(json.dumps(fq.audit(model, tmp_path / "folder").to_dict()))
    assert found["ok"] is True
    assert len(found["layers"]) == 15
    assert set(found["layers"][0]) == {
        "path", "trained", "stored", "elements", "moved", "differing", "steps", "error",
    }  # fmt: skip


# --- ONNX ------------------------------------------------------------------------------------------------


def _images():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * 16, 10),
    )  # fmt: skip
    with torch.no_grad():
        model[1].running_mean.normal_()
        model[1].running_var.uniform_(0.5, 2)
        model[1].weight.uniform_(0.5, 2)
        model[1].bias.normal_()
        model[3].bias.normal_()
    return model.eval(), torch.randn(4, 3, 8, 8)


def _rows():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).eval(), torch.randn(4, 64)


_ONNX = {
    "int8 with a batch norm": (_images, recipes.int8()),
    "w4a8": (_rows, recipes.w4a8(first_last_bits=None)),
    "int4 groups": (_rows, recipes.int4_weight_only(16)),
    "fp8": (_rows, recipes.fp8()),
    "int8 dynamic": (_rows, recipes.int8_dynamic()),
}


def _prepared_network(kind):
    make, config = _ONNX[kind]
    model, x = make()
    model = fq.prepare(model, config, x)
    fq.calibrate(model, [x])
    return model.eval(), x


@pytest.mark.parametrize("kind", _ONNX)
def test_an_onnx_file_has_the_trained_weights(kind, tmp_path):
    model, x = _prepared_network(kind)
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    found = fq.audit(model, tmp_path / "model.onnx")
    assert found.ok, str(found)
    assert len(found.layers) == (3 if kind.startswith("int8 with") else 2)
    assert "nothing" not in {layer.stored for layer in found.layers}


def test_an_onnx_file_of_another_state_has_moved_weights(tmp_path):
    model, x = _prepared_network("w4a8")
    fq.export_onnx(model, tmp_path / "model.onnx", x)
    with torch.no_grad():
        model[2].weight.mul_(1.07)
        model[2].weight[:5].neg_()
    found = fq.audit(model, tmp_path / "model.onnx")
    assert [layer.path for layer in found.layers if not layer.is_equal] == ["2"]


@pytest.fixture(scope="module")
def float_file(tmp_path_factory):
    """An ONNX file of `_rows` with names of its own, and matrices with the inputs first."""
    model, _ = _rows()
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    constants = [
        onnx.numpy_helper.from_array(np.ascontiguousarray(value.detach().numpy().T), name)
        for layer, number in ((model[0], 1), (model[2], 2))
        for name, value in ((f"w{number}", layer.weight), (f"b{number}", layer.bias))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["p1"]),
        helper.make_node("Add", ["p1", "b1"], ["s1"]),
        helper.make_node("Relu", ["s1"], ["r1"]),
        helper.make_node("MatMul", ["r1", "w2"], ["p2"]),
        helper.make_node("Add", ["p2", "b2"], ["y"]),
    ]
    ends = [[helper.make_tensor_value_info(name, kind, [4, size])] for name, size in (("x", 64), ("y", 10))]
    graph = helper.make_graph(nodes, "rows", *ends, constants)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    path = tmp_path_factory.mktemp("float") / "model.onnx"
    onnx.save(made, path)
    return path


def test_a_float_file_has_the_weights_before_rounding(float_file):
    model, _ = _prepared_network("int4 groups")
    found = fq.audit(model, float_file)
    assert not found.ok
    assert {layer.stored for layer in found.layers} == {"float"}
    for layer in found.layers:
        assert layer.error == pytest.approx(1)  # what the file lacks is the rounding
        assert layer.steps <= 0.51


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_file_by_onnxruntime_has_weights_on_another_grid(per_channel, float_file, tmp_path):
    quantization = pytest.importorskip("onnxruntime.quantization")
    quantization.quantize_dynamic(float_file, tmp_path / "model.onnx", per_channel=per_channel)
    model, _ = _prepared_network("w4a8")
    found = fq.audit(model, tmp_path / "model.onnx")
    assert not found.ok
    for layer in found.layers:
        assert layer.stored in ("int8", "uint8")
        assert 0 < layer.moved < layer.elements
        assert layer.steps < 1
        assert 0.5 < layer.error < 1.5


def test_a_file_with_fixed_scales_by_onnxruntime_is_read_too(float_file, tmp_path):
    quantization = pytest.importorskip("onnxruntime.quantization")
    model, x = _prepared_network("int8 dynamic")
    name = onnx.load(float_file).graph.input[0].name

    class Reader(quantization.CalibrationDataReader):
        def __init__(self):
            self.batches = iter([{name: x.numpy()}])

        def get_next(self):
            return next(self.batches, None)

    quantization.quantize_static(
        float_file, tmp_path / "model.onnx", Reader(), quant_format=quantization.QuantFormat.QDQ, per_channel=True,
        weight_type=quantization.QuantType.QInt8,
    )  # fmt: skip
    found = fq.audit(model, tmp_path / "model.onnx")
    assert {layer.stored for layer in found.layers} == {"int8"}
    for layer in found.layers:
        assert layer.steps < 2
        assert layer.error is not None


def test_a_file_of_another_model_has_nothing_of_the_layers(float_file):
    torch.manual_seed(5)
    other = nn.Sequential(nn.Linear(32, 20), nn.ReLU(), nn.Linear(20, 6))
    other = fq.prepare(other, recipes.int4_weight_only(4)).eval()
    found = fq.audit(other, float_file)
    assert not found.ok
    assert {layer.stored for layer in found.layers} == {"nothing"}
    assert all(layer.moved == layer.elements for layer in found.layers)
    assert {layer["steps"] for layer in found.to_dict()["layers"]} == {None}
    json.dumps(found.to_dict(), allow_nan=False)


def test_bad_files_are_refused(tmp_path):
    model, _ = _prepared_network("int4 groups")
    with pytest.raises(FileNotFoundError, match="There is no file or folder"):
        fq.audit(model, tmp_path / "none.onnx")
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ValueError, match=r"text\.onnx is not an ONNX model"):
        fq.audit(model, tmp_path / "text.onnx")
    with pytest.raises((ValueError, TypeError), match="prepare"):
        fq.audit(_rows()[0], tmp_path / "text.onnx")
    (tmp_path / "empty").mkdir()
    with pytest.raises((FileNotFoundError, TypeError), match=r"config\.json|transformers"):
        fq.audit(prepared(), tmp_path / "empty")


def test_the_model_is_as_it_was_after_an_audit(tmp_path):
    model = prepared()
    fq.export_compressed_tensors(model, tmp_path / "folder")
    model(**batch())
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fq.audit(model, tmp_path / "folder")
    assert model.training
    for name, value in model.state_dict().items():
        assert np.array_equal(value.detach().float().numpy(), before[name].float().numpy(), equal_nan=True), name


def test_layers_without_a_rounding_error_have_no_ratio(tmp_path):
    model = prepared("llama", "int8 channels")
    fq.export_compressed_tensors(model, tmp_path / "folder")
    again = fq.load_grids(make(), tmp_path / "folder", batch()).eval()
    found = fq.audit(again, tmp_path / "folder")
    assert found.ok
    assert {layer.error for layer in found.layers} == {None}
