"""Post-training methods on models of transformers, timm and torchvision, with random weights.

Every method runs, or says of each layer why it does not change it. `make test` runs some models, `make zoo` and
`make test-all` all.
"""

import copy
import warnings
from functools import partial

import pytest
import torch

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits
from thoroughness import ALL
from vision_packages import find_vision_packages
from zoo_models import MODELS

find_vision_packages()

SOME = ("GPT-2", "Mixtral")
METHODS = {
    "correct_bias": fq.ptq.correct_bias,
    "adaround": partial(fq.ptq.adaround, iterations=20),
    "gptq": fq.ptq.gptq,
    "smooth": fq.ptq.smooth,
    "equalize": fq.ptq.equalize,
}


@pytest.fixture(autouse=True)
def one_thread(torch_on_one_thread):
    """One thread is fastest for small models."""


@pytest.fixture(scope="module", params=MODELS if ALL else SOME)
def prepared(request):
    """A calibrated model with 4-bit weights, and its example."""
    package, make = MODELS[request.param]
    pytest.importorskip(package)
    torch.manual_seed(0)
    model, example = make()
    with warnings.catch_warnings():
        # T5 computes the logarithm of 0, and calls the embedding that its halves share by other names.
        warnings.filterwarnings("ignore", ".*NaN or infinite", RuntimeWarning)
        warnings.filterwarnings("ignore", "No data reached", UserWarning)
        model = fq.prepare(model.eval(), fq.recipes.w4a8(first_last_bits=None), example)
        return fq.calibrate(model, [example], progress=False), example


@pytest.mark.parametrize("name", METHODS)
def test_method_runs_or_says_why_not(name, prepared):
    model, example = copy.deepcopy(prepared[0]), prepared[1]
    changes = METHODS[name](model, [example], progress=False)
    assert changes.layers
    for layer in changes.layers:
        if layer.reason is None and name in ("adaround", "gptq"):
            assert layer.after >= layer.before - 1e-3  # dB, of sums of squares
        assert layer.reason is None or layer.reason.strip()
    fq.convert(model)


@pytest.mark.parametrize("name", METHODS)
def test_model_is_unchanged_after_an_error(name, prepared):
    model, example = copy.deepcopy(prepared[0]), prepared[1]
    before = copy.deepcopy(model.state_dict())
    runs = 0

    def fail(module, args):
        nonlocal runs
        runs += 1
        if runs == 2:
            raise OSError("the disk is gone")

    model.register_forward_pre_hook(fail)
    with pytest.raises(OSError, match="the disk is gone"):
        METHODS[name](model, [example, example], progress=False)
    for key, value in model.state_dict().items():
        assert_same_bits(value, before[key])
