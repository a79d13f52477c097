#include "stream.h"

#include <array>
#include <utility>

namespace jax_xdna {
namespace {

constexpr int kShimRow = 0, kMemoryRow = 1;

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

}  // namespace jax_xdna
