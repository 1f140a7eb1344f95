"""torch's own fake-quantize functions and operators, even if their public names have been rebound.

Programs may rebind torch's names to fakequant's functions, possibly before this module is imported. So the functions
here are taken from torch's private modules, not from its public ones.
"""

from fakequant._backends.torch.torch_private import OperatorNamespace, functions

fake_quantize_per_tensor_affine = functions.fake_quantize_per_tensor_affine
fake_quantize_per_channel_affine = functions.fake_quantize_per_channel_affine
fake_quantize_learnable_per_tensor_affine = functions._fake_quantize_learnable_per_tensor_affine
fake_quantize_learnable_per_channel_affine = functions._fake_quantize_learnable_per_channel_affine
fused_moving_avg_obs_fake_quant = functions.fused_moving_avg_obs_fake_quant

# A new namespace, without attributes that programs have set on `torch.ops.aten`.
_aten = OperatorNamespace("aten")
cachemask = _aten.fake_quantize_per_tensor_affine_cachemask
cachemask_tensor_qparams = _aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams
cachemask_backward = _aten.fake_quantize_per_tensor_affine_cachemask_backward
channel_cachemask = _aten.fake_quantize_per_channel_affine_cachemask
channel_cachemask_backward = _aten.fake_quantize_per_channel_affine_cachemask_backward
learnable_backward = _aten._fake_quantize_learnable_per_tensor_affine_backward
learnable_channel_backward = _aten._fake_quantize_learnable_per_channel_affine_backward
fused = _aten._fused_moving_avg_obs_fq_helper
