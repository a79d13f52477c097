// Vectors of elements, for code that is compiled once per instruction set: everything has internal
// linkage and calls no library code, because the linker keeps just one copy of a shared inline
// function.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace jax_xdna {
namespace {

// Eight or sixteen lanes: a compiler splits them where registers are narrower.
typedef uint32_t U32x8 __attribute__((vector_size(32)));
typedef uint16_t U16x8 __attribute__((vector_size(16)));
typedef uint32_t U32x16 __attribute__((vector_size(64)));
typedef uint16_t U16x16 __attribute__((vector_size(32)));

template <typename V>
inline V LoadAs(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <typename V>
inline void StoreAs(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// fp32 bits rounded to bf16, nearest even, kept in the upper half; NaN stays (quiet) NaN.
template <typename V>
inline V RoundBits(V u) {
  const V rounded = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  const V nan = (V)((u & 0x7fffffffu) > 0x7f800000u);
  return (rounded & ~nan) | (((u | 0x00400000u) & 0xffff0000u) & nan);
}

// fp32 bits of a vector of source elements or of one, rounded.
template <typename V = U32x8>
inline V LoadRounded(const float* p) {
  return RoundBits(LoadAs<V>(p));
}
template <typename V = U32x8>
inline V LoadRounded(const uint16_t* p) {
  using Half = std::conditional_t<sizeof(V) == sizeof(U32x16), U16x16, U16x8>;
  return __builtin_convertvector(LoadAs<Half>(p), V) << 16;
}

inline uint32_t LoadRoundedOne(const float* p) {
  uint32_t u;
  std::memcpy(&u, p, sizeof u);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (u | 0x00400000u) & 0xffff0000u;
  return (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
}
inline uint32_t LoadRoundedOne(const uint16_t* p) { return static_cast<uint32_t>(*p) << 16; }

#if defined(__clang__)
#define JAX_XDNA_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define JAX_XDNA_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, U32x8{__VA_ARGS__})
#endif

}  // namespace
}  // namespace jax_xdna
