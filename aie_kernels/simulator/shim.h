// The DMA of a shim tile: descriptors, task queues, tokens, and the bytes of the dispatch's
// buffers.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "simulator.h"

namespace jax_xdna {

// The buffers of a dispatch, each in an address range of its own, so that a run beyond the end of
// one is not a run into another.
class HostMemory {
 public:
  explicit HostMemory(const std::vector<Argument>& arguments) : arguments_(arguments) {}
  uint64_t AddressOf(uint32_t argument, uint64_t offset) const;
  // Throws SimulationError unless the range lies in one buffer.
  uint8_t* At(uint64_t address, uint64_t bytes) const;

 private:
  std::vector<Argument> arguments_;
};

class ShimChannel {
 public:
  explicit ShimChannel(std::string name) : name_(std::move(name)) {}

  const std::string& name() const { return name_; }
  void SendTokens() { sends_tokens_ = true; }  // to the controller of the stream
  // `data` and `bytes` are the run of the descriptor.
  void Push(const QueueEntry& entry, uint8_t* data, size_t bytes, double now);
  // Whether a push of this descriptor may still be running, for all the controller knows.
  bool Uses(int bd) const;
  // Takes a token, if there is one: when it came.
  std::optional<double> TakeToken();

  // The next bytes of the runs that were pushed, at most `wanted`; none when there is no task.
  struct Piece {
    uint8_t* data = nullptr;
    size_t bytes = 0;
    double pushed = 0;
  };
  Piece Next(size_t wanted) const;
  void Done(size_t bytes, double now);  // these bytes have moved

  bool idle() const { return tasks_.empty(); }
  bool awaited() const { return unawaited_.empty() && tokens_.empty(); }
  bool has_token() const { return !tokens_.empty(); }
  std::string State() const;
  void EndDispatch() {
    unawaited_.clear();
    bytes_moved = 0;
    busy = 0;
  }

  bool routed = false;  // to a lane of the design
  int64_t bytes_moved = 0;
  double busy = 0;
  double clock = 0;

 private:
  struct Task {
    QueueEntry entry;
    uint8_t* data;
    size_t bytes;
    double pushed;
    int run = 0;       // of entry.repeats
    size_t moved = 0;  // of this run
  };
  std::string name_;
  bool sends_tokens_ = false;
  std::deque<Task> tasks_;
  std::deque<QueueEntry> unawaited_;  // pushes that no token wait has shown to be complete
  std::deque<double> tokens_;
};

class Shim {
 public:
  explicit Shim(int column);

  ShimChannel& Channel(Direction direction, int channel);
  // Registers by offset in the tile. Throws SimulationError for any the design does not use.
  void Write(uint32_t offset, uint32_t value, const HostMemory& memory, double now);
  void WriteBlock(uint32_t offset, const std::vector<uint32_t>& block, Arch arch);
  void MaskWrite(uint32_t offset, uint32_t value, uint32_t mask);
  void Patch(uint32_t offset, uint64_t address, uint64_t argument_offset);
  // The dispatch is over and all its transfers are complete; its buffers may go away.
  void EndDispatch();

 private:
  struct Descriptor {
    ShimBd bd;
    bool written = false;
    bool patched = false;
  };
  ShimChannel& ChannelAt(uint32_t offset, bool queue);

  int column_;
  std::array<Descriptor, kShimBds> descriptors_;
  std::array<ShimChannel, 4> channels_;  // S2MM 0, 1, MM2S 0, 1
};

}  // namespace jax_xdna
