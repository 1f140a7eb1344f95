"""LoRA adapters that are part of quantized weights: what is trained is what merging leaves behind, bit for bit."""

import copy
import pickle
import sys
import threading
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


# --- the weight as codes ------------------------------------------------------------------------------


def weights_of(spec, **more):
    return fq.QuantConfig(default=fq.LayerConfig(weight=spec, **more)).skip(type="Embedding")


PACKED = {
    "int4": recipes.int4_weight_only(),
    "channels": weights_of(fq.QuantSpec(bits=3, axis=0, symmetric=False, signed=False)),
    "nvfp4": recipes.nvfp4_weight_only(),
    "q4_0": recipes.gguf("q4_0"),
    "learned": weights_of(fq.presets.int4(), learned=True),
    "w8a8": recipes.int8_dynamic(),
}


def with_weights_on_the_grid(model):
    """Returns a copy whose layers with adapters have, as floats, the weights and scales that they have when packed."""
    made = copy.deepcopy(model)
    for module in made.modules():
        if hasattr(module, "base_layer"):
            base, quantizer = module.base_layer, module.base_layer.weight_quantizer
            with torch.no_grad():
                base.weight.copy_(quantizer.eval()(base.weight))
            if isinstance(quantizer, fq.nn.FakeQuantize):
                quantizer.frozen = True
    return made


@pytest.mark.parametrize("config", PACKED.values(), ids=PACKED)
@pytest.mark.parametrize(
    ("make", "targets", "dtype"),
    [(llama, ["q_proj", "down_proj"], torch.float32), (llama, ["q_proj"], torch.bfloat16),
     (gpt2, ["c_attn", "c_fc"], torch.float32)],
    ids=["llama", "bfloat16", "gpt2"],
)  # fmt: skip
def test_packed_weights_compute_what_floats_on_the_grid_do(make, targets, dtype, config):
    torch.manual_seed(0)
    model = fq.prepare(make().to(dtype), config)
    if make is gpt2 and config is PACKED["q4_0"]:
        pytest.skip("its layers stay in float")
    alone = outputs(model)
    model = adapted(model, targets, init_lora_weights=True)  # B is 0
    floats = quantize_adapters(with_weights_on_the_grid(model))
    model = quantize_adapters(model, packed=True)
    assert_same_bits(outputs(model), alone)
    layers = [m for m in model.modules() if type(m).__name__.startswith("Packed")]
    assert len(layers) == len(targets)
    assert all(layer._parameters["weight"] is None for layer in layers)
    for one in (model, floats):
        torch.manual_seed(2)  # of dropout
        train(one)
    wanted = outputs(floats)
    assert not torch.equal(wanted, alone)
    assert_same_bits(outputs(model), wanted)
    trained = dict(floats.named_parameters())
    for name, value in model.named_parameters():
        assert_same_bits(value, trained[name], name)
    with fq.nn.frozen_weights(model):
        assert_same_bits(outputs(model), wanted)
        assert_same_bits(outputs(model), wanted)
    other = quantize_adapters(adapted(fq.prepare(make().to(dtype), config), targets), packed=True)
    other.load_state_dict(model.state_dict())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), other):
        assert_same_bits(outputs(copied), wanted)
        assert_same_bits(outputs(copied.merge_and_unload()), wanted)
    merged = model.merge_and_unload()
    assert type(merged) is make().__class__
    assert_same_bits(outputs(merged), wanted)
    assert list(merged.state_dict()) == list(fq.prepare(make().to(dtype), config).state_dict())


def test_packed_weights_take_less_memory_also_in_training():
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False))
    kept, sizes = {}, []
    for packed in (False, True):
        model = fq.prepare(copy.deepcopy(layer), recipes.int4_weight_only())
        tuner = quantize_adapters(adapted(model, ["0"]), packed=packed).base_model.model[0]
        tensors = tuner.base_layer.packed_tensors() if packed else [tuner.base_layer.weight]
        sizes.append(sum(tensor.nbytes for tensor in tensors))
        kept.clear()

        def keep(x):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            tuner(torch.randn(4, 512, requires_grad=True))
        sizes.append(sum(kept.values()))
    assert sizes[2] <= 0.16 * sizes[0]
    assert sizes[1] >= 4 * 512 * 512
    assert sizes[3] < 0.05 * sizes[1]


def test_packed_weights_move_and_unprepare():
    model = prepared()
    wrapped = quantize_adapters(adapted(model, ["q_proj"]), packed=True)
    layer = model.model.layers[0].self_attn.q_proj.base_layer
    scale, values = layer.weight_scale, layer.weight
    wrapped.to(torch.bfloat16)
    assert layer.weight_scale.dtype == torch.float32
    assert_same_bits(layer.weight_scale, scale)
    assert wrapped.eval()(**BATCH)[0].dtype == torch.bfloat16
    assert layer.weight.dtype == torch.bfloat16
    wrapped.float()
    assert_same_bits(layer.weight, values)
    with pytest.raises(ValueError, match="not merged into it"):
        fq.convert(model)
    fq.unprepare(model)
    assert type(layer) is torch.nn.Linear
    assert_same_bits(layer.weight, values)
    assert list(layer.state_dict()) == ["weight"]


def test_weights_that_cannot_be_packed():
    model = prepared()
    wrapped = adapted(model, ["q_proj", "v_proj"])
    model.model.layers[0].self_attn.v_proj.base_layer.weight_quantizer.quantizing = False
    with pytest.raises(ValueError, match="v_proj cannot be held as codes: its quantizer is switched off"):
        quantize_adapters(wrapped, packed=True)
    assert model.model.layers[0].self_attn.q_proj.base_layer._parameters["weight"] is not None
    wide = adapted(prepared(config=weights_of(fq.QuantSpec(bits=12, axis=0))), ["q_proj"])
    with pytest.raises(ValueError, match="more than 8 bits"):
        quantize_adapters(wide, packed=True)


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


@pytest.mark.parametrize("packed", [False, True])
def test_threads_may_share_a_model_with_adapters(packed):
    torch.manual_seed(0)
    model = fq.prepare(torch.nn.Sequential(torch.nn.Linear(32, 8)), fq.recipes.int4_weight_only())
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))
    model = fq.nn.quantize_adapters(model, packed=packed).eval()
    x = torch.randn(2, 32)
    with torch.no_grad():
        expected, wrong = model(x), []

    def run():
        for _ in range(300):
            with torch.no_grad():
                if not torch.equal(model(x), expected):
                    wrong.append(1)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
