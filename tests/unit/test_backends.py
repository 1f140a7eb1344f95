"""Every backend implements the same functions, and `backend_of` chooses between them."""

import inspect

import numpy as np
import pytest

import fakequant as fq
from fakequant import _backends, functional, qparams, torch_names

torch = pytest.importorskip("torch")

BACKENDS = {"numpy": _backends.backend_of(np.zeros(1)), "torch": _backends.backend_of(torch.zeros(1))}
by_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
FUNCTIONS = {
    name: function
    for module in (functional, qparams, torch_names)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__
}


def test_public_module_exports_all_backend_functions():
    assert len(FUNCTIONS) == 27
    assert all(getattr(fq, name) is function for name, function in FUNCTIONS.items())


@by_backend
@pytest.mark.parametrize("name", FUNCTIONS)
def test_backend_function_has_the_signature_of_the_public_one(name, backend):
    public, own = (inspect.signature(f) for f in (FUNCTIONS[name], getattr(backend, name)))
    assert list(own.parameters) == list(public.parameters)
    assert [p.kind for p in own.parameters.values()] == [p.kind for p in public.parameters.values()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_only_dispatch_and_have_examples(name):
    function = FUNCTIONS[name]
    lines = inspect.getsource(function).split('"""')[-1].strip().splitlines()
    assert lines[0].startswith("return backend_of(")
    assert function.__doc__
    assert ">>>" in function.__doc__


@pytest.mark.parametrize(
    ("values", "library"),
    [
        ((np.zeros(1),), "numpy"),
        ((1.0,), "numpy"),
        (([1.0], 2), "numpy"),
        ((torch.zeros(1),), "torch"),
        ((0.0, torch.zeros(1)), "torch"),
        ((torch.nn.Parameter(torch.zeros(1)),), "torch"),
    ],
    ids=str,
)
def test_backend_of_chooses_the_library_of_its_arguments(values, library):
    assert _backends.backend_of(*values) is BACKENDS[library]
