// The core kernel compiled for the host, once for each datapath.
#pragma once

#include <cstdint>

#include "../micro_tiles.h"

namespace packed_gemm {

struct Tile {
  unsigned m = 0, k = 0, n = 0;
};

// The kernel's entry points. Each call finds the core in its power-up rounding mode. bf16 numbers
// are their bits; every pointer is aligned to 64 bytes.
struct Kernel {
  MicroTile micro;
  void (*zero)(const Tile&, float* c);
  void (*step)(const Tile&, const uint16_t* a, const uint16_t* b, float* c);
  void (*epilogue)(const Tile&, const float* c, uint16_t* out);
};

const Kernel& KernelAie2();
const Kernel& KernelAie2p();
const Kernel& KernelAie2pBfp16();

}  // namespace packed_gemm
