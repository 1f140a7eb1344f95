"""`FakeQuantizer`: scale and zero point in an object, calibrated from data, with explicit gradients."""

import dataclasses
from math import inf, nan
from typing import Any

import numpy as np

from fakequant._backends import backend_of, is_tensor
from fakequant.functional import fake_quantize
from fakequant.qparams import min_max
from fakequant.reference import round_half_away
from fakequant.spec import NUMERICS, Numerics, QuantSpec

# A smaller scale would make 1 / scale overflow soon; constant data would give 0.
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
        """The usual range: symmetric -(2^(bits-1) - 1) to 2^(bits-1) - 1, asymmetric 0 to 2^bits - 1."""
        if symmetric:
            top = (1 << (bits - 1)) - 1 if bits > 0 else 0
            return cls(bits, True, -top, top)
        return cls(bits, False, 0, (1 << bits) - 1 if bits > 0 else 0)

    @classmethod
    def q4_symmetric(cls) -> "FakeQuantConfig":
        """4 bits, -7 to 7."""
        return cls.of(bits=4, symmetric=True)

    @classmethod
    def q8_symmetric(cls) -> "FakeQuantConfig":
        """8 bits, -127 to 127."""
        return cls.of(bits=8, symmetric=True)

    @classmethod
    def q4_asymmetric(cls) -> "FakeQuantConfig":
        """4 bits, 0 to 15."""
        return cls.of(bits=4, symmetric=False)

    @classmethod
    def q8_asymmetric(cls) -> "FakeQuantConfig":
        """8 bits, 0 to 255."""
        return cls.of(bits=8, symmetric=False)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _AnyRange(QuantSpec):
    """A spec whose range does not follow from its bits."""

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

    That is the default numerics, "half_away", where NaN becomes code 0; "onnx" and "torch" round as
    docs/numerics.md says. Before calibration the scale is 1 and the zero point 0.

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
        """4-bit symmetric."""
        return cls(FakeQuantConfig.q4_symmetric())

    @classmethod
    def q8(cls) -> "FakeQuantizer":
        """8-bit symmetric."""
        return cls(FakeQuantConfig.q8_symmetric())

    @property
    def scale(self) -> np.float32:
        """The step between neighbouring levels."""
        return self._scale

    @property
    def zero_point(self) -> int:
        """The code of the value 0."""
        return self._zero_point

    @property
    def is_initialized(self) -> bool:
        """Whether the scale comes from data."""
        return self._initialized

    @property
    def num_levels(self) -> int:
        """How many codes there are."""
        return self.config.qmax - self.config.qmin + 1

    def calibrate(self, data: np.ndarray) -> None:
        """Takes scale and zero point from the smallest and largest value of `data`.

            symmetric    scale = max(|min|, |max|) / qmax;          zero_point = 0
            asymmetric   min, max = min(min, 0), max(max, 0)
                         scale = (max - min) / (qmax - qmin)
                         zero_point = clamp(round_half_away(qmin - min / scale), qmin, qmax)

        An asymmetric range holds 0, which has a code: without it no zero point would reach the data. The scale
        is at least 1e-10. NaN is left out; if nothing is left, nothing changes.
        """
        data = _as_array(data) if is_tensor(data) else backend_of(data).as_data(data, "data")
        with np.errstate(over="ignore"):
            data = data.astype(np.float32)
        seen = min_max(data)
        if seen.nan == data.size:
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
        # Python's numbers are constants to torch.compile; NumPy's are inputs, whose values it does not know.
        self._number = float(scale)
        with np.errstate(invalid="ignore"):
            # The value of code 0, computed in float32.
            self._value_of_zero = float(np.float32(-zero_point) * scale)

    def forward(self, x: Any) -> Any:
        """`x` rounded to the grid. On a tensor, autograd passes the gradient through."""
        x = backend_of(x).as_data(x)
        scale, zero_point = self._number, self._zero_point
        if scale == inf:
            return self._forward_infinite(x)
        y = fake_quantize(x, scale, zero_point, self._spec, gradient="pass")
        if self.numerics == "half_away":  # where NaN is code 0
            _overwrite(y, x != x, -zero_point * scale if y.dtype.itemsize == 8 else self._value_of_zero)
        return y

    def _forward_infinite(self, x: Any) -> Any:
        """The formulas with an infinite scale, where `x / scale` is 0, or NaN if `x` is not finite."""
        spec = self._spec
        y = fake_quantize(x, 1.0, 0, spec, gradient="pass")
        code_of_nan = {"half_away": 0.0, "torch": float(spec.qmin), "onnx": nan}[self.numerics]
        code = min(max(self._zero_point, spec.qmin), spec.qmax)
        is_finite = abs(x) < inf
        _overwrite(y, is_finite, (code - self._zero_point) * inf)
        _overwrite(y, ~is_finite, (code_of_nan - self._zero_point) * inf)
        return y

    def forward_with_calibration(self, x: np.ndarray) -> np.ndarray:
        """`forward`, after calibrating on `x` if nothing was calibrated before."""
        if not self._initialized:
            self.calibrate(x)
        y: np.ndarray = self.forward(x)
        return y

    def backward(self, dy: Any) -> Any:
        """The straight-through gradient: `dy` unchanged, as a copy."""
        return dy.clone() if is_tensor(dy) else np.array(backend_of(dy).as_data(dy, "dy"))

    def backward_clamped(self, dy: Any, x: Any) -> Any:
        """`dy` where `x` is representable, else 0.

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
        if not is_tensor(dy):
            return np.where((x < lo) | (x > hi), np.zeros((), dy.dtype), dy)
        wide = x if x.dtype.itemsize == 8 else x.float()  # or the bounds would be rounded to 16 bits
        return dy.where(~((wide < float(lo)) | (wide > float(hi))), 0)

    def __repr__(self) -> str:
        state = f"scale={self.scale}, zero_point={self.zero_point}" if self._initialized else "not calibrated"
        return f"FakeQuantizer({self.config}, numerics={self.numerics!r}, {state})"


def _overwrite(y: Any, where: Any, value: float) -> None:
    """Writes `value` into a result. Its gradient stays as it is: passed through."""
    if is_tensor(y):
        y.detach().masked_fill_(where, value)
    else:
        y[where] = value


def _as_array(data: Any) -> np.ndarray:
    """A tensor's values as float32; the range is float32 in any case."""
    array: np.ndarray = data.detach().resolve_neg().float().cpu().numpy()
    return array


def _saturate(value: np.ndarray, qmin: int, qmax: int) -> int:
    """A float as an integer in range; NaN counts as 0."""
    return int(np.clip(np.nan_to_num(np.float64(value), nan=0.0), qmin, qmax))
