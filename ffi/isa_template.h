// Micro-kernel and packing, written once and compiled per instruction set. Everything here has
// internal linkage and calls no library code, because each including file is compiled for a
// different CPU and the linker keeps just one copy of a shared inline function.
#pragma once

#include "isa.h"
#include "tiles_template.h"

namespace jax_xdna {
namespace {

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

// A panel is an array of 32-bit lanes [step][row]. With kStep = 1 a lane is one element as fp32;
// with kStep = 2 it is the bf16 elements k (upper half) and k + 1 (lower half). kPad completes an
// odd K: a product −0 · 0 = −0 changes no sum, not even the sign of a zero.
template <typename T, int kStep, uint32_t kPad>
struct Lanes {
  // One row, any stride along k; `second` says whether k + 1 exists.
  static uint32_t One(const T* p, int64_t ks, bool second) {
    if constexpr (kStep == 1) {
      return LoadRoundedOne(p);
    } else {
      return LoadRoundedOne(p) | (second ? LoadRoundedOne(p + ks) >> 16 : kPad);
    }
  }
  // Eight or sixteen rows that lie side by side, one step.
  template <typename V>
  static V Across(const T* p, int64_t ks) {
    if constexpr (kStep == 1) {
      return LoadRounded<V>(p);
    } else {
      return LoadRounded<V>(p) | (LoadRounded<V>(p + ks) >> 16);
    }
  }
  // One row that lies along k, eight steps.
  static U32x8 Along(const T* p) {
    if constexpr (kStep == 1) {
      return LoadRounded(p);
    } else {
      const U32x8 low = LoadRounded(p);
      const U32x8 high = LoadRounded(p + 8);
      return JAX_XDNA_SHUFFLE(low, high, 0, 2, 4, 6, 8, 10, 12, 14) |
             (JAX_XDNA_SHUFFLE(low, high, 1, 3, 5, 7, 9, 11, 13, 15) >> 16);
    }
  }
};

inline void StoreLane(float* p, uint32_t u) { std::memcpy(p, &u, sizeof u); }

// What is packed: strides in elements, `kc` of K, `steps` lanes along it.
template <typename T>
struct Source {
  const T* data;
  int64_t rs, ks, rows, kc, steps;
};

// Rows [row, row + W) one lane at a time: any strides, missing rows are zeros.
template <typename T, int W, int kStep, uint32_t kPad>
inline void PackScalar(const Source<T>& s, int64_t row, int64_t step, float* panel) {
  for (; step < s.steps; ++step) {
    for (int64_t i = 0; i < W; ++i) {
      const int64_t k = step * kStep;
      StoreLane(panel + step * W + i,
                row + i < s.rows ? Lanes<T, kStep, kPad>::One(s.data + (row + i) * s.rs + k * s.ks,
                                                              s.ks, k + 1 < s.kc)
                                 : 0u);
    }
  }
}

// Source contiguous along the panel: one sweep of k writes every panel, so a page of the source
// is visited once per step and not once per panel.
template <typename T, int W, int kStep, uint32_t kPad>
inline void PackContiguous(const Source<T>& s, float* out) {
  using L = Lanes<T, kStep, kPad>;
  const int64_t whole = s.rows / W;
  const int64_t panel = s.steps * W;
  const int64_t full = s.kc / kStep;
  constexpr int kAhead = 8;
  for (int64_t step = 0; step < full; ++step) {
    const T* from = s.data + step * kStep * s.ks;
    if (step + kAhead < full) {
      for (int k = 0; k < kStep; ++k) {
        const char* next = reinterpret_cast<const char*>(from + (kAhead * kStep + k) * s.ks);
        const int64_t bytes = whole * W * static_cast<int64_t>(sizeof(T));
        for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch(next + byte);
      }
    }
    float* to = out + step * W;
    if constexpr (W % 8 == 0) {
      using V = std::conditional_t<W % 16 == 0, U32x16, U32x8>;
      constexpr int kWidth = sizeof(V) / sizeof(uint32_t);
      for (int64_t p = 0; p < whole; ++p, from += W, to += panel) {
        for (int i = 0; i < W; i += kWidth) {
          StoreAs(to + i, L::template Across<V>(from + i, s.ks));
        }
      }
    } else {
      static_assert(W == 4, "a panel is four rows or a multiple of eight");
      int64_t p = 0;
      for (; p + 2 <= whole; p += 2, from += 8, to += 2 * panel) {
        const U32x8 v = L::template Across<U32x8>(from, s.ks);
        std::memcpy(to, &v, 16);
        std::memcpy(to + panel, reinterpret_cast<const char*>(&v) + 16, 16);
      }
      for (; p < whole; ++p, from += W, to += panel) {
        for (int i = 0; i < W; ++i) StoreLane(to + i, L::One(from + i, s.ks, true));
      }
    }
  }
  for (int64_t p = 0; p < whole; ++p) {  // the last step of an odd K
    PackScalar<T, W, kStep, kPad>(s, p * W, full, out + p * panel);
  }
  if (s.rows % W != 0) PackScalar<T, W, kStep, kPad>(s, whole * W, 0, out + whole * panel);
}

// Source contiguous along k: blocks of eight rows and eight steps are transposed in registers.
template <typename T, int W, int kStep, uint32_t kPad>
inline void PackTransposed(const Source<T>& s, float* out) {
  using L = Lanes<T, kStep, kPad>;
  const int64_t even = s.kc / (8 * kStep) * 8;
  const auto lane = [&](int64_t row, int64_t step) {
    return out + (row / W * s.steps + step) * W + row % W;
  };
  const auto one = [&](int64_t row, int64_t step) {
    return row < s.rows ? L::One(s.data + row * s.rs + step * kStep, 1, step * kStep + 1 < s.kc)
                        : 0u;
  };
  int64_t row = 0;
  for (; row + 8 <= s.rows; row += 8) {
    const T* from = s.data + row * s.rs;
    for (int64_t step = 0; step < even; step += 8) {
      U32x8 r[8];
      for (int i = 0; i < 8; ++i) r[i] = L::Along(from + i * s.rs + step * kStep);
      Transpose8x8(r);
      for (int i = 0; i < 8; ++i) {
        float* to = lane(row, step + i);
        if constexpr (W % 8 == 0) {
          StoreAs(to, r[i]);
        } else {
          std::memcpy(to, &r[i], 16);
          std::memcpy(to + s.steps * W, reinterpret_cast<const char*>(&r[i]) + 16, 16);
        }
      }
    }
    for (int64_t step = even; step < s.steps; ++step) {
      for (int i = 0; i < 8; ++i) StoreLane(lane(row + i, step), one(row + i, step));
    }
  }
  // Rows left over, then the zero rows that complete the last panel.
  for (const int64_t end = (s.rows + W - 1) / W * W; row < end; ++row) {
    for (int64_t step = 0; step < s.steps; ++step) StoreLane(lane(row, step), one(row, step));
  }
}

template <typename T, int W, int kStep, uint32_t kPad>
inline void PackTyped(const Operand& o, int64_t batch, int64_t row, int64_t rows, int64_t k,
                      int64_t kc, float* out) {
  const Source<T> source = {static_cast<const T*>(o.data) + batch * o.batch_stride +
                                row * o.row_stride + k * o.depth_stride,
                            o.row_stride,
                            o.depth_stride,
                            rows,
                            kc,
                            (kc + kStep - 1) / kStep};
  if (o.row_stride == 1) {
    PackContiguous<T, W, kStep, kPad>(source, out);
  } else if (o.depth_stride == 1) {
    PackTransposed<T, W, kStep, kPad>(source, out);
  } else {
    for (int64_t p = 0; p < rows; p += W) {
      PackScalar<T, W, kStep, kPad>(source, p, 0, out + p * source.steps);
    }
  }
}

template <int W, int kStep, uint32_t kPad>
void Pack(const Operand& o, int64_t batch, int64_t row, int64_t rows, int64_t k, int64_t kc,
          float* out) {
  if (o.dtype == DType::kF32) {
    PackTyped<float, W, kStep, kPad>(o, batch, row, rows, k, kc, out);
  } else {
    PackTyped<uint16_t, W, kStep, kPad>(o, batch, row, rows, k, kc, out);
  }
}

void RoundRow(const float* in, int64_t count, uint16_t* out) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    StoreAs(out + i, __builtin_convertvector(LoadRounded(in + i) >> 16, U16x8));
  }
  for (; i < count; ++i) out[i] = static_cast<uint16_t>(LoadRoundedOne(in + i) >> 16);
}

