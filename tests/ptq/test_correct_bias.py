"""`correct_bias`: where the mean error of a layer goes."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant._paired_models import runs as paired_runs
from fakequant.nn._folding import factor_of
from fakequant.nn._quantized_layer import input_grid_of
from ptq_models import IMAGES, chain, config, output_error, randn, ready


def mean_result(model, layer, data):
    """Returns the mean of a layer's result per channel."""
    seen = []
    with torch.no_grad():
        handle = layer.register_forward_hook(lambda module, args, y: seen.append(y.transpose(0, 1).flatten(1)))
        for x in data:
            model(x)
        handle.remove()
    return torch.cat(seen, 1).double().mean(1)


def test_means_of_all_layers_are_those_of_the_float_model():
    floats = chain()
    model = ready(copy.deepcopy(floats), IMAGES)
    before = output_error(model, floats, IMAGES)
    changes = fq.ptq.correct_bias(model, IMAGES, progress=False)
    assert changes.changed == ["0", "3", "6"]
    assert output_error(model, floats, IMAGES) < before
    for index, result in ((0, 1), (3, 3), (6, 6)):  # the batch norm takes the correction of the first
        layer = model[index]
        # The bias is rounded to an integer at the scale of the sums, so half a step may be left.
        step = layer.weight_quantizer.scale * input_grid_of(layer).scale
        if index == 0:
            step = step * factor_of(model[1]).abs()
        difference = mean_result(model, model[result], IMAGES) - mean_result(floats, floats[result], IMAGES)
        assert (difference.abs() <= 0.501 * step).all()


def test_correction_goes_into_the_running_mean_of_a_batch_norm_that_folds():
    model = ready(chain(), IMAGES)
    parameters = {name: p.clone() for name, p in model.named_parameters()}
    mean = model[1].running_mean.clone()
    fq.ptq.correct_bias(model, IMAGES, layers="0", progress=False)
    assert all(torch.equal(p, parameters[name]) for name, p in model.named_parameters())
    assert not torch.equal(model[1].running_mean, mean)


def test_correction_is_exact_where_nothing_else_rounds():
    """127 and 0.25 in one channel: the second is rounded to 0, so the bias takes a quarter of the mean input."""
    used = fq.QuantConfig(default=fq.LayerConfig(weight=fq.presets.int8()))
    model = fq.prepare(nn.Sequential(nn.Linear(2, 1)), used, torch.ones(1, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[127.0, 0.25]]))
        model[0].bias.fill_(1.0)
    batches = [torch.tensor([[1.0, 8.0]]), torch.tensor([[3.0, 0.0], [5.0, 4.0]])]  # every row counts the same
    change = fq.ptq.correct_bias(model, batches, progress=False).layers[0]
    assert model[0].bias.tolist() == [2.0]
    assert change.after > change.before


def test_layers_are_corrected_with_the_inputs_of_corrected_layers():
    """The second layer would see the error of the first, and correct it again."""
    used = fq.QuantConfig(default=fq.LayerConfig(weight=fq.presets.int8()))
    model = fq.prepare(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), used, torch.ones(1, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[127.0, 0.25], [127.0, 0.0]]))
        model[1].weight.copy_(torch.tensor([[1.0, 1.0]]))
        for layer in model:
            layer.bias.zero_()
    fq.ptq.correct_bias(model, [torch.tensor([[0.0, 8.0], [0.0, 4.0]])], progress=False)
    assert model[0].bias.tolist() == [1.5, 0.0]
    assert model[1].bias.tolist() == [0.0]


def test_rounded_weights_need_the_float_model():
    floats = chain()
    model = ready(copy.deepcopy(floats), IMAGES)
    fq.ptq.gptq(model, IMAGES, progress=False)
    with pytest.warns(UserWarning, match="reference=float_model"):
        fq.ptq.correct_bias(copy.deepcopy(model), IMAGES, progress=False)
    before = output_error(model, floats, IMAGES)
    fq.ptq.correct_bias(model, IMAGES, reference=floats, progress=False)
    assert output_error(model, floats, IMAGES) < before


def test_attention_and_recurrent_layers():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.lstm = nn.LSTM(8, 4, batch_first=True)

        def forward(self, x, memory):
            y = self.attention(x, x, x, need_weights=False)[0]
            return self.lstm(y + self.attention(x, memory, memory, need_weights=False)[0])[0]

    torch.manual_seed(0)
    data = [(randn(4, 5, 8), randn(4, 7, 8, seed=2) + 1), (randn(4, 3, 8, seed=3), randn(4, 6, 8, seed=4) + 1)]
    floats = Model().eval()

    @torch.no_grad()
    def error(model):
        return sum(float((model(*x) - floats(*x)).square().sum()) for x in data)

    for method in (fq.ptq.correct_bias, fq.ptq.gptq, partial(fq.ptq.adaround, iterations=100)):
        model = ready(copy.deepcopy(floats), data, config(bits=2))
        before = error(model)
        changes = method(model, data, progress=False)
        assert changes.changed == ["attention", "attention.out_proj", "lstm.ih_l0", "lstm.hh_l0"]
        assert error(model) < before


def test_queries_keys_and_values_have_their_own_corrections():
    """With three inputs, each third of the bias is corrected by the mean of its own product."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 1, batch_first=True)
    used = fq.QuantConfig(default=fq.LayerConfig(weight=fq.QuantSpec(bits=2, axis=0)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, q, k, v):
            return self.attention(q, k, v, need_weights=False)[0]

    inputs = tuple(randn(3, 5, 4, seed=seed) + seed for seed in (1, 2, 3))
    model = fq.prepare(Model().eval(), used, inputs)
    weight, bias = attention.in_proj_weight.detach().clone(), attention.in_proj_bias.detach().clone()
    errors = (weight - model.attention.weight_quantizer(weight)).double().chunk(3)
    fq.ptq.correct_bias(model, [inputs], layers="attention", progress=False)
    expected = torch.cat([error @ x.double().flatten(0, 1).mean(0) for error, x in zip(errors, inputs, strict=True)])
    # Sums of 20 products in float32.
    torch.testing.assert_close(attention.in_proj_bias.detach() - bias, expected.float(), rtol=1e-4, atol=1e-5)


def test_batch_norm_over_tokens_does_not_take_the_correction():
    """After a linear layer on tokens, a batch norm normalizes another axis, and does not fold."""
    torch.manual_seed(0)
    x = randn(8, 5, 4)
    for bias in (True, False):
        model = nn.Sequential(nn.Linear(4, 4, bias=bias), nn.BatchNorm1d(5))
        model.train()(x)
        model = ready(model, [x])
        before = model[1].running_mean.clone()
        change = fq.ptq.correct_bias(model, [x], progress=False).layers[0]
        assert torch.equal(model[1].running_mean, before)
        assert change.reason == (None if bias else "it has no bias, and no batch norm follows")


def test_several_processes_are_refused(monkeypatch):
    class Several:
        several = True

    model = ready(chain(), IMAGES)
    monkeypatch.setattr(paired_runs, "ranks_of", Several)
    with pytest.raises(RuntimeError, match="Run this method in one process"):
        fq.ptq.correct_bias(model, IMAGES)
