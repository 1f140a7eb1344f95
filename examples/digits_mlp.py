"""A perceptron on scikit-learn's digits: in float, quantized after training (PTQ), and trained with quantizers (QAT).

    python examples/digits_mlp.py [--epochs N]

PTQ needs two calls and some data, and is enough at 8 bits. At 2 bits it is not, so the model is trained again with
quantizers, for the same number of epochs and in the same loop.
"""

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fakequant as fq


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns training images and labels, test images and labels."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return x[:900], y[:900], x[900:], y[900:]


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float) -> None:
    """Trains with an ordinary loop, which needs no change for quantization."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(30):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Returns the accuracy in percent."""
    model.eval()
    with torch.no_grad():
        return 100 * (model(x).argmax(1) == y).double().mean().item()


def main() -> None:
    """Prints the accuracy of each model on the test images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20, help="of each training")
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    train_x, train_y, test_x, test_y = digits()

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    train(model, train_x, train_y, epochs, rate=3e-3)
    print(f"float                    {accuracy(model, test_x, test_y):.1f} %")

    two_bits = fq.QuantConfig(
        default=fq.LayerConfig(
            weight=fq.QuantSpec(bits=2, axis=0), input=fq.QuantSpec(bits=2, signed=False, symmetric=False)
        )
    )
    for name, config in {"int8": fq.recipes.int8(), "2 bits": two_bits}.items():
        quantized = fq.prepare(copy.deepcopy(model), config, example=train_x[:1])
        fq.calibrate(quantized, train_x.split(100), progress=False)
        print(f"{name:<7}calibrated        {accuracy(quantized, test_x, test_y):.1f} %")
    train(quantized, train_x, train_y, epochs, rate=1e-3)
    print(f"{name:<7}trained           {accuracy(quantized, test_x, test_y):.1f} %")
    print(fq.summary(quantized))


if __name__ == "__main__":
    main()
