"""What `verify` says about the share of a model that runs in integers, and why layers run in float."""

import dataclasses
import json

import pytest

import fakequant as fq
from fakequant import recipes
from thoroughness import sampled

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
nn = torch.nn

X86 = recipes.int8(target="onnxruntime-x86")
SEVEN = fq.QuantSpec(bits=7, narrow_range=True, axis=0)
# 7 bits, because some CPUs saturate with 8.
GENERIC = recipes.int8().rule("*", weight=SEVEN)
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def verified(model, config, x, folder, change=lambda model: None):
    torch.manual_seed(0)
    model = fq.calibrate(fq.prepare(model, config, x), [x], progress=False)
    change(model)
    fq.export_onnx(model, folder / "model.onnx", x)
    return fq.verify(model, folder / "model.onnx", [x])


def convolution():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Flatten(), nn.Linear(144, 2))


def test_a_verification_opens_with_the_shares_in_integers(tmp_path):
    found = verified(convolution(), X86, IMAGE, tmp_path)
    products, weights = 2 * (4 * 36 * 27 + 144 * 2), 4 * 27 + 144 * 2
    assert found.ok
    assert found.multiplications == found.quantized_multiplications == found.integer_multiplications == products
    assert found.parameters == weights + 4 + 2
    assert found.quantized_parameters == found.integer_parameters == weights
    assert str(found).startswith(
        "quantized: 100.0% of 8,352 multiplications, 98.5% of 402 parameters\n"
        "in integers in this runtime: 100.0% of the multiplications, 98.5% of the parameters\n\n"
    )
    assert found.floats == {}
    assert "FLOAT" not in str(found)


def test_before_a_model_has_run_only_parameters_are_counted():
    found = fq.summary(fq.prepare(convolution(), dataclasses.replace(X86, operands=None)))
    assert found.multiplications == 0
    assert str(found).startswith("quantized: 98.5% of 402 parameters\n\n")


def test_a_verification_names_layers_that_run_in_float(tmp_path):
    """For the generic target no quantizer follows a convolution, and ONNX Runtime computes it in float."""
    found = verified(convolution(), GENERIC, IMAGE, tmp_path)
    why = "its result is not quantized, and there is no integer kernel for such a convolution"
    assert found.ok
    assert found.floats == {"0": why}
    assert found.layers == 2
    assert found.integer_multiplications == 2 * 144 * 2
    assert found.integer_parameters == 144 * 2
    assert str(found).split("\n\n")[0].endswith("\n1 OF 2 LAYERS RUN IN FLOAT HERE")
    assert f"0             | Conv   | {why}" in str(found)
    written = json.loads(json.dumps(found.to_dict()))
    assert written["floats"] == {"0": why}
    assert written["layers"] == 2
    assert written["integer_parameters"] == 288


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * nn.functional.linear(x, self.weight, self.bias)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.ones(16, 16))

    def forward(self, x):
        return nn.functional.linear(x, self.matrix)


def perceptron(second=None):
    return nn.Sequential(nn.Linear(16, 16), second or nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))


def switch_off(model):
    model[1].input_quantizer.quantizing = False


def switch_all_off(model):
    switch_off(model)
    model[1].weight_quantizer.quantizing = False


REASONS = {
    "groups": (perceptron, X86.rule("1", weight=fq.presets.int4(group_size=8)), "its weight has groups"),
    "weight only": (perceptron, X86.rule("1", input=None), "its input is not quantized"),
    "dynamic": (perceptron, X86.rule("1", input=fq.QuantSpec(bits=4, axis=-1, group_size=-1)), "computed at run time"),
    "skipped": (perceptron, X86.skip("1"), "the config says so"),
    "subclass": (lambda: perceptron(Doubled(16, 16)), X86, "Doubled"),
    "own weight": (lambda: perceptron(Own()), X86, "Own is not a supported layer type"),
}


REASONS = sampled(REASONS, "groups", "dynamic", "subclass", "own weight")


@pytest.mark.parametrize(("make", "config", "why"), REASONS.values(), ids=REASONS)
def test_every_layer_in_float_has_a_reason(tmp_path, make, config, why):
    found = verified(make(), config, ROWS, tmp_path)
    assert list(found.floats) == ["1"]
    assert why in found.floats["1"]
    assert found.layers == 3


@pytest.mark.filterwarnings("ignore:Some tensors are not quantized:UserWarning")
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (switch_off, "the quantizer of its input is switched off"),
        (switch_all_off, "the quantizer of its weight is switched off"),
    ],
    ids=["input", "weight"],
)
def test_quantizers_that_are_switched_off_are_a_reason(tmp_path, change, why):
    assert verified(perceptron(), X86, ROWS, tmp_path, change=change).floats == {"1": why}


def test_integer_kernels_take_no_more_than_8_bits(tmp_path):
    found = verified(perceptron(), GENERIC.rule("0", weight=SEVEN, input=fq.presets.int16()), ROWS, tmp_path)
    assert found.floats == {"0": "its input has 16 bits; integer kernels take at most 8"}


def test_transposed_convolutions_run_in_float(tmp_path):
    found = verified(nn.Sequential(nn.ConvTranspose2d(3, 4, 2)), X86, IMAGE, tmp_path)
    assert found.floats == {"0": "there is no integer kernel for transposed convolutions"}


def test_a_weight_that_a_layer_in_float_shares_is_not_in_integers(tmp_path):
    model = perceptron()
    model[1].weight = model[0].weight
    found = verified(model, X86.rule("1", input=None), ROWS, tmp_path)
    assert found.quantized_parameters == 16 * 16 + 16 * 2
    assert found.integer_parameters == 16 * 2


@pytest.mark.parametrize(("config", "quantized"), [(X86, 160 + 32), (X86.skip("0"), 32)], ids=["int8", "float"])
def test_embeddings_are_not_layers_in_float(tmp_path, config, quantized):
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 2))
    found = verified(model, config, torch.arange(8).reshape(2, 4), tmp_path)
    assert found.floats == {}
    assert found.layers == 1
    assert found.integer_parameters == found.quantized_parameters == quantized
