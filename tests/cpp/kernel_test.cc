// The core kernel, compiled for the host, against the emulated device, and what its rounding mode
// does.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <cmath>
#include <random>
#include <thread>
#include <vector>

#include "kernel_support.h"
#include "support.h"

// The inner functions, which leave the rounding mode as it is. The entry points get other names
// than those of the library.
#define DIM_M 64
#define DIM_K 64
#define DIM_N 48
#define packed_gemm_zero_f32 zero_of_the_test
#define packed_gemm_step_bf16_f32 step_of_the_test
#define packed_gemm_epilogue_f32_bf16 epilogue_of_the_test
#include "../../aie_kernels/gemm_kernel.cc"

namespace packed_gemm {
namespace {

using jax_xdna::BF16ToFloat;
using jax_xdna::DType;
using jax_xdna::FlushSubnormals;
using jax_xdna::Numerics;
using jax_xdna::Problem;
using jax_xdna::Rounding;
using jax_xdna::TestPool;

void Emulate(Problem& problem) {
  TestPool pool(1);
  jax_xdna::Compute(jax_xdna::Make(jax_xdna::ActiveIsa(), {}), problem.gemm, pool, 1);
}

// C of the whole problem by one core, tile after tile.
std::vector<float> OnOneCore(const Kernel& kernel, const Tile& tile, const Problem& problem) {
  const FlushSubnormals mode;
  const auto& shape = problem.shape;
  Aligned<uint16_t> a(tile.m * tile.k), b(tile.k * tile.n);
  Aligned<float> c(tile.m * tile.n);
  std::vector<float> out(shape.m * shape.n);
  for (int64_t i = 0; i < shape.m; i += tile.m) {
    for (int64_t j = 0; j < shape.n; j += tile.n) {
      kernel.zero(tile, c.data());
      for (int64_t p = 0; p < shape.k; p += tile.k) {
        PackTileA(problem.a16, shape.k, i, p, tile, kernel.micro, a.data());
        PackTileB(problem.b16, shape.n, p, j, tile, kernel.micro, b.data());
        kernel.step(tile, a.data(), b.data(), c.data());
      }
      for (int y = 0; y < static_cast<int>(tile.m); ++y) {
        for (int x = 0; x < static_cast<int>(tile.n); ++x) {
          out[(i + y) * shape.n + j + x] =
              c[OffsetInTile(kernel.micro.r, kernel.micro.t, tile.n, y, x)];
        }
      }
    }
  }
  return out;
}

int64_t Differences(const std::vector<float>& left, const std::vector<float>& right) {
  REQUIRE(left.size() == right.size());
  int64_t count = 0;
  for (size_t i = 0; i < left.size(); ++i) {
    const bool nans = std::isnan(left[i]) && std::isnan(right[i]);
    count += !nans && jax_xdna::Bits(left[i]) != jax_xdna::Bits(right[i]);
  }
  return count;
}

// Numbers of every size, subnormal and infinite ones too.
void Scatter(Problem& problem, unsigned seed) {
  std::mt19937 random(seed);
  for (auto* operand : {&problem.a16, &problem.b16}) {
    for (uint16_t& x : *operand) {
      if (random() % 8 == 0) x = static_cast<uint16_t>(random() % 64 == 0 ? 0x7f80 : random());
    }
  }
}

struct Datapath {
  const char* name;
  const Kernel& kernel;
  Numerics numerics;
};

TEST_CASE("the kernel gives the bits of the emulated device on every datapath and tile") {
  const Datapath datapaths[] = {{"aie2", KernelAie2(), Numerics::kBF16},
                                {"aie2p", KernelAie2p(), Numerics::kBF16},
                                {"aie2p bfp16", KernelAie2pBfp16(), Numerics::kBFP16}};
  const Tile tiles[] = {{64, 64, 48}, {64, 32, 96}, {16, 32, 16}, {32, 96, 64}};
  unsigned seed = 0;
  for (const Datapath& datapath : datapaths) {
    for (const Tile& tile : tiles) {
      for (const bool scattered : {false, true}) {
        Problem problem({1, tile.m * 2, tile.k * 3, tile.n * 2}, false, false, DType::kBF16,
                        DType::kBF16, DType::kF32, ++seed);
        if (scattered) Scatter(problem, seed);
        problem.gemm.numerics = datapath.numerics;
        Emulate(problem);
        CAPTURE(datapath.name);
        CAPTURE(tile.m);
        CAPTURE(scattered);
        CHECK(Differences(OnOneCore(datapath.kernel, tile, problem), problem.c) == 0);
      }
    }
  }
}

TEST_CASE("the epilogue rounds as the emulated device rounds a bf16 result") {
  const Tile tile = {64, 64, 48};
  Problem wide({1, 64, 64, 48}, false, false, DType::kBF16, DType::kBF16, DType::kF32, 7);
  Problem narrow({1, 64, 64, 48}, false, false, DType::kBF16, DType::kBF16, DType::kBF16, 7);
  Emulate(wide);
  Emulate(narrow);
  for (const Kernel* kernel : {&KernelAie2(), &KernelAie2p(), &KernelAie2pBfp16()}) {
    Aligned<float> c(64 * 48);
    Aligned<uint16_t> out(64 * 48);
    std::copy(wide.c.begin(), wide.c.end(), c.data());
    kernel->epilogue(tile, c.data(), out.data());
    CHECK(std::equal(narrow.c16.begin(), narrow.c16.end(), out.data()));
  }
}

// Positive operands, so that what conversions lose adds up; one tile of C at depth k, computed by
// the inner functions in the mode given, less the exact result, over accumulated mass.
struct Biased {
  std::vector<float> got, emulated;
  double bias = 0;
};

Biased Run(aie::rounding_mode mode, Rounding rounding, int64_t k) {
  const Tile tile = {DIM_M, DIM_K, DIM_N};
  Problem problem({1, tile.m, k, tile.n}, false, false, DType::kBF16, DType::kBF16, DType::kF32, 3);
  for (auto* operand : {&problem.a16, &problem.b16}) {
    for (uint16_t& x : *operand) x &= 0x7fff;
  }
  problem.gemm.numerics = Numerics::kBFP16;
  problem.gemm.rounding = rounding;
  Emulate(problem);

  const FlushSubnormals flush;
  Aligned<uint16_t> a(tile.m * tile.k), b(tile.k * tile.n);
  Aligned<float> c(tile.m * tile.n);
  aie::set_rounding(mode);
  Zero(c.data(), tile.m * tile.n);
  for (int64_t p = 0; p < k; p += tile.k) {
    PackTileA(problem.a16, k, 0, p, tile, kMicro, a.data());
    PackTileB(problem.b16, tile.n, p, 0, tile, kMicro, b.data());
    Step(reinterpret_cast<bfloat16*>(a.data()), reinterpret_cast<bfloat16*>(b.data()), c.data(),
         tile.m, tile.k, tile.n);
  }
  Biased result;
  result.emulated = problem.c;
  double mass = 0;
  for (int i = 0; i < static_cast<int>(tile.m); ++i) {
    for (int j = 0; j < static_cast<int>(tile.n); ++j) {
      result.got.push_back(c[OffsetInTile(kMicro.r, kMicro.t, tile.n, i, j)]);
      double exact = 0;
      for (int64_t p = 0; p < k; ++p) exact += double{problem.A(0, i, p)} * problem.B(0, j, p);
      result.bias += result.got.back() - exact;
      mass += exact;
    }
  }
  result.bias /= mass;
  return result;
}

TEST_CASE("a core left in its power-up mode is biased as the hardware is") {
  // Measured on npu2 (reference: IRON's flm.GEMM): 2.4e-4 of the mass with conv_even, 9.9e-3 floor.
  std::thread([] { CHECK(aie::get_rounding() == aie::rounding_mode::floor); }).join();
  for (const int64_t k : {64, 1024}) {
    CAPTURE(k);
    const Biased floor = Run(aie::rounding_mode::floor, Rounding::kFloor, k);
    CHECK(Differences(floor.got, floor.emulated) == 0);
    CHECK(floor.bias < -5e-3);
    CHECK(floor.bias > -2e-2);
    const Biased even = Run(aie::rounding_mode::conv_even, Rounding::kNearest, k);
    CHECK(Differences(even.got, even.emulated) == 0);
    CHECK(std::abs(even.bias) < 5e-4);
  }
}

TEST_CASE("entry points that convert select the mode, whatever it was") {
  Aligned<float> c(DIM_M * DIM_N);
  Aligned<uint16_t> a(DIM_M * DIM_K), b(DIM_K * DIM_N), out(DIM_M * DIM_N);
  std::fill_n(a.data(), a.size(), uint16_t{0x3f80});
  std::fill_n(b.data(), b.size(), uint16_t{0x3f80});
  aie::set_rounding(aie::rounding_mode::floor);
  zero_of_the_test(c.data());
  step_of_the_test(reinterpret_cast<bfloat16*>(a.data()), reinterpret_cast<bfloat16*>(b.data()),
                   c.data());
  CHECK(aie::get_rounding() == aie::rounding_mode::conv_even);
  CHECK(c[0] == DIM_K);
  // One unit in the last place of bf16 is 2^-7 at 1; -1 - 3/4 of a unit goes down to -1 - a unit,
  // as does -1 - 1/4 with floor.
  std::fill_n(c.data(), c.size(), -1.0f - 0.25f / 128);
  aie::set_rounding(aie::rounding_mode::floor);
  Narrow(c.data(), reinterpret_cast<bfloat16*>(out.data()), c.size());
  CHECK(BF16ToFloat(out[5]) == -1.0f - 1.0f / 128);
  epilogue_of_the_test(c.data(), reinterpret_cast<bfloat16*>(out.data()));
  CHECK(BF16ToFloat(out[5]) == -1.0f);
  CHECK(aie::get_rounding() == aie::rounding_mode::conv_even);
}

TEST_CASE("a vector access that is not aligned is an error") {
  Aligned<float> c(DIM_M * DIM_N + 16);
  CHECK_THROWS_AS(Zero(c.data() + 1, DIM_M * DIM_N), std::logic_error);
}

}  // namespace
}  // namespace packed_gemm
