#include "sequence.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace jax_xdna {
namespace {

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

// The lane of A through the memory tile of a resident design: channels, descriptors and locks that
// the fifos of the design leave free. Its buffer starts at byte 0.
constexpr int kFillChannel = 5, kSendChannel = 2;                 // S2MM, MM2S
constexpr int kFill = 40, kFirst = 12, kMiddle = 13, kLast = 14;  // descriptors
constexpr int kEmpty = 0, kFull = 1, kPassed = 2;                 // locks

Step MemoryPush(int column, Direction direction, int bd, int64_t repeats) {
  Step push;
  push.kind = Step::kMemoryPush;
  push.column = column;
  push.direction = direction;
  push.channel = direction == Direction::kS2mm ? kFillChannel : kSendChannel;
  push.bd = bd;
  push.repeats = static_cast<int>(repeats);
  return push;
}

// Locks and descriptors of a lane. Held: the first pass follows the fill chunk by chunk, the last
// one frees them. Ring: one pass that does both.
void ProgramLane(const GemmPlan& plan, int column, std::vector<Step>& steps) {
  Step step;
  step.column = column;
  const int64_t chunk = plan.chunk_tiles * plan.tile.m * plan.tile.k / 2;  // words
  const auto descriptor = [&](int bd, int acquire, int release) {
    step.kind = Step::kMemoryBd;
    step.bd = bd;
    step.memory.length = static_cast<uint32_t>(chunk);
    step.memory.steps = static_cast<uint32_t>(plan.chunks_held);
    step.memory.stride = static_cast<uint32_t>(chunk);
    step.memory.acquire = acquire;
    step.memory.release = release;
    steps.push_back(step);
  };
  descriptor(kFill, kEmpty, kFull);
  if (plan.feed == Feed::kRing) {
    descriptor(kFirst, kFull, kEmpty);
    return;
  }
  descriptor(kFirst, kFull, kPassed);
  step.bd = kMiddle;
  step.memory = MemoryBd();
  step.memory.length = static_cast<uint32_t>(chunk * plan.chunks_held);
  steps.push_back(step);
  descriptor(kLast, kPassed, kEmpty);
}

// Before the lane's transfer: fills and the sends that follow them.
void StartLane(const GemmPlan& plan, int column, std::vector<Step>& steps) {
  int64_t tasks = plan.chunks_held;
  if (plan.feed == Feed::kRing) {
    tasks = plan.row_tiles * plan.col_tiles * plan.depth_tiles / plan.chunk_tiles;
  }
  const int64_t a_push = kMaxRepeats / plan.chunks_held * plan.chunks_held;
  for (const Direction direction : {Direction::kS2mm, Direction::kMm2s}) {
    for (int64_t done = 0; done < tasks; done += a_push) {
      steps.push_back(MemoryPush(column, direction, direction == Direction::kS2mm ? kFill : kFirst,
                                 std::min(a_push, tasks - done)));
    }
  }
}

// After all transfers: the other passes of a lane that is held.
void FinishLane(const GemmPlan& plan, int column, std::vector<Step>& steps) {
  for (int64_t left = plan.col_tiles - 2; left > 0; left -= kMaxRepeats) {
    steps.push_back(
        MemoryPush(column, Direction::kMm2s, kMiddle, std::min<int64_t>(left, kMaxRepeats)));
  }
  steps.push_back(MemoryPush(column, Direction::kMm2s, kLast, plan.chunks_held));
}

}  // namespace

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

  const bool resident = plan.feed != Feed::kFifo;
  if (resident) {
    const std::pair<int, int64_t> values[] = {{kEmpty, plan.chunks_held}, {kFull, 0}, {kPassed, 0}};
    for (int lane = 0; lane < kCoreRows; ++lane) {
      for (const auto& [lock, value] : values) {
        Step step;
        step.kind = Step::kMemoryLock;
        step.column = plan.a_column(lane);
        step.lock = lock;
        step.repeats = static_cast<int>(value);
        plan.steps.push_back(step);
      }
    }
    for (int lane = 0; lane < kCoreRows; ++lane) ProgramLane(plan, plan.a_column(lane), plan.steps);
  }

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
      if (!resident && plan.a_column(lane) == column) b.channel = 1;
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
    a.channel = resident ? 1 : 0;
    const int64_t lane_bytes = plan.a_bytes / kCoreRows;
    a.offset = lane * lane_bytes;
    a.bytes = plan.columns_outer ? lane_bytes : lane_bytes / rows;
    const int64_t passes = plan.feed == Feed::kHeld ? 1 : cols;
    add(a, plan.columns_outer ? 1 : rows, passes, plan.columns_outer ? rows : 1);
  }

  std::vector<Timed> later;
  for (const std::vector<Timed>& pushes : lanes) {
    const Step& first = pushes.front().step;
    if (resident && first.buffer == Buffer::kA) StartLane(plan, first.column, plan.steps);
    for (size_t p = 0; p < pushes.size(); ++p) {
      if (p < kQueueDepth) {
        plan.steps.push_back(pushes[p].step);
      } else {
        later.push_back(pushes[p]);
      }
    }
  }
  for (int lane = 0; lane < kCoreRows && plan.feed == Feed::kHeld; ++lane) {
    FinishLane(plan, plan.a_column(lane), plan.steps);
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

}  // namespace jax_xdna
