"""Quantizers of results that functions compute, in the code of a module."""

import copy
import inspect
import pickle
import threading

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits
from function_cases import X86, Attention, F, batch, nn, prepared, torch
from thoroughness import ALL

checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint
function_calls = pytest.importorskip("fakequant.nn._function_calls")


def keys(model):
    return [path for path, _ in fq.nn.named_quantizers(model) if "function_quantizers" in path]


def test_a_result_of_a_function_is_quantized_in_the_code_that_computes_it():
    assert keys(prepared()) == [f"{block}.function_quantizers.softmax_0" for block in (0, 1)]


def test_a_module_computes_what_its_code_says_with_quantized_results():
    model, x = prepared(), batch(2)
    block = model[0]
    q, k, v = (layer(x) for layer in (block.query, block.key, block.value))
    weights = torch.softmax(q @ k.transpose(-1, -2) * 0.3, -1)
    quantizer = block.function_quantizers["softmax_0"]
    on_grid = fq.fake_quantize(weights, *quantizer.qparams(), quantizer.spec)
    assert not torch.equal(on_grid, weights)
    assert_same_bits(block(x), block.out(on_grid @ v))


def test_gradients_pass_through_the_quantizer():
    model = prepared().train()
    model(batch(2)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_copies_compute_the_same():
    model, x = prepared(), batch(2)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert keys(other) == keys(model)
        assert other[0].function_quantizers is not model[0].function_quantizers
        assert_same_bits(other(x), model(x))
        other[0].function_quantizers["softmax_0"].quantizing = False
        assert not torch.equal(other(x), model(x))


def test_a_state_dict_loads_strictly():
    model, other = prepared(), prepared(calibrated=False)
    other.load_state_dict(model.state_dict())
    assert_same_bits(other(batch(2)), model(batch(2)))


def test_unprepare_removes_everything():
    model = prepared()
    classes = {Attention, nn.Sequential, nn.Linear}
    model = fq.unprepare(model)
    assert {type(module) for module in model.modules()} == classes
    assert not any("function_quantizers" in name for name in (*model.state_dict(), *dict(model.named_modules())))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("_fakequant" in module.__dict__ for module in model.modules())


def test_a_class_keeps_its_name_and_its_signature():
    block = prepared()[0]
    assert (type(block).__name__, type(block).__module__) == ("Attention", "function_cases")
    assert list(inspect.signature(block.forward).parameters) == ["x"]


class Child(nn.Module):
    def forward(self, x):
        return torch.softmax(torch.softmax(x, -1), -1).tanh()


class WithChild(Attention):
    """Calls a module that calls the same function, before its own call."""

    def __init__(self):
        super().__init__()
        self.child = Child()

    def forward(self, x):
        return super().forward(self.child(x))


def test_calls_in_the_code_of_called_modules_do_not_count():
    model, x = prepared(WithChild), batch(2)
    assert keys(model) == [f"{block}.function_quantizers.softmax_0" for block in (0, 1)]
    block = model[0]
    y = Child()(x)
    weights = torch.softmax(block.query(y) @ block.key(y).transpose(-1, -2) * 0.3, -1)
    assert_same_bits(block(x), block.out(block.function_quantizers["softmax_0"](weights) @ block.value(y)))


class Failing(Attention):
    """Continues after an error in a module that it calls."""

    def __init__(self):
        super().__init__()
        self.child, self.fails = nn.Identity(), False

    def forward(self, x):
        try:
            self.child(x)
            if self.fails:
                self.query(x[..., :1])
        except RuntimeError:
            pass
        return super().forward(x)


def test_an_error_in_a_called_module_does_not_stop_the_counting():
    model, x = prepared(Failing), batch(2)
    expected = model(x)
    for block in model:
        block.fails = True
    assert_same_bits(model(x), expected)
    assert not function_calls._running.modes


def test_threads_do_not_disturb_each_other():
    model = prepared()
    inputs = [batch(seed) for seed in range(8)]
    expected = [model(x) for x in inputs]
    found = [None] * len(inputs)

    def work(number):
        for _ in range(20):
            found[number] = model(inputs[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


def test_calls_that_did_not_occur_in_the_example_stay_in_float_and_are_counted():
    torch.manual_seed(0)

    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.times = nn.Linear(8, 8), 1

        def forward(self, x):
            for _ in range(self.times):
                x = self.a(torch.softmax(x, -1) @ torch.sigmoid(x).transpose(-1, -2) @ x)
            return x

    model = fq.prepare(Loop(), fq.recipes.int8(target=X86), batch()).eval()
    fq.calibrate(model, [batch()], progress=False)
    assert fq.health(model, [batch()]).unseen_calls == {}
    model.times = 3
    found = fq.health(model, [batch()])
    assert found.unseen_calls == {"softmax": 2, "sigmoid": 2}
    assert "2 calls of softmax stay in float" in str(found)


class InPlace(nn.Module):
    """Reads a tensor after it was changed in place. The result of the method is ignored."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        y = self.a(x)
        y.add_(self.b(x))
        return self.c(y) @ y.transpose(-1, -2)


def test_results_of_functions_that_change_a_tensor_stay_in_float():
    model = fq.prepare(InPlace(), fq.recipes.int8(target=X86), batch())
    assert keys(model) == []


@pytest.mark.parametrize("training", [False, True] if ALL else [True])
def test_a_compiled_module_has_eager_bits(training):
    model = prepared().train(training)
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    x = batch(2)
    expected, found = model(x), compiled(x)
    assert_same_bits(found, expected)
    expected.sum().backward()
    found.sum().backward()
    for one, two in zip(other.parameters(), model.parameters(), strict=True):
        assert_same_bits(one.grad, two.grad)


def test_an_exported_module_has_eager_bits():
    model, x = prepared(), batch(2)
    assert_same_bits(torch.export.export(model, (x,)).module()(x), model(x))


def test_spellings_of_a_function_are_numbered_together():
    class Sums(nn.Module):
        def forward(self, x):
            y = 1 + x
            y += x
            return torch.add(y, x).add(x)

    record_flow = pytest.importorskip("fakequant._prepare.record_flow").record_flow
    graph = record_flow(Sums(), torch.ones(2))
    assert [call.key for call in graph.calls] == [f"add_{number}" for number in range(4)]


def test_functions_of_all_spellings_have_one_name():
    names = pytest.importorskip("fakequant.nn._operators")
    for name in ("add", "mul", "matmul", "cat", "softmax", "relu", "scaled_dot_product_attention"):
        found = names.functions_named(name)
        assert found
        assert {names.function_name(function) for function in found} == {name}
    assert F.softmax in names.functions_named("softmax")


class Block(nn.Module):
    """Uses one ReLU twice, as many residual networks do."""

    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.relu(self.b(self.relu(self.a(x))) + x)


def test_a_module_that_is_called_twice_leaves_its_second_result_to_the_block():
    x = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
    model = fq.prepare(nn.Sequential(Block(), Block(), nn.Conv2d(4, 4, 1)), fq.recipes.int8(target=X86), x)
    paths = [path for path, _ in fq.nn.named_quantizers(model)]
    assert not any("relu" in path for path in paths)
    assert "0.output_quantizer" in paths
    assert model[1].a.input_quantizer is None
    assert model[1].a._fakequant.input_grid is model[0].output_quantizer
    assert model[1].b.input_quantizer is not None


class Checkpointed(Attention):
    """Computes parts of its code again in the backward pass."""

    reentrant = None

    def forward(self, x):
        if self.reentrant is None:
            return self.part(self.part(x))
        for _ in range(2):
            x = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return x

    def part(self, x):
        weights = torch.softmax(self.query(x) @ self.key(x).transpose(-1, -2) * 0.3, -1)
        return self.out(weights @ self.value(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_code_has_the_bits_of_the_forward_pass(reentrant):
    model = prepared(Checkpointed).train()
    assert keys(model)[:2] == ["0.function_quantizers.softmax_0", "0.function_quantizers.softmax_1"]
    found, before = [], model
    for choice in (None, reentrant):
        model = copy.deepcopy(before)
        x = batch(2).requires_grad_()
        for block in model:
            block.reentrant = choice
        model.zero_grad()
        model(x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    for plain, recomputed in zip(*found, strict=True):
        assert_same_bits(recomputed, plain)
