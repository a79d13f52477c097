// Micro-kernel and packing, written once and compiled per instruction set. Everything here has
// internal linkage and calls no library code, because each including file is compiled for a
// different CPU and the linker keeps just one copy of a shared inline function.
#pragma once

#include <cstdint>
#include <cstring>

#include "isa.h"

namespace jax_xdna {
namespace {

// Eight lanes: a compiler splits them where registers are narrower.
typedef uint32_t U32x8 __attribute__((vector_size(32)));
typedef uint16_t U16x8 __attribute__((vector_size(16)));
typedef float F32x8 __attribute__((vector_size(32)));

template <typename V>
inline V LoadAs(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <typename V>
inline void StoreAs(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// fp32 bits rounded to bf16, nearest even, kept in the upper half; NaN stays (quiet) NaN.
inline U32x8 RoundBits(U32x8 u) {
  const U32x8 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
  const U32x8 nan = (U32x8)((u & 0x7fffffffu) > 0x7f800000u);
  return (rounded & ~nan) | (((u | 0x00400000u) & 0xffff0000u) & nan);
}

inline U32x8 LoadRounded(const float* p) { return RoundBits(LoadAs<U32x8>(p)); }
inline U32x8 LoadRounded(const uint16_t* p) {
  return __builtin_convertvector(LoadAs<U16x8>(p), U32x8) << 16;
}

inline uint32_t LoadRoundedOne(const float* p) {
  uint32_t u;
  std::memcpy(&u, p, sizeof u);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (u | 0x00400000u) & 0xffff0000u;
  return (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
}
inline uint32_t LoadRoundedOne(const uint16_t* p) { return static_cast<uint32_t>(*p) << 16; }

#if defined(__clang__)
#define JAX_XDNA_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define JAX_XDNA_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, U32x8{__VA_ARGS__})
#endif

inline void Transpose8x8(U32x8 r[8]) {
  U32x8 t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = JAX_XDNA_SHUFFLE(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    t[i + 1] = JAX_XDNA_SHUFFLE(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  U32x8 s[8];
  for (int i = 0; i < 8; i += 4) {
    s[i] = JAX_XDNA_SHUFFLE(t[i], t[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
    s[i + 1] = JAX_XDNA_SHUFFLE(t[i], t[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    s[i + 2] = JAX_XDNA_SHUFFLE(t[i + 1], t[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
    s[i + 3] = JAX_XDNA_SHUFFLE(t[i + 1], t[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = JAX_XDNA_SHUFFLE(s[i], s[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = JAX_XDNA_SHUFFLE(s[i], s[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// Any strides, any remainder: rows [0, rows) and k [k0, kc) of one panel.
template <typename T, int W>
inline void PackScalar(const T* src, int64_t rs, int64_t ks, int64_t rows, int64_t k0, int64_t kc,
                       float* out) {
  for (int64_t k = k0; k < kc; ++k) {
    for (int64_t i = 0; i < W; ++i) {
      const uint32_t u = i < rows ? LoadRoundedOne(src + i * rs + k * ks) : 0u;
      std::memcpy(out + k * W + i, &u, sizeof u);
    }
  }
}

// Source contiguous along the panel: one sweep of k writes every panel, so a page of the source
// is visited once per k and not once per panel.
template <typename T, int W>
inline void PackContiguous(const T* src, int64_t ks, int64_t rows, int64_t kc, float* out) {
  const int64_t whole = rows / W;
  constexpr int kAhead = 8;
  for (int64_t k = 0; k < kc; ++k) {
    const T* from = src + k * ks;
    if (k + kAhead < kc) {
      const char* next = reinterpret_cast<const char*>(from + kAhead * ks);
      for (int64_t byte = 0; byte < whole * W * static_cast<int64_t>(sizeof(T)); byte += 64) {
        __builtin_prefetch(next + byte);
      }
    }
    float* to = out + k * W;
    if constexpr (W % 8 == 0) {
      for (int64_t p = 0; p < whole; ++p, from += W, to += kc * W) {
        for (int i = 0; i < W; i += 8) StoreAs(to + i, LoadRounded(from + i));
      }
    } else {
      static_assert(W == 4, "a panel is four rows or a multiple of eight");
      int64_t p = 0;
      for (; p + 2 <= whole; p += 2, from += 8, to += 2 * kc * W) {
        const U32x8 v = LoadRounded(from);
        std::memcpy(to, &v, 16);
        std::memcpy(to + kc * W, reinterpret_cast<const char*>(&v) + 16, 16);
      }
      for (; p < whole; ++p, from += W, to += kc * W) {
        for (int i = 0; i < W; ++i) {
          const uint32_t u = LoadRoundedOne(from + i);
          std::memcpy(to + i, &u, sizeof u);
        }
      }
    }
  }
  if (rows % W != 0) {
    PackScalar<T, W>(src + whole * W, 1, ks, rows - whole * W, 0, kc, out + whole * W * kc);
  }
}

// Source contiguous along k: 8×8 blocks are transposed in registers.
template <typename T, int W>
inline void PackTransposed(const T* src, int64_t rs, int64_t rows, int64_t kc, float* out) {
  const int64_t even_k = kc / 8 * 8;
  int64_t row = 0;
  for (; row + 8 <= rows; row += 8) {
    const T* from = src + row * rs;
    float* to = out + row / W * W * kc + row % W;
    for (int64_t k = 0; k < even_k; k += 8) {
      U32x8 r[8];
      for (int i = 0; i < 8; ++i) r[i] = LoadRounded(from + i * rs + k);
      Transpose8x8(r);
      for (int i = 0; i < 8; ++i) {
        if constexpr (W % 8 == 0) {
          StoreAs(to + (k + i) * W, r[i]);
        } else {
          std::memcpy(to + (k + i) * W, &r[i], 16);
          std::memcpy(to + (kc + k + i) * W, reinterpret_cast<const char*>(&r[i]) + 16, 16);
        }
      }
    }
    for (int64_t k = even_k; k < kc; ++k) {
      for (int i = 0; i < 8; ++i) {
        const uint32_t u = LoadRoundedOne(from + i * rs + k);
        const int64_t at = W % 8 == 0 ? k * W + i : (i / 4 * kc + k) * W + i % 4;
        std::memcpy(to + at, &u, sizeof u);
      }
    }
  }
  // Rows left over, then the zero rows that complete the last panel.
  for (const int64_t end = (rows + W - 1) / W * W; row < end; ++row) {
    float* to = out + row / W * W * kc + row % W;
    for (int64_t k = 0; k < kc; ++k) {
      const uint32_t u = row < rows ? LoadRoundedOne(src + row * rs + k) : 0u;
      std::memcpy(to + k * W, &u, sizeof u);
    }
  }
}

template <typename T, int W>
inline void PackTyped(const Operand& o, int64_t batch, int64_t row, int64_t rows, int64_t k,
                      int64_t kc, float* out) {
  const T* src = static_cast<const T*>(o.data) + batch * o.batch_stride + row * o.row_stride +
                 k * o.depth_stride;
  if (o.row_stride == 1) {
    PackContiguous<T, W>(src, o.depth_stride, rows, kc, out);
  } else if (o.depth_stride == 1) {
    PackTransposed<T, W>(src, o.row_stride, rows, kc, out);
  } else {
    for (int64_t p = 0; p < rows; p += W) {
      PackScalar<T, W>(src + p * o.row_stride, o.row_stride, o.depth_stride, rows - p, 0, kc,
                       out + p * kc);
    }
  }
}

template <int W>
void Pack(const Operand& o, int64_t batch, int64_t row, int64_t rows, int64_t k, int64_t kc,
          float* out) {
  if (o.dtype == DType::kF32) {
    PackTyped<float, W>(o, batch, row, rows, k, kc, out);
  } else {
    PackTyped<uint16_t, W>(o, batch, row, rows, k, kc, out);
  }
}

void RoundRow(const float* in, int64_t count, uint16_t* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    StoreAs(out + i, __builtin_convertvector(LoadRounded(in + i) >> 16, U16x8));
  }
  for (; i < count; ++i) out[i] = static_cast<uint16_t>(LoadRoundedOne(in + i) >> 16);
}

// MR × NV vectors of C stay in registers over the whole of kc. V supplies Reg, kLanes, Zero, Load,
// Store, Broadcast, Fma (acc + a·b, rounded once) and Pin, which keeps the compiler from folding a
// loaded value back into each of its uses.
template <typename V, int kPanelRows, int MR, int NV>
void Tile(int64_t kc, const float* __restrict a, const float* __restrict b, float* __restrict c,
          int64_t ldc, bool first) {
  constexpr int kPanelColumns = Isa::kMaxVectors * V::kLanes;
  typename V::Reg acc[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NV; ++j) {
      acc[i][j] = first ? V::Zero() : V::Load(c + i * ldc + j * V::kLanes);
    }
  }
  for (int64_t k = 0; k < kc; ++k, a += kPanelRows, b += kPanelColumns) {
    typename V::Reg column[NV];
#pragma GCC unroll 3
    for (int j = 0; j < NV; ++j) {
      column[j] = V::Load(b + j * V::kLanes);
      V::Pin(column[j]);
    }
    V::Prefetch(a, b);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
      typename V::Reg row = V::Broadcast(a + i);
      V::Pin(row);
#pragma GCC unroll 3
      for (int j = 0; j < NV; ++j) acc[i][j] = V::Fma(row, column[j], acc[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NV; ++j) V::Store(c + i * ldc + j * V::kLanes, acc[i][j]);
  }
}

template <typename V, int kPanelRows, int MR>
constexpr void FillRows(Isa& isa) {
  isa.tile[MR - 1][0] = Tile<V, kPanelRows, MR, 1>;
  isa.tile[MR - 1][1] = Tile<V, kPanelRows, MR, 2>;
  isa.tile[MR - 1][2] = Tile<V, kPanelRows, MR, 3>;
  if constexpr (MR > 1) FillRows<V, kPanelRows, MR - 1>(isa);
}

template <typename V, int kPanelRows>
constexpr Isa MakeIsa(const char* name) {
  Isa isa{};
  isa.name = name;
  isa.mr = kPanelRows;
  isa.nr = Isa::kMaxVectors * V::kLanes;
  isa.lanes = V::kLanes;
  FillRows<V, kPanelRows, kPanelRows>(isa);
  isa.pack_a = Pack<kPanelRows>;
  isa.pack_b = Pack<Isa::kMaxVectors * V::kLanes>;
  isa.round_row = RoundRow;
  return isa;
}

}  // namespace
}  // namespace jax_xdna
