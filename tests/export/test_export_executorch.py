"""`export_executorch`: programs run in ExecuTorch, and their codes are those of the golden model."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, randn

import fakequant as fq
from fakequant import presets, recipes
from fakequant._convert.golden.tracked_codes import plain
from fakequant._runtimes.xnnpack.arithmetic import codes_of_float, float_of_codes
from fakequant._runtimes.xnnpack.target import TOKEN_SPEC
from thoroughness import ALL, only_in_test_all, sampled

pytest.importorskip("executorch.exir")

from fakequant._export.executorch.notes import read_notes
from fakequant._export.executorch.program import make_graph, make_program
from fakequant._export.notes import digest_of_parameters
from fakequant._runtimes.xnnpack.running import import_runtime


class Residual(nn.Module):
    """Convolutions with batch norms, two additions, pools and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.same, self.same_norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.wide, self.wide_norm = nn.Conv2d(4, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8)
        self.shortcut, self.fc = nn.Conv2d(4, 8, 1, stride=2), nn.Linear(8, 10)
        self.relus, self.pool = nn.ModuleList(nn.ReLU() for _ in range(3)), nn.AdaptiveAvgPool2d(1)
        for norm in (self.first_norm, self.same_norm, self.wide_norm):
            nn.init.uniform_(norm.running_var, 0.5, 2)
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(self.first_norm.weight)  # factors of both signs: its layer has 8 bits in all recipes

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.relus[0](self.first_norm(self.first(x))), 2)
        x = self.relus[1](x + self.same_norm(self.same(x)))
        x = self.relus[2](self.shortcut(x) + self.wide_norm(self.wide(x)))
        return self.fc(self.pool(x).flatten(1))


class Encoder(nn.Module):
    """A transformer encoder whose residual stream begins with a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, activation="gelu")

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(self.embed(x)).mean(1))


class Named(nn.Module):
    """Takes and returns constants, and calls a layer whose result it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, object]:
        self.a(x.flip(1) * 2)
        y = self.b(F.relu(self.a(x)))
        return {"logits": y, "states": (y * scale, None), "rows": x.shape[0]}


def test_a_program_notes_the_names_of_results_and_has_inputs_for_tensors_only(tmp_path):
    torch.manual_seed(0)
    batch = {"x": randn(8, 8), "scale": 2.0}
    model = fq.calibrate(fq.prepare(Named(), recipes.int8(target="xnnpack"), batch), [batch], progress=False).eval()
    fq.export_executorch(model, tmp_path / "model.pte", batch)
    noted = read_notes(tmp_path / "model.pte")
    assert noted.outputs == ["logits", "states.0"]
    assert noted.inputs == ("x",)
    assert fq.verify(model, tmp_path / "model.pte", [batch]).ok
    assert not fq.verify(model, tmp_path / "model.pte", [{**batch, "scale": 3.0}]).ok


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))


