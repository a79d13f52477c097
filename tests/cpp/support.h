// What the C++ tests share: a pool like XLA's and products with their right bits.
#pragma once

#include <cmath>
#include <condition_variable>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "bf16.h"
#include "emulated.h"
#include "run.h"

namespace jax_xdna {

// A queue and a fixed number of threads, which may all be busy or absent.
class TestPool {
 public:
  explicit TestPool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Loop(); });
  }
  ~TestPool() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  void Add(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
  }

 private:
  void Loop() {
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [this] { return closed_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

class PoolHelpers final : public Helpers {
 public:
  PoolHelpers(TestPool& pool, int count) : pool_(pool), count_(count) {}
  int count() const override { return count_; }
  void Offer(WorkRef work) override {
    pool_.Add([work] { Help(*work); });
  }

 private:
  TestPool& pool_;
  int count_;
};

struct Shape {
  int64_t batch, m, k, n;
};

// Operands and result of one product, with values in which every rounding error shows.
struct Problem {
  Shape shape;
  bool ta, tb;
  DType a_dtype, b_dtype, c_dtype;
  std::vector<float> a, b;  // fp32 or, when bf16, the values after rounding
  std::vector<uint16_t> a16, b16;
  std::vector<float> c;
  std::vector<uint16_t> c16;
  Gemm gemm;

  Problem(Shape s, bool ta_, bool tb_, DType ad, DType bd, DType cd, unsigned seed)
      : shape(s), ta(ta_), tb(tb_), a_dtype(ad), b_dtype(bd), c_dtype(cd) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](int64_t count, std::vector<float>& wide, std::vector<uint16_t>& narrow) {
      for (int64_t i = 0; i < count; ++i) {
        wide.push_back(normal(random));
        narrow.push_back(FloatToBF16(wide.back(), Rounding::kNearest));
      }
    };
    fill(s.batch * s.m * s.k, a, a16);
    fill(s.batch * s.k * s.n, b, b16);
    c.assign(s.batch * s.m * s.n, std::numeric_limits<float>::quiet_NaN());
    c16.assign(s.batch * s.m * s.n, 0x7fff);
    gemm.batch = s.batch;
    gemm.m = s.m;
    gemm.k = s.k;
    gemm.n = s.n;
    const void* a_data = ad == DType::kF32 ? static_cast<void*>(a.data()) : a16.data();
    const void* b_data = bd == DType::kF32 ? static_cast<void*>(b.data()) : b16.data();
    gemm.a = {a_data, ad, ta ? 1 : s.k, ta ? s.m : 1, s.m * s.k};
    gemm.b = {b_data, bd, tb ? s.k : 1, tb ? 1 : s.n, s.k * s.n};
    gemm.c = cd == DType::kF32 ? static_cast<void*>(c.data()) : c16.data();
    gemm.c_dtype = cd;
  }

  float A(int64_t z, int64_t i, int64_t p) const {
    return BF16ToFloat(
        a16[z * shape.m * shape.k + i * gemm.a.row_stride + p * gemm.a.depth_stride]);
  }
  float B(int64_t z, int64_t j, int64_t p) const {
    return BF16ToFloat(
        b16[z * shape.k * shape.n + j * gemm.b.row_stride + p * gemm.b.depth_stride]);
  }

  // How many elements differ from one fused multiply-add after another, in order of k.
  int64_t Wrong() const {
    int64_t wrong = 0;
    int64_t at = 0;
    for (int64_t z = 0; z < shape.batch; ++z) {
      for (int64_t i = 0; i < shape.m; ++i) {
        for (int64_t j = 0; j < shape.n; ++j, ++at) {
          float sum = 0;
          for (int64_t p = 0; p < shape.k; ++p) sum = std::fma(A(z, i, p), B(z, j, p), sum);
          wrong += c_dtype == DType::kF32 ? Bits(c[at]) != Bits(sum)
                                          : c16[at] != FloatToBF16(sum, Rounding::kNearest);
        }
      }
    }
    return wrong;
  }
};

// Like the process's own devices, these live on: a late helper may hold their work.
inline Device& Make(const Isa& isa, const Blocking& blocking) {
  static auto* devices = new std::vector<std::unique_ptr<Device>>;
  devices->push_back(MakeEmulatedDevice(isa, blocking));
  return *devices->back();
}

inline RunResult Compute(Device& device, const Gemm& gemm, TestPool& pool, int helpers) {
  PoolHelpers offered(pool, helpers);
  return RunToEnd(device.Begin(gemm, helpers + 1), offered);
}

}  // namespace jax_xdna
