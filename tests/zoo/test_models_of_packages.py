"""Models of transformers, timm and torchvision, with random weights, through the whole flow from `prepare` to `verify`.

`make test` runs some of them, `make zoo` and `make test-all` all.
"""

import re

import pytest
import torch

import fakequant as fq
from fakequant._prepare.flow_graph import count_multiplications
from fakequant._prepare.record_flow import record_flow
from fakequant._runtimes import find
from thoroughness import ALL
from vision_packages import find_vision_packages
from zoo_models import MODELS

pytest.importorskip("onnxruntime")
find_vision_packages()

# ExecuTorch takes minutes for some models. `make test` checks it on small ones, in tests/diagnosis.
CHECKED = (
    [(name, target) for name in MODELS for target in ("openvino", "xnnpack", "litert")]
    if ALL
    else [("GPT-2", "openvino")]
)
# Functions that multiply two activations, as attention does. No layer computes these.
PRODUCTS = re.compile(r"(^|: )(r?matmul|bmm|baddbmm|scaled_dot_product_attention) \d+$")


@pytest.fixture(autouse=True)
def one_thread(torch_on_one_thread):
    """One thread is fastest for small models."""


def made(entry):
    package, make = entry
    pytest.importorskip(package)
    torch.manual_seed(0)
    return make()


def multiplications_of_layers(model, example):
    counts = count_multiplications(model, record_flow(model.eval(), example))
    return sum(number for call, number in counts.items() if not PRODUCTS.search(call))


@pytest.mark.parametrize("name", MODELS if ALL else ["Llama"])
def test_layers_of_a_model_run_in_integers(name):
    model, example = made(MODELS[name])
    found = fq.check(model, example)
    assert found.ok, str(found)
    assert found.float_kernels == {}
    assert found.integer_multiplications >= 0.95 * multiplications_of_layers(model, example), str(found)


@pytest.mark.parametrize(("name", "target"), CHECKED)
def test_check_agrees_with_export_and_verify(name, target, tmp_path):
    runtime = find(target).runtime
    pytest.importorskip(runtime.package)
    model, example = made(MODELS[name])
    config = fq.recipes.int8(target=target)
    found = fq.check(model, example, config)
    prepared = fq.calibrate(fq.prepare(model.eval(), config, example), [example], progress=False)
    path = tmp_path / f"m{runtime.suffix}"
    try:
        getattr(fq, runtime.exporter)(prepared, path, example)
        result = fq.verify(prepared, path, [example])
        seen = result.ok, result.integer_multiplications
    except (ValueError, TypeError):
        seen = False, 0
    assert (found.ok, found.integer_multiplications) == seen, str(found)
