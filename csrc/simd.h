// Vector operations for the kernels, written once for any vector width.
//
// Vectors are GCC/Clang vector extensions: arithmetic, comparisons and `mask ? a : b` need no intrinsics and are the
// same source on every target. Only operations that the extensions lack (rounding, fused multiply-add, one bit per
// lane, half precision) use intrinsics, and each has a portable fallback with bit-identical results.
//
// Everything is in a namespace named after the target (FQ_TARGET), because this header is compiled several times with
// different -m flags into one library. The linker would merge inline functions of the same name, and a CPU without AVX
// could end up running AVX code. For the same reason the kernels must not use inline functions of the standard library.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef FQ_TARGET
#error "FQ_TARGET must name the namespace of this instruction set, e.g. -DFQ_TARGET=avx2"
#endif

#define FQ_INLINE inline __attribute__((always_inline))
#define FQ_INLINE_LAMBDA __attribute__((always_inline))

namespace fakequant::FQ_TARGET {

// Storage types of the 16-bit floats. All arithmetic is in float32.
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

template <class T, int N>
struct VecOf { typedef T type __attribute__((vector_size(N * sizeof(T)))); };
template <class T, int N>
using Vec = typename VecOf<T, N>::type;

template <class T> struct Remove { using type = T; };
template <class T> struct Remove<T&> { using type = T; };
template <class T> struct Remove<T&&> { using type = T; };
template <class T> struct Remove<const T> { using type = T; };
template <class T> struct Remove<const T&> { using type = T; };

// Element type and width of a vector type, e.g. Elem<Vec<float, 8>> is float, kWidth is 8.
template <class V> using Elem = typename Remove<decltype(V{}[0])>::type;
template <class V> inline constexpr int kWidth = int(sizeof(V) / sizeof(Elem<V>));

template <class A, class B> inline constexpr bool kSame = false;
template <class A> inline constexpr bool kSame<A, A> = true;

// Number of float lanes of the widest register; half as many for doubles.
#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

// Whether kernels choose more at run time, so that there are fewer to compile. On x86-64 only CPUs without AVX2 run the
// baseline: building it fast matters more than the last bit of speed.
#if defined(__x86_64__) && !defined(__AVX2__)
inline constexpr bool kCompilesFast = true;
#else
inline constexpr bool kCompilesFast = false;
#endif

// Whether fma() is one instruction.
#if defined(__FMA__) || defined(__aarch64__)
inline constexpr bool kHasFma = true;
#else
inline constexpr bool kHasFma = false;
#endif

// The type that arithmetic is done in: float64 for float64, float32 for everything else.
template <class T> struct ComputeOf { using type = float; };
template <> struct ComputeOf<double> { using type = double; };
template <class T> using Compute = typename ComputeOf<T>::type;
template <class C> inline constexpr int kLanesOf = kLanes * int(sizeof(float)) / int(sizeof(C));

template <class To, class From>
FQ_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

template <class V> FQ_INLINE V splat(Elem<V> value) { return value - V{}; }

template <class V> FQ_INLINE V load_raw(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}
template <class V> FQ_INLINE void store_raw(void* p, V v) { __builtin_memcpy(p, &v, sizeof(V)); }

template <class V> using Half = Vec<Elem<V>, kWidth<V> / 2>;
template <class V> FQ_INLINE Half<V> low_half(V v) {
  Half<V> h;
  __builtin_memcpy(&h, &v, sizeof(h));
  return h;
}
template <class V> FQ_INLINE Half<V> high_half(V v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64) return bit_cast<Half<V>>(_mm512_extracti64x4_epi64(bit_cast<__m512i>(v), 1));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32) return bit_cast<Half<V>>(_mm256_extracti128_si256(bit_cast<__m256i>(v), 1));
#endif
  Half<V> h;
  __builtin_memcpy(&h, reinterpret_cast<const char*>(&v) + sizeof(h), sizeof(h));
  return h;
}
template <class V> FQ_INLINE V join(Half<V> low, Half<V> high) {
  V v;
  __builtin_memcpy(&v, &low, sizeof(low));
  __builtin_memcpy(reinterpret_cast<char*>(&v) + sizeof(low), &high, sizeof(high));
  return v;
}

