"""Models on two ranks are saved, loaded and continued."""

import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

import fakequant as fq
from fakequant.testing.assertions import assert_same_state
from rank_models import RECIPES, WRAPPERS, Residual, ddp, images, of_the_model, residual, state_of, train
from straight_through import torch
from thoroughness import ALL, only_in_test_all
from two_ranks import RANKS, Checks, dist

fqnn = pytest.importorskip("fakequant.nn")
nn = torch.nn
F = nn.functional

CHECKS = check = Checks()
pytestmark = pytest.mark.usefixtures("torch_on_one_thread")  # as on the ranks


@check("int8", recipe="int8")
@check("int8_dynamic", recipe="int8_dynamic")
@check("lsq", recipe="lsq")
def first_rank_alone(seat, recipe):
    """Rank 0 evaluates, computes health and saves, as in many training scripts; then both continue."""
    model = residual(seat, RECIPES[recipe]())
    wrapped = ddp(model)
    optimizer = torch.optim.SGD(fqnn.param_groups(model), lr=0.05)
    train(seat, wrapped, images(2), optimizer, F.cross_entropy)
    found = None
    if seat.rank == 0:
        x = images()[0][0]
        model.eval()
        found = {"y": model(x).detach(), "health": fq.health(model, [x]).to_dict(), "state": state_of(model)}
        model.train()
    return {"found": found, "state": train(seat, wrapped, images(2), optimizer, F.cross_entropy)}


@contextmanager
def shared_folder(seat):
    names = [tempfile.mkdtemp() if seat.rank == 0 else None]
    dist.broadcast_object_list(names)
    try:
        yield names[0]
    finally:
        dist.barrier()
        if seat.rank == 0:
            shutil.rmtree(names[0])


def adam(model):
    return torch.optim.AdamW(fqnn.param_groups(model, lr=1e-3), lr=1e-2)


def sharded(seat, recipe, wrapper):
    model = WRAPPERS[wrapper](residual(seat, RECIPES[recipe]()))
    return model, adam(model)


def distributed_checkpoint(seat, recipe, wrapper):
    """Saves in the middle of training and continues with a newly prepared and sharded model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )

    before, after = images()[:2], images()[2:]
    model, optimizer = sharded(seat, recipe, wrapper)
    train(seat, model, before, optimizer, F.cross_entropy)
    with shared_folder(seat) as folder:
        states = get_state_dict(model, optimizer)
        dcp.save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=folder)
        one_file = None
        if seat.rank == 0:
            dcp_to_torch_save(folder, f"{folder}/all.pt")
            one_file = torch.load(f"{folder}/all.pt")["model"]
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        full = {name: value.clone() for name, value in full.items()}
        saved = state_of(model)
        dist.barrier()
        expected = train(seat, model, after, optimizer, F.cross_entropy)

        model, optimizer = sharded(seat, recipe, wrapper)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    loaded = state_of(model)
    continued = train(seat, model, after, optimizer, F.cross_entropy)
    return {
        "saved": saved,
        "loaded": loaded,
        "expected": expected,
        "continued": continued,
        "full": full,
        "one file": one_file,
    }


for _recipe in ("int8", "lsq", "int4_weight_only") if ALL else ("int8", "lsq"):
    check(_recipe, "fsdp", recipe=_recipe, wrapper="fsdp")(distributed_checkpoint)
if ALL:
    check("lsq", "ddp", recipe="lsq", wrapper="ddp")(distributed_checkpoint)


def frozen_learned_scales(seat, wrapper):
    """Momentum keeps moving the parameters, but the scales in use, which are saved, stay."""
    model, optimizer = sharded(seat, "lsq", wrapper)
    train(seat, model, images(2), optimizer, F.cross_entropy)
    fqnn.switch_quantizers(model, frozen=True)
    before = {path: q.scale.clone() for path, q in fqnn.named_quantizers(model)}
    state = train(seat, model, images(2), optimizer, F.cross_entropy)
    fresh = residual(seat, RECIPES["lsq"]())
    fresh.load_state_dict(state)
    return {
        "before": {path.removeprefix("module."): value for path, value in before.items()},
        "after": {path.removeprefix("module."): q.scale.clone() for path, q in fqnn.named_quantizers(model)},
        "loaded": {path: q.scale.clone() for path, q in fqnn.named_quantizers(fresh)},
    }


for _wrapper in ("ddp", "fsdp") if ALL else ("fsdp",):
    check(_wrapper, wrapper=_wrapper)(frozen_learned_scales)


@CHECKS.names(first_rank_alone)
def test_a_rank_can_evaluate_and_save_a_model_without_the_other(ranks, name):
    first, second = ranks(name)
    assert second["found"] is None
    assert_same_state(of_the_model(first["state"]), of_the_model(second["state"]))


@CHECKS.names(first_rank_alone)
def test_the_state_of_a_ddp_model_loads_strictly_into_a_single_process_model(ranks, name):
    found = ranks(name)[0]["found"]
    model = fq.prepare(Residual(), RECIPES[CHECKS[name].keywords["recipe"]](), images()[0][0])
    model.load_state_dict(found["state"], strict=True)
    assert_same_state({"y": found["y"]}, {"y": model.eval()(images()[0][0])})
    assert_same_state(found["state"], state_of(model))


@CHECKS.names(distributed_checkpoint)
def test_training_continues_from_a_distributed_checkpoint_with_the_same_bits(ranks, name):
    first, second = ranks(name)
    for part in (first, second):
        for before, after in (("saved", "loaded"), ("expected", "continued")):
            assert_same_state(of_the_model(part[before]), of_the_model(part[after]))
    assert_same_state(of_the_model(first["continued"]), of_the_model(second["continued"]))


@CHECKS.names(distributed_checkpoint)
def test_a_distributed_checkpoint_loads_into_a_single_process_model(ranks, name):
    first, _ = ranks(name)
    for state in (first["full"], first["one file"]):
        model = fq.prepare(Residual(), RECIPES[CHECKS[name].keywords["recipe"]](), images()[0][0])
        model.load_state_dict(state, strict=True)
        assert_same_state(of_the_model(first["saved"]), of_the_model(state_of(model)))


@CHECKS.names(frozen_learned_scales)
def test_frozen_learned_scales_are_saved_as_used_despite_optimizer_momentum(ranks, name):
    for part in ranks(name):
        assert_same_state(part["before"], part["after"])
        assert_same_state(part["before"], part["loaded"])


# --- the example ----------------------------------------------------------------------------------

EXAMPLE = Path(__file__).parents[2] / "examples" / "distributed.py"


@only_in_test_all
def test_the_distributed_example_runs_with_torchrun(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [*torchrun, EXAMPLE, "--shard", "--checkpoint", tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "71 scales, the same on 2 ranks"
