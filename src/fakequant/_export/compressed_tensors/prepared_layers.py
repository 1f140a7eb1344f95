"""The quantized layers of a prepared model as compressed-tensors stores them, and why it cannot hold a layer."""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fakequant._backends.torch import tensor_functions
from fakequant._export.compressed_tensors.layer_tensors import StoredWeight
from fakequant._export.compressed_tensors.schemes import Scheme
from fakequant._prepare.attach import FLOW_BUFFER
from fakequant._runtimes.transformers.target import reason_against_input, reason_against_weight
from fakequant._util.text import listed
from fakequant.nn._call_quantizers import quantizers_in
from fakequant.nn._experts import ExpertProduct
from fakequant.nn._fake_quantize import FakeQuantize
from fakequant.nn._function_calls import CallingModule
from fakequant.nn._model_quantizers import has_scale, named_quantizers
from fakequant.nn._quantized_layer import QuantizedLayer, input_grids_of
from fakequant.nn._quantizer import Quantizer
from fakequant.nn._records import TOKENS, float_class_of
from fakequant.qparams import QParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparedLayer:
    """A layer of a prepared model that a folder stores as codes."""

    path: str
    layer: QuantizedLayer
    # The name of its weight in the float model's state_dict.
    name: str
    scheme: Scheme
    # The quantizer of its input, if it has a fixed scale.
    input: Quantizer | None

    def weight(self) -> Tensor:
        """Returns the float weight as a matrix."""
        weight: Tensor = self.layer._fakequant.kind.read_weight(self.layer).detach()
        return weight

    def known_grid(self) -> QParams[Tensor] | None:
        """Returns the scales of the whole weight, or None if those of each row follow from the row alone."""
        quantizer = self.layer.weight_quantizer
        assert quantizer is not None
        spec = quantizer.spec
        if quantizer.is_dynamic and spec.granularity != "tensor" and spec.scale_format != "e4m3fn":
            return None
        return grid_of(quantizer, self.weight())

    def stored(self, rows: Tensor, known: QParams[Tensor] | None) -> StoredWeight:
        """Returns the codes and scales with which the layer computes, of some rows.

        `known` is the `known_grid`. Raises ValueError if the rows are parts of blocks.
        """
        quantizer, weight = self.layer.weight_quantizer, self.weight()
        assert quantizer is not None
        spec, first = quantizer.spec, int(rows[0])
        is_range = torch.equal(rows, torch.arange(first, first + len(rows)))
        part = weight[first : first + len(rows)] if is_range else weight[rows]
        scales = rows if spec.group_rows is None else self._blocks_of_rows(rows, spec.group_rows)
        if known is None:
            scale, zero_point = grid_of(quantizer, part)
        else:
            scale, zero_point = known if spec.granularity == "tensor" else (value[scales] for value in known)
        codes = tensor_functions.quantize(part, scale, zero_point, spec)
        return StoredWeight(codes, scale, None if spec.symmetric else zero_point)

    def _blocks_of_rows(self, rows: Tensor, height: int) -> Tensor:
        """Returns the numbers of the blocks that some rows are. Raises ValueError if they are parts of blocks."""
        blocks = rows[::height] // height
        whole = (blocks[:, None] * height + torch.arange(height)).flatten()
        if not torch.equal(rows, whole[whole < len(self.weight())]):
            raise ValueError(
                f"{self.path} cannot be stored in compressed-tensors: it is stored in parts of {len(rows)} rows, which "
                f"are no whole blocks of {height} rows.\nUse another spec for it, or config.skip({self.path!r})."
            )
        return blocks


def grid_of(quantizer: Quantizer, x: Tensor) -> QParams[Tensor]:
    """Returns the scale and zero point with which a quantizer would quantize `x` in evaluation. Changes nothing."""
    if not isinstance(quantizer, FakeQuantize) or not quantizer.is_dynamic:
        return quantizer.qparams()
    seen = tensor_functions.min_max(x, quantizer.spec)
    return tensor_functions.choose_qparams(seen.min, seen.max, quantizer.spec, eps=quantizer.eps)


