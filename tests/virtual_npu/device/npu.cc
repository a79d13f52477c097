#include "npu.h"

#include <drm/amdxdna_accel.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "faults.h"
#include "txn.h"

namespace virtual_npu {
namespace {

using jax_xdna::Arch;

constexpr int kCoreRows = 4;
constexpr uint64_t kInFlight = 4;              // commands of a context
constexpr uint32_t kStartCu = 0, kChain = 19;  // opcodes of packets
constexpr uint32_t kRunSequence = 3;           // first argument of the kernel
constexpr int kBuffers = 3;

// Bytes of an argument that a stream moves to the array, or from it.
struct Transfer {
  uint32_t argument;
  uint64_t offset, bytes;
  bool to_host;
};

std::vector<Transfer> Transfers(const jax_xdna::Txn& txn) {
  using namespace jax_xdna;
  std::vector<Transfer> found;
  std::map<uint32_t, Transfer> descriptors;  // by register address
  for (const TxnOp& op : txn.ops) {
    if (RegisterRow(op.address) != 0) continue;
    if (op.kind == TxnKind::kBlockWrite) {
      descriptors[op.address].bytes = uint64_t{4} * op.block.at(0);
    } else if (op.kind == TxnKind::kPatch) {
      Transfer& transfer = descriptors[op.address - 4];
      transfer.argument = op.argument;
      transfer.offset = op.argument_offset;
    } else if (op.kind == TxnKind::kWrite) {
      const uint32_t offset = RegisterOffset(op.address);
      const uint32_t bd = kShimBdBase + kBdBytes * QueueEntry::FromWord(op.value).bd;
      Transfer transfer = descriptors[RegisterAddress(RegisterColumn(op.address), 0, bd)];
      transfer.to_host = offset < ShimControl(Direction::kMm2s, 0);
      found.push_back(transfer);
    }
  }
  return found;
}

uint64_t Address(const uint32_t* words) { return words[0] | uint64_t{words[1]} << 32; }

// The last line of the placeholder that stands for the array's configuration:
// arch, datapath, result, feed of A, tile m, k, n and buffers of C.
jax_xdna::ArrayDesign DesignOf(std::string text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == '\0')) text.pop_back();
  std::istringstream line(text.substr(text.rfind('\n') + 1));
  std::string arch, numerics, result, feed;
  jax_xdna::ArrayDesign design;
  jax_xdna::Tile& tile = design.tile;
  if (!(line >> arch >> numerics >> result >> feed >> tile.m >> tile.k >> tile.n >>
        tile.c_buffers)) {
    throw std::invalid_argument("the PDI is no placeholder that names a design");
  }
  design.arch = arch == "npu1" ? Arch::kNpu1 : Arch::kNpu2;
  design.numerics = numerics == "bf16" ? jax_xdna::Numerics::kBF16 : jax_xdna::Numerics::kBFP16;
  design.c_dtype = result == "f32" ? jax_xdna::DType::kF32 : jax_xdna::DType::kBF16;
  design.resident = feed == "resident";
  return design;
}

}  // namespace

const Model* ModelOf(int device) {
  static const Model npu1 = {"NPU Phoenix", Arch::kNpu1, 5, 6, 64 << 20};
  static const Model npu2 = {"NPU Strix", Arch::kNpu2, 8, 16, 512 << 20};
  return device == 0x1502 ? &npu1 : device == 0x17F0 ? &npu2 : nullptr;
}

Npu::Npu(int file, const Model& model)
    : memory_(file, model.heap_limit), model_(model), worker_([this] { Work(); }) {}

Npu::~Npu() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  worker_.join();
}

int Npu::CreateContext(int tiles, uint32_t* handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const int columns = tiles / kCoreRows;
  if (columns < 1 || columns > model_.columns) return -EINVAL;
  if (static_cast<int>(contexts_.size()) >= model_.contexts) return -ENOSPC;
  *handle = next_++;
  contexts_[*handle];
  return 0;
}