def depthwise() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU6(),
        nn.Conv2d(8, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def dynamic_w4(target: str) -> fq.QuantConfig:
    layer = fq.LayerConfig(weight=presets.int4(group_size=None), input=presets.int8_per_token())
    return fq.QuantConfig(default=layer, target=target)


# Codes of biases have more bits than this.
EXPONENTS = [10, 21, 28]
SHAPES = {"mlp": (4, 64), "residual": (4, 1, 8, 8), "encoder": (2, 5, 8)}
MAKE = {"mlp": mlp, "residual": Residual, "encoder": Encoder}
# Where all layers and additions must be computed in integers.
INTEGERS = {
    "int8-residual": ("residual", recipes.int8),
    "int8-encoder": ("encoder", recipes.int8),
    "w4a8-mlp": ("mlp", recipes.w4a8),
    "lsq-residual": ("residual", lambda target: recipes.lsq(2, target=target)),
    "dynamic-mlp": ("mlp", dynamic_w4),
}


class Exported:
    """A golden model, its program, and its program with watched quantizers."""

    def __init__(self, name: str, recipe) -> None:
        torch.manual_seed(0)
        self.x = randn(SHAPES[name])
        model = fq.prepare(MAKE[name]().eval(), recipe(target="xnnpack"), self.x)
        self.prepared = fq.calibrate(model, [self.x, self.x * 1.1], progress=False).eval()
        self.golden = fq.convert(self.prepared)
        self.program = make_program(self.golden, (self.x,), {})

    def watch(self) -> tuple[dict[str, list[Tensor]], list[Tensor]]:
        """Returns the values of quantizers by path, and the results, in the program with watched quantizers."""
        made = make_program(self.golden, (self.x,), {}, watched=True)
        assert made.delegation == self.program.delegation
        outputs = run(made.data, self.x)
        first = len(outputs) - len(made.watched)
        found: dict[str, list[Tensor]] = {}
        for path, value in zip(made.watched, outputs[first:], strict=True):
            found.setdefault(path, []).append(value)
        return found, outputs[:first]


def run(data: bytes, *inputs: Tensor) -> list[Tensor]:
    return import_runtime().Runtime.get().load_program(data).load_method("forward").execute(list(inputs))


@functools.cache
def exported_as(case: str) -> Exported:
    return Exported(*INTEGERS[case])


@pytest.fixture(params=sampled(INTEGERS, "int8-residual", "int8-encoder"))
def exported(request) -> Exported:
    return exported_as(request.param)


def test_all_layers_and_additions_are_integer_kernels(exported):
    found = exported.program.delegation
    assert found.share == 1
    assert {one.how for one in (*found.layers, *found.additions)} == {"int8"}
    paths = {name for name, module in exported.golden.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    assert {one.path for one in found.layers} >= paths - {"layer.self_attn.out_proj"}


def test_results_are_those_of_the_golden_model(exported):
    (y,) = run(exported.program.data, exported.x)
    want = exported.golden(exported.x)
    if exported.program.delegation.layers[-1].path == "4" and exported.golden[4].input_quantizer.spec == TOKEN_SPEC:
        torch.testing.assert_close(y, want)  # floats, after sums at scales that are found at run time
    else:
        assert torch.equal(y, want)


@only_in_test_all
def test_watched_quantizers_have_the_codes_of_the_golden_model():
    """`verify` reads the codes of other models in this way."""
    exported = exported_as("int8-residual")
    values, results = exported.watch()
    assert torch.equal(results[0], run(exported.program.data, exported.x)[0])
    seen: dict[str, list[Tensor]] = {}
    for path, grid in exported.golden.named_modules():
        if type(grid).__name__ == "GoldenQuantizer" and grid.scale is not None:
            grid.register_forward_hook(lambda m, a, y, path=path: seen.setdefault(path, []).append(plain(y)))
    exported.golden(exported.x)
    assert list(values) == list(seen)
    for path, want in seen.items():
        assert all(torch.equal(a, b) for a, b in zip(values[path], want, strict=True)), path


def test_products_of_attention_are_floats():
    found = exported_as("int8-encoder").program.delegation
    assert {(one.path, one.how) for one in found.products} == {("layer.self_attn", "float")}
    assert "layer.self_attn | matmul " in str(found)
    assert "layers in integers: 6 of 6\nadditions in integers: 2 of 2" in str(found)


def test_weights_of_4_bits_only_are_multiplied_in_float_with_the_same_results():
    x = randn(4, 64)
    model = fq.prepare(nn.Sequential(nn.Linear(64, 8)), recipes.int4_weight_only(target="xnnpack"), x)
    golden = fq.convert(fq.calibrate(model, [x], progress=False))
    program = make_program(golden, (x,), {})
    assert {one.how for one in program.delegation.layers} == {"float"}
    assert program.delegation.share == 0
    torch.testing.assert_close(run(program.data, x)[0], golden(x))


def test_layer_without_quantized_result_is_computed_in_float():
    x, model = randn(4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    model = fq.calibrate(fq.prepare(model, recipes.int8(), x), [x], progress=False)
    found = make_program(fq.convert(model, target="xnnpack"), (x,), {}).delegation
    assert [one.how for one in found.layers] == ["int8", "float"]


@pytest.mark.parametrize("groups", [1, 2] if ALL else [1])
def test_layers_along_one_axis_and_prelus(groups):
    """With groups, transposed convolutions are computed in float. So is a layer that is not quantized."""
    model = nn.Sequential(
        nn.Conv1d(4, 4, 3, padding="same"), nn.PReLU(4),
        nn.ConvTranspose1d(4, 4, 3, stride=2, groups=groups), nn.PReLU(),
        nn.Conv1d(4, 4, 3, dilation=2, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(52, 4), nn.PReLU(4),
    )  # fmt: skip
    x = randn(2, 4, 8)
    config = recipes.int8(target="xnnpack")
    model = fq.prepare(model.eval(), config if groups == 1 else config.skip("4"), x)
    golden = fq.convert(fq.calibrate(model, [x], progress=False))
    program = make_program(golden, (x,), {})
    floats = {one.path for one in program.delegation.layers if one.how != "int8"}
    assert floats == (set() if groups == 1 else {"2", "4"})
    if groups == 1:
        assert torch.equal(run(program.data, x)[0], golden(x))
    else:
        torch.testing.assert_close(run(program.data, x)[0], golden(x), atol=0.02, rtol=0)


def test_batches_of_any_length_up_to_the_maximum(tmp_path):
    model = fq.prepare(depthwise().eval(), recipes.lsq(2, target="xnnpack"), randn(4, 3, 8, 8))
    model = fq.calibrate(model, [randn(4, 3, 8, 8)], progress=False)
    found = fq.export_executorch(model, tmp_path / "m.pte", randn(4, 3, 8, 8), max_batch=8)
    assert found.share == 1
    assert {one.how for one in found.layers} == {"int8"}
    golden, data = fq.convert(model), (tmp_path / "m.pte").read_bytes()
    for length in (1, 3, 8):
        x = randn(length, 3, 8, 8)
        assert torch.equal(run(data, x)[0], golden(x))


class DynamicBranches(nn.Module):
    """The sum of two convolutions is the input of a linear layer, whose scales are computed at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.fc = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.hardswish(self.a(x)) + self.b(x))


class Norms(nn.Module):
    """Batch norms with and without parameters. One is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm, self.plain = nn.Linear(4, 5), nn.Linear(5, 4), *map(norm_of_3, (True, False))

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.norm(self.b(self.norm(self.a(x)))))


def norm_of_3(affine: bool) -> nn.Module:
    norm = nn.BatchNorm1d(3, affine=affine)
    for value in (norm.running_var, *norm.parameters()):
        nn.init.uniform_(value, 0.5, 2)
    nn.init.normal_(norm.running_mean)
    return norm


class DistantScales(nn.Module):
    """A layer and sums whose scales differ by more than XNNPACK's integer kernels take, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        nn.init.constant_(self.a.bias, -1e3)  # the ReLU returns 0, so its grid has the smallest scale
        self.c, self.d = nn.Linear(4, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        zero, usual = F.relu(self.a(x)), self.b(x)
        tiny = usual * 1e-6
        joined = torch.cat([tiny + tiny, tiny - usual * 1e-6, usual], -1)  # on one grid, with the scale of `usual`
        return [self.c(zero + usual), self.c(usual - zero), self.c(zero * usual), self.d(joined)]


class Shared(nn.Module):
    """A layer is called before and after an operation that XNNPACK does not compute, and then again."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.fc(self.fc(x).cumsum(-1)))


# Forms that ExecuTorch would compute wrongly, or not at all: the network, a recipe, and the shape of a row.
class Volumes(nn.Sequential):
    """Convolutions along three axes, with all settings."""

    def __init__(self) -> None:
        first = nn.Conv3d(2, 4, (2, 3, 2), stride=(2, 1, 2), dilation=(2, 1, 1), padding=(2, 1, 1), groups=2)
        super().__init__(first, nn.BatchNorm3d(4), nn.ReLU(), nn.Conv3d(4, 3, 3, padding="same"), nn.Conv3d(3, 2, 1))


class Bags(nn.Module):
    """Means of the embeddings of three tokens, which are computed from floats."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bag(x.sign().long() + 1))


class Borrowed(nn.Module):
    """A function that reads the weight and the bias of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.conv2d(self.first(x), self.first.weight, self.first.bias))


def empty_channel() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1))
    nn.init.zeros_(model[1].weight[:1])
    return model


