#include "plan.h"

#include <algorithm>
#include <array>
#include <exception>
#include <limits>
#include <stdexcept>

#include "predict.h"

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
  if (arch == Arch::kNpu1) return {4, 8, 4};
  return numerics == Numerics::kBF16 ? MicroTile{4, 8, 8} : MicroTile{8, 8, 8};
}

void CheckTile(const Tile& tile, int64_t l1, int64_t l2) {
  const std::string name = Name(tile);
  // The core kernel works on up to 4x4 micro-tiles at a time.
  if (tile.m < 16 || tile.k < 8 || tile.n < 16 || tile.m % 16 != 0 || tile.k % 8 != 0 ||
      tile.n % 16 != 0 || tile.c_buffers < 1 || tile.c_buffers > 2) {
    throw std::invalid_argument(name +
                                ": m and n must be multiples of 16, k of 8, c_buffers 1 or 2");
  }
  CheckLimit(name + ": L1", l1, kL1Bytes, "bytes");
  CheckLimit(name + ": L2", l2, kL2Bytes, "bytes");
  CheckLimit(name + ": a core's descriptor",
             std::max({tile.m * tile.k / 2, tile.k * tile.n / 2, tile.m * tile.n}), kCoreRunWords,
             "words");
  CheckLimit(name + ": a memory tile's descriptor", kCoreRows * tile.m * tile.n, kMemoryRunWords,
             "words");
}

// Padded sizes, buffers and loop order.
GemmPlan Layout(Arch arch, int64_t m, int64_t k, int64_t n, Numerics numerics, const Tile& tile,
                bool transposed) {
  GemmPlan plan;
  plan.arch = arch;
  plan.numerics = numerics;
  plan.m = m;
  plan.k = k;
  plan.n = n;
  plan.transposed = transposed;
  plan.tile = tile;
  plan.micro = MicroTileOf(arch, numerics);
  plan.columns = arch == Arch::kNpu1 ? 4 : 8;
  const int64_t mk = tile.m * tile.k, kn = tile.k * tile.n, mn = tile.m * tile.n;
  plan.l1_bytes = kStackBytes + kL1Words + 2 * 2 * (mk + kn) + 4 * mn * tile.c_buffers;
  plan.l2_bytes = 2 * 2 * (mk + kn) + 2 * 4 * kCoreRows * mn;
  CheckTile(tile, plan.l1_bytes, plan.l2_bytes);

  const int64_t height = tile.m * kCoreRows, width = int64_t{tile.n} * plan.columns;
  plan.row_tiles = CeilDiv(transposed ? n : m, height);
  plan.depth_tiles = CeilDiv(k, tile.k);
  plan.col_tiles = CeilDiv(transposed ? m : n, width);
  plan.rows = plan.row_tiles * height;
  plan.depth = plan.depth_tiles * tile.k;
  plan.cols = plan.col_tiles * width;
  plan.columns_outer = plan.row_tiles > plan.col_tiles;
  plan.a_bytes = BufferBytes("packed A", 2, plan.rows, plan.depth);
  plan.b_bytes = BufferBytes("packed B", 2, plan.depth, plan.cols);
  plan.c_bytes = BufferBytes("packed C", 4, plan.rows, plan.cols);
  CheckLimit("a runtime word", std::max(plan.row_tiles * plan.col_tiles, plan.depth_tiles),
             kRuntimeWord, "counts");
  return plan;
}

// A push with the time, counted in output tiles of a core, at which the first of its data is due.
struct Timed {
  int64_t due;
  Step step;
};

// Pushes of one shim channel: `runs` runs of `bytes` from `offset`, each `repeats` times and in use
// for `duration` a time.
std::vector<Timed> Lane(Step step, int64_t runs, int64_t repeats, int64_t duration) {
  std::vector<Timed> pushes;
  const int64_t start = step.offset;
  for (int64_t run = 0; run < runs; ++run) {
    for (int64_t done = 0; done < repeats; done += kMaxRepeats) {
      step.offset = start + run * step.bytes;
      step.repeats = static_cast<int>(std::min<int64_t>(kMaxRepeats, repeats - done));
      step.write_bd = done == 0;
      pushes.push_back({(run * repeats + done) * duration, step});
    }
  }
  return pushes;
}

// Numbers the descriptors of a lane from `first` on, in a ring as long as the queue: when a run
// takes the descriptor of the run four before, the push four before has been waited for. Marks
// those pushes for a token. Returns the first free descriptor.
int AssignDescriptors(std::vector<Timed>& pushes, int first) {
  int run = -1;
  for (size_t p = 0; p < pushes.size(); ++p) {
    if (pushes[p].step.write_bd) ++run;
    pushes[p].step.bd = first + run % kQueueDepth;
    pushes[p].step.token = p + kQueueDepth < pushes.size();
  }
  return first + std::min(run + 1, kQueueDepth);
}

