"""Locks that a child process never finds taken: by another thread of its parent, which it does not have.

They are all made here, when the package is imported: what is registered while a fork waits comes too late for it.
"""

import os
import threading


def _fork_safe_lock() -> "threading.RLock":
    """A reentrant lock. A fork waits until no other thread holds it."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


# Held while a part of the package is imported. Python's own locks of modules stay locked in a child that is
# forked meanwhile. No module of the package may ask the package for what it imports on demand while it is
# itself imported: it would wait for this lock while others wait for the module.
importing = _fork_safe_lock()
# Held while torch's operators are replaced.
accelerating = _fork_safe_lock()
