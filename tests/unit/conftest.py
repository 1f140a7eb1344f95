"""Fixtures of the unit tests, and helper modules whose assertions pytest explains."""

from pathlib import Path

import pytest

_HELPERS = [path.stem for path in Path(__file__).parent.glob("*.py") if not path.stem.startswith(("test_", "conftest"))]
pytest.register_assert_rewrite(*_HELPERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder for files that several tests of a module read."""
    return tmp_path_factory.mktemp("exported")