// The sequence: up to four pushes a channel, runtime words, locks; then the other pushes as they
// fall due, each after the one four before it has been completed; then C.
// A wait cannot block for ever: what is due earlier has been pushed, and the push waited for needs
// nothing later.
void BuildSteps(GemmPlan& plan) {
  std::vector<std::vector<Timed>> lanes;
  std::array<int, 8> free_bd{};
  const auto add = [&](Step step, int64_t runs, int64_t repeats, int64_t duration) {
    std::vector<Timed> pushes = Lane(step, runs, repeats, duration);
    int& bd = free_bd[static_cast<size_t>(step.column)];
    bd = AssignDescriptors(pushes, bd);
    lanes.push_back(std::move(pushes));
  };

  const int64_t rows = plan.row_tiles, cols = plan.col_tiles;
  std::vector<Step> waits;
  for (int column = 0; column < plan.columns; ++column) {
    Step c;
    c.column = column;
    c.direction = Direction::kS2mm;
    c.buffer = Buffer::kC;
    c.bytes = plan.c_bytes / plan.columns;
    c.offset = column * c.bytes;
    add(c, 1, 1, 0);
    lanes.back().front().step.token = true;
    c.kind = Step::kWait;
    waits.push_back(c);
  }
  for (int column = 0; column < plan.columns; ++column) {
    Step b;
    b.column = column;
    b.buffer = Buffer::kB;
    for (int lane = 0; lane < kCoreRows; ++lane) {
      if (plan.a_column(lane) == column) b.channel = 1;
    }
    const int64_t lane_bytes = plan.b_bytes / plan.columns;
    b.offset = column * lane_bytes;
    b.bytes = plan.columns_outer ? lane_bytes / cols : lane_bytes;
    add(b, plan.columns_outer ? cols : 1, rows, plan.columns_outer ? 1 : cols);
  }
  for (int lane = 0; lane < kCoreRows; ++lane) {
    Step a;
    a.column = plan.a_column(lane);
    a.buffer = Buffer::kA;
    const int64_t lane_bytes = plan.a_bytes / kCoreRows;
    a.offset = lane * lane_bytes;
    a.bytes = plan.columns_outer ? lane_bytes : lane_bytes / rows;
    add(a, plan.columns_outer ? 1 : rows, cols, plan.columns_outer ? rows : 1);
  }

  std::vector<Timed> later;
  for (const std::vector<Timed>& pushes : lanes) {
    for (size_t p = 0; p < pushes.size(); ++p) {
      if (p < kQueueDepth) {
        plan.steps.push_back(pushes[p].step);
      } else {
        later.push_back(pushes[p]);
      }
    }
  }
  for (const Step::Kind kind : {Step::kRuntimeWords, Step::kGoLocks}) {
    plan.steps.emplace_back();
    plan.steps.back().kind = kind;
  }
  std::stable_sort(later.begin(), later.end(),
                   [](const Timed& x, const Timed& y) { return x.due < y.due; });
  for (const Timed& push : later) {
    plan.steps.push_back(push.step);
    plan.steps.back().kind = Step::kWait;
    plan.steps.push_back(push.step);
  }
  plan.steps.insert(plan.steps.end(), waits.begin(), waits.end());
}

// Padded sizes and prediction: all that the search compares.
GemmPlan Best(Arch arch, int64_t m, int64_t k, int64_t n, Numerics numerics, const Tile* tile) {
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
        GemmPlan plan = Layout(arch, m, k, n, numerics, candidate, transposed);
        plan.predicted = Predict(plan);
        if (best.columns == 0 || plan.predicted.total < best.predicted.total) {
          best = std::move(plan);
        }
      } catch (const std::invalid_argument&) {
        refusal = std::current_exception();
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
  return 4 * tile.m * tile.n * ((column * row_tiles * col_tiles + block) * kCoreRows + core_row);
}

namespace {

// Position of an element in a tile: a grid of micro-tiles, `across` of them in a row.
int64_t InTile(int64_t row, int64_t col, int height, int width, int64_t across) {
  return ((row / height) * across + col / width) * height * width + row % height * width +
         col % width;
}

}  // namespace

int64_t GemmPlan::a_element(int64_t row, int64_t at) const {
  const int64_t block = row / tile.m;
  return a_tile(static_cast<int>(block % kCoreRows), block / kCoreRows, at / tile.k) +
         2 * InTile(row % tile.m, at % tile.k, micro.r, micro.s, tile.k / micro.s);
}

int64_t GemmPlan::b_element(int64_t at, int64_t col) const {
  const int64_t block = col / tile.n;
  return b_tile(static_cast<int>(block % columns), block / columns, at / tile.k) +
         2 * InTile(at % tile.k, col % tile.n, micro.s, micro.t, tile.n / micro.t);
}

int64_t GemmPlan::c_element(int64_t row, int64_t col) const {
  const int64_t row_block = row / tile.m, col_block = col / tile.n;
  return c_tile(static_cast<int>(col_block % columns), static_cast<int>(row_block % kCoreRows),
                row_block / kCoreRows, col_block / columns) +
         4 * InTile(row % tile.m, col % tile.n, micro.r, micro.t, tile.n / micro.t);
}

const std::vector<Tile>& Tiles(Arch) {
  static const std::vector<Tile> tiles = {{64, 32, 96, 1}, {64, 64, 48, 2}, {32, 64, 96, 2}};
  return tiles;
}

GemmPlan PlanGemm(Arch arch, int64_t m, int64_t k, int64_t n, Numerics numerics, const Tile* tile) {
  GemmPlan plan = Best(arch, m, k, n, numerics, tile);
  BuildSteps(plan);
  ChooseChunks(plan);
  return plan;
}

Tile BestTile(Arch arch, const std::vector<GemmShape>& shapes, Numerics numerics) {
  const Tile* best = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const Tile& tile : Tiles(arch)) {
    double total = 0;
    for (const GemmShape& shape : shapes) {
      total += static_cast<double>(shape.calls) *
               Best(arch, shape.m, shape.k, shape.n, numerics, &tile).predicted.total;
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
