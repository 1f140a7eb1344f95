"""Random networks: some go through the whole flow, and the generator and the shrinker do what they claim.

`make test-all` and `make fuzz` run more networks.
"""

import dataclasses
import random
import re

import pytest
import torch

import fakequant as fq
from construct_patterns import PATTERNS
from fakequant._runtimes import find
from random_networks import is_sound, network
from shrinking import shrunk
from sources import Source
from thoroughness import ALL, only_in_test_all
from trial import PAIRS, run
from workers import Worker

pytest.importorskip("onnxscript")

# Steps through the pairs so that neighbouring seeds have other targets and other recipes.
NETWORKS = [(seed, *PAIRS[5 * seed % len(PAIRS)]) for seed in range(20 if ALL else 5)]
# Seeds of networks that their target cannot compute. At most one in twenty.
REFUSED: set[int] = set()
# Every pattern appears within so many networks.
SEEDS = 300


@pytest.fixture(autouse=True)
def one_thread(torch_on_one_thread):
    """One thread is fastest for small models."""


@pytest.mark.parametrize(("seed", "target", "recipe"), NETWORKS)
def test_a_random_network_is_verified(seed, target, recipe):
    pytest.importorskip(find(target).runtime.package)
    source = network(seed)
    outcome = run(source, target, recipe, copies=seed % 3 == 0)
    expected = "refused" if seed in REFUSED else "ok"
    assert outcome.kind == expected, f"{outcome.kind} ({outcome.step}): {outcome.message}\n\n{source}"


@pytest.mark.parametrize("target", ["openvino", "openvino-vnni"])
def test_dynamic_scales_are_refused_for_openvino(target):
    assert run(network(5), target, "int8_dynamic").kind == "refused"


@pytest.mark.parametrize(
    "target", ["onnxruntime-x86", "onnxruntime-vnni", "openvino", "openvino-vnni", "xnnpack", "litert"]
)
def test_fp8_is_refused_for_integer_kernels(target):
    with pytest.raises(ValueError, match=target):
        fq.prepare(
            torch.nn.Sequential(torch.nn.Linear(2, 2)),
            dataclasses.replace(fq.recipes.fp8(), target=target),
            torch.ones(1, 2),
        )


def test_a_seed_gives_one_source_whatever_was_drawn_before():
    first = network(3)
    random.seed(1)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    assert network(3) == first != network(4)
    assert torch.equal(torch.random.get_rng_state(), state)


@only_in_test_all
def test_networks_contain_every_construct():
    texts = [network(seed) for seed in range(SEEDS)]
    assert [pattern for pattern in PATTERNS if not any(re.search(pattern, text) for text in texts)] == []


def test_a_source_survives_parsing():
    text = network(7)
    parsed = Source.parse(text)
    assert Source.parse(str(parsed)) == parsed
    assert is_sound(str(parsed))


def test_a_planted_failure_is_shrunk_to_the_statement_that_fails():
    def fails(text):
        return "F.interpolate(" in text

    text = next(text for text in map(network, range(100)) if fails(text) and text.count("\n") > 35)
    small = Source.parse(shrunk(text, fails))
    assert len(small.statements) <= 2
    assert len(small.modules) <= 1


def test_a_process_that_ends_or_hangs_is_reported():
    plain = network(1)
    worker = Worker(limit=30.0)
    try:
        ended = worker.run(plain.replace("super().__init__()", "import os; os._exit(3)"), "generic", "int8")
        assert (ended.kind, ended.step, ended.message) == ("crash", "process", "the process ended with exit code 3")
        worker.limit = 1.0
        hung = worker.run(plain.replace("super().__init__()", "import time; time.sleep(60)"), "generic", "int8")
        assert (hung.kind, hung.step) == ("crash", "process")
    finally:
        worker.close()
