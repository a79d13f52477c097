// One field of a stream or of a plan at a time is corrupted: the simulator, or C, must show it.
#include <doctest/doctest.h>

#include <functional>
#include <string>
#include <vector>

#include "simulator_support.h"

namespace jax_xdna {
namespace {

// A plan of each kind with two or three passes of each loop.
struct Kind {
  Arch arch;
  Feed feed;
  int64_t m, k, n;
  int stride;  // of the bits that are corrupted
};
constexpr Kind kKinds[] = {{Arch::kNpu1, Feed::kFifo, 128, 64, 64, 5},
                           {Arch::kNpu2, Feed::kHeld, 384, 32, 384, 13},
                           {Arch::kNpu2, Feed::kRing, 128, 64, 128, 13}};

Dispatch Small(const Kind& kind) {
  Tile tile;
  tile.m = 16;
  tile.k = 32;
  tile.n = 16;
  tile.c_buffers = 2;
  Dispatch dispatch(kind.arch, Numerics::kBF16, tile, kind.m, kind.k, kind.n, 1, DType::kF32,
                    kind.feed != Feed::kFifo);
  REQUIRE(dispatch.plan.feed == kind.feed);
  return dispatch;
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
  for (const Kind& kind : kKinds) {
    Dispatch dispatch = Small(kind);
    std::vector<uint32_t> stream = dispatch.Stream();
    REQUIRE(!Noticed(dispatch, stream));
    // Every field is there once for each column: some of its bits here, others there.
    for (size_t word = 0; word < stream.size(); ++word) {
      const int first = static_cast<int>(word) % kind.stride;
      for (int bit = first; bit < 32; bit += kind.stride) {
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
  for (const Kind& kind : kKinds) {
    Dispatch dispatch = Small(kind);
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

// The one benign change: the run takes a descriptor that nothing else in its column uses.
bool SwapsDescriptor(const GemmPlan& plan, const Step& changed, size_t at) {
  const Step& step = plan.steps[at];
  if (step.kind != Step::kPush || step.bd == changed.bd) return false;
  return std::none_of(plan.steps.begin(), plan.steps.end(), [&](const Step& other) {
    return other.kind == Step::kPush && other.column == step.column && other.bd == changed.bd;
  });
}

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
  for (const Kind& kind : kKinds) {
    Dispatch dispatch = Small(kind);
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
        if (SwapsDescriptor(plan, dispatch.plan.steps[i], i)) continue;
        dispatch.plan = plan;
        CAPTURE(i);
        CAPTURE(std::string(change.name));
        CAPTURE(int{plan.steps[i].kind});
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
