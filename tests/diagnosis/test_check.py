"""`check`: a dry run of the whole flow."""

import copy
import json

import pytest

import fakequant as fq
from fakequant._runtimes import find

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
nn = torch.nn
STAGES = ["prepare", "calibrate", "train", "save and load", "convert", "export", "verify", "unprepare"]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Flatten(), nn.Linear(288, 10))


def image():
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_check_runs_all_stages_and_counts_multiplications():
    found = fq.check(network(), image())
    assert [stage.name for stage in found.stages] == STAGES
    assert found.ok
    assert found.multiplications == 2 * (8 * 36 * 27 + 288 * 10)
    assert found.integer_multiplications == found.quantized_multiplications == found.multiplications
    assert found.quantized_parameters == found.integer_parameters == 8 * 27 + 288 * 10
    assert found.parameters == found.quantized_parameters + 8 + 16 + 10
    assert "in integers in this runtime: 100.0% of the multiplications" in str(found)
    assert found.floats == {"1": "batch norm; it folds into 0 when the model is converted"}
    assert json.loads(json.dumps(found.to_dict()))["ok"] is True


def test_check_leaves_the_model_and_the_random_numbers_unchanged():
    model = network().train()
    state, modules = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    fq.check(model, image())
    assert torch.equal(torch.rand(1), expected)
    assert [type(module) for module in model.modules()] == modules
    assert model.training
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


TARGETS = {
    "generic": "onnxruntime", "onnxruntime-x86": "onnxruntime", "openvino": "openvino", "tensorrt": "onnxruntime",
    "xnnpack": "executorch", "litert": "litert",
}  # fmt: skip


@pytest.mark.parametrize(("target", "runtime"), TARGETS.items())
def test_check_writes_and_runs_the_file_of_the_target(target, runtime, tmp_path):
    kind = find(target).runtime
    pytest.importorskip(kind.package)
    config = fq.recipes.int8(target=target)
    found = fq.check(network(), image(), config)
    model = fq.calibrate(fq.prepare(network().eval(), config, image()), [image()], progress=False)
    path = tmp_path / f"m{kind.suffix}"
    getattr(fq, kind.exporter)(model, path, image())
    result = fq.verify(model, path, [image()])
    assert result.runtime == runtime
    assert (found.ok, found.integer_multiplications) == (result.ok, result.integer_multiplications)
    assert ("tensorrt itself was not run" in str(found)) == (target == "tensorrt")


def test_layers_in_float_lower_the_share_of_multiplications():
    config = fq.recipes.int8(target="onnxruntime-x86").skip("4")
    found = fq.check(network(), image(), config)
    assert found.ok
    assert found.multiplications - found.quantized_multiplications == 2 * 288 * 10
    assert found.floats["4"] == "the config says so"


def test_quantized_layers_that_run_in_float_are_named():
    weights = fq.QuantSpec(bits=7, narrow_range=True, axis=0)  # some CPUs saturate with 8 bits
    config = fq.recipes.int8().rule("*", weight=weights)  # the target needs no quantizer after a convolution
    found = fq.check(network(), image(), config)
    why = "its result is not quantized, and there is no integer kernel for such a convolution"
    assert found.ok
    assert found.float_kernels == {"0": ("Conv", why)}
    assert found.integer_multiplications == 2 * 288 * 10
    assert found.integer_parameters == 288 * 10
    assert f"0                            | Conv   | {why}" in str(found)


class Branches(nn.Module):
    """torch cannot export it, because the branch depends on values."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


def test_a_stage_that_fails_is_reported_and_later_ones_still_run():
    found = fq.check(Branches(), torch.ones(2, 4))
    assert not found.ok
    assert [stage.name for stage in found.stages if not stage.ok] == ["export"]
    assert [stage.name for stage in found.stages] == [name for name in STAGES if name != "verify"]
    assert "exporter cannot export" in found.stages[5].note
    assert "in integers" not in str(found)


def test_an_example_that_does_not_fit_is_described():
    stage = fq.check(nn.Sequential(nn.Linear(4, 2)), torch.ones(3, 5)).stages[0]
    assert "mat1 and mat2 shapes cannot be multiplied (3x5 and 4x2); This happened with `example`" in stage.note
    assert stage.note.endswith("Sequential.forward(input) got input: float32 of shape (3, 5).")


def test_a_model_without_layers_fails_in_prepare():
    found = fq.check(nn.Sequential(nn.ReLU()), torch.ones(2, 4))
    assert [(stage.name, stage.ok) for stage in found.stages] == [("prepare", False)]
    assert "Nothing in the model would be quantized" in found.stages[0].note


def test_check_refuses_what_is_not_a_module():
    with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module"):
        fq.check("model", torch.ones(2, 4))


@pytest.mark.parametrize("config", [None, fq.recipes.lsq(3, target="generic").skip("2")])
def test_a_check_ends_with_lines_that_run(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(8, 4)
    found = fq.check(model, x, config)
    assert str(found).endswith(found.next)
    names = {"model": model, "example": x, "data": [x]}
    exec(found.next, names)
    assert names["config"] == (config or fq.recipes.int8(target="onnxruntime-x86"))
    assert ('int8(target="' in found.next.replace("'", '"')) == (config is None)
    assert fq.verify(names["model"], "model.onnx", [x]).ok
    assert fq.check(model, x.double(), config).next == ""
