"""The example of `prepare`: which configs need it, what is missing without it, and states that bring it along."""

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits
from function_cases import X86, Attention, batch, nn, torch
from model_snapshots import assert_refused
from prepare_cases import INT8

recipes = pytest.importorskip("fakequant.recipes")
preparing = pytest.importorskip("fakequant._prepare.prepare")
preparation = pytest.importorskip("fakequant._prepare.attach").preparation


class Branching(nn.Module):
    """A branch on values, a convolution and a batch norm outside of `nn.Sequential`, functions, and repeated calls."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.conv, self.norm, self.act = nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3), nn.SiLU()
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        if x.isnan().any():
            raise ValueError("NaN")
        y = self.act(self.norm(self.conv(self.attention(x))))
        return self.last(y + self.attention(y))


def make():
    torch.manual_seed(0)
    return Branching()


LSQ = recipes.lsq(4)
NEEDING = {
    "int8": (recipes.int8(), "`operands` is set"),
    "w4a8": (recipes.w4a8(), "`operands` is set"),
    "fp8": (recipes.fp8(), "`operands` is set"),
    "first and last": (fq.QuantConfig(default=LSQ.default, first_last_bits=8), "`first_last_bits` is set"),
    "openvino": (fq.QuantConfig(default=INT8.default, target="openvino"), "openvino rounds the inputs of the model"),
    "xnnpack": (fq.QuantConfig(default=INT8.default, target="xnnpack"), "xnnpack rounds the inputs of the model"),
}


@pytest.mark.parametrize(("config", "reason"), NEEDING.values(), ids=NEEDING)
def test_config_that_needs_an_example_says_why_and_shows_the_call(config, reason):
    model = make()
    words = ("needs an example", reason, "fq.prepare(model, config, example=x), where x is one batch")
    assert_refused(model, lambda: fq.prepare(model, config), ValueError, *words)
    assert fq.prepare(model, config, example=batch()) is model


FREE = {
    "weights": recipes.int4_weight_only(None),
    "weights for openvino": recipes.int4_weight_only(None, target="openvino"),
    "dynamic": recipes.int8_dynamic(),
    "dynamic for xnnpack": recipes.int8_dynamic(target="xnnpack"),
    "layers": INT8,
}


@pytest.mark.parametrize("config", FREE.values(), ids=FREE)
def test_other_configs_need_no_example(config):
    model = fq.prepare(make(), config)
    fq.calibrate(model, [batch()], progress=False)
    assert fq.summary(model).floats["norm"] == "batch norm; it does not fold, because `prepare` had no example"
    assert fq.summary(model).multiplications == 0
    assert fq.nn.named_quantizers(model)
    assert fq.convert(model)(batch()).shape == (2, 3, 2)


@pytest.mark.parametrize("config", FREE.values(), ids=FREE)
def test_a_state_brings_the_data_flow_to_a_model_without_an_example(config):
    model = fq.calibrate(fq.prepare(make(), config, batch()), [batch()], progress=False)
    assert preparation(model).norms == {"conv": "norm"}
    loaded = fq.prepare(make(), config)
    assert loaded.load_state_dict(model.state_dict()) == ([], [])
    assert preparation(loaded).norms == preparation(model).norms
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert_same_bits(loaded.eval()(batch(1)), model.eval()(batch(1)))
    assert_same_bits(fq.convert(loaded)(batch(1)), fq.convert(model)(batch(1)))


@pytest.mark.parametrize(
    "config", [recipes.int8(target=X86), recipes.w4a8(), LSQ, recipes.int8(target="openvino")], ids=str
)
def test_a_model_prepared_for_loading_gets_all_of_the_flow_from_the_state(config):
    model = fq.calibrate(fq.prepare(make(), config, batch()), [batch()], progress=False)
    loaded = preparing.prepare_for_loading(make(), config)
    assert loaded.load_state_dict(model.state_dict()) == ([], [])
    assert preparation(loaded).first_last == preparation(model).first_last
    assert list(loaded.state_dict()) == list(model.state_dict())
    assert_same_bits(loaded.eval()(batch(1)), model.eval()(batch(1)))


# --- strict conversion ----------------------------------------------------------------------------


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)


def test_strict_conversion_refuses_layers_that_no_data_reached(tmp_path):
    pytest.importorskip("onnx")
    model = fq.prepare(Unused(), fq.recipes.int8(), batch())
    with pytest.warns(UserWarning, match="unused"):
        fq.calibrate(model, [batch()], progress=False)
    with pytest.warns(UserWarning, match=r"unused.input_quantizer has seen no data"):
        fq.convert(model)
    for convert in (fq.convert, lambda m, **o: fq.export_onnx(m, tmp_path / "model.onnx", batch(), **o)):
        with pytest.raises(ValueError, match=r"unused.input_quantizer has seen no data"):
            convert(model, strict=True)
    assert not list(tmp_path.iterdir())
