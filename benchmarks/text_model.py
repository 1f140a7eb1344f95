"""A small language model of characters and its text, for `ptq_text.py`, `text_*.py` and `llama_cpp.py`.

The text is the reference of the Python language, as far as the standard library carries it for `help()`
(`pydoc_data.topics`): 465,000 characters. It is cut into 64 pieces, which every seed distributes anew: 6 for tests, 4 for
validation and the others for training.

The model is a transformer with two blocks of width 128 and a context of 64 characters: 420,000 weights. It is trained
with AdamW. Trained models are kept in build/ptq_text.
"""

import math
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT, WIDTH, HEADS, BLOCKS = 64, 128, 4, 2
BATCH, RATE = 32, 3e-3
PIECES, TEST, VALIDATION = 64, 6, 4
FOLDER = Path(__file__).parent.parent / "build" / "ptq_text"


class Text(NamedTuple):
    """Windows of characters: tensors of shape (windows, CONTEXT + 1)."""

    train: Tensor
    validation: Tensor
    test: Tensor
    characters: int


def text(seed: int) -> Text:
    whole = "\n".join(topics[name] for name in sorted(topics))
    alphabet = {character: number for number, character in enumerate(sorted(set(whole)))}
    codes = torch.tensor([alphabet[character] for character in whole])
    length = len(codes) // PIECES
    # A window has one character more than the context, because the last is only predicted.
    windows = codes[: length * PIECES].view(PIECES, length).unfold(1, CONTEXT + 1, CONTEXT)
    order = torch.randperm(PIECES, generator=torch.Generator().manual_seed(seed))
    parts = order.split((TEST, VALIDATION, PIECES - TEST - VALIDATION))
    test, validation, train = (windows[part].flatten(0, 1) for part in parts)
    return Text(train, validation, test, len(alphabet))


class Block(nn.Module):
    """Attention and a multilayer perceptron, each after a layer norm and with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Takes codes of shape (batch, CONTEXT), returns the logits of the characters that follow."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, WIDTH)
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, characters)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(codes) + self.position)))


def loss(logits: Tensor, windows: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def trained(data: Text, seed: int, steps: int, make: Callable[[int], Any] = Model) -> Any:
    """Returns the model of a seed. It is trained if the folder does not have it."""
    torch.manual_seed(seed)
    model = make(data.characters)
    path = FOLDER / f"{'' if make is Model else make.__name__ + '-'}seed{seed}-steps{steps}.pt"
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model.eval()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    warm = max(steps // 20, 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, 0.5 * (1 + math.cos(math.pi * i / steps)))
    )
    for _ in range(steps):
        windows = data.train[torch.randint(len(data.train), (BATCH,), generator=generator)]
        optimizer.zero_grad()
        loss(model(windows[:, :-1]), windows).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    FOLDER.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model.eval()
