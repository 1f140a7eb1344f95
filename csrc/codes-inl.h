// Codes in memory: 8, 16 or 32 bits per code, or packed, with two or four codes per byte or four codes in three bytes.
//
// Packed codes are a stream of bits in the order of the elements, with the first in the lowest bits, as in ONNX's int4.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace fakequant::FQ_TARGET {

// Q is the integer type of an unpacked code, Bits the size of a code in memory.
template <class Q, int Bits>
struct CodeTag {
  using type = Q;
  static constexpr int bits = Bits;
  static constexpr bool packed = Bits < 8;
};

// Calls f with the code type as a CodeTag.
template <class F> FQ_INLINE void with_code(CodeType code, F&& f) {
  switch (code) {
    case CodeType::i8: return f(CodeTag<int8_t, 8>{});
    case CodeType::u8: return f(CodeTag<uint8_t, 8>{});
    case CodeType::i16: return f(CodeTag<int16_t, 16>{});
    case CodeType::u16: return f(CodeTag<uint16_t, 16>{});
    case CodeType::i32: return f(CodeTag<int32_t, 32>{});
    case CodeType::u32: return f(CodeTag<uint32_t, 32>{});
    case CodeType::i4x2: return f(CodeTag<int8_t, 4>{});
    case CodeType::u4x2: return f(CodeTag<uint8_t, 4>{});
    case CodeType::i2x4: return f(CodeTag<int8_t, 2>{});
    case CodeType::u2x4: return f(CodeTag<uint8_t, 2>{});
    case CodeType::u6x4: return f(CodeTag<uint8_t, 6>{});
  }
}

// Packs n codes of six bits. The unused bits of the last byte are 0.
FQ_INLINE void pack_codes_of_6_bits(const uint8_t* codes, int64_t n, uint8_t* out) {
  for (int64_t i = 0; i < n; i += 4) {
    const int64_t count = n - i < 4 ? n - i : 4;
    uint32_t word = 0;
    for (int64_t k = 0; k < count; ++k) word |= uint32_t(codes[i + k] & 0x3F) << (6 * k);
    for (int64_t b = 0; b < (6 * count + 7) / 8; ++b) *out++ = uint8_t(word >> (8 * b));
  }
}

// Unpacks n codes of six bits, starting with that of element `start`.
template <class Q> FQ_INLINE void unpack_codes_of_6_bits(const uint8_t* packed, int64_t start, int64_t n, Q* codes) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t bit = (start + i) * 6;
    const int shift = int(bit % 8);
    uint32_t bits = uint32_t(packed[bit / 8]) >> shift;
    if (shift > 2) bits |= uint32_t(packed[bit / 8 + 1]) << (8 - shift);
    codes[i] = Q(bits & 0x3F);
  }
}

// Packs n codes, given in the low bits of one byte each. The unused bits of the last byte are 0.
template <int Bits> FQ_INLINE void pack_codes(const uint8_t* codes, int64_t n, uint8_t* out) {
  if constexpr (Bits == 6) return pack_codes_of_6_bits(codes, n, out);
  constexpr int kPerByte = 8 / Bits;
  constexpr uint8_t kMask = (1 << Bits) - 1;
  int64_t i = 0;
  for (; i + kPerByte <= n; i += kPerByte) {
    uint8_t byte = 0;
    for (int k = 0; k < kPerByte; ++k) byte |= uint8_t((codes[i + k] & kMask) << (k * Bits));
    *out++ = byte;
  }
  if (i < n) {
    uint8_t byte = 0;
    for (int k = 0; i + k < n; ++k) byte |= uint8_t((codes[i + k] & kMask) << (k * Bits));
    *out = byte;
  }
}

// Returns code k of a byte. The two shifts extend the sign of a signed code.
template <class Q, int Bits> FQ_INLINE Q code_in_byte(uint8_t byte, int k) {
  return Q(Q(uint8_t(byte << (8 - Bits - k * Bits))) >> (8 - Bits));
}

// Unpacks n codes, starting with that of element `start`.
template <class Q, int Bits> FQ_INLINE void unpack_codes(const uint8_t* packed, int64_t start, int64_t n, Q* codes) {
  if constexpr (Bits == 6) return unpack_codes_of_6_bits(packed, start, n, codes);
  constexpr int kPerByte = 8 / Bits;
  int64_t i = 0;
  for (; i < n && (start + i) % kPerByte; ++i) {
    codes[i] = code_in_byte<Q, Bits>(packed[(start + i) / kPerByte], int((start + i) % kPerByte));
  }
  const uint8_t* bytes = packed + (start + i) / kPerByte;
  const int64_t whole = (n - i) / kPerByte;
  Q* out = codes + i;
  for (int64_t b = 0; b < whole; ++b) {
    for (int k = 0; k < kPerByte; ++k) out[b * kPerByte + k] = code_in_byte<Q, Bits>(bytes[b], k);
  }
  for (i += whole * kPerByte; i < n; ++i) {
    codes[i] = code_in_byte<Q, Bits>(bytes[whole], int((start + i) % kPerByte));
  }
}

}  // namespace fakequant::FQ_TARGET
