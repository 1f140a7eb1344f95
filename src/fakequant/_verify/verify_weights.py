"""`verify` for folders of compressed-tensors: the tensors of the folder, what transformers loads, and its outputs.

1. The tensors and the config of the folder are compared with what the prepared model would be exported as now.
2. transformers loads the folder in a process of its own. It must quantize the same layers in the same way, and have
   the same parameters and buffers, bit by bit, with dequantized weights.
3. Its outputs must equal the prepared model's, bit by bit. If they differ, the first layer that computes
   something else from the same input is named.

Engines dequantize weights and multiply floats, so there is no rounding to allow for, and nothing is within a tolerance.
"""

import copy
import os
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from fakequant._backends.torch.tensor_kernels import dtype_name
from fakequant._export.compressed_tensors.cache import cache_tensors
from fakequant._export.compressed_tensors.export_compressed_tensors import Contents, folder_contents
from fakequant._export.compressed_tensors.reading import Folder
from fakequant._export.compressed_tensors.schemes import Args, scheme_of
from fakequant._export.prepared_layers import PreparedLayer, own_tensors, prepared_layers
from fakequant._model.running import Data, copied, evaluating, run
from fakequant._prepare.attach import detach_layer
from fakequant._prepare.summary import summary
from fakequant._runtimes.transformers.running import Digests, Ran, digest, output_tensors, run_folder
from fakequant._runtimes.transformers.target import TARGET
from fakequant._verify.file_of_model import kind_of
from fakequant._verify.rounding_bounds import bits_of, largest_difference
from fakequant._verify.verdict import OutputReport, TensorReport, Verification
from fakequant.nn._experts import ExpertProduct
from fakequant.nn._kv_cache import quantized_caches
from fakequant.nn._quantized_layer import QuantizedLayer
from fakequant.nn._records import float_class_of

PreTrainedModel: TypeAlias = Any
_Batch = tuple[tuple[Any, ...], dict[str, Any]]


@torch.no_grad()
def verify_weights(
    model: PreTrainedModel, folder: str | os.PathLike[str], data: Data, *, steps: int | None = None
) -> Verification:
    """See `fakequant.verify`, which calls this for folders of compressed-tensors.

    Raises ValueError if the folder does not hold the layers of the model in their schemes, or if the model or
    transformers does not return the same for the same batch each time.
    """
    file = Folder(folder)
    prepared = list(prepared_layers(model, TARGET))
    contents = folder_contents(model, prepared)
    _require_same_config(file, contents.quantization)
    _require_same_sizes(file, model.config)
    reports = _compare_tensors(file, contents)
    with evaluating(model), torch.autocast("cpu", enabled=False):
        batches, outputs = _run_prepared(model, data, steps)
        expected = _expected_values(model, prepared)
        ran = _run_file(model, folder, batches, {name: digest(value) for name, value in expected.items()})
        _compare_loaded(ran, expected, reports)
        _compare_layers(ran, prepared, contents.quantization["kv_cache_scheme"], reports)
        found = _compare_outputs(outputs, ran)
        if found.runtime_unexplained and not _is_order_of_sums(model, prepared, batches, ran):
            watched = [layer.path for layer in prepared if not isinstance(layer.layer, ExpertProduct)]
            again = _run_file(model, folder, batches, {}, watched)
            found.why = _first_difference(model, again)
        else:
            found.runtime_unexplained = 0
    if not found.numbers:
        raise ValueError("The batches of `data` are empty, so there is nothing to compare.")
    known = summary(model)
    return Verification(
        target="compressed-tensors",
        runtime="transformers",
        tensors=list(reports.values()),
        kernels={path: f"{layer.format}, dequantized" for path, layer in ran.layers.items()},
        outputs=found,
        skipped={},
        multiplications=known.multiplications,
        quantized_multiplications=known.quantized_multiplications,
        parameters=known.parameters,
        quantized_parameters=known.quantized_parameters,
    )


# --- the folder ------------------------------------------------------------------------------------


