// A stand-in for AMD's AIE API on the host: what the core kernel uses and no more, written from the
// public API documentation (UG1529). The numbers are those of the emulated device
// (docs/numerics.md):
//
// - bf16: products are added to the fp32 accumulator one at a time, in order of k, each sum rounded
//   once. The silicon adds the eight products of a step in one aligned sum before it rounds, so its
//   last bits differ.
// - bf16 through block floating point (AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16 on AIE2P): groups
// of
//   eight along K share an exponent, the eight products are summed exactly, then rounded once.
//
// The rounding mode is state of the core (here of the thread) and powers up as floor. Loads and
// stores want whole aligned vectors: the hardware drops low address bits without a word, here it is
// an error. Subnormals are left to the thread's floating-point mode.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>

#if !defined(__AIE_ARCH__) || (__AIE_ARCH__ != 20 && __AIE_ARCH__ != 21)
#error "define __AIE_ARCH__ as 20 (AIE2) or 21 (AIE2P)"
#endif

struct bfloat16 {
  uint16_t bits;
};
struct accfloat {};
struct accauto {};

namespace aie {

enum class rounding_mode : unsigned { floor, conv_even };

namespace host {

inline thread_local rounding_mode rounding = rounding_mode::floor;

template <typename To, typename From>
To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float Widen(bfloat16 x) { return BitCast<float>(static_cast<uint32_t>(x.bits) << 16); }

inline bfloat16 Narrow(float x) {
  const uint32_t u = BitCast<uint32_t>(x);
  const uint16_t upper = static_cast<uint16_t>(u >> 16);
  const uint32_t rest = u & 0xffffu;
  if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(upper | 0x40u)};
  bool up;  // in magnitude
  if (rounding == rounding_mode::floor) {
    up = (u >> 31) != 0 && rest != 0;
  } else {
    up = rest > 0x8000u || (rest == 0x8000u && (upper & 1u) != 0);
  }
  return {static_cast<uint16_t>(upper + (up ? 1 : 0))};
}

// An fp32 number as a whole number of units, |x| < 2^51 units.
inline double RoundWhole(double x) {
  constexpr double kShift =
      6755399441055744.0;  // 1.5 · 2^52: the sum has no bits left for a fraction
  const double nearest = x + kShift - kShift;
  return rounding == rounding_mode::floor && nearest > x ? nearest - 1 : nearest;
}

// Eight numbers with one exponent, that of the largest, which is 64 to 127 units; 8-bit two's
// complement mantissas. What would round to 128 saturates; NaN or infinity spoils the group.
inline void ToBlock(const float (&x)[8], double (&block)[8]) {
  uint32_t largest = 0;
  for (float v : x) {
    const uint32_t magnitude = BitCast<uint32_t>(v) & 0x7fffffffu;
    largest = magnitude > largest ? magnitude : largest;
  }
  const int exponent = static_cast<int>(largest >> 23);
  const auto power = [](int e) { return BitCast<double>(static_cast<uint64_t>(e + 1023) << 52); };
  for (int i = 0; i < 8; ++i) {
    if (exponent == 0xff) {
      block[i] = BitCast<double>(uint64_t{0x7ff8000000000000});
    } else if (exponent == 0) {
      block[i] = 0;  // only zeros and subnormals
    } else {
      const double whole = RoundWhole(static_cast<double>(x[i]) * power(127 + 6 - exponent));
      block[i] = (whole > 127 ? 127 : whole) * power(exponent - 127 - 6);
    }
  }
}

inline void CheckAligned(const void* p, unsigned bytes) {
  const unsigned alignment = bytes < 64 ? bytes : 64;
  if (reinterpret_cast<uintptr_t>(p) % alignment != 0) {
    throw std::logic_error("a vector load or store that is not aligned");
  }
}

}  // namespace host

inline void set_rounding(rounding_mode mode) { host::rounding = mode; }
inline rounding_mode get_rounding() { return host::rounding; }

template <typename T, unsigned N>
struct vector {
  T data[N];

  const T& operator[](unsigned i) const { return data[i]; }
};

template <unsigned N, typename T>
vector<T, N> load_v(const T* p) {
  host::CheckAligned(p, sizeof(vector<T, N>));
  vector<T, N> v;
  std::memcpy(v.data, p, sizeof v.data);
  return v;
}