// Interleaves the lower or the upper halves of each 128 bits of a and b: words of 32 bits, halves or pairs of words.
template <bool High, class W> FQ_INLINE W interleave_words(W a, W b) {
  constexpr int N = kWidth<W>, H = High ? 2 : 0;
  static_assert(sizeof(Elem<W>) == 4);
  if constexpr (N == 4) return __builtin_shufflevector(a, b, H, H + 4, H + 1, H + 5);
  else if constexpr (N == 8) return __builtin_shufflevector(a, b, H, H + 8, H + 1, H + 9, H + 4, H + 12, H + 5, H + 13);
  else return __builtin_shufflevector(a, b, H, H + 16, H + 1, H + 17, H + 4, H + 20, H + 5, H + 21,
                                      H + 8, H + 24, H + 9, H + 25, H + 12, H + 28, H + 13, H + 29);
}
template <bool High, class W> FQ_INLINE W interleave_halves(W a, W b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(W) == 64) {
    const __m512i c = bit_cast<__m512i>(a), d = bit_cast<__m512i>(b);
    return bit_cast<W>(High ? _mm512_unpackhi_epi16(c, d) : _mm512_unpacklo_epi16(c, d));
  } else
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(W) == 32) {
    const __m256i c = bit_cast<__m256i>(a), d = bit_cast<__m256i>(b);
    return bit_cast<W>(High ? _mm256_unpackhi_epi16(c, d) : _mm256_unpacklo_epi16(c, d));
  } else
#endif
  {
    using H = Vec<uint16_t, 8>;
    constexpr int I = High ? 4 : 0;
    return bit_cast<W>(__builtin_shufflevector(bit_cast<H>(a), bit_cast<H>(b), I, I + 8, I + 1, I + 9, I + 2, I + 10, I + 3, I + 11));
  }
}
template <bool High, class W> FQ_INLINE W interleave_pairs(W a, W b) {
  using D = Vec<uint64_t, kWidth<W> / 2>;
  constexpr int N = kWidth<D>, H = High ? 1 : 0;
  const D c = bit_cast<D>(a), d = bit_cast<D>(b);
  if constexpr (N == 2) return bit_cast<W>(__builtin_shufflevector(c, d, H, H + 2));
  else if constexpr (N == 4) return bit_cast<W>(__builtin_shufflevector(c, d, H, H + 4, H + 2, H + 6));
  else return bit_cast<W>(__builtin_shufflevector(c, d, H, H + 8, H + 2, H + 10, H + 4, H + 12, H + 6, H + 14));
}

// Lanes [I * N, (I + 1) * N) of v.
template <int N, int I, class V> FQ_INLINE Vec<Elem<V>, N> part(V v) {
  Vec<Elem<V>, N> p;
  __builtin_memcpy(&p, reinterpret_cast<const char*>(&v) + I * sizeof(p), sizeof(p));
  return p;
}

inline constexpr int kRegisterBytes = kLanes * int(sizeof(float));

// Converts lane by lane, as a C++ conversion does. Vectors wider than a register are converted in halves. Widenings for
// which GCC 12 generates poor code use intrinsics.
template <class To, class From> FQ_INLINE To convert(From v) {
  if constexpr (kSame<To, From>) return v;
  else if constexpr (kWidth<To> > 1 && (int(sizeof(To)) > kRegisterBytes || int(sizeof(From)) > kRegisterBytes)) {
    return join<To>(convert<Half<To>>(low_half(v)), convert<Half<To>>(high_half(v)));
  }
#if defined(__AVX2__)
  else if constexpr (kSame<To, Vec<double, 4>> && kSame<From, Vec<float, 4>>) return bit_cast<To>(_mm256_cvtps_pd(bit_cast<__m128>(v)));
  else if constexpr (kSame<To, Vec<float, 4>> && kSame<From, Vec<double, 4>>) return bit_cast<To>(_mm256_cvtpd_ps(bit_cast<__m256d>(v)));
  else if constexpr (kWidth<To> == 8 && sizeof(To) == 32 && !kSame<Elem<To>, float>) {
    if constexpr (kSame<Elem<From>, uint16_t>) return bit_cast<To>(_mm256_cvtepu16_epi32(bit_cast<__m128i>(v)));
    else if constexpr (kSame<Elem<From>, int16_t>) return bit_cast<To>(_mm256_cvtepi16_epi32(bit_cast<__m128i>(v)));
    else if constexpr (kSame<Elem<From>, uint8_t>) return bit_cast<To>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bit_cast<int64_t>(v))));
    else if constexpr (kSame<Elem<From>, int8_t>) return bit_cast<To>(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(bit_cast<int64_t>(v))));
    else return __builtin_convertvector(v, To);
  }
#endif
#if defined(__AVX512F__)
  else if constexpr (kSame<To, Vec<int32_t, 16>> && kSame<From, Vec<uint8_t, 16>>) return bit_cast<To>(_mm512_cvtepu8_epi32(bit_cast<__m128i>(v)));
  else if constexpr (kSame<To, Vec<int32_t, 16>> && kSame<From, Vec<int8_t, 16>>) return bit_cast<To>(_mm512_cvtepi8_epi32(bit_cast<__m128i>(v)));
#endif
  else return __builtin_convertvector(v, To);
}

// --- sign and magnitude --------------------------------------------------------------------------

template <int Bytes> struct UInt;
template <> struct UInt<2> { using type = uint16_t; };
template <> struct UInt<4> { using type = uint32_t; };
template <> struct UInt<8> { using type = uint64_t; };
template <int Bytes> struct Int;
template <> struct Int<4> { using type = int32_t; };
template <> struct Int<8> { using type = int64_t; };
// The unsigned-integer vector with the same lanes as V.
template <class V> using Bits = Vec<typename UInt<int(sizeof(Elem<V>))>::type, kWidth<V>>;

