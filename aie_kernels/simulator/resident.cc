#include "resident.h"

#include <algorithm>
#include <cstring>

namespace jax_xdna {

ResidentLane::ResidentLane(std::string name, ShimChannel& source, size_t tile_bytes)
    : Lane(std::move(name), source, false), tile_bytes_(tile_bytes), memory_(kResidentBytes) {
  set_.fill(-1);
  fill_.name = "memory tile S2MM 5";
  fill_.queue = MemoryQueue(Direction::kS2mm, 5);
  fill_.odd = true;
  send_.name = "memory tile MM2S 2";
  send_.queue = MemoryQueue(Direction::kMm2s, 2);
  send_.odd = false;
}

bool ResidentLane::idle() const {
  for (size_t i = 0; i < locks_.size(); ++i) {
    if (set_[i] >= 0 && static_cast<int>(locks_[i].size()) != set_[i]) return false;
  }
  return fill_.tasks.empty() && send_.tasks.empty() && shim_.idle();
}

void ResidentLane::Refuse(const std::string& what) const {
  throw SimulationError(name() + ", memory tile: " + what);
}

ResidentLane::Descriptor& ResidentLane::DescriptorAt(uint32_t offset, uint32_t word) {
  const uint32_t number = (offset - kMemoryBdBase) / kBdBytes;
  if (offset < kMemoryBdBase || number >= kMemoryBds ||
      (offset - kMemoryBdBase) % kBdBytes != 4 * word) {
    Refuse("a write to register " + std::to_string(offset) + ", which the design does not use");
  }
  for (const Channel* channel : {&fill_, &send_}) {
    const auto& pushed = channel->pushed;
    if (std::find(pushed.begin(), pushed.end(), static_cast<int>(number)) != pushed.end()) {
      Refuse("BD " + std::to_string(number) + " is written while a push of it may be running");
    }
  }
  return descriptors_[number];
}

void ResidentLane::WriteBlock(uint32_t offset, const std::vector<uint32_t>& block) {
  Descriptor& descriptor = DescriptorAt(offset, 0);
  if (4 * block.size() != kBdBytes) Refuse("a descriptor of another length than 8 words");
  const MemoryBd bd = MemoryBd::FromWords(block.data());
  const uint64_t last = uint64_t{bd.steps - 1} * bd.stride + bd.length;
  if (bd.length == 0 || 4 * uint64_t{bd.length} % tile_bytes_ != 0 ||
      4 * uint64_t{bd.stride} % tile_bytes_ != 0 || 4 * last > memory_.size()) {
    Refuse("a run of " + std::to_string(bd.length) + " words, " + std::to_string(bd.steps) +
           " times with stride " + std::to_string(bd.stride) +
           ", which is not whole tiles of its buffer");
  }
  for (const int lock : {bd.acquire, bd.release}) {
    if (lock >= static_cast<int>(locks_.size())) {
      Refuse("lock " + std::to_string(lock) + ", which the design has for something else");
    }
  }
  descriptor = {bd, true, false, 0};
}

void ResidentLane::MaskWrite(uint32_t offset, uint32_t value, uint32_t mask) {
  Descriptor& descriptor = DescriptorAt(offset, 1);
  if (!descriptor.written || value != kOwnMemoryWords || mask != kMemoryAddressMask) {
    Refuse("an address that is not that of the lane's buffer");
  }
  descriptor.placed = true;
}

void ResidentLane::Write(uint32_t offset, uint32_t value, double now) {
  const uint32_t lock = (offset - kMemoryLockBase) / 16;
  if (offset >= kMemoryLockBase && lock < locks_.size() && offset % 16 == 0) {
    if (!fill_.pushed.empty() || !send_.pushed.empty()) Refuse("a lock set while it may be used");
    if (value > static_cast<uint32_t>(kMaxLockValue)) {
      Refuse("a lock set to " + std::to_string(value) + ", the limit is " +
             std::to_string(kMaxLockValue));
    }
    locks_[lock].assign(value, now);
    set_[lock] = static_cast<int>(value);
    return;
  }
  for (Channel* channel : {&fill_, &send_}) {
    if (offset != channel->queue) continue;
    const QueueEntry entry = QueueEntry::FromWord(value, kMemoryBds);
    const Descriptor& descriptor = descriptors_[entry.bd];
    if (static_cast<int>(channel->pushed.size()) == kQueueDepth) {
      Refuse(channel->name + ": a push while 4 may be outstanding; the queue drops it");
    }
    if (*std::min_element(set_.begin(), set_.end()) < 0) Refuse("a push before all locks are set");
    if (!descriptor.written || !descriptor.placed || entry.token) {
      Refuse(channel->name + ": a push of BD " + std::to_string(entry.bd) +
             ", which is not complete, or for a token");
    }
    const size_t held = locks_[0].size() + locks_[1].size() + locks_[2].size();
    if (descriptor.bd.acquire >= 0 && held != descriptor.bd.steps) {
      Refuse(channel->name + ": locks for " + std::to_string(held) + " pieces of a buffer of " +
             std::to_string(descriptor.bd.steps));
    }
    if ((entry.bd >= kMemoryBds / 2) != channel->odd) {
      Refuse(channel->name + ": BD " + std::to_string(entry.bd) +
             " belongs to the channels of the other parity");
    }
    channel->pushed.push_back(entry.bd);
    channel->tasks.push_back({entry, now});
    return;
  }
  Refuse("a write to register " + std::to_string(offset) + ", which the design does not use");
}

bool ResidentLane::Start(Channel& channel) {
  if (channel.tasks.empty()) return false;
  if (channel.started) return true;
  const Task& task = channel.tasks.front();
  const int acquire = descriptors_[task.entry.bd].bd.acquire;
  channel.from = task.pushed;
  if (acquire >= 0) {
    std::deque<double>& lock = locks_[acquire];
    if (lock.empty()) return false;
    channel.from = std::max(channel.from, lock.front());
    lock.pop_front();
  }
  channel.started = true;
  return true;
}

uint8_t* ResidentLane::At(const Channel& channel) {
  const Descriptor& descriptor = descriptors_[channel.tasks.front().entry.bd];
  return memory_.data() + size_t{4} * descriptor.step * descriptor.bd.stride + channel.moved;
}

void ResidentLane::Moved(Channel& channel, size_t bytes, double now) {
  Task& task = channel.tasks.front();
  Descriptor& descriptor = descriptors_[task.entry.bd];
  channel.moved += bytes;
  if (channel.moved < size_t{4} * descriptor.bd.length) return;
  channel.moved = 0;
  channel.started = false;
  descriptor.step = (descriptor.step + 1) % descriptor.bd.steps;
  if (descriptor.bd.release >= 0) {
    std::deque<double>& lock = locks_[descriptor.bd.release];
    lock.push_back(now);
    if (static_cast<int>(lock.size()) > kMaxLockValue) Refuse("a lock beyond its limit");
  }
  if (++task.run == task.entry.repeats) channel.tasks.pop_front();
}

bool ResidentLane::Fill() {
  if (!Start(fill_)) return false;
  const size_t length = size_t{4} * descriptors_[fill_.tasks.front().entry.bd].bd.length;
  const ShimChannel::Piece piece = shim_.Next(length - fill_.moved);
  if (piece.bytes == 0) return false;
  std::memcpy(At(fill_), piece.data, piece.bytes);
  MoveThroughShim(piece.bytes, std::max(piece.pushed, fill_.from));
  Moved(fill_, piece.bytes, shim_.clock);
  return true;
}

bool ResidentLane::Send() {
  if (!Start(send_) || cores.blocked()) return false;
  Moved(send_, tile_bytes_, cores.Move(At(send_), tile_bytes_, send_.from));
  return true;
}

bool ResidentLane::Advance() {
  const bool filled = Fill();
  return Send() || filled;
}

std::string ResidentLane::StateOf(const Channel& channel) const {
  if (channel.tasks.empty()) return "; " + channel.name + ": no task";
  const Task& task = channel.tasks.front();
  const int acquire = descriptors_[task.entry.bd].bd.acquire;
  std::string state = "; " + channel.name + ": BD " + std::to_string(task.entry.bd) + ", run " +
                      std::to_string(task.run + 1) + " of " + std::to_string(task.entry.repeats);
  if (!channel.started && acquire >= 0) state += ", waits for lock " + std::to_string(acquire);
  return state;
}

std::string ResidentLane::State() const {
  return name() + ": " + shim_.State() + StateOf(fill_) + StateOf(send_) + "; locks empty " +
         std::to_string(locks_[0].size()) + ", full " + std::to_string(locks_[1].size()) +
         ", passed " + std::to_string(locks_[2].size()) + (send_.started ? cores.State() : "");
}

void ResidentLane::EndDispatch() {
  fill_.pushed.clear();
  send_.pushed.clear();
  set_.fill(-1);
}

}  // namespace jax_xdna
