// How one matrix product runs on the NPU: the one source of truth that the packer, the design, the
// instruction stream, the simulator and the cost model read.
//
// The product that runs is P = L · R, padded to whole tiles: L = A and R = B, or, when
// `transposed`, L = B^T, R = A^T and P = C^T. With I = rows/(4m), J = cols/(n·columns), KK =
// depth/k:
//   buffer A: bf16 [core row 4][i I][kk KK] tiles m×k   lane r goes to every core of row r
//   buffer B: bf16 [column][j J][kk KK] tiles k×n       lane c goes to every core of column c
//   buffer C: f32  [column][i I][j J][core row 4] tiles m×n, or [column][j J][i I][…]
//   (columns_outer)
// Inside, a tile is a row-major grid of row-major micro-tiles (r×s, s×t, r×t). Row r of the array
// computes rows (4i+r)·m … of P, column c columns (columns·j+c)·n ….
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gemm.h"
#include "micro_tiles.h"
#include "txn.h"

namespace jax_xdna {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Tile {
  int m = 0, k = 0, n = 0;
  // C tiles in L1. An f32 result is summed up in place: with one buffer, the core waits while it
  // drains. A bf16 result is rounded out of an f32 tile of its own.
  int c_buffers = 2;
};
bool operator==(const Tile& a, const Tile& b);

using packed_gemm::MicroTile;

enum class Buffer { kA = 0, kB = 1, kC = 2 };  // the stream's arguments

// Where the core keeps what the stream tells it.
constexpr uint32_t kRuntimeAddress = 0xD00;  // L1: word 0 = I·J, word 1 = KK; right after the stack
constexpr int kGoLock = 15;                  // set to 1 by the stream, taken (consumed) by the core
constexpr int kCoreRows = 4;
constexpr int kFirstCoreRow = 2;

// One entry of the sequence, in stream order.
struct Step {
  enum Kind {
    kPush,
    kWait,
    kRuntimeWords,
    kGoLocks,
    // Of resident designs, in the memory tile of `column`:
    kMemoryLock,  // set lock `lock` to `repeats`
    kMemoryBd,    // write descriptor `bd`: `memory`, at byte 0
    kMemoryPush,  // run descriptor `bd` so many times
  };
  Kind kind = kPush;
  // kPush, kWait and kMemoryPush: the channel.
  int column = 0;
  Direction direction = Direction::kMm2s;
  int channel = 0;
  // kPush: `repeats` times the run of `bytes` bytes at byte `offset` of the buffer.
  Buffer buffer = Buffer::kA;
  int bd = 0;
  bool write_bd = true;  // false: the descriptor still holds this run
  int64_t offset = 0;
  int64_t bytes = 0;
  int repeats = 1;
  bool token = false;  // a wait follows
  int lock = 0;
  MemoryBd memory;
};

// Seconds. What each figure assumes is in predict.cc.
struct Prediction {
  double dispatch = 0;  // from the driver's call to the array's start, and from its end back
  double compute = 0;   // cores: products, zeroing, waiting for a single C buffer
  double dram = 0;      // all bytes at the bandwidth that the array gets
  double lanes = 0;     // the busiest shim channel
  double edges = 0;     // first tiles in and last tile out of L1, with nothing to overlap
  double total = 0;     // dispatch + edges + max(compute, dram, lanes)
  int64_t dram_bytes = 0;
};

// A piece of the product that is dispatched by itself, so that packing the next one and unpacking
// the one before overlap it: `size` rows (along_rows) or columns of P from `start`.
struct Chunk {
  int64_t start = 0;
  int64_t size = 0;
};

// The NPU's power mode (xrt-smi configure --pmode), for predictions.
enum class Power { kTurbo, kDefault };

// How A gets from DRAM to the cores.
enum class Feed {
  kFifo,  // through two tiles of L2, from DRAM for every pass of the cores
  // Resident designs, through 384 KiB of L2 that the sequence programs:
  kHeld,  // from DRAM once; every pass but the first comes from L2
  kRing,  // from DRAM for every pass: a lane that does not fit, or has one pass
};
constexpr int64_t kResidentBytes = 393216;

struct GemmPlan {
  Arch arch = Arch::kNpu1;
  Numerics numerics = Numerics::kBF16;
  DType c_dtype = DType::kF32;  // in which C leaves the cores
  Power power = Power::kTurbo;
  int64_t m = 0, k = 0, n = 0;  // as asked for
  bool transposed = false;
  Tile tile;
  MicroTile micro = {};
  int columns = 0;  // of cores

  int64_t rows = 0, depth = 0, cols = 0;                  // of P, padded
  int64_t row_tiles = 0, depth_tiles = 0, col_tiles = 0;  // I, KK, J
  Feed feed = Feed::kFifo;
  int64_t chunk_tiles = 0;     // resident designs: tiles of A that L2 takes and gives at a time
  int64_t chunks_held = 0;     // and the room for them
  bool columns_outer = false;  // j is the outer loop, i the inner one
  int64_t a_bytes = 0, b_bytes = 0, c_bytes = 0;  // of the packed buffers
  int l1_bytes = 0;                               // per core, stack included
  int l2_bytes = 0;                               // per memory tile with an A lane
  std::vector<Step> steps;
  Prediction predicted;
  bool chunks_along_rows = false;
  std::vector<Chunk> chunks;

  // FLOPs asked for over FLOPs computed.
  double useful_share() const {
    return static_cast<double>(m) * k * n / (static_cast<double>(rows) * depth * cols);
  }
  int64_t c_item() const { return c_dtype == DType::kF32 ? 4 : 2; }    // bytes
  int a_column(int lane) const { return lane * columns / kCoreRows; }  // of A lane `lane`'s shim
  // Byte offsets of tiles.
  int64_t a_tile(int core_row, int64_t i, int64_t kk) const;
  int64_t b_tile(int column, int64_t j, int64_t kk) const;
  int64_t c_tile(int column, int core_row, int64_t i, int64_t j) const;
  // Byte offsets of elements of L, R and P.
  int64_t a_element(int64_t row, int64_t depth_index) const;
  int64_t b_element(int64_t depth_index, int64_t col) const;
  int64_t c_element(int64_t row, int64_t col) const;
};

// The tiles that designs exist for, the arch's first choice for training first.
const std::vector<Tile>& Tiles(Arch arch);

// The plan with the least predicted time, with `tile` or, when null, any of Tiles(arch). Switching
// tiles between products costs milliseconds: a program of several passes the tile of BestTile.
// `resident` is the second kind of design, which keeps A in L2; it has not run on hardware.
// Throws std::invalid_argument naming the limit and its value when the hardware cannot do it.
GemmPlan PlanGemm(Arch arch, int64_t m, int64_t k, int64_t n, Numerics numerics,
                  const Tile* tile = nullptr, DType c_dtype = DType::kF32, bool resident = false,
                  Power power = Power::kTurbo);

struct GemmShape {
  int64_t m = 0, k = 0, n = 0;
  int64_t calls = 1;
};
// The tile with which a program of these products is predicted to run fastest.
Tile BestTile(Arch arch, const std::vector<GemmShape>& shapes, Numerics numerics,
              DType c_dtype = DType::kF32, bool resident = false, Power power = Power::kTurbo);

}  // namespace jax_xdna
