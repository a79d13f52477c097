// Scalar conversions between fp32 and bf16, the reference for every vector path.
#pragma once

#include <cstdint>
#include <cstring>

#include "gemm.h"

namespace jax_xdna {

inline uint32_t Bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

inline float FromBits(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

inline float BF16ToFloat(uint16_t h) { return FromBits(static_cast<uint32_t>(h) << 16); }

// Integer arithmetic throughout, so the result depends on no thread's floating-point mode.
inline uint16_t FloatToBF16(float x, Rounding rounding) {
  const uint32_t u = Bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  if (rounding == Rounding::kFloor) {
    // Truncating a negative number's magnitude would round it up, so add one unit first.
    const bool down = (u >> 31) != 0 && (u & 0xffffu) != 0;
    return static_cast<uint16_t>((u >> 16) + (down ? 1u : 0u));
  }
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

}  // namespace jax_xdna
