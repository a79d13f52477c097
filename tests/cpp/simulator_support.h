// A planned product in packed buffers, for the tests of the simulator.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "plan.h"
#include "simulator.h"
#include "stream.h"
#include "support.h"

namespace jax_xdna {

struct Dispatch {
  Problem problem;
  GemmPlan plan;
  std::vector<uint16_t> a, b;
  std::vector<uint8_t> c;

  Dispatch(Arch arch, Numerics numerics, const Tile& tile, int64_t m, int64_t k, int64_t n,
           unsigned seed, DType c_dtype = DType::kF32, bool resident = false)
      : problem({1, m, k, n}, seed & 1, seed & 2, DType::kBF16, DType::kBF16, c_dtype, seed),
        plan(PlanGemm(arch, m, k, n, numerics, &tile, c_dtype, resident)) {
    problem.gemm.numerics = numerics;
    TestPool pool(1);
    Compute(Make(ActiveIsa(), {}), problem.gemm, pool, 1);
    Pack();
  }

  void Pack() {
    const Operand& left = plan.transposed ? problem.gemm.b : problem.gemm.a;
    const Operand& right = plan.transposed ? problem.gemm.a : problem.gemm.b;
    const int64_t rows = plan.transposed ? problem.shape.n : problem.shape.m;
    const int64_t cols = plan.transposed ? problem.shape.m : problem.shape.n;
    const auto at = [](const Operand& o, int64_t row, int64_t depth) {
      return static_cast<const uint16_t*>(o.data)[row * o.row_stride + depth * o.depth_stride];
    };
    a.assign(plan.a_bytes / 2, 0);
    b.assign(plan.b_bytes / 2, 0);
    for (int64_t p = 0; p < problem.shape.k; ++p) {
      for (int64_t i = 0; i < rows; ++i) a[plan.a_element(i, p) / 2] = at(left, i, p);
      for (int64_t j = 0; j < cols; ++j) b[plan.b_element(p, j) / 2] = at(right, j, p);
    }
  }

  ArrayDesign design() const {
    return {plan.arch, plan.numerics, plan.tile, plan.c_dtype, plan.feed != Feed::kFifo};
  }
  std::vector<uint32_t> Stream() const { return StreamOf(plan); }
  Txn Operations() const {
    const std::vector<uint32_t> stream = Stream();
    return DecodeTxn(stream.data(), stream.size());
  }

  Report RunOn(Simulator& simulator, const std::vector<uint32_t>& stream) {
    c.assign(plan.c_bytes, 0xff);  // a NaN in both dtypes
    return simulator.Run(
        stream.data(), stream.size(),
        {{a.data(), a.size() * 2}, {b.data(), b.size() * 2}, {c.data(), c.size()}});
  }

  // How many elements of C, padding included, do not have the emulated device's bits.
  int64_t Wrong() const {
    int64_t wrong = 0;
    for (int64_t i = 0; i < plan.rows; ++i) {
      for (int64_t j = 0; j < plan.cols; ++j) {
        const int64_t row = plan.transposed ? j : i, column = plan.transposed ? i : j;
        const bool inside = row < problem.shape.m && column < problem.shape.n;
        const int64_t at = inside ? row * problem.shape.n + column : 0;
        const void* want = plan.c_dtype == DType::kF32 ? static_cast<const void*>(&problem.c[at])
                                                       : &problem.c16[at];
        const float zero = 0;
        wrong += std::memcmp(&c[plan.c_element(i, j)], inside ? want : &zero, plan.c_item()) != 0;
      }
    }
    return wrong;
  }
};

}  // namespace jax_xdna
