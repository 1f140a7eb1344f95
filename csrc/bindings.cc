// The Python module `fakequant._native`: converts arguments, releases the GIL and calls the core.
//
// Memory is passed as an object with the buffer protocol (a NumPy array of any dtype) or as an address (torch), so that
// one interface serves both without copies. The callers are this package's front ends, which check shapes and types.
// Errors that would access memory out of bounds raise ValueError here as well: missing or short buffers, invalid sizes,
// and integers that are not values of their enum.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>

#if !defined(_WIN32)
#include <cxxabi.h>
#include <unistd.h>
#endif

#include "bounded.h"
#include "core.h"
#include "kernel_api.h"
#include "parallel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// A view of a Python object's memory for the duration of one call.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (view_.obj) PyBuffer_Release(&view_);
  }

  // Accepts None, an address as an int, or an object with the buffer protocol. Returns false for anything else.
  bool from_object(PyObject* object, bool writable) {
    if (object == Py_None) return true;
    if (PyLong_CheckExact(object)) {
      data_ = PyLong_AsVoidPtr(object);
      is_address_ = true;
      bytes_ = std::numeric_limits<int64_t>::max();
      if (PyErr_Occurred()) PyErr_Clear();
      return data_ != nullptr;
    }
    // Requested as plain bytes, because dtypes such as bfloat16 have no format in the buffer protocol.
    if (PyObject_GetBuffer(object, &view_, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0) {
      PyErr_Clear();
      view_.obj = nullptr;
      return false;
    }
    data_ = view_.buf;
    bytes_ = view_.len;
    return true;
  }

  // Returns the memory as an array of at least `count` elements. Throws ValueError if it is smaller. None is memory
  // without elements, for which this returns nullptr.
  template <class T> T* get(int64_t count) const {
    if (data_ == nullptr) {
      if (count > 0) throw nb::value_error("fakequant._native: a required buffer is None");
      return nullptr;
    }
    if (bytes_ / int64_t(sizeof(T)) < count) {
      throw nb::value_error(("fakequant._native: a buffer of " + std::to_string(bytes_) + " bytes is too small for " +
                             std::to_string(count) + " elements of " + std::to_string(sizeof(T))).c_str());
    }
    return static_cast<T*>(data_);
  }
  void* bytes(int64_t count) const { return get<char>(count); }
  // Only torch's memory is passed as an address.
  bool is_torchs() const { return is_address_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
  bool is_address_ = false;
  Py_buffer view_{};
};

struct In : Memory {};
struct Out : Memory {};

}  // namespace

namespace nanobind::detail {
template <class T, bool Writable> struct memory_caster {
  static constexpr auto Name = const_name("object");
  template <class T_> using Cast = movable_cast_t<T_>;
  template <class T_> static constexpr bool can_cast() { return true; }
  bool from_python(handle src, uint8_t, cleanup_list*) noexcept { return value.from_object(src.ptr(), Writable); }
  explicit operator T&() { return value; }
  explicit operator T*() { return &value; }
  T value;
};
template <> struct type_caster<In> : memory_caster<In, false> {
  template <class T_> using Cast = In&;
};
template <> struct type_caster<Out> : memory_caster<Out, true> {
  template <class T_> using Cast = Out&;
};
}  // namespace nanobind::detail

