// The core kernel of the packed GEMM: C (f32, kept in L1 over all of K) += A (bf16) · B (bf16), for
// tiles in the order of micro_tiles.h.
//
// One source for three datapaths: AIE2 (npu1, bf16 4×8×4), AIE2P (npu2, exact bf16 4×8×8) and, with
// AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16, AIE2P's block floating point 8×8×8. The build defines
// DIM_M, DIM_K and DIM_N. It compiles for the host against host/aie_api.
#include <aie_api/aie.hpp>

#include "micro_tiles.h"

namespace {

#if __AIE_ARCH__ == 20
constexpr packed_gemm::MicroTile kMicro = packed_gemm::kAie2;
#elif __AIE_ARCH__ == 21 && defined(AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16)
constexpr packed_gemm::MicroTile kMicro = packed_gemm::kAie2pBfp16;
#elif __AIE_ARCH__ == 21
constexpr packed_gemm::MicroTile kMicro = packed_gemm::kAie2p;
#else
#error "the packed GEMM kernel knows AIE2 and AIE2P"
#endif

using Mmul = aie::mmul<kMicro.r, kMicro.s, kMicro.t, bfloat16, bfloat16, accauto>;

constexpr unsigned kBlock = packed_gemm::kBlock;
constexpr unsigned kRows = kBlock / kMicro.r;     // micro-tiles of A in a block of C
constexpr unsigned kColumns = kBlock / kMicro.t;  // and of B
constexpr unsigned kLanes = 16;                   // floats in a 512-bit vector

// A core powers up rounding toward minus infinity, which biases every sum of converted numbers, and
// other kernels may have run before: each entry point that converts selects its mode.
inline void RoundToNearestEven() { aie::set_rounding(aie::rounding_mode::conv_even); }

inline void Zero(float* __restrict c, unsigned count) {
#pragma clang loop min_iteration_count(16)
  for (unsigned i = 0; i < count; i += kLanes) {
    aie::store_v(c + i, aie::zeros<float, kLanes>());
  }
}

// Sixteen AIE2, eight or four AIE2P accumulators hold a 16×16 block of C, so that each loaded
// vector of A and of B serves a whole row or column of them.
inline void Step(const bfloat16* __restrict a, const bfloat16* __restrict b, float* __restrict c,
                 unsigned m, unsigned k, unsigned n) {
#pragma clang loop min_iteration_count(1)
  for (unsigned i = 0; i < m; i += kBlock) {
#pragma clang loop min_iteration_count(1)
    for (unsigned j = 0; j < n; j += kBlock) {
      const bfloat16* __restrict block_a = a + i * k;
      const bfloat16* __restrict block_b = b + j * Mmul::size_K;
      float* __restrict block_c = c + i * n + j * Mmul::size_M;
      Mmul acc[kRows][kColumns];
#pragma clang loop unroll(full)
      for (unsigned y = 0; y < kRows; ++y) {
#pragma clang loop unroll(full)
        for (unsigned x = 0; x < kColumns; ++x) {
          acc[y][x] =
              Mmul(aie::load_v<Mmul::size_C>(block_c + y * Mmul::size_M * n + x * Mmul::size_C));
        }
      }
#pragma clang loop min_iteration_count(4)
      for (unsigned p = 0; p < k; p += Mmul::size_K) {
        aie::vector<bfloat16, Mmul::size_A> rows[kRows];
#pragma clang loop unroll(full)
        for (unsigned y = 0; y < kRows; ++y) {
          rows[y] = aie::load_v<Mmul::size_A>(block_a + y * Mmul::size_M * k);
        }
        block_a += Mmul::size_A;
#pragma clang loop unroll(full)
        for (unsigned x = 0; x < kColumns; ++x) {
          const aie::vector<bfloat16, Mmul::size_B> column =
              aie::load_v<Mmul::size_B>(block_b + x * Mmul::size_B);
#pragma clang loop unroll(full)
          for (unsigned y = 0; y < kRows; ++y) acc[y][x].mac(rows[y], column);
        }
        block_b += Mmul::size_K * n;
      }
#pragma clang loop unroll(full)
      for (unsigned y = 0; y < kRows; ++y) {
#pragma clang loop unroll(full)
        for (unsigned x = 0; x < kColumns; ++x) {
          aie::store_v(block_c + y * Mmul::size_M * n + x * Mmul::size_C,
                       acc[y][x].template to_vector<float>());
        }
      }
    }
  }
}

inline void Narrow(const float* __restrict c, bfloat16* __restrict out, unsigned count) {
#pragma clang loop min_iteration_count(16)
  for (unsigned i = 0; i < count; i += kLanes) {
    aie::accum<accfloat, kLanes> wide;
    wide.from_vector(aie::load_v<kLanes>(c + i));
    aie::store_v(out + i, wide.template to_vector<bfloat16>());
  }
}

}  // namespace

extern "C" {

// Before the first step of a tile of C.
void packed_gemm_zero_f32(float* c) { Zero(c, DIM_M * DIM_N); }

// One tile along K. The bfp16 datapath converts its operands here.
void packed_gemm_step_bf16_f32(const bfloat16* a, const bfloat16* b, float* c) {
  RoundToNearestEven();
  Step(a, b, c, DIM_M, DIM_K, DIM_N);
}

// After the last step, for designs whose C leaves the core as bf16: same order, half the bytes.
void packed_gemm_epilogue_f32_bf16(const float* c, bfloat16* out) {
  RoundToNearestEven();
  Narrow(c, out, DIM_M * DIM_N);
}

}  // extern "C"
