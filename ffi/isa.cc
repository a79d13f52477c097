#include "isa.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string_view>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace jax_xdna {
namespace {

#if defined(__x86_64__)
bool HasAvx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

const Isa& Choose() {
  const std::vector<const Isa*> usable = UsableIsas();
  const char* wanted = std::getenv("JAX_XDNA_ISA");
  if (wanted == nullptr || *wanted == '\0') return *usable.front();
  std::string names;
  for (const Isa* isa : usable) {
    if (std::string_view(isa->name) == wanted) return *isa;
    names += (names.empty() ? "" : ", ") + std::string(isa->name);
  }
  throw std::invalid_argument("JAX_XDNA_ISA is '" + std::string(wanted) +
                              "'; this CPU and build have: " + names);
}

}  // namespace

std::vector<const Isa*> UsableIsas() {
  std::vector<const Isa*> usable;
#if defined(__x86_64__)
  if (IsaAvx512() != nullptr && HasAvx512()) {
    usable.push_back(IsaAvx512());
    if (IsaAvx512Bf16() != nullptr && __builtin_cpu_supports("avx512bf16") && Avx512Bf16IsExact()) {
      usable.insert(__builtin_cpu_is("amd") ? usable.begin() : usable.end(), IsaAvx512Bf16());
    }
  }
  if (IsaAvx2() != nullptr && HasAvx2()) usable.push_back(IsaAvx2());
#endif
  if (IsaNeon() != nullptr) usable.push_back(IsaNeon());
  usable.push_back(IsaBaseline());
  return usable;
}

const Isa& ActiveIsa() {
  static const Isa& isa = Choose();
  return isa;
}

const Isa& IsaWithFp32Panels() {
  static const Isa& isa = [&]() -> const Isa& {
    for (const Isa* usable : UsableIsas()) {
      if (usable->step == 1) return *usable;
    }
    return *IsaBaseline();
  }();
  return isa;
}

KernelRate MeasureKernel(const Isa& isa, int64_t steps) {
  const FlushSubnormals mode;
  constexpr int64_t kPanel = 128;  // steps: both panels fit in any L1
  const int64_t calls = std::max<int64_t>(1, steps / kPanel);
  std::vector<float> a(kPanel * isa.mr, 1.0f), b((kPanel + 64) * isa.nr, 0.5f);
  std::vector<float> c(isa.mr * isa.nr, 0.25f);
  const auto now = [] { return std::chrono::steady_clock::now(); };
  const double flops = 2.0 * isa.mr * isa.nr * isa.step * kPanel * calls;
  const auto start = now();
  isa.multiply_add(kPanel * calls, c.data());
  const auto middle = now();
  for (int64_t i = 0; i < calls; ++i) {
    isa.tile[isa.mr - 1][Isa::kMaxVectors - 1](kPanel, a.data(), b.data(), c.data(), isa.nr, true);
  }
  const auto end = now();
  return {flops / std::chrono::duration<double>(middle - start).count(),
          flops / std::chrono::duration<double>(end - middle).count()};
}

std::vector<std::string> CpuFeatures() {
  std::vector<std::string> found;
#if defined(__x86_64__)
#define JAX_XDNA_FEATURE(name) \
  if (__builtin_cpu_supports(name)) found.push_back(name)
  JAX_XDNA_FEATURE("sse4.2");
  JAX_XDNA_FEATURE("avx");
  JAX_XDNA_FEATURE("avx2");
  JAX_XDNA_FEATURE("fma");
  JAX_XDNA_FEATURE("avx512f");
  JAX_XDNA_FEATURE("avx512bw");
  JAX_XDNA_FEATURE("avx512vl");
  JAX_XDNA_FEATURE("avx512dq");
  JAX_XDNA_FEATURE("avx512vnni");
  JAX_XDNA_FEATURE("avx512bf16");
#undef JAX_XDNA_FEATURE
#elif defined(__aarch64__)
  found.push_back("neon");
#endif
  return found;
}

#if defined(__x86_64__)

FlushSubnormals::FlushSubnormals() : saved_(_mm_getcsr()) {
  constexpr unsigned kFlushToZero = 0x8000;
  constexpr unsigned kDenormalsAreZero = 0x0040;
  constexpr unsigned kRoundingControl = 0x6000;
  const unsigned csr = static_cast<unsigned>(saved_);
  _mm_setcsr((csr & ~kRoundingControl) | kFlushToZero | kDenormalsAreZero);
}
FlushSubnormals::~FlushSubnormals() { _mm_setcsr(static_cast<unsigned>(saved_)); }

#elif defined(__aarch64__)

FlushSubnormals::FlushSubnormals() {
  uint64_t fpcr;
  asm volatile("mrs %0, fpcr" : "=r"(fpcr));
  saved_ = fpcr;
  constexpr uint64_t kFlushToZero = uint64_t{1} << 24;
  constexpr uint64_t kRoundingMode = uint64_t{3} << 22;
  asm volatile("msr fpcr, %0" : : "r"((fpcr & ~kRoundingMode) | kFlushToZero));
}
FlushSubnormals::~FlushSubnormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

#else
#error "jax-xdna knows how to flush subnormals on x86-64 and AArch64 only"
#endif

}  // namespace jax_xdna
