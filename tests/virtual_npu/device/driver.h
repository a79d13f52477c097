// The kernel driver's side of an open accel node.
#pragma once

#include <atomic>

#include "npu.h"

namespace virtual_npu {

class Driver {
 public:
  // `file` is what the node's descriptor is: a sparse file of buffer objects, for mmap.
  Driver(int file, const Model& model);

  int Ioctl(unsigned long request, void* data);  // a negative errno, or what ioctl returns
  void Mapped(uint64_t offset, void* address) { npu_.memory().Mapped(offset, address); }

 private:
  Npu npu_;
  std::atomic<bool> gone_{false};
};

}  // namespace virtual_npu
