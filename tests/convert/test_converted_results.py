"""Converted models return plain tensors, in whatever container the model returns them."""

import collections
import copy
import dataclasses
import gc
import pickle
import weakref
from typing import Any

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Record:
    scores: Any
    more: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    scores: Any


class Results(dict):
    pass


class Rows(list):
    pass


class Net(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.layer, self.form = nn.Linear(4, 2), form

    def forward(self, x):
        return self.form(self.layer(x))


FORMS = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, None, 3),
    "list in a tuple": lambda y: (1, [y, y]),
    "dict": lambda y: {"scores": y, "name": "x"},
    "named tuple": lambda y: Pair(y, 1),
    "record": lambda y: Record(y, {"again": [y]}),
    "frozen record": Frozen,
    "record in a list": lambda y: [Record(y)],
    "dict subclass": lambda y: Results(scores=y),
    "list subclass": lambda y: Rows([y]),
}
X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def tensors(result):
    if isinstance(result, torch.Tensor):
        return [result]
    if dataclasses.is_dataclass(result):
        result = vars(result)
    if isinstance(result, dict):
        result = list(result.values())
    return [t for part in result for t in tensors(part)] if isinstance(result, (tuple, list)) else []


def converted(model):
    torch.manual_seed(0)
    return fq.convert(fq.calibrate(fq.prepare(model, fq.recipes.int8(), X), [X], progress=False))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_converted_model_returns_plain_tensors(form):
    golden = converted(Net(form))
    result = golden(X)
    assert type(result) is type(form(X))
    found = tensors(result)
    assert len(found) == len(tensors(form(X)))
    expected = golden.layer(X)
    for tensor in found:
        assert type(tensor) is torch.Tensor
        assert torch.equal(tensor, values.plain(expected))


def test_converted_layers_pass_tracked_codes_between_them():
    assert isinstance(values.origin_of(converted(Net(FORMS["tensor"])).layer(X)), values.Accumulated)


def test_sums_are_freed_after_the_call():
    golden = converted(Net(FORMS["tensor"]))
    sums = []
    golden.layer.register_forward_hook(lambda m, args, y: sums.append(weakref.ref(values.origin_of(y).sums)))
    result = golden(X)
    gc.collect()
    assert sums[0]() is None
    assert result.shape == (3, 2)


def test_copies_and_loaded_models_return_plain_tensors(tmp_path):
    pytest.importorskip("safetensors")
    golden = converted(nn.Sequential(nn.Linear(4, 2)))
    fq.save_converted(golden, tmp_path / "m.safetensors")
    loaded = fq.load_converted(nn.Sequential(nn.Linear(4, 2)), tmp_path / "m.safetensors")
    for model in (golden, copy.deepcopy(golden), pickle.loads(pickle.dumps(golden)), loaded):
        result = model(X)
        assert type(result) is torch.Tensor
        assert torch.equal(result, golden(X))


def test_later_hook_on_a_one_layer_model_sees_tracked_codes():
    """`verify` adds such a hook to look for saturating sums."""
    golden = converted(nn.Linear(4, 2))
    found = []
    golden.register_forward_hook(lambda m, args, y: found.append(values.origin_of(y)))
    assert type(golden(X)) is torch.Tensor
    assert type(golden(X)) is torch.Tensor
    assert [type(origin) for origin in found] == [values.Accumulated] * 2


def test_one_layer_model_is_exported_and_verified(tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    torch.manual_seed(0)
    model = fq.calibrate(fq.prepare(nn.Linear(4, 2), fq.recipes.int8(target="onnxruntime-x86"), X), [X], progress=False)
    fq.export_onnx(fq.convert(model), tmp_path / "m.onnx", X)
    assert fq.verify(model, tmp_path / "m.onnx", [X]).ok
