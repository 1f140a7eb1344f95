"""The compiled kernels. Private: use the functions of `fakequant`."""

import enum


class DType(enum.IntEnum):
    f32 = 0

    f64 = 1

    bf16 = 2

    f16 = 3

class Numerics(enum.IntEnum):
    torch_tensor = 0

    torch_channel = 1

    torch_channel_float = 2

    torch_channel_half = 3

    onnx = 4

    half_away = 5

    e4m3fn = 6

    e5m2 = 7

    e4m3fnuz = 8

    e5m2fnuz = 9

    e2m3 = 10

    e3m2 = 11

    e2m1 = 12

    q4_0 = 13

    q4_1 = 14

    q8_0 = 15

    tq2_0 = 16

    q8_0_input = 17

    q8_k_input = 18

    q4_k = 19

    q6_k = 20

class MaskKind(enum.IntEnum):
    none = 0

    packed = 1

    bytes = 2

class CodeType(enum.IntEnum):
    i8 = 0

    u8 = 1

    i16 = 2

    u16 = 3

    i32 = 4

    u32 = 5

    i4x2 = 6

    u4x2 = 7

    i2x4 = 8

    u2x4 = 9

    u6x4 = 10

class ZeroKind(enum.IntEnum):
    none = 0

    i32 = 1

    i64 = 2

    f32 = 3

class RangeRule(enum.IntEnum):
    own = 0

    torch_fused = 1

class RangeUpdate(enum.IntEnum):
    moving_average = 0

    min_max = 1

    dynamic = 2

class ScaleRule(enum.IntEnum):
    any = 0

    floor = 1

    ceil = 2

    even = 3

    rceil = 4

    e4m3fn = 5

    e4m3fn_divided = 6

    float16 = 7

    bfloat16 = 8

    even_e2m1 = 9

    q4_0 = 10

    q4_1 = 11

    q8_0 = 12

    tq2_0 = 13

    q8_0_input = 14

    q8_k_input = 15

    q4_k = 16

    q6_k = 17

def fake_quantize(x: object, y: object, mask: object | None, mask_kind: int, dtype: int, shape: tuple[int, int, int, int], numerics: int, scale: object, scale_is_f64: bool, zero_point: object | None, zero_kind: int, qmin: int, qmax: int) -> None: ...

def fake_quantize_scalar(x: object, y: object, mask: object | None, mask_kind: int, dtype: int, size: int, numerics: int, scale: float, zero_point: int, qmin: int, qmax: int) -> None: ...

def mask_backward(dy: object, mask: object, mask_kind: int, dx: object, dtype: int, size: int, multiply: bool) -> None: ...

def learned_backward(dy: object, x: object, dx: object, dtype: int, dx_dtype: int, shape: tuple[int, int, int, int], numerics: int, scale: object, scale_is_f64: bool, zero_point: object | None, zero_kind: int, qmin: int, qmax: int, grad_factor: float, dscale: object, dzero_point: object) -> None: ...

def quantize(x: object, q: object, dtype: int, code: int, shape: tuple[int, int, int, int], numerics: int, scale: object, scale_is_f64: bool, zero_point: object | None, zero_kind: int, qmin: int, qmax: int) -> None: ...

def dequantize(q: object, y: object, dtype: int, code: int, shape: tuple[int, int, int, int], numerics: int, scale: object, scale_is_f64: bool, zero_point: object | None, zero_kind: int, qmin: int, qmax: int) -> None: ...

def min_max(x: object, dtype: int, shape: tuple[int, int, int, int], lo: object, hi: object, counts: object) -> None: ...

def histogram(x: object, shape: tuple[int, int, int, int], inverse_width: object, half: int, counts: object) -> None: ...

def observe_fake_quantize(x: object, y: object, mask: object | None, mask_kind: int, dtype: int, shape: tuple[int, int, int, int], numerics: int, qmin: int, qmax: int, rule: int, update: int, observe: bool, quantize: bool, symmetric: bool, scale_rule: int, averaging_constant: float, eps: float, running_min: object, running_max: object, scale: object, zero_point: object) -> tuple[int, int, int, int]: ...

def choose_qparams(lo: object, hi: object, n: int, numerics: int, qmin: int, qmax: int, symmetric: bool, scale_rule: int, eps: float, scale: object, zero_point: object) -> None: ...

def first_invalid_scale(scale: object, is_f64: bool, n: int) -> int: ...

def first_outside(zero_point: object | None, zero_kind: int, n: int, low: int, high: int) -> int: ...

def keep_within(values: object, before: object, n: int, low: float, high: float) -> None: ...

def kernel_api() -> int:
    """The address of the kernels, for this package's other modules."""

def get_num_threads() -> int: ...

def set_num_threads(n: int) -> None: ...

def lend_threads(parallel_for: int, num_threads: int) -> None:
    """Addresses of torch's torch_parallel_for and torch_get_num_threads."""

def target() -> str: ...

def has_int8_products() -> bool: ...

def compiled_targets() -> list[str]: ...

def supported_targets() -> list[str]: ...

def select_target(name: str) -> bool: ...
