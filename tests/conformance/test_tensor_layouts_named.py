"""Functions with torch's names raise torch's errors for sparse, MKL-DNN and nested tensors."""

import pytest

from fakequant import torch_ops
from torch_bridge import torch

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns that sparse and nested tensors are in beta

X = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
S, Z, ON = torch.full((2,), 0.1), torch.zeros(2, dtype=torch.int32), torch.ones(1)
LAYOUTS = {
    "sparse_coo": X.to_sparse,
    "sparse_csr": X.to_sparse_csr,
    "mkldnn": X.to_mkldnn,
    "nested": lambda: torch.nested.nested_tensor([X[0], X[1, :1]]),
    "jagged": lambda: torch.nested.nested_tensor([X[0], X[1, :1]], layout=torch.jagged),
}
FUNCTIONS = {
    "fake_quantize_per_tensor_affine": (0.1, 0, -8, 7),
    "fake_quantize_per_channel_affine": (S, Z, 0, -8, 7),
    "_fake_quantize_learnable_per_tensor_affine": (S[:1], S[:1], -8, 7),
    "_fake_quantize_learnable_per_channel_affine": (S, S, 0, -8, 7),
    "fused_moving_avg_obs_fake_quant": (ON, ON, S[:1], S[:1], S[:1], Z[:1], 0.01, 0, 255, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_sparse_mkldnn_and_nested_tensors_raise_torchs_errors(name, layout):
    x, arguments = LAYOUTS[layout](), FUNCTIONS[name]
    with pytest.raises(NotImplementedError) as expected:
        getattr(torch, name)(x, *arguments)
    with pytest.raises(NotImplementedError) as actual:
        getattr(torch_ops, name.lstrip("_"))(x, *arguments)
    assert str(actual.value) == str(expected.value)
