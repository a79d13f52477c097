// The instruction-set dependent part of the emulated device: one table of functions per set.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gemm.h"
#include "tiles.h"

namespace jax_xdna {

// Adds the product of an A panel [steps][mr] and a B panel [steps][nr] to a tile of C with row
// stride ldc, in order of k; `first` starts from zero instead of reading C.
using TileKernel = void (*)(int64_t steps, const float* a, const float* b, float* c, int64_t ldc,
                            bool first);

// Packs `rows` × `kc` elements of an operand, rounded to bf16, into panels of `width` rows of
// 32-bit lanes: [panel][step][width], missing rows filled with zeros.
using PackPanels = void (*)(const Operand& source, int64_t batch, int64_t row, int64_t rows,
                            int64_t k, int64_t kc, float* out);

struct Isa {
  static constexpr int kMaxRows = 8;
  static constexpr int kMaxVectors = 3;

  const char* name;
  int mr;     // rows of a full tile
  int nr;     // columns of a full tile: kMaxVectors vectors
  int lanes;  // floats in a vector
  int step;   // elements of K in a lane of a panel: 1 as fp32, or 2 as bf16
  TileKernel tile[kMaxRows][kMaxVectors];  // [rows - 1][vectors - 1]
  PackPanels pack_a;
  PackPanels pack_b;
  void (*round_row)(const float* in, int64_t count, uint16_t* out);  // fp32 → bf16, nearest even
  // See tiles.h; unpack_tiles is given the rows and columns that exist.
  void (*pack_tiles)(const TileSource& source, const TileShape& shape, int64_t row, int64_t column,
                     int64_t count, uint16_t* const* out);
  void (*unpack_tiles)(const float* const* in, const TileShape& shape, int64_t count, int64_t rows,
                       int64_t columns, float* out, int64_t stride, bool stream);
  // Fused multiply-adds on registers alone, as many as `steps` of a full tile take.
  void (*multiply_add)(int64_t steps, float* out);
};

// Each returns null when the library was built without it.
const Isa* IsaAvx512();
const Isa* IsaAvx512Bf16();
const Isa* IsaAvx2();
const Isa* IsaNeon();
const Isa* IsaBaseline();

// What was built and runs on this CPU, best first; never empty.
std::vector<const Isa*> UsableIsas();

// Whether this CPU's bf16 dot instruction adds the two products one after the other, each sum
// rounded once, as the contract wants; its description leaves that open. Tried on random operands.
bool Avx512Bf16IsExact();

// The best set that this CPU has; the environment variable JAX_XDNA_ISA picks a lesser one.
// Throws std::invalid_argument when that names a set that is unknown or missing here.
const Isa& ActiveIsa();

// The best one whose panels hold fp32.
const Isa& IsaWithFp32Panels();

// Operations a second on one core: multiply-adds on registers alone, and the tile kernel on panels
// in L1, both over `steps` steps of K.
struct KernelRate {
  double multiply_add;
  double tile;
};
KernelRate MeasureKernel(const Isa& isa, int64_t steps);

std::vector<std::string> CpuFeatures();

// Subnormals count as zero, as operands and as results, while one of these lives; the thread's own
// mode comes back afterwards. XLA's threads and a caller's thread differ, the results must not.
class FlushSubnormals {
 public:
  FlushSubnormals();
  ~FlushSubnormals();
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace jax_xdna
