// Instruction streams against those that mlir-aie's own tools made of the same transfers
// (tests/data/streams), and the errors of the decoder.
#include "stream.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <stdexcept>

namespace jax_xdna {
namespace {

std::vector<uint32_t> Golden(const std::string& name) {
  std::ifstream file(std::string(STREAMS) + "/" + name + ".bin", std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  REQUIRE(!bytes.empty());
  std::vector<uint32_t> words(bytes.size() / 4);
  std::memcpy(words.data(), bytes.data(), bytes.size());
  return words;
}

// Transfers of one column: descriptors in order, one output, inputs on channels 0 and 1.
class Column {
 public:
  Column(Arch arch, int column) : column_(column) { txn_.arch = arch; }

  void Out(int argument, uint32_t words, uint64_t offset = 0) {
    Add(Direction::kS2mm, 0, argument, words, offset, 1, true);
  }
  void In(uint32_t words, uint64_t offset = 0, int channel = 0, int repeats = 1,
          bool token = false) {
    Add(Direction::kMm2s, channel, 0, words, offset, repeats, token);
  }
  void Add(Direction direction, int channel, int argument, uint32_t words, uint64_t offset,
           int repeats, bool token) {
    Push push;
    push.column = column_;
    push.direction = direction;
    push.channel = channel;
    push.task = {bd_++, repeats, token};
    push.argument = argument;
    push.run = run_;
    push.run.length = words;
    push.run.address = offset;
    AppendPush(txn_, push);
  }
  void WaitIn() {
    AppendWait(txn_, column_, Direction::kMm2s, 0);
    --bd_;  // the descriptor just waited for is free again
  }
  std::vector<uint32_t> End() {
    AppendWait(txn_, column_, Direction::kS2mm, 0);
    return EncodeTxn(txn_);
  }
  Txn& txn() { return txn_; }
  ShimBd run_;

 private:
  Txn txn_;
  int column_;
  int bd_ = 0;
};

TEST_CASE("golden streams: one run in, one out") {
  const struct {
    const char* name;
    Arch arch;
    int column;
  } cases[] = {{"npu1_col0_linear_in_out", Arch::kNpu1, 0},
               {"npu1_col3_linear_in_out", Arch::kNpu1, 3},
               {"npu2_col0_linear_in_out", Arch::kNpu2, 0}};
  for (const auto& c : cases) {
    Column column(c.arch, c.column);
    column.Out(1, 32768);
    column.In(32768);
    CHECK(column.End() == Golden(c.name));
  }
}

TEST_CASE("golden streams: a run repeated ten times by one push") {
  for (const Arch arch : {Arch::kNpu1, Arch::kNpu2}) {
    Column column(arch, 0);
    column.Out(1, 327680);
    column.In(32768, 0, 0, 10);
    CHECK(column.End() ==
          Golden(arch == Arch::kNpu1 ? "npu1_col0_repeat_9" : "npu2_col0_repeat_9"));
  }
}

TEST_CASE("golden streams: two input lanes with offsets") {
  const struct {
    const char* name;
    Arch arch;
    int column;
  } cases[] = {{"npu1_col0_offsets_two_lanes", Arch::kNpu1, 0},
               {"npu2_col0_offsets_two_lanes", Arch::kNpu2, 0},
               {"npu2_col7_offsets_two_lanes", Arch::kNpu2, 7}};
  for (const auto& c : cases) {
    Column column(c.arch, c.column);
    column.Out(1, 32768, 4 * 1024);
    column.In(32768, 2 * 65536);
    column.In(2048, 2 * 196608, 1);
    CHECK(column.End() == Golden(c.name));
  }
}

TEST_CASE("golden streams: lengths beyond 2^20 words") {
  Column column(Arch::kNpu1, 0);
  column.Out(1, 12877824);
  column.In(38633472 / 2);
  CHECK(column.End() == Golden("npu1_col0_wide_n"));
}

TEST_CASE("golden streams: four pushes, a wait, two more") {
  Column column(Arch::kNpu1, 0);
  column.Out(1, 393216 / 2);
  for (uint64_t i = 0; i < 4; ++i) column.In(32768, i * 131072, 0, 1, i == 3);
  column.WaitIn();
  for (uint64_t i = 4; i < 6; ++i) column.In(32768, i * 131072);
  CHECK(column.End() == Golden("npu1_col0_four_pushes_then_reuse"));
}

TEST_CASE("golden streams: runtime words, then a lock") {
  Column column(Arch::kNpu1, 0);
  const uint32_t words[] = {12, 197, 0xFFFFFFFF};
  for (uint32_t i = 0; i < 3; ++i) {
    AppendWrite(column.txn(), RegisterAddress(0, 2, 0x400 + 4 * i), words[i]);
  }
  AppendWrite(column.txn(), RegisterAddress(0, 2, kCoreLockBase + 16 * 5), 1);
  column.Out(1, 32768);
  column.In(32768);
  CHECK(column.End() == Golden("npu1_col0_rtp_and_lock"));
}

TEST_CASE("golden streams: blocks of 64x64 of a matrix 256 wide") {
  Column column(Arch::kNpu2, 0);
  column.Out(1, 8192);
  column.run_.size0 = 32;  // words: 64 bf16
  column.run_.size1 = 64;
  column.run_.stride1 = 128;
  column.run_.stride2 = 32;
  column.In(8192);
  CHECK(column.End() == Golden("npu2_col0_tiled_3d"));
}

TEST_CASE("golden streams: whole plans of 256x768x2304") {
  const struct {
    const char* name;
    Arch arch;
    Tile tile;
  } cases[] = {{"npu1_4col_64x64x48", Arch::kNpu1, {64, 64, 48, 2}},
               {"npu1_4col_64x32x96", Arch::kNpu1, {64, 32, 96, 1}},
               {"npu2_8col_64x64x48", Arch::kNpu2, {64, 64, 48, 2}}};
  for (const auto& c : cases) {
    const GemmPlan plan = PlanGemm(c.arch, 256, 768, 2304, Numerics::kBF16, &c.tile);
    CHECK(StreamOf(plan) == Golden(std::string(c.name) + "_256x768x2304"));
  }
}

TEST_CASE("golden streams: whole plans of the resident design") {
  const Tile tile{64, 64, 48, 2};
  for (const Arch arch : {Arch::kNpu1, Arch::kNpu2}) {
    const GemmPlan plan = PlanGemm(arch, 256, 768, 2304, Numerics::kBF16, &tile, DType::kF32, true);
    const std::string name = arch == Arch::kNpu1 ? "npu1_4col" : "npu2_8col";
    const std::vector<uint32_t> words = Golden(name + "_64x64x48_resident_256x768x2304");
    Txn golden = DecodeTxn(words.data(), words.size());
    // For npu1 the tools leave out the offset of the tile's own memory, without which a descriptor
    // reaches the western neighbour's.
    int addresses = 0;
    for (TxnOp& op : golden.ops) {
      if (op.kind != TxnKind::kMaskWrite || op.mask != kMemoryAddressMask) continue;
      CHECK(op.value == (arch == Arch::kNpu1 ? 0 : kOwnMemoryWords));
      op.value = kOwnMemoryWords;
      ++addresses;
    }
    CHECK(addresses == 16);
    CHECK(StreamOf(plan) == EncodeTxn(golden));
    if (arch == Arch::kNpu2) CHECK(StreamOf(plan) == words);
  }
}

std::string ErrorOf(const std::vector<uint32_t>& words) {
  try {
    DecodeTxn(words.data(), words.size());
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "accepted";
}

TEST_CASE("what is decoded is encoded to the same words") {
  for (const char* name : {"npu1_col0_rtp_and_lock", "npu1_col0_four_pushes_then_reuse",
                           "npu2_col0_tiled_3d", "npu2_8col_64x64x48_256x768x2304"}) {
    const std::vector<uint32_t> words = Golden(name);
    CHECK(EncodeTxn(DecodeTxn(words.data(), words.size())) == words);
  }
}

TEST_CASE("a torn stream and each damaged header word are refused, naming the place") {
  const std::vector<uint32_t> good = Golden("npu1_col0_linear_in_out");
  for (size_t length = 0; length < good.size(); ++length) {
    std::vector<uint32_t> torn(good.begin(), good.begin() + static_cast<long>(length));
    CHECK(ErrorOf(torn).find("word") != std::string::npos);
    if (length >= 4) {
      torn[3] = static_cast<uint32_t>(4 * length);  // torn between the header and the driver
      CHECK(ErrorOf(torn) != "accepted");
    }
  }
  for (size_t word = 0; word < 4; ++word) {
    std::vector<uint32_t> bad = good;
    ++bad[word];
    CHECK(ErrorOf(bad).find("word " + std::to_string(word) + ":") != std::string::npos);
  }
  std::vector<uint32_t> unknown = good;
  unknown[16] = 0x55;
  CHECK(ErrorOf(unknown) == "instruction stream, word 16: unknown operation 0x55");
  std::vector<uint32_t> reserved = good;
  reserved[36] = 1;
  CHECK(ErrorOf(reserved).find("word 36: 0x1 where") != std::string::npos);
}

TEST_CASE("garbage never gets through unchanged, nor out of bounds") {
  std::mt19937 random(1);
  const std::vector<uint32_t> streams[] = {Golden("npu1_col0_four_pushes_then_reuse"),
                                           Golden("npu2_8col_64x64x48_resident_256x768x2304")};
  for (int trial = 0; trial < 10000; ++trial) {
    std::vector<uint32_t> bad = streams[trial % 8 == 0];
    const size_t place = random() % bad.size();
    bad[place] = random() % 2 != 0 ? random() : random() % 256;
    try {
      const Txn txn = DecodeTxn(bad.data(), bad.size());
      REQUIRE(EncodeTxn(txn) == bad);  // a field that may hold anything
      for (const TxnOp& op : txn.ops) REQUIRE(!Describe(op).empty());
    } catch (const std::invalid_argument&) {
    }
  }
}

TEST_CASE("fields that do not fit their register are refused") {
  Txn txn;
  Push push;
  push.task = {16, 1, false};
  CHECK_THROWS_WITH_AS(AppendPush(txn, push), "task: descriptor 16, the limit is 15",
                       std::invalid_argument);
  push.task = {0, 257, false};
  CHECK_THROWS_WITH_AS(AppendPush(txn, push), "task: repeats less one 256, the limit is 255",
                       std::invalid_argument);
  push.task = {0, 1, false};
  push.run.size0 = 1024;
  CHECK_THROWS_AS(AppendPush(txn, push), std::invalid_argument);
  push.run.size0 = 32;
  push.run.stride1 = (1 << 20) + 1;
  CHECK_THROWS_AS(AppendPush(txn, push), std::invalid_argument);
}

TEST_CASE("lines that people read") {
  const std::vector<uint32_t> words = Golden("npu1_4col_64x64x48_256x768x2304");
  const Txn txn = DecodeTxn(words.data(), words.size());
  CHECK(Describe(txn.ops[0]) == "column 0 row 0  BD 0      147456 words contiguous");
  CHECK(Describe(txn.ops[1]) == "column 0 row 0  address   BD 0 = argument 2 + 0");
  CHECK(Describe(txn.ops[2]) == "column 0 row 0  tokens    of S2MM 0 to the controller");
  CHECK(Describe(txn.ops[3]) == "column 0 row 0  push      S2MM 0: BD 0 x 1, token");
  const std::vector<uint32_t> held = Golden("npu2_8col_64x64x48_resident_256x768x2304");
  const Txn resident = DecodeTxn(held.data(), held.size());
  CHECK(Describe(resident.ops[0]) == "column 0 row 1  lock      0 = 12");
  CHECK(Describe(resident.ops[12]) ==
        "column 0 row 1  BD 40     2048 words, 12 steps of 2048 words, takes lock 0, gives lock 1");
  CHECK(Describe(resident.ops[13]) ==
        "column 0 row 1  address   BD 40 = byte 0x80000 of the memory it sees");
  CHECK(Describe(resident.ops[16]) == "column 0 row 1  BD 13     24576 words");
  CHECK(std::count_if(resident.ops.begin(), resident.ops.end(), [](const TxnOp& op) {
          return Describe(op) == "column 0 row 1  push      MM2S 2: BD 13 x 4";
        }) == 1);
  CHECK(Describe(txn.ops.back()) == "column 3 row 0  wait      S2MM 0");
}

}  // namespace
}  // namespace jax_xdna
