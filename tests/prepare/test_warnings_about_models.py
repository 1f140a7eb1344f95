"""Warnings about models and configs that do less than they appear to, given once."""

import warnings

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional
recipes = pytest.importorskip("fakequant.recipes")

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def calibrate(model, data, **options):
    return fq.calibrate(model, data, progress=False, **options)


def said(run):
    """Returns the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught]


# --- batches with more than `forward` needs -----------------------------------------------------------------


def taking(signature):
    """Returns a prepared model whose forward method has this signature."""
    scope = {}
    exec(f"def forward(self, {signature}):\n    return self.fc(x)", {}, scope)
    made = type("Model", (nn.Module,), scope)()
    made.fc = nn.Linear(4, 2)
    return fq.prepare(made, recipes.int8(), {"x": X, **({"mask": X} if signature == "x, mask" else {})})


MASK, LABELS, SCORES = torch.ones(6, 4, dtype=torch.bool), torch.zeros(6, dtype=torch.long), torch.rand(6)
AMBIGUOUS = {
    "a mask": ("x, mask=None", (X, MASK)),
    "a list": ("x, mask=None", [X, MASK]),
    "numbers in one row": ("x, weights=None", (X, SCORES)),
    "the second of two": ("x, labels=None, mask=None", (X, LABELS, MASK)),
    "beside a label": ("x, mask=None", (X, MASK, LABELS)),
}
CLEAR = {
    "no parameter for it": ("x", (X, LABELS)),
    "no parameter for numbers": ("x", (X, SCORES)),
    "labels beside an option": ("x, mask=None", (X, LABELS)),
    "a switch": ("x, flatten=False", (X, MASK)),
    "an argument for labels": ("x, labels=None", (X, SCORES)),
    "an argument for targets": ("x, targets=None", (X, MASK)),
    "one element": ("x, mask=None", (X,)),
    "a tensor": ("x, mask=None", X),
    "a dict": ("x, mask=None", {"x": X, "mask": MASK}),
    "a required argument": ("x, mask", (X, MASK)),
    "None": ("x, mask=None", (X, None)),
}


@pytest.mark.parametrize(("signature", "batch"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_batch_element_for_an_optional_argument_is_left_out_with_one_warning(signature, batch):
    model = taking(signature)
    (words,) = said(lambda: calibrate(model, [batch, batch]))
    assert "is not passed, because it may be a label" in words
    assert 'use dicts as batches: {"x": ..., ' in words
    with pytest.warns(UserWarning, match="is not passed"):
        fq.health(model, [batch])


@pytest.mark.parametrize(("signature", "batch"), CLEAR.values(), ids=CLEAR)
def test_labels_are_left_out_without_a_warning(signature, batch):
    assert said(lambda: calibrate(taking(signature), [batch])) == []


def test_calibrate_treats_a_tensor_as_one_batch():
    calls = []
    model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), recipes.int8(), X)
    model.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape))
    calibrate(model, X)
    assert calls == [X.shape]


# --- layers that no data reach ------------------------------------------------------------------------------


class Borrowed(nn.Module):
    """Multiplies by the weight of one layer without a layer's function, and never calls another."""

    def __init__(self):
        super().__init__()
        self.qkv, self.unused, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(x * self.qkv.weight.sum(1))


@pytest.mark.parametrize("config", [recipes.int8(), recipes.lsq(4)], ids=["observed", "learned"])
def test_calibrate_warns_about_layers_that_no_data_reach(config):
    (words,) = said(lambda: calibrate(fq.prepare(Borrowed(), config, X), [X]))
    assert "No data reached the quantizers of qkv, unused" in words
    assert "stay in float" in words
    assert "config.skip(path)" in words
    assert said(lambda: calibrate(fq.prepare(Borrowed(), config.skip("qkv").skip("unused"), X), [X])) == []


def test_uninitialized_learned_scale_error_names_calibrate():
    model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), recipes.lsq(4), torch.ones(1, 4))
    with pytest.raises(
        RuntimeError, match=r"0\.input_quantizer has no scale yet(.|\n)*fakequant\.calibrate\(model, data\)"
    ):
        model(X)


# --- rules --------------------------------------------------------------------------------------------------


def net():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


MISSPELT = {
    "a rule": (lambda c: c.rule("33", weight=fq.presets.int8()), r"rule\('33'\); near: 3"),
    "a skip": (lambda c: c.skip("head"), r"skip\('head'\); near: nothing"),
    "a type": (lambda c: c.skip(type="Conv2D"), r"skip\('\*', type='Conv2D'\); near: Conv2d"),
    "a type in lower case": (lambda c: c.rule(type="linear", weight=fq.presets.int8()), r"near: Linear"),
}


