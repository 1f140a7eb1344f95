"""Observers: what range do the values of a tensor have?

MinMax          everything ever seen
MovingAverage   an average over the recent tensors; activations in training
Dynamic      the tensor at hand; weights, and activations quantized dynamically
Percentile      without the outermost values
Histogram       with the least error over everything seen; activations in calibration
MSE             with the least error on the latest tensor; weights, once
Entropy         with the least loss of information over everything seen
Fixed           known beforehand
"""

from fakequant._backends.torch.process_ranks import ALONE as ALONE, Ranks as Ranks
from fakequant.observers._dynamic import Dynamic as Dynamic
from fakequant.observers._entropy import Entropy as Entropy
from fakequant.observers._fixed import Fixed as Fixed
from fakequant.observers._histogram import Histogram as Histogram
from fakequant.observers._min_max import MinMax as MinMax
from fakequant.observers._moving_average import MovingAverage as MovingAverage
from fakequant.observers._mse import MSE as MSE
from fakequant.observers._observer import Observer as Observer, State as State, from_dict as from_dict
from fakequant.observers._percentile import Percentile as Percentile