FORMS = {
    # Mish is decomposed into operators of XNNPACK and others, which have the channels in another place.
    "an activation in parts": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Mish()), recipes.int8, (2, 5, 6)),
    "a softmax of images": (lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.Softmax(-1)), recipes.int8, (2, 5, 6)),
    "scales per token after convolutions": (DynamicBranches, recipes.int8_dynamic, (2, 5, 6)),
    "a float layer along one axis": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.ReLU(), nn.Linear(4, 4)),
        lambda target: recipes.int4_weight_only(None, target=target),
        (2, 6),
    ),
    "a batch norm of another axis than the layer's": (Norms, recipes.int8, (3, 4)),
    "circular padding": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=(1, 2), padding_mode="circular"), nn.CircularPad2d((0, 1, -1, 2))
        ),
        recipes.int8,
        (2, 5, 6),
    ),
    "a batch norm after a float layer along one axis": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Conv1d(3, 2, 1)),
        lambda target: recipes.int8(target=target).skip("0"),
        (2, 6),
    ),
    "volumes": (Volumes, recipes.int8, (2, 5, 4, 4)),
    "volumes in float": (Volumes, recipes.int8_dynamic, (2, 5, 4, 4)),
    "bags of tokens": (Bags, recipes.int8, (3,)),
    "a channel without weights": (empty_channel, lambda target: recipes.lsq(4, target=target), (2, 5, 6)),
    "scales that differ much": (DistantScales, recipes.int8, (4,)),
    "a layer in several delegates": (Shared, recipes.int8, (4,)),
}
# A program takes seconds to make.
TRIED = sampled(
    FORMS,
    "scales per token after convolutions",
    "a batch norm of another axis than the layer's",
    "circular padding",
    "a channel without weights",
    "a layer in several delegates",
)
# Forms whose layers all run in integers, with the codes of the golden model.
IN_INTEGERS = ("volumes", "a channel without weights")


