// Encoded streams on the simulated array: the emulated device's bits, and errors where the hardware
// would have none.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "simulator_support.h"

namespace jax_xdna {
namespace {

Tile MakeTile(int m, int k, int n, int c_buffers) {
  Tile tile;
  tile.m = m;
  tile.k = k;
  tile.n = n;
  tile.c_buffers = c_buffers;
  return tile;
}

TEST_CASE("streams of random plans give the bits of the emulated device") {
  const Tile tiles[] = {MakeTile(16, 32, 16, 1), MakeTile(16, 32, 16, 2), MakeTile(32, 64, 16, 1),
                        MakeTile(64, 64, 48, 2), MakeTile(64, 32, 96, 1)};
  std::mt19937 random(1);
  int feeds[3] = {};
  for (const Arch arch : {Arch::kNpu1, Arch::kNpu2}) {
    for (const Numerics numerics : {Numerics::kBF16, Numerics::kBFP16}) {
      if (arch == Arch::kNpu1 && numerics == Numerics::kBFP16) continue;
      for (const Tile& tile : tiles) {
        const DType c_dtype = tile.c_buffers == 2 ? DType::kBF16 : DType::kF32;
        // One artifact of each kind, shape after shape.
        Simulator fifo({arch, numerics, tile, c_dtype, false});
        Simulator resident({arch, numerics, tile, c_dtype, true});
        // Enough for every loop order, ragged edges and, with small tiles, more than four pushes.
        const int64_t most = tile.m == 16 ? 400 : 2 * 4 * tile.m;
        for (int round = 0; round < (tile.m == 16 ? 10 : 4); ++round) {
          const int64_t m = 1 + random() % most, n = 1 + random() % most, k = 1 + random() % 200;
          const bool held = round % 2 != 0;
          Dispatch dispatch(arch, numerics, tile, m, k, n, random(), c_dtype, held);
          CAPTURE(m);
          CAPTURE(k);
          CAPTURE(n);
          CAPTURE(tile.m);
          CAPTURE(held);
          dispatch.RunOn(held ? resident : fifo, dispatch.Stream());
          CHECK(dispatch.Wrong() == 0);
          ++feeds[static_cast<int>(dispatch.plan.feed)];
        }
      }
    }
  }
  for (const int plans : feeds) CHECK(plans > 5);  // fifo, held, ring
}

TEST_CASE("a lane that L2 cannot hold goes through it as a ring") {
  const Tile tile = MakeTile(16, 64, 16, 2);
  Dispatch dispatch(Arch::kNpu2, Numerics::kBF16, tile, 64, 64 * 200, 200, 5, DType::kF32, true);
  REQUIRE(dispatch.plan.feed == Feed::kRing);
  REQUIRE(dispatch.plan.a_bytes / 4 > kResidentBytes);
  Simulator simulator(dispatch.design());
  dispatch.RunOn(simulator, dispatch.Stream());
  CHECK(dispatch.Wrong() == 0);
}

TEST_CASE("a resident design reads A from DRAM once") {
  const Tile tile = MakeTile(16, 32, 16, 2);
  Dispatch dispatch(Arch::kNpu1, Numerics::kBF16, tile, 128, 96, 64 * 3, 2, DType::kF32, true);
  REQUIRE(dispatch.plan.feed == Feed::kHeld);
  REQUIRE(dispatch.plan.col_tiles * dispatch.plan.row_tiles == 6);
  Simulator simulator(dispatch.design());
  const Report report = dispatch.RunOn(simulator, dispatch.Stream());
  CHECK(dispatch.Wrong() == 0);
  CHECK(report.bytes_read ==
        dispatch.plan.a_bytes + dispatch.plan.b_bytes * dispatch.plan.row_tiles);
  Simulator fifo({Arch::kNpu1, Numerics::kBF16, tile});
  CHECK_THROWS_AS(dispatch.RunOn(fifo, dispatch.Stream()), SimulationError);
}

TEST_CASE("bytes and cycles are those of the plan") {
  const Tile tile = MakeTile(64, 64, 48, 2);
  Dispatch dispatch(Arch::kNpu1, Numerics::kBF16, tile, 256, 192, 384, 1);
  REQUIRE(!dispatch.plan.transposed);
  Simulator simulator(dispatch.design());
  const std::vector<uint32_t> stream = dispatch.Stream();
  const Report report = dispatch.RunOn(simulator, stream);
  // I = 1, J = 2, KK = 3: A twice, B and C once.
  CHECK(report.bytes_read == 2 * 256 * 192 * 2 + 192 * 384 * 2);
  CHECK(report.bytes_written == 256 * 384 * 4);
  REQUIRE(report.cores.size() == 16);
  for (const CoreUse& core : report.cores) {
    CHECK(core.tiles == 2);
    CHECK(core.steps == 6);
  }
  CHECK(report.dram_cycles ==
        doctest::Approx((report.bytes_read + report.bytes_written) / 17e9 * report.clock_hz));
  // With so small a K the lanes of C are the slowest: 2 blocks of four tiles at 4 bytes a cycle.
  // Before the first come three tiles of A, the last step and the way to the memory tile.
  const double drain = 2 * 4 * 64 * 48, first = 3 * 2048 + 1970 + 3072;
  CHECK(report.lanes.back().name == "C 3");
  CHECK(report.lanes.back().busy == drain);
  CHECK(report.cycles > drain + first);
  CHECK(report.cycles < drain + first + 5000);
  CHECK(dispatch.RunOn(simulator, stream).cycles == doctest::Approx(report.cycles));
  CHECK(report.Table().find("column 3 row 5") != std::string::npos);
}

// A stream whose operations a test has changed.
std::string ErrorOf(Dispatch& dispatch, const std::function<void(std::vector<TxnOp>&)>& change) {
  Txn txn = dispatch.Operations();
  change(txn.ops);
  Simulator simulator(dispatch.design());
  try {
    dispatch.RunOn(simulator, EncodeTxn(txn));
  } catch (const SimulationError& error) {
    return error.what();
  }
  return "";
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// The first operation of a kind that writes to this register offset.
auto Find(std::vector<TxnOp>& ops, TxnKind kind, uint32_t offset) {
  return std::find_if(ops.begin(), ops.end(), [&](const TxnOp& op) {
    return op.kind == kind && RegisterOffset(op.address) == offset;
  });
}

constexpr uint32_t kGo = kCoreLockBase + 16 * kGoLock;
constexpr uint32_t kQueueA = ShimQueue(Direction::kMm2s, 0);
constexpr uint32_t kQueueB = ShimQueue(Direction::kMm2s, 1);
constexpr uint32_t kQueueC = ShimQueue(Direction::kS2mm, 0);

TEST_CASE("what the hardware would get wrong is an error") {
  Dispatch dispatch(Arch::kNpu1, Numerics::kBF16, MakeTile(16, 32, 16, 2), 128, 64, 64, 1);
  const auto error = [&](const std::function<void(std::vector<TxnOp>&)>& change) {
    return ErrorOf(dispatch, change);
  };
  REQUIRE(error([](auto&) {}).empty());

  SUBCASE("a fifth push") {
    CHECK(Contains(error([](auto& ops) {
                     const auto push = Find(ops, TxnKind::kWrite, kQueueB);
                     ops.insert(push, 4, TxnOp(*push));
                   }),
                   "shim column 0 MM2S 1: a push while 4 may be outstanding"));
  }
  SUBCASE("a descriptor written while in use") {
    CHECK(Contains(error([](auto& ops) {
                     const auto write = Find(ops, TxnKind::kBlockWrite, kShimBdBase);
                     const TxnOp again = *write;
                     ops.insert(Find(ops, TxnKind::kWrite, kRuntimeAddress), again);
                   }),
                   "BD 0 is written while a push of it may be running"));
  }
  SUBCASE("a run beyond its buffer") {
    CHECK(Contains(
        error([](auto& ops) { Find(ops, TxnKind::kBlockWrite, kShimBdBase)->block[0] *= 64; }),
        "bytes at byte 0 of argument 2, which has"));
  }
  SUBCASE("a core that nobody starts") {
    const std::string what = error([](auto& ops) { ops.erase(Find(ops, TxnKind::kWrite, kGo)); });
    CHECK(Contains(what, "deadlock: no token will come from shim column 0 S2MM 0"));
    CHECK(Contains(what, "core column 0 row 2: waits for its go lock"));
    CHECK(Contains(what, "A 0: shim column 0 MM2S 0: no task; memory tile holds 2 of 2"));
    CHECK(Contains(what, "waits for core 0 of the lane, which holds 2 of 2"));
  }
  SUBCASE("an operand that does not come") {
    const std::string what =
        error([](auto& ops) { ops.erase(Find(ops, TxnKind::kWrite, kQueueB)); });
    CHECK(Contains(what, "deadlock: no token will come"));
    CHECK(Contains(what, "B 0: shim column 0 MM2S 1: no task"));
    CHECK(Contains(what, "core column 0 row 2: tile 1 of 2, step 1 of 2, waits for a tile of B"));
  }
  SUBCASE("C read before it is there") {
    CHECK(Contains(error([](auto& ops) { ops.pop_back(); }),
                   "C 3: the stream ends without waiting for it"));
  }
  SUBCASE("an operand that comes too often") {
    const std::string what = error([](auto& ops) {
      const auto push = Find(ops, TxnKind::kWrite, kQueueA);
      QueueEntry entry = QueueEntry::FromWord(push->value);
      ++entry.repeats;
      push->value = entry.Word();
    });
    CHECK(Contains(what, "the stream ends and the array is not at rest"));
  }
  SUBCASE("a core started before it is told how much to do") {
    CHECK(Contains(error([](auto& ops) {
                     const TxnOp go = *Find(ops, TxnKind::kWrite, kGo);
                     ops.insert(Find(ops, TxnKind::kWrite, kRuntimeAddress), go);
                   }),
                   "core column 0 row 2: started before its runtime words are written"));
  }
  SUBCASE("a token nobody gets") {
    CHECK(Contains(error([](auto& ops) {
                     ops.erase(Find(ops, TxnKind::kMaskWrite, ShimControl(Direction::kS2mm, 0)));
                   }),
                   "shim column 0 S2MM 0: a token asked for, but not sent"));
  }
  SUBCASE("a push of a descriptor without an address") {
    CHECK(Contains(error([](auto& ops) { ops.erase(Find(ops, TxnKind::kPatch, kShimBdBase + 4)); }),
                   "a push of BD 0, which has no address"));
  }
  SUBCASE("a stream for the other array") {
    Txn txn = dispatch.Operations();
    txn.arch = Arch::kNpu2;
    Simulator simulator(dispatch.design());
    CHECK_THROWS_AS(dispatch.RunOn(simulator, EncodeTxn(txn)), SimulationError);
  }
}

TEST_CASE("the dispatch after an old one does not find its addresses") {
  Dispatch dispatch(Arch::kNpu1, Numerics::kBF16, MakeTile(16, 32, 16, 2), 64, 32, 64, 1);
  Simulator simulator(dispatch.design());
  dispatch.RunOn(simulator, dispatch.Stream());
  Txn txn = dispatch.Operations();
  txn.ops.erase(Find(txn.ops, TxnKind::kBlockWrite, kShimBdBase));
  txn.ops.erase(Find(txn.ops, TxnKind::kPatch, kShimBdBase + 4));
  CHECK_THROWS_AS(dispatch.RunOn(simulator, EncodeTxn(txn)), SimulationError);
}

TEST_CASE("a design that the kernel cannot do is refused") {
  CHECK_THROWS_AS(Simulator({Arch::kNpu1, Numerics::kBF16, MakeTile(24, 32, 16, 2)}),
                  std::invalid_argument);
  CHECK_THROWS_AS(Simulator({Arch::kNpu1, Numerics::kBFP16, MakeTile(16, 32, 16, 2)}),
                  std::invalid_argument);
}

}  // namespace
}  // namespace jax_xdna
