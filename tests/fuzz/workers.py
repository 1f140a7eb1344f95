"""Trials in other processes, which may hang or end without losing the run."""

import multiprocessing
import os
import sys

# The longest trials take a tenth of it.
LIMIT = 120.0
# ExecuTorch and torch's exporter keep some memory of every network.
TRIALS_PER_PROCESS = 200


class Worker:
    """A process that runs trials, one after the other. It is started again when it has ended."""

    def __init__(self, limit: float = LIMIT) -> None:
        self.limit = limit
        self._process = None
        self._trials = 0

    def run(self, source, target, recipe, **options):
        """Returns the `Outcome` of a trial. A process that ends or does not answer in time is a crash."""
        from trial import Outcome

        if self._process is None or self._trials >= TRIALS_PER_PROCESS:
            self._start()
        self._trials += 1
        self._pipe.send((source, target, recipe, options))
        if not self._pipe.poll(self.limit):
            self.close()
            return Outcome("crash", "process", f"no answer within {self.limit:.0f} s", self.limit)
        try:
            return self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self.close()
            return Outcome("crash", "process", f"the process ended with exit code {code}")

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        self.close()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._trials = 0


def _serve(pipe) -> None:
    """Runs the trials that arrive through a pipe. What libraries print is dropped."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    import torch

    import trial

    torch.set_num_threads(1)
    while True:
        try:
            source, target, recipe, options = pipe.recv()
        except (EOFError, OSError):
            sys.exit()
        pipe.send(trial.run(source, target, recipe, **options))
