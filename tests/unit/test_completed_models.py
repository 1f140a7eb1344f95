"""Models prepared without an example: the first batch of `calibrate` shows what an example would have shown."""

import pytest

import fakequant as fq
from function_cases import X86, Attention, batch, nn, same, torch


class Untraceable(nn.Module):
    """A branch on values, pairs of convolution and batch norm outside of `nn.Sequential`, and functions."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.conv, self.norm, self.act = nn.Conv1d(3, 3, 3, padding=1), nn.BatchNorm1d(3), nn.SiLU()
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        if x.isnan().any():
            raise ValueError("NaN")
        y = self.act(self.norm(self.conv(self.attention(x))))
        return self.last(y + self.attention(y))


CONFIGS = {
    "int8 x86": fq.recipes.int8(target=X86),
    "int8": fq.recipes.int8(),
    "w4a8": fq.recipes.w4a8(),
    "lsq": fq.recipes.lsq(4),
}


def make(config, *example):
    torch.manual_seed(0)
    return fq.prepare(Untraceable(), config, *example)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_calibrating_gives_the_model_that_an_example_gives(config):
    shown, completed = make(config, batch()), make(config)
    for model in (shown, completed):
        fq.calibrate(model, [batch(), batch(1)], progress=False)
    expected, found = shown.state_dict(), completed.state_dict()
    assert list(found) == list(expected)
    for name in expected:
        same(found[name], expected[name])
    preparations = [fq._prepare.prepare.preparation(model) for model in (shown, completed)]
    assert preparations[0].norms == preparations[1].norms == {"conv": "norm"}
    assert preparations[0].multiplications == preparations[1].multiplications
    same(completed.eval()(batch(2)), shown.eval()(batch(2)))


def structure(model):
    return [(path, type(m), len(m._forward_hooks), len(m._forward_pre_hooks)) for path, m in model.named_modules()]


def test_a_model_is_unchanged_if_calibration_fails_after_it_was_completed():
    model = make(CONFIGS["int8 x86"])
    before, state = structure(model), list(model.state_dict())
    with pytest.raises(ValueError, match="NaN"):
        fq.calibrate(model, [batch(), batch() * torch.nan], progress=False)
    assert structure(model) == before
    assert list(model.state_dict()) == state
    assert not fq._prepare.prepare.preparation(model).is_recorded
    fq.calibrate(model, [batch()], progress=False)
    assert structure(model) != before


def test_the_first_batch_of_an_iterator_is_not_lost():
    listed, iterated = make(CONFIGS["int8 x86"]), make(CONFIGS["int8 x86"])
    batches = [batch(seed) * (seed + 1) for seed in range(3)]
    fq.calibrate(listed, batches, progress=False)
    fq.calibrate(iterated, iter(batches), progress=False)
    for name, value in listed.state_dict().items():
        same(iterated.state_dict()[name], value)


def test_random_numbers_of_a_loader_are_those_of_one_iteration():
    loader = torch.utils.data.DataLoader(batch(), shuffle=True)
    seen, model = [], make(CONFIGS["int8"])
    torch.manual_seed(3)
    expected = list(loader)
    torch.manual_seed(3)
    model.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    fq.calibrate(model, loader, progress=False)
    for one, other in zip(seen[-len(expected) :], expected, strict=True):
        same(one, other)


def test_a_calibrated_model_is_not_completed_again():
    model = make(CONFIGS["int8"])
    fq.calibrate(model, lambda m: m(batch()), progress=False)  # a function shows no batch
    before = structure(model)
    fq.calibrate(model, [batch()], progress=False)
    assert structure(model) == before


# --- strict conversion ----------------------------------------------------------------------------


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.used(x)


def test_strict_conversion_refuses_layers_that_no_data_reached(tmp_path):
    pytest.importorskip("onnx")
    model = fq.prepare(Unused(), fq.recipes.int8())
    with pytest.warns(UserWarning, match="unused"):
        fq.calibrate(model, [batch()], progress=False)
    with pytest.warns(UserWarning, match=r"unused.input_quantizer has seen no data"):
        fq.convert(model)
    for convert in (fq.convert, lambda m, **o: fq.export_onnx(m, tmp_path / "model.onnx", batch(), **o)):
        with pytest.raises(ValueError, match=r"unused.input_quantizer has seen no data"):
            convert(model, strict=True)
    assert not list(tmp_path.iterdir())
