#include "lanes.h"

#include <algorithm>
#include <cstring>

#include "timing.h"

namespace jax_xdna {

std::string Tiles(const Fifo& fifo) {
  return std::to_string(fifo.count()) + " of " + std::to_string(fifo.depth());
}

double Stream::Move(size_t bytes, double from) {
  clock = std::max(clock, from) + static_cast<double>(bytes) / kStreamBytesPerCycle;
  return clock;
}

void Lane::MoveThroughShim(size_t bytes, double from) {
  const double cycles = static_cast<double>(bytes) / kStreamBytesPerCycle;
  shim_.clock = std::max(shim_.clock, from) + cycles;
  shim_.busy += cycles;
  shim_.Done(bytes, shim_.clock);
}

bool Broadcast::blocked() const {
  return std::any_of(consumers_.begin(), consumers_.end(),
                     [](const Fifo* consumer) { return consumer->full(); });
}

double Broadcast::Move(const uint8_t* tile, size_t bytes, double from) {
  for (Fifo* consumer : consumers_) from = std::max(from, consumer->Back().time);
  const double end = stream_.Move(bytes, from);
  for (Fifo* consumer : consumers_) {
    std::memcpy(consumer->Back().data.get(), tile, bytes);
    consumer->Push(end);
  }
  return end;
}

std::string Broadcast::State() const {
  std::string state;
  for (size_t i = 0; i < consumers_.size(); ++i) {
    if (consumers_[i]->full()) {
      state += "; waits for core " + std::to_string(i) + " of the lane, which holds " +
               Tiles(*consumers_[i]);
    }
  }
  return state;
}

bool InputLane::Fill() {
  if (memory_.full()) return false;
  const ShimChannel::Piece piece = shim_.Next(memory_.bytes() - filled_);
  if (piece.bytes == 0) return false;
  Fifo::Slot& slot = memory_.Back();
  std::memcpy(slot.data.get() + filled_, piece.data, piece.bytes);
  MoveThroughShim(piece.bytes, std::max(piece.pushed, slot.time));
  filled_ += piece.bytes;
  if (filled_ == memory_.bytes()) {
    memory_.Push(shim_.clock);
    filled_ = 0;
  }
  return true;
}

bool InputLane::Send() {
  if (memory_.empty() || cores.blocked()) return false;
  const Fifo::Slot& slot = memory_.Front();
  memory_.Pop(cores.Move(slot.data.get(), memory_.bytes(), slot.time));
  return true;
}

bool InputLane::Advance() {
  const bool filled = Fill();
  return Send() || filled;
}

std::string InputLane::State() const {
  return name() + ": " + shim_.State() + "; memory tile holds " + Tiles(memory_) + " tiles and " +
         std::to_string(filled_) + " bytes of the next" + (memory_.empty() ? "" : cores.State());
}

OutputLane::OutputLane(std::string name, ShimChannel& sink, size_t tile_bytes)
    : Lane(std::move(name), sink, true), collect_(kCoreRows) {
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
  const ShimChannel::Piece piece = shim_.Next(part_bytes - within);
  if (piece.bytes == 0) return false;
  std::memcpy(piece.data, parts_[drained_ / part_bytes].Front().data.get() + within, piece.bytes);
  MoveThroughShim(piece.bytes, std::max(piece.pushed, from));
  drained_ += piece.bytes;
  if (drained_ == part_bytes * kCoreRows) {
    for (Fifo& part : parts_) part.Pop(shim_.clock);
    drained_ = 0;
  }
  return true;
}

bool OutputLane::Advance() {
  const bool collected = Collect();
  return Drain() || collected;
}

bool OutputLane::idle() const {
  return shim_.idle() &&
         std::all_of(parts_.begin(), parts_.end(), [](const Fifo& part) { return part.empty(); });
}

std::string OutputLane::State() const {
  std::string state = name() + ": " + shim_.State() + "; memory tile holds";
  for (const Fifo& part : parts_) state += " " + Tiles(part);
  return state + " tiles of its four cores, " + std::to_string(drained_) +
         " bytes of the first four are out";
}

}  // namespace jax_xdna
