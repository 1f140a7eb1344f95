"""`frozen_weights`: evaluation quantizes each weight once, notices changes, and returns the same bits."""

import copy
import pickle
import sys
import threading
from contextlib import nullcontext

import pytest

import fakequant as fq
from fakequant import recipes
from fakequant.nn import frozen_weights
from fakequant.nn._quantizer import Quantizer
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
nn = torch.nn


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 4))


TOKENS = torch.arange(6).reshape(2, 3)
CONFIGS = {
    "dynamic": recipes.int4_weight_only(),
    "learned": recipes.lsq(4, first_last_bits=None),
    "fixed": fq.QuantConfig(
        default=fq.LayerConfig(weight=fq.presets.int8(), weight_observer=fq.observers.MinMax()),
        rules=(fq.Rule(type="Embedding", use=fq.LayerConfig(weight=fq.presets.nvfp4())),),
    ),
}


def prepared(config="dynamic"):
    model = fq.prepare(network(), CONFIGS[config], TOKENS)
    return fq.calibrate(model, [TOKENS], progress=False).eval()


@pytest.fixture
def quantized(monkeypatch):
    """The shapes of the weights that were quantized."""
    seen = []
    run = Quantizer.forward

    def forward(self, x):
        if self.path.endswith("weight_quantizer"):
            seen.append(tuple(x.shape))
        return run(self, x)

    monkeypatch.setattr(Quantizer, "forward", forward)
    return seen


def outputs(model):
    with torch.no_grad():
        return model(TOKENS)


@pytest.mark.parametrize("config", CONFIGS)
def test_each_weight_is_quantized_once(config, quantized):
    model = prepared(config)
    wanted = outputs(model)
    quantized.clear()
    with frozen_weights(model):
        for _ in range(3):
            assert_same_bits(outputs(model), wanted)
        assert len(quantized) == 3
        with torch.inference_mode():
            assert_same_bits(model(TOKENS), wanted)
        assert len(quantized) == 3
    assert_same_bits(outputs(model), wanted)
    assert len(quantized) == 6


def step(model):
    for group in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = group(model.parameters(), lr=0.1)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()


def load(model, **options):
    model.load_state_dict({n: v * 1.5 if n.endswith("weight") else v for n, v in model.state_dict().items()}, **options)


def scale_in_inference(model):
    with torch.inference_mode():
        model[1].weight.mul_(-1.5)


def round_trip(model):
    model.to(torch.bfloat16).to(torch.float32)


def replace_data(model):
    for _ in range(3):  # new memory each time, perhaps at an address that was just freed
        model[1].weight.data = torch.randn(32, 32)
        outputs(model)


def set_scales(model):
    quantizer = model[1].weight_quantizer
    quantizer.set_qparams(quantizer.qparams().scale * 3, torch.zeros_like(quantizer.qparams().zero_point))


def replace_parameter(model):
    model[3].weight = nn.Parameter(-model[3].weight.detach())


CHANGES = {
    "optimizers": step,
    "load_state_dict": load,
    "assign": lambda model: load(model, assign=True),
    "in place": lambda model: nn.init.normal_(model[1].weight),
    "inference": scale_in_inference,
    "dtype": round_trip,
    "data": replace_data,
    "scales": set_scales,
    "parameter": replace_parameter,
    "switch": lambda model: fq.nn.switch_quantizers(model, quantizing=False),
    "unprepare": fq.unprepare,
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_changes_are_noticed(change, config):
    model = prepared(config)
    before = outputs(model)
    with frozen_weights(model):
        outputs(model)
        change(model)
        found = outputs(model)
        again = copy.deepcopy(model)
    assert_same_bits(found, outputs(again))
    assert_same_bits(found, outputs(model))
    assert not torch.equal(found, before)


def test_copies_and_states_have_no_kept_weights(quantized):
    model = prepared()
    names = list(model.state_dict())
    with frozen_weights(model):
        wanted = outputs(model)
        assert list(model.state_dict()) == names
        for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            quantized.clear()
            assert_same_bits(outputs(made), wanted)
            assert_same_bits(outputs(made), wanted)
            assert len(quantized) == 6
    assert all(part.keeper is None for part in (model[0]._fakequant, model[1]._fakequant))


@pytest.mark.parametrize("config", CONFIGS)
def test_training_and_gradients_are_those_without_the_context(config):
    found = []
    for context in (nullcontext, frozen_weights):
        model = prepared(config)
        with context(model):
            outputs(model)
            model(TOKENS).square().sum().backward()
            model.train()(TOKENS).square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)


