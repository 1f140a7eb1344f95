"""A transformer with 4-bit weights, in groups of 32 that share a scale, and float activations.

    python examples/transformer_weight_only_int4.py [--epochs N]

Large language models are often stored this way: reading the weights dominates their run time, so only the weights are
quantized. Quantizing them needs no data. The transformer reads an image of a digit as 8 tokens, its rows.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import fakequant as fq


class Reader(nn.Module):
    """A transformer encoder that classifies an image, with its rows as tokens."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.position = nn.Parameter(torch.randn(8, width) * 0.1)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits of a batch of images of 8 rows."""
        return self.head(self.encoder(self.embed(x) + self.position).mean(1))


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, rate: float) -> None:
    """Trains with an ordinary loop."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Returns the accuracy in percent."""
    model.eval()
    with torch.no_grad():
        return 100 * (model(x).argmax(1) == y).double().mean().item()


def main() -> None:
    """Prints accuracies and the size of the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8, help="in float; half as many with quantizers")
    epochs = parser.parse_args().epochs
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images))
    x, y = torch.tensor(images, dtype=torch.float32)[order].view(-1, 8, 8) / 16, torch.tensor(labels)[order]

    model = Reader()
    train(model, x[:900], y[:900], epochs, rate=2e-3)
    print(f"float                  {accuracy(model, x[900:], y[900:]):.1f} %")

    # The first layer has rows of 8 weights, which cannot form groups of 32. It stays in float, as is common.
    fq.prepare(model, fq.recipes.int4_weight_only(group_size=32).skip("embed"))
    print(f"4-bit weights          {accuracy(model, x[900:], y[900:]):.1f} %")
    train(model, x[:900], y[:900], max(1, epochs // 2), rate=5e-4)
    print(f"4-bit weights, trained {accuracy(model, x[900:], y[900:]):.1f} %")
    print(fq.summary(model))


if __name__ == "__main__":
    main()
