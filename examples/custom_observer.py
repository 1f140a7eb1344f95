"""A custom observer, whose range is the mean plus and minus some standard deviations.

    python examples/custom_observer.py [--images N]

An observer determines the range of the tensors it is given. It is a frozen dataclass, so it can be printed,
compared and stored in the JSON of a config like the observers of fakequant. Its statistics are in a state, a dict
of tensors, which is saved with the model.
"""

import argparse
import copy
import dataclasses
import warnings

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fakequant as fq


@dataclasses.dataclass(frozen=True)
class Deviations(fq.observers.Observer):
    """The range mean ± width · standard deviation of all finite values, clipped to their minimum and maximum.

    Supports one range per tensor.
    """

    width: float = 4.0

    def init(self, blocks: tuple[int, ...], device: torch.device | None = None) -> fq.observers.State:
        """Returns the initial state: count, sum and sum of squares ("sums"); minimum and maximum ("ends")."""
        if blocks != ():
            raise ValueError("Deviations has one range per tensor. Use a spec without `axis`.")
        sums = torch.zeros(3, dtype=torch.float64, device=device)
        return {"sums": sums, "ends": torch.tensor([torch.inf, -torch.inf], device=device)}

    def update(self, state: fq.observers.State, x: Tensor, spec: fq.QuantSpec, ranks: object = None) -> Tensor:
        """Adds `x` to the state; returns the number of values that are not finite. Does not combine several ranks."""
        finite = x[x.isfinite()].detach()
        if finite.numel():
            wide = finite.double()
            state["sums"] += torch.stack([wide.new_tensor(wide.numel()), wide.sum(), wide.square().sum()])
            low, high = state["ends"]
            state["ends"].copy_(torch.stack([torch.minimum(low, finite.min()), torch.maximum(high, finite.max())]))
        return torch.tensor(x.numel() - finite.numel())

    def range(self, state: fq.observers.State, spec: fq.QuantSpec) -> tuple[Tensor, Tensor]:
        """Returns the minimum and maximum of the range."""
        count, total, squares = state["sums"]
        mean = total / count
        reach = self.width * (squares / count - mean.square()).clamp(min=0).sqrt()
        low, high = state["ends"]
        return torch.maximum(low, (mean - reach).float()), torch.minimum(high, (mean + reach).float())


def noise(model: nn.Module, exact: nn.Module, x: Tensor) -> float:
    """Returns the signal-to-noise ratio of the model's result in decibels."""
    with torch.no_grad():
        y, expected = model.eval()(x), exact.eval()(x)
    return float(10 * torch.log10(expected.square().mean() / (y - expected).square().mean()))


def main() -> None:
    """Compares it with `MinMax`, on 4-bit activations in which one value in a thousand is an outlier."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=1000, help="number of images to calibrate and measure with")
    count = parser.parse_args().images
    torch.manual_seed(0)
    x = torch.tensor(load_digits().data[:count], dtype=torch.float32) / 16
    x = torch.where(torch.rand_like(x) < 0.001, 20.0, x)
    exact = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    activations = fq.QuantSpec(bits=4, signed=False, symmetric=False)
    for observer in (fq.observers.MinMax(), Deviations(width=4.0)):
        layer = fq.LayerConfig(input=activations, activation_observer=observer)
        config = fq.QuantConfig(default=layer)
        assert fq.QuantConfig.from_json(config.to_json()) == config  # JSON has the observer's name and fields
        model = fq.prepare(copy.deepcopy(exact), config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `calibrate` says that the range of MinMax does not fit
            fq.calibrate(model, x.split(100), progress=False)
        [(_, first), *_] = fq.nn.named_quantizers(model)
        clean = x[(x <= 1).all(1)]  # images without an outlier
        print(f"{observer!s:<24} step {float(first.scale):.3f}   {noise(model, exact, clean):.1f} dB")


if __name__ == "__main__":
    main()
