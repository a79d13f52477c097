#include "isa.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

#include "isa_template.h"

namespace jax_xdna {
namespace {

// The dot instruction takes two elements of K: first the upper halves, then the lower ones,
// flushing subnormals in every mode. Sapphire Rapids runs it at half the rate of fused
// multiply-adds (measured), so there it is opt-in; on AMD, where it is the default, nobody has
// timed it yet.
struct Avx512Bf16 {
  using Reg = __m512;
  static constexpr int kLanes = 16;
  static constexpr int kStep = 2;
  static Reg Zero() { return _mm512_setzero_ps(); }
  static Reg Load(const float* p) { return _mm512_loadu_ps(p); }
  static void Store(float* p, Reg v) { _mm512_storeu_ps(p, v); }
  static Reg Broadcast(const float* p) { return _mm512_set1_ps(*p); }
  static Reg Fma(Reg a, Reg b, Reg acc) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
  static void Pin(Reg& v) { asm("" : "+v"(v)); }
  static void Prefetch(const float*, const float* b) {
    __builtin_prefetch(b + 8 * 48);
    __builtin_prefetch(b + 8 * 48 + 16);
    __builtin_prefetch(b + 8 * 48 + 32);
  }
};

constexpr Isa kIsa = MakeIsa<Avx512Bf16, 8>("avx512bf16");

}  // namespace

const Isa* IsaAvx512Bf16() { return &kIsa; }

bool Avx512Bf16IsExact() {
  const auto value = [](uint32_t u) { return LoadAs<float>(&u); };
  uint32_t state = 1;
  const auto random = [&state] { return state = state * 1664525u + 1013904223u; };
  // Exponents close to each other, so that every sum rounds.
  const auto number = [&random] {
    return (random() & 0x807fffffu) | ((120 + random() % 14) << 23);
  };
  for (int i = 0; i < 4096; ++i) {
    const uint32_t a0 = number() & 0xffff0000u, a1 = number() & 0xffff0000u;
    const uint32_t b0 = number() & 0xffff0000u, b1 = number() & 0xffff0000u;
    const float c = value(number());
    const __m512 a = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(a0 | a1 >> 16)));
    const __m512 b = _mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(b0 | b1 >> 16)));
    const float got = _mm512_cvtss_f32(Avx512Bf16::Fma(a, b, _mm512_set1_ps(c)));
    const float want =
        __builtin_fmaf(value(a1), value(b1), __builtin_fmaf(value(a0), value(b0), c));
    if (std::memcmp(&got, &want, sizeof got) != 0) return false;
  }
  return true;
}

}  // namespace jax_xdna

#else
namespace jax_xdna {
const Isa* IsaAvx512Bf16() { return nullptr; }
bool Avx512Bf16IsExact() { return false; }
}  // namespace jax_xdna
#endif
