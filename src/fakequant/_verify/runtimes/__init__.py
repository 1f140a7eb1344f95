"""Runtimes that `verify` can run a file in, one module each. `opening.py` chooses one."""
