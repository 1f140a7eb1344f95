"""Experts whose weights are 3-D parameters: the float function, quantized products, conversion, files, diagnosis."""

import copy
import io
import pickle

import pytest

import fakequant as fq
from fakequant import presets
from prepare_cases import off, randn, same, same_state

torch = pytest.importorskip("torch")
nn = torch.nn
F = nn.functional
fqnn = pytest.importorskip("fakequant.nn")
recipes = pytest.importorskip("fakequant.recipes")

EXPERTS, WIDTH, INNER, TOP_K = 4, 8, 6, 2
X86 = recipes.int8(target="onnxruntime-x86")


class Experts(nn.Module):
    """A class with the attributes of `fakequant.nn.kinds.Experts`. It computes one expert after the other."""

    def __init__(self, *, has_gate=True, has_bias=False, is_transposed=False):
        super().__init__()
        self.num_experts = EXPERTS
        self.has_gate, self.has_bias, self.is_transposed = has_gate, has_bias, is_transposed
        self.first = "gate_up_proj" if has_gate else "up_proj"
        for name, (outputs, inputs) in {
            self.first: ((2 if has_gate else 1) * INNER, WIDTH), "down_proj": (WIDTH, INNER),
        }.items():  # fmt: skip
            weight = 0.3 * torch.randn(EXPERTS, outputs, inputs)
            weight = weight.transpose(1, 2).contiguous() if is_transposed else weight
            self.register_parameter(name, nn.Parameter(weight))
            if has_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(0.3 * torch.randn(EXPERTS, outputs)))
        self.act_fn = nn.SiLU() if has_gate else nn.ReLU()

    def _apply_gate(self, y):
        gate, up = y.chunk(2, -1)
        return self.act_fn(gate) * up

    def multiply(self, x, name, expert):
        weight = self.get_parameter(name)[expert]
        y = x @ (weight if self.is_transposed else weight.T)
        return y + self.get_parameter(f"{name}_bias")[expert] if self.has_bias else y

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y = hidden_states.new_zeros(*top_k_index.shape, hidden_states.shape[-1])
        for expert in range(self.num_experts):
            tokens, places = torch.where(top_k_index == expert)
            z = self.multiply(hidden_states[tokens], self.first, expert)
            z = self.multiply(self._apply_gate(z) if self.has_gate else self.act_fn(z), "down_proj", expert)
            y = y.index_put((tokens, places), z * top_k_weights[tokens, places, None])
        return y.sum(1)


fqnn.quantizes(Experts)(fqnn.kinds.Experts)


class Mixture(nn.Module):
    """A router, experts and a layer after them. With `idle`, one expert is never chosen."""

    def __init__(self, idle=None, **options):
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts, self.head = nn.Linear(WIDTH, EXPERTS), Experts(**options), nn.Linear(WIDTH, 3)
        self.idle = idle

    def forward(self, x):
        scores = self.router(x)
        if self.idle is not None:
            scores = scores - 1000 * F.one_hot(torch.tensor(self.idle), EXPERTS)
        weights, index = torch.topk(torch.softmax(scores, -1), TOP_K)
        return self.head(self.experts(x, index, weights))


LAYERS = {
    "gate": {},
    "no gate": {"has_gate": False},
    "gate, bias, transposed": {"has_bias": True, "is_transposed": True},
    "no gate, bias": {"has_gate": False, "has_bias": True},
}
each_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
CONFIGS = {
    "int8": recipes.int8(),
    "int8 for x86": X86,
    "int8_dynamic": recipes.int8_dynamic(),
    "int4_weight_only": recipes.int4_weight_only(2),
    "lsq": recipes.lsq(4),
    "one product in float": recipes.int8().skip("*.down_product"),
    "input only": fq.QuantConfig(default=fq.LayerConfig(input=presets.uint8())),
    "weight per tensor, with zero point": fq.QuantConfig(
        default=fq.LayerConfig(weight=presets.uint8(), input=presets.uint8())
    ),
}
each_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def build(options=()):
    torch.manual_seed(0)
    return Experts(**dict(options))


def routed(tokens=12, seed=3):
    """Returns arguments of experts. Expert 1 is never chosen."""
    index = torch.tensor([[0, 2], [3, 0], [2, 3]])[torch.arange(tokens) % 3]
    return randn(tokens, WIDTH, seed=seed), index, randn(tokens, TOP_K, seed=seed + 1).abs()


