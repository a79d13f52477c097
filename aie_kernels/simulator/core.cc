#include "core.h"

#include <algorithm>

#include "lanes.h"

namespace jax_xdna {
namespace {

constexpr uint32_t kGoOffset = kCoreLockBase + 16 * kGoLock;

const packed_gemm::Kernel& KernelOf(const ArrayDesign& design) {
  if (design.arch == Arch::kNpu1) return packed_gemm::KernelAie2();
  return design.numerics == Numerics::kBFP16 ? packed_gemm::KernelAie2pBfp16()
                                             : packed_gemm::KernelAie2p();
}

}  // namespace

Core::Core(int column, int row, const ArrayDesign& design)
    : a(kFifoDepth, size_t{2} * design.tile.m * design.tile.k),
      b(kFifoDepth, size_t{2} * design.tile.k * design.tile.n),
      c(design.tile.c_buffers,
        size_t{design.c_dtype == DType::kF32 ? 4u : 2u} * design.tile.m * design.tile.n),
      column_(column),
      row_(row),
      tile_{static_cast<unsigned>(design.tile.m), static_cast<unsigned>(design.tile.k),
            static_cast<unsigned>(design.tile.n)},
      kernel_(KernelOf(design)),
      sum_(1, size_t{4} * design.tile.m * design.tile.n),
      clear_cycles_(static_cast<double>(sum_.bytes()) / kStoreBytesPerCycle),
      step_cycles_(static_cast<double>(design.tile.m) * design.tile.k * design.tile.n /
                   TimingOf(design.arch, design.numerics).macs_per_cycle) {}

std::string Core::Name() const {
  return "core column " + std::to_string(column_) + " row " + std::to_string(row_);
}

void Core::Write(uint32_t offset, uint32_t value, double now) {
  if (running_) throw SimulationError(Name() + ": written to while it runs");
  const uint32_t word = (offset - kRuntimeAddress) / 4;
  if (offset == kGoOffset) {
    if (value != 1) {
      throw SimulationError(Name() + ": go lock set to " + std::to_string(value) + ", not to 1");
    }
    // The core reads its words as soon as it has the lock.
    if (!words_[0] || !words_[1]) {
      throw SimulationError(Name() + ": started before its runtime words are written");
    }
    tiles_ = *words_[0];
    steps_ = *words_[1];
    words_ = {};
    tile_at_ = 0;
    running_ = tiles_ > 0;
    clock_ = std::max(clock_, now);
  } else if (offset >= kRuntimeAddress && word < words_.size() && offset % 4 == 0) {
    words_[word] = static_cast<int32_t>(value);
  } else {
    throw SimulationError(Name() + ": a write to offset " + std::to_string(offset) +
                          ", which is neither a runtime word nor the go lock");
  }
}

void Core::Spend(double from, double cycles) {
  clock_ = std::max(clock_, from) + cycles;
  busy_ += cycles;
}

float* Core::Sum() { return reinterpret_cast<float*>((narrow() ? sum_ : c).Back().data.get()); }

bool Core::WaitsForC() const {
  return c.full() && (narrow() ? cleared_ && step_at_ >= steps_ : !cleared_);
}

bool Core::Advance() {
  if (!running_ || WaitsForC()) return false;
  if (!cleared_) {
    kernel_.zero(tile_, Sum());
    Spend(narrow() ? 0 : c.Back().time, clear_cycles_);
    cleared_ = true;
    step_at_ = 0;
    return true;
  }
  if (step_at_ < steps_) {
    if (a.empty() || b.empty()) return false;
    kernel_.step(tile_, reinterpret_cast<const uint16_t*>(a.Front().data.get()),
                 reinterpret_cast<const uint16_t*>(b.Front().data.get()), Sum());
    Spend(std::max(a.Front().time, b.Front().time), step_cycles_);
    a.Pop(clock_);
    b.Pop(clock_);
    ++step_at_;
    ++steps_done_;
    return true;
  }
  if (narrow()) {
    kernel_.epilogue(tile_, Sum(), reinterpret_cast<uint16_t*>(c.Back().data.get()));
    Spend(c.Back().time, clear_cycles_);
  }
  c.Push(clock_);
  cleared_ = false;
  ++tiles_done_;
  running_ = ++tile_at_ < tiles_;
  return true;
}

std::string Core::State() const {
  std::string state = Name() + ": ";
  if (!running_) return state + "waits for its go lock";
  state += "tile " + std::to_string(tile_at_ + 1) + " of " + std::to_string(tiles_);
  if (WaitsForC()) return state + ", waits for a free buffer of C";
  state += ", step " + std::to_string(step_at_ + 1) + " of " + std::to_string(steps_);
  if (a.empty()) state += ", waits for a tile of A";
  if (b.empty()) state += ", waits for a tile of B";
  return state;
}

void Core::EndDispatch() {
  busy_ = 0;
  tiles_done_ = 0;
  steps_done_ = 0;
}

}  // namespace jax_xdna
