#include "exact.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "bf16.h"

namespace jax_xdna {
namespace {

// bfp16: the group's largest exponent is shared and each element keeps an 8-bit two's complement
// mantissa, so that the largest element is 64 … 127 units. A value that rounds to 128 saturates, as
// the format has no other way to hold it. A group with a value that is not finite becomes NaN.
void QuantizeGroup(float* group, int64_t stride, Rounding rounding) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < kBfpGroup; ++i) {
    largest = std::max(largest, Bits(group[i * stride]) & 0x7fffffffu);
  }
  const int exponent = static_cast<int>(largest >> 23);
  if (exponent == 0xff) {
    for (int64_t i = 0; i < kBfpGroup; ++i) {
      group[i * stride] = std::numeric_limits<float>::quiet_NaN();
    }
    return;
  }
  for (int64_t i = 0; i < kBfpGroup; ++i) {
    float& x = group[i * stride];
    // Doubles: the unit may lie below fp32's normal range, where this thread flushes to zero.
    const double unit = std::ldexp(1.0, exponent - 127 - 6);
    const double scaled = exponent == 0 ? 0.0 : static_cast<double>(x) / unit;
    const double whole = rounding == Rounding::kFloor ? std::floor(scaled) : std::nearbyint(scaled);
    x = static_cast<float>(std::clamp(whole, -128.0, 127.0) * unit);
  }
}

}  // namespace

void PackExact(const Operand& o, Numerics numerics, Rounding rounding, int64_t width, int64_t batch,
               int64_t row, int64_t rows, int64_t k, int64_t kc, float* out) {
  const bool bfp16 = numerics == Numerics::kBFP16;
  const int64_t depth = bfp16 ? (kc + kBfpGroup - 1) / kBfpGroup * kBfpGroup : kc;
  const int64_t base = batch * o.batch_stride + row * o.row_stride + k * o.depth_stride;
  for (int64_t panel = 0; panel < rows; panel += width) {
    float* to = out + panel * depth;
    for (int64_t p = 0; p < depth; ++p) {
      for (int64_t i = 0; i < width; ++i) {
        float x = 0;
        if (panel + i < rows && p < kc) {
          const int64_t at = base + (panel + i) * o.row_stride + p * o.depth_stride;
          x = o.dtype == DType::kF32
                  ? BF16ToFloat(FloatToBF16(static_cast<const float*>(o.data)[at], rounding))
                  : BF16ToFloat(static_cast<const uint16_t*>(o.data)[at]);
        }
        to[p * width + i] = x;
      }
    }
    if (!bfp16) continue;
    for (int64_t p = 0; p < depth; p += kBfpGroup) {
      for (int64_t i = 0; i < width; ++i) QuantizeGroup(to + p * width + i, width, rounding);
    }
  }
}

void TileBfp16(int64_t kc, int64_t mr, int64_t nr, int64_t rows, int64_t columns, const float* a,
               const float* b, float* c, int64_t ldc, bool first) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      // A group's sum is an integer below 2^18 times a power of two: exact in double. Rounding it
      // and the accumulator through double to fp32 rounds once (see Plain in isa_baseline.cc).
      double acc = first ? 0.0 : c[i * ldc + j];
      for (int64_t p = 0; p < kc; p += kBfpGroup) {
        double sum = 0;
        for (int64_t q = p; q < p + kBfpGroup; ++q) {
          sum += static_cast<double>(a[q * mr + i]) * static_cast<double>(b[q * nr + j]);
        }
        acc = static_cast<float>(acc + sum);
      }
      c[i * ldc + j] = static_cast<float>(acc);
    }
  }
}

}  // namespace jax_xdna
