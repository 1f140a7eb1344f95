"""`prepare(model, config, example)`: the model is run on an example, and every call is seen."""

import copy
import pickle

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
F = torch.nn.functional
record_flow = pytest.importorskip("fakequant._prepare.record_flow").record_flow
outputs = pytest.importorskip("fakequant._prepare.outputs_to_quantize")

X86 = "onnxruntime-x86"


class Residual(nn.Module):
    """A convolution, a batch norm and an addition, behind a branch on values."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        if x.isnan().any():
            raise ValueError("NaN")
        y = self.relu(self.stem(x))
        return self.last(F.relu(y + self.norm(self.conv(y))))


def image(seed=0):
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def quantizer_paths(model):
    return [path for path, _ in fq.nn.named_quantizers(model)]


def test_recording_leaves_the_model_unchanged():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5)).train()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    state, nested = copy.deepcopy(model.state_dict()), encoder.use_nested_tensor
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    record_flow(model, image())
    record_flow(encoder, torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert model.training
    assert encoder.use_nested_tensor == nested
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in (*model.modules(), *encoder.modules()))


def test_a_failing_run_raises_and_leaves_no_hooks():
    model = Residual()
    with pytest.raises(ValueError, match="NaN"):
        fq.prepare(model, fq.recipes.int8(), image() * torch.nan)
    assert quantizer_paths(model) == []
    assert all(not module._forward_hooks for module in model.modules())


class ChangedInPlace(nn.Module):
    """The result of `a` is changed through a view before `b` reads it."""

    def __init__(self, change):
        super().__init__()
        self.a, self.b, self.change = nn.Linear(4, 4), nn.Linear(4, 4), change

    def forward(self, x):
        y = self.a(x)
        if self.change:
            y.view(-1).relu_()
        return self.b(y)


@pytest.mark.parametrize("change", [False, True], ids=["unchanged", "changed through a view"])
def test_a_value_changed_through_a_view_has_no_source(change):
    model = ChangedInPlace(change)
    last = record_flow(model, torch.ones(2, 4)).modules()[-1]
    assert outputs.places_before(model, last) == ([] if change else [outputs.Place("a")])


def test_torchs_encoder_layers_are_seen_call_by_call():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    graph = record_flow(model, torch.zeros(2, 3, 8))
    assert [str(call) for call in graph.calls if call.function_name == "add"] == ["layers.0: add 0", "layers.0: add 1"]
    assert graph.calls[-1].path == "layers.0.norm2"


def test_functions_are_numbered_in_every_call_of_a_module():
    class Twice(nn.Module):
        def forward(self, x):
            return x + 1 + x

    graph = record_flow(nn.Sequential(Twice(), Twice()), torch.ones(2))
    assert [str(call) for call in graph.calls] == ["0: add 0", "0: add 1", "1: add 0", "1: add 1"]


# --- batch norms with more than a normalization -----------------------------------------------------


class NormAct(nn.BatchNorm2d):
    """A batch norm with an activation in its forward pass, as timm has it."""

    def __init__(self, channels, act):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), act

    def forward(self, x):
        y = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps)
        return self.act(self.drop(y))


def with_norms(act):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), NormAct(4, act()), nn.Conv2d(4, 4, 3))
    for seed in range(3):
        model.train()(image(seed) * 3 + 1)
    return model.eval()


def prepared_with_norms(act=nn.ReLU, target=X86):
    model = fq.prepare(with_norms(act), fq.recipes.int8(target=target), image())
    return fq.calibrate(model, [image(1)], progress=False)


@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU, nn.Identity])
def test_a_batch_norm_with_an_activation_folds(act):
    model = prepared_with_norms(act)
    golden = fq.convert(model)
    assert fq._convert.convert.conversion(golden).folded == ["1"]
    assert isinstance(golden[1], NormAct)
    assert golden[1].running_mean is None
    y, expected = golden(image(2)), model(image(2))
    step = float(golden[2].output_quantizer.scale)
    assert (y - expected).abs().max() <= 2 * step  # a code may differ at a tie


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_a_folded_norm_with_an_activation_survives(travel, tmp_path):
    golden = fq.convert(prepared_with_norms())
    expected = golden(image(2))
    assert torch.equal(travel(golden)(image(2)), expected)
    fq.save_converted(golden, tmp_path / "model.safetensors")
    loaded = fq.load_converted(with_norms(nn.ReLU), tmp_path / "model.safetensors")
    assert torch.equal(loaded(image(2)), expected)


@pytest.mark.parametrize("act", [nn.ReLU, nn.SiLU])
def test_convolutions_before_any_activation_run_in_integers(act, tmp_path):
    pytest.importorskip("onnxruntime")
    model = prepared_with_norms(act)
    fq.export_onnx(model, tmp_path / "model.onnx", image())
    found = fq.verify(model, tmp_path / "model.onnx", [image(3)])
    assert found.ok
    assert set(found.kernels.values()) == {"QLinearConv"}


def test_only_targets_that_need_them_get_quantizers_after_convolutions():
    assert "1.drop.output_quantizer" in quantizer_paths(prepared_with_norms(nn.SiLU))
    assert not any("output" in path for path in quantizer_paths(prepared_with_norms(nn.SiLU, "generic")))


def test_operands_stay_in_float_where_the_sum_does():
    """ONNX Runtime adds codes only if the sum is quantized: before a layer norm it is not."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

        def forward(self, x):
            y = self.fc(x)
            return self.norm(y + self.fc(y))

    x = torch.ones(2, 4)
    generic = fq.prepare(Block(), fq.recipes.int8(), x)
    runtime = fq.prepare(Block(), fq.recipes.int8(target=X86), x)
    assert "fc.output_quantizer.1" in quantizer_paths(generic)
    assert "fc.output_quantizer" not in quantizer_paths(runtime)


