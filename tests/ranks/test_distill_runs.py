"""`distill` with compiled students, and with students that two ranks train."""

import copy

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits, assert_same_state
from straight_through import torch
from two_ranks import Checks, dist

fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")
nn = torch.nn

CHECKS = check = Checks()
LAYERS = {"results": [], "layers": ["0", "2"]}
pytestmark = pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 4, generator=generator) for _ in range(3)]


def student():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    return fq.calibrate(
        fq.prepare(model, recipes.lsq(2, first_last_bits=None), batches()[0]), batches(), progress=False
    )


# --- compiled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_a_compiled_student_has_the_same_loss_and_gradients(layers):
    model = student().train()
    teacher = fq.unprepare(copy.deepcopy(model))
    again = copy.deepcopy(model)
    torch._dynamo.reset()
    compiled = torch.compile(again, fullgraph=True, backend="aot_eager")
    losses = [fq.distill(m, teacher, layers=layers) for m in (model, compiled)]
    for x in batches():
        values = []
        for m, loss in zip((model, compiled), losses, strict=True):
            m.zero_grad()
            values.append(loss(m(x), x))
            values[-1].backward()
        assert_same_bits(*values)
        for p, q in zip(model.parameters(), again.parameters(), strict=True):
            assert_same_bits(p.grad, q.grad)


def test_a_compiled_teacher():
    model = student()
    teacher = fq.unprepare(copy.deepcopy(model))
    torch._dynamo.reset()
    compiled = torch.compile(teacher, fullgraph=True, backend="eager")
    x = batches()[0]
    expected = fq.distill(model, teacher, layers=["0"])(model(x), x)
    for options in ({}, dict(layers=["0"])):
        torch._dynamo.reset()
        found = fq.distill(model, compiled, **options)(model(x), x)
    assert_same_bits(expected, found)


def test_a_student_that_was_compiled_before_is_explained_or_compiled_again():
    model = student()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = batches()[0]
    compiled(x)
    loss = fq.distill(compiled, layers=["0"])
    with pytest.raises(RuntimeError, match="call `distill` before it runs for the first time"):
        loss(compiled(x), x)


# --- two ranks --------------------------------------------------------------------------------------


def ddp(seat, layers):
    model = student().train()
    model[1].eval()  # its statistics would be those of half a batch
    if dist.is_initialized():
        model = nn.parallel.DistributedDataParallel(model)
    loss = fq.distill(model, layers=layers)
    optimizer = torch.optim.SGD(fqnn.param_groups(model), lr=0.01)
    values = []
    for x in batches():
        optimizer.zero_grad()
        values.append(loss(model(seat.part(x)), seat.part(x)))
        values[-1].backward()
        optimizer.step()
    return {
        "loss": torch.stack(values).detach(),
        "parameters": {str(i): p.detach() for i, p in enumerate(model.parameters())},
        "teacher": loss.teacher.state_dict(),
    }


for _name, _layers in LAYERS.items():
    check(_name, layers=_layers)(ddp)


@CHECKS.names(ddp)
def test_two_ranks_train_one_student(ranks, name):
    results = ranks(name)
    assert_same_state(*(r["parameters"] for r in results))
    assert_same_state(*(r["teacher"] for r in results))
    alone = CHECKS.alone(name)
    assert_same_state(alone["teacher"], results[0]["teacher"])
    if name == "ddp results":  # a mean over rows; errors of layers are relative to the rows of a rank
        mean = (results[0]["loss"] + results[1]["loss"]) / 2
        # Rows are added in another order, in float32.
        torch.testing.assert_close(mean, alone["loss"], rtol=1e-4, atol=0)
