"""Observers decide on the range of a tensor.

MinMax          the minimum and maximum of all tensors
MovingAverage   an average over recent tensors; for activations in training
Dynamic         the current tensor only; for weights, and for dynamic quantization of activations
Percentile      all tensors without their outermost values
Histogram       the least error over all tensors; for activations in calibration
MSE             the least error on the latest tensor; for weights, once before training
Entropy         the least loss of information over all tensors
Fixed           a range known in advance
"""

from fakequant.observers._entropy import Entropy as Entropy
from fakequant.observers._fixed import Fixed as Fixed
from fakequant.observers._histogram import Histogram as Histogram
from fakequant.observers._mse import MSE as MSE
from fakequant.observers._observer import Observer as Observer, State as State, from_dict as from_dict
from fakequant.observers._percentile import Percentile as Percentile
from fakequant.observers._ranks import ALONE as ALONE, Ranks as Ranks
from fakequant.observers._running import Dynamic as Dynamic, MinMax as MinMax, MovingAverage as MovingAverage
