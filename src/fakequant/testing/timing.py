"""Timing on a noisy machine: contenders take turns, and the best or the median of many rounds counts.

Other processes can only add time, so the minimum is the best estimate. Because contenders take turns, a slow second
affects all of them alike. Compare only minima of the same run.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator

Contender = Callable[[], object]


def best_times(
    contenders: dict[str, Contender],
    *,
    seconds: float = 0.6,
    min_rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
    after_round: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Returns the shortest time of each contender, in seconds per call.

    Args:
        contenders: The functions to time, by name.
        seconds: How long to repeat rounds.
        min_rounds: The least number of rounds, even if they take longer than `seconds`.
        clock: Measures a sample. `time.process_time` leaves out the time of other processes.
        after_round: Called after every round.

    >>> best = best_times({"list": lambda: [0] * 100, "set": lambda: set(range(100))}, seconds=0.01, min_rounds=1)
    >>> best["list"] < best["set"] < 1
    True
    """
    best = dict.fromkeys(contenders, float("inf"))
    for name, samples in _turns(contenders, seconds, min_rounds, clock, after_round):
        best[name] = min(best[name], *samples)
    return best


def all_times(contenders: dict[str, Contender], *, seconds: float = 0.6, min_rounds: int = 5) -> dict[str, list[float]]:
    """Returns all times of each contender, in seconds per call. See `best_times` for the arguments.

    >>> times = all_times({"list": lambda: [0] * 100, "set": lambda: set(range(100))}, seconds=0.01, min_rounds=2)
    >>> min(map(len, times.values())) >= 2
    True
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name, samples in _turns(contenders, seconds, min_rounds, time.perf_counter, lambda: None):
        times[name] += samples
    return times


def _turns(
    contenders: dict[str, Contender],
    seconds: float,
    min_rounds: int,
    clock: Callable[[], float],
    after_round: Callable[[], object],
) -> Iterator[tuple[str, list[float]]]:
    """Yields the name of a contender and the times of one of its turns, round by round. See `best_times`."""
    calls = {name: _calls_per_sample(run) for name, run in contenders.items()}
    order, shuffle = list(contenders), random.Random().shuffle  # leaves the global generator alone
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        rounds = 0
        while rounds < min_rounds or time.perf_counter() < end:
            # Every round has another order, because a contender may leave the caches and the memory allocator
            # in a state that favours or harms the next one.
            shuffle(order)
            for name in order:
                yield name, _turn(contenders[name], calls[name], clock)
            rounds += 1
            after_round()
    finally:
        gc.enable()


def _turn(run: Contender, calls: int, clock: Callable[[], float], duration: float = 5e-3) -> list[float]:
    """Returns the times of the samples in one turn. Turns take the same time for slow and fast contenders."""
    samples = []
    end = time.perf_counter() + duration
    while True:
        start = clock()
        for _ in range(calls):
            run()
        samples.append((clock() - start) / calls)
        if time.perf_counter() >= end:
            return samples


def _calls_per_sample(run: Contender, shortest: float = 20e-6) -> int:
    """Returns how many calls make a sample long enough for the clock's resolution."""
    run()
    start = time.perf_counter()
    run()
    elapsed = time.perf_counter() - start
    return max(1, min(1000, int(shortest / max(elapsed, 1e-9))))