template <typename T, unsigned N>
void store_v(T* p, const vector<T, N>& v) {
  host::CheckAligned(p, sizeof(vector<T, N>));
  std::memcpy(p, v.data, sizeof v.data);
}

template <typename T, unsigned N>
vector<T, N> zeros() {
  return vector<T, N>{};
}

template <typename Tag, unsigned N>
class accum;

template <unsigned N>
class accum<accfloat, N> {
 public:
  void from_vector(const vector<float, N>& v) { value_ = v; }

  template <typename T>
  vector<T, N> to_vector() const {
    vector<T, N> v;
    for (unsigned i = 0; i < N; ++i) v.data[i] = host::Narrow(value_[i]);
    return v;
  }

 private:
  vector<float, N> value_;
};

// The name of the namespace tells apart what the macros below make different.
#if __AIE_ARCH__ == 20
inline namespace aie2 {
#elif defined(AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16)
inline namespace aie2p_bfp16 {
#else
inline namespace aie2p {
#endif

template <unsigned M, unsigned K, unsigned N, typename A, typename B, typename Accum>
class mmul;

// C (M×N) = A (M×K) · B (K×N), all row-major.
template <unsigned M, unsigned K, unsigned N>
class mmul<M, K, N, bfloat16, bfloat16, accauto> {
#if __AIE_ARCH__ == 20
  static_assert(M == 4 && K == 8 && N == 4, "the native shape of AIE2");
#elif defined(AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16)
  static_assert(M == 8 && K == 8 && N == 8, "the native shape of block floating point");
#else
  static_assert(M == 4 && K == 8 && N == 8, "the shape of exact bf16 on AIE2P");
#endif

 public:
  static constexpr unsigned size_M = M;
  static constexpr unsigned size_K = K;
  static constexpr unsigned size_A = M * K;
  static constexpr unsigned size_B = K * N;
  static constexpr unsigned size_C = M * N;

  mmul() = default;
  explicit mmul(const vector<float, size_C>& c) : c_(c) {}

  void mac(const vector<bfloat16, size_A>& a, const vector<bfloat16, size_B>& b) {
#if __AIE_ARCH__ == 21 && defined(AIE_API_EMULATE_BFLOAT16_MMUL_WITH_BFP16)
    double left[M][K], right[N][K];
    for (unsigned i = 0; i < M; ++i) {
      float row[K];
      for (unsigned p = 0; p < K; ++p) row[p] = host::Widen(a[i * K + p]);
      host::ToBlock(row, left[i]);
    }
    for (unsigned j = 0; j < N; ++j) {
      float column[K];
      for (unsigned p = 0; p < K; ++p) column[p] = host::Widen(b[p * N + j]);
      host::ToBlock(column, right[j]);
    }
    for (unsigned i = 0; i < M; ++i) {
      for (unsigned j = 0; j < N; ++j) {
        // At most 18 bits times a power of two, so the sum is exact in double.
        double sum = 0;
        for (unsigned p = 0; p < K; ++p) sum += left[i][p] * right[j][p];
        float& c = c_.data[i * N + j];
        c = static_cast<float>(static_cast<double>(c) + sum);
      }
    }
#else
    float left[size_A], right[size_B];
    for (unsigned i = 0; i < size_A; ++i) left[i] = host::Widen(a[i]);
    for (unsigned i = 0; i < size_B; ++i) right[i] = host::Widen(b[i]);
    for (unsigned i = 0; i < M; ++i) {
      float* c = c_.data + i * N;
      for (unsigned p = 0; p < K; ++p) {
        // Exact product and a sum rounded through double: a fused multiply-add (docs/numerics.md).
        const double x = left[i * K + p];
        for (unsigned j = 0; j < N; ++j) {
          c[j] = static_cast<float>(x * static_cast<double>(right[p * N + j]) +
                                    static_cast<double>(c[j]));
        }
      }
    }
#endif
  }

  template <typename T>
  vector<T, size_C> to_vector() const {
    return c_;
  }

 private:
  vector<float, size_C> c_;
};

}  // inline namespace
}  // namespace aie
