#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <stdexcept>

#include "stream.h"

namespace jax_xdna {
namespace {

__attribute__((format(printf, 1, 2))) std::string Format(const char* format, ...) {
  char text[200];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  return text;
}

const char* Name(Direction direction) { return direction == Direction::kS2mm ? "S2MM" : "MM2S"; }

std::string DescribeQueue(uint32_t word, int descriptors, Direction direction, int channel) {
  const QueueEntry task = QueueEntry::FromWord(word, descriptors);
  return Format("push      %s %d: BD %d x %d%s", Name(direction), channel, task.bd, task.repeats,
                task.token ? ", token" : "");
}

std::string DescribeBd(int bd, const uint32_t* words) {
  const ShimBd run = ShimBd::FromWords(words);
  const std::string shape = run.size0 == 0
                                ? "contiguous"
                                : Format("size:stride %u:%u, %u:%u, rest:%u", run.size0,
                                         run.stride0, run.size1, run.stride1, run.stride2);
  return Format("BD %-2d     %u words %s", bd, run.length, shape.c_str());
}

std::string DescribeMemoryBd(int bd, const uint32_t* words) {
  const MemoryBd run = MemoryBd::FromWords(words);
  std::string text = Format("BD %-2d     %u words", bd, run.length);
  if (run.steps > 1) text += Format(", %u steps of %u words", run.steps, run.stride);
  if (run.acquire >= 0) text += Format(", takes lock %d, gives lock %d", run.acquire, run.release);
  return text;
}

// The channel with this register, if there is one.
bool FindChannel(uint32_t offset, uint32_t (*reg)(Direction, int), Direction& direction,
                 int& channel) {
  for (const Direction d : {Direction::kS2mm, Direction::kMm2s}) {
    for (int c = 0; c < (reg == MemoryQueue ? 6 : 2); ++c) {
      if (offset == reg(d, c)) {
        direction = d;
        channel = c;
        return true;
      }
    }
  }
  return false;
}

// The descriptor of which this is word `word`; -1 when it is none.
int BdAt(uint32_t offset, uint32_t base, int count, uint32_t word) {
  const uint32_t start = base + 4 * word;
  if (offset < start || (offset - start) % kBdBytes != 0) return -1;
  const auto bd = static_cast<int64_t>((offset - start) / kBdBytes);
  return bd < count ? static_cast<int>(bd) : -1;
}

// What the operation means in its tile; empty when that is not known.
std::string InShim(const TxnOp& op, uint32_t offset) {
  Direction direction;
  int channel;
  if (op.kind == TxnKind::kWrite && FindChannel(offset, ShimQueue, direction, channel)) {
    return DescribeQueue(op.value, kShimBds, direction, channel);
  }
  if (op.kind == TxnKind::kMaskWrite && FindChannel(offset, ShimControl, direction, channel) &&
      op.value == kTokenController && op.mask == kTokenControllerMask) {
    return Format("tokens    of %s %d to the controller", Name(direction), channel);
  }
  if (op.kind == TxnKind::kBlockWrite && op.block.size() == kBdBytes / 4) {
    const int bd = BdAt(offset, kShimBdBase, kShimBds, 0);
    if (bd >= 0) return DescribeBd(bd, op.block.data());
  }
  if (op.kind == TxnKind::kPatch) {
    const int bd = BdAt(offset, kShimBdBase, kShimBds, 1);
    if (bd >= 0) {
      return Format("address   BD %d = argument %u + %" PRIu64, bd, op.argument,
                    op.argument_offset);
    }
  }
  return "";
}

std::string InMemoryTile(const TxnOp& op, uint32_t offset) {
  Direction direction;
  int channel;
  if (op.kind == TxnKind::kWrite && FindChannel(offset, MemoryQueue, direction, channel)) {
    return DescribeQueue(op.value, kMemoryBds, direction, channel);
  }
  if (op.kind == TxnKind::kWrite && offset >= kMemoryLockBase &&
      offset < kMemoryLockBase + 16 * kOwnLocks && offset % 16 == 0) {
    return Format("lock      %u = %u", (offset - kMemoryLockBase) / 16, op.value);
  }
  if (op.kind == TxnKind::kBlockWrite && op.block.size() == kBdBytes / 4) {
    const int bd = BdAt(offset, kMemoryBdBase, kMemoryBds, 0);
    if (bd >= 0) return DescribeMemoryBd(bd, op.block.data());
  }
  if (op.kind == TxnKind::kMaskWrite && op.mask == kMemoryAddressMask) {
    const int bd = BdAt(offset, kMemoryBdBase, kMemoryBds, 1);
    if (bd >= 0) {
      return Format("address   BD %d = byte 0x%X of the memory it sees", bd, 4 * op.value);
    }
  }
  return "";
}

std::string InCore(const TxnOp& op, uint32_t offset) {
  if (op.kind != TxnKind::kWrite) return "";
  if (offset < 0x10000) {
    return Format("L1        0x%X = %" PRId32, offset, static_cast<int32_t>(op.value));
  }
  if (offset >= kCoreLockBase && offset < kCoreLockBase + 16 * 16 && offset % 16 == 0) {
    return Format("lock      %u = %u", (offset - kCoreLockBase) / 16, op.value);
  }
  return "";
}

std::string Raw(const TxnOp& op, uint32_t offset) {
  switch (op.kind) {
    case TxnKind::kWrite:
      return Format("write     0x%X = 0x%X", offset, op.value);
    case TxnKind::kMaskWrite:
      return Format("write     0x%X = 0x%X in bits 0x%X", offset, op.value, op.mask);
    case TxnKind::kBlockWrite:
      return Format("write     0x%X: %zu words", offset, op.block.size());
    default:
      return Format("address   0x%X = argument %u + %" PRIu64, offset, op.argument,
                    op.argument_offset);
  }
}

}  // namespace

std::string Describe(const TxnOp& op) {
  if (op.kind == TxnKind::kWait) {
    return Format("column %d row %d  wait      %s %d", op.column, op.row, Name(op.direction),
                  op.channel);
  }
  const int row = RegisterRow(op.address);
  const uint32_t offset = RegisterOffset(op.address);
  std::string what;
  try {
    what = row == 0 ? InShim(op, offset) : row == 1 ? InMemoryTile(op, offset) : InCore(op, offset);
  } catch (const std::invalid_argument&) {
    // A descriptor or task with fields that no stream here sets.
  }
  return Format("column %d row %d  ", RegisterColumn(op.address), row) +
         (what.empty() ? Raw(op, offset) : what);
}

}  // namespace jax_xdna
