"""Times of training steps, one beside the other."""

import time
from collections.abc import Callable, Iterable

Step = Callable[[], object]


def best_times(steps: dict[str, Step], rounds: Iterable[object], seconds: float) -> dict[str, float]:
    """The shortest time of each step in seconds of the CPU, which others' work on the machine does not add to.

    They take turns, so that a change of the CPU's speed is one for all; until the rounds or the seconds are over,
    but twice at least: the first round is not counted.

    >>> best = best_times({"short": lambda: sum(range(10)), "long": lambda: sum(range(10_000))}, range(20), 1.0)
    >>> best["short"] < best["long"]
    True
    """
    best = dict.fromkeys(steps, float("inf"))
    end = time.perf_counter() + seconds
    for number, _ in enumerate(rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if number > 0:
                best[name] = min(best[name], time.process_time() - start)
        if number > 0 and time.perf_counter() > end:
            break
    return best