def prepared_layers(model: nn.Module) -> Iterator[PreparedLayer]:
    """Yields the layers of a prepared model whose weight is quantized.

    Raises ValueError, with the path and the reason, for the first layer that compressed-tensors cannot hold.
    """
    _require_layers_only(model)
    for path, module in model.named_modules():
        if not isinstance(module, QuantizedLayer) or module.weight_quantizer is None:
            continue
        if not module.weight_quantizer.quantizing:
            continue
        reason = _reason_against(module)
        if reason is not None:
            raise ValueError(
                f"{path or 'The model'} cannot be stored in compressed-tensors: {reason}.\n"
                f"Leave it in float with config.skip({path!r}), or use another spec; "
                "with target='compressed-tensors', prepare does so."
            )
        grids = [grid for grid in input_grids_of(module) if isinstance(grid, Quantizer) and grid.quantizing]
        spec = grids[0].spec if grids else None
        yield PreparedLayer(
            path=path,
            layer=module,
            name=_name_of_weight(path, module),
            scheme=Scheme(module.weight_quantizer.spec, spec),
            input=grids[0] if grids and not grids[0].is_dynamic else None,
        )


def _name_of_weight(path: str, layer: QuantizedLayer) -> str:
    """Returns the name of a layer's weight in the state_dict of the float model."""
    if isinstance(layer, ExpertProduct):  # a parameter of the module that owns the product
        return f"{path.rpartition('.')[0]}.{layer.names['weight']}"
    return f"{path}.{layer._fakequant.kind.weight_name}" if path else layer._fakequant.kind.weight_name


def _require_layers_only(model: nn.Module) -> None:
    """Raises ValueError if a model quantizes other tensors than weights and inputs of layers."""
    others = [path for path, module in model.named_modules() if isinstance(module, CallingModule)]
    for path, module in model.named_modules():
        if any(q.quantizing for q in quantizers_in(module._modules.get("output_quantizer"))):
            others.append(path)
    if others:
        raise ValueError(
            f"compressed-tensors holds quantized weights and inputs of layers, but {listed(others)} also "
            "quantize other results.\nPrepare the model with target='compressed-tensors', or with `operands=None` and "
            "without `output`."
        )


def _reason_against(layer: QuantizedLayer) -> str | None:
    """Returns why compressed-tensors cannot hold a layer, or None if it can."""
    cls = float_class_of(layer)
    if not issubclass(cls, (nn.Linear, ExpertProduct)):
        return f"it is a {cls.__name__}, and only Linear layers and experts have a place there"
    assert layer.weight_quantizer is not None
    spec = layer.weight_quantizer.spec
    reason = reason_against_weight(spec)
    if reason is not None:
        return f"its weight is {reason}"
    if isinstance(layer, ExpertProduct) and layer.owner.is_transposed:
        return "its experts are stored with the inputs first"
    grids = [grid for grid in input_grids_of(layer) if isinstance(grid, Quantizer) and grid.quantizing]
    if not grids:
        return None
    if isinstance(layer, ExpertProduct):
        return "it is a product of experts, whose inputs transformers does not quantize"
    if len(grids) > 1:
        return f"it is called {len(grids)} times with inputs on grids of their own, and has a place for one"
    reason = reason_against_input(grids[0].spec)
    if reason is not None:
        return f"its input is {reason}"
    if not grids[0].is_dynamic and not has_scale(grids[0]):
        return "its input has no scale yet; calibrate the model first"
    return None


def own_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers that a prepared model had before `prepare`, by name."""
    quantizers = tuple(f"{path}." for path, _ in named_quantizers(model))
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if not name.startswith(quantizers) and name.rpartition(".")[2] not in (TOKENS, FLOW_BUFFER):
            yield name, value
