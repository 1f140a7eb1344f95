"""`verify` compares codes, and explains why they differ."""

import json
import runpy
import subprocess
import sys

import pytest

import fakequant as fq
from fakequant.__main__ import main

torch = pytest.importorskip("torch")
nn = torch.nn
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
recipes = pytest.importorskip("fakequant.recipes")
explain = pytest.importorskip("fakequant._verify.explain_codes")
saturation = pytest.importorskip("fakequant._convert.golden.saturation")


def has_vnni():
    with open("/proc/cpuinfo") as file:  # these tests run on x86 Linux
        return "vnni" in file.read()


class Net(nn.Module):
    """A convolution with batch norm, a residual addition, pooling, a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.conv, self.norm, self.act = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.pool, self.head = nn.AdaptiveAvgPool2d(1), nn.Linear(16, 10)

    def forward(self, x):
        x = self.stem(x)
        return self.head(self.pool(self.act(x + self.norm(self.conv(x)))).flatten(1))


DATA = [torch.randn(32, 3, 10, 10, generator=torch.Generator().manual_seed(i)) for i in range(2)]


def make(target):
    torch.manual_seed(0)
    net = Net()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            module.running_var.uniform_(0.5, 2.0)
    return fq.calibrate(fq.prepare(net, recipes.int8(target=target), DATA[0]), DATA, progress=False)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "model.onnx"
    model = make("onnxruntime-x86")
    fq.export_onnx(model, path, DATA[0][:1])
    return model, path


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    path = tmp_path_factory.mktemp("wide") / "model.onnx"
    model = make("onnxruntime-vnni")
    fq.export_onnx(model, path, DATA[0][:1])
    return model, path


def test_runtime_has_the_codes_of_the_golden_model(good):
    found = fq.verify(*good, DATA)
    assert found.ok
    assert found.first_difference is None
    assert [t.runtime_differ for t in found.tensors] == [0] * len(found.tensors)
    assert {t.path for t in found.tensors} == {
        "stem.0.input_quantizer", "stem.2.output_quantizer", "norm.output_quantizer", "act.output_quantizer",
        "head.input_quantizer",
    }  # fmt: skip
    assert found.tensors[0].codes == 2 * 32 * 3 * 10 * 10
    assert found.outputs.runtime_difference == 0
    assert found.outputs.rows == 64


def test_verify_reports_an_integer_kernel_for_every_layer(good):
    found = fq.verify(*good, DATA[:1])
    assert found.kernels == {"stem.0": "QLinearConv", "conv": "QLinearConv", "head": "QGemm"}
    assert found.floats == {}


@pytest.mark.skipif(has_vnni(), reason="this CPU does not saturate")
def test_verify_reports_saturation_of_full_range_weights_without_vnni(wide):
    found = fq.verify(*wide, DATA)
    assert not found.ok
    assert found.saturates
    assert found.first_difference == "stem.2.output_quantizer"
    assert "saturation" in str(found)
    assert {t.why_runtime for t in found.tensors if t.runtime_differ} == {explain.SATURATION}


def test_verify_refuses_a_file_with_a_changed_scale(good, tmp_path):
    model, path = good
    changed = onnx.load(path)
    scale = next(t for t in changed.graph.initializer if t.name == "act.output_quantizer_scale")
    array = onnx.numpy_helper.to_array(scale) * 2
    scale.CopyFrom(onnx.numpy_helper.from_array(array, scale.name))
    onnx.save(changed, tmp_path / "changed.onnx")
    with pytest.raises(ValueError, match=r"act\.output_quantizer_scale is different in the file"):
        fq.verify(model, tmp_path / "changed.onnx", DATA)


def test_verify_refuses_a_file_with_changed_weight_codes(good, tmp_path):
    model, path = good
    changed = onnx.load(path)
    codes = next(t for t in changed.graph.initializer if t.name == "conv.weight_codes")
    array = onnx.numpy_helper.to_array(codes).copy()
    array[3] = -array[3]
    codes.CopyFrom(onnx.numpy_helper.from_array(array, codes.name))
    onnx.save(changed, tmp_path / "changed.onnx")
    with pytest.raises(ValueError, match=r"conv\.weight_codes is different in the file"):
        fq.verify(model, tmp_path / "changed.onnx", DATA)


def test_verify_refuses_the_file_of_a_model_trained_further(good):
    model, path = make("onnxruntime-x86"), good[1]
    with torch.no_grad():
        model.head.weight.mul_(1.5)
    with pytest.raises(ValueError, match=r"head\.weight_scale(.|\n)*Export the model again"):
        fq.verify(model, path, DATA)


def test_verify_refuses_a_file_with_a_changed_bias(good, tmp_path):
    model, path = good
    changed = onnx.load(path)
    bias = next(t for t in changed.graph.initializer if t.name == "conv.bias_codes")
    array = onnx.numpy_helper.to_array(bias) + 1
    bias.CopyFrom(onnx.numpy_helper.from_array(array, bias.name))
    onnx.save(changed, tmp_path / "changed.onnx")
    with pytest.raises(ValueError, match=r"conv\.bias_codes is different in the file"):
        fq.verify(model, tmp_path / "changed.onnx", DATA)


def test_verify_counts_a_difference_where_it_arises(good, tmp_path):
    model, path = good
    changed = onnx.load(path)
    next(node for node in changed.graph.node if node.op_type == "Relu").op_type = "Abs"
    onnx.save(changed, tmp_path / "changed.onnx")
    found = fq.verify(model, tmp_path / "changed.onnx", DATA[:1])
    assert not found.ok
    differ = [t.path for t in found.tensors if t.runtime_differ]
    assert len(differ) == 1  # every later tensor is computed from equal codes
    assert f"first at {differ[0]}" in found.verdict()


def test_verify_leaves_the_model_unchanged(good):
    model, path = good
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fq.verify(model, path, DATA[:1])
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks for _, module in fq.nn.named_quantizers(model))


def test_verify_accepts_batches_with_labels(good):
    data = torch.utils.data.TensorDataset(DATA[0], torch.zeros(32))
    found = fq.verify(*good, torch.utils.data.DataLoader(data, batch_size=8), steps=2)
    assert found.tensors[0].codes == 16 * 300


ERRORS = {
    "no data": (lambda model, path: fq.verify(model, path, []), ValueError, "no batches"),
    "a function": (lambda model, path: fq.verify(model, path, lambda m: m), TypeError, "batches"),
    "missing file": (
        lambda model, path: fq.verify(model, path.with_name("none.onnx"), DATA),
        FileNotFoundError,
        "none",
    ),
    "not an ONNX file": (lambda model, path: fq.verify(model, __file__, DATA), ValueError, "not an ONNX model"),
    "float model": (lambda model, path: fq.verify(nn.Linear(2, 2), path, DATA), ValueError, "not prepared"),
}


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_verify_refuses_bad_data_files_and_models(good, call, error, message):
    with pytest.raises(error, match=message):
        call(*good)


def test_verification_converts_to_json(good):
    found = fq.verify(*good, DATA[:1])
    assert json.loads(json.dumps(found.to_dict()))["ok"] is True
    assert "The runtime computes what was trained." in str(found)


@pytest.mark.skipif(has_vnni(), reason="this CPU does not saturate")
def test_verify_reports_saturation_of_the_last_layer(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4))
    with torch.no_grad():
        model[0].weight.uniform_(0.9, 1.0)
    x = torch.rand(16, 64)
    model = fq.calibrate(fq.prepare(model, recipes.int8(target="onnxruntime-vnni"), x[0]), x, progress=False)
    fq.export_onnx(model, tmp_path / "m.onnx", x)
    found = fq.verify(model, tmp_path / "m.onnx", x)
    assert not found.ok
    assert found.saturates
    assert "after the last quantizer" in str(found)


def test_nan_in_both_results_is_equal_and_in_one_is_a_difference():
    largest = pytest.importorskip("fakequant._verify.rounding_bounds").largest_difference
    nan, one = torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 1.0])
    assert largest(nan, nan) == 0
    assert largest(nan, one) == largest(one, nan) == float("inf")


def test_consecutive_quantizers_are_not_merged_by_the_runtime(tmp_path):
    """ONNX Runtime would merge two consecutive quantizers into one with another scale."""
    torch.manual_seed(0)
    config = recipes.int8(target="onnxruntime-x86").rule("1", activation_observer=fq.observers.Fixed(-0.5, 1.0))
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))
    x = torch.randn(64, 16)
    model = fq.prepare(model, config.rule("0", output=fq.presets.uint8()), x[0])
    model = fq.calibrate(model, x, progress=False)
    fq.export_onnx(model, tmp_path / "m.onnx", x)
    found = fq.verify(model, tmp_path / "m.onnx", x)
    assert found.ok
    assert found.outputs.runtime_difference == 0
    merged = onnx.load(tmp_path / "m.onnx")
    clip = next(node for node in merged.graph.node if node.op_type == "Clip")
    reader = next(node for node in merged.graph.node if clip.output[0] in node.input)
    reader.input[0] = clip.input[0]
    merged.graph.node.remove(clip)
    onnx.save(merged, tmp_path / "merged.onnx")
    found = fq.verify(model, tmp_path / "merged.onnx", x)
    assert not found.ok
    assert found.outputs.disturbance > 0
    assert "follow each other" in str(found)


@pytest.mark.parametrize("config", [recipes.int4_weight_only(4), recipes.int8_dynamic()], ids=["weights", "dynamic"])
def test_verify_compares_results_where_activations_have_no_codes(config, tmp_path):
    torch.manual_seed(0)
    model, x = fq.prepare(nn.Sequential(nn.Linear(8, 4)), config, torch.ones(1, 8)), torch.randn(16, 8)
    path = tmp_path / "model.onnx"
    fq.export_onnx(model, path, x)
    found = fq.verify(model, path, [x])
    assert found.ok
    assert not found.tensors
    assert "the results agree up to rounding" in str(found)
    file = onnx.load(path)
    bias = next(i for i in file.graph.initializer if i.name == "0.bias")  # its path in the model
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + 0.1, bias.name))
    onnx.save(file, path)
    with pytest.raises(ValueError, match=r"0\.bias is different in the file"):
        fq.verify(model, path, [x])


# --- saturating sums ------------------------------------------------------------------------------------


def test_saturated_sums_clip_pairs_of_products():
    layer, codes = nn.Linear(4, 1), torch.tensor([[255.0, 255.0, 255.0, 0.0]])
    levels = torch.tensor([[127.0, 127.0, 127.0, -5.0]])
    sums = saturation.saturated_sums(layer, codes, 3, levels, torch.tensor([10.0]))
    assert sums.tolist() == [[32767 + 255 * 127 - 3 * 376 + 10]]


def test_saturated_sums_of_a_convolution_pair_channels_first():
    layer = nn.Conv2d(2, 1, (1, 2))
    levels = torch.tensor([[[[127.0, 1.0]], [[127.0, -1.0]]]])  # channels, then positions
    codes = torch.full((1, 2, 1, 2), 255.0)
    sums = saturation.saturated_sums(layer, codes, 0, levels, None)
    assert sums.flatten().tolist() == [32767 + 255 - 255]


def test_saturated_sums_of_a_convolution_pad_with_the_zero_point():
    layer = nn.Conv2d(1, 1, (1, 2), padding=(0, 1))
    levels = torch.tensor([[[[127.0, 127.0]]]])
    sums = saturation.saturated_sums(layer, torch.full((1, 1, 1, 1), 255.0), 200, levels, None)
    # 127 * (200 + 255) overflows 16 bits on either side
    assert sums.flatten().tolist() == [32767 - 200 * 254] * 2


def test_saturated_sums_are_unknown_for_groups_and_transposed_convolutions():
    codes = torch.full((1, 2, 3, 3), 255.0)
    assert saturation.saturated_sums(nn.Conv2d(2, 2, 1, groups=2), codes, 0, torch.ones(2, 1, 1, 1), None) is None
    assert saturation.saturated_sums(nn.ConvTranspose2d(2, 2, 1), codes, 0, torch.ones(2, 2, 1, 1), None) is None


# --- command line ---------------------------------------------------------------------------------------

SCRIPT = """
import torch, fakequant as fq
from torch import nn
torch.manual_seed(0)
data = [torch.randn(8, 6)]
def make():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model = fq.prepare(model, fq.recipes.int8(target=TARGET), data[0])
    return fq.calibrate(model, data, progress=False)
