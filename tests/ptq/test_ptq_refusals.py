"""Post-training methods: layers that they leave alone, wrong arguments, and models after an error."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import fakequant as fq
from fakequant._model import shelf
from fakequant.testing.assertions import assert_same_bits
from ptq_models import IMAGES, chain, config, randn, ready

METHODS = {
    "adaround": partial(fq.ptq.adaround, iterations=20),
    "gptq": fq.ptq.gptq,
    "correct_bias": fq.ptq.correct_bias,
}


@pytest.fixture(params=METHODS)
def method(request):
    return METHODS[request.param]


def state_of(model):
    attributes = {
        path: (q.observing, q.quantizing, q.frozen, q.training, q._stale) for path, q in fq.nn.named_quantizers(model)
    }
    tensors = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    return attributes, tensors


def assert_unchanged(model, before):
    attributes, tensors = state_of(model)
    assert attributes == before[0]
    for name, tensor in tensors.items():
        assert_same_bits(tensor, before[1][name])


@pytest.mark.parametrize(("share", "in_memory"), [(0.1, True), (0.3, False), (0.6, True), (0.9, False)])
def test_model_is_unchanged_after_an_error(method, share, in_memory, monkeypatch):
    """The model fails from its n-th call on, also after some layers were changed."""
    if not in_memory:
        monkeypatch.setattr(shelf, "_MEMORY", 0)
    model = ready(chain(), IMAGES).train()
    data = [x for batch in IMAGES for x in batch.split(4)]
    before = state_of(model)
    count, limit = 0, None

    def fail(module, args):
        nonlocal count
        count += 1
        if limit is not None and count >= limit:
            raise RuntimeError("out of luck")

    handle = model[5].register_forward_pre_hook(fail)
    method(copy.deepcopy(model), data, progress=False)
    count, limit = 0, int(share * count)
    with pytest.raises(RuntimeError, match="out of luck"):
        method(model, data, progress=False)
    handle.remove()
    assert_unchanged(model, before)
    assert model.training
    assert "compute" not in vars(model[0]._fakequant)


def test_reasons_are_named():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 8)
            self.normed = weight_norm(nn.Linear(8, 8))
            self.unused = nn.Linear(8, 8)
            self.no_bias = nn.Linear(8, 8, bias=False)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.no_bias(self.normed(self.table(ids))))

    torch.manual_seed(0)
    data = [torch.arange(10).reshape(2, 5)]
    used = fq.QuantConfig(default=fq.LayerConfig(weight=fq.QuantSpec(bits=4, axis=0)))
    model = fq.prepare(Model(), used, data[0])
    reasons = {layer.path: layer.reason for layer in fq.ptq.gptq(model, data, progress=False).layers}
    assert reasons == {
        "normed": "its weight is computed from other parameters",
        "no_bias": None,
        "head": "its weight is shared with another layer",
        "table": "its weight is shared with another layer",
        "unused": "no data reached it",
    }
    reasons = {layer.path: layer.reason for layer in fq.ptq.correct_bias(model, data, progress=False).layers}
    assert reasons == {
        "normed": None,
        "no_bias": "it has no bias, and no batch norm follows",
        "head": "it has no bias, and no batch norm follows",
        "table": "it looks up rows of its weight",
        "unused": "no data reached it",
    }


def test_table_names_reasons_and_counts():
    model = ready(chain(), IMAGES)
    text = str(fq.ptq.gptq(model, IMAGES, layers="6", progress=False))
    assert "not changed because" in text
    assert text.endswith("gptq changed 1 of 3 layers.")


def test_models_that_are_not_ready_are_refused(method):
    with pytest.raises(ValueError, match=r"not prepared"):
        method(chain(), IMAGES)
    with pytest.raises(ValueError, match=r"Call fakequant.calibrate\(model, data\) first"):
        method(fq.prepare(chain(), config(), IMAGES[0]), IMAGES)


def test_wrong_arguments_are_refused(method):
    model = ready(chain(), IMAGES)
    with pytest.raises(TypeError, match="iterable of batches"):
        method(model, lambda model: model(IMAGES[0]))
    with pytest.raises(ValueError, match="no batches"):
        method(model, [])
    with pytest.raises(TypeError, match="`reference` must be a float model"):
        method(model, IMAGES, reference="float")
    with pytest.raises(ValueError, match="is not the float model"):
        method(model, IMAGES, reference=nn.Linear(2, 2))
    with pytest.raises(TypeError, match="`layers` must be a pattern"):
        method(model, IMAGES, layers=[0])


def test_wrong_options_are_refused():
    model = ready(chain(), IMAGES)
    with pytest.raises(ValueError, match="`damping` must be a number above 0"):
        fq.ptq.gptq(model, IMAGES, damping=0)
    with pytest.raises(ValueError, match="`iterations` must be a number of steps"):
        fq.ptq.adaround(model, IMAGES, iterations=0)
    with pytest.raises(ValueError, match="`blocks` matches no module"):
        fq.ptq.adaround(model, IMAGES, blocks="layers.*")
    with pytest.raises(TypeError, match="`act_order` must be True or False"):
        fq.ptq.gptq(model, IMAGES, act_order="yes")


def test_data_can_be_one_tensor_or_limited(method):
    one, other = (ready(chain(), IMAGES) for _ in range(2))
    first = method(one, IMAGES[0], progress=False)
    second = method(other, IMAGES, steps=1, progress=False)
    assert first == second
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert_same_bits(a.detach(), b.detach())


def test_input_that_is_always_zero_says_nothing_about_weights():
    x = randn(8, 4)
    for rounded in (fq.ptq.gptq, partial(fq.ptq.adaround, iterations=20)):
        model = ready(nn.Sequential(nn.Linear(4, 4)), [x])
        expected = copy.deepcopy(model)
        rounded(model, [torch.zeros(8, 4)], progress=False)
        assert torch.equal(model(x), expected(x))  # the nearest codes


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
@pytest.mark.parametrize("name", ["adaround", "gptq"])
def test_inputs_without_a_finite_error_name_the_layer(name, value):
    data = randn(8, 4)
    model = ready(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), [data], fq.recipes.int4_weight_only(4))
    before = state_of(model)
    data[0, 0] = value
    with pytest.raises(ValueError, match=r"The error of 0 is not finite"):
        METHODS[name](model, [data], progress=False)
    assert_unchanged(model, before)


def test_inputs_that_differ_too_much_name_the_layer():
    data = torch.tensor([[1e18, 1e18, 1.0, 1.0], [1e18, 1e18, 1.0, -1.0]])
    model = ready(nn.Sequential(nn.Linear(4, 4)), [data], fq.recipes.int4_weight_only(4))
    with pytest.raises(ValueError, match=r"The inputs of 0 differ too much in size.*\n.*larger damping than 1e-30"):
        fq.ptq.gptq(model, [data], damping=1e-30, progress=False)
