"""Errors of `distill`."""

import copy

import pytest

import fakequant as fq
from calibration_cases import BATCHES, calibrated

torch = pytest.importorskip("torch")
nn = torch.nn

X = BATCHES[0]


def models():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return copy.deepcopy(teacher), teacher


BAD = {
    "student": (dict(student="model"), TypeError, "`student` must be a torch.nn.Module, got str"),
    "teacher": (dict(teacher=3), TypeError, "`teacher` must be a torch.nn.Module, got int"),
    "outputs": (dict(outputs="l1"), ValueError, "`outputs` must be .* got 'l1'"),
    "temperature": (dict(temperature=0), ValueError, "`temperature` must be a finite number > 0, got 0"),
    "temperature nan": (dict(temperature=float("nan")), ValueError, "`temperature` must be .* got nan"),
    "temperature bool": (dict(temperature=True), ValueError, "`temperature` must be .* got True"),
    "class_axis": (dict(class_axis=1.0), TypeError, "`class_axis` must be an int, got 1.0"),
    "layer_weight": (dict(layer_weight=-1), ValueError, "`layer_weight` must be a finite number >= 0, got -1"),
    "layers str": (dict(layers="0"), TypeError, "`layers` must be a list of paths.* got '0'"),
    "layers int": (dict(layers=[0]), TypeError, r"must be strings .* got \[0\]"),
    "path": (dict(layers=["00"]), ValueError, "(?s)student has no layer '00'.*Did you mean '0'"),
    "far path": (dict(layers=["encoder"]), ValueError, "(?s)student has no layer 'encoder'.*named_modules"),
    "path of teacher": (dict(layers={"0": "7.7"}), ValueError, "teacher has no layer '7.7'"),
    "nothing": (dict(outputs=None), ValueError, "(?s)nothing to compare.*name some layers"),
}


@pytest.mark.parametrize(("options", "error", "message"), BAD.values(), ids=BAD)
def test_bad_arguments(options, error, message):
    student, teacher = models()
    with pytest.raises(error, match=message):
        fq.distill(**{"student": student, "teacher": teacher, **options})
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in (*student.modules(), *teacher.modules()))


def test_a_teacher_that_is_the_student_or_shares_modules():
    student = calibrated()
    with pytest.raises(ValueError, match=r"(?s)are the same model.*copy.deepcopy\(model\) before `prepare`"):
        fq.distill(student, student)
    with pytest.raises(ValueError, match=r"share the module '0'"):
        fq.distill(student, nn.Sequential(student))
    with pytest.raises(ValueError, match=r"share the module '1'"):
        fq.distill(student, nn.Sequential(nn.Linear(4, 4), student[0]))
    with pytest.raises(ValueError, match=r"are the same model"):
        fq.distill(torch.compile(student), student)


def test_a_student_without_quantizers_is_not_its_own_teacher():
    with pytest.raises(ValueError, match=r"(?s)not prepared.*Pass a teacher"):
        fq.distill(nn.Linear(4, 2))


def test_inputs_are_missing():
    student, teacher = models()
    with pytest.raises(TypeError, match=r"(?s)inputs of the student are missing.*distillation\(y, x\)"):
        fq.distill(student, teacher)(student(X))


def test_shapes_that_differ():
    student, teacher = models()
    loss = fq.distill(student, nn.Sequential(teacher, nn.Linear(3, 5)))
    with pytest.raises(ValueError, match=r"(?s)shapes.*differ: \(6, 3\) in the student, \(6, 5\) in the teacher"):
        loss(student(X), X)
    loss = fq.distill(student, teacher, layers={"0": "2"})
    with pytest.raises(ValueError, match=r"layer '0' differ: \(6, 8\) in the student, \(6, 3\) in the teacher"):
        loss(student(X), X)


def test_structures_that_differ():
    student, teacher = models()
    with pytest.raises(ValueError, match=r"only in one of student and teacher: , \[0\], \[1\]"):
        fq.distill(student, teacher)((student(X), student(X)), X)
    loss = fq.distill(student, nn.Flatten())
    with pytest.raises(TypeError, match=r"no float tensors to compare in the results of the models: str and Tensor"):
        loss("y", torch.arange(3)[None])


def test_one_class():
    student, teacher = nn.Linear(4, 1), nn.Linear(4, 1)
    with pytest.raises(ValueError, match=r'(?s)shape \(6, 1\) has no scores of several classes.*outputs="mse"'):
        fq.distill(student, teacher)(student(X), X)
    student, teacher = models()
    with pytest.raises(ValueError, match=r"on axis 2"):
        fq.distill(student, teacher, class_axis=2)(student(X), X)


def test_layers_that_have_not_run_or_run_more_often():
    student, teacher = models()
    loss = fq.distill(student, teacher, layers=["0"])
    with pytest.raises(RuntimeError, match=r"(?s)layer '0' of the student has not run.*compiled"):
        loss(torch.zeros(6, 3), X)
    y = student(X)
    loss(y, X)
    with pytest.raises(RuntimeError, match="has not run since the last loss"):
        loss(y, X)
    teacher.insert(0, nn.Identity())
    layer = teacher[1]
    teacher[0] = nn.Sequential(layer, nn.Linear(8, 4))
    with pytest.raises(ValueError, match=r"ran 1 times in the student and 2 times in the teacher"):
        loss(student(X), X)