int Npu::Configure(uint32_t context, uint32_t cu_object) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = contexts_.find(context);
  BufferObject bo;
  if (found == contexts_.end() || found->second.array || !memory_.Find(cu_object, &bo) ||
      bo.type != AMDXDNA_BO_DEV) {
    return -EINVAL;
  }
  try {
    const char* text = reinterpret_cast<const char*>(memory_.Of(bo).device);
    found->second.design = DesignOf({text, bo.size});
    found->second.array = std::make_unique<jax_xdna::Simulator>(found->second.design);
  } catch (const std::invalid_argument& error) {
    std::fprintf(stderr, "virtual NPU: %s\n", error.what());
    return -EINVAL;
  }
  return 0;
}

int Npu::DestroyContext(uint32_t context) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = contexts_.find(context);
  if (found == contexts_.end()) return -EINVAL;
  changed_.wait(lock, [&] { return found->second.completed == found->second.submitted; });
  contexts_.erase(found);
  return 0;
}

int Npu::Execute(uint32_t context, uint32_t command, uint64_t* sequence) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto found = contexts_.find(context);
  BufferObject bo;
  if (found == contexts_.end() || !found->second.array || !memory_.Find(command, &bo) ||
      bo.type != AMDXDNA_BO_CMD) {
    return -EINVAL;
  }
  Context& target = found->second;
  changed_.wait(lock, [&] { return target.submitted - target.completed < kInFlight; });
  *sequence = target.submitted++;
  queue_.push_back({context, command});
  changed_.notify_all();
  return 0;
}

int Npu::Wait(uint32_t context, uint64_t sequence, int64_t deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto done = [&] {
    const auto found = contexts_.find(context);
    return found == contexts_.end() || found->second.completed > sequence;
  };
  if (deadline == INT64_MAX) {
    changed_.wait(lock, done);
    return 0;
  }
  const std::chrono::steady_clock::time_point end{std::chrono::nanoseconds(deadline)};
  return changed_.wait_until(lock, end, done) ? 0 : -ETIME;
}

void Npu::Work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
    if (closed_) return;
    const Command command = queue_.front();
    queue_.pop_front();
    Context& context = contexts_.at(command.context);
    lock.unlock();
    const State state = Run(context, command.object);
    lock.lock();
    End(context, command.object, state);
    if (state != State::kTimeout) continue;
    // The driver's watchdog begins the context anew: what was queued is lost.
    std::deque<Command> others;
    for (const Command& queued : queue_) {
      if (queued.context == command.context) {
        End(context, queued.object, State::kAbort);
      } else {
        others.push_back(queued);
      }
    }
    queue_ = std::move(others);
  }
}

void Npu::End(Context& context, uint32_t object, State state) {
  BufferObject bo;
  if (memory_.Find(object, &bo)) {
    auto* words = reinterpret_cast<volatile uint32_t*>(memory_.Of(bo).host);
    const uint32_t count = words[0] >> 12 & 0x7FF;
    const bool chain = (words[0] >> 23 & 31) == kChain;
    if (state != State::kCompleted && !chain) {
      // The driver's report takes the place of what was asked for.
      for (uint32_t i = 1; i <= count; ++i) words[i] = ~uint32_t{0};
    }
    std::atomic_thread_fence(std::memory_order_release);
    words[0] = (words[0] & ~uint32_t{15}) | static_cast<uint32_t>(state);
  }
  if (state == State::kError || state == State::kTimeout) {
    context.array = std::make_unique<jax_xdna::Simulator>(context.design);
  }
  ++context.completed;
  changed_.notify_all();
}

Npu::State Npu::Run(Context& context, uint32_t object) {
  BufferObject bo;
  if (!memory_.Find(object, &bo)) {
    std::fprintf(stderr, "virtual NPU: a command was freed before it ran\n");
    return State::kError;
  }
  auto* packet = reinterpret_cast<uint32_t*>(memory_.Of(bo).host);
  const uint32_t count = packet[0] >> 12 & 0x7FF;
  if (4 * (uint64_t{count} + 1) > bo.size) return State::kError;
  if ((packet[0] >> 23 & 31) != kChain) return RunPacket(context, packet, count + 1);
  for (uint32_t i = 0; i < packet[1]; ++i) {
    BufferObject part;
    if (!memory_.Find(packet[7 + 2 * i], &part)) return State::kError;
    const auto* words = reinterpret_cast<const uint32_t*>(memory_.Of(part).host);
    const State state = RunPacket(context, words, (words[0] >> 12 & 0x7FF) + 1);
    if (state == State::kCompleted) continue;
    packet[3] = i;
    return state;
  }
  return State::kCompleted;
}

