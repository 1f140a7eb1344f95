"""Unusual arguments of functions with torch's names give torch's result or torch's error."""

from typing import NamedTuple

import numpy as np
import pytest

from fakequant import torch_ops
from tensor_data import assert_same, each_nodes as each_nodes, torchs
from torch_bridge import torch

pytestmark = pytest.mark.usefixtures("each_nodes")
X, ZEROS = torch.ones(1, 5), torch.zeros(1, dtype=torch.int32)
INF = torch.tensor([np.inf])
PER_TENSOR, PER_CHANNEL = "fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"
LEARN_TENSOR, LEARN_CHANNEL = "fake_quantize_learnable_per_tensor_affine", "fake_quantize_learnable_per_channel_affine"
S, Z = torch.tensor([0.5]), torch.tensor([0.3])
ODD = [
    (PER_TENSOR, X.int(), 0.5, 0, -8, 7),
    (PER_TENSOR, X + 0j, 0.5, 0, -8, 7),
    (PER_TENSOR, X > 0, 0.5, 0, -8, 7),
    (PER_TENSOR, X, 0.5, 9, -8, 7),
    (PER_TENSOR, X, 0.5, 0, 8, 7),
    (PER_TENSOR, X, 0.5, 0, -(2**70), 7),
    (PER_TENSOR, X, None, 0, -8, 7),
    (PER_TENSOR, X, 0.5, 0.0, -8, 7),
    (PER_TENSOR, X, 0.5, 0, -8.0, 7),
    (PER_TENSOR, X, 0.5, True, -8, 7),
    (PER_TENSOR, X, S, 0, -8, 7),
    (PER_TENSOR, X, 0.5, ZEROS, -8, 7),
    (PER_TENSOR, X, torch.ones(2), ZEROS, -8, 7),
    (PER_TENSOR, X, S, ZEROS.float(), -8, 7),
    (PER_TENSOR, X, S, ZEROS, 8, 7),
    (f"{PER_TENSOR}_cachemask", X, 0.5, 9, -8, 7),
    (f"{PER_TENSOR}_cachemask", X.int(), 0.5, 0, -8, 7),
    (f"{PER_TENSOR}_cachemask_tensor_qparams", X, torch.ones(2), ZEROS, torch.ones(1), -8, 7),
    (f"{PER_TENSOR}_cachemask_backward", X, X),
    (f"{PER_TENSOR}_cachemask_backward", X, torch.ones(5, 1) > 0),
    (PER_CHANNEL, X, S, ZEROS, 2, -8, 7),
    (PER_CHANNEL, X, S, ZEROS, -1, -8, 7),
    (PER_CHANNEL, X, S, ZEROS, 1, -8, 7),
    (PER_CHANNEL, X, S, ZEROS + 9, 0, -8, 7),
    (PER_CHANNEL, X, S.double(), ZEROS, 0, -8, 7),
    (PER_CHANNEL, X, S[None], ZEROS, 0, -8, 7),
    (PER_CHANNEL, X, S, ZEROS.to(torch.int8), 0, -8, 7),
    (PER_CHANNEL, X, S, ZEROS, 0.0, -8, 7),
    (PER_CHANNEL, X, S, ZEROS, 0, 8, 7),
    (LEARN_TENSOR, X, S, Z, 1, 7),
    (LEARN_TENSOR, X, torch.ones(2), Z, -8, 7),
    (LEARN_TENSOR, X, S[0], Z, -8, 7),
    (LEARN_TENSOR, X, 0.5, Z, -8, 7),
    (LEARN_TENSOR, X, S, Z, -8, 7, "1"),
    (LEARN_CHANNEL, X, S, Z, 2, -8, 7),
    (LEARN_CHANNEL, X, S, Z, 1, -8, 7),
    (LEARN_CHANNEL, X, S[0], Z, 0, -8, 7),
    ("fused_moving_avg_obs_fake_quant", X, ZEROS + 1, ZEROS + 1, INF, -INF, S, ZEROS, 0.01, 0, 255, 1, True),
    ("fused_moving_avg_obs_fake_quant", X, ZEROS + 1, ZEROS + 1, INF, -INF, S, ZEROS, 0.01, 0, 255, 5),
    ("fused_moving_avg_obs_fake_quant", X, ZEROS + 1, ZEROS + 1, INF, -INF, S, ZEROS, "0.01", 0, 255, -1),
]
ODD_FOR_THE_FAST_PATH = [
    (PER_TENSOR, X, 0.5, 0, False, True),
    (PER_CHANNEL, X, S[0], ZEROS, 0, -8, 7),
    (PER_CHANNEL, X, S, ZEROS[0], 0, -8, 7),
    (PER_CHANNEL, X, S, ZEROS.long(), 0, -8, 7),
    (PER_CHANNEL, X, S, ZEROS, None, -8, 7),
    (PER_CHANNEL, X.t(), S, ZEROS, True, -8, 7),
    (PER_CHANNEL, X, 0.5, 0, 0, -8, 7),
    (LEARN_TENSOR, X, S, Z[0], -8, 7),
    (LEARN_TENSOR, X, S, Z, -8, 7, S),
    (LEARN_CHANNEL, X, S, Z[0], 0, -8, 7),
    (LEARN_CHANNEL, X, S, Z, None, -8, 7),
]


class Refusal(NamedTuple):
    kind: type
    message: str


def outcome(function, arguments):
    try:
        return function(*arguments)
    except Exception as error:
        return Refusal(type(error), str(error))


def brief(call):
    return "-".join(f"{v.dtype}{tuple(v.shape)}"[6:] if isinstance(v, torch.Tensor) else str(v) for v in call)


def assert_same_outcome(name, arguments):
    copies = [[a.clone() if isinstance(a, torch.Tensor) else a for a in arguments] for _ in range(2)]
    expected, actual = (outcome(f, c) for f, c in zip((torchs(name), getattr(torch_ops, name)), copies, strict=True))
    if isinstance(expected, Refusal):
        assert actual == expected
    else:
        assert_same(expected, actual)
    for e, a in zip(*copies, strict=True):
        assert not isinstance(e, torch.Tensor) or torch.equal(e, a), "state"


@pytest.mark.parametrize("call", ODD, ids=brief)
def test_unusual_arguments_give_torchs_result_or_error(call):
    assert_same_outcome(call[0], call[1:])


@pytest.mark.parametrize("call", ODD_FOR_THE_FAST_PATH, ids=brief)
def test_unusual_arguments_beside_the_fast_path_give_torchs_result_or_error(call):
    assert_same_outcome(call[0], call[1:])
