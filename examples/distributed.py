"""Trains a quantized model on several processes, with DDP or FSDP and with checkpoints.

    torchrun --standalone --nproc-per-node 2 examples/distributed.py [--shard] [--checkpoint FOLDER]

Without torchrun it runs in one process.
"""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fakequant as fq

EPOCHS = 4


def start() -> torch.device:
    """Joins the process group and returns the device of this process."""
    device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", **alone)
    return device


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: fq.Schedule) -> dict:
    """Returns this rank's part of a checkpoint."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    return {"model": of_model, "optimizer": of_optimizer, "schedule": schedule.state_dict()}


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Prepares, calibrates and wraps the model, in this order, then creates the optimizer and trains as usual."""
    torch.manual_seed(0)  # the same weights, and therefore the same weight scales, on every rank
    points = torch.randn(512, 2)
    data = TensorDataset(points.to(device), (points > 0).long().matmul(torch.tensor([1, 2])).to(device))
    sampler = DistributedSampler(data, drop_last=True)  # the same number of batches on every rank
    loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    fq.prepare(model, fq.recipes.lsq(4), example=data[:1])
    fq.calibrate(model, loader, progress=False)  # each rank uses its part of the data
    if args.shard:
        for layer in (model[0], model[2], model[4]):
            fully_shard(layer)
    wrapped = fully_shard(model) if args.shard else DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(fq.nn.param_groups(wrapped, lr=1e-3), lr=1e-2)
    schedule = fq.Schedule(wrapped, freeze_ranges_at=len(loader) * (EPOCHS - 1))
    saved = sorted(args.checkpoint.glob("epoch*")) if args.checkpoint else []
    if saved:
        state = state_of(wrapped, optimizer, schedule)
        dcp.load(state, checkpoint_id=saved[-1])
        set_state_dict(wrapped, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        schedule.load_state_dict(state["schedule"])
    for epoch in range(schedule.steps // len(loader), EPOCHS):
        sampler.set_epoch(epoch)
        for x, label in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(wrapped(x), label)
            loss.backward()
            optimizer.step()
            schedule.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
        if args.checkpoint:
            dcp.save(state_of(wrapped, optimizer, schedule), checkpoint_id=args.checkpoint / f"epoch{epoch}")
    scales = torch.cat([q.scale.reshape(-1) for _, q in fq.nn.named_quantizers(wrapped)]).tolist()
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, scales)
    if dist.get_rank() == 0:
        same = "the same" if all(other == scales for other in everywhere) else "not the same"
        print(f"{len(scales)} scales, {same} on {len(everywhere)} ranks")


def main() -> None:
    """Reads the options, joins the process group, trains, and leaves the group."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", action="store_true", help="fully_shard instead of DistributedDataParallel")
    parser.add_argument("--checkpoint", type=Path, help="folder to save checkpoints to and to resume from")
    args = parser.parse_args()
    train(args, start())
    # Frees the wrapped model first. If it held the last reference to the group, the group would be destroyed at
    # interpreter exit, where its threads would wait for the interpreter and the interpreter for them.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