// MR × NV vectors of C stay in registers over all steps. V supplies Reg, kLanes, kStep, Zero, Load,
// Store, Broadcast, Prefetch, Fma (acc + a·b, rounded once for each element of K in a step) and
// Pin, which keeps the compiler from folding a loaded value back into each of its uses.
template <typename V, int kPanelRows, int MR, int NV>
void Tile(int64_t steps, const float* __restrict a, const float* __restrict b, float* __restrict c,
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
  for (int64_t step = 0; step < steps; ++step, a += kPanelRows, b += kPanelColumns) {
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

// What the tile kernel could reach at most: the same multiply-adds with nothing loaded or stored.
template <typename V, int MR>
void MultiplyAdd(int64_t steps, float* out) {
  constexpr int NV = Isa::kMaxVectors;
  typename V::Reg acc[MR][NV];
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NV; ++j) acc[i][j] = V::Load(out + (i * NV + j) * V::kLanes);
  }
  typename V::Reg a = V::Load(out), b = V::Load(out);
  for (int64_t step = 0; step < steps; ++step) {
    V::Pin(a);
    V::Pin(b);
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 3
      for (int j = 0; j < NV; ++j) acc[i][j] = V::Fma(a, b, acc[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 3
    for (int j = 0; j < NV; ++j) V::Store(out + (i * NV + j) * V::kLanes, acc[i][j]);
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
  isa.step = V::kStep;
  isa.pack_a = Pack<kPanelRows, V::kStep, 0x8000u>;
  isa.pack_b = Pack<Isa::kMaxVectors * V::kLanes, V::kStep, 0u>;
  isa.round_row = RoundRow;
  isa.pack_tiles = PackTilesHere;
  isa.unpack_tiles = UnpackTilesHere;
  isa.multiply_add = MultiplyAdd<V, kPanelRows>;
  return isa;
}

}  // namespace
}  // namespace jax_xdna
