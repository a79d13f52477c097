// The lane of A in a resident design: the stream programs the memory tile's DMA, which fills a
// large buffer from the shim and sends it to a row of cores, once or many times.
#pragma once

#include <array>
#include <deque>
#include <string>
#include <vector>

#include "lanes.h"

namespace jax_xdna {

class ResidentLane final : public Lane {
 public:
  ResidentLane(std::string name, ShimChannel& source, size_t tile_bytes);

  Broadcast cores;
  bool Advance() override;
  bool idle() const override;  // and the locks are what they were set to: another pass would run
  std::string State() const override;

  // Registers of the memory tile, by offset. Throw SimulationError for what the design has not.
  void Write(uint32_t offset, uint32_t value, double now);
  void WriteBlock(uint32_t offset, const std::vector<uint32_t>& block);
  void MaskWrite(uint32_t offset, uint32_t value, uint32_t mask);
  void EndDispatch();

 private:
  struct Descriptor {
    MemoryBd bd;
    bool written = false, placed = false;  // contents, address
    uint32_t step = 0;                     // of bd.steps, counted by the hardware
  };
  struct Task {
    QueueEntry entry;
    double pushed;
    int run = 0;  // of entry.repeats
  };
  struct Channel {
    std::string name;
    uint32_t queue;           // register
    bool odd;                 // which half of the descriptors it can use
    std::vector<int> pushed;  // descriptors of this dispatch; nothing shows their completion
    std::deque<Task> tasks;
    bool started = false;  // the run has its lock
    double from = 0;       // since when
    size_t moved = 0;      // bytes of the run
  };

  bool Fill();
  bool Send();
  bool Start(Channel& channel);  // false while the lock is not there
  uint8_t* At(const Channel& channel);
  void Moved(Channel& channel, size_t bytes, double now);
  Descriptor& DescriptorAt(uint32_t offset, uint32_t word);
  [[noreturn]] void Refuse(const std::string& what) const;
  std::string StateOf(const Channel& channel) const;

  size_t tile_bytes_;
  std::vector<uint8_t> memory_;
  std::array<Descriptor, kMemoryBds> descriptors_;
  std::array<std::deque<double>, 3> locks_;  // what is to be had, and since when
  std::array<int, 3> set_;                   // to what, in this dispatch; or -1
  Channel fill_, send_;
};

}  // namespace jax_xdna
