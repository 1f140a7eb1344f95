"""The torch front end: the same functions on tensors, differentiable, as real torch operators.

Nothing here has to be imported: `fakequant`'s functions find it when they are given a tensor. Import
it to have the operators `torch.ops.fakequant` before the first call.
"""

import torch

from fakequant._torch_releases import check_release

check_release(torch.__version__)  # before anything asks torch for what an old one does not have

from fakequant._backends.torch import operators as operators  # noqa: E402
from fakequant._backends.torch.torch_threads import lend_torchs_threads  # noqa: E402

lend_torchs_threads()
