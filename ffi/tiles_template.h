// Packing into tile order and back; compiled per instruction set, see vectors.h.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "tiles.h"
#include "vectors.h"

namespace jax_xdna {
namespace {

// Sixteen source elements as bf16, the first eight and the others.
inline void LoadNarrow(const float* p, U16x8& low, U16x8& high) {
  const U16x16 both = __builtin_convertvector(LoadRounded<U32x16>(p) >> 16, U16x16);
  std::memcpy(&low, &both, sizeof low);
  std::memcpy(&high, reinterpret_cast<const char*>(&both) + sizeof low, sizeof high);
}
inline void LoadNarrow(const uint16_t* p, U16x8& low, U16x8& high) {
  low = LoadAs<U16x8>(p);
  high = LoadAs<U16x8>(p + 8);
}

#if defined(__clang__)
#define JAX_XDNA_SHUFFLE16(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define JAX_XDNA_SHUFFLE16(a, b, ...) __builtin_shuffle(a, b, U16x8{__VA_ARGS__})
#endif

// Each round moves one bit of the row number to the end of the column number.
inline void Transpose8x8(U16x8 r[8]) {
  for (int round = 0; round < 3; ++round) {
    U16x8 t[8];
    for (int i = 0; i < 4; ++i) {
      t[2 * i] = JAX_XDNA_SHUFFLE16(r[i], r[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
      t[2 * i + 1] = JAX_XDNA_SHUFFLE16(r[i], r[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; ++i) r[i] = t[i];
  }
}

// Sixteen bytes past the cache, where the CPU can.
template <typename Vector>
inline void Stream(void* p, Vector v) {
#if defined(__SSE2__)
  _mm_stream_si128(static_cast<__m128i*>(p), (__m128i)v);
#else
  StoreAs(p, v);
#endif
}

// Eight rows of eight columns at (r, c) of a tile with micro-tiles of MR × MC: whole cache lines of
// the packed tile, unless it is row-major.
template <int MR, int MC>
inline void StoreBlock(int64_t columns, int64_t r, int64_t c, const U16x8 rows[8], uint16_t* out) {
  constexpr int kMicro = MR * MC;
  uint16_t* to = out + r * columns + c * MR;
  for (int i = 0; i < 8; i += MR, to += MR * columns) {
    if constexpr (MR == 1) {
      StoreAs(to, rows[i]);
    } else if constexpr (MC == 8) {
      for (int j = 0; j < MR; ++j) Stream(to + 8 * j, rows[i + j]);
    } else {
      for (int j = 0; j < MR; j += 2) {
        const U16x8 a = rows[i + j], b = rows[i + j + 1];
        Stream(to + 4 * j, JAX_XDNA_SHUFFLE16(a, b, 0, 1, 2, 3, 8, 9, 10, 11));
        Stream(to + kMicro + 4 * j, JAX_XDNA_SHUFFLE16(a, b, 4, 5, 6, 7, 12, 13, 14, 15));
      }
    }
  }
}

// Eight rows and columns at the edge of a matrix, zeros beyond it.
template <typename T>
inline void LoadEdge(const TileSource& m, int64_t row, int64_t column, U16x8 block[8]) {
  const T* data = static_cast<const T*>(m.data);
  for (int64_t i = 0; i < 8; ++i) {
    for (int64_t j = 0; j < 8; ++j) {
      const int64_t r = row + i, c = column + j;
      block[i][j] = r < m.rows && c < m.columns
                        ? static_cast<uint16_t>(
                              LoadRoundedOne(data + r * m.row_stride + c * m.column_stride) >> 16)
                        : uint16_t{0};
    }
  }
}

template <typename T, int MR, int MC, bool kTransposed>
void PackTilesOf(const TileSource& m, const TileShape& s, int64_t row, int64_t column,
                 int64_t count, uint16_t* const* out) {
  const int64_t stride = kTransposed ? m.column_stride : m.row_stride;
  const int64_t lines = kTransposed ? s.columns : s.rows;
  const int64_t along = kTransposed ? s.rows : s.columns;
  const T* data = static_cast<const T*>(m.data) + row * m.row_stride + column * m.column_stride;
  const int64_t whole_lines = kTransposed ? m.columns - column : m.rows - row;
  const int64_t whole_along = kTransposed ? m.rows - row : m.columns - column;
  const auto store = [&](int64_t tile, int64_t line, int64_t at, U16x8 block[8]) {
    StoreBlock<MR, MC>(s.columns, kTransposed ? at : line, kTransposed ? line : at, block,
                       out[tile]);
  };
  // Eight of the source's lines through all tiles: few enough for the CPU's own prefetcher.
  for (int64_t line = 0; line < lines; line += 8) {
    for (int64_t tile = 0; tile < count; ++tile) {
      int64_t at = 0;
      const int64_t fit = line + 8 <= whole_lines ? whole_along - tile * along : 0;
      for (const T* from = data + line * stride + tile * along; at + 16 <= along && at + 16 <= fit;
           at += 16) {
        U16x8 low[8], high[8];
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          LoadNarrow(from + i * stride + at, low[i], high[i]);
          __builtin_prefetch(from + (i + 8) * stride + at, 0, 2);
        }
        if constexpr (kTransposed) {
          Transpose8x8(low);
          Transpose8x8(high);
        }
        store(tile, line, at, low);
        store(tile, line, at + 8, high);
      }
      for (; at < along; at += 8) {
        const int64_t here = tile * along + at;
        U16x8 block[8];
        LoadEdge<T>(m, row + (kTransposed ? here : line), column + (kTransposed ? line : here),
                    block);
        store(tile, line, at, block);
      }
    }
  }
}

template <typename T, int MR, int MC>
void PackTilesTyped(const TileSource& m, const TileShape& s, int64_t row, int64_t column,
                    int64_t count, uint16_t* const* out) {
  (m.column_stride == 1 ? PackTilesOf<T, MR, MC, false>
                        : PackTilesOf<T, MR, MC, true>)(m, s, row, column, count, out);
}

template <typename T>
void PackTilesOfType(const TileSource& m, const TileShape& s, int64_t row, int64_t column,
                     int64_t count, uint16_t* const* out) {
  const auto pack = s.micro_columns == 4 ? PackTilesTyped<T, 8, 4>
                    : s.micro_rows == 1  ? PackTilesTyped<T, 1, 8>
                    : s.micro_rows == 4  ? PackTilesTyped<T, 4, 8>
                                         : PackTilesTyped<T, 8, 8>;
  pack(m, s, row, column, count, out);
}

void PackTilesHere(const TileSource& m, const TileShape& s, int64_t row, int64_t column,
                   int64_t count, uint16_t* const* out) {
  (m.dtype == DType::kF32 ? PackTilesOfType<float> : PackTilesOfType<uint16_t>)(m, s, row, column,
                                                                                count, out);
}

typedef float F32x4 __attribute__((vector_size(16)));

template <int MR, int MC, bool kStream>
void UnpackTilesOf(const float* const* in, const TileShape& s, int64_t count, int64_t rows,
                   int64_t columns, float* out, int64_t stride) {
  for (int64_t band = 0; band < rows; band += MR) {
    for (int64_t tile = 0; tile < count; ++tile) {
      const float* from = in[tile] + band * s.columns;
      const char* next = reinterpret_cast<const char*>(
          tile + 1 < count ? in[tile + 1] + band * s.columns : from + MR * s.columns);
      for (int64_t byte = 0; byte < MR * s.columns * 4; byte += 64) __builtin_prefetch(next + byte);
      const int64_t width =
          columns - tile * s.columns < s.columns ? columns - tile * s.columns : s.columns;
      for (int64_t r = 0; r < MR && band + r < rows; ++r) {
        float* to = out + (band + r) * stride + tile * s.columns;
        const float* piece = from + r * MC;
        int64_t c = 0;
        for (; c + MC <= width; c += MC, piece += MR * MC) {
          for (int i = 0; i < MC; i += 4) {
            const F32x4 v = LoadAs<F32x4>(piece + i);
            if constexpr (kStream) {
              Stream(to + c + i, v);
            } else {
              StoreAs(to + c + i, v);
            }
          }
        }
        for (int64_t i = 0; c < width; ++c, ++i) to[c] = piece[i];
      }
    }
  }
}

template <int MR, int MC>
void UnpackTilesTo(const float* const* in, const TileShape& s, int64_t count, int64_t rows,
                   int64_t columns, float* out, int64_t stride, bool stream) {
  (stream ? UnpackTilesOf<MR, MC, true> : UnpackTilesOf<MR, MC, false>)(in, s, count, rows, columns,
                                                                        out, stride);
}

void UnpackTilesHere(const float* const* in, const TileShape& s, int64_t count, int64_t rows,
                     int64_t columns, float* out, int64_t stride, bool stream) {
  // A store past the cache must be aligned.
  stream = stream && reinterpret_cast<uintptr_t>(out) % 16 == 0 && stride % 4 == 0;
  const auto unpack = s.micro_columns == 4 ? UnpackTilesTo<4, 4>
                      : s.micro_rows == 4  ? UnpackTilesTo<4, 8>
                                           : UnpackTilesTo<8, 8>;
  unpack(in, s, count, rows, columns, out, stride, stream);
}

}  // namespace
}  // namespace jax_xdna