namespace {

using namespace fakequant;

// Reacquires the GIL. If the interpreter is shutting down, Python before 3.14 ends the thread here by unwinding its
// stack. That must not run the destructors of the callers, so the thread waits here for the process to end, as in
// Python 3.14.
void take_gil(PyThreadState* state) {
#if defined(__GLIBCXX__) && !defined(_WIN32)
  try {
    PyEval_RestoreThread(state);
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
#else
  PyEval_RestoreThread(state);
#endif
}

// Reacquiring the GIL can take longer than the whole computation on a smaller array.
constexpr int64_t kReleaseGilFrom = 4096;

// Calls f on torch's threads if `data` is torch's, and without the GIL if `size` is large.
template <class F> void without_gil(const Memory& data, int64_t size, F&& f) {
  const BorrowThreads on_its_threads(data.is_torchs());
  if (size < kReleaseGilFrom) return f();
  PyThreadState* state = PyEval_SaveThread();
  try {
    f();
  } catch (...) {
    take_gil(state);
    throw;
  }
  take_gil(state);
}

using ShapeTuple = std::tuple<int64_t, int64_t, int64_t, int64_t>;

// For more elements, the size in bits might exceed int64.
constexpr int64_t kMaxElements = std::numeric_limits<int64_t>::max() / 64;

[[noreturn]] void refuse(const char* what) { throw nb::value_error(what); }

int64_t checked_size(int64_t n) {
  if (n < 0 || n > kMaxElements) refuse("fakequant._native: a size is negative or too large");
  return n;
}

Shape to_shape(const ShapeTuple& t) {
  const Shape s{std::get<0>(t), std::get<1>(t), std::get<2>(t), std::get<3>(t)};
  int64_t product = 1;
  for (int64_t n : {s.batch, s.outer, s.blocks, s.inner}) {
    if (n < 0 || (n > 0 && product > kMaxElements / n)) {
      refuse("fakequant._native: a shape is negative or too large");
    }
    // A size of 0 must not hide that the product of the other sizes is too large.
    if (n > 0) product *= n;
  }
  return s;
}

// Converts an int from Python to an enum of kernels.h. `last` is the enum's last value.
template <class E> E checked(int value, E last) {
  if (value < 0 || value > int(last)) refuse("fakequant._native: an int is not a value of its enum");
  return E(value);
}

DType to_dtype(int value) { return checked(value, DType::f16); }
MaskKind to_mask_kind(int value) { return checked(value, MaskKind::bytes); }
ScaleRule to_scale_rule(int value) { return checked(value, ScaleRule::q6_k); }
CodeType to_code(int value) { return checked(value, CodeType::u6x4); }
Numerics to_numerics(int value) { return checked(value, Numerics::q6_k); }

int64_t code_bytes(CodeType c, int64_t n) { return (n * bits_of(c) + 7) / 8; }

int64_t mask_bytes(MaskKind kind, int64_t n) {
  return kind == MaskKind::none ? 0 : kind == MaskKind::packed ? (n + 7) / 8 : n;
}

enum class ZeroKind : int { none, i32, i64, f32 };

Grid to_grid(int numerics, In& scale, bool scale_is_f64, In& zero, int zero_kind, int64_t qmin, int64_t qmax,
             int64_t parameters) {
  Grid g;
  g.numerics = to_numerics(numerics);
  g.qmin = qmin;
  g.qmax = qmax;
  if (scale_is_f64) g.scale_f64 = scale.get<const double>(parameters);
  else g.scale_f32 = scale.get<const float>(parameters);
  switch (checked(zero_kind, ZeroKind::f32)) {
    case ZeroKind::none: break;
    case ZeroKind::i32: g.zero_i32 = zero.get<const int32_t>(parameters); break;
    case ZeroKind::i64: g.zero_i64 = zero.get<const int64_t>(parameters); break;
    case ZeroKind::f32: g.zero_f32 = zero.get<const float>(parameters); break;
  }
  return g;
}

void py_fake_quantize(In& x, Out& y, Out& mask, int mask_kind, int dtype, const ShapeTuple& shape, int numerics,
                      In& scale, bool scale_is_f64, In& zero, int zero_kind, int64_t qmin, int64_t qmax) {
  const Shape s = to_shape(shape);
  const auto d = to_dtype(dtype);
  const auto kind = to_mask_kind(mask_kind);
  const int64_t n = s.size();
  const FakeQuantizeArgs a{d, s,
                           to_grid(numerics, scale, scale_is_f64, zero, zero_kind, qmin, qmax, s.parameters()),
                           x.bytes(n * bytes_of(d)), y.bytes(n * bytes_of(d)), kind,
                           mask.get<uint8_t>(mask_bytes(kind, n))};
  without_gil(x, n, [&] { fake_quantize(a); });
}

// Per tensor, with scale and zero point as numbers: saves small calls an allocation.
void py_fake_quantize_scalar(In& x, Out& y, Out& mask, int mask_kind, int dtype, int64_t size, int numerics,
                             double scale, int64_t zero, int64_t qmin, int64_t qmax) {
  checked_size(size);
  const auto d = to_dtype(dtype);
  const auto kind = to_mask_kind(mask_kind);
  const float scale_f32 = float(scale);
  const int32_t zero_i32 = int32_t(zero);
  Grid g;
  g.numerics = to_numerics(numerics);
  g.qmin = qmin;
  g.qmax = qmax;
  // torch's rules use float32 scales only. The other rules compute float64 arrays in float64.
  if (d == DType::f64 && g.numerics >= Numerics::onnx) g.scale_f64 = &scale;
  else g.scale_f32 = &scale_f32;
  if (zero_i32 == zero) g.zero_i32 = &zero_i32;
  else g.zero_i64 = &zero;
  const FakeQuantizeArgs a{d, Shape{1, 1, 1, size}, g, x.bytes(size * bytes_of(d)), y.bytes(size * bytes_of(d)), kind,
                           mask.get<uint8_t>(mask_bytes(kind, size))};
  without_gil(x, size, [&] { fake_quantize(a); });
}

void py_mask_backward(In& dy, In& mask, int mask_kind, Out& dx, int dtype, int64_t size, bool multiply) {
  checked_size(size);
  const auto d = to_dtype(dtype);
  const auto kind = to_mask_kind(mask_kind);
  const MaskBackwardArgs a{d, size, kind, multiply, dy.bytes(size * bytes_of(d)),
                           mask.get<const uint8_t>(mask_bytes(kind, size)), dx.bytes(size * bytes_of(d))};
  without_gil(dy, size, [&] { mask_backward(a); });
}

void py_learned_backward(In& dy, In& x, Out& dx, int dtype, int dx_dtype, const ShapeTuple& shape, int numerics,
                         In& scale, bool scale_is_f64, In& zero, int zero_kind, int64_t qmin, int64_t qmax,
                         double grad_factor, Out& dscale, Out& dzero) {
  const Shape s = to_shape(shape);
  const auto d = to_dtype(dtype), dd = to_dtype(dx_dtype);
  const int64_t n = s.size(), p = s.parameters();
  if (numerics == int(Numerics::q8_0_input) || numerics == int(Numerics::q8_k_input)) {
    throw nb::value_error("the scales of inputs follow every tensor");
  }
  const LearnedBackwardArgs a{d, dd, s,
                              to_grid(numerics, scale, scale_is_f64, zero, zero_kind, qmin, qmax, p),
                              grad_factor, dy.bytes(n * bytes_of(d)), x.bytes(n * bytes_of(d)),
                              dx.bytes(n * bytes_of(dd)), dscale.get<double>(p), dzero.get<double>(p)};
  without_gil(dy, n, [&] { learned_backward(a); });
}

void py_quantize(In& x, Out& q, int dtype, int code, const ShapeTuple& shape, int numerics, In& scale,
                 bool scale_is_f64, In& zero, int zero_kind, int64_t qmin, int64_t qmax) {
  const Shape s = to_shape(shape);
  const auto d = to_dtype(dtype);
  const auto c = to_code(code);
  const int64_t n = s.size();
  const QuantizeArgs a{d, c, s, to_grid(numerics, scale, scale_is_f64, zero, zero_kind, qmin, qmax, s.parameters()),
                       x.bytes(n * bytes_of(d)), q.bytes(code_bytes(c, n))};
  without_gil(x, n, [&] { quantize(a); });
}

void py_dequantize(In& q, Out& y, int dtype, int code, const ShapeTuple& shape, int numerics, In& scale,
                   bool scale_is_f64, In& zero, int zero_kind, int64_t qmin, int64_t qmax) {
  const Shape s = to_shape(shape);
  const auto d = to_dtype(dtype);
  const auto c = to_code(code);
  const int64_t n = s.size();
  const DequantizeArgs a{d, c, s,
                         to_grid(numerics, scale, scale_is_f64, zero, zero_kind, qmin, qmax, s.parameters()),
                         q.bytes(code_bytes(c, n)), y.bytes(n * bytes_of(d))};
  without_gil(q, n, [&] { dequantize(a); });
}

void py_min_max(In& x, int dtype, const ShapeTuple& shape, Out& lo, Out& hi, Out& counts) {
  const Shape s = to_shape(shape);
  const auto d = to_dtype(dtype);
  const int64_t p = s.parameters();
  int64_t* c = counts.get<int64_t>(3 * p);
  const MinMaxArgs a{d, s, x.bytes(s.size() * bytes_of(d)), lo.get<double>(p), hi.get<double>(p), c, c + p, c + 2 * p};
  without_gil(x, s.size(), [&] { min_max(a); });
}

void py_histogram(In& x, const ShapeTuple& shape, In& inverse_width, int64_t half, Out& counts) {
  const Shape s = to_shape(shape);
  if (half < 1 || half > kMaxElements / std::max<int64_t>(s.parameters(), 1)) {
    refuse("fakequant._native: `half`, the number of bins on each side of zero, is less than 1 or too large");
  }
  const HistogramArgs a{s, half, x.get<const float>(s.size()), inverse_width.get<const float>(s.parameters()),
                        counts.get<int64_t>(s.parameters() * 2 * half)};
  without_gil(x, s.size(), [&] { histogram(a); });
}

std::tuple<int64_t, int64_t, int64_t, int64_t> py_observe_fake_quantize(
    In& x, Out& y, Out& mask, int mask_kind, int dtype, const ShapeTuple& shape, int numerics, int64_t qmin,
    int64_t qmax, int rule, int update, bool observe, bool quantize, bool symmetric, int scale_rule,
    double averaging_constant, double eps, Out& running_min, Out& running_max, Out& scale, Out& zero_point) {
  const Shape s = to_shape(shape);
  const auto d = to_dtype(dtype);
  const auto kind = to_mask_kind(mask_kind);
  const int64_t n = s.size(), p = s.parameters();
  Grid g;
  g.numerics = to_numerics(numerics);
  g.qmin = qmin;
  g.qmax = qmax;
  const FakeQuantizeArgs a{d, s, g, x.bytes(n * bytes_of(d)), y.bytes(n * bytes_of(d)), kind,
                           mask.get<uint8_t>(mask_bytes(kind, n))};
  const ObserveArgs o{checked(rule, RangeRule::torch_fused), checked(update, RangeUpdate::dynamic), observe, quantize,
                      symmetric, to_scale_rule(scale_rule), float(averaging_constant), float(eps),
                      running_min.get<float>(p),
                      running_max.get<float>(p), scale.get<float>(p), zero_point.get<int32_t>(p)};
  ObserveResult r;
  without_gil(x, n, [&] { r = observe_fake_quantize(o, a); });
  return {r.nan_count, r.posinf_count, r.neginf_count, r.unseen};
}

void py_choose_qparams(In& lo, In& hi, int64_t n, int numerics, int64_t qmin, int64_t qmax, bool symmetric,
                       int scale_rule, double eps, Out& scale, Out& zero_point) {
  checked_size(n);
  Grid g;
  g.numerics = to_numerics(numerics);
  g.qmin = qmin;
  g.qmax = qmax;
  const auto rule = to_scale_rule(scale_rule);
  const float* l = lo.get<const float>(n);
  const float* h = hi.get<const float>(n);
  float* s = scale.get<float>(n);
  int32_t* z = zero_point.get<int32_t>(n);
  if (!is_per_block(rule)) {
    choose_block_scales(l, h, n, rule, g, s, z);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    const QParam p = choose_qparams(l[i], h[i], g, symmetric, rule, float(eps));
    s[i] = p.scale;
    z[i] = p.zero_point;
  }
}

// Returns the index of the first scale that is not finite and positive, or -1.
int64_t py_first_invalid_scale(In& scale, bool is_f64, int64_t n) {
  checked_size(n);
  const auto find = [n](const auto* s) {
    for (int64_t i = 0; i < n; ++i) {
      if (!(s[i] > 0) || std::isinf(s[i])) return i;
    }
    return int64_t(-1);
  };
  return is_f64 ? find(scale.get<const double>(n)) : find(scale.get<const float>(n));
}

// The entries of the KernelApi.
template <auto kernel> struct OnTorchsThreads;
template <class Args, class Result, Result (*kernel)(const Args&)> struct OnTorchsThreads<kernel> {
  static Result run(const Args& args) {
    const BorrowThreads on_its_threads(true);
    return kernel(args);
  }
};

ObserveResult observe_on_torchs_threads(const ObserveArgs& o, FakeQuantizeArgs a) {
  const BorrowThreads on_its_threads(true);
  return observe_fake_quantize(o, a);
}

void py_keep_within(Out& values, Out& before, int64_t n, double low, double high) {
  checked_size(n);
  keep_within(values.get<float>(n), before.get<float>(n), n, float(low), float(high));
}

// Returns the index of the first zero point outside [low, high], or -1.
int64_t py_first_outside(In& zero, int zero_kind, int64_t n, int64_t low, int64_t high) {
  checked_size(n);
  const auto find = [=](const auto* z) {
    for (int64_t i = 0; i < n; ++i) {
      if (!(z[i] >= low && z[i] <= high)) return i;
    }
    return int64_t(-1);
  };
  switch (checked(zero_kind, ZeroKind::f32)) {
    case ZeroKind::none: break;
    case ZeroKind::i32: return find(zero.get<const int32_t>(n));
    case ZeroKind::i64: return find(zero.get<const int64_t>(n));
    case ZeroKind::f32: return find(zero.get<const float>(n));
  }
  return -1;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "The compiled kernels. Private: use the functions of `fakequant`.";

  // Python reads the values of the enums from these. The functions below take them as plain ints.
  nb::enum_<DType>(m, "DType", nb::is_arithmetic())
      .value("f32", DType::f32).value("f64", DType::f64).value("bf16", DType::bf16).value("f16", DType::f16);
  nb::enum_<Numerics>(m, "Numerics", nb::is_arithmetic())
      .value("torch_tensor", Numerics::torch_tensor).value("torch_channel", Numerics::torch_channel)
      .value("torch_channel_float", Numerics::torch_channel_float)
      .value("torch_channel_half", Numerics::torch_channel_half)
      .value("onnx", Numerics::onnx).value("half_away", Numerics::half_away).value("e4m3fn", Numerics::e4m3fn)
      .value("e5m2", Numerics::e5m2).value("e4m3fnuz", Numerics::e4m3fnuz).value("e5m2fnuz", Numerics::e5m2fnuz)
      .value("e2m3", Numerics::e2m3).value("e3m2", Numerics::e3m2).value("e2m1", Numerics::e2m1)
      .value("q4_0", Numerics::q4_0).value("q4_1", Numerics::q4_1).value("q8_0", Numerics::q8_0)
      .value("tq2_0", Numerics::tq2_0).value("q8_0_input", Numerics::q8_0_input)
      .value("q8_k_input", Numerics::q8_k_input).value("q4_k", Numerics::q4_k).value("q6_k", Numerics::q6_k);
  nb::enum_<MaskKind>(m, "MaskKind", nb::is_arithmetic())
      .value("none", MaskKind::none).value("packed", MaskKind::packed).value("bytes", MaskKind::bytes);
  nb::enum_<CodeType>(m, "CodeType", nb::is_arithmetic())
      .value("i8", CodeType::i8).value("u8", CodeType::u8).value("i16", CodeType::i16).value("u16", CodeType::u16)
      .value("i32", CodeType::i32).value("u32", CodeType::u32).value("i4x2", CodeType::i4x2)
      .value("u4x2", CodeType::u4x2).value("i2x4", CodeType::i2x4).value("u2x4", CodeType::u2x4)
      .value("u6x4", CodeType::u6x4);
  nb::enum_<ZeroKind>(m, "ZeroKind", nb::is_arithmetic())
      .value("none", ZeroKind::none).value("i32", ZeroKind::i32).value("i64", ZeroKind::i64)
      .value("f32", ZeroKind::f32);
  nb::enum_<RangeRule>(m, "RangeRule", nb::is_arithmetic())
      .value("own", RangeRule::own).value("torch_fused", RangeRule::torch_fused);
  nb::enum_<RangeUpdate>(m, "RangeUpdate", nb::is_arithmetic())
      .value("moving_average", RangeUpdate::moving_average).value("min_max", RangeUpdate::min_max)
      .value("dynamic", RangeUpdate::dynamic);
  nb::enum_<ScaleRule>(m, "ScaleRule", nb::is_arithmetic())
      .value("any", ScaleRule::any).value("floor", ScaleRule::floor).value("ceil", ScaleRule::ceil)
      .value("even", ScaleRule::even).value("rceil", ScaleRule::rceil).value("e4m3fn", ScaleRule::e4m3fn)
      .value("e4m3fn_divided", ScaleRule::e4m3fn_divided).value("float16", ScaleRule::float16)
      .value("bfloat16", ScaleRule::bfloat16).value("even_e2m1", ScaleRule::even_e2m1).value("q4_0", ScaleRule::q4_0)
      .value("q4_1", ScaleRule::q4_1).value("q8_0", ScaleRule::q8_0).value("tq2_0", ScaleRule::tq2_0)
      .value("q8_0_input", ScaleRule::q8_0_input).value("q8_k_input", ScaleRule::q8_k_input)
      .value("q4_k", ScaleRule::q4_k).value("q6_k", ScaleRule::q6_k);

  m.def("fake_quantize", &py_fake_quantize, "x"_a, "y"_a, "mask"_a.none(), "mask_kind"_a, "dtype"_a, "shape"_a,
        "numerics"_a, "scale"_a, "scale_is_f64"_a, "zero_point"_a.none(), "zero_kind"_a, "qmin"_a, "qmax"_a);
  m.def("fake_quantize_scalar", &py_fake_quantize_scalar, "x"_a, "y"_a, "mask"_a.none(), "mask_kind"_a, "dtype"_a,
        "size"_a, "numerics"_a, "scale"_a, "zero_point"_a, "qmin"_a, "qmax"_a);
  m.def("mask_backward", &py_mask_backward, "dy"_a, "mask"_a, "mask_kind"_a, "dx"_a, "dtype"_a, "size"_a,
        "multiply"_a);
  m.def("learned_backward", &py_learned_backward, "dy"_a, "x"_a, "dx"_a, "dtype"_a, "dx_dtype"_a, "shape"_a,
        "numerics"_a, "scale"_a, "scale_is_f64"_a, "zero_point"_a.none(), "zero_kind"_a, "qmin"_a, "qmax"_a,
        "grad_factor"_a, "dscale"_a, "dzero_point"_a);
  m.def("quantize", &py_quantize, "x"_a, "q"_a, "dtype"_a, "code"_a, "shape"_a, "numerics"_a, "scale"_a,
        "scale_is_f64"_a, "zero_point"_a.none(), "zero_kind"_a, "qmin"_a, "qmax"_a);
  m.def("dequantize", &py_dequantize, "q"_a, "y"_a, "dtype"_a, "code"_a, "shape"_a, "numerics"_a, "scale"_a,
        "scale_is_f64"_a, "zero_point"_a.none(), "zero_kind"_a, "qmin"_a, "qmax"_a);
  m.def("min_max", &py_min_max, "x"_a, "dtype"_a, "shape"_a, "lo"_a, "hi"_a, "counts"_a);
  m.def("histogram", &py_histogram, "x"_a, "shape"_a, "inverse_width"_a, "half"_a, "counts"_a);
  m.def("observe_fake_quantize", &py_observe_fake_quantize, "x"_a, "y"_a, "mask"_a.none(), "mask_kind"_a, "dtype"_a,
        "shape"_a, "numerics"_a, "qmin"_a, "qmax"_a, "rule"_a, "update"_a, "observe"_a, "quantize"_a, "symmetric"_a,
        "scale_rule"_a, "averaging_constant"_a, "eps"_a, "running_min"_a, "running_max"_a, "scale"_a, "zero_point"_a);
  m.def("choose_qparams", &py_choose_qparams, "lo"_a, "hi"_a, "n"_a, "numerics"_a, "qmin"_a, "qmax"_a,
        "symmetric"_a, "scale_rule"_a, "eps"_a, "scale"_a, "zero_point"_a);
  m.def("first_invalid_scale", &py_first_invalid_scale, "scale"_a, "is_f64"_a, "n"_a);
  m.def("first_outside", &py_first_outside, "zero_point"_a.none(), "zero_kind"_a, "n"_a, "low"_a, "high"_a);

  m.def("keep_within", &py_keep_within, "values"_a, "before"_a, "n"_a, "low"_a, "high"_a);
  m.def(
      "kernel_api",
      [] {
        static const KernelApi api{&OnTorchsThreads<fake_quantize>::run, &OnTorchsThreads<mask_backward>::run,
                                   &OnTorchsThreads<learned_backward>::run, &observe_on_torchs_threads,
                                   &OnTorchsThreads<encode_levels>::run,    &OnTorchsThreads<scale_sums>::run,
                                   &OnTorchsThreads<scale_planes>::run,     &has_int8_products};
        return reinterpret_cast<size_t>(&api);
      },
      "The address of the kernels, for this package's other modules.");
  m.def("get_num_threads", &get_num_threads);
  m.def("set_num_threads", &set_num_threads, "n"_a);
  m.def(
      "lend_threads",
      [](size_t parallel_for, size_t num_threads) {
        lend_threads({reinterpret_cast<decltype(Borrowed::parallel_for)>(parallel_for),
                        reinterpret_cast<decltype(Borrowed::num_threads)>(num_threads)});
      },
      "parallel_for"_a, "num_threads"_a, "Addresses of torch's torch_parallel_for and torch_get_num_threads.");
  m.def("target", [] { return std::string(kernels().name); });
  m.def("has_int8_products", &has_int8_products);
  m.def("compiled_targets", &compiled_targets);
  m.def("supported_targets", &supported_targets);
  m.def("select_target", &select_target, "name"_a);
}