def calibrated(model, config=X86, x=None):
    return fq.calibrate(fq.prepare(model, config), [randn(40, WIDTH) if x is None else x], progress=False).eval()


def names(options):
    return ["gate_up_product" if dict(options).get("has_gate", True) else "up_product", "down_product"]


# --- the float function -----------------------------------------------------------------------------


@each_layer
def test_without_quantizing_it_computes_the_float_function(options):
    floats = build(options)
    model = off(fq.prepare(copy.deepcopy(floats), recipes.int8()))
    found = []
    for layer in (floats, model):
        x, index, weights = routed()
        x.requires_grad_()
        weights.requires_grad_()
        y = layer(x, index, weights)
        y.square().sum().backward()
        found.append(
            [y, x.grad, weights.grad, *(layer.get_parameter(name).grad for name, _ in floats.named_parameters())]
        )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


def test_products_of_equal_sums_have_equal_bits():
    """Values that are multiples of a power of two are summed without rounding, in any order."""
    floats = build({"has_gate": False, "has_bias": True})
    with torch.no_grad():
        for parameter in floats.parameters():
            parameter.copy_((parameter * 8).round() / 8)
    x, index, _ = routed()
    args = ((x * 8).round() / 8, index, torch.tensor([0.5, 0.25]).expand(len(x), 2))
    same(floats(*args), off(fq.prepare(copy.deepcopy(floats), recipes.int8()))(*args))


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_experts_of_transformers_are_recognized_and_keep_every_bit(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        hidden_size=WIDTH, intermediate_size=8, num_local_experts=EXPERTS, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, vocab_size=8, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config).eval()
    experts, args = model.layers[0].mlp.experts, routed()
    y = experts(*args)
    off(fq.prepare(model, recipes.int8()))
    assert [n for n, child in experts.named_children() if isinstance(child, fqnn.QuantizedLayer)] == names({})
    same(y, experts(*args))


def test_no_tokens_give_an_empty_result():
    model = off(fq.prepare(build(), recipes.int8()))
    x, index, weights = routed()
    assert model(x[:0], index[:0], weights[:0]).shape == (0, WIDTH)


# --- the operator -----------------------------------------------------------------------------------


def test_operator_has_all_derivatives():
    from fakequant._backends.torch.grouped_linear import grouped_linear

    rows, weight, ends = randn(7, 3).double(), randn(4, 2, 3).double(), torch.tensor([2, 2, 6, 7])
    rows.requires_grad_()
    weight.requires_grad_()
    expected = torch.cat([rows[a:b] @ w.T for a, b, w in zip([0, *ends[:-1]], ends, weight, strict=True)])
    torch.testing.assert_close(grouped_linear(rows, weight, ends), expected)
    assert torch.autograd.gradcheck(grouped_linear, (rows, weight, ends))
    assert torch.autograd.gradgradcheck(grouped_linear, (rows, weight, ends))


def test_rows_behind_the_last_group_are_zero():
    from fakequant._backends.torch.grouped_linear import grouped_linear

    same(torch.tensor([[2.0], [0.0]]), grouped_linear(torch.ones(2, 2), torch.ones(1, 1, 2), torch.tensor([1])))


# --- quantized products -----------------------------------------------------------------------------


@each_layer
def test_every_weight_has_a_quantized_product_with_a_scale_per_expert_and_channel(options):
    model = fq.prepare(build(options), recipes.int8())
    products = {name: child for name, child in model.named_children() if isinstance(child, fqnn.QuantizedLayer)}
    assert list(products) == names(options)
    for name, part in products.items():
        weight = model.get_parameter(name.replace("product", "proj"))
        matrices = weight.transpose(1, 2) if model.is_transposed else weight
        same(matrices.flatten(0, 1), part.weight)
        assert part.weight_quantizer.scale.shape == (EXPERTS * matrices.shape[1],)
        assert (part.bias is None) == (not model.has_bias)
        assert list(part.parameters()) == []


def by_hand(layer, x, index, weights):
    """Returns the results of calibrated experts in evaluation, in formulas: all products of quantized tensors."""
    first, down = (layer.get_submodule(name) for name in names({"has_gate": layer.has_gate}))
    y = torch.zeros(len(x), WIDTH)
    for token in range(len(x)):
        for place in range(TOP_K):
            z = x[token]
            for part in (first, down):
                step = part.input_quantizer.scale * part.weight_quantizer.scale
                bias = 0 if part.bias is None else (part.bias.double() / step.double()).round().float() * step
                matrix = part.weight_quantizer(part.weight)
                products = (matrix @ part.input_quantizer(z) + bias).unflatten(0, (EXPERTS, -1))[index[token, place]]
                if part is first:
                    products = layer._apply_gate(products) if layer.has_gate else layer.act_fn(products)
                z = products
            y[token] += weights[token, place] * z
    return y