def _require_same_config(file: Folder, expected: dict[str, Any]) -> None:
    """Raises ValueError if a folder quantizes other layers than the model, or in another way."""
    stored = file.quantization
    for name in (*expected, *(name for name in stored if name not in expected)):
        if stored.get(name) != expected.get(name):
            raise ValueError(
                f"The `{name}` in the quantization_config of {file.path} differs from the model's.\nIt is "
                f"{stored.get(name)!r:.300}, and the model needs {expected.get(name)!r:.300}.\nExport the model again."
            )


def _require_same_sizes(file: Folder, config: Any) -> None:
    """Raises ValueError if a number in the config of a folder differs from the model's config.

    transformers takes the shapes of quantized models from the tensors, and other engines from these numbers.
    """
    for name, value in file.config.items():
        own = getattr(config, name, None)
        is_number = type(value) in (int, float) and type(own) in (int, float) and not name.endswith("_token_id")
        if is_number and value != own:
            raise ValueError(
                f"`{name}` in the config.json of {file.path} is {value}, and {own} in the model.\n"
                "Export the model again."
            )


def _compare_tensors(file: Folder, contents: Contents) -> dict[str, TensorReport]:
    """Compares every tensor of a folder with what the model would be exported as. Returns a report per quantized layer.

    Float tensors that differ have reports too. Raises ValueError if the folder has other tensors.
    """
    missing, extra = set(contents.tensors) - set(file.files), set(file.files) - set(contents.tensors)
    if missing or extra:
        what = f"lacks {sorted(missing)[0]}" if missing else f"has {sorted(extra)[0]}, which the model does not have"
        raise ValueError(f"{file.path} does not belong to the model: it {what}.\nExport the model again.")
    reports = {path: TensorReport(f"{path}.weight", codes=layer.numel) for path, layer in contents.layers.items()}
    for name, value in contents.tensors.items():
        stored = file.tensor(name)
        if digest(stored) == digest(value):
            continue
        if stored.dtype != value.dtype or stored.shape != value.shape:
            raise ValueError(
                f"{name} in {file.path} is {kind_of(stored)}, and {kind_of(value)} in the model.\n"
                "Export the model again."
            )
        path = name.rpartition(".")[0]
        report = reports.setdefault(path if path in contents.layers else name, TensorReport(name, codes=value.numel()))
        different = bits_of(stored) != bits_of(value)
        report.prepared_differ += int(different.sum())
        report.why_prepared = f"the folder has other values in {name.rpartition('.')[2]}"
    return reports


# --- what transformers loads -----------------------------------------------------------------------


def _expected_values(model: PreTrainedModel, layers: list[PreparedLayer]) -> dict[str, Tensor]:
    """Returns the parameters and buffers with which the prepared model computes, with quantized weights."""
    quantized = {layer.name: layer for layer in layers}
    values = {}
    for name, value in own_tensors(model):
        layer = quantized.get(name)
        weight = None if layer is None else layer.layer._fakequant.quantized_weight(layer.layer)
        values[name] = value if weight is None else weight.reshape(value.shape)
    return values | cache_tensors(model)


def _compare_loaded(ran: Ran, expected: dict[str, Tensor], reports: dict[str, TensorReport]) -> None:
    """Compares the parameters and buffers of transformers with the prepared model's."""
    if ran.problems:
        raise ValueError(f"transformers does not load the folder completely: {'; '.join(ran.problems[:3])}.")
    for name, value in expected.items():
        if name not in ran.digests:
            _differ(reports, name, value.numel(), "transformers has no such tensor")
        elif name in ran.differing:
            theirs = ran.differing[name]
            if theirs.dtype != value.dtype or theirs.shape != value.shape:
                _differ(reports, name, value.numel(), f"transformers has {kind_of(theirs)}")
            else:
                _differ(reports, name, int((bits_of(theirs) != bits_of(value)).sum()), "transformers has other values")


