"""Tensors that remember their codes: which operations keep them and which do not."""

import pytest

from convert_cases import grid, same
from fakequant import presets

torch = pytest.importorskip("torch")
nn = torch.nn
values = pytest.importorskip("fakequant._convert.golden.tracked_codes")
arithmetics = pytest.importorskip("fakequant._runtimes.arithmetic").arithmetics()
Grid = pytest.importorskip("fakequant._convert.golden.quantizer").GoldenQuantizer


def on_grid(x):
    return Grid(presets.uint8(), torch.tensor(0.1), torch.tensor(10, dtype=torch.int32))(x)


KEEPS = {
    "reshape": lambda x: x.reshape(2, -1),
    "flatten": lambda x: torch.flatten(x, 1),
    "nn.Flatten": nn.Flatten(),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "transpose": lambda x: x.transpose(1, 2),
    "max_pool2d": nn.MaxPool2d(2),
    "relu": nn.ReLU(),
    "F.relu": nn.functional.relu,
    "dropout": nn.Dropout(0.5).eval(),
    "contiguous": lambda x: x.contiguous(),
    "slice": lambda x: x[:, :2],
}


@pytest.mark.parametrize("move", KEEPS.values(), ids=KEEPS)
def test_moving_elements_keeps_them_on_the_grid(move):
    x = on_grid(torch.randn(2, 3, 4, 4))
    y = move(x)
    assert isinstance(values.origin_of(y), values.OnGrid)
    same(move(values.plain(x)), y)
    same(y, on_grid(values.plain(y)))  # quantizing again changes nothing


@pytest.mark.parametrize("move", KEEPS.values(), ids=KEEPS)
def test_moving_elements_moves_their_sums(move):
    scale = torch.tensor([0.1, 0.2, 0.3]).reshape(-1, 1, 1)
    sums = torch.randint(-1000, 1000, (2, 3, 4, 4)).float()
    x = values.track(sums * scale, values.Accumulated(sums, scale))
    rule, out = arithmetics["reference"], grid(0.7, 100)
    moved = move(x)
    assert torch.equal(moved.origin.codes(rule, out), values.quantized(values.plain(moved), out))


@pytest.mark.parametrize("join", [torch.cat, torch.stack, torch.concat], ids=["cat", "stack", "concat"])
def test_joined_tensors_keep_their_sums(join):
    """XNNPACK, also in LiteRT, rounds sums before it concatenates codes; others round floats. At ties they differ."""
    sums, scale = torch.arange(-300.0, 300).reshape(2, 300), torch.tensor(0.1)
    x = values.track(sums * scale, values.Accumulated(sums, scale))
    floats, out = torch.randn(2, 300) * 20, grid(0.2, 100)
    for parts in ([x, floats], [on_grid(floats), x]):
        joined = join(parts, 1)
        for name, rule in arithmetics.items():
            split = [(values.origin_of(y) or values.Floats(y)).codes(rule, out) for y in parts]
            whole = rule.from_float(values.plain(joined), out)
            assert torch.equal(
                joined.origin.codes(rule, out), join(split, 1) if name in ("xnnpack", "litert") else whole
            )
        assert values.origin_of(join([floats, floats], 1)) is None
    joined = join(tensors=[x, floats])
    floats += 1
    assert values.origin_of(joined) is None


CLAMPS = {
    "relu6": (nn.ReLU6(), 0.0, 6.0),
    "hardtanh_": (lambda x: nn.functional.hardtanh_(x, -2.05, 7), -2.05, 7.0),
    "clamp": (lambda x: x.clamp(max=3.15), None, 3.15),
    "clamp_min_": (lambda x: x.clamp_min_(-0.25), -0.25, None),
    "clip": (lambda x: torch.clip(x, 2.0, 1.0), 2.0, 1.0),
}


