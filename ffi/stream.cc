#include "stream.h"

#include <cinttypes>
#include <cstdarg>
#include <cstdio>
#include <stdexcept>

namespace jax_xdna {
namespace {

constexpr int kShimRow = 0, kMemoryRow = 1;

__attribute__((format(printf, 1, 2))) std::string Format(const char* format, ...) {
  char text[200];
  va_list values;
  va_start(values, format);
  std::vsnprintf(text, sizeof text, format, values);
  va_end(values);
  return text;
}

const char* Name(Direction direction) { return direction == Direction::kS2mm ? "S2MM" : "MM2S"; }

std::string DescribeQueue(uint32_t word, Direction direction, int channel) {
  const QueueEntry task = QueueEntry::FromWord(word);
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

// The shim queue at this offset, if it is one.
bool FindChannel(uint32_t offset, uint32_t (*reg)(Direction, int), Direction& direction,
                 int& channel) {
  for (const Direction d : {Direction::kS2mm, Direction::kMm2s}) {
    for (int c = 0; c < 2; ++c) {
      if (offset == reg(d, c)) {
        direction = d;
        channel = c;
        return true;
      }
    }
  }
  return false;
}

int BdAt(uint32_t offset, uint32_t first_byte) {
  const uint32_t start = kShimBdBase + first_byte;
  if (offset < start || (offset - start) % kBdBytes != 0) return -1;
  const int bd = static_cast<int>((offset - start) / kBdBytes);
  return bd < kShimBds ? bd : -1;
}

std::string DescribeRegister(const TxnOp& op) {
  const int row = RegisterRow(op.address);
  const uint32_t offset = RegisterOffset(op.address);
  const int bd = row == kShimRow ? BdAt(offset, op.kind == TxnKind::kPatch ? 4 : 0) : -1;
  Direction direction;
  int channel;
  switch (op.kind) {
    case TxnKind::kWrite:
      if (row == kShimRow && FindChannel(offset, ShimQueue, direction, channel)) {
        return DescribeQueue(op.value, direction, channel);
      }
      if (row >= kFirstCoreRow && offset < kCoreLockBase) {
        return Format("L1        0x%X = %" PRId32, offset, static_cast<int32_t>(op.value));
      }
      if (row >= kFirstCoreRow && offset < kCoreLockBase + 16 * 16 && offset % 16 == 0) {
        return Format("lock      %u = %u", (offset - kCoreLockBase) / 16, op.value);
      }
      return Format("write     0x%X = 0x%X", offset, op.value);
    case TxnKind::kMaskWrite:
      if (row == kShimRow && FindChannel(offset, ShimControl, direction, channel) &&
          op.value == kTokenController && op.mask == kTokenControllerMask) {
        return Format("tokens of %s %d to the controller", Name(direction), channel);
      }
      return Format("write     0x%X = 0x%X in bits 0x%X", offset, op.value, op.mask);
    case TxnKind::kBlockWrite:
      if (bd >= 0 && op.block.size() == kBdBytes / 4) return DescribeBd(bd, op.block.data());
      return Format("write     0x%X: %zu words", offset, op.block.size());
    default:
      return Format("address   BD %d = argument %u + %" PRIu64, bd, op.argument,
                    op.argument_offset);
  }
}

void AppendMemoryBd(Txn& txn, const Step& step) {
  const std::array<uint32_t, 8> words = step.memory.Words();
  TxnOp write;
  write.kind = TxnKind::kBlockWrite;
  write.address = RegisterAddress(step.column, kMemoryRow,
                                  kMemoryBdBase + kBdBytes * static_cast<uint32_t>(step.bd));
  write.block.assign(words.begin(), words.end());
  TxnOp address;
  address.kind = TxnKind::kMaskWrite;
  address.address = write.address + 4;
  address.value = kOwnMemoryWords;
  address.mask = kMemoryAddressMask;
  txn.ops.push_back(std::move(write));
  txn.ops.push_back(std::move(address));
}

}  // namespace

void AppendPush(Txn& txn, const Push& push) {
  if (push.write_bd) {
    ShimBd run = push.run;
    run.burst = LongestBurst(txn.arch);
    const std::array<uint32_t, 8> words = run.Words();
    TxnOp write;
    write.kind = TxnKind::kBlockWrite;
    write.address = RegisterAddress(push.column, kShimRow,
                                    kShimBdBase + kBdBytes * static_cast<uint32_t>(push.task.bd));
    write.block.assign(words.begin(), words.end());
    TxnOp patch;
    patch.kind = TxnKind::kPatch;
    patch.address = write.address + 4;
    patch.argument = static_cast<uint32_t>(push.argument);
    patch.argument_offset = run.address;
    txn.ops.push_back(std::move(write));
    txn.ops.push_back(std::move(patch));
  }
  if (push.task.token) {
    TxnOp control;
    control.kind = TxnKind::kMaskWrite;
    control.address =
        RegisterAddress(push.column, kShimRow, ShimControl(push.direction, push.channel));
    control.value = kTokenController;
    control.mask = kTokenControllerMask;
    txn.ops.push_back(std::move(control));
  }
  AppendWrite(txn, RegisterAddress(push.column, kShimRow, ShimQueue(push.direction, push.channel)),
              push.task.Word());
}

void AppendWait(Txn& txn, int column, Direction direction, int channel) {
  TxnOp wait;
  wait.kind = TxnKind::kWait;
  wait.column = column;
  wait.direction = direction;
  wait.channel = channel;
  txn.ops.push_back(std::move(wait));
}

void AppendWrite(Txn& txn, uint32_t address, uint32_t value) {
  TxnOp write;
  write.address = address;
  write.value = value;
  txn.ops.push_back(std::move(write));
}

std::vector<uint32_t> StreamOf(const GemmPlan& plan) {
  Txn txn;
  txn.arch = plan.arch;
  const auto write_cores = [&](auto write) {
    for (int row = kFirstCoreRow; row < kFirstCoreRow + kCoreRows; ++row) {
      for (int column = 0; column < plan.columns; ++column) write(column, row);
    }
  };
  for (const Step& step : plan.steps) {
    switch (step.kind) {
      case Step::kPush: {
        Push push;
        push.column = step.column;
        push.direction = step.direction;
        push.channel = step.channel;
        push.task = {step.bd, step.repeats, step.token};
        push.argument = static_cast<int>(step.buffer);
        push.run.length = static_cast<uint32_t>(step.bytes / 4);
        push.run.address = static_cast<uint64_t>(step.offset);
        push.write_bd = step.write_bd;
        AppendPush(txn, push);
        break;
      }
      case Step::kMemoryLock:
        AppendWrite(txn,
                    RegisterAddress(step.column, kMemoryRow,
                                    kMemoryLockBase + 16 * static_cast<uint32_t>(step.lock)),
                    static_cast<uint32_t>(step.repeats));
        break;
      case Step::kMemoryBd:
        AppendMemoryBd(txn, step);
        break;
      case Step::kMemoryPush: {
        const QueueEntry task{step.bd, step.repeats, false};
        AppendWrite(
            txn,
            RegisterAddress(step.column, kMemoryRow, MemoryQueue(step.direction, step.channel)),
            task.Word(kMemoryBds));
        break;
      }
      case Step::kWait:
        AppendWait(txn, step.column, step.direction, step.channel);
        break;
      case Step::kRuntimeWords:
        write_cores([&](int column, int row) {
          AppendWrite(txn, RegisterAddress(column, row, kRuntimeAddress),
                      static_cast<uint32_t>(plan.row_tiles * plan.col_tiles));
          AppendWrite(txn, RegisterAddress(column, row, kRuntimeAddress + 4),
                      static_cast<uint32_t>(plan.depth_tiles));
        });
        break;
      case Step::kGoLocks:
        write_cores([&](int column, int row) {
          AppendWrite(txn, RegisterAddress(column, row, kCoreLockBase + 16 * kGoLock), 1);
        });
        break;
    }
  }
  return EncodeTxn(txn);
}

std::string Describe(const TxnOp& op) {
  if (op.kind == TxnKind::kWait) {
    return Format("column %d row %d  wait      %s %d", op.column, op.row, Name(op.direction),
                  op.channel);
  }
  std::string what;
  try {
    what = DescribeRegister(op);
  } catch (const std::invalid_argument& error) {  // a descriptor or task with unknown fields
    what = error.what();
  }
  return Format("column %d row %d  ", RegisterColumn(op.address), RegisterRow(op.address)) + what;
}

}  // namespace jax_xdna