def _compare_layers(
    ran: Ran, prepared: list[PreparedLayer], cache: Args | None, reports: dict[str, TensorReport]
) -> None:
    """Compares which layers transformers quantizes, and how, with the prepared model; also keys and values.

    transformers keeps the weights of all experts in one parameter, which has no scheme.
    """
    expected = {layer.path: layer for layer in prepared if not isinstance(layer.layer, ExpertProduct)}
    caching = [path for path, layer in ran.layers.items() if not layer.weight and layer.input is not None]
    for path in caching:
        kept = ran.layers[path].input or {}
        if cache is None or any(kept.get(name) != value for name, value in cache.items()):
            _differ(reports, path, 1, f"transformers quantizes keys and values as {kept}, not as {cache}")
    for path in sorted({*ran.layers, *expected}.difference(caching)):
        theirs, ours = ran.layers.get(path), expected.get(path)
        if theirs is None or ours is None:
            what = "loads the layer in float" if theirs is None else "quantizes the layer, which stays in float"
            _differ(reports, f"{path}.weight", 1, f"transformers {what}")
            continue
        scheme = scheme_of(ours).to_dict([])
        for given, wanted in ((theirs.weight, scheme["weights"]), (theirs.input, scheme["input_activations"])):
            if (given is None) != (wanted is None) or any((given or {}).get(k) != v for k, v in (wanted or {}).items()):
                _differ(reports, f"{path}.weight", 1, f"transformers quantizes the layer as {given}, not as {wanted}")


def _differ(reports: dict[str, TensorReport], name: str, number: int, why: str) -> None:
    path = name.removesuffix(".weight")
    report = reports.setdefault(path, TensorReport(name, codes=number))
    report.runtime_differ = max(report.runtime_differ, number)
    report.why_runtime = why


# --- outputs ---------------------------------------------------------------------------------------


def _run_prepared(
    model: PreTrainedModel, data: Data, steps: int | None
) -> tuple[list[_Batch], list[dict[str, Tensor]]]:
    """Runs the prepared model twice on every batch. Returns the arguments and the outputs."""
    batches: list[_Batch] = []
    outputs: list[dict[str, Tensor]] = []

    def call(*args: Any, **kwargs: Any) -> None:
        first, second = (output_tensors(model(*args, **kwargs)) for _ in range(2))
        if any(digest(first[name]) != digest(second[name]) for name in first):
            raise ValueError(
                "The prepared model does not return the same for the same batch each time, so it cannot be compared.\n"
                "Remove random numbers and state from its forward pass in evaluation."
            )
        batches.append((args, kwargs))
        outputs.append(first)

    run(model, data, steps, call=call)
    if not batches:
        raise ValueError("`data` has no batches, so there is nothing to compare.")
    return batches, outputs


def _run_file(
    model: PreTrainedModel, folder: Any, batches: list[_Batch], expected: Digests, watched: list[str] | None = None
) -> Ran:
    ran = run_folder(
        folder,
        batches,
        architecture=float_class_of(model).__name__,
        dtype=model.dtype,
        attention=getattr(model.config, "_attn_implementation", None),
        expected=expected,
        watched=watched or (),
    )
    if not ran.repeats:
        raise ValueError(
            "transformers does not return the same for the same batch each time, so it cannot be compared."
        )
    return ran


def _compare_outputs(prepared: list[dict[str, Tensor]], ran: Ran) -> OutputReport:
    found = OutputReport()
    for ours, theirs in zip(prepared, ran.outputs, strict=True):
        if set(ours) != set(theirs) or any(ours[name].shape != theirs[name].shape for name in ours):
            raise ValueError(
                f"The model returns {', '.join(ours)} and transformers {', '.join(theirs)}, or other shapes of them."
            )
        for name, value in ours.items():
            other = theirs[name]
            found.numbers += value.numel()
            if value.is_floating_point():
                found.largest = max(
                    found.largest, float(value.abs().nan_to_num(0, 0, 0).max()) if value.numel() else 0.0
                )
                found.runtime_difference = max(
                    found.runtime_difference, largest_difference(value.float(), other.float())
                )
            different = value.numel() if other.dtype != value.dtype else int((bits_of(value) != bits_of(other)).sum())
            found.runtime_unexplained += different
            found.runtime_is_equal &= not different
            if value.is_floating_point() and value.dim() >= 2:
                same = value.argmax(-1) == other.argmax(-1)
                found.rows += same.numel()
                found.agreeing += int(same.sum())
    return found


