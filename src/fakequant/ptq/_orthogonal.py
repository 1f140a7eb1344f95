"""Orthogonal matrices that spread outliers evenly: products of Hadamard matrices, or random ones."""

import torch
from torch import Tensor


def orthogonal(size: int, seed: int) -> Tensor:
    """Returns an orthogonal matrix, in float64.

    It is a Hadamard matrix with random signs, divided by the square root of its size, so that all elements have the
    same magnitude. Sizes that have none here get a random orthogonal matrix.

    >>> q = orthogonal(12, 0)
    >>> torch.allclose(q @ q.t(), torch.eye(12).double()), q.abs().unique().numel()
    (True, 1)
    """
    generator = torch.Generator().manual_seed(seed)
    base = hadamard(size)
    if base is None:
        made: Tensor = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
        return made
    signs = torch.randint(0, 2, (size, 1), generator=generator).double() * 2 - 1
    found: Tensor = signs * base / size**0.5
    return found


def hadamard(size: int) -> Tensor | None:
    """Returns a matrix of 1 and -1 with orthogonal rows: a power of two times one of Paley's. None if there is none.

    >>> hadamard(2)
    tensor([[ 1.,  1.],
            [ 1., -1.]], dtype=torch.float64)
    >>> hadamard(3) is None
    True
    """
    base, factor = _paley(size), 1
    while base is None and size % 2 == 0:
        size, factor = size // 2, factor * 2
        base = _paley(size)
    if base is None:
        return None
    while factor > 1:
        base, factor = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), base), factor // 2
    return base


def _paley(size: int) -> Tensor | None:
    """Returns the Hadamard matrix of size 1, or one of Paley's: of size q + 1 or 2 (q + 1) for a prime q."""
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    one = torch.eye(size, dtype=torch.float64)
    if size % 4 == 0 and _is_prime(size - 1):
        return one + _bordered(size - 1, -1.0)
    if size % 8 == 4 and _is_prime(size // 2 - 1):
        half = size // 2
        cells = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        corner = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        return torch.kron(_bordered(half - 1, 1.0), cells) + torch.kron(one[:half, :half], corner)
    return None


def _bordered(q: int, sign: float) -> Tensor:
    """Returns the matrix of quadratic residues (j - i) of a prime, with a border of 1, and of `sign` on the left."""
    squares = {n * n % q for n in range(1, q)}
    row = torch.tensor([0.0 if n == 0 else 1.0 if n in squares else -1.0 for n in range(q)], dtype=torch.float64)
    at = torch.arange(q)
    made = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    made[1:, 1:] = row[(at[None] - at[:, None]) % q]
    made[0, 1:], made[1:, 0] = 1.0, sign
    return made


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))
