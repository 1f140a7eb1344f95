"""Errors of `export_executorch`: they say what to do, and nothing is written."""

import contextlib
import importlib
import logging
import os
import warnings

import pytest
import torch
from torch import Tensor, nn, randn

import fakequant as fq
from fakequant import presets, recipes
from fakequant._util import packages
from thoroughness import ALL

pytest.importorskip("executorch.exir")

from fakequant._export.executorch import graph_forms, lowering, program
from fakequant._export.executorch.notes import read_notes

export = importlib.import_module("fakequant._export.executorch.export_executorch")


class Calling(nn.Module):
    """A linear layer, and a function of its result."""

    def __init__(self, function) -> None:
        super().__init__()
        self.fc, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.fc(x))


def prepared(model: nn.Module | None = None, recipe=recipes.int8, target: str = "xnnpack") -> nn.Module:
    model = fq.prepare(nn.Sequential(nn.Linear(4, 4)) if model is None else model, recipe(target=target), randn(2, 4))
    return fq.calibrate(model, [randn(2, 4)], progress=False)


def refused(error: type[Exception], message: str, folder, model: nn.Module, inputs=None, **settings) -> None:
    with pytest.raises(error, match=message):
        fq.export_executorch(model, folder / "m.pte", randn(2, 4) if inputs is None else inputs, **settings)
    assert os.listdir(folder) == []


def test_wrong_inputs(tmp_path):
    refused(ValueError, "fails on the example inputs: mat1 and mat2", tmp_path, prepared(), randn(2, 5))
    refused(TypeError, "`example` must be a tensor", tmp_path, prepared(), 3)
    refused(ValueError, "example input 0 is float64; only float32", tmp_path, prepared(), randn(2, 4).double())


