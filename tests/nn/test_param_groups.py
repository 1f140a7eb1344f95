"""`param_groups` separates learned scales from the other parameters."""

import numpy as np
import pytest

from learned_cases import INT4, UINT4, bits, initialized

torch = pytest.importorskip("torch")
nn = torch.nn
quantizers = pytest.importorskip("fakequant.nn")
LearnedFakeQuantize, FakeQuantize, PACT = quantizers.LearnedFakeQuantize, quantizers.FakeQuantize, quantizers.PACT
param_groups = quantizers.param_groups


def model_with_everything():
    shared = LearnedFakeQuantize(INT4)
    return nn.ModuleDict(
        {
            "linear": nn.Linear(3, 3),
            "act": LearnedFakeQuantize(UINT4),
            "nested": nn.Sequential(shared, nn.Linear(3, 3, bias=False), shared),
            "fixed": LearnedFakeQuantize(UINT4, learn_zero_point=False),
            "pact": PACT(4),
            "calibrated": FakeQuantize(INT4),
        }
    )


def names(model, group):
    by_id = {id(p): name for name, p in model.named_parameters()}
    return sorted(by_id[id(p)] for p in group["params"])


def test_param_groups_puts_learned_scales_in_a_group_without_weight_decay():
    model = model_with_everything()
    others, scales = param_groups(model)
    assert names(model, scales) == ["act.offset", "act.step_size", "fixed.step_size", "nested.0.step_size"]
    assert names(model, others) == ["linear.bias", "linear.weight", "nested.1.weight", "pact.alpha"]
    assert set(others) == {"params"}
    assert scales["weight_decay"] == 0


def test_param_groups_options_apply_to_the_scales():
    groups = param_groups(model_with_everything(), lr=0.5, betas=(0.5, 0.9))
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)
    assert [(g["lr"], g["weight_decay"], g["betas"][0]) for g in optimizer.param_groups] == [
        (0.1, 0.3, 0.9),
        (0.5, 0.0, 0.5),
    ]


def test_param_groups_lists_a_shared_parameter_once():
    a, b = LearnedFakeQuantize(INT4), LearnedFakeQuantize(INT4)
    b.step_size = a.step_size
    (group,) = param_groups(nn.Sequential(a, b))
    assert [id(p) for p in group["params"]] == [id(a.step_size)]


def test_param_groups_leaves_out_an_empty_group():
    assert [len(g["params"]) for g in param_groups(nn.Linear(2, 2))] == [2]
    assert param_groups(nn.ReLU()) == []
    (group,) = param_groups(initialized())
    assert group["weight_decay"] == 0


def test_weight_decay_does_not_change_the_scales():
    model = nn.Sequential(nn.Linear(3, 3), initialized(UINT4))
    optimizer = torch.optim.SGD(param_groups(model), lr=0.1, weight_decay=0.5)
    before = [bits(p) for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    after = [bits(p) for p in model.parameters()]
    assert [np.array_equal(b, a) for b, a in zip(before, after, strict=True)] == [False, False, True, True]
