"""The seal of a file: a hash of all its bytes, in the file itself, which shows later changes.

It is the hash of the file with zeros in its place.
"""

import hashlib
import re

_START = "sha256:"
# What the seal is before the hash is known.
UNSEALED = _START + "0" * 64
SEAL = re.compile(_START.encode() + b"[0-9a-f]{64}")


def sealed(data: bytes) -> bytes:
    """Returns the bytes of a file with their hash in the place for it."""
    data, places = SEAL.subn(UNSEALED.encode(), data)
    assert places == 1, "the file has one place for its hash"
    return data.replace(UNSEALED.encode(), _START.encode() + hashlib.sha256(data).hexdigest().encode())


def is_unchanged(data: bytes) -> bool:
    """Returns True if a file is as it was sealed."""
    return len(SEAL.findall(data)) == 1 and sealed(data) == data
