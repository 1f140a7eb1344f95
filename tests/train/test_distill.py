"""`distill` compares a model with its teacher, and changes neither."""

import copy
import dataclasses
import gc
import math
import pickle

import pytest

import fakequant as fq
from calibration_cases import BATCHES, calibrated
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
fqnn = pytest.importorskip("fakequant.nn")
nn = torch.nn
F = nn.functional

X = BATCHES[0]
# Long sums in float32 that are added in another order.
SUMS = dict(rtol=1e-5, atol=1e-7)


def student():
    return calibrated(fq.recipes.lsq(2, first_last_bits=None)).eval()


def float_of(model):
    return fq.unprepare(copy.deepcopy(model))


def hooks_of(*models):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for model in models for m in model.modules())


class Wrapped(nn.Module):
    """Returns the result of a model in some form."""

    def __init__(self, model, form):
        super().__init__()
        self.model, self.form = model, form

    def forward(self, x, **ignored):
        return self.form(self.model(x))


# --- the formulas -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 2, 4.0])
def test_class_scores_are_compared_by_kl_divergence(temperature):
    model = Wrapped(student(), torch.Tensor.double)  # the terms of the sum nearly cancel
    teacher = Wrapped(float_of(model.model), torch.Tensor.double)
    y, aim = model(X), teacher(X).detach()
    found = fq.distill(model, teacher, temperature=temperature)(y, X)
    p, q = ((s / temperature).softmax(1) for s in (aim, y))
    expected = temperature**2 * (p * (p / q).log()).sum(1).mean()
    assert found.shape == ()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    assert found > 0


def test_a_student_that_equals_its_teacher_has_no_loss_and_no_gradient():
    torch.manual_seed(0)
    teacher = nn.Linear(4, 3)
    model = copy.deepcopy(teacher)
    for options in ({}, dict(outputs="mse"), dict(outputs=None, layers=[""])):
        model.zero_grad()
        loss = fq.distill(model, teacher, **options)(model(X), X)
        loss.backward()
        assert loss == 0
        assert all(torch.allclose(p.grad, torch.zeros_like(p), atol=1e-7) for p in model.parameters())


def test_every_position_of_a_sequence_counts_alike():
    torch.manual_seed(0)
    model, teacher = nn.Linear(4, 5), nn.Linear(4, 5)
    x = torch.randn(2, 3, 4)
    loss = fq.distill(model, teacher)
    torch.testing.assert_close(loss(model(x), x), loss(model(x.reshape(6, 4)), x.reshape(6, 4)), **SUMS)


