"""Fixtures that run a test on every instruction set of this machine."""

import pytest

import fakequant
from fakequant import _native


@pytest.fixture(params=_native.supported_targets())
def target(request):
    """Each instruction set in turn; the one in use before comes back afterwards."""
    before = _native.target()
    assert _native.select_target(request.param)
    yield request.param
    _native.select_target(before)


@pytest.fixture(autouse=True)
def threads_as_before():
    """A test may set the number of threads and need not put it back."""
    before = fakequant.get_num_threads()
    yield
    fakequant.set_num_threads(before)
