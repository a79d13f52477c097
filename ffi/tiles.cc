#include "tiles.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "isa.h"

namespace jax_xdna {

void CheckTileShape(const TileShape& s, bool result) {
  const auto need = [](bool ok, const char* name, int64_t got, const char* wanted) {
    if (ok) return;
    throw std::invalid_argument(std::string("tile: ") + name + " is " + std::to_string(got) +
                                "; it must be " + wanted);
  };
  const int64_t mr = s.micro_rows, mc = s.micro_columns;
  need(mc == 4 || mc == 8, "micro_columns", mc, "4 or 8");
  if (result) {
    need(mr == 4 || (mr == 8 && mc == 8), "micro_rows", mr, "4, or 8 with micro_columns 8");
  } else if (mc == 4) {
    need(mr == 8, "micro_rows", mr, "8 with micro_columns 4");
  } else {
    need(mr == 1 || mr == 4 || mr == 8, "micro_rows", mr, "1, 4 or 8 with micro_columns 8");
  }
  need(s.rows > 0 && s.rows % 8 == 0, "rows", s.rows, "a positive multiple of 8");
  need(s.columns > 0 && s.columns % 8 == 0, "columns", s.columns, "a positive multiple of 8");
}

void PackTiles(const TileSource& source, const TileShape& shape, int64_t row, int64_t column,
               int64_t count, uint16_t* const* out) {
  ActiveIsa().pack_tiles(source, shape, row, column, count, out);
}

void UnpackTiles(const float* const* in, const TileShape& shape, int64_t row, int64_t column,
                 int64_t count, const TileTarget& target, bool stream) {
  ActiveIsa().unpack_tiles(in, shape, count, std::min(shape.rows, target.rows - row),
                           target.columns - column, target.data + row * target.stride + column,
                           target.stride, stream);
}

void StreamFence() {
#if defined(__SSE2__)
  _mm_sfence();
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace jax_xdna
