"""Modules that are called several times: each call has quantizers of its own, weights are shared."""

import collections
import copy
import pickle
import threading

import pytest

import fakequant as fq
from fakequant import nn as fqnn, recipes
from fakequant._runtimes import find
from fakequant.testing.assertions import assert_same_bits
from thoroughness import ALL, sampled

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
calls = pytest.importorskip("fakequant.nn._call_quantizers")
prepare_for_loading = pytest.importorskip("fakequant._prepare.prepare").prepare_for_loading
nn, F = torch.nn, torch.nn.functional

X86 = "onnxruntime-x86"


class Block(nn.Module):
    """A residual block with one ReLU, as torchvision's. `unlike` makes the ranges of its two results differ."""

    def __init__(self, unlike, *, shared=True):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU()
        self.relu2 = self.relu if shared else nn.ReLU()
        with torch.no_grad():
            self.conv1.weight.mul_(unlike)
            self.conv2.weight.mul_(1 / unlike)

    def forward(self, x):
        return self.relu2(self.conv2(self.relu(self.conv1(x))) + x)


class Network(nn.Module):
    def __init__(self, unlike=1000.0, *, shared=True):
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(3, 4, 3), nn.Sequential(*(Block(unlike, shared=shared) for _ in range(2)))
        self.fc = nn.Linear(4, 5)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class Refined(nn.Module):
    """A step that is called twice, with functions in its code. Its layer is called twice in each step."""

    def __init__(self):
        super().__init__()
        self.first, self.step, self.last = nn.Linear(6, 6), Step(), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.step(self.step(self.first(x)) * 3))


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        return F.relu(self.fc(x)) + F.relu(x) * self.fc(x).sigmoid()


