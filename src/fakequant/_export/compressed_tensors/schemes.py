"""Grids as compressed-tensors describes them: `QuantizationArgs` as dicts, from and to a `QuantSpec`.

    spec                                    type, num_bits   strategy        scale_dtype   format
    int2 to int8 weights                    int, 2 to 8      tensor,         -             pack-quantized, or
                                                             channel, group                int-quantized with inputs
    e4m3fn weights                          float, 8         tensor,         -             float-quantized
                                                             channel, block
    nvfp4(scale_rule="divided")             float, 4         tensor_group    float8_e4m3fn nvfp4-pack-quantized
    mxfp4, mxfp6 (e2m3), mxfp8 (e4m3fn)     float, 4, 6, 8   group           uint8         mxfp4-pack-quantized, ...

The room of the target (`_runtimes/transformers/target.py`) says which specs it can hold.
"""

from typing import Any, Literal, NamedTuple

from fakequant._export.prepared_layers import PreparedLayer
from fakequant.formats import Format
from fakequant.spec import QuantSpec

# A `QuantizationArgs` of compressed-tensors as a dict, and the same for a layer, a `QuantizationScheme`.
Args = dict[str, Any]


class Scheme(NamedTuple):
    """How the tensors of a layer are stored, and how an engine quantizes its input."""

    weight: QuantSpec
    # None if the input stays in float.
    input: QuantSpec | None

    @property
    def format(self) -> str:
        """The format of the layer's tensors, as compressed-tensors calls it."""
        if self.weight.scale_format == "e4m3fn":
            return "nvfp4-pack-quantized"
        if self.weight.scale_format == "e8m0":
            return "mxfp8-quantized" if self.weight.bits == 8 else f"mxfp{self.weight.bits}-pack-quantized"
        if self.weight.format != "int":
            return "float-quantized"
        return "pack-quantized" if self.input is None else "int-quantized"

    def __str__(self) -> str:
        return str(self.weight) if self.input is None else f"{self.weight}; input {self.input}"

    def to_dict(self, targets: list[str]) -> dict[str, Any]:
        """Returns the config group of the layers that `targets` name."""
        return {
            "targets": targets,
            "weights": args_of_weight(self.weight),
            "input_activations": None if self.input is None else args_of_input(self.input),
            "output_activations": None,
            "format": self.format,
        }


def scheme_of(layer: PreparedLayer) -> Scheme:
    """Returns the scheme of a prepared layer."""
    return Scheme(layer.spec, layer.input_spec)


def args_of_weight(spec: QuantSpec) -> Args:
    """Returns the description of a weight.

    >>> args_of_weight(QuantSpec(bits=4, axis=-1, group_size=32))["strategy"]
    'group'
    """
    args = _args(spec, "channel" if spec.granularity == "token" else spec.granularity)
    if spec.granularity == "block":
        args["block_structure"] = [spec.group_rows, spec.group_size]
    return {**args, "dynamic": False}


def args_of_input(spec: QuantSpec) -> Args:
    """Returns the description of an input. Scales per token, group and block are computed at run time.

    >>> args_of_input(QuantSpec(axis=-1, group_size=-1))["dynamic"]
    True
    """
    # "local" means that block scales are computed at run time, under a fixed scale of the tensor.
    is_local = spec.scale_format == "e4m3fn"
    return {**_args(spec, spec.granularity), "dynamic": "local" if is_local else spec.granularity != "tensor"}


def args_of_cache(spec: QuantSpec) -> Args:
    """Returns the description of keys and values, whose axis 1 has the heads.

    >>> args_of_cache(QuantSpec(axis=1))["strategy"]
    'attn_head'
    """
    return {**_args(spec, "tensor" if spec.axis is None else "attn_head"), "dynamic": False}


def _args(spec: QuantSpec, strategy: str) -> Args:
    args: Args = {
        "num_bits": spec.bits,
        "type": "int" if spec.format == "int" else "float",
        "symmetric": spec.symmetric,
        "strategy": "tensor_group" if spec.scale_format == "e4m3fn" else strategy,
        "group_size": spec.group_size if spec.granularity == "group" else None,
    }
    if spec.has_block_scales:
        args["scale_dtype"] = "torch.float8_e4m3fn" if spec.scale_format == "e4m3fn" else "torch.uint8"
    return args


def spec_of(args: Args, whose: Literal["weight", "input", "cache"]) -> QuantSpec:
    """Returns the spec that a description means. Raises ValueError if there is none.

    >>> print(spec_of({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "weight"))
    int4, per group of 32 on axis -1
    """
    bits, strategy, group = args.get("num_bits", 8), args.get("strategy"), args.get("group_size")
    if strategy is None:
        strategy = "tensor" if group is None else "channel" if group == -1 else "group"
    axes: dict[str, dict[str, int | None]] = {
        "tensor": {},
        "channel": {"axis": 0},
        "token": {"axis": -1, "group_size": -1},
        "group": {"axis": -1, "group_size": group},
        "tensor_group": {"axis": -1, "group_size": group},
        "block": {"axis": -1, **_lengths_of(args.get("block_structure"))} if strategy == "block" else {},
    }
    if whose == "cache":
        axes = {"tensor": {}, "attn_head": {"axis": 1}}
    if strategy not in axes:
        raise ValueError(f"its {whose} has the strategy {strategy!r}, which fakequant has no grid for")
    if whose != "weight":
        wanted = {"tensor_group": "local", "tensor": False, "attn_head": False}.get(strategy, True)
        if args.get("dynamic", False) != wanted:
            raise ValueError(
                f"its {whose} has the strategy {strategy!r} with dynamic={args.get('dynamic')!r}, and fakequant has a "
                f"grid with dynamic={wanted!r} for it"
            )
    fields: dict[str, Any] = dict(axes[strategy])
    if args.get("type", "int") == "int":
        return QuantSpec(bits=bits, symmetric=args.get("symmetric", True), **fields)
    formats: dict[int, Format] = {4: "e2m1", 6: "e2m3", 8: "e4m3fn"}
    if bits not in formats:
        raise ValueError(f"its {whose} is a float of {bits} bits, which fakequant has no grid for")
    if strategy == "tensor_group":
        fields |= {"scale_format": "e4m3fn", "scale_rule": "divided"}
    elif strategy == "group" and (bits < 8 or args.get("scale_dtype") is not None):
        rule = "even_e2m1" if bits == 8 and whose == "input" else "even"
        fields |= {"scale_format": "e8m0", "scale_rule": rule}
    return QuantSpec(format=formats[bits], **fields)


def _lengths_of(structure: Any) -> dict[str, int | None]:
    """Returns the rows and columns of blocks: [128, 128], or "128x128" in old folders."""
    lengths = structure.split("x") if isinstance(structure, str) else structure
    if not isinstance(lengths, list) or len(lengths) != 2:
        raise ValueError(f"the strategy 'block' needs a `block_structure` of rows and columns, got {structure!r}")
    return dict(zip(("group_rows", "group_size"), map(int, lengths), strict=True))
