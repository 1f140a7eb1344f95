"""Locks that are never held by another thread at the moment of a fork.

A child process has only the thread that forked. A lock held by any other thread would stay locked in it for ever.
All locks are created here, when the package is imported: a fork that is already waiting ignores locks registered
later.
"""

import os
import threading


def _fork_safe_lock() -> "threading.RLock":
    """Returns a reentrant lock. A fork waits until no other thread holds it."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


# Held while a module of the package is imported on demand, because Python's own import locks are not fork-safe.
# A module must not trigger an on-demand import at its top level: it would wait for this lock while the thread
# that holds the lock waits for the module.
importing = _fork_safe_lock()
# Held while `accelerate` replaces torch's operators.
accelerating = _fork_safe_lock()
