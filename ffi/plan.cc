#include "plan.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <stdexcept>

#include "predict.h"
#include "sequence.h"

namespace jax_xdna {
namespace {

// Limits of the hardware and of its tools; all are refused beyond.
constexpr int64_t kL1Bytes = 65536;
constexpr int64_t kL2Bytes = 524288;
constexpr int64_t kStackBytes = kRuntimeAddress;
constexpr int64_t kL1Words = 20;                    // bytes: runtime words, fifo counters
constexpr int64_t kCoreRunWords = (1 << 14) - 1;    // of a core's descriptor
constexpr int64_t kMemoryRunWords = (1 << 17) - 1;  // of a memory tile's
constexpr int64_t kBufferBytes = 0xFFFFFFFF;        // offsets that a descriptor word holds
constexpr int64_t kRuntimeWord = std::numeric_limits<int32_t>::max();

void CheckLimit(const std::string& what, int64_t value, int64_t limit, const std::string& unit) {
  if (value > limit) {
    throw std::invalid_argument(what + " needs " + std::to_string(value) + " " + unit +
                                ", the limit is " + std::to_string(limit));
  }
}

int64_t BufferBytes(const std::string& name, int64_t item, int64_t rows, int64_t cols) {
  CheckLimit(name + ": a side", std::max(rows, cols), kBufferBytes / item, "elements");
  CheckLimit(name, rows, kBufferBytes / item / cols, "rows of " + std::to_string(cols));
  return item * rows * cols;
}

std::string Name(const Tile& tile) {
  return "tile " + std::to_string(tile.m) + "x" + std::to_string(tile.k) + "x" +
         std::to_string(tile.n);
}

MicroTile MicroTileOf(Arch arch, Numerics numerics) {
  if (arch == Arch::kNpu1) {
    if (numerics != Numerics::kBF16) {
      throw std::invalid_argument(
          "numerics bfp16 needs npu2's block floating point datapath (AIE2P), the limit of npu1's "
          "cores (AIE2) is bf16");
    }
    return packed_gemm::kAie2;
  }
  return numerics == Numerics::kBF16 ? packed_gemm::kAie2p : packed_gemm::kAie2pBfp16;
}

void CheckTile(const Tile& tile) {
  const auto fits = [](int size, int unit) { return size > 0 && size <= 1024 && size % unit == 0; };
  constexpr int kBlock = packed_gemm::kBlock, kDepth = packed_gemm::kDepth;
  if (!fits(tile.m, kBlock) || !fits(tile.k, kDepth) || !fits(tile.n, kBlock) ||
      tile.c_buffers < 1 || tile.c_buffers > 2) {
    throw std::invalid_argument(Name(tile) + ": m and n must be multiples of " +
                                std::to_string(kBlock) + " and k of " + std::to_string(kDepth) +
                                ", up to 1024, and c_buffers 1 or 2");
  }
}

void CheckMemories(const GemmPlan& plan) {
  const Tile& tile = plan.tile;
  const std::string name = Name(tile);
  CheckLimit(name + ": L1", plan.l1_bytes, kL1Bytes, "bytes");
  CheckLimit(name + ": L2", plan.l2_bytes, kL2Bytes, "bytes");
  const int64_t c_words = plan.c_item() * tile.m * tile.n / 4;
  CheckLimit(name + ": a core's descriptor",
             std::max<int64_t>({tile.m * tile.k / 2, tile.k * tile.n / 2, c_words}), kCoreRunWords,
             "words");
  CheckLimit(name + ": a memory tile's descriptor", kCoreRows * c_words, kMemoryRunWords, "words");
}

// The smallest divisor of `count` that is at least `least`.
int64_t Divisor(int64_t count, int64_t least) {
  while (count % least != 0) ++least;
  return least;
}

// Of a resident design: A is held when a lane fits and is needed more than once.
void ChooseFeed(GemmPlan& plan) {
  const int64_t room = kResidentBytes / (2 * plan.tile.m * plan.tile.k);  // tiles
  const int64_t lane = plan.row_tiles * plan.depth_tiles, passes = plan.col_tiles;
  if (lane <= room && passes >= 2 && passes <= 2 * kMaxRepeats + 2) {
    plan.feed = Feed::kHeld;
    plan.columns_outer = plan.row_tiles > 1;
    plan.chunk_tiles = Divisor(lane, CeilDiv(lane, kMaxLockValue));
    plan.chunks_held = lane / plan.chunk_tiles;
    return;
  }
  plan.feed = Feed::kRing;
  for (int64_t chunk = 1; chunk <= room / 2; ++chunk) {
    if (lane * passes % chunk != 0) continue;
    const int64_t tasks = lane * passes / chunk;
    plan.chunk_tiles = chunk;
    plan.chunks_held = std::min<int64_t>({kMaxLockValue, room / chunk, tasks});
    // A push runs whole rounds of the ring.
    const int64_t a_push = kMaxRepeats / plan.chunks_held * plan.chunks_held;
    if (tasks <= kQueueDepth * a_push) return;
  }
  throw std::invalid_argument("A through L2: no size of chunk brings " +
                              std::to_string(lane * passes) + " tiles in " +
                              std::to_string(kQueueDepth) + " pushes, the limit of a queue");
}

// Padded sizes, buffers and loop order.
GemmPlan Layout(Arch arch, int64_t m, int64_t k, int64_t n, Numerics numerics, DType c_dtype,
                Power power, const Tile& tile, bool resident, bool transposed) {
  CheckTile(tile);
  GemmPlan plan;
  plan.arch = arch;
  plan.numerics = numerics;
  plan.c_dtype = c_dtype;
  plan.power = power;
  plan.m = m;
  plan.k = k;
  plan.n = n;
  plan.transposed = transposed;
  plan.tile = tile;
  plan.micro = MicroTileOf(arch, numerics);
  plan.columns = arch == Arch::kNpu1 ? 4 : 8;
  const int64_t mk = tile.m * tile.k, kn = tile.k * tile.n, mn = tile.m * tile.n;
  const int64_t c_bytes = plan.c_item() * mn;
  plan.l1_bytes = kStackBytes + kL1Words + 2 * 2 * (mk + kn) + c_bytes * tile.c_buffers +
                  (c_dtype == DType::kBF16 ? 4 * mn : 0);
  plan.l2_bytes = 2 * 2 * kn + 2 * kCoreRows * c_bytes + (resident ? kResidentBytes : 2 * 2 * mk);
  if (resident && plan.l2_bytes > kL2Bytes) plan.l2_bytes -= kCoreRows * c_bytes;  // one C buffer
  CheckMemories(plan);

  const int64_t height = tile.m * kCoreRows, width = int64_t{tile.n} * plan.columns;
  plan.row_tiles = CeilDiv(transposed ? n : m, height);
  plan.depth_tiles = CeilDiv(k, tile.k);
  plan.col_tiles = CeilDiv(transposed ? m : n, width);
  plan.rows = plan.row_tiles * height;
  plan.depth = plan.depth_tiles * tile.k;
  plan.cols = plan.col_tiles * width;
  plan.columns_outer = plan.row_tiles > plan.col_tiles;
  if (resident) ChooseFeed(plan);
  plan.a_bytes = BufferBytes("packed A", 2, plan.rows, plan.depth);
  plan.b_bytes = BufferBytes("packed B", 2, plan.depth, plan.cols);
  plan.c_bytes = BufferBytes("packed C", plan.c_item(), plan.rows, plan.cols);
  CheckLimit("a runtime word", std::max(plan.row_tiles * plan.col_tiles, plan.depth_tiles),
             kRuntimeWord, "counts");
  return plan;
}

// Padded sizes and prediction: all that the search compares.
GemmPlan Best(Arch arch, int64_t m, int64_t k, int64_t n, Numerics numerics, DType c_dtype,
              Power power, bool resident, const Tile* tile) {
  if (m < 1 || k < 1 || n < 1) {
    throw std::invalid_argument("M, K and N must be at least 1, got " + std::to_string(m) + ", " +
                                std::to_string(k) + ", " + std::to_string(n));
  }
  CheckLimit("a side of the product", std::max({m, k, n}), kBufferBytes, "elements");
  GemmPlan best;
  std::exception_ptr refusal;
  const std::vector<Tile> tiles = tile != nullptr ? std::vector<Tile>{*tile} : Tiles(arch);
  for (const Tile& candidate : tiles) {
    for (const bool transposed : {false, true}) {
      try {
        GemmPlan plan =
            Layout(arch, m, k, n, numerics, c_dtype, power, candidate, resident, transposed);
        plan.predicted = Predict(plan);
        if (best.columns == 0 || plan.predicted.total < best.predicted.total) {
          best = std::move(plan);
        }
      } catch (const std::invalid_argument&) {
        if (!refusal) refusal = std::current_exception();
      }
    }
  }
  if (best.columns == 0) std::rethrow_exception(refusal);
  return best;
}

}  // namespace

bool operator==(const Tile& a, const Tile& b) {
  return a.m == b.m && a.k == b.k && a.n == b.n && a.c_buffers == b.c_buffers;
}

int64_t GemmPlan::a_tile(int core_row, int64_t i, int64_t kk) const {
  return 2 * tile.m * tile.k * ((core_row * row_tiles + i) * depth_tiles + kk);
}

int64_t GemmPlan::b_tile(int column, int64_t j, int64_t kk) const {
  return 2 * tile.k * tile.n * ((column * col_tiles + j) * depth_tiles + kk);
}

int64_t GemmPlan::c_tile(int column, int core_row, int64_t i, int64_t j) const {
  const int64_t block = columns_outer ? j * row_tiles + i : i * col_tiles + j;
  return c_item() * tile.m * tile.n *
         ((column * row_tiles * col_tiles + block) * kCoreRows + core_row);
}

namespace {

int64_t InTile(int micro_rows, int micro_columns, int columns, int64_t row, int64_t column) {
  return packed_gemm::OffsetInTile(micro_rows, micro_columns, columns, static_cast<int>(row),
                                   static_cast<int>(column));
}

}  // namespace

int64_t GemmPlan::a_element(int64_t row, int64_t at) const {
  const int64_t block = row / tile.m;
  return a_tile(static_cast<int>(block % kCoreRows), block / kCoreRows, at / tile.k) +
         2 * InTile(micro.r, micro.s, tile.k, row % tile.m, at % tile.k);
}

int64_t GemmPlan::b_element(int64_t at, int64_t col) const {
  const int64_t block = col / tile.n;
  return b_tile(static_cast<int>(block % columns), block / columns, at / tile.k) +
         2 * InTile(micro.s, micro.t, tile.n, at % tile.k, col % tile.n);
}

int64_t GemmPlan::c_element(int64_t row, int64_t col) const {
  const int64_t row_block = row / tile.m, col_block = col / tile.n;
  return c_tile(static_cast<int>(col_block % columns), static_cast<int>(row_block % kCoreRows),
                row_block / kCoreRows, col_block / columns) +
         c_item() * InTile(micro.r, micro.t, tile.n, row % tile.m, col % tile.n);
}

const std::vector<Tile>& Tiles(Arch) {
  static const std::vector<Tile> tiles = {{64, 32, 96, 1}, {64, 64, 48, 2}, {32, 64, 96, 2}};
  return tiles;
}

GemmPlan PlanGemm(Arch arch, int64_t m, int64_t k, int64_t n, Numerics numerics, const Tile* tile,
                  DType c_dtype, bool resident, Power power) {
  GemmPlan plan = Best(arch, m, k, n, numerics, c_dtype, power, resident, tile);
  BuildSteps(plan);
  ChooseChunks(plan);
  return plan;
}

Tile BestTile(Arch arch, const std::vector<GemmShape>& shapes, Numerics numerics, DType c_dtype,
              bool resident, Power power) {
  const Tile* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Tile& tile : Tiles(arch)) {
    double total = 0;
    for (const GemmShape& shape : shapes) {
      total += static_cast<double>(shape.calls) *
               Best(arch, shape.m, shape.k, shape.n, numerics, c_dtype, power, resident, &tile)
                   .predicted.total;
    }
    if (total < least) {
      least = total;
      best = &tile;
    }
  }
  if (best == nullptr) throw std::invalid_argument("no shapes to choose a tile for");
  return *best;
}

}  // namespace jax_xdna
