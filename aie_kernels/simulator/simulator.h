// Executes the instruction stream of a packed GEMM, word by word as encoded, on a model of the
// array: the descriptors and queues of the shim, the lanes through the memory tiles, the cores with
// the real kernel. C has the bits of the emulated device. What the hardware would do wrong without
// a word (a dropped push, a descriptor overwritten while in use, a run beyond its buffer, an
// endless wait) is an error here.
//
// Time is counted by a simple model, in cycles of the array: a stream carries 4 bytes a cycle, a
// core multiplies at its datapath's measured rate and clears or rounds C at 32 bytes of fp32 a
// cycle, a buffer is
// taken when it is full and given back when it is empty, the controller takes 66 ns for an
// operation and waits for nothing but tokens. DRAM is not in that count: its own time, bytes over
// bandwidth, stands beside it, and a dispatch takes at least the longer of the two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "plan.h"

namespace jax_xdna {

// What is loaded into the array: the artifact that a stream runs on.
struct ArrayDesign {
  Arch arch = Arch::kNpu1;
  Numerics numerics = Numerics::kBF16;
  Tile tile;
  DType c_dtype = DType::kF32;
  bool resident = false;  // the second kind of design, with A in a buffer that the stream programs
};

// A buffer of the dispatch, aligned to 4 bytes; a stream names it by its position.
struct Argument {
  void* data = nullptr;
  size_t bytes = 0;
};

// The stream does what the hardware cannot do or would get wrong. Anything may have happened to the
// array by then: load the design anew.
struct SimulationError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct LaneUse {
  std::string name;
  int64_t bytes = 0;  // through the shim
  double busy = 0;    // cycles in which the shim's stream moves
};

struct CoreUse {
  int column = 0, row = 0;
  int64_t tiles = 0, steps = 0;  // of C, and along K
  double busy = 0;               // cycles in the kernel
};

struct Report {
  double cycles = 0;       // until the last wait of the stream
  double dram_cycles = 0;  // bytes over bandwidth
  double clock_hz = 0;
  int64_t bytes_read = 0, bytes_written = 0;
  std::vector<LaneUse> lanes;
  std::vector<CoreUse> cores;
  std::string Table() const;
};

class Simulator {
 public:
  // Throws std::invalid_argument when the kernel has no such tile.
  explicit Simulator(const ArrayDesign& design);
  ~Simulator();

  // One dispatch. What the array holds between dispatches it keeps. Throws SimulationError, and
  // std::invalid_argument for words that are no stream.
  Report Run(const uint32_t* words, size_t count, const std::vector<Argument>& arguments);

 private:
  class Controller;
  std::unique_ptr<Controller> controller_;
};

}  // namespace jax_xdna
