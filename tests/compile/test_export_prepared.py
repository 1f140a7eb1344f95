"""Programs that `torch.export` makes from prepared models can be saved, loaded, run and decomposed."""

import copy
import io

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_bits
from thoroughness import ALL

torch = pytest.importorskip("torch")
nn = torch.nn
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's exporter warns about its own code

RECIPES = {
    "int8": fq.recipes.int8(),
    "int8_dynamic": fq.recipes.int8_dynamic(),
    "int4_weight_only": fq.recipes.int4_weight_only(8),
    "w4a8": fq.recipes.w4a8(),
    "lsq": fq.recipes.lsq(4),
    "fp8": fq.recipes.fp8(),
    "mxfp8": fq.recipes.mxfp8(),
    "nvfp4": fq.recipes.nvfp4(),
}


def saved_and_loaded(program):
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


# Observed, dynamic and learned scales, and scales of blocks; ranges that are frozen and not, and both ways to export.
# All recipes are compiled in test_compile_models.py.
WAYS = [("int8", False, False), ("int8_dynamic", True, False), ("nvfp4", True, False), ("lsq", True, True)]
if ALL:
    WAYS = [(recipe, frozen, False) for recipe in RECIPES for frozen in (False, True)]
    WAYS += [("int8", False, True), ("lsq", True, True)]


@pytest.mark.parametrize(("recipe", "frozen", "strict"), WAYS)
def test_a_model_exported_in_evaluation_has_eager_bits_and_mutates_no_buffers(recipe, frozen, strict):
    torch.manual_seed(0)
    x = torch.randn(5, 3, 6, 6)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))
    model = fq.calibrate(fq.prepare(model, RECIPES[recipe], x), [x], progress=False)
    if frozen:
        fq.nn.switch_quantizers(model, frozen=True)
    expected = copy.deepcopy(model.eval())(x).detach().numpy()
    program = torch.export.export(model, (x,), strict=strict)
    loaded = saved_and_loaded(program)
    assert_same_bits(expected, loaded.module()(x))
    decomposed = program.run_decompositions()
    assert_same_bits(expected, decomposed.module()(x))
    saved_and_loaded(decomposed)
    if recipe != "lsq":  # lsq corrects its parameters in place in every pass
        assert not program.graph_signature.buffers_to_mutate


@pytest.mark.parametrize("recipe", ["int8", "w4a8"])
def test_a_model_exported_in_training_is_saved_and_updates_its_ranges(recipe):
    torch.manual_seed(0)
    x = torch.randn(5, 8)
    model = fq.prepare(nn.Sequential(nn.Linear(8, 4)), RECIPES[recipe], x)
    model = fq.calibrate(model, [x], progress=False).train()
    eager = copy.deepcopy(model)
    program = saved_and_loaded(torch.export.export(model, (x,))).module()
    for k in (2.0, 3.0):
        assert_same_bits(eager(k * x), program(k * x))
    for name, value in eager.state_dict().items():
        assert_same_bits(value, program.state_dict()[name], name)
