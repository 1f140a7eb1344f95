"""`make fuzz`: runs many random networks and prints a table of outcomes and each failure as a small script.

    python tests/fuzz/fuzz.py --networks 500 --seed 0

The exit code is 1 if a trial failed, or if more than 5 % were refused or explained.
"""

import argparse
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from random_networks import network
from shrinking import shrunk
from trial import RARE, RECIPES, TARGETS, Outcome, Pair, pairs_of, script
from workers import Worker

MOST_REFUSED = 0.05
# Every third network is also copied, pickled and reloaded.
COPIED = 3


class Trial(NamedTuple):
    """A network with a target and a recipe, and how it ended."""

    seed: int
    pair: Pair
    outcome: Outcome


def main() -> int:
    options = _options()
    start = time.monotonic()
    jobs = [(seed, pair) for seed in range(options.seed, options.seed + options.networks) for pair in pairs_of(seed)]
    trials = []
    with Workers(options.processes) as workers:

        def tried(worker: Worker, job: tuple[int, Pair]) -> Trial:
            seed, pair = job
            return Trial(seed, pair, worker.run(network(seed), *pair, copies=seed % COPIED == 0))

        for trial in workers.map(tried, jobs):
            trials.append(trial)
            if trial.outcome.kind != "ok":
                print(f"{trial.seed} {' '.join(trial.pair)}: {_line(trial.outcome)}", flush=True)
        print(f"\n{table(trials)}\n\n{options.networks} networks in {time.monotonic() - start:.0f} s")
        print_refusals(trials)
        failures = grouped([trial for trial in trials if trial.outcome.has_failed])

        def small(worker: Worker, group: list[Trial]) -> tuple[list[Trial], str]:
            return group, smallest_script(worker, group[0], options.shrink)

        for n, (group, text) in enumerate(workers.map(small, failures), 1):
            seeds = ", ".join(f"{trial.seed} ({' '.join(trial.pair)})" for trial in group)
            print(f"\n{'=' * 100}\nFailure {n} of {len(failures)}, {len(group)} trials: {seeds}\n\n{text}", flush=True)
            if options.scripts:
                options.scripts.mkdir(parents=True, exist_ok=True)
                (options.scripts / f"{group[0].outcome.kind.replace(' ', '_')}_{group[0].seed}.py").write_text(text)
    refused = sum(trial.outcome.kind in RARE for trial in trials)
    seconds = time.monotonic() - start
    print(
        f"\n{len(failures)} kinds of failures; {refused} of {len(trials)} trials refused or explained; {seconds:.0f} s"
    )
    return int(bool(failures) or refused > MOST_REFUSED * len(trials))


class Workers:
    """Worker processes, each with a thread that waits for it."""

    def __init__(self, number: int) -> None:
        self._threads = ThreadPoolExecutor(number)
        self._local = threading.local()
        self._all: list[Worker] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._all:
            worker.close()

    def map(self, function: Callable, jobs: list) -> Iterator:
        """Returns function(worker, job) for each job, in order."""
        return self._threads.map(lambda job: function(self._own(), job), jobs)

    def _own(self) -> Worker:
        if not hasattr(self._local, "worker"):
            self._local.worker = Worker()
            self._all.append(self._local.worker)
        return self._local.worker


def smallest_script(worker: Worker, trial: Trial, seconds: float) -> str:
    """Returns a script that fails like a trial, with a network as small as could be found in this time."""
    whole, is_copied = network(trial.seed), trial.outcome.step == "copies"
    outcomes: dict[str, Outcome] = {whole: trial.outcome}

    def fails(source: str, train: bool) -> bool:
        outcomes[source] = worker.run(source, *trial.pair, train=train, copies=is_copied)
        return outcomes[source].key == trial.outcome.key

    train = not fails(whole, train=False)
    source = shrunk(whole, lambda text: fails(text, train), seconds)
    return script(source, *trial.pair, outcomes.get(source, trial.outcome), train=train)


def grouped(trials: list[Trial]) -> list[list[Trial]]:
    """Returns the trials that ended in the same way for the same runtime, the most frequent group first."""
    groups: dict[tuple, list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.pair.target.split("-")[0], *trial.outcome.key), []).append(trial)
    return sorted(groups.values(), key=len, reverse=True)


def table(trials: list[Trial]) -> str:
    """Returns the numbers of outcomes and the seconds per trial, by target and recipe."""
    kinds = ("ok", *RARE, "crash", "not ok", "unloadable")
    lines = [f"{'target':17} {'recipe':17}" + "".join(f"{kind:>11}" for kind in kinds) + f"{'s / trial':>11}"]
    rows = [(target, recipe) for target in TARGETS for recipe in RECIPES] + [("all", "all")]
    for target, recipe in rows:
        found = [t.outcome for t in trials if target in ("all", t.pair.target) and recipe in ("all", t.pair.recipe)]
        if found:
            counts = Counter(outcome.kind for outcome in found)
            numbers = "".join(f"{counts[kind] or '':>11}" for kind in kinds)
            lines.append(f"{target:17} {recipe:17}{numbers}{sum(o.seconds for o in found) / len(found):>11.1f}")
    return "\n".join(lines)


def print_refusals(trials: list[Trial]) -> None:
    """Prints one message of each kind of refusal or explained difference, with the seeds."""
    for group in grouped([trial for trial in trials if trial.outcome.kind in RARE]):
        seeds = ", ".join(f"{trial.seed} ({' '.join(trial.pair)})" for trial in group)
        print(f"\n{group[0].outcome.kind.capitalize()}, {len(group)} trials: {seeds}\n{group[0].outcome.message}")


def _line(outcome: Outcome) -> str:
    return f"{outcome.kind} ({outcome.step}): {outcome.message}".split("\n")[0][:200]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first network")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--shrink", type=float, default=120.0, help="seconds to shrink each failure")
    parser.add_argument("--scripts", type=Path, help="a folder to write the scripts of failures to")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
