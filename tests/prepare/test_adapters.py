"""Adapters of PEFT stay in float, and are not merged into quantized weights."""

import copy
import pickle
import warnings

import pytest

import fakequant as fq
from fakequant import recipes
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
nn = torch.nn


class BaseTunerLayer:
    """The class that PEFT's layers are derived from, by its name."""


class Lora(nn.Module, BaseTunerLayer):
    """The structure of PEFT's LoRA layer."""

    def __init__(self, base):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        result = self.base_layer(x)
        return result + self.lora_B["default"](self.lora_A["default"](x)) * 2.0

    def merge(self, safe_merge=False, adapter_names=None):
        self.base_layer.weight.data += 2 * self.lora_B["default"].weight @ self.lora_A["default"].weight


X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def net():
    torch.manual_seed(0)
    return nn.Sequential(Lora(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 2))


def prepared(config=None, example=X):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Adapters stay in float")
        return fq.prepare(net(), config or recipes.int8(), example)


def test_adapters_and_their_sums_stay_in_float():
    with pytest.warns(UserWarning, match=r"Adapters stay in float: 0.lora_A.default, 0.lora_B.default.\n") as found:
        model = fq.prepare(net(), recipes.int8(target="onnxruntime-x86"), X)
    fq.calibrate(model, [X], progress=False)
    assert len(found) == 1
    paths = [path for path, _ in fq.nn.named_quantizers(model)]
    assert "0.base_layer.weight_quantizer" in paths
    assert "2.weight_quantizer" in paths
    assert not [path for path in paths if "lora" in path or path.startswith("0.function")]
    reasons = fq.summary(model).floats
    assert reasons["0.lora_A.default"] == "an adapter; it stays in float unless a rule has its name"
    nn.init.normal_(model[0].lora_B["default"].weight)  # as training does
    assert fq.health(model, [X]).unfit == {}


def test_a_rule_with_the_name_of_an_adapter_wins_and_another_does_not():
    model = prepared(recipes.int8().rule("*", type="Linear").rule("*lora_A*"))
    paths = [path for path, _ in fq.nn.named_quantizers(model)]
    assert "0.lora_A.default.weight_quantizer" in paths
    assert not [path for path in paths if "lora_B" in path]


def test_a_quantized_weight_does_not_take_up_adapters():
    model = fq.calibrate(prepared(), [X], progress=False)
    for made in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        before = copy.deepcopy(made.state_dict())
        with pytest.raises(RuntimeError, match=r"adapters of 0 cannot be merged(.|\n)*unprepare"):
            made[0].merge(safe_merge=True)
        for name, value in made.state_dict().items():
            assert_same_bits(value, before[name])
    fq.unprepare(model)
    model[0].merge()
    assert "merge" not in vars(model[0])
    skipped = prepared(recipes.int8().skip("*base_layer"))
    skipped[0].merge()


def test_attention_with_adapters_runs_although_peft_merges_them_in_its_forward_pass():
    peft = pytest.importorskip("peft")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            return self.head(self.attention(x, x, x, need_weights=False)[0])

    torch.manual_seed(0)
    settings = peft.LoraConfig(target_modules=["attention", "head"], r=2, init_lora_weights=False)
    model, x = peft.get_peft_model(Net(), settings).eval(), torch.randn(2, 3, 8)
    with pytest.warns(UserWarning, match="Adapters stay in float"):
        fq.prepare(model, recipes.int8(), x)
    fq.calibrate(model, [x], progress=False)
    model.train()(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"adapters of base_model\.model\.head cannot be merged"):
        model.base_model.model.head.merge()


def test_peft_models_keep_adapters_in_float_and_refuse_to_merge():
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    for settings in (
        peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, init_lora_weights=False),
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    ):
        batch = {"input_ids": torch.arange(12).reshape(2, 6)}
        wrapped = peft.get_peft_model(copy.deepcopy(model), settings).eval()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fq.prepare(wrapped, recipes.int8(), batch)
        assert any("Adapters stay in float" in str(w.message) for w in caught)
        assert fq.summary(wrapped).unmatched == []
        fq.calibrate(wrapped, [batch], progress=False)
        paths = [path for path, _ in fq.nn.named_quantizers(wrapped)]
        assert [path for path in paths if "down_proj.base_layer.weight" in path]
        assert not [path for path in paths if "lora_" in path or "ia3_" in path or "down_proj.function" in path]
        for merge in (wrapped.merge_adapter, wrapped.merge_and_unload):
            with pytest.raises(RuntimeError, match="cannot be merged"):
                merge()
        fq.unprepare(wrapped)
        assert wrapped.merge_and_unload() is not None
