"""What `prepare` and `Schedule` add to modules; `unprepare` removes all of it."""

import copy
import pickle

import pytest

import fakequant as fq

torch = pytest.importorskip("torch")
nn = torch.nn
recipes = pytest.importorskip("fakequant.recipes")

QUANTIZERS = {"weight_quantizer", "input_quantizer", "output_quantizer"}


class Everything(nn.Module):
    """One module of every kind that `prepare` extends."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        x = x + self.act(self.norm(self.conv(x)))
        return self.drop(self.encoder(x))


def snapshot(model):
    """Returns the class, attributes and dicts (children, parameters, buffers, hooks) of every module."""
    return {
        path: (
            type(module),
            {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()},
        )
        for path, module in model.named_modules()
    }


def added(before, after):
    """Returns the class and the names of attributes, children and hooks that were added to a module."""
    (cls, old), (other, new) = before, after
    found = {"attributes": set(new) - set(old)}
    if cls is not other:
        found["class"] = other.__name__
    for name in old:
        if isinstance(old[name], dict) and set(new[name]) != set(old[name]):
            more = set(new[name]) - set(old[name])
            assert set(old[name]) <= set(new[name])
            found[name] = more if name == "_modules" else len(more)
        elif not isinstance(old[name], dict) and new[name] is not old[name]:
            found[name] = new[name]
    return {name: value for name, value in found.items() if value != set()}


LAYER = {"attributes": {"_fakequant"}, "_modules": QUANTIZERS}
RECORD = {"attributes": {"_fakequant"}}
OUTPUT = {**RECORD, "_modules": {"output_quantizer"}, "_forward_hooks": 1}
LINEAR, ATTENTION = {**LAYER, "class": "QuantizedLinear"}, {"class": "QuantizedMultiheadAttention"}
HERE = "encoder.layers.0"
EXPECTED = {
    "conv": {**LAYER, "class": "QuantizedConv1d"},
    f"{HERE}.linear1": LINEAR,
    f"{HERE}.linear2": LINEAR,
    f"{HERE}.self_attn": {
        **RECORD,
        **ATTENTION,
        "_modules": QUANTIZERS | {"projection_quantizer", "attention_quantizer"},
    },
    f"{HERE}.self_attn.out_proj": {**LAYER, "class": "QuantizedNonDynamicallyQuantizableLinear"},
    HERE: {**RECORD, "_forward_pre_hooks": 1},
    "encoder": {**RECORD, "use_nested_tensor": False},
    **dict.fromkeys(("act", f"{HERE}.norm1", f"{HERE}.dropout1", f"{HERE}.dropout2"), OUTPUT),
    "": {**RECORD, "_buffers": 1, "_load_state_dict_pre_hooks": 1},
}


def test_prepare_adds_at_most_one_attribute_per_module():
    model = Everything()
    model.encoder.use_nested_tensor = True
    before = snapshot(model)
    fq.prepare(model, recipes.w4a8(), torch.ones(2, 4, 4))
    after = snapshot(model)
    found = {path: added(before[path], after[path]) for path in before}
    assert {path: value for path, value in found.items() if value} == EXPECTED


def of_pickle(model):
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(
    "travel", [lambda model: model, copy.deepcopy, of_pickle], ids=["itself", "deepcopy", "pickle"]
)
def test_unprepare_removes_everything_that_prepare_and_schedule_add(travel):
    torch.manual_seed(0)
    model = Everything()
    model.encoder.use_nested_tensor = True
    names = {path: (cls, set(own), *map(len, hooks(own))) for path, (cls, own) in snapshot(model).items()}
    children = {path: list(module._modules) for path, module in model.named_modules()}
    x = torch.randn(2, 4, 4)
    fq.calibrate(fq.prepare(model, recipes.w4a8(), x), [x], progress=False)
    fq.Schedule(model, freeze_norms_at=0)
    assert type(model.norm).__name__ == "FrozenBatchNorm1d"
    model = fq.unprepare(travel(model))
    assert {p: (cls, set(own), *map(len, hooks(own))) for p, (cls, own) in snapshot(model).items()} == names
    assert {path: list(module._modules) for path, module in model.named_modules()} == children
    assert model.encoder.use_nested_tensor is True


def hooks(own):
    return [value for name, value in own.items() if "hooks" in name and isinstance(value, dict)]


@pytest.mark.parametrize("travel", [copy.deepcopy, of_pickle], ids=["deepcopy", "pickle"])
def test_copies_of_frozen_batch_norms_stay_frozen(travel):
    model = fq.prepare(nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)), recipes.int8(), torch.ones(1, 2, 8))
    fq.Schedule(model, freeze_norms_at=0)
    other = travel(model).train()
    assert isinstance(other[1], nn.BatchNorm1d)
    assert not other[1].training
    assert other[0].training
    fq.Schedule(other)
    assert type(other[1]) is nn.BatchNorm1d
    assert other[1].training
    assert "_fakequant" not in vars(other[1])
    assert not model.train()[1].training


def test_convert_adds_only_the_record_attribute():
    torch.manual_seed(0)
    model, x = Everything(), torch.randn(2, 4, 4)
    before = snapshot(model)
    fq.calibrate(fq.prepare(model, recipes.int8(), x), [x], progress=False)
    golden = fq.convert(model)
    for path, (_, own) in snapshot(golden).items():
        if path in before and path != "norm":  # folded
            assert {name for name in set(own) - set(before[path][1]) if not name.startswith("_fakequant")} == set()
            assert {name for name in own if "fakequant" in name} <= {"_fakequant"}


def test_model_with_an_attribute_named_fakequant_is_refused():
    model = nn.Sequential(nn.Linear(4, 2))
    model._fakequant = "mine"
    with pytest.raises(ValueError, match=r"`_fakequant`, a name that fakequant reserves.*\nRename the attribute"):
        fq.prepare(model, recipes.int8(), torch.ones(1, 4))
    assert type(model[0]) is nn.Linear