@pytest.mark.filterwarnings("ignore:Ranges found by:UserWarning")
@pytest.mark.parametrize("name", TRIED)
def test_forms_that_are_rewritten(name, tmp_path):
    make, recipe, shape = FORMS[name]
    torch.manual_seed(0)
    model = fq.prepare(make().eval(), recipe(target="xnnpack"), randn(2, *shape))
    model = fq.calibrate(model, [randn(2, *shape)], progress=False)
    found = fq.export_executorch(model, tmp_path / "m.pte", randn(2, *shape), max_batch=4)
    golden, data = fq.convert(model), (tmp_path / "m.pte").read_bytes()
    for length in (4, 1):
        x = randn(length, *shape)
        torch.testing.assert_close(run(data, x), as_list(golden(x)))
    if name in IN_INTEGERS:
        assert found.share == 1.0
    if name in IN_INTEGERS and ALL:  # makes another program
        assert fq.verify(model, tmp_path / "m.pte", [randn(3, *shape)]).ok


@pytest.mark.parametrize(
    ("last", "recipe"),
    [(nn.Softmax(-1), recipes.int8), (nn.Linear(6, 4), recipes.int8_dynamic)][: None if ALL else 1],
    ids=["softmax", "tokens"][: None if ALL else 1],
)
def test_order_of_axes_if_two_have_any_length(last, recipe, tmp_path):
    """XNNPACK has no view for them, and a convolution puts the channels last."""
    x = randn(3, 2, 5, 6)
    model = fq.prepare(nn.Sequential(nn.Conv2d(2, 3, 1), last).eval(), recipe(target="xnnpack"), x)
    model = fq.calibrate(model, [x], progress=False)
    axes = {0: torch.export.Dim("batch", max=4), 2: torch.export.Dim("height", min=2, max=9)}
    fq.export_executorch(model, tmp_path / "m.pte", x, dynamic_shapes=(axes,))
    golden, data, (long, high) = (
        fq.convert(model),
        (tmp_path / "m.pte").read_bytes(),
        (randn(4, 2, 3, 6), randn(1, 2, 7, 6)),
    )
    torch.testing.assert_close(run(data, high)[0], golden(high))
    assert fq.verify(model, tmp_path / "m.pte", [high, long] if ALL else [long]).ok


def test_function_that_reads_the_weight_of_a_layer_runs_in_float(tmp_path):
    x = torch.rand(4, 2, 9, 9)
    model = fq.prepare(Borrowed().eval(), recipes.lsq(4, target="xnnpack"), x)
    model = fq.calibrate(model, [x], progress=False)
    found = fq.export_executorch(model, tmp_path / "m.pte", x)
    assert [one.how for one in found.layers] == ["int8", "float", "int8"]
    assert fq.verify(model, tmp_path / "m.pte", [x]).ok


def test_longest_batch_for_which_torch_would_choose_another_convolution(tmp_path):
    """torch would choose it from 16 images on, and limit the batch to 16."""
    model = fq.prepare(nn.Sequential(nn.Conv2d(2, 3, 1)).eval(), recipes.int8(target="xnnpack"), randn(2, 2, 3, 3))
    model = fq.calibrate(model, [randn(2, 2, 3, 3)], progress=False)
    fq.export_executorch(model, tmp_path / "m.pte", randn(2, 2, 3, 3), max_batch=16)
    assert len(run((tmp_path / "m.pte").read_bytes(), randn(1, 2, 3, 3))[0]) == 1


