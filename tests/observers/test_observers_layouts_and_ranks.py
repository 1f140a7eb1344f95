"""Observers per channel, group and token, on every memory layout and on several ranks."""

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from fakequant.testing.assertions import assert_same_state
from observer_cases import INT4, INT8, OBSERVING, STATEFUL, assert_same_range, bell, by, range_of, state_after

torch = pytest.importorskip("torch")

from fakequant import QuantSpec  # noqa: E402
from fakequant._backends.blocks import blocks_of  # noqa: E402
from fakequant.observers import Dynamic  # noqa: E402
from fakequant.observers._ranks import Ranks  # noqa: E402

INF, NAN = math.inf, math.nan

# --- granularity and layout -------------------------------------------------------------------------

SHAPE = (4, 6, 2, 8)
PLACES = {
    "tensor": {},
    "channel 0": dict(axis=0),
    "channel 1": dict(axis=1),
    "channel -1": dict(axis=-1),
    "group on the last axis": dict(axis=-1, group_size=4),
    "group on axis 1": dict(axis=1, group_size=3),
    "group of the whole axis": dict(axis=3, group_size=8),
    "group of one": dict(axis=2, group_size=1),
    "block": dict(axis=-1, group_size=4, group_rows=2),
}
SHORTER = {"blocks, shorter at the end": dict(axis=-1, group_size=32, group_rows=48)}
LAYOUTS = {
    "transposed": lambda x: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "every other": lambda x: torch.repeat_interleave(x, 2, -1)[..., ::2],
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "with an offset": lambda x: torch.cat([x.new_full((1, *x.shape[1:]), NAN), x])[1:],
    "padded": lambda x: torch.nn.functional.pad(x, (3, 2), value=INF)[..., 3:-2],
    "lazily negated": lambda x: torch._neg_view(-x),
    "requires a gradient": lambda x: x.clone().requires_grad_() * 1,
}


def blocks_in(x, spec):
    """Returns the elements of every block, in the order of the parameters."""
    shape = blocks_of(tuple(x.shape), spec).parameters
    if spec.axis is None:
        return [x.flatten()]
    axis = spec.axis % x.dim()
    if spec.group_size is None:
        return [x.select(axis, i).flatten() for i in range(x.shape[axis])]
    sizes = {axis: x.shape[axis] if spec.group_size == -1 else spec.group_size}
    if spec.group_rows is not None:
        sizes[axis - 1] = spec.group_rows
    return [
        x[tuple(slice(i * sizes[a], (i + 1) * sizes[a]) if a in sizes else i for a, i in enumerate(at))].flatten()
        for at in np.ndindex(*shape)
    ]


