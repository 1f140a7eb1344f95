"""Experts whose weights are 3-D parameters: the float function, quantized products, configs, compilers."""

import copy
import io
import pickle

import pytest

import fakequant as fq
from expert_cases import (
    EXPERTS,
    INNER,
    TOP_K,
    WIDTH,
    X86,
    Experts,
    Mixture,
    build,
    calibrated,
    each_layer,
    fqnn,
    names,
    nn,
    recipes,
    routed,
    torch,
)
from fakequant import presets
from fakequant.testing.assertions import assert_same_bits, assert_same_state
from prepare_cases import INT8, off, randn
from thoroughness import only_in_test_all

# --- the float function -----------------------------------------------------------------------------


@each_layer
def test_without_quantizing_it_computes_the_float_function(options):
    floats = build(options)
    model = off(fq.prepare(copy.deepcopy(floats), recipes.int8(), routed()))
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
    assert_same_bits(floats(*args), off(fq.prepare(copy.deepcopy(floats), recipes.int8(), args))(*args))


@pytest.mark.parametrize("name", ["Mixtral", "GptOss"])
def test_experts_of_transformers_are_recognized_and_compute_the_same(name):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(
        hidden_size=WIDTH, intermediate_size=8, num_local_experts=EXPERTS, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, vocab_size=8, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config).eval()
    experts, args = model.layers[0].mlp.experts, routed()
    y = experts(*args)
    off(fq.prepare(model, recipes.int8(), torch.ones(1, 2, dtype=torch.int64)))
    assert [n for n, child in experts.named_children() if isinstance(child, fqnn.QuantizedLayer)] == names({})
    # On some CPUs, torch adds the products of one row in another order than those of several rows.
    torch.testing.assert_close(experts(*args), y, rtol=1e-5, atol=1e-9)


def test_no_tokens_give_an_empty_result():
    model = off(fq.prepare(build(), recipes.int8(), routed()))
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

    assert_same_bits(
        torch.tensor([[2.0], [0.0]]), grouped_linear(torch.ones(2, 2), torch.ones(1, 1, 2), torch.tensor([1]))
    )


# --- quantized products -----------------------------------------------------------------------------


@each_layer
def test_every_weight_has_a_quantized_product_with_a_scale_per_expert_and_channel(options):
    model = fq.prepare(build(options), recipes.int8(), routed())
    products = {name: child for name, child in model.named_children() if isinstance(child, fqnn.QuantizedLayer)}
    assert list(products) == names(options)
    for name, part in products.items():
        weight = model.get_parameter(name.replace("product", "proj"))
        matrices = weight.transpose(1, 2) if model.is_transposed else weight
        assert_same_bits(matrices.flatten(0, 1), part.weight)
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
    fq.calibrate(fq.prepare(layer, X86, args), [args], progress=False).eval()
    torch.testing.assert_close(layer(*args), by_hand(layer, *args), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(layer(*args), y, rtol=1e-5, atol=1e-6), "nothing is quantized"


def test_rows_of_all_experts_are_observed_as_one_tensor():
    layer, (x, index, weights) = build(), routed()
    fq.prepare(layer, recipes.int8(), (x, index, weights))
    seen = []
    layer.gate_up_product.input_quantizer.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    layer.train()(x, index, weights)
    order = torch.sort(index.flatten(), stable=True).indices
    assert len(seen) == 1
    assert_same_bits(x[order // TOP_K], seen[0])
    quantizer = layer.gate_up_product.input_quantizer
    assert_same_bits(x.max(), quantizer.running_max)


def test_learned_scales_have_gradients():
    layer, args = build({"has_bias": True}), routed()
    fq.calibrate(fq.prepare(layer, recipes.lsq(4, first_last_bits=None), args), [args], progress=False)
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
        fq.calibrate(
            fq.prepare(model, config, (x, index, torch.ones(4200, 1))),
            [(x, index, torch.ones(4200, 1))],
            progress=False,
        ).train()
        model(x, index, torch.ones(4200, 1)).square().sum().backward()
        found.append([model.up_proj.grad, model.down_proj.grad])
    for a, b in zip(*found, strict=True):
        assert_same_bits(a, b)


# --- states and copies ------------------------------------------------------------------------------


@each_layer
def test_states_copies_and_the_way_back_keep_every_bit(options):
    args = routed()
    floats, layer = build(options), build(options)
    state, result = copy.deepcopy(layer.state_dict()), floats(*args)
    fq.calibrate(fq.prepare(layer, recipes.int8(), args), [args], progress=False).eval()
    assert isinstance(layer, Experts)
    assert layer.load_state_dict(state, strict=True) == ([], [])
    y = layer(*args)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = fq.prepare(build(options), recipes.int8(), args).eval()
    assert loaded.load_state_dict(torch.load(file, weights_only=True), strict=True) == ([], [])
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert_same_bits(y, other(*args))
        assert other.down_product.owner is other
    fq.unprepare(layer)
    assert type(layer) is Experts
    assert [name for name, _ in layer.named_children()] == ["act_fn"]
    assert set(vars(layer)) == set(vars(floats))
    assert_same_state(state, layer.state_dict())
    assert_same_bits(result, layer(*args))


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
    fq.prepare(model, INT8)
    assert type(model["experts"]) is Experts
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(fq.summary(model).floats["experts"])


def test_class_without_the_attributes_stays_in_float():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 2))

    fqnn.register_layer_kind(Other)(fqnn.kinds.Experts)
    model = fq.prepare(nn.ModuleDict({"experts": Other(), "other": nn.Linear(2, 2)}), INT8)
    assert fq.summary(model).floats["experts"] == "Other has no attribute `num_experts`"


# --- compilers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [True, pytest.param(False, marks=only_in_test_all)], ids=["training", "evaluation"])
def test_compiled_module_is_one_graph_and_computes_the_same(mode):
    layer, args = build({"has_bias": True, "is_transposed": True}), routed()
    fq.calibrate(fq.prepare(layer, recipes.int8(), args), [args], progress=False).train(mode)
    other = copy.deepcopy(layer)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    for number in (12, 9):
        x, index, weights = routed(number)
        y, z = layer(x, index, weights), compiled(x, index, weights)
        assert_same_bits(y, z)
        if mode:
            for result in (y, z):
                result.square().sum().backward()
    assert_same_state(layer.state_dict(), other.state_dict())
    for (name, a), b in zip(layer.named_parameters(), other.parameters(), strict=True):
        if mode:
            assert_same_bits(a.grad, b.grad, name)


def test_prepared_model_exports_with_torch_export():
    model, x = calibrated(Mixture(has_bias=True)), randn(5, WIDTH)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    for tokens in (5, 9):
        x = randn(tokens, WIDTH, seed=tokens)
        assert_same_bits(model(x), program.module()(x))
