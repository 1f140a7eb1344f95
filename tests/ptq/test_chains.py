"""Models of blocks: every block runs a few times only, and the results are those of running the whole model."""

import copy
import dataclasses
import os
import tempfile

import pytest
import torch
from torch import nn

import fakequant as fq
from fakequant._model import shelf
from fakequant._paired_models import runs as paired_runs
from fakequant._paired_models.runs import PairedRuns
from fakequant.ptq._quadratic_error import rows_of
from fakequant.testing.assertions import assert_same_model
from ptq_models import chain, config, randn, ready

DATA = [randn(2, 5, 8), randn(1, 3, 8, seed=2)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = "block"
        self.query, self.key, self.out = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, mask=None, *, scale=1.0):
        y = self.query(x) * torch.sigmoid(self.key(x)) * scale
        x += self.out(y if mask is None else y * mask)  # in place, as some models do
        return x, None


class Model(nn.Module):
    """Blocks in a list, with arguments that are the same for all, between other layers."""

    def __init__(self, blocks=4):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.runs = [0] * blocks
        for number, block in enumerate(self.blocks):
            block.register_forward_pre_hook(self._count(number))

    def _count(self, number):
        def count(module, args):
            self.runs[number] += 1

        return count

    def forward(self, x):
        x = self.first(x)
        mask = (x[..., :1] > -10).float()
        for block in self.blocks:
            assert block.kind == "block"
            x = block(x, mask, scale=0.5)[0]
        return self.last(x)


class Skips(Model):
    """A later block also needs the result of an earlier one."""

    def forward(self, x):
        x = kept = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x + kept if number == 3 else x.clone())[0]
            kept = x if number == 1 else kept
        return self.last(x)


class Between(Model):
    """Code between blocks reads their results."""

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x * 1.0)[0]
        return self.last(x)


class Everything(Model):
    """The results of all blocks are used at the end."""

    def forward(self, x):
        x, found = self.first(x), []
        for block in self.blocks:
            x = block(x)[0]
            found.append(x)
        return self.last(torch.stack([y.mean(-1) for y in found], -1).repeat(1, 1, 2))


class Counting(Block):
    def forward(self, x, mask=None, *, scale=1.0):
        self.left[0] += 0.125
        return super().forward(x, mask, scale=scale)


class Remembers(Model):
    """Blocks leave something behind that later blocks are given."""

    def __init__(self):
        super().__init__()
        self.left = [1.0]
        for block in self.blocks:
            block.__class__, block.left = Counting, self.left

    def forward(self, x):
        x, self.left[0] = self.first(x), 1.0
        for block in self.blocks:
            x = block(x, scale=self.left[0])[0]
        return self.last(x)


