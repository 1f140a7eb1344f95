"""Ways to compute exact sums, for tests that compare them."""

import pytest

from fakequant import _native

torch = pytest.importorskip("torch")
compiled_nodes = pytest.importorskip("fakequant._backends.torch.compiled_nodes")

# Whatever computes the sums.
PRODUCTS = (*_native.supported_targets(), "without int8", "low precision", "in Python")


def multiply_by(how, monkeypatch):
    if how in _native.supported_targets():
        _native.select_target(how)
    if how == "in Python":
        monkeypatch.setattr(compiled_nodes, "compiled", None)
    if how == "without int8":
        monkeypatch.setattr(_native, "has_int8_products", lambda: False)
    if how == "low precision":
        monkeypatch.setattr(_native, "has_int8_products", lambda: False)
        torch.set_float32_matmul_precision("medium")


@pytest.fixture(autouse=True)
def restored_settings():
    threads, precision, target = torch.get_num_threads(), torch.get_float32_matmul_precision(), _native.target()
    yield
    _native.select_target(target)
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
