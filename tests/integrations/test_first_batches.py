"""Calibration reads the first batches of training without side effects."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import fakequant as fq
from fakequant.integrations._training import (
    calibrate_without_trace,
    first_batches,
    needs_calibration,
    random_states_kept,
)

DATA = TensorDataset(torch.arange(40.0))


class Counting(Dataset):
    """Rows that depend on random numbers, like augmented images."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index + torch.rand(()) + random.random() + np.random.rand()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(40.0))


class Once(IterableDataset):
    def __init__(self):
        self.rows = iter(torch.arange(40.0))

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.rows)


class Buckets:
    """A batch sampler that counts epochs."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        return iter([[self.epoch + i, i] for i in range(8)])


LOADERS = {
    "in order": lambda: DataLoader(DATA, 4),
    "shuffled": lambda: DataLoader(DATA, 4, shuffle=True),
    "with a generator": lambda: DataLoader(DATA, 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "weighted": lambda: DataLoader(DATA, 4, sampler=WeightedRandomSampler(torch.ones(40), 32)),
    "batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 4, True)),
    "stateful batch sampler": lambda: DataLoader(DATA, batch_sampler=Buckets()),
    "no batching": lambda: DataLoader(DATA, None, sampler=SequentialSampler(DATA)),
    "random rows": lambda: DataLoader(Counting(), 4, shuffle=True),
    "iterable dataset": lambda: DataLoader(Stream(), 4),
    "worker processes": lambda: DataLoader(DATA, 4, shuffle=True, num_workers=1, persistent_workers=True),
    "list": lambda: [torch.arange(4.0), torch.arange(4.0, 8.0)],
}


def read(loader):
    """Returns the batches of two epochs."""
    found = [batch for _ in range(2) for batch in loader]
    return [batch[0] if isinstance(batch, list) else batch for batch in found]


def seed():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


@pytest.mark.parametrize("kind", LOADERS)
def test_reading_first_batches_does_not_change_training_data(kind):
    seed()
    expected = read(LOADERS[kind]())
    seed()
    loader = LOADERS[kind]()
    batches = first_batches(loader, 2)
    with random_states_kept():
        first = [batch[0] if isinstance(batch, list) else batch for batch in batches]
    found = read(loader)
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    if kind != "worker processes":  # workers draw random numbers in another order
        assert all(torch.equal(a, b) for a, b in zip(first, expected[:2], strict=True))


def test_first_batches_does_not_copy_the_dataset():
    class Rows(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.tensor(float(index))

        def __deepcopy__(self, memo):
            raise AssertionError

    assert len(list(first_batches(DataLoader(Rows(), 2, shuffle=True), 3))) == 3


@pytest.mark.parametrize("data", [DataLoader(Once(), 4), iter([torch.ones(2)])], ids=["dataset", "generator"])
def test_first_batches_refuses_data_that_can_be_read_only_once(data):
    with pytest.raises(TypeError, match=r"can be read only once.*\n.*fakequant\.calibrate\(model, batches\)"):
        next(first_batches(data, 2))


def test_first_batches_refuses_samplers_that_cannot_be_copied():
    loader = DataLoader(DATA, 4, sampler=(i for i in range(40)))
    with pytest.raises(TypeError, match=r"BatchSampler cannot be copied .*\n.*QATCallback\(calibrate=None\)"):
        next(first_batches(loader, 2))


def test_random_states_are_restored_after_an_error():
    seed()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()

    def fail():
        with random_states_kept():
            raise KeyError(torch.rand(3), random.random(), np.random.rand())

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert (np.random.get_state()[1] == before[2]).all()


def prepared(config):
    return fq.prepare(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)), config, torch.ones(1, 4))


@pytest.mark.parametrize(
    ("config", "needed"),
    [
        (fq.recipes.int8(), True),
        (fq.recipes.lsq(4), True),
        (fq.recipes.int8_dynamic(), False),
        (fq.recipes.int4_weight_only(4), False),
        (fq.recipes.int8().rule(activation_observer=fq.observers.Fixed(-1.0, 1.0)), False),
    ],
    ids=["int8", "lsq", "int8_dynamic", "int4_weight_only", "fixed range"],
)
def test_needs_calibration_is_true_for_observed_and_learned_scales_without_data(config, needed):
    model = prepared(config)
    assert needs_calibration(model) == needed
    if needed:
        calibrate_without_trace(model, lambda: model(torch.randn(8, 4)))
        assert not needs_calibration(model)


@pytest.mark.filterwarnings("ignore:No data reached the quantizers of 1")
def test_needs_calibration_ignores_layers_that_no_data_reaches():
    model = prepared(fq.recipes.int8())
    calibrate_without_trace(model, lambda: model[0](torch.randn(8, 4)))
    assert not needs_calibration(model)


def test_calibrate_without_trace_handles_a_model_with_a_prepared_part():
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), prepared(fq.recipes.lsq(4)))
    calibrate_without_trace(model, lambda: model(torch.randn(8, 4)))
    assert not needs_calibration(model)
    assert model.training
