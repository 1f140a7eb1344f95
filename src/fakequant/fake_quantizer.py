"""`FakeQuantizer`: an object with a calibrated scale and zero point, and explicit gradients."""

import dataclasses
from math import inf, nan

import numpy as np

from fakequant._backends import backend_of
from fakequant._backends.types import Array
from fakequant.qparams import min_max
from fakequant.reference import round_half_away
from fakequant.spec import NUMERICS, Numerics, QuantSpec

# Data that is 0 everywhere would give the scale 0, and the reciprocal of a much smaller scale would overflow.
SMALLEST_SCALE = np.float32(1e-10)


@dataclasses.dataclass(frozen=True, slots=True)
class FakeQuantConfig:
    """The integer range of a `FakeQuantizer`.

    >>> FakeQuantConfig.q4_symmetric()
    FakeQuantConfig(bits=4, symmetric=True, qmin=-7, qmax=7)
    >>> FakeQuantConfig.of(bits=4, symmetric=False)
    FakeQuantConfig(bits=4, symmetric=False, qmin=0, qmax=15)
    """

    bits: int
    symmetric: bool
    qmin: int
    qmax: int

    def __post_init__(self) -> None:
        for name in ("bits", "qmin", "qmax"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"`{name}` must be an int, got {value!r}.")
        if not 2 <= self.bits <= 24:
            raise ValueError(f"`bits` must be between 2 and 24 (codes are exact in float32), got {self.bits}.")
        if not self.qmin < self.qmax:
            raise ValueError(f"`qmin` must be less than `qmax`, got {self.qmin} and {self.qmax}.")
        if self.symmetric and self.qmax <= 0:
            raise ValueError(f"A symmetric range needs `qmax` > 0, got {self.qmax}.")
        if max(abs(self.qmin), abs(self.qmax)) > 1 << 24:
            raise ValueError(f"`qmin` and `qmax` must be within 2^24, got {self.qmin} and {self.qmax}.")

    @classmethod
    def of(cls, *, bits: int, symmetric: bool) -> "FakeQuantConfig":
        """Returns the usual range: -(2^(bits-1) - 1) to 2^(bits-1) - 1 if symmetric, otherwise 0 to 2^bits - 1."""
        if symmetric:
            top = (1 << (bits - 1)) - 1 if bits > 0 else 0
            return cls(bits, True, -top, top)
        return cls(bits, False, 0, (1 << bits) - 1 if bits > 0 else 0)

    @classmethod
    def q4_symmetric(cls) -> "FakeQuantConfig":
        """Returns the config of 4 bits, -7 to 7."""
        return cls.of(bits=4, symmetric=True)

    @classmethod
    def q8_symmetric(cls) -> "FakeQuantConfig":
        """Returns the config of 8 bits, -127 to 127."""
        return cls.of(bits=8, symmetric=True)

    @classmethod
    def q4_asymmetric(cls) -> "FakeQuantConfig":
        """Returns the config of 4 bits, 0 to 15."""
        return cls.of(bits=4, symmetric=False)

    @classmethod
    def q8_asymmetric(cls) -> "FakeQuantConfig":
        """Returns the config of 8 bits, 0 to 255."""
        return cls.of(bits=8, symmetric=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _AnyRange(QuantSpec):
    """A spec with an arbitrary range."""

    low: int
    high: int

    @property
    def qmin(self) -> int:
        """The lowest code."""
        return self.low

    @property
    def qmax(self) -> int:
        """The highest code."""
        return self.high


class FakeQuantizer:
    """Fake quantization with one scale and zero point for all data, calibrated once.

        forward     q = clamp(round_half_away(x / scale + zero_point), qmin, qmax)
                    y = (q - zero_point) * scale
        backward    dx = dy                           pass-through
                    dx = dy where lo <= x <= hi       clamped, with lo = (qmin - zero_point) * scale

    These are the formulas of the default numerics, "half_away", in which NaN becomes code 0. docs/numerics.md has those
    of "onnx" and "torch". Before calibration the scale is 1 and the zero point is 0.

    >>> fq = FakeQuantizer.q4()
    >>> fq.calibrate(np.float32([-1.4, 0.7]))
    >>> fq.scale, fq.zero_point, fq.num_levels
    (np.float32(0.2), 0, 15)
    >>> fq.forward(np.float32([0.1, -0.5, 3.0]))
    array([ 0.2, -0.6,  1.4], dtype=float32)
    """

    def __init__(self, config: FakeQuantConfig | None = None, *, numerics: Numerics = "half_away") -> None:
        if numerics not in NUMERICS:
            raise ValueError(f"`numerics` must be one of {', '.join(NUMERICS)}, got {numerics!r}.")
        if not (config is None or isinstance(config, FakeQuantConfig)):
            raise TypeError(f"`config` must be a FakeQuantConfig, got {config!r}.")
        self.config = FakeQuantConfig.q8_symmetric() if config is None else config
        self.numerics: Numerics = numerics
        self._spec = _AnyRange(
            bits=self.config.bits,
            symmetric=self.config.symmetric,
            numerics=numerics,
            low=self.config.qmin,
            high=self.config.qmax,
        )
        self._set(np.float32(1), 0)
        self._initialized = False

    @classmethod
    def q4(cls) -> "FakeQuantizer":
        """Returns a 4-bit symmetric quantizer."""
        return cls(FakeQuantConfig.q4_symmetric())

    @classmethod
    def q8(cls) -> "FakeQuantizer":
        """Returns an 8-bit symmetric quantizer."""
        return cls(FakeQuantConfig.q8_symmetric())

    @property
    def scale(self) -> np.float32:
        """The distance between neighbouring values of the grid."""
        return self._scale

    @property
    def zero_point(self) -> int:
        """The code of 0.0."""
        return self._zero_point

    @property
    def is_initialized(self) -> bool:
        """Whether the quantizer has been calibrated."""
        return self._initialized

    @property
    def num_levels(self) -> int:
        """The number of codes."""
        return self.config.qmax - self.config.qmin + 1

    def calibrate(self, data: Array) -> None:
        """Sets scale and zero point from the smallest and largest value of `data`.

            symmetric    scale = max(|min|, |max|) / qmax;          zero_point = 0
            asymmetric   min, max = min(min, 0), max(max, 0)
                         scale = (max - min) / (qmax - qmin)
                         zero_point = clamp(round_half_away(qmin - min / scale), qmin, qmax)

        An asymmetric range is extended to include 0, because the zero point has to be one of the codes. The scale
        is at least 1e-10. NaN is ignored. Data without any other value changes nothing.
        """
        values = backend_of(data).as_float32_array(data, "data")
        seen = min_max(values)
        if seen.nan == values.size:
            return
        lo = np.float32(-np.inf) if seen.neginf else np.float32(seen.min)
        hi = np.float32(np.inf) if seen.posinf else np.float32(seen.max)
        qmin, qmax = self.config.qmin, self.config.qmax
        zero_point = 0
        with np.errstate(all="ignore"):
            if self.config.symmetric:
                scale = max(abs(lo), abs(hi)) / np.float32(qmax)
            else:
                lo, hi = min(lo, np.float32(0)), max(hi, np.float32(0))
                scale = (hi - lo) / np.float32(qmax - qmin)
                zero_point = _saturate(round_half_away(np.float32(qmin) - lo / scale), qmin, qmax)
        self._set(SMALLEST_SCALE if scale < SMALLEST_SCALE else np.float32(scale), zero_point)
        self._initialized = True

    def _set(self, scale: np.float32, zero_point: int) -> None:
        self._scale, self._zero_point = scale, zero_point
        # A Python float, because torch.compile treats it as a constant and a NumPy number as an unknown input.
        self._number = float(scale)
        with np.errstate(invalid="ignore"):
            # The value of code 0, computed in float32.
            self._value_of_zero = float(np.float32(-zero_point) * scale)

    def forward(self, x: Array) -> Array:
        """Returns `x` rounded to the grid. On a tensor, autograd passes the gradient through."""
        backend = backend_of(x)
        x = backend.as_data(x)
        scale, zero_point = self._number, self._zero_point
        if scale == inf:
            return self._forward_infinite(x)
        y = backend.fake_quantize(x, scale, zero_point, self._spec, gradient="pass")
        if self.numerics == "half_away":  # NaN becomes code 0
            backend.overwrite(y, x != x, -zero_point * scale if y.dtype.itemsize == 8 else self._value_of_zero)
        return y

    def _forward_infinite(self, x: Array) -> Array:
        """Evaluates the formulas for an infinite scale: `x / scale` is 0 if `x` is finite, otherwise NaN."""
        backend, spec = backend_of(x), self._spec
        y = backend.fake_quantize(x, 1.0, 0, spec, gradient="pass")
        code_of_nan = {"half_away": 0.0, "torch": float(spec.qmin), "onnx": nan}[self.numerics]
        code = min(max(self._zero_point, spec.qmin), spec.qmax)
        is_finite = abs(x) < inf
        backend.overwrite(y, is_finite, (code - self._zero_point) * inf)
        backend.overwrite(y, ~is_finite, (code_of_nan - self._zero_point) * inf)
        return y

    def forward_with_calibration(self, x: Array) -> Array:
        """Returns `forward(x)`, after calibrating on `x` if the quantizer is not calibrated yet."""
        if not self._initialized:
            self.calibrate(x)
        return self.forward(x)

    def backward(self, dy: Array) -> Array:
        """Returns the straight-through gradient, a copy of `dy`."""
        return backend_of(dy).copy(dy, "dy")

    def backward_clamped(self, dy: Array, x: Array) -> Array:
        """Returns the clipped straight-through gradient: `dy` where `x` is inside the range, otherwise 0.

            (qmin - zero_point) * scale <= x <= (qmax - zero_point) * scale

        >>> fq = FakeQuantizer(FakeQuantConfig.q8_asymmetric())
        >>> fq.calibrate(np.float32([-1.28, 1.27]))
        >>> fq.backward_clamped(np.float32([1, 1, 1]), np.float32([-1.0, 0.5, 2.0]))
        array([1., 1., 0.], dtype=float32)
        """
        lo, hi = (np.float32(q - self._zero_point) * self._scale for q in (self.config.qmin, self.config.qmax))
        backend = backend_of(dy)
        dy, x = backend.as_data(dy, "dy"), backend.as_data(x)
        if dy.shape != x.shape:
            raise ValueError(f"`dy` must have the shape of `x`, {tuple(x.shape)}, got {tuple(dy.shape)}.")
        return backend.zero_outside(dy, x, lo, hi)

    def __repr__(self) -> str:
        state = f"scale={self.scale}, zero_point={self.zero_point}" if self._initialized else "not calibrated"
        return f"FakeQuantizer({self.config}, numerics={self.numerics!r}, {state})"


def _saturate(value: np.ndarray, qmin: int, qmax: int) -> int:
    """Returns a float as an integer clamped to the range, and 0 for NaN."""
    return int(np.clip(np.nan_to_num(np.float64(value), nan=0.0), qmin, qmax))
