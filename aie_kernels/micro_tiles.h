// The order of the elements inside the tiles that a core works on: it belongs to the core kernel,
// the DMAs never look inside a tile, and whoever packs or unpacks on the host follows this file.
//
// A tile is a row-major grid of row-major micro-tiles, the blocks that the core's multiply
// instruction r×s×t takes:
//
//   A, m×k  bf16   [m/r] [k/s] [r] [s]
//   B, k×n  bf16   [k/s] [n/t] [s] [t]
//   C, m×n  f32    [m/r] [n/t] [r] [t]
//
// Groups of eight along K, the ones that share an exponent in block floating point, are rows of A's
// micro-tiles and columns of B's.
#pragma once

namespace packed_gemm {

struct MicroTile {
  int r, s, t;
};

constexpr MicroTile kAie2 = {4, 8, 4};        // npu1
constexpr MicroTile kAie2p = {4, 8, 8};       // npu2, exact bf16
constexpr MicroTile kAie2pBfp16 = {8, 8, 8};  // npu2 through block floating point

// The kernel keeps a 16×16 block of C in accumulators and runs along K at least four micro-tiles.
constexpr int kBlock = 16;  // m and n are multiples
constexpr int kDepth = 32;  // k is a multiple

// Position of an element in a tile: of A with (micro-rows, micro-columns, columns) = (r, s, k), of
// B with (s, t, n), of C with (r, t, n).
constexpr int OffsetInTile(int micro_rows, int micro_columns, int columns, int row, int column) {
  return row / micro_rows * micro_rows * columns +
         column / micro_columns * micro_rows * micro_columns + row % micro_rows * micro_columns +
         column % micro_columns;
}

}  // namespace packed_gemm
