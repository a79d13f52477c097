// The hardware's other arithmetic modes, modelled exactly and without hurry.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace jax_xdna {

constexpr int64_t kBfpGroup = 8;  // elements along K that share an exponent

// Like PackPanels in isa.h for any numerics and rounding. With bfp16 the depth of the panels is kc
// rounded up to a whole group.
void PackExact(const Operand& source, Numerics numerics, Rounding rounding, int64_t width,
               int64_t batch, int64_t row, int64_t rows, int64_t k, int64_t kc, float* out);

// Like TileKernel, for operands packed as bfp16: the eight products of a group are summed exactly
// and added to the fp32 accumulator with one rounding.
void TileBfp16(int64_t kc, int64_t mr, int64_t nr, int64_t rows, int64_t columns, const float* a,
               const float* b, float* c, int64_t ldc, bool first);

}  // namespace jax_xdna
