"""`record_flow`: the flow graph of a model, seen while it runs on an example."""

import dataclasses
from collections import Counter
from contextlib import ExitStack
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from fakequant._backends.torch.torch_private import pytree
from fakequant._model.running import call_arguments, copied, evaluating
from fakequant._model.snapshot import unchanged
from fakequant._prepare.attach import is_prepared
from fakequant._prepare.flow_graph import Call, FlowGraph, Repeated, drop_dead_calls, find_layer_calls, is_leaf
from fakequant.nn._call_quantizers import CallQuantizers
from fakequant.nn._function_calls import is_counted
from fakequant.nn._model_quantizers import in_float
from fakequant.nn._operators import function_name
from fakequant.nn._quantizer import Quantizer


def record_flow(model: nn.Module, example: Any) -> FlowGraph:
    """Runs `model` on one batch, in evaluation mode and without gradients, and returns the calls that were made.

    Any Python code can be recorded. Buffers, modes and random numbers are as before afterwards. Quantizers of
    a prepared model do nothing during the run and are not recorded, so its modules compute what the float model's do.
    The example is a batch, as `calibrate` takes them.

    >>> graph = record_flow(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2))
    >>> [str(call) for call in graph.modules()]
    ['0', '1']
    """
    args, kwargs = copied(*call_arguments(model, example))
    recorder = _Recorder(model, _tensors((args, kwargs)))
    with ExitStack() as undo:
        undo.enter_context(torch.random.fork_rng(devices=[]))
        undo.enter_context(unchanged(model))
        undo.enter_context(evaluating(model))
        undo.enter_context(torch.no_grad())
        undo.enter_context(in_float(model))
        for path, module in model.named_modules():
            if is_prepared(model) and isinstance(module, (Quantizer, CallQuantizers)):
                continue
            # Hooks also keep torch's encoder layers from computing everything in one operator.
            undo.callback(module.register_forward_pre_hook(recorder.enter, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(recorder.leave, always_call=True).remove)
            recorder.paths.setdefault(module, path)
            if is_leaf(module) or isinstance(module, Quantizer):
                recorder.leaves.add(module)
            if isinstance(module, nn.TransformerEncoder):
                undo.callback(setattr, module, "use_nested_tensor", module.use_nested_tensor)
                module.use_nested_tensor = False
        with recorder:
            result = model(*args, **kwargs)
    kept = recorder.kept()
    del result  # not before: its tensors are kept, in whatever object the model returned them
    repeated = recorder.repeated()
    for call in recorder.calls:
        call.turn = call.turn if call.path in repeated else None
        call.returned_by = [path for path in call.returned_by if path not in repeated]
    graph = FlowGraph(recorder.calls, kept, recorder.counts, recorder.callees, repeated)
    find_layer_calls(model, graph)
    if recorder.sees_all:
        drop_dead_calls(graph, recorder.read)
    return graph


@dataclasses.dataclass
class _Frame:
    """A call of a module that has not returned yet."""

    path: str
    # The number of this call of the module.
    turn: int
    is_leaf: bool
    inputs: list[Call]
    input_shapes: list[tuple[int, ...]]
    # How often each function was called by the module's own code.
    numbers: Counter[str] = dataclasses.field(default_factory=Counter)


class _Recorder(TorchFunctionMode):
    """Sees every call of a function on tensors. `enter` and `leave` are hooks of all modules."""

    def __init__(self, model: nn.Module, inputs: list[Tensor]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.paths: dict[nn.Module, str] = {}
        self.leaves: set[nn.Module] = set()
        self.frames: list[_Frame] = []
        self.entered: Counter[str] = Counter()
        # The frames in which all calls of a module took place, the outermost first.
        self.enclosing: dict[str, list[_Frame]] = {}
        self.counts: dict[str, Counter[str]] = {}
        self.callees: dict[str, set[str]] = {}
        # What computed a tensor, and how often its memory had been changed by then.
        self.producers: Any = WeakIdKeyDictionary()
        for path, parameter in model.named_parameters(remove_duplicate=False):
            if parameter not in self.producers:
                self.producers[parameter] = Call("parameter", path), parameter._version
        # Tensors that no recorded call computed: inputs, buffers, other attributes, and constants.
        self.given: Any = WeakIdKeyDictionary()
        attributes = [value for module in model.modules() for value in vars(module).values()]
        self._give([*inputs, *model.buffers(), *(x for x in attributes if isinstance(x, Tensor))])
        # False if a tensor appears from nowhere: code that cannot be seen may have computed it from any other.
        self.sees_all = True
        # Calls whose results Python code reads, for example to decide what to do next.
        self.read: list[Call] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inside_leaf = bool(self.frames) and self.frames[-1].is_leaf
        path = self.paths[module]
        turn = self.entered[path]
        self.entered[path] += 1
        before = self.enclosing.get(path, self.frames)
        common = takewhile(lambda pair: pair[0] is pair[1], zip(before, self.frames, strict=False))
        self.enclosing[path] = [frame for frame, _ in common]
        if self.frames:
            self.callees.setdefault(self.frames[-1].path, set()).add(path)
        leaf = module in self.leaves or inside_leaf
        operands = _tensors((args, kwargs)) if leaf and not inside_leaf else []
        shapes = [tuple(x.shape) for x in operands]
        self.frames.append(_Frame(path, turn, leaf, [self.producer(x) for x in operands], shapes))

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        frame = self.frames.pop()
        if self.frames and self.frames[-1].is_leaf:
            return
        if not frame.is_leaf:
            known = self.counts.setdefault(frame.path, Counter())
            known |= frame.numbers
            if isinstance(result, Tensor):
                self.producer(result).returned_by.append(frame.path)
            return
        in_place = any(result is x for x in _tensors(args)) and bool(getattr(module, "inplace", False))
        call = Call("module", frame.path, inputs=frame.inputs, input_shapes=frame.input_shapes, in_place=in_place)
        call.turn = frame.turn
        self._add(call, _tensors(result))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.frames and self.frames[-1].is_leaf:
            return func(*args, **kwargs)
        if function_name(func) in _QUESTIONS:
            answer = func(*args, **kwargs)
            if not _tensors(answer):
                return answer
        # Before the call: it may change its operands.
        operands = [(x, self.producer(x)) for x in _tensors((args, kwargs))]
        versions = [_version(x) for x, _ in operands[:1]]
        result = func(*args, **kwargs)
        made = [x for x in _tensors(result) if x.is_floating_point()]
        self._give(_tensors(result) if not operands else [x for x in _tensors(result) if not x.is_floating_point()])
        if not self.frames or not is_counted(result):
            self.read += [source for _, source in operands]
            return result
        frame, name = self.frames[-1], function_name(func)
        number = frame.numbers[name]
        frame.numbers[name] += 1
        if operands:
            in_place = [_version(x) for x, _ in operands[:1]] != versions
            sources = [source for _, source in operands]
            shapes = [tuple(x.shape) for x, _ in operands]
            call = Call("function", frame.path, func, number, sources, in_place=in_place, input_shapes=shapes)
            call.turn, call.results = frame.turn, 1 if isinstance(result, Tensor) else len(result)
            self._add(call, made)
        return result

    def producer(self, x: Tensor) -> Call:
        """Returns the call that computed `x`, or a new input if it is unknown or `x` was changed through a view."""
        known: tuple[Call, int] | None = self.producers.get(x)
        if known is not None and known[1] == _version(x):
            return known[0]
        call = Call("input", "")
        self.sees_all &= known is None and x in self.given
        self.producers[x] = call, _version(x)
        return call

    def repeated(self) -> dict[str, Repeated]:
        """Returns the modules that were called several times."""
        return {
            path: Repeated(number, self.enclosing[path][-1].path if self.enclosing[path] else "")
            for path, number in self.entered.items()
            if number > 1
        }

    def _give(self, tensors: list[Tensor]) -> None:
        for x in tensors:
            self.given[x] = True

    def kept(self) -> list[Call]:
        """Returns the calls whose results still exist: the model returned them, or stored them somewhere."""
        alive = [call for call, _ in self.producers.values() if call.kind in ("module", "function")]
        return list(dict.fromkeys(alive))

    def _add(self, call: Call, results: list[Tensor]) -> None:
        call.shape = tuple(results[0].shape) if results else None
        for source in dict.fromkeys(call.inputs):
            source.users.append(call)
        self.calls.append(call)
        for x in results:
            self.producers[x] = call, _version(x)


# Functions whose results do not depend on the elements of a tensor, unless they are tensors. "get" reads a property,
# such as `shape` or `T`.
_QUESTIONS = {
    "get", "is_inference", "size", "dim", "ndimension", "len", "numel", "nelement", "stride", "is_floating_point",
    "is_complex", "is_contiguous", "element_size", "storage_offset", "type", "get_device",
}  # fmt: skip


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
