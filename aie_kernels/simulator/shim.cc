#include "shim.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

namespace jax_xdna {
namespace {

constexpr int kArgumentShift = 40;  // bits of an offset in an argument

std::string Hex(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%" PRIX64, value);
  return text;
}

std::string ChannelName(int column, Direction direction, int channel) {
  return "shim column " + std::to_string(column) +
         (direction == Direction::kS2mm ? " S2MM " : " MM2S ") + std::to_string(channel);
}

}  // namespace

uint64_t HostMemory::AddressOf(uint32_t argument, uint64_t offset) const {
  if (argument >= arguments_.size() || offset >> kArgumentShift != 0) {
    throw SimulationError("an address patch with byte " + std::to_string(offset) + " of argument " +
                          std::to_string(argument));
  }
  return (uint64_t{argument + 1} << kArgumentShift) + offset;
}

uint8_t* HostMemory::At(uint64_t address, uint64_t bytes) const {
  const uint64_t number = address >> kArgumentShift;
  const uint64_t offset = address & ((uint64_t{1} << kArgumentShift) - 1);
  if (number == 0 || number > arguments_.size()) {
    throw SimulationError("a transfer at " + Hex(address) + ", which is in no argument");
  }
  const Argument& argument = arguments_[number - 1];
  if (offset % 4 != 0) {
    throw SimulationError("a transfer at byte " + std::to_string(offset) + " of argument " +
                          std::to_string(number - 1) + ", which is no multiple of 4");
  }
  if (offset > argument.bytes || bytes > argument.bytes - offset) {
    throw SimulationError("a transfer of " + std::to_string(bytes) + " bytes at byte " +
                          std::to_string(offset) + " of argument " + std::to_string(number - 1) +
                          ", which has " + std::to_string(argument.bytes));
  }
  return static_cast<uint8_t*>(argument.data) + offset;
}

void ShimChannel::Push(const QueueEntry& entry, uint8_t* data, size_t bytes, double now) {
  if (!routed) throw SimulationError(name_ + ": the design routes nothing there");
  if (static_cast<int>(unawaited_.size()) == kQueueDepth) {
    throw SimulationError(name_ + ": a push while " + std::to_string(kQueueDepth) +
                          " may be outstanding; the queue drops it");
  }
  if (entry.token && !sends_tokens_) {
    throw SimulationError(name_ + ": a token asked for, but not sent to the stream's controller");
  }
  unawaited_.push_back(entry);
  tasks_.push_back({entry, data, bytes, now});
}

bool ShimChannel::Uses(int bd) const {
  return std::any_of(unawaited_.begin(), unawaited_.end(),
                     [bd](const QueueEntry& entry) { return entry.bd == bd; });
}

std::optional<double> ShimChannel::TakeToken() {
  if (tokens_.empty()) return std::nullopt;
  const double time = tokens_.front();
  tokens_.pop_front();
  // A channel works in order: everything up to the push that asked for this token is complete.
  bool asked = false;
  while (!asked) {
    asked = unawaited_.front().token;
    unawaited_.pop_front();
  }
  return time;
}

ShimChannel::Piece ShimChannel::Next(size_t wanted) const {
  if (tasks_.empty()) return {};
  const Task& task = tasks_.front();
  return {task.data + task.moved, std::min(wanted, task.bytes - task.moved), task.pushed};
}

void ShimChannel::Done(size_t bytes, double now) {
  Task& task = tasks_.front();
  task.moved += bytes;
  bytes_moved += static_cast<int64_t>(bytes);
  if (task.moved < task.bytes) return;
  task.moved = 0;
  if (++task.run < task.entry.repeats) return;
  if (task.entry.token) tokens_.push_back(now);
  tasks_.pop_front();
}

std::string ShimChannel::State() const {
  if (tasks_.empty()) return name_ + ": no task";
  const Task& task = tasks_.front();
  return name_ + ": BD " + std::to_string(task.entry.bd) + " at byte " +
         std::to_string(task.moved) + " of " + std::to_string(task.bytes) + ", run " +
         std::to_string(task.run + 1) + " of " + std::to_string(task.entry.repeats) + ", " +
         std::to_string(tasks_.size() - 1) + " more queued";
}

Shim::Shim(int column)
    : column_(column),
      channels_{ShimChannel(ChannelName(column, Direction::kS2mm, 0)),
                ShimChannel(ChannelName(column, Direction::kS2mm, 1)),
                ShimChannel(ChannelName(column, Direction::kMm2s, 0)),
                ShimChannel(ChannelName(column, Direction::kMm2s, 1))} {}

ShimChannel& Shim::Channel(Direction direction, int channel) {
  if (channel < 0 || channel > 1) {
    throw SimulationError(ChannelName(column_, direction, channel) + ": no such channel");
  }
  return channels_[(direction == Direction::kMm2s ? 2 : 0) + channel];
}

ShimChannel& Shim::ChannelAt(uint32_t offset, bool queue) {
  for (const Direction direction : {Direction::kS2mm, Direction::kMm2s}) {
    for (int channel = 0; channel < 2; ++channel) {
      if (offset == (queue ? ShimQueue : ShimControl)(direction, channel)) {
        return Channel(direction, channel);
      }
    }
  }
  throw SimulationError("column " + std::to_string(column_) + ": a write to shim register " +
                        Hex(offset) + ", which the design does not use");
}

void Shim::Write(uint32_t offset, uint32_t value, const HostMemory& memory, double now) {
  ShimChannel& channel = ChannelAt(offset, true);
  const QueueEntry entry = QueueEntry::FromWord(value);
  const Descriptor& descriptor = descriptors_[entry.bd];
  if (!descriptor.written || !descriptor.patched) {
    throw SimulationError(channel.name() + ": a push of BD " + std::to_string(entry.bd) +
                          ", which has no " + (descriptor.written ? "address" : "contents"));
  }
  const uint64_t bytes = uint64_t{4} * descriptor.bd.length;
  channel.Push(entry, memory.At(descriptor.bd.address, bytes), bytes, now);
}

void Shim::WriteBlock(uint32_t offset, const std::vector<uint32_t>& block, Arch arch) {
  const uint32_t number = (offset - kShimBdBase) / kBdBytes;
  if (offset < kShimBdBase || number >= kShimBds || (offset - kShimBdBase) % kBdBytes != 0 ||
      4 * block.size() != kBdBytes) {
    throw SimulationError("column " + std::to_string(column_) + ": a block write of " +
                          std::to_string(block.size()) + " words to " + Hex(offset) +
                          ", which is not a descriptor");
  }
  for (const ShimChannel& channel : channels_) {
    if (channel.Uses(static_cast<int>(number))) {
      throw SimulationError(channel.name() + ": BD " + std::to_string(number) +
                            " is written while a push of it may be running");
    }
  }
  const ShimBd bd = ShimBd::FromWords(block.data());
  if (bd.length == 0 || bd.size0 != 0 || bd.burst != LongestBurst(arch)) {
    throw SimulationError("column " + std::to_string(column_) + ": BD " + std::to_string(number) +
                          " is not a linear run in the longest bursts");
  }
  descriptors_[number] = {bd, true, false};
}

void Shim::MaskWrite(uint32_t offset, uint32_t value, uint32_t mask) {
  ShimChannel& channel = ChannelAt(offset, false);
  if (value != kTokenController || mask != kTokenControllerMask) {
    throw SimulationError(channel.name() + ": masked write of " + Hex(value) + " under " +
                          Hex(mask) + ", which is not how tokens are asked for");
  }
  channel.SendTokens();
}

void Shim::Patch(uint32_t offset, uint64_t address, uint64_t argument_offset) {
  const uint32_t number = (offset - kShimBdBase) / kBdBytes;
  if (offset < kShimBdBase || number >= kShimBds || (offset - kShimBdBase) % kBdBytes != 4) {
    throw SimulationError("column " + std::to_string(column_) + ": an address patch of " +
                          Hex(offset) + ", which is no descriptor's address");
  }
  Descriptor& descriptor = descriptors_[number];
  for (const ShimChannel& channel : channels_) {
    if (channel.Uses(static_cast<int>(number))) {
      throw SimulationError(channel.name() + ": BD " + std::to_string(number) +
                            " is patched while a push of it may be running");
    }
  }
  // Tools write the offset into the descriptor and into the patch.
  if (!descriptor.written || descriptor.patched || descriptor.bd.address != argument_offset) {
    throw SimulationError("column " + std::to_string(column_) +
                          ": an address patch that does not " + "fit BD " + std::to_string(number));
  }
  descriptor.bd.address = address;
  descriptor.patched = true;
}

void Shim::EndDispatch() {
  for (Descriptor& descriptor : descriptors_) descriptor.patched = false;
  for (ShimChannel& channel : channels_) channel.EndDispatch();
}

}  // namespace jax_xdna