class Shares(Model):
    """All blocks have the same layer inside."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.key = self.blocks[0].key


class Branches(Model):
    """The modules in the list have the same input."""

    def forward(self, x):
        x = self.first(x)
        return self.last(sum(block(x.clone())[0] for block in self.blocks))


METHODS = {
    "gptq": fq.ptq.gptq,
    "adaround": lambda *args, **kwargs: fq.ptq.adaround(*args, iterations=20, **kwargs),
    "blocks": lambda *args, **kwargs: fq.ptq.adaround(*args, iterations=5, blocks="blocks.*", **kwargs),
    "correct_bias": fq.ptq.correct_bias,
}


def without_chains(monkeypatch):
    monkeypatch.setattr(paired_runs, "find_chains", lambda *args: [])


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("with_reference", [False, True])
def test_results_are_those_of_whole_runs(monkeypatch, name, on_disk, with_reference):
    if on_disk:
        monkeypatch.setattr(shelf, "_MEMORY", 0)
    model = ready(Model(), DATA)
    other = copy.deepcopy(model)
    options = {"reference": Model()} if with_reference else {}
    found = METHODS[name](model, DATA, progress=False, **options)
    assert found.note is None
    without_chains(monkeypatch)
    expected = METHODS[name](other, DATA, progress=False, **options)
    assert [dataclasses.astuple(row) for row in found.layers] == [dataclasses.astuple(row) for row in expected.layers]
    assert_same_model(model, other)
    assert all(isinstance(block, Block) for block in model.blocks)


def test_blocks_run_equally_often():
    runs = []
    for blocks in (4, 8):
        model = ready(Model(blocks), DATA)
        model.runs[:] = [0] * blocks
        fq.ptq.gptq(model, DATA, progress=False)
        # The reference is a copy, whose hooks count here too.
        runs.append(model.runs[1])
        assert len(set(model.runs[:-1])) == 1
    assert runs[0] == runs[1] <= 10 * len(DATA)


@pytest.mark.parametrize("cls", [Skips, Between, Everything, Remembers, Shares, Branches])
def test_models_that_are_no_chains_run_from_the_start(monkeypatch, cls):
    model = ready(cls(), DATA)
    other = copy.deepcopy(model)
    with PairedRuns(model, DATA, None, None, rows_of) as runs:
        assert not runs.in_blocks
    found = fq.ptq.gptq(model, DATA, progress=False)
    assert "no blocks" in str(found.note)
    assert str(found.note) in str(found)
    without_chains(monkeypatch)
    fq.ptq.gptq(other, DATA, progress=False)
    assert_same_model(model, other)


def test_sequential_models_are_chains():
    with PairedRuns(ready(chain(), [randn(4, 2, 5, 5)]), [randn(4, 2, 5, 5)], None, None, rows_of) as runs:
        assert runs.in_blocks


def test_chains_inside_a_module_with_most_layers():
    model = nn.Sequential(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))), nn.Linear(4, 4))
    with PairedRuns(ready(model, [randn(3, 4)]), [randn(3, 4)], None, None, rows_of) as runs:
        assert [chain.blocks for chain in runs._chains] == [[f"0.{n}" for n in range(6)]]


def test_the_reference_shares_parameters_until_they_change():
    model = ready(Model(), DATA)
    with PairedRuns(model, DATA, None, None, rows_of) as runs:
        reference = runs._reference
        assert all(p is q for p, q in zip(model.first.parameters(), reference.first.parameters(), strict=True))
        list(runs.pairs(["first"]))
        assert model.first.weight is not reference.first.weight
        list(runs.pairs(["blocks.0.query", "blocks.0.key"]))
        assert model.blocks[0].key.weight is not reference.blocks[0].key.weight
        list(runs.pairs(["blocks.1.out"]))
        assert model.blocks[0].key.weight is reference.blocks[0].key.weight
        with pytest.raises(RuntimeError, match="runs before layers that were asked for"):
            list(runs.pairs(["blocks.0.out"]))


def test_weights_in_groups_and_tied_weights():
    class Tied(Model):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(8, 8)
            self.last.weight = self.first.weight

    model = ready(Tied(), DATA, config(4))
    before = model.last.weight.clone()
    changes = fq.ptq.gptq(model, DATA, progress=False)
    assert changes.layers[0].reason == "its weight is shared with another layer"
    assert model.first.weight is model.last.weight
    assert torch.equal(model.last.weight, before)


@pytest.mark.skipif(os.name == "nt", reason="the file has a name there, and goes with its last handle")
def test_the_file_of_a_shelf_has_no_name_and_keeps_all_values(tmp_path, monkeypatch):
    """So nothing is left behind if the process is killed."""
    monkeypatch.setattr(shelf, "_MEMORY", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    x = torch.arange(12.0).reshape(3, 4)
    values = [[x, 3], {"y": x[:, 1].bfloat16()}, [x[1:], nn.Parameter(x), torch.ones(0)]]
    with shelf.Shelf() as kept:
        takes = [kept.put(value) for value in values]
        assert list(tmp_path.iterdir()) == []
        for value, take in [*zip(values, takes, strict=True), (values[0], takes[0])]:
            torch.testing.assert_close(take(), value, rtol=0, atol=0)
        takes.append(kept.put(x + 1))  # after some were read
        assert torch.equal(takes[3](), x + 1)
        assert torch.equal(takes[1]()["y"], values[1]["y"])
