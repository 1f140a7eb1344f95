"""Runs of a prepared model beside its float reference."""

import torch
from torch import nn

from fakequant._paired_models import runs as paired_runs
from fakequant._paired_models.runs import PairedRuns
from fakequant.ptq._quadratic_error import rows_of, sums_of
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
