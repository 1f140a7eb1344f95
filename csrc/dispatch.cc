// Selects the instruction set: the best one this CPU supports, unless select_target() chose another.
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "core.h"
#include "targets.h"

namespace fakequant {
namespace {

#define FQ_TABLE(target)                                                                          \
  {#target, target::fake_quantize, target::mask_backward, target::quantize, target::dequantize,   \
   target::learned_backward, target::min_max, target::magnitudes, target::mirrored, target::block_scales, \
   target::encode_levels, target::scale_sums, target::scale_planes}

// Worst to best.
const KernelTable kTables[] = {
#if defined(__aarch64__)
    FQ_TABLE(neon),
#elif defined(__x86_64__) || defined(_M_X64)
    FQ_TABLE(baseline),
    FQ_TABLE(avx2),
    FQ_TABLE(avx512),
#else
    FQ_TABLE(baseline),
#endif
};

#if defined(__x86_64__) || defined(_M_X64)
// Not __builtin_cpu_supports: not every Clang knows F16C, and on Windows it needs a library that is not linked.
struct Leaf { uint32_t a, b, c, d; };
Leaf cpuid(uint32_t leaf) {
  Leaf r;
  asm volatile("cpuid" : "=a"(r.a), "=b"(r.b), "=c"(r.c), "=d"(r.d) : "a"(leaf), "c"(0));
  return r;
}

// XCR0: the register state that the operating system saves on a context switch.
uint32_t saved_registers() {
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

// A word with the bits at the given positions set.
constexpr uint32_t bits(std::initializer_list<int> at) {
  uint32_t all = 0;
  for (int i : at) all |= uint32_t(1) << i;
  return all;
}

bool has(uint32_t found, uint32_t wanted) { return (found & wanted) == wanted; }

bool cpu_can_run(const std::string& name) {
  if (name == "baseline") return true;
  const uint32_t first = cpuid(1).c;
  if (cpuid(0).a < 7 || !has(first, bits({12, 27, 28, 29}))) return false;  // FMA, XGETBV, AVX, F16C
  const uint32_t features = cpuid(7).b, saved = saved_registers();
  const bool avx2 = has(saved, bits({1, 2})) && has(features, bits({5}));  // XMM and YMM registers; AVX2
  if (name == "avx2") return avx2;
#if defined(__APPLE__)
  const bool saves_zmm = true;  // macOS sets these bits only after a thread's first use of AVX-512
#else
  const bool saves_zmm = has(saved, bits({5, 6, 7}));  // mask registers, and both parts of the ZMM registers
#endif
  return avx2 && saves_zmm && has(features, bits({16, 17, 30, 31}));  // AVX-512 F, DQ, BW, VL
}

bool cpu_has_vnni() { return cpu_can_run("avx512") && has(cpuid(7).c, bits({11})); }  // AVX512_VNNI
#else
bool cpu_can_run(const std::string&) { return true; }
bool cpu_has_vnni() { return false; }
#endif

const KernelTable* best_table() {
  const KernelTable* best = nullptr;
  for (const auto& table : kTables) {
    if (cpu_can_run(table.name)) best = &table;
  }
  return best;
}

std::atomic<const KernelTable*> g_table{nullptr};

}  // namespace

const KernelTable& kernels() {
  const KernelTable* table = g_table.load(std::memory_order_acquire);
  if (!table) {
    table = best_table();
    g_table.store(table, std::memory_order_release);
  }
  return *table;
}

bool has_int8_products() {
  static const bool vnni = cpu_has_vnni();
  return vnni && std::string_view(kernels().name) == "avx512";
}

std::vector<std::string> compiled_targets() {
  std::vector<std::string> names;
  for (const auto& table : kTables) names.push_back(table.name);
  return names;
}

std::vector<std::string> supported_targets() {
  std::vector<std::string> names;
  for (const auto& table : kTables) {
    if (cpu_can_run(table.name)) names.push_back(table.name);
  }
  return names;
}

bool select_target(const std::string& name) {
  for (const auto& table : kTables) {
    if (name == table.name && cpu_can_run(name)) {
      g_table.store(&table, std::memory_order_release);
      return true;
    }
  }
  return false;
}

}  // namespace fakequant
