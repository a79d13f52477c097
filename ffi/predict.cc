#include "predict.h"

#include <algorithm>
#include <cmath>

namespace jax_xdna {
namespace {

struct Machine {
  double clock;           // Hz
  double dram_bandwidth;  // bytes/s, reads and writes together
  double dispatch;        // s
  double macs_per_cycle;  // of one core on the path that the numerics take
  const char* source[4];
};

const char* const kTaka = "arXiv 2512.13282, turbo mode";

Machine MachineOf(Arch arch, Numerics numerics) {
  if (arch == Arch::kNpu1) {
    return {1.0e9,
            17e9,
            127e-6,
            99.8,
            {kTaka, "bytes over time of the best bf16 run in arXiv 2512.13282, table 2",
             "xrt-smi latency on Windows, Xilinx/XRT pull request 8319",
             "balanced bf16 kernel 96x56x96, arXiv 2512.13282, table 2"}};
  }
  const bool exact = numerics == Numerics::kBF16;
  return {1.8e9,
          55e9,
          52e-6,
          exact ? 25.0 : 137.2,
          {kTaka, "bytes over time of the best bf16 run in arXiv 2512.13282, table 3",
           "xrt-smi latency on Linux, amd/IRON issue 55",
           exact ? "derived from native bf16 runs of amd/IRON CI (20 to 25)"
                 : "balanced bfp16-emulated kernel 112x48x96, arXiv 2512.13282, table 3"}};
}

constexpr double kChannelBytesPerCycle = 4;  // 32-bit streams
constexpr double kFloatsPerCycle = 8;        // one 32-byte load and store a cycle
constexpr double kOperation = 66e-9;         // s, of the controller: amd/IRON flm/gemm README
constexpr double kMaxChunks = 4;             // commands that the driver keeps in flight a context
constexpr double kMaxRun = 1.0;              // s, half the driver's default hang detector

}  // namespace

Prediction Predict(const GemmPlan& plan) {
  const Machine machine = MachineOf(plan.arch, plan.numerics);
  const double m = plan.tile.m, k = plan.tile.k, n = plan.tile.n;
  const double i = static_cast<double>(plan.row_tiles), j = static_cast<double>(plan.col_tiles);
  const double step =
      std::max({m * k * n / machine.macs_per_cycle, 2 * m * k / kChannelBytesPerCycle,
                2 * k * n / kChannelBytesPerCycle});
  const double drain = static_cast<double>(plan.c_item()) * m * n / kChannelBytesPerCycle;
  // Between output tiles: clear the sum, and round the old one out or wait until it is gone.
  double between = m * n / kFloatsPerCycle;
  if (plan.c_dtype == DType::kBF16) {
    between += m * n / kFloatsPerCycle;
  } else if (plan.tile.c_buffers == 1) {
    between += drain;
  }
  const double tile = static_cast<double>(plan.depth_tiles) * step + between;
  const double a = static_cast<double>(plan.a_bytes) * (plan.feed == Feed::kHeld ? 1 : j),
               b = static_cast<double>(plan.b_bytes) * i;
  const double c = static_cast<double>(plan.c_bytes);
  // The first tiles reach L2, then L1, while the controller works through the sequence: a push is 3
  // operations (4 with a token), a core has two runtime words and a lock,
  // a lane of A through L2 takes 9 more, or 15.
  const double lane_operations = plan.feed == Feed::kFifo ? 3 : plan.feed == Feed::kRing ? 12 : 18;
  const double into_l2 =
      plan.chunk_tiles > 0 ? static_cast<double>(plan.chunk_tiles) * m * k : m * k;
  const double fill =
      2 * (std::max(into_l2, k * n) + std::max(m * k, k * n)) / kChannelBytesPerCycle;
  const double operations =
      7.0 * plan.columns + lane_operations * kCoreRows + 3.0 * kCoreRows * plan.columns;

  Prediction p;
  p.dram_bytes = static_cast<int64_t>(a + b + c);
  p.dispatch = machine.dispatch;
  p.compute = i * j * tile / machine.clock;
  p.dram = (a + b + c) / machine.dram_bandwidth;
  p.lanes = std::max({a / kCoreRows, b / plan.columns, c / plan.columns}) / kChannelBytesPerCycle /
            machine.clock;
  p.edges = std::max(fill / machine.clock, operations * kOperation) + drain / machine.clock;
  p.total = p.dispatch + p.edges + std::max({p.compute, p.dram, p.lanes});
  return p;
}

void ChooseChunks(GemmPlan& plan) {
  // Whole macro-tiles along the longer loop. A piece runs at least as long as a dispatch takes, so
  // that the next one is there in time, and never so long that the driver takes it for hung.
  plan.chunks_along_rows = plan.row_tiles > plan.col_tiles;
  const int64_t tiles = plan.chunks_along_rows ? plan.row_tiles : plan.col_tiles;
  const int64_t extent = plan.chunks_along_rows ? plan.rows : plan.cols;
  const int64_t wanted = plan.chunks_along_rows == plan.transposed ? plan.n : plan.m;
  const double run = plan.predicted.total - plan.predicted.dispatch;
  const auto pieces = static_cast<int64_t>(std::ceil(
      std::max(std::min(kMaxChunks, std::floor(run / plan.predicted.dispatch)), run / kMaxRun)));
  const int64_t each = CeilDiv(tiles, std::clamp<int64_t>(pieces, 1, tiles));
  for (int64_t start = 0; start < tiles; start += each) {
    const int64_t begin = start * (extent / tiles);
    const int64_t end = std::min((start + each) * (extent / tiles), wanted);
    plan.chunks.push_back({begin, end - begin});
  }
}

std::vector<ModelConstant> ModelConstants(Arch arch, Numerics numerics) {
  const Machine machine = MachineOf(arch, numerics);
  return {{"controller_operation", kOperation, "runtime words of amd/IRON flm/gemm, README"},
          {"clock", machine.clock, machine.source[0]},
          {"dram_bandwidth", machine.dram_bandwidth, machine.source[1]},
          {"dispatch", machine.dispatch, machine.source[2]},
          {"macs_per_cycle", machine.macs_per_cycle, machine.source[3]}};
}

}  // namespace jax_xdna