@torch.no_grad()
@each_layer
def test_the_products_are_those_of_quantized_tensors(options):
    layer, args = build(options), routed()
    y = layer(*args)
    fq.calibrate(fq.prepare(layer, X86), [args], progress=False).eval()
    torch.testing.assert_close(layer(*args), by_hand(layer, *args), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(layer(*args), y, rtol=1e-5, atol=1e-6), "nothing is quantized"


def test_rows_of_all_experts_are_observed_as_one_tensor():
    layer, (x, index, weights) = build(), routed()
    fq.prepare(layer, recipes.int8())
    seen = []
    layer.gate_up_product.input_quantizer.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    layer.train()(x, index, weights)
    order = torch.sort(index.flatten(), stable=True).indices
    assert len(seen) == 1
    same(x[order // TOP_K], seen[0])
    quantizer = layer.gate_up_product.input_quantizer
    same(x.max(), quantizer.running_max)


def test_learned_scales_have_gradients():
    layer, args = build({"has_bias": True}), routed()
    fq.calibrate(fq.prepare(layer, recipes.lsq(4, first_last_bits=None)), [args], progress=False)
    layer.train()(*args).square().sum().backward()
    for name in names({}):
        part = layer.get_submodule(name)
        assert bool(part.input_quantizer.step_size.grad.abs().sum() > 0)
        of_experts = part.weight_quantizer.step_size.grad.abs().reshape(EXPERTS, -1).sum(1)
        assert (of_experts > 0).tolist() == [True, False, True, True]


def test_saved_codes_do_not_change_a_gradient():
    """The rows are large enough for their codes to be saved."""
    found = []
    for save_codes in (True, False):
        model = Experts.__new__(Experts)
        nn.Module.__init__(model)
        torch.manual_seed(0)
        model.num_experts, model.has_gate, model.has_bias, model.is_transposed = 2, False, False, False
        model.first, model.act_fn = "up_proj", nn.ReLU()
        model.up_proj, model.down_proj = (nn.Parameter(torch.randn(2, 64, 64) / 8) for _ in range(2))
        config = fq.QuantConfig(
            default=fq.LayerConfig(weight=fq.QuantSpec(bits=8, axis=0), input=presets.uint8()), save_codes=save_codes
        )
        x, index = randn(4200, 64), (torch.arange(4200) % 2).reshape(-1, 1)
        fq.calibrate(fq.prepare(model, config), [(x, index, torch.ones(4200, 1))], progress=False).train()
        model(x, index, torch.ones(4200, 1)).square().sum().backward()
        found.append([model.up_proj.grad, model.down_proj.grad])
    for a, b in zip(*found, strict=True):
        same(a, b)


# --- states and copies ------------------------------------------------------------------------------


@each_layer
def test_states_copies_and_the_way_back_keep_every_bit(options):
    args = routed()
    floats, layer = build(options), build(options)
    state, result = copy.deepcopy(layer.state_dict()), floats(*args)
    fq.calibrate(fq.prepare(layer, recipes.int8()), [args], progress=False).eval()
    assert isinstance(layer, Experts)
    assert layer.load_state_dict(state, strict=True) == ([], [])
    y = layer(*args)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = fq.prepare(build(options), recipes.int8()).eval()
    assert loaded.load_state_dict(torch.load(file, weights_only=True), strict=True) == ([], [])
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        same(y, other(*args))
        assert other.down_product.owner is other
    fq.unprepare(layer)
    assert type(layer) is Experts
    assert [name for name, _ in layer.named_children()] == ["act_fn"]
    assert set(vars(layer)) == set(vars(floats))
    same_state(state, layer.state_dict())
    same(result, layer(*args))


# --- configs and reports ----------------------------------------------------------------------------

RULES = {
    "the module": (recipes.int8().skip("experts"), []),
    "its type": (recipes.int8().skip(type="Experts"), []),
    "a product": (recipes.int8().skip("experts.down_product"), ["gate_up_product"]),
    "the module, but for a product": (
        recipes.int8().skip("experts").rule("experts.down_product", weight=presets.int8()), ["down_product"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "products"), RULES.values(), ids=RULES)
def test_rules_name_the_module_or_its_products(config, products):
    model = fq.prepare(Mixture(), config, randn(5, WIDTH))
    paths = ["router", *(f"experts.{name}" for name in products), "head"]
    assert [row.path for row in fq.summary(model).layers] == paths
    assert (type(model.experts) is Experts) == (not products)


def test_summary_counts_the_pairs_that_were_routed_and_the_bytes_of_codes():
    model = fq.prepare(Mixture(has_bias=True), recipes.int8().skip("experts.down_product"), randn(5, WIDTH))
    found = fq.summary(model)
    layers, first, last = 5 * WIDTH * (EXPERTS + 3), 5 * TOP_K * 2 * INNER * WIDTH, 5 * TOP_K * INNER * WIDTH
    assert found.multiplications == layers + first + last
    assert found.quantized_multiplications == layers + first
    assert found.parameters == sum(p.numel() for p in Mixture(has_bias=True).parameters())
    codes = EXPERTS * 2 * INNER * WIDTH + WIDTH * (EXPERTS + 3)
    scales = EXPERTS * 2 * INNER + EXPERTS + 3
    assert found.quantized_parameters == codes
    assert found.bytes_after == 4 * (found.parameters - codes) + codes + 4 * scales


def changed(name, value, **options):
    layer = build(options)
    setattr(layer, name, value)
    return layer


def shaped(name, *shape, **options):
    return changed(name, nn.Parameter(torch.zeros(shape)), **options)


UNSUPPORTED = {
    "a norm of each expert": (lambda: changed("has_post_expert_norm", True), "has_post_expert_norm"),
    "expert parallel": (lambda: changed("_is_expert_parallel", True), "several processes"),
    "other experts": (lambda: changed("num_experts", 5), "one float matrix for each of 5 experts"),
    "a matrix": (lambda: shaped("down_proj", WIDTH, INNER), r"`down_proj` must .*, got float32 of shape \(8, 6\)"),
    "another weight": (lambda: changed("has_gate", False), "`up_proj` is not a parameter"),
    "no bias": (lambda: changed("has_bias", True), r"_bias` must have the shape \(4, 12\), got no parameter"),
    "another bias": (lambda: shaped("down_proj_bias", 4, 7, has_bias=True), r"\(4, 8\), got shape \(4, 7\)"),
    "no activation": (lambda: changed("act_fn", None, has_gate=False), "has no function `act_fn`"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "words"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_module_that_does_not_fit_stays_in_float_with_a_reason(make, words):
    model = nn.ModuleDict({"experts": make(), "other": nn.Linear(2, 2)})
    fq.prepare(model, recipes.int8())
    assert type(model["experts"]) is Experts
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(fq.summary(model).floats["experts"])


def test_class_without_the_attributes_stays_in_float():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 2))

    fqnn.quantizes(Other)(fqnn.kinds.Experts)
    model = fq.prepare(nn.ModuleDict({"experts": Other(), "other": nn.Linear(2, 2)}), recipes.int8())
    assert fq.summary(model).floats["experts"] == "Other has no attribute `num_experts`"


# --- compilers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_compiled_module_is_one_graph_and_computes_the_same(mode):
    layer, args = build({"has_bias": True, "is_transposed": True}), routed()
    fq.calibrate(fq.prepare(layer, recipes.int8()), [args], progress=False).train(mode)
    other = copy.deepcopy(layer)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for number in (12, 9):
        x, index, weights = routed(number)
        y, z = layer(x, index, weights), compiled(x, index, weights)
        same(y, z)
        if mode:
            for result in (y, z):
                result.square().sum().backward()
    same_state(layer.state_dict(), other.state_dict())
    for (name, a), b in zip(layer.named_parameters(), other.parameters(), strict=True):
        if mode:
            same(a.grad, b.grad, name)


def test_prepared_model_exports_with_torch_export():
    model, x = calibrated(Mixture(has_bias=True)), randn(5, WIDTH)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    for tokens in (5, 9):
        x = randn(tokens, WIDTH, seed=tokens)
        same(model(x), program.module()(x))


# --- converted models and files ---------------------------------------------------------------------


@torch.no_grad()
@each_layer
@each_config
def test_converted_model_computes_the_prepared_one_without_float_weights(options, config, tmp_path):
    pytest.importorskip("safetensors")
    x = randn(40, WIDTH)
    model = calibrated(Mixture(**options), config)
    golden = fq.convert(model)
    # A dynamic scale is computed from floats, which rounding changes, so codes may be one step apart.
    tolerance = 1e-2 if config is CONFIGS["int8_dynamic"] else 1e-5
    torch.testing.assert_close(golden(x), model(x), rtol=tolerance, atol=tolerance)
    for name in names(options):
        part = golden.experts.get_submodule(name)
        if isinstance(part, fqnn.QuantizedLayer) and part._fakequant.weight_spec is not None:
            parameter = name.replace("product", "proj")
            assert parameter not in golden.experts._parameters
            assert f"{parameter}_bias" not in golden.experts._parameters
            same(fqnn.quantized_weight(model.experts.get_submodule(name)), part.weight)
    fq.save_converted(golden, tmp_path / "model.safetensors")
    fresh = Mixture(**options)
    for parameter in fresh.parameters():
        parameter.zero_()
    loaded = fq.load_converted(fresh, tmp_path / "model.safetensors")
    same_state(dict(sorted(golden.state_dict().items())), dict(sorted(loaded.state_dict().items())))
    for other in (loaded, copy.deepcopy(golden), pickle.loads(pickle.dumps(golden))):
        same(golden(x), other(x))


def test_file_of_other_experts_leaves_the_model_unchanged(tmp_path):
    pytest.importorskip("safetensors")
    fq.save_converted(fq.convert(calibrated(Mixture())), tmp_path / "model.safetensors")
    other = nn.ModuleDict({"experts": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="'experts' is Experts in the file but Linear in the model"):
        fq.load_converted(other, tmp_path / "model.safetensors")
    assert type(other["experts"]) is nn.Linear
    other = Mixture(has_gate=False)
    with pytest.raises(ValueError, match="gate_up_product"):
        fq.load_converted(other, tmp_path / "model.safetensors")
    assert type(other.experts) is Experts


@torch.no_grad()
def test_converted_products_are_exact_sums_of_codes():
    model = calibrated(Mixture(has_bias=True))
    golden = fq.convert(model)
    part = golden.experts.gate_up_product
    x, index, _ = routed()
    groups, order = fqnn._experts.sorted_by_expert(index.flatten(), EXPERTS)
    y = part(x[order // TOP_K], groups)
    grid = part.input_quantizer
    codes = (
        (x[order // TOP_K].double() / grid.scale.double())
        .round()
        .long()
        .clamp(0 - grid.zero_point, 255 - grid.zero_point)
    )
    weight = part.weight_codes.long().unflatten(0, (EXPERTS, -1)) * 2**part._fakequant.weight_shift
    scale = (grid.scale * part.weight_scale).unflatten(0, (EXPERTS, -1))
    for row, expert in enumerate(groups.experts):
        sums = weight[expert] @ codes[row] + part.bias_codes.unflatten(0, (EXPERTS, -1))[expert]
        same(sums.float() * scale[expert], y[row])


@each_layer
def test_exported_file_has_integer_kernels_and_the_same_codes(options, tmp_path):
    pytest.importorskip("onnxruntime")
    model = calibrated(Mixture(idle=1, **options))
    fq.export_onnx(model, tmp_path / "model.onnx", randn(5, WIDTH))
    # One token reaches two of the experts only.
    found = fq.verify(model, tmp_path / "model.onnx", [randn(40, WIDTH, seed=2), randn(1, WIDTH, seed=3)])
    assert found.ok, found.problem
    layers = ["router", *(f"experts.{name}" for name in names(options)), "head"]
    assert found.kernels == dict.fromkeys(layers, "QGemm")
    rows = {t.path: t.codes for t in found.tensors}
    assert rows[f"experts.{names(options)[0]}.input_quantizer"] == 41 * TOP_K * WIDTH
    assert rows["experts.down_product.input_quantizer"] == 41 * TOP_K * INNER
    assert found.integer_multiplications == found.multiplications


@pytest.mark.parametrize("name", ["int8", "int8_dynamic", "int4_weight_only", "one product in float", "input only"])
def test_other_configs_export_too(name, tmp_path):
    pytest.importorskip("onnxruntime")
    model = calibrated(Mixture(has_bias=True), CONFIGS[name])
    fq.export_onnx(model, tmp_path / "model.onnx", randn(5, WIDTH))
    found = fq.verify(model, tmp_path / "model.onnx", [randn(40, WIDTH, seed=2)])
    assert found.ok, found.problem


class Large(nn.Module):
    """Experts whose sums of products in float are rounded. Their result is that of the model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = Experts()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 128, 64) / 3)
        self.experts.down_proj = nn.Parameter(torch.randn(EXPERTS, 64, 64) / 3)

    def forward(self, x):
        index = torch.arange(len(x)).reshape(-1, 1) % EXPERTS
        return self.experts(x, index, torch.ones(len(x), 1))


def test_rounding_of_the_float_products_is_explained(tmp_path):
    pytest.importorskip("onnxruntime")
    x = randn(64, 64)
    model = calibrated(Large(), x=x)
    fq.export_onnx(model, tmp_path / "model.onnx", x, dynamic_batch=False)
    found = fq.verify(model, tmp_path / "model.onnx", [x])
    assert not torch.equal(model(x), fq.convert(model)(x))
    assert found.ok, found.problem


def test_file_of_another_model_is_refused(tmp_path):
    pytest.importorskip("onnxruntime")
    model = calibrated(Mixture())
    fq.export_onnx(model, tmp_path / "model.onnx", randn(5, WIDTH))
    with torch.no_grad():
        model.experts.down_proj[3].neg_()
    with pytest.raises(ValueError, match=r"experts.down_product.weight\[3\]_codes is different"):
        fq.verify(model, tmp_path / "model.onnx", [randn(5, WIDTH)])


def test_kernel_of_every_expert_is_looked_at(tmp_path):
    """The file is changed so that one expert multiplies floats."""
    onnx, _ = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    from fakequant._verify.onnxruntime_session import Runtime

    model = calibrated(Mixture())
    fq.export_onnx(model, tmp_path / "model.onnx", randn(5, WIDTH))
    file = onnx.load(tmp_path / "model.onnx")
    weight = "experts.down_product.weight[2]_dequantized"
    node = onnx.helper.make_node("Abs", [weight], ["apart"])
    for number, other in enumerate(file.graph.node):
        if weight in other.input:
            other.input[list(other.input).index(weight)] = "apart"
            file.graph.node.insert(number, node)
            break
    onnx.save(file, tmp_path / "model.onnx")
    kernels = Runtime(tmp_path / "model.onnx").kernels
    assert kernels["experts.gate_up_product"] == "QGemm"
    assert kernels["experts.down_product"] not in ("QGemm", "MatMulIntegerToFloat")


# --- diagnosis --------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_converted", [False, True], ids=["prepared", "converted"])
def test_compare_has_a_row_for_every_product_and_restores_the_float_model(is_converted):
    floats, x = Mixture(has_bias=True), randn(40, WIDTH)
    model = calibrated(copy.deepcopy(floats))
    found = fq.compare(floats, fq.convert(model) if is_converted else model, [x], progress=False)
    assert [layer.path for layer in found.layers] == [
        "router", "experts.gate_up_product", "experts.down_product", "head",
    ]  # fmt: skip
    assert all(20 < layer.isolated.sqnr < 80 for layer in found.layers)
    assert type(floats.experts) is Experts
    assert [name for name, _ in floats.experts.named_children()] == ["act_fn"]


def test_sensitivity_names_products_that_a_config_can_leave_out():
    floats, x = Mixture(), randn(40, WIDTH)
    y = floats(x)

    def evaluate(model):
        return -float((model(x) - y).square().mean())

    found = fq.sensitivity(floats, recipes.int8(), evaluate, data=[x], progress=False)
    assert sorted(layer.path for layer in found.layers) == [
        "experts.down_product", "experts.gate_up_product", "head", "router",
    ]  # fmt: skip
    model = fq.prepare(copy.deepcopy(floats), found.suggest(keep=3), x)
    assert [row.path for row in fq.summary(model).layers] == [found.layers[-1].path]


def test_health_and_check_see_the_products():
    model, x = calibrated(Mixture()), randn(40, WIDTH)
    found = fq.health(model, [x]).to_dict()
    for name in names({}):
        assert 0 < found[f"experts.{name}.input_quantizer"]["levels_used"] <= 1
        assert found[f"experts.{name}.weight_quantizer"]["levels_used"] > 0
    pytest.importorskip("onnxruntime")
    done = fq.check(Mixture(has_bias=True, is_transposed=True), x)
    assert done.ok, str(done)
    assert done.float_kernels == {}
