// The device below XLA: bits against a sequential reference, threads, faults. Run under
// AddressSanitizer, UBSan and ThreadSanitizer by .ci/run.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#include "counters.h"
#include "support.h"
#include "tiles.h"

namespace jax_xdna {
namespace {

TEST_CASE("every instruction set, layout, dtype and blocking gives the bits of the contract") {
  TestPool pool(3);
  const Shape shapes[] = {{1, 1, 1, 1},     {1, 7, 9, 50},   {1, 65, 130, 49}, {2, 24, 71, 96},
                          {1, 3, 257, 200}, {5, 16, 40, 16}, {1, 200, 90, 3}};
  const Blocking blockings[] = {Blocking(), {8, 64, 512, 64}, {40, 4000, 3000, 300}};
  const DType dtypes[] = {DType::kF32, DType::kBF16};
  unsigned seed = 0;
  for (const Isa* isa : UsableIsas()) {
    for (const Blocking& blocking : blockings) {
      Device& device = Make(*isa, blocking);
      for (const Shape& shape : shapes) {
        for (int layout = 0; layout < 4; ++layout) {
          for (int types = 0; types < 8; ++types) {
            ++seed;
            Problem problem(shape, layout & 1, layout & 2, dtypes[types & 1],
                            dtypes[types >> 1 & 1], dtypes[types >> 2], seed);
            Compute(device, problem.gemm, pool, static_cast<int>(seed % 4));
            CAPTURE(isa->name);
            CAPTURE(layout);
            CAPTURE(types);
            CAPTURE(shape.m);
            CAPTURE(shape.k);
            CAPTURE(shape.n);
            CAPTURE(blocking.depth);
            REQUIRE(problem.Wrong() == 0);
          }
        }
      }
    }
  }
}

TEST_CASE("a matrix shared by the batch needs no copies") {
  TestPool pool(1);
  Problem problem({4, 20, 33, 60}, false, false, DType::kF32, DType::kF32, DType::kF32, 1);
  for (int64_t z = 1; z < 4; ++z) {
    std::copy_n(problem.b.begin(), 33 * 60, problem.b.begin() + z * 33 * 60);
    std::copy_n(problem.b16.begin(), 33 * 60, problem.b16.begin() + z * 33 * 60);
  }
  problem.gemm.b.batch_stride = 0;
  std::fill(problem.b.begin() + 33 * 60, problem.b.end(), 1e30f);
  Compute(EmulatedDevice(), problem.gemm, pool, 1);
  CHECK(problem.Wrong() == 0);
}

TEST_CASE("rounding to bf16: ties to even, overflow to infinity, NaN kept") {
  CHECK(FloatToBF16(FromBits(0x3f808000), Rounding::kNearest) == 0x3f80);
  CHECK(FloatToBF16(FromBits(0x3f818000), Rounding::kNearest) == 0x3f82);
  CHECK(FloatToBF16(FromBits(0x3f808001), Rounding::kNearest) == 0x3f81);
  CHECK(FloatToBF16(std::numeric_limits<float>::max(), Rounding::kNearest) == 0x7f80);
  CHECK(FloatToBF16(FromBits(0x7f800001), Rounding::kNearest) == 0x7fc0);
  CHECK(FloatToBF16(FromBits(0x3f80ffff), Rounding::kFloor) == 0x3f80);
  CHECK(FloatToBF16(FromBits(0xbf800001), Rounding::kFloor) == 0xbf81);
  CHECK(FloatToBF16(FromBits(0xbf800000), Rounding::kFloor) == 0xbf80);
  CHECK(FloatToBF16(FromBits(0x7f800001), Rounding::kFloor) == 0x7fc0);
}

TEST_CASE("the vector paths round special values as the scalar one does") {
  const uint32_t special[] = {0x00000000, 0x80000000, 0x3f808000, 0x3f818000,
                              0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000,
                              0x7f800001, 0xffc12345, 0x00800000, 0x3f807fff};
  std::vector<float> in;
  for (int i = 0; i < 3; ++i) {
    for (const uint32_t u : special) in.push_back(FromBits(u));
  }
  for (const Isa* isa : UsableIsas()) {
    std::vector<uint16_t> out(in.size());
    isa->round_row(in.data(), static_cast<int64_t>(in.size()), out.data());
    for (size_t i = 0; i < in.size(); ++i) {
      CHECK(out[i] == FloatToBF16(in[i], Rounding::kNearest));
    }
  }
}

TEST_CASE("subnormals count as zero on every path, and the caller's mode comes back") {
  TestPool pool(2);
  for (const Isa* isa : UsableIsas()) {
    Device& device = Make(*isa, Blocking());
    Problem problem({1, 16, 64, 64}, false, false, DType::kF32, DType::kF32, DType::kF32, 3);
    std::fill(problem.a.begin(), problem.a.end(), FromBits(0x00010000));  // subnormal in bf16
    std::fill(problem.b.begin(), problem.b.end(), 1e30f);
    Compute(device, problem.gemm, pool, 2);
    for (const float x : problem.c) REQUIRE(Bits(x) == 0);
    // Largest subnormal fp32: rounds up to the smallest normal bf16 and counts.
    std::fill(problem.a.begin(), problem.a.end(), FromBits(0x007fffff));
    std::fill(problem.b.begin(), problem.b.end(), 1.0f);
    Compute(device, problem.gemm, pool, 2);
    for (const float x : problem.c) REQUIRE(x == 64 * std::numeric_limits<float>::min());
    // A result below the normal range is zero.
    std::fill(problem.a.begin(), problem.a.end(), std::numeric_limits<float>::min());
    std::fill(problem.b.begin(), problem.b.end(), FromBits(0x3b000000));  // 2^-9, times 64 is 2^-3
    Compute(device, problem.gemm, pool, 2);
    for (const float x : problem.c) REQUIRE(Bits(x) == 0);
    volatile float tiny = std::numeric_limits<float>::min();
    CHECK(tiny / 2 != 0);
  }
}

TEST_CASE("infinities and NaN reach the result") {
  TestPool pool(1);
  for (const Isa* isa : UsableIsas()) {
    Device& device = Make(*isa, Blocking());
    Problem problem({1, 4, 16, 20}, false, false, DType::kF32, DType::kF32, DType::kF32, 4);
    std::fill(problem.b.begin(), problem.b.end(), 1.0f);
    problem.a[0 * 16 + 3] = std::numeric_limits<float>::quiet_NaN();
    problem.a[1 * 16 + 3] = std::numeric_limits<float>::infinity();
    problem.a[2 * 16 + 3] = -3.4e38f;  // rounds to −inf
    Compute(device, problem.gemm, pool, 1);
    for (int j = 0; j < 20; ++j) {
      REQUIRE(std::isnan(problem.c[0 * 20 + j]));
      REQUIRE(problem.c[1 * 20 + j] == std::numeric_limits<float>::infinity());
      REQUIRE(problem.c[2 * 20 + j] == -std::numeric_limits<float>::infinity());
      REQUIRE(std::isfinite(problem.c[3 * 20 + j]));
    }
  }
}

// bfp16 written from its definition, one group at a time.
double Bfp16Element(const Problem& p, int64_t i, int64_t j, Rounding rounding) {
  const auto quantized = [&](const std::function<float(int64_t)>& at, int64_t group) {
    std::vector<double> out;
    double largest = 0;
    for (int64_t q = group; q < group + 8; ++q) {
      out.push_back(q < p.shape.k ? at(q) : 0.0);
      largest = std::max(largest, std::fabs(out.back()));
    }
    const double unit = largest == 0 ? 1 : std::exp2(std::floor(std::log2(largest)) - 6);
    for (double& x : out) {
      x = rounding == Rounding::kFloor ? std::floor(x / unit) : std::nearbyint(x / unit);
      x = std::max(-128.0, std::min(127.0, x)) * unit;
    }
    return out;
  };
  const auto bf16 = [&](float x) { return BF16ToFloat(FloatToBF16(x, rounding)); };
  float acc = 0;
  for (int64_t g = 0; g < p.shape.k; g += 8) {
    const auto a = quantized([&](int64_t q) { return bf16(p.a[i * p.shape.k + q]); }, g);
    const auto b = quantized([&](int64_t q) { return bf16(p.b[q * p.shape.n + j]); }, g);
    double sum = 0;
    for (int q = 0; q < 8; ++q) sum += a[q] * b[q];
    acc = static_cast<float>(static_cast<double>(acc) + sum);
  }
  return acc;
}

TEST_CASE("bfp16 and floor rounding are what their definitions say") {
  TestPool pool(1);
  for (const Isa* isa : UsableIsas()) {
    Device& device = Make(*isa, {16, 500, 900, 100});
    for (const Rounding rounding : {Rounding::kNearest, Rounding::kFloor}) {
      Problem problem({1, 21, 77, 50}, false, false, DType::kF32, DType::kF32, DType::kF32, 5);
      for (float& x : problem.a) x = std::fabs(x);
      for (float& x : problem.b) x = std::fabs(x);
      problem.gemm.numerics = Numerics::kBFP16;
      problem.gemm.rounding = rounding;
      Compute(device, problem.gemm, pool, 1);
      double bias = 0;
      for (int64_t i = 0; i < 21; ++i) {
        for (int64_t j = 0; j < 50; ++j) {
          REQUIRE(problem.c[i * 50 + j] == Bfp16Element(problem, i, j, rounding));
          for (int64_t p = 0; p < 77; ++p) {
            bias -= static_cast<double>(problem.a[i * 77 + p]) * problem.b[p * 50 + j];
          }
          bias += problem.c[i * 50 + j];
        }
      }
      bias /= 21 * 50 * 77;  // of one product
      if (rounding == Rounding::kFloor) {
        CHECK(bias < -5e-3);
      } else {
        CHECK(std::fabs(bias) < 5e-4);
      }
    }
  }
}

TEST_CASE("callers that are the pool's own threads cannot deadlock") {
  for (const int threads : {1, 2}) {
    TestPool pool(threads);
    std::atomic<int> finished{0};
    constexpr int kCalls = 200;
    // Each call runs on the pool and offers work to the same, busy pool.
    for (int call = 0; call < kCalls; ++call) {
      pool.Add([&pool, &finished, call] {
        Problem problem({1 + call % 3, 64, 96, 64}, false, false, DType::kF32, DType::kF32,
                        DType::kF32, static_cast<unsigned>(call));
        Compute(EmulatedDevice(), problem.gemm, pool, 3);
        if (call % 20 == 0) CHECK(problem.Wrong() == 0);
        ++finished;
      });
    }
    while (finished < kCalls) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

TEST_CASE("four callers share one pool") {
  TestPool pool(2);
  std::vector<std::thread> callers;
  std::atomic<int64_t> wrong{0};
  for (unsigned caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&pool, &wrong, caller] {
      for (unsigned call = 0; call < 30; ++call) {
        Problem problem({1, 40 + caller, 100, 150}, call & 1, call & 2, DType::kF32, DType::kF32,
                        DType::kF32, caller * 100 + call);
        Compute(EmulatedDevice(), problem.gemm, pool, 2);
        wrong += problem.Wrong();
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(wrong == 0);
}

// Fails in one of its tickets; the others wait for it.
class FaultyWork final : public Work {
 public:
  explicit FaultyWork(int64_t bad) : bad_(bad) {}
  int64_t tickets() const override { return 40; }
  Ticket ticket(int64_t index) const override {
    return {index < 5 ? Stage::kPack : index < 35 ? Stage::kRun : Stage::kUnpack, index};
  }
  void Pack(int64_t piece, StageTimes&) override { Step(piece); }
  void Run(int64_t piece, StageTimes&) override { Step(piece); }
  void Unpack(int64_t piece, StageTimes&) override { Step(piece); }
  bool recycled() const { return recycled_; }

 private:
  void Step(int64_t piece) {
    if (piece == bad_) throw DeviceError("gone");
    WaitUntil([&] { return reached_.load() >= piece; });
    ++reached_;
    Signal();
  }
  void Recycle() override { recycled_ = true; }
  const int64_t bad_;
  std::atomic<int64_t> reached_{0};
  std::atomic<bool> recycled_{false};
};

TEST_CASE("an exception in a ticket of any stage ends the call, and only the call") {
  for (const int64_t bad : {0, 3, 20, 39}) {
    FaultyWork work(bad);
    {
      TestPool pool(2);
      PoolHelpers helpers(pool, 2);
      CHECK_THROWS_AS(RunToEnd(WorkRef(&work), helpers), DeviceError);
    }
    CHECK(work.recycled());
  }
  FaultyWork work(-1);
  TestPool pool(2);
  PoolHelpers helpers(pool, 2);
  CHECK(RunToEnd(WorkRef(&work), helpers).threads >= 1);
}

TEST_CASE("a helper that wakes after the call finds nothing to do") {
  std::vector<std::function<void()>> late;
  class Late final : public Helpers {
   public:
    explicit Late(std::vector<std::function<void()>>& tasks) : tasks_(tasks) {}
    int count() const override { return 3; }
    void Offer(WorkRef work) override {
      tasks_.push_back([work] { Help(*work); });
    }

   private:
    std::vector<std::function<void()>>& tasks_;
  } helpers(late);
  {
    Problem problem({1, 64, 64, 640}, false, false, DType::kF32, DType::kF32, DType::kF32, 6);
    const RunResult result = RunToEnd(EmulatedDevice().Begin(problem.gemm, 4), helpers);
    CHECK(result.threads == 1);
    CHECK(problem.Wrong() == 0);
  }
  CHECK(late.size() == 3);
  for (const auto& task : late) task();  // the operands are freed by now
}

TEST_CASE("an unknown device is named, with those that exist") {
  CHECK_THROWS_WITH_AS(FindDevice("npu9"), "no device is named 'npu9'; this process has: emulated",
                       DeviceError);
}

TEST_CASE("counters add up over threads while they are read") {
  Counters counters;
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 4; ++writer) {
    writers.emplace_back([&counters, writer] {
      for (int i = 0; i < 1000; ++i) {
        CounterRow row;
        row.calls = 1;
        row.flops = 2;
        counters.Add({"emulated", "NN", "bf16", 1, writer % 2, 1, 1}, row);
      }
    });
  }
  size_t most = 0;
  for (int i = 0; i < 100; ++i) most = std::max(most, counters.Snapshot().size());
  for (std::thread& writer : writers) writer.join();
  CHECK(most <= 2);
  const auto rows = counters.Snapshot();
  REQUIRE(rows.size() == 2);
  CHECK(rows[0].second.calls == 2000);
  CHECK(rows[1].second.flops == 4000);
}

TEST_CASE("packing into tiles stays inside its arrays and gives each element its place") {
  const TileShape tiles[] = {{16, 24, 4, 8}, {24, 16, 8, 4}, {16, 16, 8, 8}, {8, 32, 1, 8}};
  for (const Isa* isa : UsableIsas()) {
    for (const TileShape& t : tiles) {
      for (const bool transposed : {false, true}) {
        const int64_t rows = 37, columns = 61;
        std::vector<float> matrix(rows * columns);
        for (int64_t i = 0; i < rows * columns; ++i) matrix[i] = static_cast<float>(i % 251);
        const TileSource source = {matrix.data(),         DType::kF32, transposed ? 1 : columns,
                                   transposed ? rows : 1, rows,        columns};
        const int64_t down = (rows + t.rows - 1) / t.rows;
        const int64_t across = (columns + t.columns - 1) / t.columns;
        const int64_t size = t.rows * t.columns;
        std::unique_ptr<uint16_t, void (*)(void*)> packed(
            static_cast<uint16_t*>(std::aligned_alloc(64, down * across * size * 2)), std::free);
        for (int64_t i = 0; i < down; ++i) {
          for (int64_t j = 0; j < across; ++j) {
            uint16_t* out = packed.get() + (i * across + j) * size;
            isa->pack_tiles(source, t, i * t.rows, j * t.columns, 1, &out);
          }
        }
        StreamFence();
        int wrong = 0;
        for (int64_t r = 0; r < down * t.rows; ++r) {
          for (int64_t c = 0; c < across * t.columns; ++c) {
            const int64_t tile = r / t.rows * across + c / t.columns;
            const int64_t u = r % t.rows, v = c % t.columns;
            const int64_t micro =
                u / t.micro_rows * (t.columns / t.micro_columns) + v / t.micro_columns;
            const int64_t at = tile * size + micro * t.micro_rows * t.micro_columns +
                               u % t.micro_rows * t.micro_columns + v % t.micro_columns;
            const bool inside = r < rows && c < columns;
            const float want =
                inside ? matrix[r * source.row_stride + c * source.column_stride] : 0.0f;
            wrong += BF16ToFloat(packed.get()[at]) != want;
          }
        }
        CAPTURE(isa->name);
        CAPTURE(t.micro_rows);
        CAPTURE(transposed);
        REQUIRE(wrong == 0);
      }
    }
  }
}

TEST_CASE("tiles of a result go back to their rows, and nowhere else") {
  for (const Isa* isa : UsableIsas()) {
    for (const TileShape& t : {TileShape{16, 24, 4, 4}, {16, 24, 4, 8}, {16, 24, 8, 8}}) {
      for (const bool stream : {false, true}) {
        const int64_t rows = 11, columns = 53, across = 3;
        std::vector<float> packed(across * t.rows * t.columns), matrix(rows * columns, -1.0f);
        for (size_t i = 0; i < packed.size(); ++i) packed[i] = static_cast<float>(i);
        std::vector<const float*> in;
        for (int64_t j = 0; j < across; ++j) in.push_back(packed.data() + j * t.rows * t.columns);
        isa->unpack_tiles(in.data(), t, across, rows, columns, matrix.data(), columns, stream);
        StreamFence();
        int wrong = 0;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < columns; ++c) {
            const int64_t v = c % t.columns;
            const int64_t block =
                r / t.micro_rows * (t.columns / t.micro_columns) + v / t.micro_columns;
            const int64_t at = c / t.columns * t.rows * t.columns +
                               block * t.micro_rows * t.micro_columns +
                               r % t.micro_rows * t.micro_columns + v % t.micro_columns;
            wrong += matrix[r * columns + c] != packed[at];
          }
        }
        REQUIRE(wrong == 0);
      }
    }
  }
}

}  // namespace
}  // namespace jax_xdna
