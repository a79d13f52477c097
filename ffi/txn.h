// The words of an NPU instruction stream ("TXN"): a header of four words, then operations that the
// array's controller executes in order. Little-endian 32-bit words.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace jax_xdna {

enum class Arch { kNpu1, kNpu2 };  // Phoenix and Hawk Point (AIE2); Strix and later (AIE2P)

enum class Direction { kS2mm, kMm2s };  // from the array's streams to memory, and back

// Where a register lies: column << 25 | row << 20 | offset. Row 0 is the shim, row 1 the memory
// tile, rows 2 to 5 the cores.
constexpr uint32_t RegisterAddress(int column, int row, uint32_t offset) {
  return static_cast<uint32_t>(column) << 25 | static_cast<uint32_t>(row) << 20 | offset;
}
constexpr int RegisterColumn(uint32_t address) { return static_cast<int>(address >> 25); }
constexpr int RegisterRow(uint32_t address) { return static_cast<int>(address >> 20 & 31); }
constexpr uint32_t RegisterOffset(uint32_t address) { return address & 0xFFFFF; }

// Registers of a shim tile.
constexpr uint32_t kShimBdBase = 0x1D000;  // 16 buffer descriptors of 8 words
constexpr uint32_t kBdBytes = 0x20;
constexpr int kShimBds = 16;
constexpr int kQueueDepth = 4;  // pushes that a channel's queue holds; one more is lost silently
constexpr int kMaxRepeats = 256;
constexpr uint32_t ShimControl(Direction direction, int channel) {
  return (direction == Direction::kS2mm ? 0x1D200 : 0x1D210) + 8 * static_cast<uint32_t>(channel);
}
constexpr uint32_t ShimQueue(Direction direction, int channel) {
  return ShimControl(direction, channel) + 4;
}
// Who gets a channel's completion tokens: a masked write of its control register.
constexpr uint32_t kTokenController = 0xF00;
constexpr uint32_t kTokenControllerMask = 0x1F00;
// Of a memory tile; channels 0 to 5 a direction.
constexpr uint32_t kMemoryBdBase = 0xA0000;  // 48 descriptors of 8 words; 24 to 47: odd channels
constexpr int kMemoryBds = 48;
constexpr uint32_t kMemoryLockBase = 0xC0000;
constexpr int kMaxLockValue = 63;
constexpr uint32_t MemoryQueue(Direction direction, int channel) {
  return (direction == Direction::kS2mm ? 0xA0604 : 0xA0634) + 8 * static_cast<uint32_t>(channel);
}
constexpr uint32_t kMemoryAddressMask = 0x7FFFF;  // of word 1 of a descriptor, in words
// Descriptors count addresses and locks from the western neighbour's on.
constexpr uint32_t kOwnMemoryWords = 0x20000;
constexpr int kOwnLocks = 64;

// A core's locks, 16 bytes apart; its data memory starts at offset 0.
constexpr uint32_t kCoreLockBase = 0x1F000;

// What is written to a task queue: run descriptor `bd` so many times in all.
struct QueueEntry {
  int bd = 0;
  int repeats = 1;     // 1 to 256
  bool token = false;  // send a completion token after the last
  // Both refuse a descriptor that the tile, one with so many, does not have.
  uint32_t Word(int descriptors = kShimBds) const;
  static QueueEntry FromWord(uint32_t word, int descriptors = kShimBds);
};

constexpr int LongestBurst(Arch arch) { return arch == Arch::kNpu1 ? 2 : 3; }  // 256, 512 bytes

// A shim buffer descriptor. Sizes and strides count 32-bit words; a linear run has sizes of 0.
struct ShimBd {
  uint32_t length = 0;   // words
  uint64_t address = 0;  // bytes; an address patch adds the argument's address
  // Innermost first. The third dimension runs until `length` words have moved.
  uint32_t size0 = 0, size1 = 0;
  uint32_t stride0 = 1, stride1 = 1, stride2 = 1;
  int burst = 0;  // code of the longest burst: LongestBurst(arch)

  std::array<uint32_t, 8> Words() const;
  // Throws std::invalid_argument when a field that no stream of ours sets is set.
  static ShimBd FromWords(const uint32_t* words);
};

// A memory tile's descriptor: a run of `length` words; the i-th task that uses it starts
// (i mod steps)·stride words further on. Takes 1 from lock `acquire` before and gives 1 to lock
// `release` after, or uses no lock when both are negative.
struct MemoryBd {
  uint32_t length = 0;
  uint32_t steps = 1, stride = 0;
  int acquire = -1, release = -1;

  // Word 1, the address, is written apart, under a mask.
  std::array<uint32_t, 8> Words() const;
  // Throws std::invalid_argument when a field that no stream of ours sets is set.
  static MemoryBd FromWords(const uint32_t* words);
};

enum class TxnKind : uint8_t {
  kWrite = 0,
  kBlockWrite = 1,
  kMaskWrite = 3,
  kWait = 0x80,
  kPatch = 0x81
};

struct TxnOp {
  TxnKind kind = TxnKind::kWrite;
  uint32_t address = 0;         // of the register, for all but kWait
  uint32_t value = 0;           // kWrite, kMaskWrite
  uint32_t mask = 0;            // kMaskWrite
  std::vector<uint32_t> block;  // kBlockWrite
  // kPatch: `address` is word 1 of a descriptor, which gets the address of a buffer plus an offset.
  uint32_t argument = 0;  // 0, 1, 2: A, B, C
  uint64_t argument_offset = 0;
  // kWait: for the completion token of one DMA channel.
  int column = 0, row = 0, channel = 0;
  Direction direction = Direction::kS2mm;

  size_t words() const;  // in the stream
};

struct Txn {
  Arch arch = Arch::kNpu1;
  std::vector<TxnOp> ops;
};

std::vector<uint32_t> EncodeTxn(const Txn& txn);

// Throws std::invalid_argument naming the word offset and what is wrong there.
Txn DecodeTxn(const uint32_t* words, size_t count);

}  // namespace jax_xdna
