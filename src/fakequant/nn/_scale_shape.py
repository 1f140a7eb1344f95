"""The shape of a quantizer's scales, known before it sees data."""

from fakequant._backends.blocks import blocks_of
from fakequant.spec import QuantSpec


def scale_shape(spec: QuantSpec, shape: tuple[int | None, ...] | None) -> tuple[int, ...] | None:
    """Returns the shape of the scales for tensors of `shape`, or None if it depends on each tensor.

    In `shape`, None stands for any length.

    >>> scale_shape(QuantSpec(axis=1), (None, 64, None, None))
    (64,)
    """
    if spec.granularity == "token" or (spec.has_block_scales and (shape is None or None in shape)):
        return None
    if spec.axis is None:
        return ()
    if shape is None:
        raise ValueError(
            f"A quantizer per {spec.granularity} must know the shape of its scales: "
            "pass `shape`, the shape of the tensors it will see.\n"
            f"Use e.g. shape=weight.shape, or None for lengths that vary: shape=(None, 64, None, None)."
        )
    lengths = tuple(0 if n is None else n for n in shape)
    blocks = blocks_of(lengths, spec).parameters
    if 0 in blocks:
        raise ValueError(
            f"The scales of a quantizer per {spec.granularity} on axis {spec.axis} have no fixed shape for tensors of "
            f"shape {tuple(shape)}.\nGive the lengths of the axes that have several scales, or use group_size=-1 and "
            "ranges computed for every tensor (Dynamic)."
        )
    return blocks
