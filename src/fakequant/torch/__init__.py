"""The torch front end: the same functions on tensors, differentiable, as real torch operators.

Nothing here has to be imported: `fakequant`'s functions find it when they are given a tensor. Import
it to have the operators `torch.ops.fakequant` before the first call.
"""

from fakequant.torch import library as library
from fakequant.torch.threads import lend_torchs_threads

lend_torchs_threads()