def test_contexts_nest_and_end_with_an_error(quantized):
    model = prepared()

    def fail():
        with frozen_weights(model):
            with frozen_weights(model[1]):
                outputs(model)
            quantized.clear()
            outputs(model)
            assert quantized == []
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    outputs(model)
    assert len(quantized) == 3


def test_modes_transforms_and_compilers_see_every_call():
    model = prepared()
    float_rows = torch.randn(3, 32)
    layer = model[1]
    with torch.no_grad(), frozen_weights(model):
        wanted = layer(float_rows)
        batched = torch.func.vmap(layer)(float_rows.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(batched, wanted)  # a batched product sums in another order
        negative = copy.deepcopy(layer)
        negative.weight.mul_(-1)
        opposite = negative(float_rows)
        other = {"weight": -layer.weight.detach()}
        assert_same_bits(torch.func.functional_call(layer, other, (float_rows,)), opposite)
        stacked = torch.stack([layer.weight.detach(), -layer.weight.detach()])
        both = torch.func.vmap(lambda w: torch.func.functional_call(layer, {"weight": w}, (float_rows,)))(stacked)
        torch.testing.assert_close(both, torch.stack([wanted, opposite]))
        compiled = torch.compile(layer, backend="eager")
        assert_same_bits(compiled(float_rows), wanted)
        layer.weight.mul_(-1)
        assert_same_bits(compiled(float_rows), opposite)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same_bits(layer(float_rows), copy.deepcopy(layer)(float_rows))


def test_hooks_of_quantizers_are_called():
    model = prepared()
    seen = []
    with frozen_weights(model):
        outputs(model)
        model[1].weight_quantizer.register_forward_hook(lambda *found: seen.append(found))
        outputs(model)
    assert len(seen) == 1


def test_sums_with_adapters_are_kept():
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["1"], r=2, init_lora_weights=False)
    model = peft.get_peft_model(fq.prepare(network(), CONFIGS["dynamic"]), settings)
    model.add_adapter("second", settings)
    model = fq.nn.quantize_adapters(model).eval()
    tuner = model.base_model.model[1]
    with frozen_weights(model):
        first = outputs(model)
        kept = tuner.keeper._last.result
        assert_same_bits(outputs(model), first)
        assert tuner.keeper._last.result is kept
        model.set_adapter("second")
        second = outputs(model)
        tuner.scaling["second"] *= 2
        third = outputs(model)
        assert_same_bits(third, outputs(copy.deepcopy(model)))
        assert not torch.equal(first, second)
        assert not torch.equal(second, third)
        with torch.no_grad():
            tuner.lora_A["second"].weight.mul_(2)
        assert_same_bits(outputs(model), outputs(pickle.loads(pickle.dumps(model))))
        model.set_adapter("default")
        assert_same_bits(outputs(model), first)


def test_experts_are_kept_too(quantized):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    model = fq.prepare(transformers.MixtralForCausalLM(config), recipes.int4_weight_only()).eval()
    with torch.no_grad():
        wanted = model(TOKENS).logits
        with frozen_weights(model):
            model(TOKENS)
            quantized.clear()
            assert_same_bits(model(TOKENS).logits, wanted)
    assert quantized == []


def test_steps_of_fused_optimizers_are_noticed():
    """Their kernels do not raise the version of a tensor."""
    torch.manual_seed(0)
    model = fq.prepare(nn.Sequential(nn.Linear(32, 8)), fq.recipes.int4_weight_only()).eval()
    x = torch.randn(2, 32)
    model(x).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    with torch.no_grad(), fq.nn.frozen_weights(model):
        before = model(x)
        optimizer.step()
        after = model(x)
    assert not torch.equal(before, after)
    assert torch.equal(after, model(x))


def test_several_threads_may_open_contexts_of_one_model():
    model = fq.prepare(nn.Sequential(nn.Linear(32, 8)), fq.recipes.int4_weight_only()).eval()
    x = torch.randn(2, 32)
    expected, wrong = model(x).detach(), []

    def run():
        for _ in range(200):
            with torch.no_grad(), fq.nn.frozen_weights(model):
                if not torch.equal(model(x), expected):
                    wrong.append(1)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not wrong
    assert model[0]._fakequant.keeper is None
