"""The committed stub of the native module is up to date."""

import sys
from pathlib import Path

import pytest
from nanobind.stubgen import StubGen

import fakequant
from fakequant import _native


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the stub is generated with Python 3.11")
def test_committed_stub_matches_the_native_module():
    generator = StubGen(_native)
    generator.put(_native)
    committed = Path(fakequant.__file__).with_name("_native.pyi").read_text()
    assert committed == generator.get(), "run `make stub`"