def test_class_axis_of_images():
    torch.manual_seed(0)
    model, teacher = nn.Conv2d(1, 4, 1).double(), nn.Conv2d(1, 4, 1).double()
    x = torch.randn(2, 1, 3, 3).double()
    p, q = (m(x).detach().softmax(1) for m in (teacher, model))
    expected = (p * (p / q).log()).sum(1).mean()
    found = fq.distill(model, teacher, class_axis=1)(model(x), x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


def test_excluded_classes_add_nothing():
    def form(y):
        return torch.cat([y, torch.full_like(y[:, :1], -math.inf)], 1)

    model = student()
    teacher = float_of(model)
    expected = fq.distill(model, teacher)(model(X), X)
    wide, other = Wrapped(model, form), Wrapped(teacher, form)
    found = fq.distill(wide, other)(wide(X), X)
    assert_same_bits(expected, found)
    found.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("shape", [(5, 7, 16), (3, 16), (70, 70)])
def test_many_scores_are_compared_in_parts(shape, monkeypatch):
    """With the same bits, and without tensors as large as all scores that are kept for the backward pass."""
    torch.manual_seed(0)
    aim, scores = torch.randn(shape), torch.randn(shape)
    scores[..., 3] = -math.inf
    aim[..., 3] = -math.inf
    student = fq.prepare(nn.Sequential(nn.Linear(2, 2)), fq.recipes.int8_dynamic())
    like_float = fq.distill(student, Constant(aim), temperature=2.0)
    found = []
    for part in (1 << 22, 64):
        monkeypatch.setattr("fakequant._train.distill._PART", part)
        y, kept = scores.clone().requires_grad_(), {}

        def keep(x, kept=kept):
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = like_float(y, aim)
        loss.backward()
        for own in (y, aim):
            kept.pop(own.untyped_storage().data_ptr(), None)
        found.append((loss.detach(), y.grad, max(kept.values(), default=0)))
    assert_same_bits(found[0][0], found[1][0])
    assert_same_bits(found[0][1], found[1][1])
    assert found[0][2] >= aim.nbytes
    assert found[1][2] < aim.nbytes or aim.numel() <= 64


class Constant(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def forward(self, x):
        return self.result


def test_other_results_are_compared_by_squared_error():
    model = student()
    teacher = float_of(model)
    y = model(X)
    assert_same_bits((y - teacher(X)).square().mean(), fq.distill(model, teacher, outputs="mse")(y, X))


def test_layers_are_compared_by_relative_squared_error():
    model = student()
    teacher = float_of(model)
    loss = fq.distill(model, teacher, outputs=None, layers=["0", "4"], layer_weight=3)
    y = model(X)
    found = loss(y, X)
    shares = []
    for end in (1, 5):
        of_model, of_teacher = model[:end](X), teacher[:end](X)
        shares.append((of_model - of_teacher).square().mean() / of_teacher.square().mean())
    torch.testing.assert_close(found, 3 * sum(shares) / 2, **SUMS)
    model.zero_grad()
    found.backward()
    assert model[0].weight.grad.abs().sum() > 0


def test_layers_and_results_add_up_and_layers_may_have_other_paths():
    model = student()
    teacher = nn.Sequential(nn.Identity(), float_of(model))
    y = model(X)
    outputs = fq.distill(model, teacher)(y, X)
    layers = fq.distill(model, teacher, outputs=None, layers={"4": "1.4"})
    both = fq.distill(model, teacher, layers={"4": "1.4"})
    y = model(X)
    assert_same_bits(outputs + layers(y, X), both(y, X))


def test_features_of_zeros_are_compared_by_plain_squared_error():
    model, teacher = nn.Linear(4, 2), nn.Linear(4, 2)
    nn.init.zeros_(teacher.weight)
    nn.init.zeros_(teacher.bias)
    loss = fq.distill(model, teacher, outputs=None, layers=[""])
    y = model(X)
    assert_same_bits(y.square().mean(), loss(y, X))


# --- forms of results -------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    logits: object
    hidden: object = None


FORMS = {
    "tuple": lambda y: (y, torch.arange(3)),
    "list": lambda y: [y],
    "dict": lambda y: {"scores": y, "ids": torch.arange(3), "none": None},
    "dict with logits": lambda y: {"logits": y, "loss": y.sum(), "hidden": (y, y)},
    "object with logits": lambda y: Output(y, hidden=y.square()),
    "dataclass": lambda y: Output(None, hidden={"a": (y,)}),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_forms_of_results(form):
    model = student()
    teacher = float_of(model)
    expected = fq.distill(model, teacher)(model(X), X)
    wide = Wrapped(model, form)
    assert_same_bits(expected, fq.distill(wide, Wrapped(teacher, form))(wide(X), x=X))


def test_results_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=20
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    batch = {"input_ids": torch.randint(20, (3, 5)), "labels": torch.tensor([0, 1, 0])}
    model = fq.calibrate(
        fq.prepare(model, fq.recipes.int8(), {"input_ids": batch["input_ids"]}),
        [{"input_ids": batch["input_ids"]}],
        progress=False,
    )
    loss = fq.distill(model, layers=["bert.encoder.layer.1"])
    found = model(**batch)
    (found.loss + loss(found, **batch)).backward()
    assert model.bert.embeddings.word_embeddings.weight.grad.abs().sum() > 0


# --- the teacher ------------------------------------------------------------------------------------


def test_without_a_teacher_the_float_model_is_copied():
    model = student()
    teacher = float_of(model)
    loss = fq.distill(model)
    assert not any(True for _ in fqnn.named_quantizers(loss.teacher))
    assert not any(p.requires_grad for p in loss.teacher.parameters())
    with torch.no_grad():
        model[0].weight.add_(1)
    assert_same_bits(teacher.eval()(X), loss.teacher(X))


def test_the_copied_teacher_moves_to_the_device_of_its_inputs():
    model = student()
    teacher = float_of(model)
    own, given = fq.distill(model), fq.distill(model, teacher)
    x, y = X.to("meta"), torch.empty(6, 2, device="meta")
    assert own(y, x).device.type == "meta"
    assert {p.device.type for p in own.teacher.parameters()} == {"meta"}
    with pytest.raises(RuntimeError, match=r"device|meta"):
        given(y, x)


def test_without_a_teacher_parts_of_a_model_may_be_prepared():
    model = Wrapped(student(), lambda y: y)
    loss = fq.distill(model)
    assert not any(True for _ in fqnn.named_quantizers(loss.teacher))
    assert loss(model(X), X) > 0


def test_the_teacher_stays_as_it_is():
    model = student()
    teacher = float_of(model).train()
    teacher[3].eval()
    state = copy.deepcopy(teacher.state_dict())
    loss = fq.distill(model, teacher)
    random = torch.get_rng_state()
    first = loss(model(X), X)
    first.backward()
    assert_same_bits(first, loss(model(X), X))  # dropout and batch norm are in evaluation mode
    assert torch.equal(random, torch.get_rng_state())
    assert [m.training for m in teacher] == [True, True, True, False, True]
    for name, value in teacher.state_dict().items():
        assert_same_bits(state[name], value, name)
    assert all(p.grad is None and p.requires_grad for p in teacher.parameters())


def test_the_mode_of_the_teacher_is_restored_after_an_error():
    model = student()
    teacher = float_of(model).train()
    with pytest.raises(RuntimeError):
        fq.distill(model, teacher)(model(X), torch.ones(2, 3))
    assert all(m.training for m in teacher.modules())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_the_teacher_is_not_part_of_the_student(again):
    plain, model = student(), student()
    before = len(pickle.dumps(model))
    teacher = nn.Sequential(float_of(model), nn.Linear(2, 2))
    teacher.ballast = torch.zeros(100_000)
    loss = fq.distill(model, teacher, layers={"0": "0.0"})
    loss(model(X), X)
    model(X)  # something is kept now
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert {id(m) for m in model.modules()}.isdisjoint(id(m) for m in teacher.modules())
    assert len(pickle.dumps(model)) < before + 10_000
    copied = again(model)
    assert_same_bits(model(X), copied(X))
    assert_same_bits(fq.convert(model)(X), fq.convert(copied)(X))
    gc.collect()
    assert loss(model(X), X) > 0
    y = copied(X)
    with pytest.raises(RuntimeError, match="has not run"):
        loss(y, X)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_copy_of_the_loss_belongs_to_the_copied_student(again):
    model = student()
    loss = fq.distill(model, temperature=3.0, layers=["0"])
    copied, its_loss = again((model, loss))
    assert_same_bits(loss(model(X), X), its_loss(copied(X), X))
    assert its_loss.teacher is not loss.teacher


def test_hooks_are_removed():
    model = student()
    teacher = float_of(model)
    before = hooks_of(model, teacher)
    loss = fq.distill(model, teacher)
    assert hooks_of(model, teacher) == before
    loss = fq.distill(model, teacher, layers=["0"])
    assert hooks_of(model, teacher) > before
    loss.remove()
    assert hooks_of(model, teacher) == before
    loss = fq.distill(model, teacher, layers=["0"])
    del loss
    gc.collect()
    assert hooks_of(model, teacher) == before


# --- how models run ---------------------------------------------------------------------------------


def test_nothing_is_kept_of_calls_before_the_last():
    model = student()
    loss = fq.distill(model, layers=["0"])
    expected = loss(model(X), X)
    model(BATCHES[1])
    assert_same_bits(expected, loss(model(X), X))


def test_activation_checkpointing():
    class Checkpointed(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.model, x, use_reentrant=False)

    model = student()
    expected = fq.distill(model, layers=["0"])(model(X), X)
    expected.backward()
    gradient = model[0].weight.grad.clone()
    outer = Checkpointed(model)
    loss = fq.distill(outer, layers=["model.0"])
    for _ in range(2):
        model.zero_grad()
        found = loss(outer(X), X)
        assert_same_bits(expected, found)
        found.backward()
        assert_same_bits(gradient, model[0].weight.grad)


@pytest.mark.parametrize("outputs", ["kl", "mse"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
def test_autocast(outputs, inside):
    model = student()
    loss = fq.distill(model, outputs=outputs, layers=["0"])
    with torch.autocast("cpu", torch.bfloat16):
        y = model(X)
        assert y.dtype == torch.bfloat16
        found = loss(y, X) if inside else None
    found = loss(y, X) if found is None else found
    assert found.dtype == torch.float32
    found.backward()
    assert model[0].weight.grad.isfinite().all()


def test_double_precision_is_kept():
    model, teacher = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
    x = X.double()
    assert fq.distill(model, teacher, layers=[""])(model(x), x).dtype == torch.float64


@pytest.mark.parametrize("options", [{}, dict(outputs=None, layers=["2"])], ids=["results", "layers"])
def test_training_reduces_the_loss(options):
    model = student().train()
    model[3].eval()
    loss = fq.distill(model, **options)
    optimizer = torch.optim.Adam(fqnn.param_groups(model), lr=1e-2)
    values = []
    for _ in range(30):
        optimizer.zero_grad()
        values.append(loss(model(X), X))
        values[-1].backward()
        optimizer.step()
    assert 0 <= values[-1] < values[0] / 2
