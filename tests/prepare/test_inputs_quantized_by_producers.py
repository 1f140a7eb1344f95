"""A layer does not quantize its input if the producer already quantized it to the same grid."""

import copy

import pytest

import fakequant as fq
from fakequant import QuantSpec, presets

torch = pytest.importorskip("torch")
nn = torch.nn
recipes = pytest.importorskip("fakequant.recipes")

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


class TwoUses(nn.Module):
    """The output of `act` is an operand of an addition and the input of a layer."""

    def __init__(self):
        super().__init__()
        self.stem, self.act = nn.Linear(8, 8), nn.ReLU()
        self.fc, self.other = nn.Linear(8, 8), nn.ReLU()

    def forward(self, x):
        x = self.act(self.stem(x))
        return x + self.other(self.fc(x))


def test_layer_does_not_quantize_an_input_that_is_already_quantized():
    model = fq.prepare(TwoUses(), recipes.int8(), X)
    assert model.fc.input_quantizer is None
    assert model.stem.input_quantizer is not None
    assert model.fc._fakequant.input_grid is model.act.output_quantizer
    assert "that of act.output_quantizer" in str(fq.summary(model))
    assert "_fakequant" not in fq.unprepare(model).fc.__dict__


def test_copied_layer_refers_to_the_grid_of_the_copied_producer():
    model = copy.deepcopy(fq.prepare(TwoUses(), recipes.int8(), X))
    assert model.fc._fakequant.input_grid is model.act.output_quantizer


def test_input_quantized_by_the_producer_lies_on_its_grid():
    model = fq.prepare(TwoUses(), recipes.int8(), X)
    seen = []
    model.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(torch.randn(64, 8))
    scale, zero_point = model.act.output_quantizer.qparams()
    again = fq.fake_quantize(seen[0], scale, zero_point, presets.uint8())
    assert torch.equal(again.view(torch.int32), seen[0].view(torch.int32))


class ChangedBetween(TwoUses):
    def forward(self, x):
        x = self.act(self.stem(x))
        y = x + 1
        x.mul_(3)
        return y + self.fc(x)


class CalledTwice(TwoUses):
    def forward(self, x):
        a, b = self.act(self.stem(x)), self.act(self.stem(2 * x))
        return a + b + self.fc(a)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_layer_quantizes_an_input_that_has_changed(training):
    model = fq.prepare(ChangedBetween().train(training), recipes.int8(), X)
    assert model.act.output_quantizer is not None
    assert model.fc.input_quantizer is not None


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_layer_reads_the_result_of_one_of_two_calls(training):
    model = fq.prepare(CalledTwice().train(training), recipes.int8(), X)
    first, second = model.act.output_quantizer.children()
    assert first is not second
    assert model.fc.input_quantizer is None
    assert model.fc._fakequant.input_grid is first


def test_layer_with_another_spec_quantizes_its_input():
    config = recipes.int8().rule("fc", input=QuantSpec(bits=4, signed=False, symmetric=False))
    assert fq.prepare(TwoUses(), config, X).fc.input_quantizer.spec.bits == 4


def test_layer_with_another_observer_quantizes_its_input():
    config = recipes.int8().rule("fc", activation_observer=fq.observers.MinMax())
    assert fq.prepare(TwoUses(), config, X).fc.input_quantizer is not None


class MovedBetween(TwoUses):
    """Moves or selects elements between the producer and the layer."""

    def __init__(self, move):
        super().__init__()
        self.move = move

    def forward(self, x):
        x = self.act(self.stem(x))
        return (x + 1).sum() + self.fc(self.move(x)).sum()


class MovedByFunctions(TwoUses):
    def forward(self, x):
        x = self.act(self.stem(x))
        return (x + 1).sum() + self.fc(torch.flatten(x.reshape(4, 2, 8), 0, 1)).sum()


MOVES = {
    "Flatten": lambda: MovedBetween(nn.Flatten()),
    "Identity": lambda: MovedBetween(nn.Identity()),
    "MaxPool": lambda: MovedBetween(nn.Sequential(nn.Unflatten(1, (1, 8)), nn.MaxPool1d(3, 1, 1), nn.Flatten())),
    "functions": MovedByFunctions,
}


@pytest.mark.parametrize("make", MOVES.values(), ids=MOVES)
def test_moved_elements_stay_on_the_grid_of_the_producer(make):
    model = fq.prepare(make(), recipes.int8(), X)
    assert model.fc.input_quantizer is None
    seen = []
    model.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(torch.randn(8, 8))
    again = fq.fake_quantize(seen[0], *model.act.output_quantizer.qparams(), presets.uint8())
    assert torch.equal(again.view(torch.int32), seen[0].view(torch.int32))


@pytest.mark.parametrize("move", [nn.Dropout(0.5), nn.ReLU6(), nn.AvgPool1d(1)], ids=["Dropout", "ReLU6", "AvgPool"])
def test_operation_that_changes_elements_needs_a_quantizer_after_it(move):
    assert fq.prepare(MovedBetween(move), recipes.int8(), X).fc.input_quantizer is not None


def test_dynamic_input_quantizer_is_kept():
    config = recipes.int8_dynamic()
    config = fq.QuantConfig(default=config.default, operands=config.default.input)
    config = config.rule(output=config.default.input)
    model = fq.prepare(TwoUses(), config, X)
    assert model.fc.input_quantizer is not None


class Named(fq.observers.MinMax):
    """An observer with the repr of another."""

    def __repr__(self):
        return repr(fq.observers.MovingAverage())


def test_is_like_compares_more_than_the_repr():
    spec = fq.presets.uint8()
    one, other = fq.nn.FakeQuantize(spec), fq.nn.FakeQuantize(spec, Named())
    assert repr(one) == repr(other)
    assert not one.is_like(other)
    assert one.is_like(fq.nn.FakeQuantize(spec, path="elsewhere"))
    other = fq.nn.FakeQuantize(spec)
    other.frozen = True
    assert not one.is_like(other)
