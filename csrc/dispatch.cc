// Chooses the instruction set, once, at load: the best one this CPU has, or FAKEQUANT_TARGET.
#include <atomic>

#if defined(__x86_64__) || defined(_M_X64)
#include <cpuid.h>
#endif

#include "core.h"
#include "targets.h"

namespace fakequant {
namespace {

#define FQ_TABLE(target)                                                                          \
  {#target, target::fake_quantize, target::mask_backward, target::quantize, target::dequantize,   \
   target::learned_backward, target::min_max}

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
// Clang's __builtin_cpu_supports does not know this one.
bool cpu_has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

bool cpu_can_run(const std::string& name) {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  if (name == "avx2") return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c();
  if (name == "avx512") {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && cpu_can_run("avx2");
  }
#endif
  (void)name;
  return true;
}

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
