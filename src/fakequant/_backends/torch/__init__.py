"""The functions of fakequant on torch tensors, differentiable.

Importing this package registers the operators `torch.ops.fakequant`.
"""

import torch

from fakequant._torch_releases import check_release

check_release(torch.__version__)  # before the imports below, which fail with old releases

from fakequant._backends.torch import grouped_linear as grouped_linear, operators as operators  # noqa: E402
from fakequant._backends.torch.scale_bytes import (  # noqa: E402
    decode_scales as decode_scales,
    encode_scales as encode_scales,
)
from fakequant._backends.torch.tensor_functions import (  # noqa: E402
    as_data as as_data,
    as_float32_array as as_float32_array,
    choose_qparams as choose_qparams,
    copy as copy,
    dequantize as dequantize,
    fake_quantize as fake_quantize,
    fake_quantize_backward as fake_quantize_backward,
    fake_quantize_dynamic as fake_quantize_dynamic,
    fake_quantize_learned as fake_quantize_learned,
    fake_quantize_learned_backward as fake_quantize_learned_backward,
    min_max as min_max,
    observe_fake_quantize as observe_fake_quantize,
    overwrite as overwrite,
    quantize as quantize,
    quantize_dynamic as quantize_dynamic,
    round_zero_point as round_zero_point,
    zero_outside as zero_outside,
)
from fakequant._backends.torch.tensor_torch_names import (  # noqa: E402
    fake_quantize_learnable_per_channel_affine as fake_quantize_learnable_per_channel_affine,
    fake_quantize_learnable_per_channel_affine_backward as fake_quantize_learnable_per_channel_affine_backward,
    fake_quantize_learnable_per_tensor_affine as fake_quantize_learnable_per_tensor_affine,
    fake_quantize_learnable_per_tensor_affine_backward as fake_quantize_learnable_per_tensor_affine_backward,
    fake_quantize_per_channel_affine as fake_quantize_per_channel_affine,
    fake_quantize_per_channel_affine_cachemask as fake_quantize_per_channel_affine_cachemask,
    fake_quantize_per_channel_affine_cachemask_backward as fake_quantize_per_channel_affine_cachemask_backward,
    fake_quantize_per_tensor_affine as fake_quantize_per_tensor_affine,
    fake_quantize_per_tensor_affine_cachemask as fake_quantize_per_tensor_affine_cachemask,
    fake_quantize_per_tensor_affine_cachemask_backward as fake_quantize_per_tensor_affine_cachemask_backward,
    fake_quantize_per_tensor_affine_cachemask_tensor_qparams as fake_quantize_per_tensor_affine_cachemask_tensor_qparams,  # noqa: E501
    fused_moving_avg_obs_fake_quant as fused_moving_avg_obs_fake_quant,
    fused_moving_avg_obs_fq_helper as fused_moving_avg_obs_fq_helper,
)
from fakequant._backends.torch.torch_threads import lend_torchs_threads  # noqa: E402

lend_torchs_threads()
