// Tile order: the order in which an NPU reads packed operands and writes C. A matrix is cut into
// tiles, a tile into micro-tiles, the operands of one matrix instruction; both lie one after the
// other row by row, and a micro-tile is row-major inside.
#pragma once

#include <cstdint>

#include "gemm.h"

namespace jax_xdna {

// Sizes in elements; `rows` and `columns` are multiples of 8. The micro-tiles of operands are 4×8,
// 8×4 or 8×8, or 1×8 for a row-major tile; those of C 4×4, 4×8 or 8×8.
struct TileShape {
  int64_t rows;
  int64_t columns;
  int64_t micro_rows;
  int64_t micro_columns;
};

// Throws std::invalid_argument, naming the size, when no tile of an operand (or of a result) has
// this shape.
void CheckTileShape(const TileShape& shape, bool result);

// A strided matrix. `rows` × `columns` of it are there; a tile that reaches beyond gets zeros. One
// of the strides must be 1: the matrix is stored as it is read, or transposed.
struct TileSource {
  const void* data;
  DType dtype;
  int64_t row_stride;
  int64_t column_stride;
  int64_t rows;
  int64_t columns;
};

// Packs `count` tiles that lie side by side along the source's lines, the first of them with its
// first element at (row, column): tile i, rounded to bf16 (nearest even), into out[i], 64-byte
// aligned. Stores bypass the cache, because the next reader is a device: call StreamFence() before
// anybody reads the result.
void PackTiles(const TileSource& source, const TileShape& shape, int64_t row, int64_t column,
               int64_t count, uint16_t* const* out);

// A row-major matrix of C.
struct TileTarget {
  float* data;
  int64_t stride;
  int64_t rows;
  int64_t columns;
};

// Writes `count` tiles of fp32 side by side into a matrix, the first to (row, column); what lies
// beyond is dropped. `stream`: bypass the cache, for results that do not fit in it.
void UnpackTiles(const float* const* in, const TileShape& shape, int64_t row, int64_t column,
                 int64_t count, const TileTarget& target, bool stream);

// Makes stores that bypassed the cache visible in order.
void StreamFence();

}  // namespace jax_xdna