def test_float16_model(tmp_path):
    model = prepared(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    message = r"1.weight is float16; only float32 models.*\nUse model.float\(\)"
    refused(ValueError, message, tmp_path, model.half(), randn(2, 4).half())


def test_model_that_is_not_prepared(tmp_path):
    refused(ValueError, "not prepared", tmp_path, nn.Linear(4, 4))


def test_model_converted_for_another_target(tmp_path):
    golden = fq.convert(prepared(target="generic"))
    message = r"(?s)converted for the target 'generic', not for 'xnnpack'.*convert\(model, target='xnnpack'\)"
    refused(ValueError, message, tmp_path, golden)


@pytest.mark.parametrize("max_batch", [1, 0, True, 2.0, "2"])
def test_wrong_max_batch(tmp_path, max_batch):
    refused(ValueError, "`max_batch` must be a number from 2, the length", tmp_path, prepared(), max_batch=max_batch)


def test_operator_without_a_kernel(tmp_path):
    model = prepared(Calling(torch.special.bessel_j0))
    refused(ValueError, r"no kernel for torch.special_bessel_j0.*\nUse other operations", tmp_path, model)


def test_transposed_convolution_along_three_axes(tmp_path):
    """ExecuTorch has no kernel for it, not even in float."""
    with pytest.raises(ValueError, match=r"1 is a ConvTranspose3d, .* 'xnnpack' has no kernel.*\nUse another target"):
        fq.prepare(
            nn.Sequential(nn.Linear(4, 4), nn.ConvTranspose3d(2, 2, 1)),
            recipes.int8(target="xnnpack"),
            torch.ones(1, 4),
        )
    other = fq.prepare(nn.Sequential(nn.ConvTranspose3d(2, 2, 1)), recipes.int8(target="generic"), randn(2, 2, 3, 3, 3))
    fq.calibrate(other, [randn(2, 2, 3, 3, 3)], progress=False)
    refused(ValueError, "0 is a ConvTranspose3d", tmp_path, other, randn(2, 2, 3, 3, 3))
    weight = randn(1, 1, 1, 1, 1)
    model = prepared(Calling(lambda x: nn.functional.conv_transpose3d(x[:, None, None, None], weight)))
    refused(ValueError, "no kernel for convolutions along three axes, which the model computes", tmp_path, model)


def test_empty_inputs(tmp_path):
    message = r"The example has an empty tensor, of shape \(0, 4\).*\nUse at least one row"
    refused(ValueError, message, tmp_path, prepared(), randn(0, 4))


def test_files_of_the_other_format(tmp_path):
    with pytest.raises(ValueError, match=r"m\.onnx', and \.onnx files.*\nUse fakequant\.export_onnx"):
        fq.export_executorch(prepared(), tmp_path / "m.onnx", randn(2, 4))
    pytest.importorskip("onnxscript")
    with pytest.raises(ValueError, match=r"m\.pte', and \.pte files.*\nUse fakequant\.export_executorch"):
        fq.export_onnx(prepared(target="generic"), tmp_path / "m.pte", randn(2, 4))
    message = r"target 'xnnpack' is for ExecuTorch, .*\nUse fakequant\.export_executorch"
    with pytest.raises(ValueError, match=message):
        fq.export_onnx(prepared(), tmp_path / "m.onnx", randn(2, 4))
    assert os.listdir(tmp_path) == []


def test_program_that_cannot_be_loaded_is_not_written(tmp_path, monkeypatch):
    class Joining(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.cat([self.a(x), self.b(x)], 0))

    def with_another_grid(graph, node) -> None:
        join = graph_forms.source_of(node)
        if graph_forms.is_call(join, {torch.ops.aten.cat.default}) and join.args[0][0].target is not graph_forms.GRID:
            with graph.inserting_before(join):
                args = (node.args[1] * 2, *node.args[2:])
                parts = [graph_forms.insert(graph, graph_forms.GRID, (x, *args), x) for x in join.args[0]]
            join.args = (parts, *join.args[1:])

    model = prepared(nn.Sequential(Joining()))
    monkeypatch.setattr(graph_forms, "_repeat_before_join", with_another_grid)
    message = r"ExecuTorch cannot run the program .* because of 0: .*cat2.*\nUse other operations"
    refused(ValueError, message, tmp_path, model)


def test_program_with_other_results_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "Loaded", lambda *args: lambda inputs: [randn(2, 3)])
    message = r"returns float32 of shape \(2, 3\), and the golden model returns float32 of shape \(2, 4\)"
    refused(ValueError, message, tmp_path, prepared())


def test_program_that_runs_only_the_longest_batch_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "FunctionForms", contextlib.nullcontext)
    model = prepared(nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (1, 4)), nn.CircularPad1d(1), nn.Flatten()))
    if ALL:
        fq.export_executorch(model, tmp_path / "m.pte", randn(2, 4))
        (tmp_path / "m.pte").unlink()
    with pytest.raises(ValueError, match=r"cannot run the program .*: Attempted to resize a static tensor"):
        fq.export_executorch(model, tmp_path / "m.pte", randn(2, 4), max_batch=4)
    assert os.listdir(tmp_path) == []


@pytest.mark.filterwarnings("ignore:Ranges found by:UserWarning")
def test_operator_that_xnnpack_refuses_without_a_name(tmp_path, monkeypatch):
    """XNNPACK takes no subnormal scales of biases, and names only the number of a tensor."""
    monkeypatch.setattr(lowering, "has_layer", lambda *scales: True)
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1))
    nn.init.zeros_(model[3].weight)
    x = randn(2, 2, 3, 3)
    model = fq.prepare(model.eval(), recipes.lsq(4, target="xnnpack"), x)
    fq.calibrate(model, [x], progress=False)
    refused(
        ValueError,
        "cannot run the program .*, because of one of the layers 0, 2, 4: Failed to define",
        tmp_path,
        model,
        x,
    )


def test_two_axes_of_any_length(tmp_path):
    axes = {0: torch.export.Dim("batch", max=4), 2: torch.export.Dim("length", min=4, max=8)}
    x, model = randn(2, 4, 6), nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU())
    model = fq.calibrate(fq.prepare(model, recipes.int8(target="xnnpack"), x), [x], progress=False)
    with pytest.raises(ValueError, match=r"0 is a convolution along one axis, .*only if at most one axis"):
        fq.export_executorch(model, tmp_path / "m.pte", x, dynamic_shapes=(axes,))


