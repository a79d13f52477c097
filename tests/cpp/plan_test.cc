// Plans: layouts that fill their buffers, sequences that can neither overflow a queue nor block,
// limits, and the predicted GPT-2 step.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "plan.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <stdexcept>
#include <tuple>

#include "stream.h"

namespace jax_xdna {
namespace {

// One shim channel as the array sees it: what was pushed, in units of output tiles of a core.
struct Channel {
  struct Task {
    int64_t end;  // consumed when so many output tiles are done
    int bd;
    bool token;
  };
  std::deque<Task> outstanding;
  std::vector<std::pair<int64_t, int64_t>> runs;  // (offset, bytes) in the order sent
  std::map<int, std::pair<int64_t, int64_t>> bd;
  int64_t end = 0;
};

using ChannelKey = std::tuple<int, Direction, int>;

// Replays the sequence: at most four tasks a queue, no descriptor rewritten while in use, every
// wait answered by what has been pushed before it. Returns the runs of each channel.
std::map<ChannelKey, Channel> Replay(const GemmPlan& plan) {
  std::map<ChannelKey, Channel> channels;
  const int64_t tiles = plan.row_tiles * plan.col_tiles;
  const int64_t a_panel = plan.a_bytes / kCoreRows / plan.row_tiles;
  const int64_t b_panel = plan.b_bytes / plan.columns / plan.col_tiles;
  bool started = false;
  for (const Step& step : plan.steps) {
    if (step.kind == Step::kGoLocks) started = true;
    if (step.kind != Step::kPush && step.kind != Step::kWait) continue;
    Channel& channel = channels[{step.column, step.direction, step.channel}];
    if (step.kind == Step::kPush) {
      REQUIRE(channel.outstanding.size() < kQueueDepth);
      REQUIRE(step.bd < kShimBds);
      if (step.write_bd) {
        for (const auto& [key, other] : channels) {
          if (std::get<0>(key) != step.column) continue;
          for (const Channel::Task& task : other.outstanding) REQUIRE(task.bd != step.bd);
        }
        channel.bd[step.bd] = {step.offset, step.bytes};
      }
      REQUIRE(channel.bd.at(step.bd) == std::make_pair(step.offset, step.bytes));
      for (int i = 0; i < step.repeats; ++i) channel.runs.emplace_back(step.offset, step.bytes);
      if (step.buffer == Buffer::kA && plan.feed == Feed::kHeld) {
        channel.end = tiles;
      } else if (step.buffer == Buffer::kA)
        channel.end += step.repeats * (step.bytes / a_panel);
      if (step.buffer == Buffer::kB) channel.end += step.repeats * (step.bytes / b_panel);
      if (step.buffer == Buffer::kC) channel.end = tiles;
      channel.outstanding.push_back({channel.end, step.bd, step.token});
    } else {
      REQUIRE(started);
      int64_t fed = tiles;
      for (const auto& [key, other] : channels) fed = std::min(fed, other.end);
      while (!channel.outstanding.front().token) channel.outstanding.pop_front();
      REQUIRE(channel.outstanding.front().end <= fed);
      channel.outstanding.pop_front();
    }
  }
  for (const auto& [key, channel] : channels) {
    CHECK(channel.end == tiles);
    for (const Channel::Task& task : channel.outstanding) CHECK(!task.token);
  }
  return channels;
}

// The byte offsets of the tiles that a channel sends, in order.
std::vector<int64_t> TilesOf(const Channel& channel, int64_t tile_bytes) {
  std::vector<int64_t> tiles;
  for (const auto& [offset, bytes] : channel.runs) {
    REQUIRE(bytes % tile_bytes == 0);
    for (int64_t at = 0; at < bytes; at += tile_bytes) tiles.push_back(offset + at);
  }
  return tiles;
}

// What the memory tile of a resident design sends when the shim brings it these tiles: fills and
// sends run in any order that locks and queues allow.
std::vector<int64_t> ThroughL2(const GemmPlan& plan, int column, const std::vector<int64_t>& in) {
  std::map<int, int64_t> locks;
  std::map<int, MemoryBd> bds;
  std::map<int, uint32_t> next;  // step of each descriptor
  std::map<Direction, std::deque<int>> tasks;
  std::map<Direction, int> pushes;
  for (const Step& step : plan.steps) {
    if (step.column != column) continue;
    if (step.kind == Step::kMemoryLock) locks[step.lock] = step.repeats;
    if (step.kind == Step::kMemoryBd) bds[step.bd] = step.memory;
    if (step.kind != Step::kMemoryPush) continue;
    REQUIRE(++pushes[step.direction] <= kQueueDepth);
    for (int i = 0; i < step.repeats; ++i) tasks[step.direction].push_back(step.bd);
  }
  for (const auto& [lock, value] : locks) REQUIRE(value <= kMaxLockValue);
  const std::map<int, int64_t> start = locks;
  const size_t tile_words = static_cast<size_t>(plan.tile.m * plan.tile.k / 2);
  std::vector<int64_t> memory(static_cast<size_t>(kResidentBytes / 4) / tile_words, -1), out;
  size_t arrived = 0;
  std::mt19937 random(11);
  int stuck = 0;
  while (stuck < 64) {
    const Direction direction = random() % 2 == 0 ? Direction::kS2mm : Direction::kMm2s;
    std::deque<int>& queue = tasks[direction];
    ++stuck;
    if (queue.empty()) continue;
    const MemoryBd& bd = bds.at(queue.front());
    if (bd.acquire >= 0 && locks.at(bd.acquire) == 0) continue;
    stuck = 0;
    if (bd.acquire >= 0) --locks.at(bd.acquire);
    const size_t first = next[queue.front()]++ % bd.steps * bd.stride / tile_words;
    for (size_t tile = first; tile < first + bd.length / tile_words; ++tile) {
      if (direction == Direction::kS2mm) {
        memory.at(tile) = in.at(arrived++);
      } else {
        out.push_back(memory.at(tile));
      }
    }
    if (bd.release >= 0) ++locks.at(bd.release);
    queue.pop_front();
  }
  for (const auto& [direction, queue] : tasks) CHECK(queue.empty());
  CHECK(arrived == in.size());
  CHECK(locks == start);
  return out;
}

void CheckOrder(const GemmPlan& plan) {
  std::map<ChannelKey, Channel> channels = Replay(plan);
  std::vector<std::pair<int64_t, int64_t>> order;  // (i, j) in the order in which cores work
  const int64_t outer = plan.columns_outer ? plan.col_tiles : plan.row_tiles;
  const int64_t inner = plan.columns_outer ? plan.row_tiles : plan.col_tiles;
  for (int64_t x = 0; x < outer; ++x) {
    for (int64_t y = 0; y < inner; ++y) {
      order.emplace_back(plan.columns_outer ? y : x, plan.columns_outer ? x : y);
    }
  }
  for (int lane = 0; lane < kCoreRows; ++lane) {
    std::vector<int64_t> expected;
    for (const auto& [i, j] : order) {
      for (int64_t kk = 0; kk < plan.depth_tiles; ++kk) {
        expected.push_back(plan.a_tile(lane, i, kk));
      }
    }
    const bool resident = plan.feed != Feed::kFifo;
    std::vector<int64_t> sent =
        TilesOf(channels.at({plan.a_column(lane), Direction::kMm2s, resident ? 1 : 0}),
                2 * plan.tile.m * plan.tile.k);
    if (resident) sent = ThroughL2(plan, plan.a_column(lane), sent);
    CHECK(sent == expected);
  }
  for (int column = 0; column < plan.columns; ++column) {
    std::vector<int64_t> b, c;
    for (const auto& [i, j] : order) {
      for (int64_t kk = 0; kk < plan.depth_tiles; ++kk) b.push_back(plan.b_tile(column, j, kk));
      for (int row = 0; row < kCoreRows; ++row) c.push_back(plan.c_tile(column, row, i, j));
    }
    const bool shares = plan.feed == Feed::kFifo && (plan.columns == 4 || column % 2 == 0);
    CHECK(TilesOf(channels.at({column, Direction::kMm2s, shares ? 1 : 0}),
                  2 * plan.tile.k * plan.tile.n) == b);
    CHECK(TilesOf(channels.at({column, Direction::kS2mm, 0}),
                  plan.c_item() * plan.tile.m * plan.tile.n) == c);
  }
}

TEST_CASE("lanes send tiles in the order of the cores; queues and descriptors are respected") {
  std::mt19937 random(3);
  const auto upto = [&](int64_t limit) { return static_cast<int64_t>(random() % limit) + 1; };
  for (int trial = 0; trial < 60; ++trial) {
    const Arch arch = trial % 2 == 0 ? Arch::kNpu1 : Arch::kNpu2;
    const DType c_dtype = trial % 3 == 0 ? DType::kBF16 : DType::kF32;
    CheckOrder(
        PlanGemm(arch, upto(9000), upto(200), upto(9000), Numerics::kBF16, nullptr, c_dtype));
  }
  // Both loops long; more than 256 repeats; one side only.
  const Tile tile{16, 32, 16, 2};
  CheckOrder(PlanGemm(Arch::kNpu1, 64 * 20, 32, 64 * 300, Numerics::kBF16, &tile));
  CheckOrder(PlanGemm(Arch::kNpu1, 64 * 530, 32, 64 * 7, Numerics::kBF16, &tile));
  CheckOrder(PlanGemm(Arch::kNpu2, 64, 32, 128 * 1300, Numerics::kBF16, &tile));
}

TEST_CASE("a lane of A held in L2, or in a ring there, gives the cores the same tiles") {
  std::mt19937 random(4);
  const auto upto = [&](int64_t limit) { return static_cast<int64_t>(random() % limit) + 1; };
  const Tile tiles[] = {{64, 32, 96, 1}, {64, 64, 48, 2}};
  std::map<Feed, int> seen;
  for (int trial = 0; trial < 40; ++trial) {
    const Arch arch = trial % 2 == 0 ? Arch::kNpu1 : Arch::kNpu2;
    const GemmPlan plan = PlanGemm(arch, upto(1500), upto(2000), upto(3000), Numerics::kBF16,
                                   &tiles[random() % 2], DType::kF32, true);
    ++seen[plan.feed];
    CHECK(plan.l2_bytes <= 524288);
    CheckOrder(plan);
  }
  CHECK(seen[Feed::kHeld] > 5);
  CHECK(seen[Feed::kRing] > 5);
  for (const Arch arch : {Arch::kNpu1, Arch::kNpu2}) {
    CheckOrder(PlanGemm(arch, 256, 768, 50304, Numerics::kBF16, &tiles[1], DType::kF32, true));
    CheckOrder(PlanGemm(arch, 256, 50304, 768, Numerics::kBF16, &tiles[1], DType::kF32, true));
    CheckOrder(PlanGemm(arch, 50304, 256, 768, Numerics::kBF16, &tiles[1], DType::kF32, true));
  }
}

TEST_CASE("elements fill the packed buffers, each once") {
  for (const Arch arch : {Arch::kNpu1, Arch::kNpu2}) {
    for (const Numerics numerics : {Numerics::kBF16, Numerics::kBFP16}) {
      if (arch == Arch::kNpu1 && numerics == Numerics::kBFP16) continue;
      const Tile tile{32, 32, 16, 1};
      const DType c_dtype = numerics == Numerics::kBF16 ? DType::kF32 : DType::kBF16;
      const GemmPlan plan = PlanGemm(arch, 250, 60, 131, numerics, &tile, c_dtype);
      const auto check = [](int64_t bytes, int item, int64_t rows, int64_t cols, auto at) {
        std::vector<char> seen(static_cast<size_t>(bytes / item));
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t c = 0; c < cols; ++c) {
            const int64_t offset = at(r, c);
            REQUIRE(offset % item == 0);
            REQUIRE(!std::exchange(seen.at(static_cast<size_t>(offset / item)), 1));
          }
        }
        CHECK(std::count(seen.begin(), seen.end(), 1) == bytes / item);
      };
      check(plan.a_bytes, 2, plan.rows, plan.depth,
            [&](int64_t r, int64_t c) { return plan.a_element(r, c); });
      check(plan.b_bytes, 2, plan.depth, plan.cols,
            [&](int64_t r, int64_t c) { return plan.b_element(r, c); });
      check(plan.c_bytes, static_cast<int>(plan.c_item()), plan.rows, plan.cols,
            [&](int64_t r, int64_t c) { return plan.c_element(r, c); });
    }
  }
}

