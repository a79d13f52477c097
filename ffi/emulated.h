#pragma once

#include <cstdint>
#include <memory>

#include "device.h"
#include "isa.h"

namespace jax_xdna {

// How the emulated device cuts a product. Speed depends on it, results never do.
struct Blocking {
  int64_t depth = 384;                 // K of a panel (a multiple of 8): 8 rows of A fill 12 KB
  int64_t strip_floats = 192 * 384;    // a thread's own strip: 295 KB, within any L2
  int64_t shared_floats = 512 * 1024;  // a super-block of the shared operand: 2 MB
  int64_t pack_floats = 32 * 1024;     // what one ticket packs of it
};

std::unique_ptr<Device> MakeEmulatedDevice(const Isa& isa, const Blocking& blocking);

}  // namespace jax_xdna
