"""The torch releases that fakequant is tested with. CMakeLists.txt and pyproject.toml repeat them."""

import re

OLDEST = (2, 12)
NEWEST = (2, 15)


def release_of(version: str) -> tuple[int, int]:
    """Returns the (major, minor) release of a version string.

    >>> release_of("2.13.0+cpu"), release_of("2.16.0a0+git1234")
    ((2, 13), (2, 16))
    """
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def check_release(version: str) -> None:
    """Raises ImportError if this version of torch is too old.

    >>> check_release("2.9.1")
    Traceback (most recent call last):
    ImportError: fakequant needs torch 2.12 or newer for tensors and models, found torch 2.9.1.
    Upgrade it: pip install --upgrade torch
    """
    if release_of(version) < OLDEST:
        raise ImportError(
            f"fakequant needs torch {describe(OLDEST)} or newer for tensors and models, found torch {version}.\n"
            "Upgrade it: pip install --upgrade torch"
        )


def describe(release: tuple[int, int]) -> str:
    """Returns a release as text.

    >>> describe((2, 12))
    '2.12'
    """
    return ".".join(map(str, release))


def is_tested(version: str) -> bool:
    """Returns True if fakequant is tested with the release of this version.

    >>> is_tested("2.14.1"), is_tested("2.16.0")
    (True, False)
    """
    return OLDEST <= release_of(version) <= NEWEST
