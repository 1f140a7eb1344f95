"""Batch norms and weights that a schedule freezes, and what stays trainable."""

import copy

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
recipes = pytest.importorskip("fakequant.recipes")
fqnn = pytest.importorskip("fakequant.nn")
QuantizedLayer = pytest.importorskip("fakequant.nn._quantized_layer").QuantizedLayer


class Residual(nn.Module):
    """The output of the batch norm is an operand of an addition, so it has a quantizer."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x):
        return x + self.norm(self.conv(x))


X = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(0))


def prepared():
    torch.manual_seed(0)
    return fq.calibrate(fq.prepare(Residual(), recipes.int8(), X), [X], progress=False).train()


def follows(norm):
    before = norm.running_mean.clone()
    norm(X + 5)
    return not torch.equal(before, norm.running_mean)


def test_frozen_batch_norm_does_not_freeze_its_output_quantizer():
    model = prepared()
    fq.Schedule(model, freeze_norms_at=0)
    model.train()
    before = model.norm.output_quantizer.running_max.clone()
    model(100 * X)
    assert not model.norm.training
    assert model.norm.output_quantizer.training
    assert model.norm.output_quantizer.running_max > before


def test_new_schedule_unfreezes_batch_norms_of_an_earlier_one():
    model = prepared()
    fq.Schedule(model, freeze_norms_at=0)
    assert not follows(model.train().norm)
    fq.Schedule(model, freeze_norms_at=100)
    assert follows(model.norm)


def test_copy_of_a_model_with_frozen_batch_norms_is_unfrozen_separately():
    model = prepared()
    fq.Schedule(model, freeze_norms_at=0)
    copied = copy.deepcopy(model)
    fq.Schedule(copied)
    assert follows(copied.train().norm)
    assert not follows(model.train().norm)


def test_unprepare_unfreezes_batch_norms():
    model = prepared()
    fq.Schedule(model, freeze_norms_at=0)
    assert follows(fq.unprepare(model).train().norm)


def test_weights_outside_a_frozen_range_have_no_gradient():
    """With a dynamic range, no weight is outside and all gradients pass."""
    model = fq.prepare(nn.Sequential(nn.Linear(2, 2, bias=False)), recipes.int8(), torch.ones(1, 2))
    x = torch.ones(1, 2)
    model(x).sum().backward()
    assert (model[0].weight.grad != 0).all()
    fqnn.switch_quantizers(model, frozen=True)
    with torch.no_grad():
        model[0].weight.mul_(3)
    model[0].weight.grad = None
    model(x).sum().backward()
    largest = model[0].weight.abs().amax(1, keepdim=True)
    assert (model[0].weight.grad[model[0].weight.abs() == largest] == 0).all()


def test_batch_norm_over_tokens_does_not_change_the_bias_before_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16))
    x = torch.randn(4, 16, 8)
    model = fq.calibrate(fq.prepare(model, recipes.int8(), x), [x], progress=False)
    assert isinstance(model[0], QuantizedLayer)
    fqnn.switch_quantizers(model, frozen=True)
    with torch.no_grad():
        model[1].running_mean.normal_()
    assert torch.equal(model[0].train()(x), model.eval()[0](x))


def test_schedule_that_cannot_freeze_a_norm_changes_nothing():
    model = fq.prepare(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4)), fq.recipes.int8(), torch.ones(1, 4)
    )
    model[2]._fakequant = "mine"
    with pytest.raises(ValueError, match="_fakequant"):
        fq.Schedule(model, quantize_from=1, freeze_norms_at=0)
    assert all(quantizer.quantizing for _, quantizer in fq.nn.named_quantizers(model))
    assert type(model[1]) is nn.BatchNorm1d
