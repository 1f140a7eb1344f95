"""Checkpoints of torch.ao, eager and FX mode, in prepared models: the same codes of weights, and the same ranges."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("torch.ao.quantization.quantize_fx")

import torch
from torch import nn
from torch.ao import quantization as ao
from torch.ao.quantization import quantize_fx

import fakequant as fq
from thoroughness import only_in_test_all

pytestmark = pytest.mark.filterwarnings("ignore")
X = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = (X.mean((1, 2, 3)) * 1000).long() % 3


class Residual(nn.Module):
    def __init__(self, eager):
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu2, self.pool, self.fc = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 3)
        self.eager = eager
        if eager:
            self.quant, self.dequant, self.add = ao.QuantStub(), ao.DeQuantStub(), nn.quantized.FloatFunctional()

    def forward(self, x):
        x = self.relu(self.bn(self.conv(self.quant(x) if self.eager else x)))
        y = self.bn2(self.conv2(x))
        y = self.fc(self.pool(self.relu2(self.add.add(x, y) if self.eager else x + y)).flatten(1))
        return self.dequant(y) if self.eager else y


def prepared_by_torch_ao(model, qconfig=None):
    """Returns a model of eager or FX mode, prepared with this qconfig, or with that for x86."""
    if model.eager:
        model.train().qconfig = qconfig or ao.get_default_qat_qconfig("x86")
        return ao.prepare_qat(ao.fuse_modules_qat(model, [["conv", "bn", "relu"], ["conv2", "bn2"]]))
    mapping = ao.QConfigMapping().set_global(qconfig) if qconfig else ao.get_default_qat_qconfig_mapping("x86")
    return quantize_fx.prepare_qat_fx(model.train(), mapping, X)


def theirs(eager):
    """A model that torch.ao has prepared and trained."""
    torch.manual_seed(0)
    model = prepared_by_torch_ao(Residual(eager))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X), LABELS).backward()
        optimizer.step()
    return model.eval().apply(ao.disable_observer)


def codes_of(layer):
    """Returns the codes that torch.ao has for a weight, with its batch norm folded."""
    weight = layer.weight
    if hasattr(layer, "bn"):
        factor = layer.bn.weight / (layer.bn.running_var + layer.bn.eps).sqrt()
        weight = weight * factor.reshape(-1, 1, 1, 1)
    scale = layer.weight_fake_quant.scale.reshape(-1, *[1] * (weight.dim() - 1))
    return (weight / scale).round().clamp(-128, 127)


@pytest.fixture(scope="module", params=[True, False], ids=["eager", "FX"])
def loaded(request):
    old = theirs(request.param)
    model = fq.prepare(Residual(request.param), fq.recipes.int8(target="onnxruntime-vnni"), X)
    return request.param, old, model, fq.load_torch_ao_state(model, old.state_dict(), X)


def test_weights_have_the_same_codes(loaded):
    _, old, model, _ = loaded
    golden = fq.convert(model.eval())
    for path in ("conv", "conv2", "fc"):
        levels = golden.get_submodule(path).weight_codes.float()
        assert torch.equal(levels, codes_of(old.get_submodule(path)).detach())


def test_a_channel_of_one_sign_has_the_scale_that_torch_ao_converts_with():
    def network():
        return nn.Sequential(ao.QuantStub(), nn.Linear(4, 2, bias=False))

    old = network().train()
    old[1].weight.data.copy_(torch.tensor([[0.0, 1.0, 2.0, 2.55], [-1.0, 0.5, 2.0, 1.27]]))
    old.qconfig = ao.get_default_qat_qconfig("x86")
    x = torch.randn(16, 4)
    ao.prepare_qat(old, inplace=True)(x)
    assert old[1].weight_fake_quant.zero_point.tolist() == [-128, 0]
    model = fq.prepare(network(), fq.recipes.int8(), x)
    assert fq.load_torch_ao_state(model, old, x) == []
    golden = fq.convert(model.eval())
    trained, (converted, _) = old[1].weight_fake_quant.scale, old[1].weight_fake_quant.calculate_qparams()
    assert torch.equal(golden[1].weight_scale, trained * torch.tensor([2.0, 1.0]))
    assert torch.allclose(golden[1].weight_scale[0], converted[0], rtol=1e-6)  # which rounds in another order
    assert golden[1].weight_codes[0, :3].tolist() == [0, 50, 100]


def test_ranges_are_kept(loaded):
    eager, old, model, lacking = loaded
    assert lacking == []
    names = {
        "conv.input_quantizer": ("quant.activation_post_process", "activation_post_process_0"),
        "relu.output_quantizer": ("conv.activation_post_process", "activation_post_process_1"),
        "bn2.output_quantizer": ("conv2.activation_post_process", "activation_post_process_2"),
        "relu2.output_quantizer": ("add.activation_post_process", "activation_post_process_3"),
        "fc.input_quantizer": ("add.activation_post_process", "activation_post_process_5"),
    }
    for path, (in_eager, in_fx) in names.items():
        observer = old.get_submodule(in_eager if eager else in_fx).activation_post_process
        quantizer = model.get_submodule(path)
        assert (quantizer.running_min, quantizer.running_max) == (observer.min_val, observer.max_val), path
        assert quantizer.scale.isfinite()


def test_outputs_agree(loaded):
    _, old, model, _ = loaded
    with torch.no_grad():
        expected, found = old(X), model.eval()(X)
    assert (expected.argmax(1) == found.argmax(1)).float().mean() > 0.95
    step = next(
        m.scale for n, m in old.named_modules() if n in ("fc.activation_post_process", "activation_post_process_6")
    )
    assert (expected - found).abs().max() < 4 * step  # theirs have 7 bits, and quantize the result too


class DigitsModel(Residual):
    def __init__(self, eager):
        super().__init__(eager)
        self.pool, self.fc = nn.AvgPool2d(2), nn.Linear(72, 10)


# As wide as our grids. torch.ao's default for x86 has 7 bits, because its kernels overflow with 8.
EIGHT_BITS = ao.QConfig(
    ao.FakeQuantize.with_args(observer=ao.MovingAverageMinMaxObserver, quant_min=0, quant_max=255),
    ao.default_per_channel_weight_fake_quant,
)


@only_in_test_all
@pytest.mark.parametrize("qconfig", [EIGHT_BITS, None], ids=["8 bits", "default"])
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "FX"])
def test_accuracy_on_digits_stays_within_a_tenth_of_a_point(eager, qconfig):
    pixels, labels = map(torch.tensor, pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True))
    images, right = (pixels.float() / 16).reshape(-1, 1, 8, 8), []
    for seed in range(4):
        torch.manual_seed(seed)
        train, test = torch.randperm(len(images)).tensor_split([797])
        old = prepared_by_torch_ao(DigitsModel(eager), qconfig)
        optimizer = torch.optim.Adam(old.parameters(), lr=0.02)
        for rows in train.split(50) * 15:
            optimizer.zero_grad()
            nn.functional.cross_entropy(old(images[rows]), labels[rows]).backward()
            optimizer.step()
        old.eval().apply(ao.disable_observer)
        model = fq.prepare(DigitsModel(eager), fq.recipes.int8(target="onnxruntime-vnni"), X)
        assert fq.load_torch_ao_state(model, old.state_dict(), X) == []
        with torch.no_grad():
            right.append([int((m.eval()(images[test]).argmax(1) == labels[test]).sum()) for m in (old, model)])
    expected, found = (sum(counts) / 40 for counts in zip(*right))  # in percent
    assert expected > 93
    assert abs(expected - found) <= 0.1, right


def test_a_model_of_torch_ao_is_not_prepared_again(loaded):
    with pytest.raises(ValueError, match="load_torch_ao_state"):
        fq.prepare(loaded[1], fq.recipes.int8(), X)


def test_states_that_do_not_fit_change_nothing(loaded):
    eager, old, _, _ = loaded
    model = fq.prepare(Residual(eager), fq.recipes.int8(), X)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = old.state_dict()
    del state["fc.bias"]
    with pytest.raises(ValueError, match=r"lacks fc\.bias"):
        fq.load_torch_ao_state(model, state, X)
    with pytest.raises(ValueError, match=r"no quantizers of torch\.ao"):
        fq.load_torch_ao_state(model, Residual(eager).state_dict(), X)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) or before[name].isnan().all() for name in before)


def test_ranges_of_fx_mode_are_found_by_their_order_in_the_graph_not_in_the_state():
    def network():
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 3))

    x = torch.randn(16, 8)
    old = quantize_fx.prepare_qat_fx(network().train(), ao.get_default_qat_qconfig_mapping("x86"), x)
    old(x)
    model = fq.prepare(network(), fq.recipes.int8(), x)
    assert fq.load_torch_ao_state(model, old, x) == ["0.2.input_quantizer"]  # torch.ao has a fixed scale for tanh
    for path, number in (("0.0", 0), ("2", 3)):
        observer = old.get_submodule(f"activation_post_process_{number}").activation_post_process
        quantizer = model.get_submodule(path).input_quantizer or model[1].output_quantizer
        assert quantizer.running_max == observer.max_val
