"""Models for two ranks, their data, and functions to wrap and train them."""

import warnings
from functools import partial

import pytest

import fakequant as fq
from fakequant import presets, recipes
from straight_through import torch
from two_ranks import RANKS, dist

fqnn = pytest.importorskip("fakequant.nn")
nn = torch.nn
F = nn.functional


RECIPES = {
    "int8": recipes.int8,
    "w4a8": partial(recipes.w4a8, first_last_bits=None),  # one grid for all layers, so that sums are exact
    "int8_dynamic": recipes.int8_dynamic,
    "int4_weight_only": partial(recipes.int4_weight_only, 4),
    "lsq": partial(recipes.lsq, 4, first_last_bits=None),
}
OBSERVED = [name for name in RECIPES if name != "lsq"]
# Without exact sums.
FLOATS = {"fp8": recipes.fp8, "mxfp8": recipes.mxfp8}


# --- models whose sums are exact ------------------------------------------------------------------

WIDTH, ROWS, BATCHES = 8, 16, 4
FULL, EMPTY = 0, [1, 5]  # columns that are always the largest value, and always 0; one per group of 4


def reach(spec):
    """Returns the largest magnitude of a range whose scale is 1."""
    return (spec.qmax - spec.qmin) / (2 if spec.symmetric else 1)


def exact_layer(layer, spec):
    """Sets weights to multiples of 1/16. The largest never change, because their inputs are 0."""
    largest = reach(spec)
    while largest > 8:
        largest /= 2
    weight = (torch.randn(layer.weight.shape) * 4 * largest).round().clamp(-12 * largest, 12 * largest) / 16
    weight[:, FULL] = 0
    weight[:, EMPTY] = largest
    if layer.out_features == WIDTH:
        weight[[FULL, *EMPTY]] = 0
        weight[[FULL, *EMPTY], 1] = weight[[FULL, *EMPTY], 5] = largest
        weight[FULL, FULL], weight[EMPTY, FULL] = largest, -largest
    layer.weight.data.copy_(weight)


def exact_model(config):
    """The clamps give every layer's input one full and two empty columns without gradients."""
    torch.manual_seed(6)
    top = reach(config.default.input or presets.uint8())
    layers = [nn.Linear(WIDTH, outputs, bias=False) for outputs in (WIDTH, WIDTH, 4)]
    for layer in layers:
        exact_layer(layer, config.default.weight)
    return nn.Sequential(layers[0], nn.Hardtanh(0, top), layers[1], nn.Hardtanh(0, top), layers[2])


def exact_data(config):
    generator = torch.Generator().manual_seed(7)
    made = []
    for _ in range(BATCHES):
        x = torch.randint(0, 256, (ROWS, WIDTH), generator=generator) / 16
        x[:, FULL], x[:, EMPTY] = reach(config.default.input or presets.uint8()), 0
        made.append((x, torch.randint(-99, 99, (ROWS, 4), generator=generator).float()))
    return made


# --- wrapping -------------------------------------------------------------------------------------


def ddp(model, **options):
    return nn.parallel.DistributedDataParallel(model, **options) if dist.is_initialized() else model


def fsdp(model, **options):
    if not dist.is_initialized():
        return model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    options["mesh"] = init_device_mesh("cpu", (RANKS,))
    for module in model.modules():
        if any(name.endswith("weight_quantizer") for name, _ in module.named_children()):
            fully_shard(module, **options)
    return fully_shard(model, **options)


WRAPPERS = {"ddp": ddp, "fsdp": fsdp}


def whole(value):
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def state_of(model):
    """Returns parameters and buffers by their names in the unwrapped model."""
    return {name.removeprefix("module."): whole(value) for name, value in model.state_dict().items()}


def distance(y, target):
    """A loss whose gradients are 1, 0 and -1, divided by a power of two."""
    return (y - target).abs().mean()


def train(seat, model, data, optimizer=None, loss=distance, after=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=2.0**-9)
    for x, target in data:
        optimizer.zero_grad()
        loss(model(seat.part(x)), seat.part(target)).backward()
        optimizer.step()
        if after is not None:
            after()
    return state_of(model)


class Residual(nn.Module):
    """Adds in its own code, optionally in place, and has a layer that can be left unused."""

    def __init__(self, channels=6, checkpointed=False, in_place=False):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.branch = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.head = nn.Linear(channels, 5)
        self.spare = nn.Linear(channels, 5)
        self.use_spare = True
        self.checkpointed = checkpointed
        self.in_place = in_place

    def forward(self, x):
        x = self.stem(x)
        if self.checkpointed:
            x = x + torch.utils.checkpoint.checkpoint(self.branch, x, use_reentrant=False)
        else:
            x = x + self.branch(x)
        x = x.mean((2, 3))
        y = self.head(x)
        if not self.use_spare:
            return y
        if self.in_place:
            y += self.spare(x)
            return y
        return y + self.spare(x)


def images(number=4):
    generator = torch.Generator().manual_seed(8)
    return [
        (torch.randn(6, 3, 8, 8, generator=generator) * (1 + n), torch.randint(5, (6,), generator=generator))
        for n in range(number)
    ]


def residual(seat, recipe, **options):
    torch.manual_seed(9)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Layers stay in float")  # groups of 4 do not divide 6 channels
        model = fq.prepare(Residual(**options), recipe, images()[0][0])
    if any(isinstance(q, fqnn.LearnedFakeQuantize) for _, q in fqnn.named_quantizers(model)):
        fq.calibrate(model, [seat.part(x) for x, _ in images()], progress=False)
    return model


BATCH_STATISTICS = ("running_mean", "running_var")


def of_the_model(state):
    """Drops batch norm statistics, which torch synchronizes only in the next forward pass."""
    return {path: value for path, value in state.items() if not path.endswith(BATCH_STATISTICS)}