TEST_CASE("elements lie in their tile, micro-tile by micro-tile") {
  const Tile tile{64, 32, 96, 1};
  const GemmPlan plan = PlanGemm(Arch::kNpu1, 512, 64, 768, Numerics::kBF16, &tile);
  REQUIRE(!plan.transposed);
  // Row 64·6 + 5 is core row 2 of i = 1, its second micro-row (4 high), row 1 of it.
  CHECK(plan.a_element(64 * 6 + 5, 32 + 9) ==
        plan.a_tile(2, 1, 1) + 2 * (1 * 4 * 32 + 1 * 32 + 1 * 8 + 1));
  // Column 96·5 + 6 is column 1 of j = 1, its second micro-column (4 wide), column 2 of it.
  CHECK(plan.b_element(32 + 9, 96 * 5 + 6) ==
        plan.b_tile(1, 1, 1) + 2 * (1 * 8 * 96 + 1 * 32 + 1 * 4 + 2));
  CHECK(plan.c_element(64 * 6 + 5, 96 * 5 + 6) ==
        plan.c_tile(1, 2, 1, 1) + 4 * (1 * 4 * 96 + 1 * 16 + 1 * 4 + 2));
}

TEST_CASE("chunks cover the product and no dispatch looks hung") {
  std::mt19937 random(5);
  for (int trial = 0; trial < 200; ++trial) {
    const bool npu1 = trial % 2 == 0;
    const GemmPlan plan =
        PlanGemm(npu1 ? Arch::kNpu1 : Arch::kNpu2, random() % 4000 + 1, random() % 4000 + 1,
                 random() % 4000 + 1, npu1 ? Numerics::kBF16 : Numerics::kBFP16);
    const bool of_m = plan.chunks_along_rows != plan.transposed;
    int64_t next = 0;
    for (const Chunk& chunk : plan.chunks) {
      CHECK(chunk.start == next);
      CHECK(chunk.size > 0);
      next += chunk.size;
    }
    CHECK(next == (of_m ? plan.m : plan.n));
    CHECK(plan.chunks.size() <= 4);
  }
  const GemmPlan huge = PlanGemm(Arch::kNpu1, 16384, 65536, 16384, Numerics::kBF16);
  CHECK(huge.predicted.total > 5);
  CHECK(huge.chunks.size() > 4);
}