template <class V> inline constexpr auto kSignBit =
    typename UInt<int(sizeof(Elem<V>))>::type(1) << (8 * sizeof(Elem<V>) - 1);

template <class V> FQ_INLINE V magnitude(V v) { return bit_cast<V>(bit_cast<Bits<V>>(v) & ~kSignBit<V>); }
template <class V> FQ_INLINE V with_sign_of(V v, V sign) {
  return bit_cast<V>((bit_cast<Bits<V>>(v) & ~kSignBit<V>) | (bit_cast<Bits<V>>(sign) & kSignBit<V>));
}

// Return v in the lanes where the comparison is true (zero_unless) or false (zero_where), and +0.0 in the other lanes.
template <class M, class V> FQ_INLINE V zero_unless(M lanes, V v) {
  return bit_cast<V>(bit_cast<Bits<V>>(v) & bit_cast<Bits<V>>(lanes));
}
template <class M, class V> FQ_INLINE V zero_where(M lanes, V v) {
  return bit_cast<V>(bit_cast<Bits<V>>(v) & ~bit_cast<Bits<V>>(lanes));
}

// --- minimum and maximum -------------------------------------------------------------------------
// Return the second operand if either is NaN, as x86's minps and maxps do. By the order of the operands a kernel
// chooses whether NaN is clamped or kept.

template <class V> FQ_INLINE V max_or_second(V a, V b) {
#if defined(__AVX512F__)
  if constexpr (kSame<V, Vec<float, 16>>) return bit_cast<V>(_mm512_max_ps(bit_cast<__m512>(a), bit_cast<__m512>(b)));
  else if constexpr (kSame<V, Vec<double, 8>>) return bit_cast<V>(_mm512_max_pd(bit_cast<__m512d>(a), bit_cast<__m512d>(b)));
  else
#endif
#if defined(__AVX__)
  if constexpr (kSame<V, Vec<float, 8>>) return bit_cast<V>(_mm256_max_ps(bit_cast<__m256>(a), bit_cast<__m256>(b)));
  else if constexpr (kSame<V, Vec<double, 4>>) return bit_cast<V>(_mm256_max_pd(bit_cast<__m256d>(a), bit_cast<__m256d>(b)));
  else
#endif
#if defined(__SSE2__)
  if constexpr (kSame<V, Vec<float, 4>>) return bit_cast<V>(_mm_max_ps(bit_cast<__m128>(a), bit_cast<__m128>(b)));
  else if constexpr (kSame<V, Vec<double, 2>>) return bit_cast<V>(_mm_max_pd(bit_cast<__m128d>(a), bit_cast<__m128d>(b)));
  else
#endif
  return a > b ? a : b;
}

template <class V> FQ_INLINE V min_or_second(V a, V b) {
#if defined(__AVX512F__)
  if constexpr (kSame<V, Vec<float, 16>>) return bit_cast<V>(_mm512_min_ps(bit_cast<__m512>(a), bit_cast<__m512>(b)));
  else if constexpr (kSame<V, Vec<double, 8>>) return bit_cast<V>(_mm512_min_pd(bit_cast<__m512d>(a), bit_cast<__m512d>(b)));
  else
#endif
#if defined(__AVX__)
  if constexpr (kSame<V, Vec<float, 8>>) return bit_cast<V>(_mm256_min_ps(bit_cast<__m256>(a), bit_cast<__m256>(b)));
  else if constexpr (kSame<V, Vec<double, 4>>) return bit_cast<V>(_mm256_min_pd(bit_cast<__m256d>(a), bit_cast<__m256d>(b)));
  else
#endif
#if defined(__SSE2__)
  if constexpr (kSame<V, Vec<float, 4>>) return bit_cast<V>(_mm_min_ps(bit_cast<__m128>(a), bit_cast<__m128>(b)));
  else if constexpr (kSame<V, Vec<double, 2>>) return bit_cast<V>(_mm_min_pd(bit_cast<__m128d>(a), bit_cast<__m128d>(b)));
  else
#endif
  return a < b ? a : b;
}

// --- rounding ------------------------------------------------------------------------------------

// Rounds half to even without a rounding instruction: adding 2^(p-1), for p bits of precision, makes the addition round
// away the fraction. The sign is restored so that -0.3 gives -0.0.
template <class V> FQ_INLINE V rint_portable(V v) {
  const V big = splat<V>(sizeof(Elem<V>) == 4 ? Elem<V>(8388608.0) : Elem<V>(4503599627370496.0));
  const V a = magnitude(v);
  const V rounded = (a + big) - big;
  return with_sign_of(a < big ? rounded : a, v);
}

