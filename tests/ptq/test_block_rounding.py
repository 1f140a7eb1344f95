"""`adaround` with `blocks`: layers that are rounded together."""

import copy

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fakequant as fq
from fakequant.ptq import _adaround
from fakequant.testing.assertions import assert_same_model
from ptq_models import IMAGES, chain, output_error, ready

DATA = [x for batch in IMAGES for x in batch.split(8)]


@pytest.fixture(scope="module")
def models():
    """The float model, whose first five modules are one, and the model with layers rounded one by one."""
    layers = list(chain())
    floats = nn.Sequential(nn.Sequential(*layers[:5]), *layers[5:]).eval()
    alone = ready(copy.deepcopy(floats), DATA)
    fq.ptq.adaround(alone, DATA, iterations=100, progress=False)
    return floats, alone


def rounded(floats, **options):
    model = ready(copy.deepcopy(floats), DATA)
    return model, fq.ptq.adaround(model, DATA, progress=False, **options)


def test_blocks_have_a_smaller_error_than_layers_alone(models):
    floats, alone = models
    model, changes = rounded(floats, blocks="0", iterations=100)
    assert [(layer.path, layer.kind) for layer in changes.layers] == [("0", "Sequential"), ("2", "Linear")]
    assert changes.layers[0].after > changes.layers[0].before
    assert output_error(model[0], floats[0], DATA) < output_error(alone[0], floats[0], DATA)
    for layer in (model[0][0], model[0][3], model[2]):
        assert torch.equal(layer.weight_quantizer(layer.weight), layer.weight)


def test_blocks_leave_gradients_and_settings_alone(models):
    model, _ = rounded(models[0], blocks=["0"], iterations=2)
    assert all(p.grad is None for p in model.parameters())
    assert model[0][0]._fakequant.save_codes
    assert not model[0][0].weight_quantizer._forward_hooks


def test_codes_that_are_worse_are_not_used(models, monkeypatch):
    def spoil(block, weights, calls, unit, iterations):
        for weight in weights:
            weight.v.data.neg_()

    monkeypatch.setattr(_adaround, "_learn", spoil)
    floats, alone = models
    model, _ = rounded(floats, blocks="0", iterations=100)
    for layer, other in ((model[0][0], alone[0][0]), (model[0][3], alone[0][3])):
        assert torch.equal(layer.weight, other.weight)


def test_blocks_are_the_outermost_modules_that_match():
    model = ready(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))), [torch.ones(2, 4)])
    changes = fq.ptq.adaround(model, [torch.ones(2, 4)], blocks="0*", iterations=2, progress=False)
    assert [layer.path for layer in changes.layers] == ["0"]
    whole = fq.ptq.adaround(model, [torch.ones(2, 4)], blocks="", iterations=2, progress=False)
    assert [layer.path for layer in whole.layers] == [""]
    with pytest.raises(ValueError, match="`blocks` matches no module"):
        fq.ptq.adaround(model, [torch.ones(2, 4)], blocks="layers.*")


def test_each_replay_of_a_block_has_a_cache_of_its_own():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=20, **sizes, pad_token_id=0, bos_token_id=1, eos_token_id=1)
    found = []
    for use_cache in (False, True):  # True is what models of transformers do by default
        torch.manual_seed(0)
        tokens = torch.arange(20).reshape(2, 10)
        data = [{"input_ids": batch, "use_cache": use_cache} for batch in (tokens, tokens.flip(1))]
        model = ready(LlamaForCausalLM(config), data, fq.recipes.int4_weight_only(16))
        fq.ptq.adaround(model, data, iterations=6, blocks="model.layers.*", progress=False)
        found.append(model)
    assert_same_model(*found)
