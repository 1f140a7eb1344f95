"""Compiled autograd nodes that cannot be loaded, as with another build of the same torch: those in Python are used."""

import subprocess
import sys

CODE = """
import sys, warnings

class Unloadable:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("fakequant._autograd_"):
            raise ImportError("undefined symbol: something of torch")

sys.meta_path.insert(0, Unloadable())
import torch, fakequant as fq
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    x = torch.tensor([0.26, 9.0], requires_grad=True)
    fq.fake_quantize(x, 0.1, 0, fq.QuantSpec(bits=4)).sum().backward()
print(x.grad.tolist())
print(fq.info().torch)
print([str(w.message) for w in said if w.category is RuntimeWarning])
"""


def test_python_nodes_and_a_warning():
    grad, torch, said = subprocess.check_output([sys.executable, "-c", CODE], text=True).splitlines()
    assert grad == "[1.0, 0.0]"
    assert torch.endswith("autograd nodes in Python")
    assert "cannot be loaded" in said
    assert "undefined symbol" in said
