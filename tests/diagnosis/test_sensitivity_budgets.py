"""`Sensitivity.suggest` and `pareto` for tables with widths: budgets and their limits."""

import copy
import dataclasses
import itertools
import json

import numpy as np
import pytest

import fakequant as fq
from fakequant import QuantConfig
from fakequant._diagnosis.sensitivity_table import LayerSensitivity, Sensitivity
from sensitivity_models import INT4, INT8

torch = pytest.importorskip("torch")
pytest.importorskip("scipy")
nn = torch.nn

SIZES = {"a": (8, 8), "b*": (8, 16), "c": (16, 4), "d": (4, 5)}
COSTS = {
    "a": {2: 0.5, 4: 0.1, 8: 0.001},
    "b*": {2: 0.3, 4: 0.01, 8: 0.0},
    "c": {2: 0.2, 4: 0.15, 8: 0.02},
    "d": {2: 0.9, 4: 0.4, 8: 0.05},
}
N = {path: first * second for path, (first, second) in SIZES.items()}
TOTAL = sum(N.values())


def table(costs=COSTS):
    rows = [
        LayerSensitivity(
            path, "Linear", N[path], 4, costs[path][4], 0.0, costs=costs[path], scales=1, config=INT4.default
        )
        for path in SIZES
    ]
    return Sensitivity([*rows, LayerSensitivity("relu", "ReLU", 0, 8, 0.1, 0.1)], 0.9, 0.1, INT4)


def named():
    model = nn.Sequential()
    for name, (before, after) in SIZES.items():
        model.add_module(name, nn.Linear(before, after))
    return model


def widths_of(config):
    prepared = fq.prepare(named(), config, torch.ones(1, next(iter(SIZES.values()))[0]))
    return {name: layer.weight_quantizer.spec.bits for name, layer in prepared.named_children()}


def cost_of(widths, costs=COSTS):
    return sum(min(costs[p][w] for w in costs[p] if w <= bits) for p, bits in widths.items())


def all_widths():
    return [dict(zip(SIZES, bits)) for bits in itertools.product((2, 4, 8), repeat=len(SIZES))]


def size_in_bits(widths):
    return sum(N[p] * bits for p, bits in widths.items())


