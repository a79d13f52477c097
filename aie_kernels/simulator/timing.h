// The figures of the time model, each with its source.
#pragma once

#include "plan.h"

namespace jax_xdna {

struct Timing {
  double clock_hz;         // of the array
  double macs_per_cycle;   // of a core's kernel
  double dram_per_second;  // bytes, both directions together
};

// Streams are 32 bits wide; a core stores 256 bits a cycle (AMD AM020, AIE-ML architecture manual).
constexpr double kStreamBytesPerCycle = 4;
constexpr double kStoreBytesPerCycle = 32;
// A register write by the controller, as reported for IRON's flm.GEMM.
constexpr double kOperationSeconds = 66e-9;

// Clock and DRAM: published whole-array measurements. Kernels: AIE2 bf16 and exact AIE2P measured,
// block floating point as the cost model of the packed design takes it.
inline Timing TimingOf(Arch arch, Numerics numerics) {
  if (arch == Arch::kNpu1) return {1.0e9, 113, 15e9};
  return {1.8e9, numerics == Numerics::kBFP16 ? 200.0 : 25.0, 55e9};
}

}  // namespace jax_xdna
