// A few buffers that a producer fills and a consumer empties in turn, and when they did.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace jax_xdna {

class Fifo {
 public:
  struct Slot {
    std::unique_ptr<uint8_t, decltype(&std::free)> data;
    double time = 0;  // when it became full or, when empty, when it became free
  };

  // Slots are aligned as the core's vector loads want them.
  Fifo(int depth, size_t bytes) : bytes_(bytes) {
    for (int i = 0; i < depth; ++i) {
      auto* data = static_cast<uint8_t*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
      if (data == nullptr) throw std::bad_alloc();
      slots_.push_back({{data, &std::free}, 0});
    }
  }

  size_t bytes() const { return bytes_; }
  size_t depth() const { return slots_.size(); }
  size_t count() const { return count_; }
  bool empty() const { return count_ == 0; }
  bool full() const { return count_ == slots_.size(); }

  // The slot to fill next; not when full.
  Slot& Back() { return slots_[(first_ + count_) % slots_.size()]; }
  void Push(double time) {
    Back().time = time;
    ++count_;
  }
  // The slot to empty next; not when empty.
  Slot& Front() { return slots_[first_]; }
  void Pop(double time) {
    Front().time = time;
    first_ = (first_ + 1) % slots_.size();
    --count_;
  }

 private:
  size_t bytes_;
  std::vector<Slot> slots_;
  size_t first_ = 0;
  size_t count_ = 0;
};

}  // namespace jax_xdna
