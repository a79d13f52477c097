// Buffer objects of the virtual NPU. The host's caches and the memory behind them are apart, as
// they are for the real device, which does not snoop: what the host writes reaches the device when
// its cache lines are flushed, what the device writes reaches the host when its lines are dropped,
// and both are the same operation. A line is dirty when its bytes are not those of its last flush.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace virtual_npu {

constexpr uint8_t kPoison = 0xFF;  // NaN in float and bfloat16, and no instruction

// Runs of bytes in use. First fit, so that what is given back is taken again.
class Extents {
 public:
  Extents(uint64_t begin, uint64_t end) : begin_(begin), end_(end) {}
  static constexpr uint64_t kNone = ~uint64_t{0};
  uint64_t Take(uint64_t size, uint64_t alignment);  // kNone: no room
  void Give(uint64_t offset) { used_.erase(offset); }
  void Grow(uint64_t size) { end_ += size; }
  uint64_t end() const { return end_; }

 private:
  uint64_t begin_, end_;
  std::map<uint64_t, uint64_t> used_;  // from, to
};

struct BufferObject {
  uint32_t type = 0;
  uint64_t size = 0;
  uint64_t offset = 0;   // in the file that is mapped, and in the device's memory
  uint64_t address = 0;  // on the device; that of the host's mapping, but for the heap
  uint8_t* host = nullptr;
};

// A live buffer object, in the host's view and in the device's, and a place in it.
struct Place {
  uint8_t* host = nullptr;
  uint8_t* device = nullptr;
  uint8_t* clean = nullptr;  // as last flushed
  uint64_t bytes = 0;        // of the object; 0: there is none
  uint64_t offset = 0;       // of the place

  uint64_t dirty_lines(uint64_t offset, uint64_t bytes) const;
  void Flush(uint64_t offset, uint64_t bytes) const;
  // Before a transfer to the array: what was not flushed may arrive or not, so it does not.
  void PoisonDirty(uint64_t offset, uint64_t bytes) const;
  // After one from the array: the host's clean lines are out of date.
  void PoisonStale(uint64_t offset, uint64_t bytes) const;
};

// All functions that fail give a negative errno, as a driver does. Thread-safe.
class Memory {
 public:
  Memory(int file, uint64_t heap_limit);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  int Create(uint32_t type, uint64_t size, uint8_t* user, uint32_t* handle);
  int Close(uint32_t handle);
  int Info(uint32_t handle, uint64_t* map_offset, uint64_t* address) const;
  int Sync(uint32_t handle, uint64_t offset, uint64_t size) const;
  void Mapped(uint64_t map_offset, void* address);
  bool Find(uint32_t handle, BufferObject* found) const;
  // Whose bytes lie at a device address; no bytes when nobody's.
  Place At(uint64_t address) const;
  Place Of(const BufferObject& bo) const;

 private:
  mutable std::mutex mutex_;
  int file_;
  uint64_t heap_limit_;
  uint8_t *host_, *device_, *clean_;
  Extents heap_;  // in use by DEV objects; ends where the heap objects end
  Extents rest_;
  std::map<uint32_t, BufferObject> objects_;
  uint32_t next_ = 1;
};

}  // namespace virtual_npu