def test_control_flow_that_depends_on_data(tmp_path, capfd):
    model = prepared(Calling(lambda x: x if x.sum() > 0 else -x))
    refused(ValueError, "cannot be exported to ExecuTorch: Could not guard on data-dependent", tmp_path, model)
    assert capfd.readouterr() == ("", "")


def test_folder_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        fq.export_executorch(prepared(), tmp_path / "none" / "m.pte", randn(2, 4))


def test_executorch_is_not_installed(tmp_path, monkeypatch):
    def missing(name: str):
        raise ImportError(name)

    model = prepared()
    monkeypatch.setattr(packages.importlib, "import_module", missing)
    refused(ImportError, r'needs executorch.*\nUse: pip install "fakequant\[executorch\]"', tmp_path, model)


@pytest.mark.parametrize(
    ("weight", "activation", "message"),
    [
        (
            presets.int8(),
            presets.int16(),
            "0.input_quantizer is int16, per tensor, but xnnpack needs activations",
        ),
        (fq.QuantSpec(bits=16, axis=0), presets.uint8(), "0 has weights in int16.*but xnnpack needs symmetric weights"),
        (
            fq.QuantSpec(signed=False, symmetric=False, axis=0),
            presets.uint8(),
            "0 has weights in uint8.*but xnnpack needs symmetric weights",
        ),
    ],
)
def test_grids_that_xnnpack_cannot_hold(tmp_path, weight, activation, message):
    config = fq.QuantConfig(default=fq.LayerConfig(weight=weight, input=activation))
    model = fq.calibrate(fq.prepare(nn.Sequential(nn.Linear(4, 4)), config, randn(2, 4)), [randn(2, 4)], progress=False)
    refused(ValueError, f"(?s){message}.*Use prepare with a config that has target='xnnpack'", tmp_path, model)


def test_prepare_fits_grids_to_xnnpack():
    weight = fq.QuantSpec(bits=16, signed=False, symmetric=False, axis=0)
    config = fq.QuantConfig(default=fq.LayerConfig(weight=weight, input=presets.int16()), target="xnnpack")
    layer = fq.prepare(nn.Sequential(nn.Linear(4, 4)), config, torch.ones(1, 4))[0]
    assert str(layer.weight_quantizer.spec) == "int8, per channel on axis 0"
    assert str(layer.input_quantizer.spec) == "int8, per tensor"
    layer = fq.prepare(nn.Sequential(nn.Linear(4, 4)), recipes.int8_dynamic(target="xnnpack"))[0]
    assert str(layer.input_quantizer.spec) == "int8 affine, per token over axis -1"


def test_damaged_files(tmp_path):
    path = tmp_path / "m.pte"
    fq.export_executorch(prepared(), path, randn(2, 4))
    whole = path.read_bytes()
    for data, message in (
        (b"", "is empty"),
        (b"# no program", "is not an ExecuTorch program"),
        (whole[: len(whole) // 2], "is damaged"),
        (whole[:40], "is damaged"),
        (whole[:8] + bytes(range(256)) * 10, "is damaged"),
        (whole.replace(b"fakequant.target", b"fakequant.tarxxx"), "was not written by fakequant.export_executorch"),
    ):
        path.write_bytes(data)
        with pytest.raises(ValueError, match=message):
            read_notes(path)


def test_export_prints_nothing_and_leaves_the_process_as_it_was(tmp_path, capfd):
    model = prepared()
    before = (dict(os.environ), logging.getLogger().handlers[:], warnings.filters[:], logging.root.manager.disable)
    fq.export_executorch(model, tmp_path / "m.pte", randn(2, 4))
    after = (dict(os.environ), logging.getLogger().handlers[:], warnings.filters[:], logging.root.manager.disable)
    assert before == after
    assert capfd.readouterr() == ("", "")