Npu::State Npu::RunPacket(Context& context, const uint32_t* packet, uint64_t words) {
  const int latency = Setting("VIRTUAL_NPU_LATENCY_MS", 0);
  const bool hangs = Fails("hang");
  std::unique_lock<std::mutex> lock(mutex_);
  const auto pause =
      std::chrono::milliseconds(hangs ? Setting("VIRTUAL_NPU_WATCHDOG_MS", 2000) : latency);
  if (pause.count() > 0) changed_.wait_for(lock, pause, [this] { return closed_; });
  lock.unlock();
  if (hangs) return State::kTimeout;
  if (Fails("abort")) return State::kAbort;
  if (Fails("error")) return State::kError;
  try {
    Start(context, packet, words);
    return State::kCompleted;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "virtual NPU: %s\n", error.what());
    return State::kError;
  }
}

// Runs one packet; throws when the device would not have given a right result.
void Npu::Start(Context& context, const uint32_t* packet, uint64_t words) {
  const auto require = [](bool condition, const std::string& otherwise) {
    if (!condition) throw std::invalid_argument(otherwise);
  };
  constexpr uint64_t kShortest = 7 + 2 * kBuffers;
  require((packet[0] >> 23 & 31) == kStartCu && packet[1] == 1 && words >= kShortest,
          "a packet that does not start the one compute unit");
  require(Address(packet + 2) == kRunSequence,
          "opcode " + std::to_string(packet[2]) + " as the kernel's first argument, not 3");
  const auto place_of = [&](const uint32_t* at, const std::string& what) {
    const Place place = memory_.At(Address(at));
    require(place.bytes != 0, what + " lies in no buffer object that is alive");
    return place;
  };

  const Place code = place_of(packet + 4, "the instruction stream");
  const uint64_t code_bytes = uint64_t{4} * packet[6];
  require(code_bytes <= code.bytes - code.offset, "an instruction stream beyond its buffer");
  code.PoisonDirty(code.offset, code_bytes);
  const auto* stream = reinterpret_cast<const uint32_t*>(code.device + code.offset);
  const jax_xdna::Txn txn = jax_xdna::DecodeTxn(stream, packet[6]);

  std::vector<Place> places;
  std::vector<jax_xdna::Argument> arguments;
  for (int i = 0; i < kBuffers; ++i) {
    const Place place = place_of(packet + 7 + 2 * i, "buffer " + std::to_string(i));
    places.push_back(place);
    arguments.push_back({place.device + place.offset, place.bytes - place.offset});
  }
  const std::vector<Transfer> transfers = Transfers(txn);
  for (const Transfer& t : transfers) {
    require(t.argument < places.size(), "a transfer of argument " + std::to_string(t.argument));
    const Place& place = places[t.argument];
    if (!t.to_host) place.PoisonDirty(place.offset + t.offset, t.bytes);
  }
  context.array->Run(stream, packet[6], arguments);
  bool touched = false;
  for (const Transfer& t : transfers) {
    const Place& place = places[t.argument];
    if (t.to_host) {
      place.PoisonStale(place.offset + t.offset, t.bytes);
    } else {
      touched |= place.dirty_lines(place.offset + t.offset, t.bytes) != 0;
    }
  }
  bool flips = Fails("flip");
  for (const Transfer& t : transfers) {
    if (!t.to_host) continue;
    uint8_t* data = places[t.argument].device + places[t.argument].offset + t.offset;
    if (touched) std::memset(data, kPoison, t.bytes);
    if (flips) data[t.bytes / 2 + 3] ^= 0x40;  // in the exponent of an element
    flips = false;
  }
  if (touched) std::fprintf(stderr, "virtual NPU: an input has lines that were not synced\n");
}

}  // namespace virtual_npu