def _is_order_of_sums(model: PreTrainedModel, layers: list[PreparedLayer], batches: list[_Batch], ran: Ran) -> bool:
    """Returns True if outputs differ only because prepared experts sum products in another order than transformers.

    The model with float experts that have the quantized weights must return the bits of the folder. Its experts and the
    prepared ones must compute the same from the same inputs: both within rounding of the result in float64.
    """
    experts = [layer for layer in layers if isinstance(layer.layer, ExpertProduct)]
    owners = {layer.path.rpartition(".")[0] for layer in experts}
    if not owners:
        return False
    values = _expected_values(model, experts)
    plain = copy.deepcopy(model)
    own = dict(plain.named_parameters())
    for layer in experts:
        own[layer.name].copy_(values[layer.name])
    for path in owners:
        detach_layer(plain.get_submodule(path))
    seen: list[tuple[str, tuple[Any, ...], Tensor]] = []
    handles = [
        plain.get_submodule(path).register_forward_hook(
            lambda module, args, y, path=path: seen.append((path, copied(args, {})[0], y.clone()))
        )
        for path in owners
    ]
    try:
        outputs = [output_tensors(plain(*args, **kwargs)) for args, kwargs in batches]
    finally:
        for handle in handles:
            handle.remove()
    if any(digest(a[name]) != digest(b[name]) for a, b in zip(outputs, ran.outputs, strict=True) for name in a):
        return False
    return all(
        _is_within_rounding(model.get_submodule(path), plain.get_submodule(path), args, y) for path, args, y in seen
    )


def _exact_experts(module: Any, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Returns the output of a float module of experts, computed in float64; see `fakequant.nn.kinds.Experts`."""

    def product(x: Tensor, name: str, expert: int) -> Tensor:
        weight = getattr(module, name)[expert].double()
        y: Tensor = x @ (weight if module.is_transposed else weight.T)
        return y + getattr(module, f"{name}_bias")[expert].double() if module.has_bias else y

    x, y = hidden_states.double(), torch.zeros_like(hidden_states, dtype=torch.float64)
    for expert in range(module.num_experts):
        rows, places = torch.where(index == expert)
        up = product(x[rows], "gate_up_proj" if module.has_gate else "up_proj", expert)
        gated = module._apply_gate(up) if module.has_gate else module.act_fn(up)
        y.index_add_(0, rows, product(gated, "down_proj", expert) * weights[rows, places, None].double())
    return y


def _is_within_rounding(prepared: nn.Module, plain: nn.Module, args: tuple[Any, ...], theirs: Tensor) -> bool:
    """Returns True if a prepared module is as close to the exact output of a float module as that module itself."""
    exact = _exact_experts(plain, *args)
    ours = prepared(*args)
    unit = torch.finfo(theirs.dtype).eps * float(exact.abs().max())
    error, own_error = ((value.double() - exact).abs().max() for value in (ours, theirs))
    return bool(error <= 4 * own_error + unit)


def _explanation(layer: QuantizedLayer, x: Tensor) -> str:
    """Returns what transformers is known to compute in its own way for a layer and its input, or nothing."""
    if layer.input_quantizer is None:
        return ""
    if x.dim() == 2 and len(x) > 1 and layer.input_quantizer.is_dynamic:
        return ": transformers computes one scale for all rows of an input with two axes"
    if x.dtype != torch.float32:
        return f": transformers divides inputs by their scale in {dtype_name(x.dtype)}"
    return ""


def _first_difference(model: PreTrainedModel, ran: Ran) -> str:
    """Returns the first layer that computes something else than transformers from the same input, and why."""
    for calls in ran.calls:
        for path, seen in calls.items():
            layer = model.get_submodule(path)
            assert isinstance(layer, QuantizedLayer)
            for x, theirs in seen:
                ours = layer(x)
                if digest(ours) != digest(theirs):
                    number = (
                        int((bits_of(ours) != bits_of(theirs)).sum()) if ours.dtype == theirs.dtype else ours.numel()
                    )
                    why = f"{number} of {ours.numel()} outputs of {path} differ for the same input"
                    return f"{why}{_explanation(layer, x)}"
    why = "no quantized layer computes anything else from the same input, so the difference arises between the layers"
    if quantized_caches(model) and model.dtype != torch.float32:
        return f"{why}: transformers divides keys and values by their scale in {dtype_name(model.dtype)}"
    return why