@pytest.mark.parametrize(("change", "message"), MISSPELT.values(), ids=MISSPELT)
def test_rule_that_matches_nothing_warns_with_the_nearest_name(change, message):
    with pytest.warns(UserWarning, match=message) as told:
        model = fq.prepare(net(), change(recipes.int8()), torch.ones(1, 1, 4, 4))
    assert len(told) == 1
    assert len(fq.summary(model).unmatched) == 1


def test_unmatched_rules_of_recipes_and_shadowed_rules_do_not_warn():
    for config in (recipes.int8_dynamic(), recipes.int4_weight_only(4), recipes.int8().skip("1").rule("*")):
        model = nn.Sequential(nn.Linear(16, 4), nn.Linear(4, 4))  # the recipes have rules for convolutions
        assert said(lambda config=config, model=model: fq.prepare(model, config, torch.ones(2, 16))) == []


def test_group_size_that_does_not_divide_warns():
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 4))
    with pytest.warns(UserWarning, match=r"their spec does not fit them:\n  0: (.|\n)*skip") as told:
        fq.prepare(model, recipes.int4_weight_only(8))
    assert len(told) == 1
    assert list(fq.summary(model).floats) == ["0"]


# --- optimizers ---------------------------------------------------------------------------------------------


def trained(*, optimizer_first, kind=torch.optim.Adam, steps=30, config=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = kind(model.parameters(), **options) if optimizer_first else None
    calibrate(fq.prepare(model, config or recipes.lsq(2), X), [X])
    optimizer = optimizer or kind(fq.nn.param_groups(model), **options)
    schedule = fq.Schedule(model)
    for _ in range(steps):
        optimizer.zero_grad()
        model(X).square().mean().backward()
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD], ids=["Adam", "SGD"])
def test_scales_missing_from_the_optimizer_warn_once(kind):
    (words,) = said(lambda: trained(optimizer_first=True, kind=kind, lr=1e-3, steps=60))
    assert "no optimizer has the scales" in words
    assert "param_groups" in words


@pytest.mark.parametrize("lr", [1e-3, 1e-12, 0.0])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD], ids=["Adam", "SGD"])
def test_scales_in_the_optimizer_do_not_warn_however_little_they_move(kind, lr):
    assert said(lambda: trained(optimizer_first=False, kind=kind, lr=lr)) == []


def test_observed_ranges_do_not_warn_about_the_optimizer():
    assert said(lambda: trained(optimizer_first=True, lr=1e-3, config=recipes.int8())) == []


# --- ranks --------------------------------------------------------------------------------------------------


def fail(model):
    raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:2")


def test_communication_error_between_ranks_names_its_likely_cause(monkeypatch):
    model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), recipes.int8(), X)
    with pytest.raises(RuntimeError, match=r"^\[gloo"):
        calibrate(model, fail)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 0)
    with pytest.raises(RuntimeError, match=r"Connection closed(.|\n)*has fewer batches(.|\n)*DistributedSampler"):
        calibrate(model, fail)


def test_a_converted_model_is_not_called_unprepared():
    model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(), torch.ones(2, 4))
    golden = fq.convert(fq.calibrate(model, [torch.ones(2, 4)], progress=False))
    with pytest.raises(ValueError, match=r"The model is converted(.|\n)*save_converted"):
        fq.summary(golden)


def test_a_model_in_data_parallel_is_refused():
    with pytest.raises(ValueError, match=r"distributed already, by DataParallel(.|\n)*prepare\(model, config\) first"):
        fq.prepare(nn.DataParallel(nn.Linear(4, 4)), fq.recipes.int8(), torch.ones(2, 4))


def test_dynamic_scales_for_openvino_are_refused_with_the_fix():
    words = r"0: openvino has no integer kernels for scales .* recipes.int8 does, .* another target"
    with pytest.raises(ValueError, match=words):
        fq.prepare(nn.Sequential(nn.Linear(4, 4)), fq.recipes.int8_dynamic(target="openvino"))


def test_torch_onnx_export_of_a_prepared_model_names_the_right_function(tmp_path):
    pytest.importorskip("onnxscript")
    model = fq.prepare(nn.Sequential(nn.Linear(4, 2)), fq.recipes.int8(), torch.ones(2, 4))
    fq.calibrate(model, [torch.ones(2, 4)], progress=False).eval()
    with pytest.raises(Exception, match=r"Use fakequant\.export_onnx\(model, path, x\)"):
        torch.onnx.export(model, (torch.ones(2, 4),), tmp_path / "m.onnx", dynamo=True, verbose=False)


@pytest.mark.parametrize("name", ["FakeQuantize", "LearnedFakeQuantize", "PACT"])
def test_help_of_a_quantizer_says_where_its_arguments_are_described(name):
    assert "documentation of the class" in getattr(fq.nn, name).__init__.__doc__
