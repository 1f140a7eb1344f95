"""Snapshots of models, to show that a refused call changed nothing."""

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits

torch = pytest.importorskip("torch")
nn = torch.nn
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")


def randn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = randn(6, 4)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))


def prepared(config=None, calibrated=False):
    model = fq.prepare(small(), config or recipes.int8(), X)
    return calibrate(model, [X]) if calibrated else model


def calibrate(model, data, *args):
    return fq.calibrate(model, data, *args, progress=False)


class Snapshot:
    """Classes, attributes, hooks, tensors, modes and switches of a model, and torch's grad mode."""

    def __init__(self, model):
        self.modules = {name: (module, type(module)) for name, module in model.named_modules()}
        self.attributes = {name: self._attributes(module) for name, module in model.named_modules()}
        tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        self.tensors = {name: (t, None if t.is_meta else t.detach().clone(), t.requires_grad) for name, t in tensors}
        self.counts = {path: (q.nonfinite, q._told) for path, q in fqnn.named_quantizers(model)}
        self.grad_mode = torch.is_grad_enabled()

    @staticmethod
    def _attributes(module):
        """Returns the attributes that differ from those of the class; dicts as lists, so that hooks compare by id."""
        skipped = ("saw_only_finite", "_nonfinite", "_parameters", "_buffers")
        nothing = object()
        return {
            name: list(value.items()) if hasattr(value, "items") else value
            for name, value in vars(module).items()
            if name not in skipped and value is not getattr(type(module), name, nothing)
        }

    def assert_unchanged(self, model):
        now = Snapshot(model)
        assert now.modules == self.modules
        assert now.attributes == self.attributes
        assert now.counts == self.counts
        assert now.grad_mode == self.grad_mode
        assert list(now.tensors) == list(self.tensors)
        for name, (tensor, value, requires_grad) in self.tensors.items():
            assert now.tensors[name][0] is tensor, name
            assert tensor.requires_grad == requires_grad, name
            assert tensor.grad is None, name
            if value is not None:
                assert_same_bits(value, tensor, name)


def assert_refused(model, action, error, *words):
    """Asserts that `action` raises an error with all these words and leaves the model unchanged."""
    before = Snapshot(model)
    with pytest.raises(error) as caught:
        action()
    for word in words:
        assert word in str(caught.value), f"the message does not say {word!r}: {caught.value}"
    before.assert_unchanged(model)
