// A core: its buffers, its runtime words and lock, and the loop around the real kernel.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "fifo.h"
#include "host/kernels.h"
#include "simulator.h"
#include "timing.h"

namespace jax_xdna {

class Core {
 public:
  Core(int column, int row, const ArrayDesign& design);

  Fifo a, b, c;  // in L1
  // Data memory and locks, by offset in the tile. Throws SimulationError for what no stream may
  // write.
  void Write(uint32_t offset, uint32_t value, double now);

  bool Advance();  // whether the core did anything
  bool idle() const { return !running_ && c.empty() && a.empty() && b.empty(); }
  std::string State() const;
  CoreUse Use() const { return {column_, row_, tiles_done_, steps_done_, busy_}; }
  void EndDispatch();

 private:
  std::string Name() const;
  void Spend(double from, double cycles);
  bool narrow() const { return c.bytes() < sum_.bytes(); }
  // Where C is summed up: the buffer that leaves, or, when bf16 leaves, one that stays.
  float* Sum();
  bool WaitsForC() const;

  int column_, row_;
  packed_gemm::Tile tile_;
  const packed_gemm::Kernel& kernel_;
  Fifo sum_;
  double clear_cycles_, step_cycles_;  // clearing and rounding take the same

  std::array<std::optional<int32_t>, 2> words_;  // written since the last go
  bool running_ = false;
  int32_t tiles_ = 0, steps_ = 0;  // what this dispatch asks for
  int32_t tile_at_ = 0, step_at_ = 0;
  bool cleared_ = false;
  double clock_ = 0, busy_ = 0;
  int64_t tiles_done_ = 0, steps_done_ = 0;
};

}  // namespace jax_xdna
