#include "isa.h"

#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>

#include "isa_template.h"

namespace jax_xdna {
namespace {

struct Avx2 {
  using Reg = __m256;
  static constexpr int kLanes = 8;
  static constexpr int kStep = 1;
  static Reg Zero() { return _mm256_setzero_ps(); }
  static Reg Load(const float* p) { return _mm256_loadu_ps(p); }
  static void Store(float* p, Reg v) { _mm256_storeu_ps(p, v); }
  static Reg Broadcast(const float* p) { return _mm256_broadcast_ss(p); }
  // GCC spills accumulators when it may choose which FMA operand to overwrite; this form leaves it
  // no choice.
  static Reg Fma(Reg a, Reg b, Reg acc) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(a), "x"(b));
    return acc;
  }
  static void Pin(Reg& v) { asm("" : "+x"(v)); }
  // Both panels are read in order; A lies in L1 or L2, B in L2.
  static void Prefetch(const float* a, const float* b) {
    __builtin_prefetch(a + 96);
    __builtin_prefetch(b + 256);
    __builtin_prefetch(b + 256 + 16);
  }
};

constexpr Isa kIsa = MakeIsa<Avx2, 4>("avx2");

}  // namespace

const Isa* IsaAvx2() { return &kIsa; }

}  // namespace jax_xdna

#else
namespace jax_xdna {
const Isa* IsaAvx2() { return nullptr; }
}  // namespace jax_xdna
#endif