model = make()
if __name__ == "__main__":
    fq.export_onnx(model, "model.onnx", data[0])
"""


def test_verify_command_reports_the_result_by_its_exit_code(tmp_path, monkeypatch, capsys):
    """Starts only one subprocess, because a start takes seconds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT.replace("TARGET", "'onnxruntime-x86'"))
    runpy.run_path("script.py", run_name="__main__")
    command = [sys.executable, "-m", "fakequant", "verify", "script.py:model", "model.onnx", "script.py:data"]
    good = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (good.returncode, good.stderr) == (0, "")
    assert "The runtime computes what was trained." in good.stdout
    capsys.readouterr()
    assert main(["verify", "script.py:model", "other.onnx", "script.py:data"]) == 2
    assert "other.onnx" in capsys.readouterr().err


class InPlace(nn.Module):
    """Changes its input in place."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        return self.fc(x.sub_(1))


def test_verify_gives_every_model_the_same_input(tmp_path):
    torch.manual_seed(0)
    data = [torch.randn(8, 6) for _ in range(2)]
    before = [x.clone() for x in data]
    model = fq.prepare(InPlace(), recipes.int8(target="onnxruntime-x86"), data[0])
    model = fq.calibrate(model, [x.clone() for x in data], progress=False)
    fq.export_onnx(model, tmp_path / "m.onnx", data[0].clone())
    assert fq.verify(model, tmp_path / "m.onnx", data).ok
    assert all(torch.equal(x, y) for x, y in zip(data, before, strict=True))


def test_verification_is_ok_with_few_ties_and_no_other_difference():
    """Only ties may differ, only a few in the whole model, and every difference must be a tie."""
    verification = pytest.importorskip("fakequant._verify.verdict")
    report, out = verification.TensorReport, verification.OutputReport(numbers=1)

    def ok(**counts):
        tensors = [report("a", codes=999_000), report("b", codes=1_000, **counts)]
        return verification.Verification("generic", tensors, {}, out, {}).ok

    for whose in ("prepared", "runtime"):
        differ, at_tie = f"{whose}_differ", f"{whose}_ties"
        assert ok(**{differ: 104, at_tie: 104})  # four, plus one in ten thousand of a million codes
        assert not ok(**{differ: 105, at_tie: 105})
        assert not ok(**{differ: 1, at_tie: 0})
        assert not ok(**{differ: 104, at_tie: 103})


def test_verification_is_not_ok_with_unexplained_results():
    verification = pytest.importorskip("fakequant._verify.verdict")
    for field in ("prepared_unexplained", "runtime_unexplained"):
        out = verification.OutputReport(numbers=1000, **{field: 1})
        assert not verification.Verification("generic", [], {}, out, {}).ok


def test_verification_of_a_changed_file_needs_bit_equality():
    verification = pytest.importorskip("fakequant._verify.verdict")
    equal, close = (verification.OutputReport(numbers=9, runtime_is_equal=same) for same in (True, False))
    ties = verification.TensorReport("a", codes=9, runtime_differ=1, runtime_ties=1)
    assert verification.Verification("generic", [], {}, equal, {}, is_changed=True).ok
    assert verification.Verification("generic", [], {}, close, {}, is_changed=False).ok
    assert not verification.Verification("generic", [], {}, close, {}, is_changed=True).ok
    assert not verification.Verification("generic", [ties], {}, equal, {}, is_changed=True).ok
