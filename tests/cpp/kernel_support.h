// Tiles for the tests of the core kernel and of the simulator.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#include "host/kernels.h"

namespace packed_gemm {

// Memory as aligned as a core's buffers.
template <typename T>
class Aligned {
 public:
  explicit Aligned(size_t count)
      : count_(count),
        data_(static_cast<T*>(std::aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64))) {}
  T* data() { return data_.get(); }
  T& operator[](size_t i) { return data_.get()[i]; }
  size_t size() const { return count_; }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  size_t count_;
  std::unique_ptr<T, Free> data_;
};

// Rows [row, row + m) and columns [depth, depth + k) of a row-major matrix as an A tile.
inline void PackTileA(const std::vector<uint16_t>& a, int64_t ld, int64_t row, int64_t depth,
                      const Tile& tile, MicroTile micro, uint16_t* out) {
  for (int i = 0; i < static_cast<int>(tile.m); ++i) {
    for (int p = 0; p < static_cast<int>(tile.k); ++p) {
      out[OffsetInTile(micro.r, micro.s, tile.k, i, p)] = a[(row + i) * ld + depth + p];
    }
  }
}

inline void PackTileB(const std::vector<uint16_t>& b, int64_t ld, int64_t depth, int64_t column,
                      const Tile& tile, MicroTile micro, uint16_t* out) {
  for (int p = 0; p < static_cast<int>(tile.k); ++p) {
    for (int j = 0; j < static_cast<int>(tile.n); ++j) {
      out[OffsetInTile(micro.s, micro.t, tile.n, p, j)] = b[(depth + p) * ld + column + j];
    }
  }
}

}  // namespace packed_gemm
