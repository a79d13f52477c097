// One field of a stream or of a plan at a time is corrupted: the simulator, or C, must show it.
#include <doctest/doctest.h>

#include <functional>
#include <string>
#include <vector>

#include "simulator_support.h"

namespace jax_xdna {
namespace {

Dispatch Small(Arch arch) {
  Tile tile;
  tile.m = 16;
  tile.k = 32;
  tile.n = 16;
  tile.c_buffers = 2;
  // I = 2, J = 1 (npu1) or 3 (npu2), KK = 2.
  return Dispatch(arch, Numerics::kBF16, tile, 128, 64, arch == Arch::kNpu1 ? 64 : 384, 1);
}

bool Noticed(Dispatch& dispatch, const std::vector<uint32_t>& stream) {
  try {
    DecodeTxn(stream.data(), stream.size());  // most of what is wrong is seen here
    Simulator simulator(dispatch.design());
    dispatch.RunOn(simulator, stream);
  } catch (const SimulationError&) {
    return true;
  } catch (const std::invalid_argument&) {
    return true;
  }
  return dispatch.Wrong() != 0;
}

TEST_CASE("a corrupted bit of a stream is noticed, whichever it is") {
  for (const Arch arch : {Arch::kNpu1, Arch::kNpu2}) {
    Dispatch dispatch = Small(arch);
    std::vector<uint32_t> stream = dispatch.Stream();
    REQUIRE(!Noticed(dispatch, stream));
    // Every field is there once for each column: a fifth of its bits here, another fifth there.
    for (size_t word = 0; word < stream.size(); ++word) {
      for (int bit = static_cast<int>(word % 5); bit < 32; bit += 5) {
        stream[word] ^= 1u << bit;
        CAPTURE(word);
        CAPTURE(bit);
        CHECK(Noticed(dispatch, stream));
        stream[word] ^= 1u << bit;
      }
    }
  }
}

TEST_CASE("every missing operation of a stream is noticed") {
  for (const Arch arch : {Arch::kNpu1, Arch::kNpu2}) {
    Dispatch dispatch = Small(arch);
    const Txn txn = dispatch.Operations();
    for (size_t i = 0; i < txn.ops.size(); ++i) {
      Txn less = txn;
      less.ops.erase(less.ops.begin() + i);
      CAPTURE(i);
      CHECK(Noticed(dispatch, EncodeTxn(less)));
    }
  }
}

// Changes of one field of a step that make it another step, each with a name.
struct StepChange {
  const char* name;
  void (*apply)(Step&);
};

TEST_CASE("every corrupted field of a plan is noticed") {
  const StepChange changes[] = {
      {"kind",
       [](Step& step) { step.kind = step.kind == Step::kPush ? Step::kWait : Step::kPush; }},
      {"column", [](Step& step) { step.column ^= 1; }},
      {"no such column", [](Step& step) { step.column += 8; }},
      {"direction",
       [](Step& step) {
         step.direction = step.direction == Direction::kMm2s ? Direction::kS2mm : Direction::kMm2s;
       }},
      {"channel", [](Step& step) { step.channel ^= 1; }},
      {"buffer", [](Step& step) { step.buffer = Buffer((static_cast<int>(step.buffer) + 1) % 3); }},
      {"bd", [](Step& step) { step.bd ^= 1; }},
      {"write_bd", [](Step& step) { step.write_bd = !step.write_bd; }},
      {"offset", [](Step& step) { step.offset += 4; }},
      {"odd offset", [](Step& step) { step.offset += 2; }},
      {"negative offset", [](Step& step) { step.offset -= 4; }},
      {"bytes", [](Step& step) { step.bytes -= 4; }},
      {"more bytes", [](Step& step) { step.bytes += 4; }},
      {"repeats", [](Step& step) { step.repeats += 1; }},
      {"fewer repeats", [](Step& step) { step.repeats -= 1; }},
      {"token", [](Step& step) { step.token = !step.token; }},
  };
  for (const Arch arch : {Arch::kNpu1, Arch::kNpu2}) {
    Dispatch dispatch = Small(arch);
    const GemmPlan plan = dispatch.plan;
    for (size_t i = 0; i < plan.steps.size(); ++i) {
      for (const StepChange& change : changes) {
        dispatch.plan = plan;
        change.apply(dispatch.plan.steps[i]);
        std::vector<uint32_t> stream;
        try {
          stream = dispatch.Stream();
        } catch (const std::invalid_argument&) {
          continue;
        }
        if (stream == StreamOf(plan)) continue;  // the step does not use the field
        dispatch.plan = plan;
        CAPTURE(i);
        CAPTURE(change.name);
        CHECK(Noticed(dispatch, stream));
      }
    }
    for (const auto field : {&GemmPlan::row_tiles, &GemmPlan::col_tiles, &GemmPlan::depth_tiles}) {
      for (const int change : {-1, 1}) {
        dispatch.plan = plan;
        dispatch.plan.*field += change;
        const std::vector<uint32_t> stream = dispatch.Stream();
        dispatch.plan = plan;
        CHECK(Noticed(dispatch, stream));
      }
    }
  }
}

}  // namespace
}  // namespace jax_xdna
