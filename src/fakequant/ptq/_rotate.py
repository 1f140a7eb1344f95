"""`rotate`: rotates the residual stream and the values of attention, which takes outliers away (QuaRot, SpinQuant)."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fakequant._backends.torch.torch_private import TorchDispatchMode, pytree
from fakequant._model.running import Batch, call_arguments, check_module, copied, describing_call, evaluating
from fakequant._model.shelf import Shelf
from fakequant._model.snapshot import unchanged
from fakequant._paired_models.calls import Args, Kwargs, Result, first_tensor, float_tensors, watching
from fakequant._prepare.attach import is_prepared
from fakequant._util.text import listed
from fakequant.nn._layers import Linear, TransposedLinear
from fakequant.nn._quantized_layer import kind_of
from fakequant.ptq._channels import by_channel, parameters_of, reason_against_layer
from fakequant.ptq._layer_changes import Changes, LayerChange, check_switch
from fakequant.ptq._orthogonal import orthogonal

# By how much the outputs may change, relative to their size: rounding errors of the weights and of all layers. Norms of
# transformers compute in float32 whatever the type of the model.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
# Models of these types are rotated in float32: their own rounding errors would hide what is added to the stream.
_SHORT = (torch.float16, torch.bfloat16)
# Layers whose outputs are added to the residual stream at once.
_TOGETHER = 3
_FIX = "Rotate only models whose blocks compute x + f(norm(x)), with linear layers at both ends of f."


@torch.no_grad()
def rotate(model: nn.Module, example: Batch, *, residual: bool = True, heads: bool = True, seed: int = 0) -> Changes:
    """Rotates the residual stream of a float transformer, and the values of its attention, in place.

        x' = x q                the residual stream            q is orthogonal, so |x'| = |x|
        w' = w diag(g) q        layers after a norm of weight g, which becomes 1
        w' = q^T w              layers whose outputs are added to the stream, and embeddings
        w' = q^T w,  w' = w q   values and outputs of attention, with one q for all heads

    A few channels of large values make the steps of a quantizer large for all others. A Hadamard matrix spreads each
    value over all channels, so the tensors that are quantized have no outliers. RMSNorm without a weight commutes with
    q. LayerNorm does too when the layers before it take out the mean; it is replaced by `nn.RMSNorm`.

    The model computes the same as before, up to rounding, which is checked on the example. All rotations are folded
    into weights: nothing runs with the model that did not before. Inputs of layers after an activation function, such
    as `down_proj`, could only be rotated at run time, which no target does, so they stay as they are.

    A transformers model with LayerNorm, such as GPT-2, is another model than its class afterwards: its norms are
    `nn.RMSNorm`, and layers after them have biases. `from_pretrained` and engines for language models would make the
    old norms, so checkpoints and exports without a graph cannot hold it. Pickle it, or export it as a graph.

    Call it before `prepare`, so that ranges are those of the rotated model. The blocks must compute x + f(norm(x)), as
    Llama, Mistral, Qwen and GPT-2 do, and the stream must start with embeddings. The example must reach all layers.
    Values are rotated in attention that has linear layers `v_proj` and `o_proj`, and `head_dim`. An output layer that
    shares its weight with an embedding gets its own. Models in float16 and bfloat16 are rotated in float32, and their
    weights are rounded once at the end.

    Args:
        model: A float model.
        example: A batch, as for `fakequant.prepare`. It shows how data flows.
        residual: Whether to rotate the residual stream (R1 of SpinQuant).
        heads: Whether to rotate values (R2 of SpinQuant).
        seed: Of the random signs of the Hadamard matrices. Sizes without such a matrix get a random orthogonal one.

    Returns:
        A row per linear layer and embedding: the largest magnitude of its input on the example, over the root mean
        square.

    >>> import fakequant as fq
    >>> class Block(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.norm, self.up, self.down = nn.RMSNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
    ...     def forward(self, x):
    ...         return x + self.down(self.up(self.norm(x)).relu())
    >>> model = nn.Sequential(nn.Embedding(10, 8), Block(), Block(), nn.RMSNorm(8), nn.Linear(8, 10)).eval()
    >>> with torch.no_grad():
    ...     _ = model[0].weight[:, 3].mul_(100)  # an outlier in every row
    >>> tokens = torch.arange(10)[None]
    >>> expected = model(tokens)
    >>> changes = fq.ptq.rotate(model, tokens)
    >>> changes.layers[1].path, changes.layers[1].after < changes.layers[1].before
    ('1.up', True)
    >>> torch.allclose(model(tokens), expected, atol=1e-4)
    True
    """
    _check(model, residual, heads, seed)
    with ExitStack() as undo:
        undo.enter_context(evaluating(model))
        added = undo.enter_context(_in_float32(model))
        stream = _watched(model, example)
        with _Changing(model, added) as changing:
            pairs = [pair for pair in _value_layers(model) if {*pair[:2]} <= {*stream.linear}] if heads else []
            if residual:
                _rotate_stream(model, _find_stream(stream), changing, seed)
            for values, outputs, size in pairs:
                _rotate_heads(model, values, outputs, size, changing, seed + 1)
            if heads and not residual and not pairs:
                raise ValueError("No attention of the model has linear layers `v_proj` and `o_proj`, and `head_dim`.")
            after = _watched(model, example)
            _check_same(model, stream.outputs, after.outputs)
    changed = {path for values, outputs, _ in pairs for path in (values, outputs)} | changing.paths
    reasons = {path: _reason(residual) for path in stream.linear if path not in changed}
    rows = [
        LayerChange(
            path,
            type(model.get_submodule(path)).__name__,
            stream.peaks.get(path),
            after.peaks.get(path),
            reasons.get(path),
        )
        for path in stream.linear
    ]
    notes = ["Inputs of layers after an activation function are as before: they would have to be rotated at run time."]
    if heads and not pairs:
        notes.append("Values are not rotated: no attention has linear layers `v_proj` and `o_proj`, and `head_dim`.")
    notes += [f"{path} no longer shares its weight with an embedding." for path in changing.untied]
    if changing.remade and hasattr(model, "from_pretrained"):
        notes.append(
            f"{type(model).__name__} makes other modules than the model has now ({listed(list(changing.remade))}), so "
            "from_pretrained cannot load it, and exports without a graph cannot hold it: pickle it, or export it as a "
            "graph."
        )
    return Changes("rotate", "input peak", rows, " ".join(notes))


def _reason(residual: bool) -> str:
    return "it is not next to the residual stream" if residual else "the residual stream is not rotated"


def _check(model: Any, residual: Any, heads: Any, seed: Any) -> None:
    check_module(model)
    check_switch("residual", residual)
    check_switch("heads", heads)
    if not residual and not heads:
        raise ValueError("Nothing to rotate: `residual` and `heads` are both False.")
    if type(seed) is not int:
        raise TypeError(f"`seed` must be an integer, got {seed!r}.")
    if is_prepared(model) or any(getattr(m, "_fakequant", None) is not None for m in model.modules()):
        raise ValueError(
            "The model is prepared already, and its ranges were observed before the rotation.\n"
            "Use rotate(model, example) first, and then fakequant.prepare and calibrate. `unprepare` undoes prepare."
        )


# --- how data flows on the example ------------------------------------------------------------------


class _Watched(NamedTuple):
    """What one run of the model showed."""

    # The norms in the order of their calls, with a copy of their input and their output.
    norms: list[tuple[str, Tensor, Tensor]]
    # The calls of linear layers in order: the path, how many norms ran before, the input and a copy of the output.
    calls: list[tuple[str, int, Tensor, Tensor]]
    # Embeddings that were called, by path, and their sizes.
    embeddings: dict[str, int]
    # Linear layers and embeddings in order.
    linear: list[str]
    # max |x| / rms(x) of the inputs of linear layers.
    peaks: dict[str, float]
    outputs: list[Tensor]
    # The addresses of the tensors that operations read.
    read: set[int]
    model: nn.Module


class _Reads(TorchDispatchMode):
    """Keeps the addresses of all tensors that operations read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.addresses: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in pytree.tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.layout == torch.strided:
                self.addresses.add(_address(x))
        return func(*args, **(kwargs or {}))


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """Context in which parameters and buffers of 16 bits are in float32. Parameters keep their new values, rounded.

    Yields a list for new parameters, each with the parameter whose type it gets at the end.
    """
    added: list[tuple[nn.Parameter, Tensor]] = []
    with ExitStack() as undo:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.dtype in _SHORT:
                    undo.callback(module._buffers.__setitem__, name, buffer)
                    module._buffers[name] = buffer.float()
        short = [(p, p.data) for p in model.parameters() if p.dtype in _SHORT]
        for p, data in short:
            undo.callback(setattr, p, "data", data)
            p.data = data.float()
        yield added
        types = {id(p): data.dtype for p, data in short}
        for p, like in added:  # which may be new itself
            if id(like) in types:
                types[id(p)] = types[id(like)]
        new = [(p, types[id(p)]) for p, _ in added if id(p) in types]
        for p, dtype in [*((p, data.dtype) for p, data in short), *new]:
            if p.isfinite().all() and not p.to(dtype).isfinite().all():
                raise ValueError(f"A rotated weight is too large for {dtype}.\nUse model.to(torch.bfloat16) first.")
        for p, data in short:
            data.copy_(p)
        for p, dtype in new:
            p.data = p.data.to(dtype)


def _watched(model: nn.Module, example: Batch) -> _Watched:
    """Runs the model on the example, without changing it."""
    norms: list[tuple[str, Tensor, Tensor]] = []
    calls: list[tuple[str, int, Tensor, Tensor]] = []
    embeddings: dict[str, int] = {}
    order: dict[str, None] = {}
    peaks: dict[str, float] = {}
    inputs: dict[str, Tensor] = {}

    def look(path: str, args: Args, kwargs: Kwargs, result: Result) -> None:
        module, y = modules[path], first_tensor(result)
        if y is None:
            return
        if isinstance(module, nn.Embedding):
            embeddings[path] = module.embedding_dim
            order[path] = None
        elif _is_linear(module):
            x = first_tensor((*args, *kwargs.values()))
            if x is not None:
                order[path] = None
                peaks[path] = max(peaks.get(path, 0.0), _peak(x))
                calls.append((path, len(norms), x, y.clone()))
        elif path in inputs:
            norms.append((path, inputs.pop(path), y))

    def before(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Args, kwargs: Kwargs) -> None:
            x = first_tensor((*args, *kwargs.values()))
            if x is not None:
                inputs[path] = x.clone()  # which later code may change in place

        return hook

    modules = {p: m for p, m in model.named_modules() if isinstance(m, nn.Embedding) or _is_linear(m) or _is_norm(m)}
    args, kwargs = copied(*call_arguments(model, example, "`example`"))
    # The model is in float32, see `_in_float32`.
    args, kwargs = pytree.tree_map(
        lambda x: x.float() if isinstance(x, Tensor) and x.dtype in _SHORT else x, (args, kwargs)
    )
    with ExitStack() as undo:
        undo.enter_context(unchanged(model))
        undo.enter_context(torch.random.fork_rng(devices=[]))
        for path, module in modules.items():
            if _is_norm(module):
                undo.callback(module.register_forward_pre_hook(before(path), with_kwargs=True).remove)
        undo.enter_context(watching(modules, look))
        undo.enter_context(describing_call(model, example, "`example`"))
        reads = undo.enter_context(_Reads())
        outputs = [y.clone() for y in float_tensors(model(*args, **kwargs))]
    return _Watched(norms, calls, embeddings, list(order), peaks, outputs, reads.addresses, model)


def _peak(x: Tensor) -> float:
    x = x.detach().double()
    return float(x.abs().max() / x.square().mean().sqrt().clamp(min=1e-300)) if x.numel() else 0.0


def _is_linear(module: nn.Module) -> bool:
    kind = kind_of(module)
    return kind is not None and issubclass(kind, (Linear, TransposedLinear)) and reason_against_layer(module) is None


def _is_norm(module: nn.Module) -> bool:
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    is_norm = isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or type(module).__name__.endswith("RMSNorm")
    return is_norm and weight is not None and weight.dim() == 1 and (bias is None or bias.shape == weight.shape)


class _Stream(NamedTuple):
    """The residual stream of a model: what reads it and what writes to it.

    Attributes:
        width: The number of channels.
        readers: The linear layers after each norm, by the path of the norm.
        writers: The linear layers whose outputs are added to it.
        embeddings: The embeddings that start it.
        parameters: Other parameters that start it, such as positions.
        forms: How each norm computes, by path.
    """

    width: int
    readers: dict[str, list[str]]
    writers: list[str]
    embeddings: list[str]
    parameters: list[str]
    forms: dict[str, str]


def _find_stream(seen: _Watched) -> _Stream:
    """Returns the residual stream. Raises ValueError if the model has none that can be rotated."""
    model = seen.model
    found: dict[int, list[str]] = {}
    for layer, ran, x, _ in seen.calls:
        number = _source(x, seen.norms[:ran])
        if number is None:
            continue
        path, _, y = seen.norms[number]
        if x.shape[-1] != y.shape[-1]:
            raise ValueError(
                f"{layer} reads {x.shape[-1]} of the {y.shape[-1]} channels of {path}, which are mixed.\n{_FIX}"
            )
        found.setdefault(number, []).append(layer)
    places = sorted(found)
    readers: dict[str, list[str]] = {}
    for number in places:
        path = seen.norms[number][0]
        readers[path] = list(dict.fromkeys([*readers.get(path, []), *found[number]]))
    widths = {len(_weight_of(model, path)) for path in readers}
    if not readers or len(widths) != 1:
        raise ValueError(f"The model has no residual stream that is read by a norm and linear layers.\n{_FIX}")
    width = widths.pop()
    _check_reached(seen, width)
    forms = {seen.norms[n][0]: _form(model.get_submodule(seen.norms[n][0]), *seen.norms[n][1:]) for n in places}
    writers: dict[str, None] = {}
    silent: dict[str, None] = {}
    for one, other in pairwise(places):
        (path, x, _), (later, y, _) = seen.norms[one], seen.norms[other]
        between = [(layer, out) for layer, n, _, out in seen.calls if one < n <= other and out.numel() == x.numel()]
        added = _added(x, y, between)
        if added is None:
            raise ValueError(
                f"The residual stream is not known between {path} and {later}: no outputs of linear layers are what is "
                f"added to it.\n{_FIX}"
            )
        writers.update(dict.fromkeys(added))
        silent.update(dict.fromkeys(layer for layer, out in between if not out.any()))
    # A layer of zeros adds nothing on any input, and is the same after the rotation.
    unknown = [path for path in silent if path not in writers and any(p.any() for p in _parameters_at(model, path))]
    if unknown:
        raise ValueError(
            f"The outputs of {listed(unknown)} are 0 on the example, so it does not show whether they are added to the "
            "residual stream.\nUse an example with more data."
        )
    known = {id(p) for p in _parameters_of_parts(model)}
    parameters = [
        name
        for name, p in model.named_parameters()
        if id(p) not in known and p.dim() > 0 and p.shape[-1] == width and p.is_floating_point()
    ]
    embeddings = [path for path, size in seen.embeddings.items() if size == width]
    _check_uses(model, {**dict.fromkeys(writers), **dict.fromkeys(p for own in readers.values() for p in own)})
    return _Stream(width, readers, list(writers), embeddings, parameters, forms)


def _weight_of(model: nn.Module, path: str) -> Tensor:
    weight: Tensor = model.get_submodule(path)._parameters["weight"]  # type: ignore[assignment]
    return weight


def _parameters_of_parts(model: nn.Module) -> Iterator[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, nn.Embedding) or _is_linear(module) or _is_norm(module):
            yield from module.parameters(recurse=False)


def _parameters_at(model: nn.Module, path: str) -> Iterator[nn.Parameter]:
    return model.get_submodule(path).parameters(recurse=False)


def _check_reached(seen: _Watched, width: int) -> None:
    """Raises ValueError if the example does not show how a parameter with the width of the stream is used."""
    missed = {
        name: None
        for name, p in seen.model.named_parameters()
        if p.is_floating_point() and width in p.shape and _address(p) not in seen.read
    }
    called = {id(_weight_of(seen.model, path)) for path in seen.embeddings}
    for path, module in seen.model.named_modules():
        # One that shares its weight with an output layer only.
        if isinstance(module, nn.Embedding) and module.embedding_dim == width and id(module.weight) not in called:
            missed[f"{path}.weight"] = None
    if missed:
        raise ValueError(
            f"The example does not reach {listed(list(missed))}, so it does not show whether they belong to the "
            "residual stream.\nUse an example that does, with all optional inputs, or delete what is not needed."
        )


def _source(x: Tensor, norms: list[tuple[str, Tensor, Tensor]]) -> int | None:
    """Returns the number of the last norm whose output, or a part of it, is `x`, or else of the last with a copy."""
    numbers = range(len(norms) - 1, -1, -1)
    shared = next((n for n in numbers if _address(norms[n][2]) == _address(x)), None)
    return next((n for n in numbers if _is_copy(x, norms[n][2])), None) if shared is None else shared


def _is_copy(x: Tensor, y: Tensor) -> bool:
    return x.numel() == y.numel() and x.shape[-1] == y.shape[-1] and torch.equal(x.reshape(-1), y.reshape(-1))


def _added(x: Tensor, y: Tensor, candidates: list[tuple[str, Tensor]]) -> tuple[str, ...] | None:
    """Returns the layers whose outputs make `y` of `x`: the fewest, and more as long as one halves what is left."""
    if x.shape != y.shape:
        return None
    if torch.equal(x, y):
        return ()
    wanted, limit = (y - x).flatten().double(), 16 * torch.finfo(x.dtype).eps * float(y.double().norm())

    def rest(chosen: tuple[int, ...]) -> float:
        return float((wanted - sum(candidates[n][1].flatten().double() for n in chosen)).norm())

    best, chosen = math.inf, tuple[int, ...]()
    for number in range(1, _TOGETHER + 1):
        best, chosen = min(((rest(c), c) for c in combinations(range(len(candidates)), number)), default=(best, chosen))
        if best <= limit:
            break
    else:
        return None
    while True:
        more = [(*chosen, n) for n in range(len(candidates)) if n not in chosen]
        less, longer = min(((rest(c), c) for c in more), default=(best, chosen))
        if not less < best / 2:
            return tuple(candidates[n][0] for n in chosen)
        best, chosen = less, longer


def _form(norm: nn.Module, x: Tensor, y: Tensor) -> str:
    """Returns how a norm computes `y`: "mean" is LayerNorm, "weight" RMSNorm, "1 + weight" RMSNorm as Gemma has it."""
    x, y = x.double(), y.double()
    weight, bias = (None if p is None else p.double() for p in (norm._parameters.get(n) for n in ("weight", "bias")))
    assert weight is not None
    shift = 0.0 if bias is None else bias
    eps = _eps(norm, x)
    centered = x - x.mean(-1, keepdim=True)
    found = {
        "weight": x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + shift,
        "1 + weight": x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight) + shift,
        "mean": centered * (centered.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + shift,
    }
    least = min(found, key=lambda name: float((found[name] - y).norm()))
    if float((found[least] - y).norm()) > 0.02 * float(y.norm()):
        raise ValueError(f"{type(norm).__name__} computes something else than RMSNorm or LayerNorm.\n{_FIX}")
    return least


def _eps(norm: nn.Module, x: Tensor) -> float:
    found = next((v for n in ("eps", "variance_epsilon") if (v := getattr(norm, n, None)) is not None), None)
    return torch.finfo(norm._parameters["weight"].dtype).eps if found is None else float(found)  # type: ignore[union-attr]


def _check_uses(model: nn.Module, layers: dict[str, None]) -> None:
    """Raises ValueError if a weight is also used by another layer. Embeddings may share it, see `_Changing.untie`."""
    for path in layers:
        weight = model.get_submodule(path)._parameters["weight"]
        others = [p for p, m in model.named_modules() for w in m._parameters.values() if w is weight and p != path]
        if any(not isinstance(model.get_submodule(other), nn.Embedding) for other in others):
            raise ValueError(f"{path} shares its weight with {others[0]}, which needs another one after the rotation.")


def _value_layers(model: nn.Module) -> Iterator[tuple[str, str, int]]:
    """Yields the layers of values and outputs of each attention, and the size of its heads."""
    for path, module in model.named_modules():
        values, outputs, size = (getattr(module, name, None) for name in ("v_proj", "o_proj", "head_dim"))
        if type(size) is int and isinstance(values, nn.Module) and isinstance(outputs, nn.Module):
            fits = _is_linear(values) and _is_linear(outputs)
            if fits and by_channel(values).shape[1] % size == 0 and by_channel(outputs).shape[2] % size == 0:
                prefix = f"{path}." if path else ""
                yield f"{prefix}v_proj", f"{prefix}o_proj", size


# --- changing weights ---------------------------------------------------------------------------------


class _Matrix:
    """The weight of shape (outputs, inputs) and the bias of a linear layer."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight, bias


class _Changing:
    """Changes to a model, which are undone if the context raises."""

    def __init__(self, model: nn.Module, added: list[tuple[nn.Parameter, Tensor]]) -> None:
        self.model = model
        self.paths: set[str] = set()
        # Modules that are of another class than before, or have a parameter more.
        self.remade: dict[str, None] = {}
        # New parameters, each with one whose type it has.
        self._added = added
        self.untied: list[str] = []
        self._undo = ExitStack()
        self._shelf = Shelf()
        self._saved: set[int] = set()

    def __enter__(self) -> "_Changing":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            with torch.no_grad():
                self._undo.close()
        self._shelf.close()

    def save(self, parameter: Tensor) -> Tensor:
        """Keeps the values of a parameter, and returns it."""
        if id(parameter) not in self._saved:
            self._saved.add(id(parameter))
            take = self._shelf.put(parameter)
            self._undo.callback(lambda: parameter.copy_(take()))
        return parameter

    def set(self, module: nn.Module, name: str, value: Tensor, like: Tensor) -> None:
        """Gives a module a new parameter."""
        parameter = nn.Parameter(value.to(like), requires_grad=like.requires_grad)
        self._added.append((parameter, like))
        self._undo.callback(module._parameters.__setitem__, name, module._parameters.get(name))
        module._parameters[name] = parameter

    def replace(self, path: str, module: nn.Module, like: Tensor) -> None:
        """Replaces a module."""
        self.remade[path] = None
        self._added += [(p, like) for p in module.parameters()]
        parent, _, name = path.rpartition(".")
        children = self.model.get_submodule(parent)._modules
        self._undo.callback(children.__setitem__, name, children[name])
        children[name] = module

    def untie(self, path: str) -> None:
        """Gives a linear layer its own weight if it shares it with an embedding."""
        layer = self.model.get_submodule(path)
        weight = parameters_of(layer)[0]
        if not any(weight is m.weight for m in self.model.modules() if isinstance(m, nn.Embedding)):
            return
        self.set(layer, "weight", weight.detach().clone(), weight)
        self.untied.append(path)
        config: Any = getattr(self.model, "config", None)
        if getattr(config, "tie_word_embeddings", False):  # so that loading does not tie them again
            self._undo.callback(setattr, config, "tie_word_embeddings", True)
            config.tie_word_embeddings = False

    @contextmanager
    def matrix(self, path: str) -> Iterator[_Matrix]:
        """Context with the weight and bias of a linear layer in float64, which are stored at the end."""
        layer: Any = self.model.get_submodule(path)
        made = _Matrix(by_channel(layer)[0].double(), None if layer.bias is None else layer.bias.double())
        yield made
        self.paths.add(path)
        self.save(parameters_of(layer)[0])
        by_channel(layer)[0].copy_(made.weight)
        if made.bias is None:
            return
        if layer.bias is None:
            self.remade[path] = None
            self.set(layer, "bias", made.bias, parameters_of(layer)[0])
        else:
            self.save(layer.bias).copy_(made.bias)


def _rotate_stream(model: nn.Module, stream: _Stream, changing: _Changing, seed: int) -> None:
    q = orthogonal(stream.width, seed).to(_weight_of(model, next(iter(stream.readers))).device)
    means = {form == "mean" for form in stream.forms.values()}
    if len(means) > 1:
        raise ValueError(f"The residual stream is read by LayerNorm and by RMSNorm.\n{_FIX}")
    centers = means.pop()
    done: set[int] = set()
    for path in stream.embeddings:
        for reader in (p for own in stream.readers.values() for p in own):
            changing.untie(reader)
        changing.paths.add(path)
        weight = _weight_of(model, path)
        if id(weight) not in done:  # embeddings may share it
            done.add(id(weight))
            _write(changing.save(weight), q, centers)
    for name in stream.parameters:
        value = changing.save(model.get_parameter(name))
        value.copy_(_rotated(value.double(), q, centers))
    for path in stream.writers:
        with changing.matrix(path) as matrix:
            matrix.weight = _rotated(matrix.weight.t(), q, centers).t()
            matrix.bias = None if matrix.bias is None else _rotated(matrix.bias, q, centers)
    for path, layers in stream.readers.items():
        _fold_norm(model, path, layers, stream.forms[path], changing)
        for layer in layers:
            with changing.matrix(layer) as matrix:
                matrix.weight = matrix.weight @ q


def _write(weight: Tensor, q: Tensor, centers: bool) -> None:
    for rows in weight.split(1 << 14):
        rows.copy_(_rotated(rows.double(), q, centers))


def _rotated(x: Tensor, q: Tensor, centers: bool) -> Tensor:
    """Returns `x q`, without the mean over the channels if the norms take it out."""
    return (x - x.mean(-1, keepdim=True) if centers else x) @ q


def _fold_norm(model: nn.Module, path: str, layers: list[str], form: str, changing: _Changing) -> None:
    """Moves the weight and bias of a norm into the layers after it."""
    norm: Any = model.get_submodule(path)
    weight, bias = norm._parameters["weight"], norm._parameters.get("bias")
    factors = weight.double() + (1.0 if form == "1 + weight" else 0.0)
    for layer in layers:
        with changing.matrix(layer) as matrix:
            if bias is not None:
                shift = matrix.weight @ bias.double()
                matrix.bias = shift if matrix.bias is None else matrix.bias + shift
            matrix.weight = matrix.weight * factors
    if form == "mean" or bias is not None:
        made = nn.RMSNorm(len(weight), eps=_eps(norm, weight), device=weight.device, dtype=weight.dtype)
        made.weight.requires_grad_(weight.requires_grad)
        changing.replace(path, made.train(norm.training), weight)
    else:
        changing.save(weight).fill_(0.0 if form == "1 + weight" else 1.0)


def _rotate_heads(model: nn.Module, values: str, outputs: str, size: int, changing: _Changing, seed: int) -> None:
    q = orthogonal(size, seed).to(_weight_of(model, values).device)
    with changing.matrix(values) as matrix:
        matrix.weight = _by_head(matrix.weight.t(), q).t()
        matrix.bias = None if matrix.bias is None else _by_head(matrix.bias, q)
    with changing.matrix(outputs) as matrix:
        matrix.weight = _by_head(matrix.weight, q)


def _by_head(x: Tensor, q: Tensor) -> Tensor:
    parts: Tensor = x.unflatten(-1, (-1, len(q)))
    return (parts @ q).flatten(-2)


def _check_same(model: nn.Module, expected: list[Tensor], found: list[Tensor]) -> None:
    """Raises ValueError if the model computes something else than before."""
    for y, z in zip(expected, found, strict=True):
        error = float((y.double() - z.double()).norm()) / max(float(y.double().norm()), 1e-300)
        if not error <= max(_TOLERANCES.get(p.dtype, 1e-3) for p in model.parameters()) or math.isnan(error):
            raise ValueError(
                f"The rotated model would compute something else: its output differs by {error:.1e} of its size. Other "
                "code reads the residual stream, or the values of attention (`heads=False` leaves those alone).\n"
                f"{_FIX}"
            )
