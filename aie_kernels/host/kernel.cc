// Compiled once for each datapath, with __AIE_ARCH__ and KERNEL_VARIANT defined. The sizes that are
// constants on the core are variables here, so that one program runs every tile.
#include "kernels.h"

namespace {
thread_local packed_gemm::Tile tile;
}

#define DIM_M tile.m
#define DIM_K tile.k
#define DIM_N tile.n
// The entry points of the three variants live in one program.
#define JOINED(name, variant) name##_##variant
#define RENAMED(name, variant) JOINED(name, variant)
#define packed_gemm_zero_f32 RENAMED(zero, KERNEL_VARIANT)
#define packed_gemm_step_bf16_f32 RENAMED(step, KERNEL_VARIANT)
#define packed_gemm_epilogue_f32_bf16 RENAMED(epilogue, KERNEL_VARIANT)

#include "../gemm_kernel.cc"

namespace packed_gemm {
namespace {

void Enter(const Tile& t) {
  tile = t;
  aie::set_rounding(aie::rounding_mode::floor);
}

}  // namespace

const Kernel& KERNEL_VARIANT() {
  static const Kernel kernel = {
      kMicro,
      [](const Tile& t, float* c) {
        Enter(t);
        packed_gemm_zero_f32(c);
      },
      [](const Tile& t, const uint16_t* a, const uint16_t* b, float* c) {
        Enter(t);
        packed_gemm_step_bf16_f32(reinterpret_cast<const bfloat16*>(a),
                                  reinterpret_cast<const bfloat16*>(b), c);
      },
      [](const Tile& t, const float* c, uint16_t* out) {
        Enter(t);
        packed_gemm_epilogue_f32_bf16(c, reinterpret_cast<bfloat16*>(out));
      },
  };
  return kernel;
}

}  // namespace packed_gemm