def as_list(result: Tensor | list[Tensor]) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else result


class Switched(nn.Module):
    """Takes arguments that are no tensors, between tensors and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, flag: bool, x: Tensor, mask: object, y: Tensor | None, n: int) -> Tensor:
        x = x if y is None else x + y
        return self.fc(x if flag else -x) * n


ARGUMENTS = {
    "positions": (True, randn(2, 4), None, randn(2, 4), 3),
    "names": {"n": 2, "flag": False, "mask": None, "x": randn(2, 4), "y": None},
}


@pytest.mark.parametrize(
    ("target", "given"),
    [
        ("xnnpack", "positions"),
        ("onnxruntime-x86", "names"),
        pytest.param("xnnpack", "names", marks=only_in_test_all),
        pytest.param("onnxruntime-x86", "positions", marks=only_in_test_all),
    ],
)
def test_arguments_that_are_no_tensors_are_constants(target, given, tmp_path):
    batch = ARGUMENTS[given]
    model = fq.prepare(Switched().eval(), recipes.int8(target=target), batch)
    model = fq.calibrate(model, [batch], progress=False)
    if target == "xnnpack":
        path = tmp_path / "m.pte"
        fq.export_executorch(model, path, batch, max_batch=4)
        assert read_notes(path).inputs == (("x", "y") if isinstance(batch, tuple) else ("x",))
    else:
        path = tmp_path / "m.onnx"
        fq.export_onnx(model, path, batch)
    assert fq.verify(model, path, [batch]).ok


@only_in_test_all
def test_notes_tell_target_inputs_and_parameters_and_whether_the_file_has_changed(tmp_path):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, *, left: Tensor, right: Tensor) -> Tensor:
            return self.fc(left) + right

    inputs = {"right": randn(2, 4), "left": randn(2, 4)}
    model = fq.prepare(Named(), recipes.int8(target="xnnpack"), inputs)
    model, path = fq.calibrate(model, [inputs], progress=False), tmp_path / "m.pte"
    fq.export_executorch(model, path, inputs)
    notes = read_notes(path)
    assert (notes.target, notes.inputs, notes.is_unchanged) == ("xnnpack", ("left", "right"), True)
    assert notes.parameters == digest_of_parameters(fq.convert(model))
    y = run(path.read_bytes(), inputs["left"], inputs["right"])[0]
    torch.testing.assert_close(y, fq.convert(model)(**inputs))
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    assert not read_notes(path).is_unchanged


def test_graph_computes_the_same_in_torch():
    made = exported_as("int8-residual")
    graph, _ = make_graph(made.golden, (made.x,), {})
    assert torch.equal(*graph.module()(made.x), run(made.program.data, made.x)[0])


def test_results_that_only_floats_read_have_8_bits():
    model = fq.prepare(mlp(), recipes.lsq(2, target="xnnpack"), randn(4, 64))
    assert model[2].input_quantizer.spec.bits == 2
    assert model[4].output_quantizer.spec.bits == 8
    again = fq.prepare(mlp(), recipes.lsq(2, target="xnnpack"), randn(4, 64))
    again.load_state_dict(model.state_dict())
    assert again[4].output_quantizer.spec == model[4].output_quantizer.spec


def test_biases_are_stored_with_the_codes_of_the_golden_model():
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 64) for _ in EXPONENTS)

        def forward(self, x: Tensor) -> list[Tensor]:
            return [layer(x) for layer in self.layers]

    model = Several()
    with torch.no_grad():
        for layer, exponent in zip(model.layers, EXPONENTS, strict=True):
            layer.bias.copy_(torch.linspace(0.5, 1, 64) * 2.0**exponent * 1e-4)
    model = fq.prepare(model, recipes.int8(target="xnnpack"), randn(2, 4))
    golden = fq.convert(fq.calibrate(model, [randn(2, 4)], progress=False))
    data = make_program(golden, (randn(2, 4),), {}).data
    for layer, exponent in zip(golden.layers, EXPONENTS, strict=True):
        assert layer.bias_codes.abs().max() > 2**exponent
        assert layer.bias_codes.numpy().tobytes() in data, exponent


def test_codes_of_biases_below_2_to_the_22_are_exact():
    codes = torch.cat([torch.arange(-5000, 5000), torch.randint(-(2**22) + 1, 2**22, (20000,))])
    scale = torch.rand(len(codes)) + 1e-6
    assert torch.equal(codes_of_float(float_of_codes(codes, scale), scale).long(), codes)
