#include "predict.h"

#include <algorithm>
#include <cmath>

namespace jax_xdna {
namespace {

struct Machine {
  Rates rates;
  const char* source[4];  // of the rates, in their order
};

const char* const kTaka = "arXiv 2512.13282, turbo mode";
// Fitted by benchmarks/cost_model.py to runs that amd/IRON publishes.
const char* const kFitted = "fitted to flm.GEMM, amd/IRON flm/gemm README (NPU1)";
const char* const kFittedNpu2 = "fitted to flm.GEMM, amd/IRON CI on Krackan";
const char* const kFittedExact = "fitted to iron.operators.GEMM, amd/IRON CI on Krackan";

// Turbo: the best kernels published, compiled with Chess. Default: what AMD's open design that is
// nearest to ours reached, compiled with Peano, in the power mode that a machine starts in.
Machine MachineOf(Arch arch, Numerics numerics, Power power) {
  const bool turbo = power == Power::kTurbo;
  if (arch == Arch::kNpu1) {
    if (!turbo) return {{1.0e9, 17e9, 104e-6, 68.3}, {kTaka, kFitted, kFitted, kFitted}};
    return {{1.0e9, 17e9, 127e-6, 99.8},
            {kTaka, "bytes over time of the best bf16 run in arXiv 2512.13282, table 2",
             "xrt-smi latency on Windows, Xilinx/XRT pull request 8319",
             "balanced bf16 kernel 96x56x96, arXiv 2512.13282, table 2"}};
  }
  const bool exact = numerics == Numerics::kBF16;
  const char* const native = "derived from native bf16 runs of amd/IRON CI (20 to 25)";
  if (!turbo) {
    return {{1.8e9, 60e9, 306e-6, exact ? 23.1 : 129.7},
            {kTaka, kFittedNpu2, kFittedNpu2, exact ? kFittedExact : kFittedNpu2}};
  }
  return {{1.8e9, 55e9, 52e-6, exact ? 25.0 : 137.2},
          {kTaka, "bytes over time of the best bf16 run in arXiv 2512.13282, table 3",
           "xrt-smi latency on Linux, amd/IRON issue 55",
           exact ? native : "balanced bfp16-emulated kernel 112x48x96, arXiv 2512.13282, table 3"}};
}

constexpr double kChannelBytesPerCycle = 4;  // 32-bit streams
constexpr double kFloatsPerCycle = 8;        // one 32-byte load and store a cycle
constexpr double kOperation = 66e-9;         // s, of the controller: amd/IRON flm/gemm README
constexpr double kMaxChunks = 4;             // commands that the driver keeps in flight a context
constexpr double kMaxRun = 1.0;              // s, half the driver's default hang detector

}  // namespace

Prediction Predict(const Workload& work, const Rates& rates) {
  const double m = work.m, k = work.k, n = work.n;
  const double tiles = static_cast<double>(work.row_tiles) * static_cast<double>(work.col_tiles);
  const double step = std::max({m * k * n / rates.macs_per_cycle, 2 * m * k / kChannelBytesPerCycle,
                                work.b_item * k * n / kChannelBytesPerCycle});
  const double drain = work.c_item * m * n / kChannelBytesPerCycle;
  // Between output tiles: clear the sum, and round the old one out or wait until it is gone.
  double between = m * n / kFloatsPerCycle;
  if (work.rounds_c) {
    between += m * n / kFloatsPerCycle;
  } else if (work.c_buffers == 1) {
    between += drain;
  }
  const double tile = static_cast<double>(work.depth_tiles) * step + between;
  const double fill =
      (work.first_bytes + std::max(2 * m * k, work.b_item * k * n)) / kChannelBytesPerCycle;

  Prediction p;
  const double moved = work.a_bytes + work.b_bytes + work.c_bytes;
  p.dram_bytes = static_cast<int64_t>(moved);
  p.dispatch = rates.dispatch;
  p.compute = tiles * tile / rates.clock;
  p.dram = moved / rates.dram_bandwidth;
  p.lanes = std::max({work.a_bytes / work.core_rows, work.b_bytes / work.columns,
                      work.c_bytes / work.columns}) /
            kChannelBytesPerCycle / rates.clock;
  // The first tiles reach L2, then L1, while the controller works through the sequence.
  p.edges = std::max(fill / rates.clock, work.operations * kOperation) + drain / rates.clock;
  p.total = p.dispatch + p.edges + std::max({p.compute, p.dram, p.lanes});
  return p;
}

Prediction Predict(const GemmPlan& plan) {
  Workload work;
  work.row_tiles = plan.row_tiles;
  work.depth_tiles = plan.depth_tiles;
  work.col_tiles = plan.col_tiles;
  work.m = plan.tile.m;
  work.k = plan.tile.k;
  work.n = plan.tile.n;
  work.core_rows = kCoreRows;
  work.columns = plan.columns;
  work.c_item = static_cast<double>(plan.c_item());
  work.c_buffers = plan.tile.c_buffers;
  work.rounds_c = plan.c_dtype == DType::kBF16;
  const auto a_passes = static_cast<double>(plan.feed == Feed::kHeld ? 1 : plan.col_tiles);
  work.a_bytes = static_cast<double>(plan.a_bytes) * a_passes;
  work.b_bytes = static_cast<double>(plan.b_bytes) * static_cast<double>(plan.row_tiles);
  work.c_bytes = static_cast<double>(plan.c_bytes);
  const auto into_l2 = static_cast<double>(std::max<int64_t>(plan.chunk_tiles, 1));
  work.first_bytes = 2 * std::max(into_l2 * work.m * work.k, work.k * work.n);
  // A push is 3 operations (4 with a token), a core has two runtime words and a lock, a lane of A
  // through L2 takes 9 more, or 15.
  const double lane_operations = plan.feed == Feed::kFifo ? 3 : plan.feed == Feed::kRing ? 12 : 18;
  work.operations =
      7.0 * plan.columns + lane_operations * kCoreRows + 3.0 * kCoreRows * plan.columns;
  return Predict(work, MachineOf(plan.arch, plan.numerics, plan.power).rates);
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

std::vector<ModelConstant> ModelConstants(Arch arch, Numerics numerics, Power power) {
  const Machine machine = MachineOf(arch, numerics, power);
  const Rates& rates = machine.rates;
  return {{"controller_operation", kOperation, "runtime words of amd/IRON flm/gemm, README"},
          {"clock", rates.clock, machine.source[0]},
          {"dram_bandwidth", rates.dram_bandwidth, machine.source[1]},
          {"dispatch", rates.dispatch, machine.source[2]},
          {"macs_per_cycle", rates.macs_per_cycle, machine.source[3]}};
}

}  // namespace jax_xdna
