"""Runs of a prepared model beside its float reference."""

import copy
import weakref

import torch
from torch import nn

from fakequant._paired_models import runs as paired_runs
from fakequant._paired_models.runs import PairedRuns
from fakequant.ptq import _quadratic_error as quadratic_error
from fakequant.ptq._quadratic_error import rows_of, sums_of
from fakequant.testing.assertions import assert_same_state
from ptq_models import IMAGES, chain, config, randn, ready


def input_of(product):
    return product.x


class Shared(nn.Module):
    """Two layers with the same input, and one that is called twice."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.twice, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.runs = 0

    def forward(self, x):
        x = x * 1.0
        y = self.twice(self.query(x) + self.key(x))
        y = self.last(self.twice(y))
        self.runs += 1
        return y


def test_layers_with_the_same_input_are_seen_together_and_calls_are_counted():
    model = ready(Shared(), [randn(3, 4), randn(5, 4)])
    with PairedRuns(model, [randn(3, 4), randn(5, 4)], None, None, input_of) as runs:
        assert runs.waves == [["query", "key"], ["twice"], ["last"]]
        pairs = list(runs.pairs(["twice"]))
        assert [len(pair.quantized.x) for pair in pairs] == [3, 3, 5, 5]
        assert all(pair.reference is not None for pair in pairs)
        assert {pair.path for pair in runs.pairs(["query", "key"])} == {"query", "key"}


def test_models_run_no_further_than_needed():
    model = ready(Shared(), [randn(3, 4)])
    with PairedRuns(model, [randn(3, 4)], None, None, input_of) as runs:
        before = model.runs
        assert len(list(runs.pairs(["query"]))) == 1
        assert len(list(runs.pairs(["twice"]))) == 2
        assert model.runs == before


def test_reference_is_the_float_model_and_quantized_inputs_are_on_their_grid():
    floats = chain()
    inputs = []
    floats[6].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    with torch.no_grad():
        floats(IMAGES[0])
    model = ready(chain(), IMAGES)
    with PairedRuns(model, IMAGES, 1, None, input_of) as runs:
        (pair,) = runs.pairs(["6"])
        assert torch.equal(pair.reference, inputs[0])
        quantizer = model[6].input_quantizer
        assert torch.equal(quantizer(pair.quantized.x), pair.quantized.x)
        assert not torch.equal(pair.quantized.x, inputs[0])


def test_pairs_are_the_same_without_memory_for_the_reference(monkeypatch):
    model = ready(chain(), IMAGES, config(bits=8))
    found = []
    for limit in (1 << 30, 0):
        monkeypatch.setattr(paired_runs, "_CACHE", limit)
        with PairedRuns(model, IMAGES, None, None, input_of) as runs:
            found.append([pair.reference for path in runs.called for pair in runs.pairs([path])])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_attention_has_three_matrices_however_it_is_called():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 1, batch_first=True)

        def forward(self, x, memory):
            y = self.attention(x, x, x, need_weights=False)[0]
            return self.attention(y, memory, memory, need_weights=False)[0]

    data = [(randn(2, 3, 4), randn(2, 5, 4, seed=2))]
    model = ready(Model(), data)
    with PairedRuns(model, data, None, None, rows_of) as runs:
        pairs = list(runs.pairs(["attention"]))
        assert [pair.quantized.part for pair in pairs] == [None, 0, 1, 2]
        assert all(pair.quantized.form.matrices == 3 for pair in pairs)
        weight = runs.reference_weight("attention")
        sums = sums_of(pairs, {"attention": weight})["attention"]
        rows = [pair.quantized.x.reshape(-1, 4).double() for pair in pairs]
        expected = [rows[0].t() @ rows[0] + x.t() @ x for x in rows[1:]]
        # Sums of 16 products in float32.
        torch.testing.assert_close(sums.a, torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_the_reference_shares_scales_of_weights_and_never_changes_them():
    """Quantizers of the copy would compute scales from its weights, which are three times as large."""
    larger = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = ready(copy.deepcopy(larger), [randn(3, 4)])
    with torch.no_grad():
        for parameter in larger.parameters():
            parameter.mul_(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with PairedRuns(model, [randn(3, 4)], None, larger, input_of) as runs:
        for path in ("0", "1"):
            own, shared = (m.get_submodule(path).weight_quantizer for m in (model, runs._reference))
            assert {name for name, t in own.named_buffers() if t.data_ptr() != shared.get_buffer(name).data_ptr()} == {
                "switches"
            }
            own.frozen = True  # as soon as the weight is rounded
            assert len(list(runs.pairs([path]))) == 1
            own.frozen = False
    assert_same_state(before, model.state_dict())


def test_products_of_a_single_layer_are_added_one_by_one(monkeypatch):
    """Each may be larger than the weight."""
    made: list[weakref.ref[torch.Tensor]] = []
    products = quadratic_error._products

    def watched(x, expected):
        for product in products(x, expected):
            assert all(ref() is None for ref in made)
            made.append(weakref.ref(product))
            yield product
            del product

    monkeypatch.setattr(quadratic_error, "_products", watched)
    model = ready(nn.Sequential(nn.Linear(4, 4)), [randn(3, 4)])
    with PairedRuns(model, [randn(3, 4)], None, None, rows_of) as runs:
        assert sums_of(runs.pairs(["0"]), {"0": runs.reference_weight("0")})
    assert len(made) == 3
