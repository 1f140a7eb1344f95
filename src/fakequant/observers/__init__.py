"""Observers: what range do the values of a tensor have?

MinMax          everything ever seen
MovingAverage   an average over the recent tensors; activations in training
Memoryless      the tensor at hand; weights, and activations quantized dynamically
Percentile      without the outermost values
Histogram       with the least error over everything seen; activations in calibration
MSE             with the least error on the latest tensor; weights, once
Entropy         with the least loss of information over everything seen
Fixed           known beforehand
"""

from fakequant.observers.base import Observer as Observer, State as State, from_dict as from_dict
from fakequant.observers.entropy import Entropy as Entropy
from fakequant.observers.fixed import Fixed as Fixed
from fakequant.observers.histogram import Histogram as Histogram
from fakequant.observers.memoryless import Memoryless as Memoryless
from fakequant.observers.min_max import MinMax as MinMax
from fakequant.observers.moving_average import MovingAverage as MovingAverage
from fakequant.observers.mse import MSE as MSE
from fakequant.observers.percentile import Percentile as Percentile
from fakequant.torch.ranks import ALONE as ALONE, Ranks as Ranks