class Both:
    """An object that holds two tensors and that torch knows nothing about."""

    def __init__(self, before, after):
        self.before, self.after = before, after


@pytest.mark.parametrize("returns_both", [False, True], ids=["norm only", "layer and norm"])
def test_a_batch_norm_does_not_fold_if_the_model_also_returns_the_layers_result(returns_both):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.conv(x)
            return Both(y, self.norm(y)) if returns_both else Both(None, self.norm(y))

    model = fq.prepare(Model(), fq.recipes.int8(), image())
    assert fq._prepare.prepare.preparation(model).norms == ({} if returns_both else {"conv": "norm"})


@pytest.mark.parametrize("other", ["number", "tensor"])
def test_a_product_with_a_number_needs_no_quantizer_for_onnxruntime(other):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            return self.b(y * 0.5 if other == "number" else y * y)

    model = fq.prepare(Model(), fq.recipes.int8(target=X86), torch.ones(2, 4))
    assert ("a.output_quantizer" in quantizer_paths(model)) == (other == "tensor")


# --- multiplications ---------------------------------------------------------------------------------


class Products(nn.Module):
    """A convolution, a linear layer, attention by hand, and torch's attention."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv1d(2, 4, 3, groups=2), nn.Linear(4, 6)
        self.transposed, self.attention = nn.ConvTranspose1d(2, 4, 3), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):  # (3, 2, 7)
        y = self.conv(x).transpose(1, 2)  # (3, 5, 4)
        z = F.scaled_dot_product_attention(y, y, y)  # two products of 3 * 5 * 5 * 4
        return self.fc(y @ y.transpose(1, 2) @ y), self.transposed(x), self.attention(y, y, y), z


def test_multiplications_are_counted():
    count = pytest.importorskip("fakequant._prepare.flow_graph").count_multiplications
    model = Products()
    expected = {
        "conv": 3 * 4 * 5 * (1 * 3),
        "scaled_dot_product_attention 0": 2 * 3 * 5 * 5 * 4,
        "matmul 0": 3 * 5 * 5 * 4,
        "matmul 1": 3 * 5 * 5 * 4,
        "fc": 3 * 5 * 4 * 6,
        "transposed": 3 * 2 * 7 * (4 * 3),
        "attention": 3 * 5 * 4 * 4 * 4 + 2 * 3 * 5 * 5 * 4,
    }
    assert count(model, record_flow(model, torch.ones(3, 2, 7))) == expected


def test_summary_opens_with_the_share_of_quantized_multiplications():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    fq.prepare(model, fq.recipes.int8().skip("1"), torch.ones(1, 4))
    assert str(fq.summary(model)).startswith("quantized: 66.7% of 18 multiplications, 52.2% of 23 parameters")
    found = fq.summary(model)
    assert (found.quantized_multiplications, found.multiplications) == (12, 18)


def test_products_of_functions_count_as_quantized_if_their_operands_are():
    found = fq.summary(fq.prepare(Products(), fq.recipes.int8(), torch.ones(3, 2, 7)))
    attention = 2 * 3 * 5 * 5 * 4  # as one operator, whose weights are floats
    assert found.multiplications - found.quantized_multiplications == attention
    config = fq.QuantConfig(**{**vars(fq.recipes.int8()), "operands": None})
    found = fq.summary(fq.prepare(Products(), config, torch.ones(3, 2, 7)))
    assert found.multiplications - found.quantized_multiplications == 2 * attention


# --- dead calls -----------------------------------------------------------------------------------


class Dead(nn.Module):
    """A convolution whose result is added, and read by calls that nothing uses."""

    def __init__(self, read=None):
        super().__init__()
        self.read = read
        self.a, self.b, self.last = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.Conv2d(3, 2, 1)

    def forward(self, x):
        y = self.a(x)
        dead = self.b(y) + y
        if self.read is not None:
            self.read(dead * 2)
        return self.last(y + x)


def users_of_first(model):
    graph = record_flow(model, image())
    assert [call.path for call in graph.modules()] == ["a", "b", "last"]  # modules count all their calls
    return graph, [str(user) for user in graph.calls[0].users]


def test_dead_calls_are_not_readers():
    graph, users = users_of_first(Dead())
    assert users == ["add 1"]
    assert [str(call) for call in graph.calls if call.kind == "function"] == ["add 1"]


@pytest.mark.parametrize(
    "read", [lambda x: x.sum().item(), lambda x: bool((x > 0).all()), lambda x: x.clamp_(0), lambda x: x.numpy()]
)
def test_results_that_python_code_reads_or_changes_are_not_dead(read):
    assert users_of_first(Dead(read))[1] == ["b", "add 0", "add 1"]


def test_nothing_is_dead_if_a_tensor_comes_from_nowhere():
    """Code that cannot be seen may have computed it from a result that looks unused."""
    outside = [torch.ones(1)]

    class Hidden(Dead):
        def forward(self, x):
            return super().forward(x) + outside[0]

    assert users_of_first(Hidden())[1] == ["b", "add 0", "add 1"]
