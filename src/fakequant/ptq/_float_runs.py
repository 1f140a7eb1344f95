"""Running a prepared model in float, and its data flow."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fakequant._prepare.data_flow import find_flow
from fakequant._prepare.flow_graph import FlowGraph
from fakequant._prepare.record_flow import record_flow
from fakequant._train.running import Batch
from fakequant.nn._model_quantizers import quantizers


@contextmanager
def in_float(model: nn.Module) -> Iterator[None]:
    """Context in which quantizers return their inputs and observe nothing."""
    switches = [(quantizer, quantizer.observing, quantizer.quantizing) for _, quantizer in quantizers(model)]
    try:
        for quantizer, observing, _ in switches:
            quantizer.quantizing = False
            if observing:
                quantizer.observing = False
        yield
    finally:
        for quantizer, observing, quantizing in switches:
            quantizer.quantizing = quantizing
            if observing and not quantizer.observing:
                quantizer.observing = True


def recorded_flow(model: nn.Module, example: Batch) -> FlowGraph:
    """Returns the flow graph of a prepared model, from a run on `example` in float."""
    with in_float(model):
        return record_flow(model, example)


def traced_flows(model: nn.Module) -> list[FlowGraph]:
    """Returns the flow graphs of a prepared model without running it. Raises ValueError if it cannot be traced."""
    flow = find_flow(model)
    if not flow.graphs:
        raise ValueError(f"The model cannot be traced: {flow.problem}.\nPass `data`: batches to run the model on.")
    return flow.graphs


def as_batches(data: Any) -> Iterable[Batch]:
    """Returns batches that can be iterated several times. Raises TypeError for anything but batches."""
    if isinstance(data, Tensor) and data.dim() > 0:
        return [data]
    if isinstance(data, (Mapping, str, Tensor)) or not isinstance(data, Iterable):
        raise TypeError(
            f"`data` must be batches, such as a DataLoader or a list of tensors, got {type(data).__name__}.\n"
            "Use [batch] if it is one batch."
        )
    return list(data) if iter(data) is data else data


def first_batch(batches: Iterable[Batch]) -> Batch:
    """Returns the first batch. Raises ValueError if there is none."""
    with torch.random.fork_rng(devices=[]):  # a DataLoader draws a seed whenever it is iterated
        for batch in batches:
            return batch
    raise ValueError("`data` has no batches.")