class WeightOnly(nn.Module):
    """Code that reads the weight of a layer, and is called twice."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = Reading(), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.inner(self.inner(x) * 5))


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        return F.linear(x, self.fc.weight, self.fc.bias).relu()


MODELS = {"blocks": (Network, (4, 3, 9, 9)), "refined": (Refined, (8, 6)), "read weight": (WeightOnly, (8, 6))}


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def build(make):
    torch.manual_seed(0)
    return make().eval()


def calibrated(make, x, config):
    model = fq.prepare(build(make), config, x)
    return fq.calibrate(model, [x, x * 0.9], progress=False).eval()


def paths_of(model):
    return [path for path, _ in fqnn.named_quantizers(model)]


def sqnr(y, z):
    return float(10 * torch.log10(y.square().sum() / (y - z).square().sum()).detach())


# --- ranges --------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["generic", X86, "openvino", "xnnpack"])
def test_a_shared_relu_is_as_good_as_separate_ones(target):
    x = randn(16, 3, 9, 9)
    expected, found = build(Network)(x), {}
    for shared in (True, False):
        model = calibrated(lambda shared=shared: Network(shared=shared), x, recipes.int8(target=target))
        found[shared] = sqnr(expected, model(x))
    assert found[True] == pytest.approx(found[False], abs=0.1)
    assert found[True] > 30


class Thrice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.relu = nn.Linear(4, 4), nn.ReLU()

    def forward(self, x):
        return self.fc(self.relu(x) + self.relu(-1000 * x) + self.relu(30 * x))


def test_each_call_observes_only_its_own_tensor():
    x = randn(8, 4)
    slot = fq.calibrate(fq.prepare(Thrice(), recipes.int8(), x), [x], progress=False).relu.output_quantizer
    assert [path for path, _ in slot.named_children()] == ["0", "1", "2"]
    assert [quantizer.running_max for quantizer in slot.all()] == [x.max(), (-1000 * x).max(), (30 * x).max()]


def test_calls_with_the_same_input_share_its_quantizer():
    class Same(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.b(self.a(x)) + self.b(self.a(x)) + self.b(self.a(2 * x))

    model = fq.prepare(Same(), recipes.int8(target=X86), randn(2, 4))
    slot = model.a.input_quantizer
    assert slot.at(0) is slot.at(1) is not slot.at(2)
    assert paths_of(model.a) == ["weight_quantizer", "input_quantizer.0", "input_quantizer.2"]


def test_scales_that_follow_the_data_are_not_split():
    model = fq.prepare(Refined(), recipes.int8_dynamic(), randn(8, 6))
    assert not any(isinstance(module, calls.CallQuantizers) for module in model.modules())


def test_summary_names_the_calls():
    model = fq.prepare(Refined(), recipes.int8(), randn(8, 6))
    rows = {layer.path: layer for layer in fq.summary(model).layers}
    assert rows["step.fc"].input == "uint8, per tensor; 2 quantizers for 4 calls"
    assert rows["step.fc"].output == "-"
    assert rows["step.function_quantizers.relu_0"].output == "uint8, per tensor; 2 quantizers for 2 calls"


# --- the whole flow ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_copies_states_and_files_have_the_same_bits(name, tmp_path):
    make, shape = MODELS[name]
    x, config = randn(*shape), recipes.int8(target=X86)
    model = calibrated(make, x, config)
    y = model(x)
    loaded = [fq.prepare(build(make), config, x), prepare_for_loading(build(make), config)]
    for other in loaded:
        assert other.load_state_dict(model.state_dict()) == ([], [])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), *loaded):
        assert_same_bits(y, other.eval()(x))
        assert paths_of(other) == paths_of(model)
    golden = fq.convert(model)
    fq.save_converted(golden, tmp_path / "model.safetensors")
    again = fq.load_converted(build(make), tmp_path / "model.safetensors")
    for other in (again, copy.deepcopy(golden), pickle.loads(pickle.dumps(golden))):
        assert_same_bits(golden(x), other(x))
    floats = build(make)
    assert_same_bits(floats(x), fq.unprepare(model)(x))
    assert list(model.state_dict()) == list(floats.state_dict())


RUNTIMES = [("generic", "read weight"), (X86, "refined"), ("openvino", "blocks")]
if ALL:
    RUNTIMES = [(target, name) for target in ("generic", X86, "openvino", "xnnpack", "litert") for name in MODELS]


@pytest.mark.parametrize(("target", "name"), RUNTIMES)
def test_the_runtime_computes_every_call(name, target, tmp_path):
    make, shape = MODELS[name]
    x = randn(*shape)
    model = calibrated(make, x, recipes.int8(target=target))
    runtime = find(target).runtime
    path = tmp_path / f"model{runtime.suffix}"
    getattr(fq, runtime.exporter)(model, path, x)
    found = fq.verify(model, path, [x, randn(*shape, seed=1)])
    assert found.ok, found.problem
    assert found.is_exact


def test_a_bias_has_codes_for_the_input_scale_of_each_call():
    x = randn(8, 6)
    golden = fq.convert(calibrated(WeightOnly, x, recipes.int8(target=X86)))
    layer = golden.inner.fc
    scales = [grid.scale * layer.weight_scale for grid in layer.input_quantizer.all()]
    bias = build(WeightOnly).inner.fc.bias.detach()
    for codes, scale in zip(layer.bias_codes, scales, strict=True):
        assert torch.equal(codes, (bias / scale).round().int())
    assert not torch.equal(*layer.bias_codes)


@pytest.mark.parametrize("name", sampled(MODELS, "refined"))
def test_compiled_training_counts_the_calls(name):
    make, shape = MODELS[name]
    x = randn(*shape)
    model = calibrated(make, x, recipes.int8()).train()
    other = copy.deepcopy(model)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        assert_same_bits(model(x), compiled(x))
    for (path, a), (_, b) in zip(fqnn.named_quantizers(model), fqnn.named_quantizers(other), strict=True):
        assert_same_bits(a.scale, b.scale, path)


# --- counting ------------------------------------------------------------------------------------


class Loop(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, times=2):
        for _ in range(times):
            x = self.fc(x).relu()
        return x


def test_further_calls_have_the_quantizers_of_the_last_one():
    x = randn(8, 4)
    model = fq.calibrate(fq.prepare(Loop(), recipes.int8(target=X86), x), [x], progress=False).eval()
    seen = []
    for path, quantizer in fqnn.named_quantizers(model):
        quantizer.register_forward_hook(lambda *_, path=path: seen.append(path))
    model(x, times=4)
    assert [path for path in seen if "input" in path] == [f"fc.input_quantizer.{turn}" for turn in (0, 1, 1, 1)]
    assert model.fc._fakequant.calls.unseen == 2
    assert fq.health(model).further_calls == {"fc": 2}


def test_counting_starts_again_after_an_error():
    x = randn(8, 4)
    model = fq.calibrate(fq.prepare(Loop(), recipes.int8(target=X86), x), [x], progress=False).eval()
    expected, before = model(x), calls.counted_calls()
    with pytest.raises(RuntimeError):
        model(randn(8, 5))
    handle = model.fc.input_quantizer.at(1).register_forward_hook(failing)
    with pytest.raises(KeyError):
        model(x)
    handle.remove()
    assert_same_bits(expected, model(x))
    assert calls.counted_calls() == before


def failing(*args):
    raise KeyError


@pytest.mark.filterwarnings("ignore:None of the inputs")  # `prepare` runs the model without gradients
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_counts_from_where_it_began(use_reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Refined):
        def forward(self, x):
            x = self.step(self.first(x)) * 3
            return self.last(checkpoint(self.step, x, use_reentrant=use_reentrant))

    x, models = randn(8, 6), []
    for make in (Refined, Checkpointed):
        models.append(fq.prepare(build(make), recipes.int8(), x).train())
        for _ in range(2):
            models[-1](x).square().sum().backward()
    for a, b in zip(*(model.state_dict().values() for model in models), strict=True):
        assert_same_bits(a, b)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        # Both calls of the step add to the gradient of its weight. A reentrant checkpoint does so in another order.
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5 if use_reentrant else 0, atol=0)


def test_threads_count_for_themselves():
    """Both threads are in the same call at the same time."""
    x = randn(8, 4)
    model = fq.calibrate(fq.prepare(Thrice(), recipes.int8(), x), [x], progress=False).eval()
    expected, found, barrier = model(x).detach(), [], threading.Barrier(2)

    def meet(*_):
        barrier.wait(30)

    for quantizer in model.relu.output_quantizer.all():
        quantizer.register_forward_hook(meet)

    def run():
        with torch.no_grad():
            found.append(model(x))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    for y in found:
        assert_same_bits(expected, y)


def test_a_block_can_run_by_itself():
    """Its calls are counted in the block, in which all of them take place."""
    x = randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4), Thrice())
    model = fq.calibrate(fq.prepare(model, recipes.int8(), x), [x], progress=False).eval()
    assert model[1]._fakequant.counted == [model[1].relu._fakequant.calls]
    with torch.no_grad():
        assert_same_bits(model(x), model[1](model[0](x)))


# --- diagnosis and post-training methods ---------------------------------------------------------


@pytest.mark.parametrize("name", ["blocks", "refined"])
def test_layers_by_themselves_have_the_quantizers_of_the_call(name):
    make, shape = MODELS[name]
    x = randn(*shape)
    model = calibrated(make, x, recipes.int8(target=X86))
    for quantized in (model, fq.convert(model)):
        found = fq.compare(build(make), quantized, [x], progress=False)
        assert all(layer.isolated.sqnr > 30 for layer in found.layers)


def test_blocks_are_rounded_with_the_quantizers_of_each_call():
    x = randn(8, 6)
    model = calibrated(Refined, x, recipes.w4a8(target=X86))
    seen = collections.Counter()
    for turn in (0, 2):
        model.step.fc.input_quantizer.at(turn).register_forward_hook(lambda *_, turn=turn: seen.update([turn]))
    before = calls.counted_calls()
    found = fq.ptq.adaround(model, [x], blocks=["step"], progress=False)
    step = next(row for row in found.layers if row.path == "step")
    assert step.after > step.before
    assert seen[0] < 1.5 * seen[2]  # whole passes may end after the first step
    assert calls.counted_calls() == before  # also after passes that end early
