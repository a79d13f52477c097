#include "isa.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>

#include "isa_template.h"

namespace jax_xdna {
namespace {

struct Avx512 {
  using Reg = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kStep = 1;
  static Reg Zero() { return _mm512_setzero_ps(); }
  static Reg Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, Reg v) { _mm512_storeu_ps(p, v); }
  static Reg Broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static Reg Fma(Reg a, Reg b, Reg acc) { return _mm512_fmadd_ps(a, b, acc); }
  static void Pin(Reg& v) { asm("" : "+v"(v)); }
  // B comes from L2: 192 bytes a step, fetched eight steps early.
  static void Prefetch(const float*, const float* b) {
    __builtin_prefetch(b + 8 * 48);
    __builtin_prefetch(b + 8 * 48 + 16);
    __builtin_prefetch(b + 8 * 48 + 32);
  }
};

constexpr Isa kIsa = MakeIsa<Avx512, 8>("avx512");

}  // namespace

const Isa* IsaAvx512() { return &kIsa; }

}  // namespace jax_xdna

#else
namespace jax_xdna {
const Isa* IsaAvx512() { return nullptr; }
}  // namespace jax_xdna
#endif