@by(OBSERVING)
@by({k: PLACES[k] for k in ("channel 1", "group on the last axis", "group on axis 1")} | SHORTER, "where")
@pytest.mark.parametrize("symmetric", [True, False])
def test_range_of_a_block_depends_on_its_elements_only(observer, where, symmetric):
    spec = QuantSpec(bits=4, symmetric=symmetric, **where)
    alone = QuantSpec(bits=4, symmetric=symmetric)
    shape = SHAPE if spec.group_rows is None else (70, 50)
    batches = [bell(*shape), bell(*shape, seed=1) * 8]
    found = [end.flatten() for end in range_of(observer, *batches, spec=spec)]
    parts = list(zip(*(blocks_in(x, spec) for x in batches), strict=True))
    assert len(parts) == len(found[0])
    for i in range(0, len(parts), max(1, len(parts) // 5)):
        expected = range_of(observer, *parts[i], spec=alone)
        assert_same_range(expected, [end[i] for end in found], i)


def test_dynamic_range_per_token_is_that_of_the_latest_tensor():
    spec = QuantSpec(axis=-1, group_size=-1)
    x = bell(3, 5, 7)
    lo, hi = range_of(Dynamic(), x * 9, x, spec=spec)
    assert lo.shape == (3, 5, 1)
    assert_same_range((x.numpy().min(-1, keepdims=True), x.numpy().max(-1, keepdims=True)), (lo, hi))


@by(OBSERVING)
@by({**PLACES, "token": dict(axis=1, group_size=-1)}, "where")
def test_memory_layout_does_not_change_the_state(observer, where):
    spec = QuantSpec(bits=4, symmetric=False, **where)
    batches = bell(*SHAPE), bell(*SHAPE, seed=1) * 5
    expected = state_after(observer, *batches, spec=spec)
    for name, layout in LAYOUTS.items():
        actual = state_after(observer, *map(layout, batches), spec=spec)
        assert_same_state(expected, actual, name)
        assert not any(v.requires_grad for v in actual.values())


@by(OBSERVING)
def test_expanded_elements_are_counted_individually(observer):
    x = bell(1, 40).expand(5, 40)
    assert_same_state(state_after(observer, x.contiguous()), state_after(observer, x))


@by(OBSERVING)
def test_scalar_tensor_is_observed_like_one_element(observer):
    assert_same_state(state_after(observer, [0.3]), state_after(observer, torch.tensor(0.3)))


@by(OBSERVING)
@pytest.mark.parametrize(
    "x", [torch.arange(3), torch.tensor([True]), torch.tensor([1j])], ids=["int", "bool", "complex"]
)
def test_tensor_that_is_not_float_is_refused_and_leaves_the_state_unchanged(observer, x):
    state = state_after(observer, [1.0, 2.0])
    before = copy.deepcopy(state)
    with pytest.raises(TypeError, match="must be a tensor of float32, float64, bfloat16 or float16"):
        observer.update(state, x, INT8)
    assert_same_state(before, state)


# --- several ranks ----------------------------------------------------------------------------------


class Team:
    """Simulates ranks with threads: every reduction waits for all of them."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.values = [None] * size

    def exchange(self, rank, value):
        self.values[rank] = value.clone()
        self.barrier.wait()
        everyone = torch.stack(self.values)
        self.barrier.wait()
        return everyone


class Member(Ranks):
    def __init__(self, team, rank):
        super().__init__(None, several=True)
        self.team, self.rank = team, rank

    def range(self, lo, hi):
        return self.team.exchange(self.rank, lo).amin(0) + 0.0, self.team.exchange(self.rank, hi).amax(0)

    def highest(self, value):
        return self.team.exchange(self.rank, value).amax(0)

    def total(self, value):
        return self.team.exchange(self.rank, value).sum(0)


def on_ranks(observer, shards, spec):
    """Returns the states and nonfinite counts of all ranks; `shards[rank]` are the batches of a rank."""
    team = Team(len(shards))

    def run(rank):
        state = observer.init(blocks_of(tuple(shards[rank][0].shape), spec).parameters)
        try:
            counts = [int(observer.update(state, x, spec, Member(team, rank))) for x in shards[rank]]
        except BaseException:
            team.barrier.abort()
            raise
        return state, counts

    with ThreadPoolExecutor(len(shards)) as threads:
        return zip(*threads.map(run, range(len(shards))), strict=True)


@by(OBSERVING)
@pytest.mark.parametrize("where", [{}, dict(axis=1), dict(axis=1, group_size=2)], ids=["tensor", "channel", "group"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_ranks_have_the_state_of_one_process_on_the_joined_batch(observer, where, symmetric):
    if where.get("group_size"):  # groups cannot be joined along the batch: compare the ranks with each other only
        where = dict(axis=0, group_size=2)
        shards = [[bell(4, 6, seed=10 * r + s) * (1 + 5 * s * r) for s in range(3)] for r in range(3)]
        joined = None
    else:
        rows = [(5, 3, 8), (1, 7, 0), (2, 2, 9)]  # per rank and step
        shards = [[bell(n, 6, seed=10 * r + s) * (1 + 5 * s * r) for s, n in enumerate(rows[r])] for r in range(3)]
        shards[0][1][0, 0], shards[2][0][1, 2], shards[2][0][0, 0] = NAN, INF, -INF
        joined = [torch.cat(step) for step in zip(*shards, strict=True)]
    spec = QuantSpec(bits=4, symmetric=symmetric, **where)
    states, counts = on_ranks(observer, shards, spec)
    for state in states[1:]:
        assert_same_state(states[0], state, "another rank")
    if joined is not None:
        assert_same_state(state_after(observer, *joined, spec=spec), states[0])
        assert counts == ([0, 1, 0], [0, 0, 0], [2, 0, 0])
    for end in observer.range(states[0], spec):
        assert end.isfinite().all()


def test_per_token_ranges_stay_local_to_each_rank():
    spec = QuantSpec(axis=-1, group_size=-1)
    shards = [[bell(3, 8)], [bell(3, 8, seed=1) * 10]]
    states, _ = on_ranks(Dynamic(), shards, spec)
    for state, (x,) in zip(states, shards, strict=True):
        assert_same_state(state_after(Dynamic(), x, spec=spec), state)


@by(STATEFUL)
def test_rank_without_data_gets_the_range_of_the_other_ranks(observer):
    shards = [[bell(40)], [torch.empty(0)], [torch.tensor([NAN])]]
    states, counts = on_ranks(observer, shards, INT4)
    for state in states:
        assert_same_state(state_after(observer, bell(40), spec=INT4), state)
    assert counts == ([0], [0], [1])
