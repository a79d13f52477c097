// The figures of the time model. Those that the cost model has too come from there.
#pragma once

#include "predict.h"

namespace jax_xdna {

// Streams are 32 bits wide; a core stores 256 bits a cycle (AMD AM020, AIE-ML architecture manual).
constexpr double kStreamBytesPerCycle = 4;
constexpr double kStoreBytesPerCycle = 32;
// A register write by the controller, as IRON's flm.GEMM reports it.
constexpr double kOperationSeconds = 66e-9;

struct Timing {
  double clock = 0;           // Hz
  double dram_bandwidth = 0;  // bytes/s, both directions together
  double macs_per_cycle = 0;  // of a core's kernel
};

inline Timing TimingOf(Arch arch, Numerics numerics) {
  Timing timing;
  for (const ModelConstant& constant : ModelConstants(arch, numerics)) {
    if (constant.name == "clock") timing.clock = constant.value;
    if (constant.name == "dram_bandwidth") timing.dram_bandwidth = constant.value;
    if (constant.name == "macs_per_cycle") timing.macs_per_cycle = constant.value;
  }
  return timing;
}

}  // namespace jax_xdna