@pytest.mark.parametrize(("clamp", "low", "high"), CLAMPS.values(), ids=CLAMPS)
def test_clamped_tensors_keep_their_sums(clamp, low, high):
    """XNNPACK, also in LiteRT, limits the codes of sums; others round limited floats. At ties they differ."""
    sums, scale, out = torch.arange(-300.0, 300), torch.tensor(0.05), grid(0.1, 100)
    before = values.Accumulated(sums, scale)
    limited = clamp(values.track(sums * scale, before))
    for name, rule in arithmetics.items():
        of_limits = arithmetics["litert"] if name.startswith("litert") else rule  # files have them as codes
        ends = [None if end is None else of_limits.from_float(torch.tensor(end), out) for end in (low, high)]
        expected = before.codes(rule, out).clamp(*ends)
        if not name.startswith(("xnnpack", "litert")):
            expected = rule.from_float(values.plain(limited), out)
        assert torch.equal(limited.origin.codes(rule, out), expected)
    assert values.origin_of(clamp(on_grid(sums))) is None
    tensors = torch.zeros(600), torch.ones(600)
    assert values.origin_of(values.track(sums * scale, before).clamp(*tensors)) is None


def test_codes_of_clamped_tensors_differ_from_those_of_limited_floats_at_ties():
    """Otherwise the test above would show nothing."""
    sums, scale, out = torch.arange(-300.0, 300), torch.tensor(0.05), grid(0.1, 100)
    limited = nn.functional.relu6(values.track(sums * scale, values.Accumulated(sums, scale)))
    rule = arithmetics["xnnpack"]
    assert not torch.equal(limited.origin.codes(rule, out), rule.from_float(values.plain(limited), out))


def add_in_place(x, y):
    x += y
    return x


IN_PLACE = {
    "+=": (add_in_place, torch.add),
    "add_": (lambda x, y: x.add_(y), torch.add),
    "add_, its result unused": (lambda x, y: (x.add_(y), x)[1], torch.add),
    "relu_": (lambda x, y: torch.relu_(x), lambda x, y: torch.relu(x)),
    "nn.ReLU(inplace=True), its result unused": (lambda x, y: (nn.ReLU(inplace=True)(x), x)[1], lambda x, y: x.relu()),
    "mul_": (lambda x, y: (x.mul_(2), x)[1], lambda x, y: x * 2),
    "setitem": (lambda x, y: (x.__setitem__(0, 5.0), x)[1], None),
}


@pytest.mark.parametrize(("change", "plain"), IN_PLACE.values(), ids=IN_PLACE)
def test_tensor_changed_in_place_does_not_keep_its_old_codes(change, plain):
    out = grid(0.37, 100)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    changed = change(on_grid(x), on_grid(y))
    if plain is not None:
        expected = plain(values.plain(on_grid(x)), values.plain(on_grid(y)))
        assert torch.equal(values.plain(changed), expected)
    origin = values.origin_of(changed)
    codes = values.quantized(values.plain(changed), out)
    if origin is not None:
        assert torch.equal(origin.codes(arithmetics["reference"], out), codes)


def test_tensor_changed_through_a_view_loses_its_origin():
    x = on_grid(torch.randn(4, 6))
    values.plain(x).view(-1).mul_(0.5)
    assert values.origin_of(x) is None
    a, b, c = (on_grid(torch.randn(2, 2)) for _ in range(3))
    torch.add(a, b, out=c)
    assert values.origin_of(c) is None
    assert isinstance(values.origin_of(a), values.OnGrid)


def test_tracking_accepts_keyword_arguments():
    assert isinstance(values.origin_of(torch.flatten(input=on_grid(torch.randn(2, 3, 4)), start_dim=1)), values.OnGrid)


def test_inplace_relu_rectifies_the_sums():
    sums = torch.randint(-100, 100, (4, 6)).float()
    x = values.track(sums * 0.5, values.Accumulated(sums, torch.tensor(0.5)))
    nn.ReLU(inplace=True)(x)
    out = grid(0.7, 100)
    assert torch.equal(x.origin.codes(arithmetics["reference"], out), values.quantized(values.plain(x), out))


FORGETS = {
    "product": lambda x: x * 2,
    "sigmoid": torch.sigmoid,
    "sum with a number": lambda x: x + 1,
    "dropout": nn.Dropout(0.5),
}


@pytest.mark.parametrize("forget", FORGETS.values(), ids=FORGETS)
def test_other_operations_drop_the_origin(forget):
    assert values.origin_of(forget(on_grid(torch.randn(2, 3)))) is None