// Rounds half to even. Independent of the thread's rounding mode on targets that have such an instruction.
template <class V> FQ_INLINE V rint(V v) {
#if defined(__AVX512F__)
  if constexpr (kSame<V, Vec<float, 16>>) return bit_cast<V>(_mm512_roundscale_ps(bit_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  else if constexpr (kSame<V, Vec<double, 8>>) return bit_cast<V>(_mm512_roundscale_pd(bit_cast<__m512d>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  else
#endif
#if defined(__AVX__)
  if constexpr (kSame<V, Vec<float, 8>>) return bit_cast<V>(_mm256_round_ps(bit_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  else if constexpr (kSame<V, Vec<double, 4>>) return bit_cast<V>(_mm256_round_pd(bit_cast<__m256d>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  else
#endif
#if defined(__SSE4_1__)
  if constexpr (kSame<V, Vec<float, 4>>) return bit_cast<V>(_mm_round_ps(bit_cast<__m128>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  else if constexpr (kSame<V, Vec<double, 2>>) return bit_cast<V>(_mm_round_pd(bit_cast<__m128d>(v), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  else if constexpr (kSame<V, Vec<float, 1>>) {
    const __m128 s = _mm_set_ss(v[0]);
    return V{_mm_cvtss_f32(_mm_round_ss(s, s, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
  } else if constexpr (kSame<V, Vec<double, 1>>) {
    const __m128d s = _mm_set_sd(v[0]);
    return V{_mm_cvtsd_f64(_mm_round_sd(s, s, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC))};
  } else
#endif
#if defined(__aarch64__)
  if constexpr (kSame<V, Vec<float, 4>>) return bit_cast<V>(vrndnq_f32(bit_cast<float32x4_t>(v)));
  else if constexpr (kSame<V, Vec<double, 2>>) return bit_cast<V>(vrndnq_f64(bit_cast<float64x2_t>(v)));
  else
#endif
  if constexpr (sizeof(V) > 16 && kWidth<V> > 1) return join<V>(rint(low_half(v)), rint(high_half(v)));
  else return rint_portable(v);
}

// Rounds down.
template <class V> FQ_INLINE V floor(V v) {
#if defined(__AVX512F__)
  if constexpr (kSame<V, Vec<float, 16>>) return bit_cast<V>(_mm512_roundscale_ps(bit_cast<__m512>(v), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  else
#endif
#if defined(__AVX__)
  if constexpr (kSame<V, Vec<float, 8>>) return bit_cast<V>(_mm256_round_ps(bit_cast<__m256>(v), _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
  else
#endif
  {
    const V nearest = rint(v);
    return nearest - zero_unless(nearest > v, splat<V>(Elem<V>(1)));
  }
}

// Rounds half away from zero. Not trunc(v + 0.5), which would round 0.49999997 up.
template <class V> FQ_INLINE V round_half_away(V v) {
  const V a = magnitude(v);
  const V nearest = rint(a);
  // Rounding half to even differs only for ties that it rounds down. The difference is exact.
  const V rounded = (a - nearest) == splat<V>(Elem<V>(0.5)) ? nearest + Elem<V>(1) : nearest;
  return with_sign_of(rounded, v);
}

// --- fused multiply-add --------------------------------------------------------------------------

// Returns a * b + c with a single rounding, on every target.

template <class V> FQ_INLINE V fma(V a, V b, V c) {
#if defined(__AVX512F__)
  if constexpr (kSame<V, Vec<float, 16>>) return bit_cast<V>(_mm512_fmadd_ps(bit_cast<__m512>(a), bit_cast<__m512>(b), bit_cast<__m512>(c)));
  else if constexpr (kSame<V, Vec<double, 8>>) return bit_cast<V>(_mm512_fmadd_pd(bit_cast<__m512d>(a), bit_cast<__m512d>(b), bit_cast<__m512d>(c)));
  else
#endif
#if defined(__FMA__)
  if constexpr (kSame<V, Vec<float, 8>>) return bit_cast<V>(_mm256_fmadd_ps(bit_cast<__m256>(a), bit_cast<__m256>(b), bit_cast<__m256>(c)));
  else if constexpr (kSame<V, Vec<double, 4>>) return bit_cast<V>(_mm256_fmadd_pd(bit_cast<__m256d>(a), bit_cast<__m256d>(b), bit_cast<__m256d>(c)));
  else if constexpr (kSame<V, Vec<float, 4>>) return bit_cast<V>(_mm_fmadd_ps(bit_cast<__m128>(a), bit_cast<__m128>(b), bit_cast<__m128>(c)));
  else if constexpr (kSame<V, Vec<double, 2>>) return bit_cast<V>(_mm_fmadd_pd(bit_cast<__m128d>(a), bit_cast<__m128d>(b), bit_cast<__m128d>(c)));
  else
#endif
#if defined(__aarch64__)
  if constexpr (kSame<V, Vec<float, 4>>) return bit_cast<V>(vfmaq_f32(bit_cast<float32x4_t>(c), bit_cast<float32x4_t>(a), bit_cast<float32x4_t>(b)));
  else if constexpr (kSame<V, Vec<double, 2>>) return bit_cast<V>(vfmaq_f64(bit_cast<float64x2_t>(c), bit_cast<float64x2_t>(a), bit_cast<float64x2_t>(b)));
  else
#endif
  if constexpr (sizeof(V) > 16 && kWidth<V> > 1) {
    return join<V>(fma(low_half(a), low_half(b), low_half(c)), fma(high_half(a), high_half(b), high_half(c)));
  } else {
    // The C library's fma is correctly rounded even if the CPU has no FMA instruction.
    V r{};
    for (int i = 0; i < kWidth<V>; ++i) {
      if constexpr (sizeof(Elem<V>) == 4) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
      else r[i] = __builtin_fma(a[i], b[i], c[i]);
    }
    return r;
  }
}

// --- one bit per lane ----------------------------------------------------------------------------

// Returns lane i of a comparison's result, which is all-ones or all-zeros, as bit i.
template <class M> FQ_INLINE uint32_t lane_bits(M m) {
#if defined(__AVX512F__)
  if constexpr (sizeof(M) == 64 && sizeof(Elem<M>) == 4) return uint32_t(_mm512_movepi32_mask(bit_cast<__m512i>(m)));
  else if constexpr (sizeof(M) == 64 && sizeof(Elem<M>) == 2) return uint32_t(_mm512_movepi16_mask(bit_cast<__m512i>(m)));
  else if constexpr (sizeof(M) == 64) return uint32_t(_mm512_movepi64_mask(bit_cast<__m512i>(m)));
  else
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(M) == 32 && sizeof(Elem<M>) == 2) {
    const __m256i bytes = _mm256_packs_epi16(bit_cast<__m256i>(m), _mm256_setzero_si256());
    return uint32_t(_mm256_movemask_epi8(_mm256_permute4x64_epi64(bytes, 0xD8)));
  } else
#endif
#if defined(__AVX__)
  if constexpr (sizeof(M) == 32 && sizeof(Elem<M>) == 4) return uint32_t(_mm256_movemask_ps(bit_cast<__m256>(m)));
  else if constexpr (sizeof(M) == 32) return uint32_t(_mm256_movemask_pd(bit_cast<__m256d>(m)));
  else
#endif
#if defined(__SSE2__)
  if constexpr (sizeof(M) == 16 && sizeof(Elem<M>) == 2) {
    return uint32_t(_mm_movemask_epi8(_mm_packs_epi16(bit_cast<__m128i>(m), _mm_setzero_si128())));
  } else if constexpr (sizeof(M) == 16 && sizeof(Elem<M>) == 4) return uint32_t(_mm_movemask_ps(bit_cast<__m128>(m)));
  else if constexpr (sizeof(M) == 16) return uint32_t(_mm_movemask_pd(bit_cast<__m128d>(m)));
  else
#endif
#if defined(__aarch64__)
  if constexpr (sizeof(M) == 16 && sizeof(Elem<M>) == 4) {
    const uint32x4_t weight = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(bit_cast<uint32x4_t>(m), weight));
  } else if constexpr (sizeof(M) == 16 && sizeof(Elem<M>) == 2) {
    const uint16x8_t weight = {1, 2, 4, 8, 16, 32, 64, 128};
    return vaddvq_u16(vandq_u16(bit_cast<uint16x8_t>(m), weight));
  } else
#endif
  if constexpr (sizeof(M) > 16 && kWidth<M> > 1) {
    return lane_bits(low_half(m)) | lane_bits(high_half(m)) << (kWidth<M> / 2);
  } else {
    uint32_t bits = 0;
    for (int i = 0; i < kWidth<M>; ++i) bits |= uint32_t(m[i] != 0) << i;
    return bits;
  }
}

// Returns the lanes where a == b: as a mask register on AVX-512, otherwise as a vector of all-ones or all-zeros lanes.
template <class V> FQ_INLINE auto equal_lanes(V a, V b) {
#if defined(__AVX512F__)
  if constexpr (kSame<V, Vec<float, 16>>) return uint32_t(_mm512_cmp_ps_mask(bit_cast<__m512>(a), bit_cast<__m512>(b), _CMP_EQ_OQ));
  else if constexpr (kSame<V, Vec<double, 8>>) return uint32_t(_mm512_cmp_pd_mask(bit_cast<__m512d>(a), bit_cast<__m512d>(b), _CMP_EQ_OQ));
  else
#endif
  return a == b;
}
// Returns the lanes with the same bits. The same as equal_lanes for floats other than NaN and -0.0.
template <class V> FQ_INLINE auto equal_bit_lanes(V a, V b) {
#if defined(__AVX512F__)
  if constexpr (kSame<V, Vec<float, 16>>) return uint32_t(_mm512_cmpeq_epi32_mask(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
  else if constexpr (kSame<V, Vec<double, 8>>) return uint32_t(_mm512_cmpeq_epi64_mask(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
  else if constexpr (kSame<V, Vec<uint16_t, 32>>) return uint32_t(_mm512_cmpeq_epi16_mask(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
  else
#endif
  return bit_cast<Bits<V>>(a) == bit_cast<Bits<V>>(b);
}
FQ_INLINE uint32_t lane_bits(uint32_t mask_register) { return mask_register; }

// Returns the lanes of consecutive comparisons as 32 bits.
template <int N, class M> FQ_INLINE uint32_t lane_bits_of_32(const M (&m)[32 / N]) {
#if defined(__AVX2__)
  if constexpr (N == 8 && sizeof(M) == 32) {
    // Narrowing all four vectors to bytes first needs one movemask instead of four. The packs work within 128-bit
    // halves, so a permutation restores the order.
    const __m256i low = _mm256_packs_epi32(bit_cast<__m256i>(m[0]), bit_cast<__m256i>(m[1]));
    const __m256i high = _mm256_packs_epi32(bit_cast<__m256i>(m[2]), bit_cast<__m256i>(m[3]));
    const __m256i bytes = _mm256_packs_epi16(low, high);
    const __m256i ordered = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    return uint32_t(_mm256_movemask_epi8(ordered));
  }
#endif
  uint32_t bits = 0;
  for (int i = 0; i < 32 / N; ++i) bits |= lane_bits(m[i]) << (i * N);
  return bits;
}

template <class M> FQ_INLINE bool any_lane(M m) { return lane_bits(m) != 0; }

template <class U> FQ_INLINE bool any_bit(U v) {
#if defined(__AVX512F__)
  if constexpr (sizeof(U) == 64) return _mm512_test_epi32_mask(bit_cast<__m512i>(v), bit_cast<__m512i>(v)) != 0;
#endif
#if defined(__AVX__)
  if constexpr (sizeof(U) == 32) return !_mm256_testz_si256(bit_cast<__m256i>(v), bit_cast<__m256i>(v));
#endif
  if constexpr (sizeof(U) > 8) return any_bit(low_half(v) | high_half(v));
  else return bit_cast<typename UInt<int(sizeof(U))>::type>(v) != 0;
}

template <class I> FQ_INLINE I larger(I a, I b) { return a > b ? a : b; }
// GCC 12 compares unsigned words of 16 bits in AVX-512 with more instructions than necessary.
template <class I> FQ_INLINE I smaller(I a, I b) {
#if defined(__AVX512F__)
  if constexpr (kSame<I, Vec<uint16_t, 32>>) return bit_cast<I>(_mm512_min_epu16(bit_cast<__m512i>(a), bit_cast<__m512i>(b)));
#endif
  return a < b ? a : b;
}
template <class I> FQ_INLINE bool any_greater(I a, I b) {
#if defined(__AVX512F__)
  if constexpr (sizeof(I) == 64 && sizeof(Elem<I>) == 4) return _mm512_cmpgt_epi32_mask(bit_cast<__m512i>(a), bit_cast<__m512i>(b)) != 0;
  if constexpr (sizeof(I) == 64 && sizeof(Elem<I>) == 2) return _mm512_cmpgt_epi16_mask(bit_cast<__m512i>(a), bit_cast<__m512i>(b)) != 0;
#endif
  if constexpr (sizeof(Elem<I>) == 2) return any_bit(a > b);
  return any_lane(a > b);
}

// --- 16-bit floats -------------------------------------------------------------------------------

template <int N> FQ_INLINE Vec<float, N> widen_bf16(Vec<uint16_t, N> h) {
  return bit_cast<Vec<float, N>>(convert<Vec<uint32_t, N>>(h) << 16);
}

// Rounds half to even by adding just under half a unit in the last place of the result, plus its last bit. This
// preserves NaN unless its significand is nearly all ones, in which case the carry would reach the sign. Such NaNs do
// not occur here: NaN results are quiet NaNs produced by the CPU, NaNs loaded from bfloat16 (low half zero), or NaN
// scales, which `quiet` has made canonical.
template <int N> FQ_INLINE Vec<uint32_t, N> rounded_to_bf16(Vec<float, N> v) {  // in the upper halves
  const auto u = bit_cast<Vec<uint32_t, N>>(v);
  return u + 0x7FFFu + ((u >> 16) & 1u);
}
// The same for values of which none is halfway between two bfloat16 numbers.
template <int N> FQ_INLINE Vec<uint32_t, N> rounded_to_bf16_without_ties(Vec<float, N> v) {
  return bit_cast<Vec<uint32_t, N>>(v) + 0x8000u;
}
// Returns words with the upper half of a word of a as the lower half, and the upper half of a word of b as the upper one.
template <class W> FQ_INLINE W upper_halves(W a, W b) {
#if defined(__AVX2__)
  if constexpr (sizeof(W) == 32) return bit_cast<W>(_mm256_blend_epi16(bit_cast<__m256i>(a >> 16), bit_cast<__m256i>(b), 0xAA));
#endif
  return a >> 16 | (b & 0xFFFF0000u);
}
template <class V> FQ_INLINE auto is_bf16_tie(V v) { return (bit_cast<Bits<V>>(v) & 0xFFFFu) == 0x8000u; }
template <int N> FQ_INLINE Vec<uint16_t, N> narrow_bf16(Vec<float, N> v) {
  const Vec<uint32_t, N> rounded = rounded_to_bf16<N>(v) >> 16;
#if defined(__AVX2__)
  if constexpr (N == 8) {
    const __m256i r = bit_cast<__m256i>(rounded);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
    return bit_cast<Vec<uint16_t, N>>(_mm256_castsi256_si128(packed));
  } else
#endif
  return convert<Vec<uint16_t, N>>(rounded);
}

// Replaces every NaN by the canonical quiet NaN.
template <class V> FQ_INLINE V quiet(V v) { return v == v ? v : splat<V>(Elem<V>(__builtin_nan(""))); }

template <int N> FQ_INLINE Vec<float, N> widen_f16_portable(Vec<uint16_t, N> h16) {
  using U = Vec<uint32_t, N>;
  using F = Vec<float, N>;
  const U h = convert<U>(h16);
  const U magnitude_bits = (h & 0x7FFFu) << 13;
  // Rebiasing the exponent by a multiplication also normalises subnormals.
  const F scaled = bit_cast<F>(magnitude_bits) * 0x1p112f;
  const U special = bit_cast<U>((h & 0x7C00u) == 0x7C00u);
  const U bits = (bit_cast<U>(scaled) & ~special) | ((magnitude_bits | 0x7F800000u) & special);
  return bit_cast<F>(bits | (h & 0x8000u) << 16);
}

template <int N> FQ_INLINE Vec<uint16_t, N> narrow_f16_portable(Vec<float, N> v) {
  using U = Vec<uint32_t, N>;
  using F = Vec<float, N>;
  const U u = bit_cast<U>(v);
  const U a = u & 0x7FFFFFFFu;
  // Normal range: rebias the exponent and round to even at bit 13.
  const U normal = (a + (uint32_t(15 - 127) << 23) + 0xFFFu + ((a >> 13) & 1u)) >> 13;
  // Below 2^-14: adding 0.5 aligns the last bit of the subnormal with the last bit of the float.
  const U subnormal = bit_cast<U>(bit_cast<F>(a) + 0.5f) - 0x3F000000u;
  const U is_small = bit_cast<U>(a < 0x38800000u);
  const U is_large = bit_cast<U>(a >= 0x47800000u);
  const U is_nan = bit_cast<U>(a > 0x7F800000u);
  U h = (normal & ~is_small) | (subnormal & is_small);
  h = (h & ~is_large) | (is_large & 0x7C00u) | (is_nan & 0x0200u);
  return convert<Vec<uint16_t, N>>(h | (u >> 16 & 0x8000u));
}

template <int N> FQ_INLINE Vec<float, N> widen_f16(Vec<uint16_t, N> h) {
#if defined(__AVX512F__)
  if constexpr (N == 16) return bit_cast<Vec<float, N>>(_mm512_cvtph_ps(bit_cast<__m256i>(h)));
  else
#endif
#if defined(__F16C__)
  if constexpr (N == 8) return bit_cast<Vec<float, N>>(_mm256_cvtph_ps(bit_cast<__m128i>(h)));
  else
#endif
#if defined(__aarch64__)
  if constexpr (N == 4) return bit_cast<Vec<float, N>>(vcvt_f32_f16(bit_cast<float16x4_t>(h)));
  else
#endif
  return widen_f16_portable<N>(h);
}

template <int N> FQ_INLINE Vec<uint16_t, N> narrow_f16(Vec<float, N> v) {
#if defined(__AVX512F__)
  if constexpr (N == 16) return bit_cast<Vec<uint16_t, N>>(_mm512_cvtps_ph(bit_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
  else
#endif
#if defined(__F16C__)
  if constexpr (N == 8) return bit_cast<Vec<uint16_t, N>>(_mm256_cvtps_ph(bit_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
  else
#endif
#if defined(__aarch64__)
  if constexpr (N == 4) return bit_cast<Vec<uint16_t, N>>(vcvt_f16_f32(bit_cast<float32x4_t>(v)));
  else
#endif
  return narrow_f16_portable<N>(v);
}

// --- loads and stores that change type -----------------------------------------------------------

// Loads N elements of type T, converted to the compute type of T.
template <int N, class T> FQ_INLINE Vec<Compute<T>, N> load(const T* p) {
  if constexpr (kSame<T, bf16>) return widen_bf16<N>(load_raw<Vec<uint16_t, N>>(p));
  else if constexpr (kSame<T, f16>) return widen_f16<N>(load_raw<Vec<uint16_t, N>>(p));
  else return load_raw<Vec<T, N>>(p);
}

// Stores N elements, converted from the compute type of T to T.
template <class T, int N> FQ_INLINE void store(T* p, Vec<Compute<T>, N> v) {
  if constexpr (kSame<T, bf16>) store_raw(p, narrow_bf16<N>(v));
  else if constexpr (kSame<T, f16>) store_raw(p, narrow_f16<N>(v));
  else store_raw(p, v);
}

// Two vectors of 2N neighbours. In bfloat16 one has the elements with even numbers and the other those with odd ones:
// they are the lower and the upper halves of 32-bit words, so that no instruction has to move them between lanes.

template <int N, class T> FQ_INLINE void load_pair(const T* p, Vec<Compute<T>, N>& a, Vec<Compute<T>, N>& b) {
  if constexpr (kSame<T, bf16>) {
    const auto words = load_raw<Vec<uint32_t, N>>(p);
    a = bit_cast<Vec<float, N>>(words << 16);
    b = bit_cast<Vec<float, N>>(words & 0xFFFF0000u);
  } else {
    a = load<N>(p);
    b = load<N>(p + N);
  }
}

template <class T, int N, bool HasTies = true>
FQ_INLINE void store_pair(T* p, Vec<Compute<T>, N> a, Vec<Compute<T>, N> b) {
  if constexpr (kSame<T, bf16> && !HasTies) {
    store_raw(p, upper_halves(rounded_to_bf16_without_ties<N>(a), rounded_to_bf16_without_ties<N>(b)));
  } else if constexpr (kSame<T, bf16>) store_raw(p, upper_halves(rounded_to_bf16<N>(a), rounded_to_bf16<N>(b)));
  else {
    store<T, N>(p, a);
    store<T, N>(p + N, b);
  }
}

// Returns the lanes of a comparison of such pairs, one bit per element in the order of the elements.
template <class T, int N, class M> FQ_INLINE uint32_t pair_bits(M a, M b) {
  if constexpr (!kSame<T, bf16>) return lane_bits(a) | lane_bits(b) << N;
#if defined(__AVX512F__)
  if constexpr (N == 16 && kSame<M, uint32_t>) {
    return _mm512_movepi16_mask(_mm512_mask_blend_epi16(0xAAAAAAAA, _mm512_movm_epi32(__mmask16(a)), _mm512_movm_epi32(__mmask16(b))));
  }
#endif
  const auto spread = [](uint32_t bits) FQ_INLINE_LAMBDA {  // bit i to bit 2 * i
    bits = (bits | bits << 8) & 0x00FF00FFu;
    bits = (bits | bits << 4) & 0x0F0F0F0Fu;
    bits = (bits | bits << 2) & 0x33333333u;
    return (bits | bits << 1) & 0x55555555u;
  };
  return spread(lane_bits(a)) | spread(lane_bits(b)) << 1;
}

// Returns the lanes of comparisons of 32 elements in pairs.
template <class T, int N, class M> FQ_INLINE uint32_t bits_of_32(const M (&m)[32 / N]) {
  if constexpr (!kSame<T, bf16>) return lane_bits_of_32<N>(m);
#if defined(__AVX2__)
  if constexpr (N == 8 && sizeof(M) == 32) {
    const __m256i low = _mm256_blend_epi16(bit_cast<__m256i>(m[0]), bit_cast<__m256i>(m[1]), 0xAA);
    const __m256i high = _mm256_blend_epi16(bit_cast<__m256i>(m[2]), bit_cast<__m256i>(m[3]), 0xAA);
    return uint32_t(_mm256_movemask_epi8(_mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xD8)));
  }
#endif
  uint32_t bits = 0;
  for (int i = 0; i < 32 / N; i += 2) bits |= pair_bits<T, N>(m[i], m[i + 1]) << (i * N);
  return bits;
}

// The same of M words of 16 bits each.
template <int M, class W> FQ_INLINE uint32_t word_bits_of_32(const W (&m)[32 / M]) {
#if defined(__AVX2__)
  if constexpr (M == 16 && sizeof(W) == 32) {
    const __m256i bytes = _mm256_packs_epi16(bit_cast<__m256i>(m[0]), bit_cast<__m256i>(m[1]));
    return uint32_t(_mm256_movemask_epi8(_mm256_permute4x64_epi64(bytes, 0xD8)));
  }
#endif
  uint32_t bits = 0;
  for (int i = 0; i < 32 / M; ++i) bits |= lane_bits(m[i]) << i * M % 32;
  return bits;
}

// Loads kWidth<V> elements of type U (not bf16 or f16), converted to V's element type.
template <class V, class U> FQ_INLINE V load_as(const U* p) {
  return convert<V>(load_raw<Vec<U, kWidth<V>>>(p));
}

}  // namespace fakequant::FQ_TARGET
