"""Every listed difference between torch releases exists and starts at the listed release."""

import numpy as np
import pytest

from aten_calls import FUNCTIONS, outcome, to_torch, torch_function
from fakequant import torch_ops
from releases import DIFFERENCES, RELEASE, matches


@pytest.mark.parametrize("what", DIFFERENCES)
def test_torch_differs_from_2_13_exactly_as_listed(what):
    difference = DIFFERENCES[what]
    for name in difference.functions:
        arguments = FUNCTIONS[name] | difference.example
        if isinstance(arguments["scale"], float):
            arguments["scale"] = np.array([arguments["scale"]])  # the overload with tensors
        ours = outcome(getattr(torch_ops, name), list(arguments.values()))
        torchs = outcome(torch_function(name), [to_torch(a) for a in arguments.values()])
        assert matches(ours, difference.before), (name, ours)
        assert matches(torchs, difference.since if difference.first <= RELEASE else difference.before), (name, torchs)
