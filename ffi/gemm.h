// What one matrix product is, independent of who computes it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace jax_xdna {

enum class DType { kF32, kBF16 };
enum class Numerics { kBF16, kBFP16 };
enum class Rounding { kNearest, kFloor };

// A strided matrix, or a batch of them. Strides count elements; `rows` is the dimension that
// survives in C (M for the left operand, N for the right one) and `depth` is K.
struct Operand {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t row_stride = 0;
  int64_t depth_stride = 0;
  int64_t batch_stride = 0;  // 0: one matrix shared by the whole batch
};

// C[b] = A[b] · B[b], with C row-major and contiguous. The numerical contract is in
// docs/numerics.md.
struct Gemm {
  int64_t batch = 1;
  int64_t m = 0;
  int64_t k = 0;
  int64_t n = 0;
  Operand a;
  Operand b;
  void* c = nullptr;
  DType c_dtype = DType::kF32;
  Numerics numerics = Numerics::kBF16;
  Rounding rounding = Rounding::kNearest;

  double flops() const { return 2.0 * batch * m * k * n; }
};

// Seconds spent in each stage, summed over the threads that worked.
struct StageTimes {
  double pack_a = 0;
  double pack_b = 0;
  double run = 0;
  double unpack = 0;

  StageTimes& operator+=(const StageTimes& other) {
    pack_a += other.pack_a;
    pack_b += other.pack_b;
    run += other.run;
    unpack += other.unpack;
    return *this;
  }
};

// The device is unknown, lost or failed; the operands are not to blame.
struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace jax_xdna
