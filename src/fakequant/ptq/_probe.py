"""Checking links on an example: scaled by some factors, the users must compute the same as before."""

import torch
from torch import Tensor, nn

from fakequant._diagnosis.watching import Args, Kwargs, Result, first_tensor, watching
from fakequant._train.model_snapshot import unchanged
from fakequant._train.running import Batch, call_arguments, copied, evaluating
from fakequant.ptq._channels import channel_axis
from fakequant.ptq._float_runs import in_float
from fakequant.ptq._links import Link, Links

# Factors are powers of two, which change no bit. A wrong factor changes a result by far more.
_TOLERANCE = 1e-5
# Results are compared at about this many places.
_SAMPLES = 2**18


@torch.no_grad()
def drop_wrong_links(model: nn.Module, found: Links, example: Batch) -> None:
    """Removes links whose users compute something else when the producer is scaled, and gives them a reason."""
    with in_float(model), evaluating(model):
        expected = _results(model, found.links, example, {})
        while found.links:
            values = {p: p.detach().clone() for link in found.links for p in link.parameters()}
            try:
                factors = {link.path: _factors(link.channels, number) for number, link in enumerate(found.links)}
                for link in found.links:
                    link.rescale(factors[link.path])
                results = _results(model, found.links, example, factors)
            finally:
                for parameter, value in values.items():
                    parameter.copy_(value)
            wrong = next((path for path, y in results.items() if not _same(expected[path], y)), None)
            if wrong is None:
                return
            # Only the first in the order of the calls: its result is an input of the others.
            link = next(link for link in found.links if wrong in link.users)
            found.links.remove(link)
            reason = f"scaling the weight of {link.path} does not scale its input"
            found.reasons.update(dict.fromkeys(link.users, reason))


def _factors(channels: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2.0 ** torch.randint(-1, 2, (channels,), generator=generator)


def _results(model: nn.Module, links: list[Link], example: Batch, factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns samples of the results of all users, in the order of the calls.

    Users that are producers too have divided their results by the factors of their path, which is undone.
    """
    found: dict[str, Tensor] = {}

    def look(path: str, args: Args, kwargs: Kwargs, result: Result) -> None:
        y = first_tensor(result)
        if y is not None:
            if path in factors:
                shape = [1] * y.dim()
                shape[channel_axis(model.get_submodule(path), y.dim())] = -1
                y = y * factors[path].to(y).reshape(shape)
            found[path] = y.detach().flatten()[:: y.numel() // _SAMPLES | 1].clone()

    args, kwargs = copied(*call_arguments(model, example))
    users = {path: layer for link in links for path, layer in link.users.items()}
    with torch.random.fork_rng(devices=[]), unchanged(model), watching(users, look):
        model(*args, **kwargs)
    return found


def _same(expected: Tensor, result: Tensor) -> bool:
    if expected.shape != result.shape:
        return False
    a, b = (torch.nan_to_num(t.double(), nan=0.0, posinf=1e30, neginf=-1e30) for t in (expected, result))
    return bool((a - b).norm() <= _TOLERANCE * a.norm())