def size_in_bytes(widths):
    return sum(-(-N[p] * bits // 8) + 4 for p, bits in widths.items())


# --- budgets ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 2.5, 3, 4, np.float32(4.5), np.int64(6), 8, 100])
def test_bits_are_the_average_per_weight(bits):
    found = widths_of(table().suggest(bits=bits))
    assert size_in_bits(found) <= bits * TOTAL
    best = min(cost_of(w) for w in all_widths() if size_in_bits(w) <= bits * TOTAL)
    assert cost_of(found) == pytest.approx(best, rel=1e-12)
    for uniform in (2, 4, 8):
        if uniform <= bits:
            assert cost_of(found) <= cost_of(dict.fromkeys(SIZES, uniform))


def test_bytes_count_codes_and_scales_as_summary_does():
    for budget in (85, 86, 100, 127, 128, 200, 292, 1000):
        config = table().suggest(bytes=budget)
        found = widths_of(config)
        assert size_in_bytes(found) <= budget
        best = min(cost_of(w) for w in all_widths() if size_in_bytes(w) <= budget)
        assert cost_of(found) == pytest.approx(best, rel=1e-12)
        biases = 4 * sum(outputs for _, outputs in SIZES.values())
        assert (
            fq.summary(fq.prepare(named(), config, torch.ones(1, next(iter(SIZES.values()))[0]))).bytes_after
            == size_in_bytes(found) + biases
        )
    smallest = size_in_bytes(dict.fromkeys(SIZES, 2))
    with pytest.raises(ValueError, match=f"narrowest widths need {smallest}"):
        table().suggest(bytes=smallest - 1)


def test_latency_is_the_sum_of_the_times_of_layers():
    times = {p: {2: 0.7, 4: 0.4, 8: 0.1 * N[p]} for p in SIZES}  # 2 bits are slower than 4
    flat = {(p, bits): time for p, row in times.items() for bits, time in row.items()}
    for limit in (1.6, 2.0, 3.3, 10.0, 28.0):
        found = widths_of(table().suggest(latency=limit, times=times))

        def time(widths):
            return sum(times[p][bits] for p, bits in widths.items())

        assert time(found) <= limit + 1e-9
        best = min(cost_of(w) for w in all_widths() if time(w) <= limit + 1e-9)
        assert cost_of(found) == pytest.approx(best, rel=1e-12)
        assert widths_of(table().suggest(latency=limit, times=flat)) == found


def test_more_bits_never_count_as_a_higher_cost():
    noisy = {**COSTS, "a": {2: -0.1, 4: 0.3, 8: 0.2}}
    found = widths_of(table(noisy).suggest(bits=4))
    best = min(cost_of(w, noisy) for w in all_widths() if size_in_bits(w) <= 4 * TOTAL)
    assert cost_of(found, noisy) == pytest.approx(best, rel=1e-12)
    curve = table(noisy).pareto()
    assert curve.points[-1].widths["a"] == 2  # nothing is gained by more
    for bits in (4, 8):
        assert curve.uniform[bits].cost == pytest.approx(cost_of(dict.fromkeys(SIZES, bits), noisy), rel=1e-12)
    equal = {path: {2: 0.0, 4: 0.0, 8: 0.0} for path in SIZES}
    assert set(widths_of(table(equal).suggest(bits=4)).values()) == {4}  # the budget is used


def test_only_layers_whose_width_changes_get_a_rule():
    found = table()
    for bits in (2, 4, 5.2, 8):
        config = found.suggest(bits=bits)
        widths = widths_of(config)
        assert len(config.rules) == sum(width != 4 for width in widths.values())
        assert QuantConfig.from_json(config.to_json()) == config
        assert all(rule.use.input == INT4.default.input for rule in config.rules)
    assert "b[*]" in [rule.path for rule in found.suggest(bits=8).rules]
    assert json.loads(json.dumps(found.to_dict()))["layers"][0]["costs"]["2"] == 0.5


# --- the curve --------------------------------------------------------------------------------------


def test_pareto_points_are_the_least_costs_of_their_sizes():
    curve = table().pareto()
    assert len(curve.points) > 10
    assert curve.points[0].widths == dict.fromkeys(SIZES, 2)
    assert curve.points[-1].widths == dict.fromkeys(SIZES, 8)
    for point in curve.points:
        assert point.bits == size_in_bits(point.widths) / TOTAL
        assert point.bytes == size_in_bytes(point.widths)
        best = min(cost_of(w) for w in all_widths() if size_in_bits(w) <= size_in_bits(point.widths))
        assert point.cost == pytest.approx(best, rel=1e-12, abs=1e-12)
        assert widths_of(table().suggest(bits=point.bits)) == point.widths
    for before, after in itertools.pairwise(curve.points):
        assert before.bits < after.bits
        assert before.cost > after.cost
    assert {bits: set(point.widths.values()) for bits, point in curve.uniform.items()} == {2: {2}, 4: {4}, 8: {8}}
    for point in curve.uniform.values():
        assert min(p.cost for p in curve.points if p.bits <= point.bits) <= point.cost
    assert curve.to_dict()["points"][0]["widths"]["a"] == 2
    assert "8 bits everywhere" in str(curve)
    assert copy.deepcopy(curve) == curve


# --- bad input --------------------------------------------------------------------------------------


def test_suggest_refuses_wrong_budgets():
    found = table()
    plain = dataclasses.replace(found, layers=[dataclasses.replace(x, costs=None) for x in found.layers])
    times = {p: {2: 1.0, 4: 2.0, 8: 3.0} for p in SIZES}
    for arguments in ({}, {"bits": 4, "bytes": 100}, {"keep": 1, "latency": 3.0}):
        with pytest.raises(ValueError, match=r"either `keep`.* or one budget: `bits`, `bytes` or `latency`"):
            found.suggest(**arguments)
    for name in ("bits", "bytes"):
        for value in (0, -1, float("nan"), float("inf"), "4", True):
            with pytest.raises(ValueError, match=f"`{name}` must be a number above 0"):
                found.suggest(**{name: value})
    with pytest.raises(ValueError, match=r"too small: 1.9 bits per weight on average, but .* need 2\."):
        found.suggest(bits=1.9)
    with pytest.raises(ValueError, match="`precision` is for tables without widths"):
        found.suggest(bits=4, precision=INT8)
    for arguments in ({"latency": 3.0}, {"bits": 4, "times": times}):
        with pytest.raises(ValueError, match="pass both"):
            found.suggest(**arguments)
    with pytest.raises(TypeError, match="`times` must be a dict"):
        found.suggest(latency=3.0, times=[1.0])
    with pytest.raises(ValueError, match=r"`times` has no time of a at 8 bits"):
        found.suggest(latency=3.0, times={**times, "a": {2: 1.0, 4: 2.0}})
    with pytest.raises(ValueError, match=r"numbers from 0 on, got -1.0 for c at 2 bits"):
        found.suggest(latency=3.0, times={**times, "c": {2: -1.0, 4: 2.0, 8: 3.0}})
    with pytest.raises(ValueError, match=r"`bytes` needs the cost(.|\n)*candidates=\(2, 4, 8\)"):
        plain.suggest(bytes=100)
    with pytest.raises(ValueError, match=r"bits with the config alone(.|\n)*candidates=\(2, 4, 8\)"):
        plain.suggest(bits=4)
    with pytest.raises(ValueError, match=r"no costs of widths(.|\n)*candidates"):
        plain.pareto()
    assert found.suggest(keep=1, precision=INT8) == plain.suggest(keep=1, precision=INT8)
