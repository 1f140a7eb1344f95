"""Every backend implements the same functions, and `backend_of` chooses between them."""

import inspect

import numpy as np
import pytest

import fakequant as fq
from fakequant import _backends, functional, qparams, torch_ops

torch = pytest.importorskip("torch")

EXAMPLES = {"numpy": np.zeros(1), "torch": torch.zeros(1)}
by_library = pytest.mark.parametrize("example", EXAMPLES.values(), ids=EXAMPLES)
FUNCTIONS = {
    name: function
    for module in (functional, qparams, torch_ops)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if function.__module__ == module.__name__
}


def test_public_module_exports_all_backend_functions():
    assert len(FUNCTIONS) == 27
    places = {name: fq.torch_ops if hasattr(torch_ops, name) else fq for name in FUNCTIONS}
    assert all(getattr(places[name], name) is function for name, function in FUNCTIONS.items())


@by_library
@pytest.mark.parametrize("name", FUNCTIONS)
def test_backend_function_has_the_signature_of_the_public_one(name, example):
    """Some differ: the mask has a function of its own, the fused functions take one object with their arguments, and
    functions that only pass their arguments on do not name them."""
    chosen = _backends.torch_names_of(example) if hasattr(torch_ops, name) else _backends.backend_of(example)
    public, own = (inspect.signature(f) for f in (FUNCTIONS[name], getattr(chosen, name)))
    expected = [(p.name, p.kind) for p in public.parameters.values() if (name, p.name) != ("fake_quantize", "mask")]
    if name.startswith("fused"):
        expected = [(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("input", "arguments")]
    found = [(p.name, p.kind) for p in own.parameters.values()]
    assert found in (expected, [("arguments", inspect.Parameter.VAR_POSITIONAL)])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_only_dispatch_and_have_examples(name):
    function = FUNCTIONS[name]
    body = inspect.getsource(function).split('"""')[-1].strip()
    body = body.removeprefix("if isinstance(lo, Range):\n        lo, hi, spec = both_ends(lo, hi, spec)").strip()
    body = body.removeprefix("if mask is None:").strip()
    assert body.startswith(("return backend_of(", "return torch_names_of("))
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
    assert _backends.backend_of(*values) is _backends.backend_of(EXAMPLES[library])
    assert library in _backends.backend_of(*values).__name__
