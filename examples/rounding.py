"""The three numerics at ties, three granularities, and the straight-through gradient, on NumPy arrays.

python examples/rounding.py
"""

import numpy as np

import fakequant as fq


def main() -> None:
    """Prints codes, signal-to-noise ratios and the gradient."""
    print(fq.info(), end="\n\n")

    # Ties, where the rounding rule matters. From 79.5 on, the rounding of 1 / scale matters too.
    scale = np.float32(0.02)
    x = np.float32([-1.5, 0.5, 2.5, 79.5, 85.5, 105.5, 300]) * scale
    print(f"{'x':<11}", *(f"{v:>6.2f}" for v in x))
    for numerics in ("torch", "onnx", "half_away"):
        spec = fq.QuantSpec(numerics=numerics)
        print(f"{numerics:<11}", *(f"{q:>6}" for q in fq.quantize(x, float(scale), 0, spec)))

    weights = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    weights[::8] *= 10  # some channels have a larger range
    print("\n4-bit weights of shape (64, 256), signal to quantization noise:")
    for name, where in {
        "per tensor": {},
        "per channel": {"axis": 0},
        "per group of 32": {"axis": 1, "group_size": 32},
    }.items():
        spec = fq.QuantSpec(bits=4, **where)
        seen = fq.min_max(weights, spec)
        scale, zero_point = fq.choose_qparams(seen, spec)
        y = fq.fake_quantize(weights, scale, zero_point, spec)
        noise = np.mean((y - weights) ** 2)
        packed = fq.quantize(weights, scale, zero_point, spec, packed=True)
        print(f"  {name:<16} {10 * np.log10(np.mean(weights**2) / noise):5.1f} dB   "
              f"{packed.nbytes + scale.nbytes:>6} bytes instead of {weights.nbytes}")  # fmt: skip

    y, mask = fq.fake_quantize(weights, 0.2, 0, fq.QuantSpec(bits=4), mask="packed")
    dx = fq.fake_quantize_backward(np.ones_like(weights), mask, fq.QuantSpec(bits=4))
    print(f"\nstraight-through gradient: {int(dx.sum())} of {dx.size} elements pass, "
          f"{mask.nbytes} bytes saved for it instead of {weights.nbytes}")  # fmt: skip


if __name__ == "__main__":
    main()