std::string Refusal(Arch arch, int64_t m, int64_t k, int64_t n, const Tile* tile = nullptr) {
  try {
    PlanGemm(arch, m, k, n, Numerics::kBF16, tile);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

TEST_CASE("limits are refused by name and value") {
  CHECK(Refusal(Arch::kNpu1, 0, 5, 5) == "M, K and N must be at least 1, got 0, 5, 5");
  const Tile l1{64, 64, 64, 2};
  CHECK(Refusal(Arch::kNpu1, 256, 256, 256, &l1) ==
        "tile 64x64x64: L1 needs 68884 bytes, the limit is 65536");
  const Tile odd{60, 64, 48, 2};
  CHECK(Refusal(Arch::kNpu1, 256, 256, 256, &odd).find("multiples of 16") != std::string::npos);
  CHECK(Refusal(Arch::kNpu1, 1 << 17, 64, 1 << 17).find("packed C") == 0);
  CHECK(Refusal(Arch::kNpu2, 1, int64_t{1} << 62, 1).find("the limit is") != std::string::npos);
  CHECK(Refusal(Arch::kNpu1, 50304, 768, 256) == "accepted");
  // A prime number of tiles goes through L2 one by one only.
  const Tile tile{64, 64, 48, 2};
  CHECK_THROWS_WITH_AS(
      PlanGemm(Arch::kNpu1, 256, 64 * 1031, 1, Numerics::kBF16, &tile, DType::kF32, true),
      "A through L2: no size of chunk brings 1031 tiles in 4 pushes, the limit of a queue",
      std::invalid_argument);
}

// L1 bytes that the tools allocated for each design (the accepted designs' table).
TEST_CASE("memory budgets are those of the accepted designs") {
  const Tile c2{64, 64, 48, 2}, c1{64, 32, 96, 1};
  CHECK(PlanGemm(Arch::kNpu1, 256, 768, 2304, Numerics::kBF16, &c2).l1_bytes == 56596);
  CHECK(PlanGemm(Arch::kNpu1, 256, 768, 2304, Numerics::kBF16, &c1).l1_bytes == 48404);
  CHECK(PlanGemm(Arch::kNpu1, 256, 768, 2304, Numerics::kBF16, &c2).l2_bytes == 126976);
  CHECK(PlanGemm(Arch::kNpu1, 256, 768, 2304, Numerics::kBF16, &c1).l2_bytes == 217088);
}

}  // namespace
}  // namespace jax_xdna
