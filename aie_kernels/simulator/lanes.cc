#include "lanes.h"

#include <algorithm>
#include <cstring>

#include "timing.h"

namespace jax_xdna {
namespace {

std::string Tiles(const Fifo& fifo) {
  return std::to_string(fifo.count()) + " of " + std::to_string(fifo.depth());
}

// A shim channel's part of a move. The shim's streams are what the utilisation table shows.
void MoveThroughShim(ShimChannel& channel, size_t bytes, double from) {
  const double start = std::max(channel.clock, from);
  const double cycles = static_cast<double>(bytes) / kStreamBytesPerCycle;
  channel.clock = start + cycles;
  channel.busy += cycles;
  channel.Done(bytes, channel.clock);
}

}  // namespace

double Stream::Move(size_t bytes, double from) {
  clock = std::max(clock, from) + static_cast<double>(bytes) / kStreamBytesPerCycle;
  return clock;
}

bool InputLane::Fill() {
  if (memory_.full()) return false;
  const ShimChannel::Piece piece = source_.Next(memory_.bytes() - filled_);
  if (piece.bytes == 0) return false;
  Fifo::Slot& slot = memory_.Back();
  std::memcpy(slot.data.get() + filled_, piece.data, piece.bytes);
  MoveThroughShim(source_, piece.bytes, std::max(piece.pushed, slot.time));
  filled_ += piece.bytes;
  if (filled_ == memory_.bytes()) {
    memory_.Push(source_.clock);
    filled_ = 0;
  }
  return true;
}

bool InputLane::Broadcast() {
  if (memory_.empty()) return false;
  double from = memory_.Front().time;
  for (Fifo* consumer : consumers_) {
    if (consumer->full()) return false;
    from = std::max(from, consumer->Back().time);
  }
  const double end = broadcast_.Move(memory_.bytes(), from);
  for (Fifo* consumer : consumers_) {
    std::memcpy(consumer->Back().data.get(), memory_.Front().data.get(), memory_.bytes());
    consumer->Push(end);
  }
  memory_.Pop(end);
  return true;
}

bool InputLane::Advance() {
  const bool filled = Fill();
  return Broadcast() || filled;
}

std::string InputLane::State() const {
  std::string state = name_ + ": " + source_.State() + "; memory tile holds " + Tiles(memory_) +
                      " tiles and " + std::to_string(filled_) + " bytes of the next";
  for (size_t i = 0; i < consumers_.size(); ++i) {
    if (consumers_[i]->full() && !memory_.empty()) {
      state += "; waits for core " + std::to_string(i) + " of the lane, which holds " +
               Tiles(*consumers_[i]);
    }
  }
  return state;
}

OutputLane::OutputLane(std::string name, ShimChannel& sink, size_t tile_bytes)
    : name_(std::move(name)), sink_(sink), collect_(kCoreRows) {
  sink.routed = true;
  for (int row = 0; row < kCoreRows; ++row) parts_.emplace_back(kFifoDepth, tile_bytes);
}

bool OutputLane::Collect() {
  bool moved = false;
  for (int row = 0; row < kCoreRows; ++row) {
    Fifo& from = *producers_[row];
    Fifo& to = parts_[row];
    if (from.empty() || to.full()) continue;
    std::memcpy(to.Back().data.get(), from.Front().data.get(), from.bytes());
    const double end =
        collect_[row].Move(from.bytes(), std::max(from.Front().time, to.Back().time));
    to.Push(end);
    from.Pop(end);
    moved = true;
  }
  return moved;
}

bool OutputLane::Drain() {
  double from = 0;
  for (Fifo& part : parts_) {
    if (part.empty()) return false;
    from = std::max(from, part.Front().time);
  }
  const size_t part_bytes = parts_[0].bytes();
  const size_t within = drained_ % part_bytes;
  const ShimChannel::Piece piece = sink_.Next(part_bytes - within);
  if (piece.bytes == 0) return false;
  std::memcpy(piece.data, parts_[drained_ / part_bytes].Front().data.get() + within, piece.bytes);
  MoveThroughShim(sink_, piece.bytes, std::max(piece.pushed, from));
  drained_ += piece.bytes;
  if (drained_ == part_bytes * kCoreRows) {
    for (Fifo& part : parts_) part.Pop(sink_.clock);
    drained_ = 0;
  }
  return true;
}

bool OutputLane::Advance() {
  const bool collected = Collect();
  return Drain() || collected;
}

bool OutputLane::idle() const {
  return sink_.idle() &&
         std::all_of(parts_.begin(), parts_.end(), [](const Fifo& part) { return part.empty(); });
}

std::string OutputLane::State() const {
  std::string state = name_ + ": " + sink_.State() + "; memory tile holds";
  for (const Fifo& part : parts_) state += " " + Tiles(part);
  return state + " tiles of its four cores, " + std::to_string(drained_) +
         " bytes of the first four are out";
}

}  // namespace jax_xdna
