#include "capability.h"

#include <atomic>

#include <torch/headeronly/util/Exception.h>

#include "isa.h"

#if CRATE_X86_LEVELS
#include <cpuid.h>
#endif
#if CRATE_X86_LEVELS && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace crate_kernels {
namespace {

const char* const kNames[kCapabilities] = {"portable", "avx2", "avx512", "avx512_bf16", "amx"};

#if CRATE_X86_LEVELS
// clang's __builtin_cpu_supports does not know every name of these two.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
bool has_amx_bf16() {
  constexpr unsigned kAmxBf16 = 1u << 22;
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kAmxBf16);
}

// Asks Linux for the registers of AMX, as every process must. The answer holds for all of its threads.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

Capability detect() {
#if CRATE_X86_LEVELS
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c())) {
    return Capability::portable;
  }
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))) {
    return Capability::avx2;
  }
  if (!__builtin_cpu_supports("avx512bf16")) return Capability::avx512;
  return has_amx_bf16() && may_use_tiles() ? Capability::amx : Capability::avx512_bf16;
#else
  return Capability::portable;
#endif
}

bool detect_slow_bf16_dot() {
#if CRATE_X86_LEVELS
  return detected_capability() == Capability::avx512_bf16 && __builtin_cpu_is("intel");
#else
  return false;
#endif
}

constexpr int kOwn = -1;
std::atomic<int> chosen{kOwn};  // by a test

}  // namespace

Capability detected_capability() {
  static const Capability level = detect();
  return level;
}

Capability capability() {
  const int level = chosen.load(std::memory_order_relaxed);
  return level == kOwn ? detected_capability() : static_cast<Capability>(level);
}

Capability bf16_products() {
  static const bool slow = detect_slow_bf16_dot();
  return slow && chosen.load(std::memory_order_relaxed) == kOwn ? Capability::avx512 : capability();
}

std::string capability_name(Capability level) {
  return kNames[static_cast<int>(level)];
}

std::vector<std::string> compiled_capabilities() {
  return {kNames, kNames + (CRATE_X86_LEVELS ? kCapabilities : 1)};
}

void set_capability(const std::string& name) {
  if (name.empty()) return chosen.store(kOwn, std::memory_order_relaxed);
  for (int level = 0; level <= static_cast<int>(detected_capability()); ++level) {
    if (name == kNames[level]) {
      chosen.store(level, std::memory_order_relaxed);
      return;
    }
  }
  STD_TORCH_CHECK(false, "capability must be one that this machine has, up to ", capability_name(detected_capability()),
                  ", got ", name);
}

}  // namespace crate_kernels
