"""LoRA adapters that are part of quantized weights: what is trained is what merging leaves behind, bit for bit."""

import copy
import pickle
import warnings

import pytest

import fakequant as fq
from fakequant import recipes
from fakequant.nn import quantize_adapters
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

BATCH = {"input_ids": torch.arange(24).reshape(2, 12)}
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)


def llama():
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, intermediate_size=32, num_key_value_heads=2, use_cache=False)
    )


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def bert():
    return transformers.BertModel(transformers.BertConfig(**SIZES, intermediate_size=32))


MODELS = {
    "llama": (llama, ["q_proj", "down_proj"]),
    "gpt2": (gpt2, ["c_attn", "c_fc"]),
    "bert": (bert, ["query", "dense"]),
}


def prepared(make=llama, config=None, dtype=torch.float32):
    torch.manual_seed(0)
    model = fq.prepare(make().to(dtype), config or recipes.int4_weight_only(), BATCH)
    return fq.calibrate(model, [BATCH], progress=False) if config else model


def adapted(model, targets, *names, **options):
    torch.manual_seed(1)
    settings = peft.LoraConfig(target_modules=targets, r=4, **{"init_lora_weights": False, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, of its own arguments
        made = peft.get_peft_model(model, settings)
        for name in names:
            made.add_adapter(name, settings)
    made.base_model.set_adapter(["default", *names])
    return made


def outputs(model):
    with torch.no_grad():
        return model.eval()(**BATCH)[0]


def train(model, steps=2):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for _ in range(steps):
        model.train()(**BATCH)[0].float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("make", "targets"), MODELS.values(), ids=MODELS)
def test_merging_changes_no_bit(make, targets, dtype):
    config = recipes.int8() if dtype == torch.float32 and make is bert else None
    model = prepared(make, config, dtype)
    base = {name: value.clone() for name, value in model.named_parameters()}
    alone = outputs(model)
    model = quantize_adapters(adapted(model, targets, "second"))
    start = outputs(model)
    assert not torch.equal(start, alone)
    train(model)
    before = outputs(model)
    assert not torch.equal(before, start)
    for name, value in model.named_parameters():
        assert value.requires_grad == ("lora_" in name)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_same_bits(outputs(copied), before)
    safely = copy.deepcopy(model).merge_and_unload(safe_merge=True)
    merged = model.merge_and_unload()
    assert type(merged) is make().__class__
    changed = [name for name, value in merged.named_parameters() if not torch.equal(value, base[name])]
    assert len(changed) >= len(targets)
    assert all(any(target in name for target in targets) for name in changed)
    for after in (merged, safely):
        assert_same_bits(outputs(after), before)
    assert fq.summary(merged) is not None


def test_the_sum_is_what_is_quantized():
    model = prepared()
    layer = model.model.layers[0].self_attn.q_proj
    model = quantize_adapters(adapted(model, ["q_proj"]))
    tuner = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 32)
    total = layer.weight + tuner.get_delta_weight("default")
    quantizer = copy.deepcopy(layer.weight_quantizer).train()
    assert_same_bits(tuner(x), torch.nn.functional.linear(x, quantizer(total)))
    with model.disable_adapter():
        assert_same_bits(tuner(x), layer(x))


def test_merged_models_convert_and_adapters_that_are_not_merged_do_not():
    model = prepared(llama, recipes.int8())
    wrapped = quantize_adapters(adapted(model, ["q_proj"]))
    with pytest.raises(
        ValueError, match=r"adapters of model.layers.0.self_attn.q_proj are part of(.|\n)*merge_and_unload"
    ):
        fq.convert(model)
    wrapped.merge_and_unload()
    assert fq.convert(model) is not None


def test_saved_adapters_load_into_another_prepared_model(tmp_path):
    layer = fq.LayerConfig(weight=fq.presets.int4(), weight_observer=fq.observers.MSE())  # keeps scales in evaluation
    model = quantize_adapters(adapted(prepared(config=fq.QuantConfig(default=layer)), ["q_proj", "down_proj"]))
    train(model)
    wanted = outputs(quantize_adapters(model))  # the ranges of the last sums
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(prepared(config=fq.QuantConfig(default=layer)), tmp_path)
    assert not torch.equal(outputs(loaded), wanted)
    assert_same_bits(outputs(quantize_adapters(loaded)), wanted)


def test_unprepare_gives_adapters_their_own_forward_pass_back():
    model = prepared()
    wrapped = quantize_adapters(adapted(model, ["q_proj"]))
    fq.unprepare(model)
    assert_same_bits(outputs(wrapped), outputs(adapted(unprepared(), ["q_proj"])))


def unprepared():
    torch.manual_seed(0)
    return llama()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(use_dora=True), r"adapter 'default' of .*q_proj is not plain LoRA \(DoraLinearVariant\)"),
        (dict(lora_bias=True), r"is not plain LoRA \(lora_bias=True\)"),
    ],
    ids=["dora", "bias"],
)
def test_adapters_that_change_more_than_the_sum_are_refused(options, message):
    wrapped = adapted(
        prepared(gpt2 if "lora_bias" in options else llama),
        ["c_attn" if "lora_bias" in options else "q_proj"],
        **options,
    )
    with pytest.raises(ValueError, match=message):
        quantize_adapters(wrapped)


def test_other_mistakes():
    with pytest.raises(ValueError, match=r"No quantized layer of the model has adapters(.|\n)*prepare"):
        quantize_adapters(adapted(unprepared(), ["q_proj"]))
    with pytest.raises(ValueError, match="No quantized layer"):
        quantize_adapters(prepared())
    with pytest.warns(UserWarning, match="dropout of adapters is not applied"):
        quantize_adapters(adapted(prepared(), ["q_proj"], lora_dropout=0.1))
    ia3 = peft.get_peft_model(prepared(), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(ValueError, match="are not LoRA adapters of a linear layer"):
        quantize_adapters(ia3)
    model = quantize_adapters(adapted(prepared(), ["q_proj"]))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with pytest.raises(ValueError, match="`adapter_names` chooses adapters for each sample"):
        layer(torch.ones(1, 32), adapter_names=["default"])
    layer.lora_B["default"].weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match="is not finite, so it is not merged"):
        layer.merge(safe_merge=True)
