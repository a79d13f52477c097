// How long a product takes on the array, from published measurements.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace jax_xdna {

// What the model reads of a product and its design, ours or another's.
struct Workload {
  int64_t row_tiles = 0, depth_tiles = 0, col_tiles = 0;  // of one core: I, KK, J
  double m = 0, k = 0, n = 0;                             // tile
  double core_rows = 0, columns = 0;
  double b_item = 2, c_item = 4;  // bytes of an element of B and of C
  int c_buffers = 2;
  bool rounds_c = false;                         // out of an f32 tile of its own
  double a_bytes = 0, b_bytes = 0, c_bytes = 0;  // from and to DRAM, repeats included
  double first_bytes = 0;  // the first piece of A or B that L2 waits for, of the larger
  double operations = 0;   // of the controller, before the array is busy
};

// Rates of one (arch, datapath, power mode).
struct Rates {
  double clock = 0;           // Hz
  double dram_bandwidth = 0;  // bytes/s, reads and writes together
  double dispatch = 0;        // s
  double macs_per_cycle = 0;  // of one core on the path that the numerics take
};

Prediction Predict(const Workload& work, const Rates& rates);
Prediction Predict(const GemmPlan& plan);

// Pieces of the product for a pipeline of packing, running and unpacking. Fills in the plan's.
void ChooseChunks(GemmPlan& plan);

// A figure of the model: what it is, its value in SI units, and where it was published.
struct ModelConstant {
  std::string name;
  double value;
  std::string source;
};
std::vector<ModelConstant> ModelConstants(Arch arch, Numerics numerics,
                                          Power power = Power::kTurbo);

}  // namespace jax_xdna
