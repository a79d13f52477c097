// From a plan to its instruction stream, and from a stream to lines that people read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan.h"
#include "txn.h"

namespace jax_xdna {

// A run of memory for a shim channel: descriptor, address of its buffer, task.
struct Push {
  int column = 0;
  Direction direction = Direction::kMm2s;
  int channel = 0;
  QueueEntry task;
  int argument = 0;
  ShimBd run;            // its address is the offset into the argument; the burst is filled in
  bool write_bd = true;  // false: the descriptor still holds this run
};
void AppendPush(Txn& txn, const Push& push);

// Until the channel's next completion token.
void AppendWait(Txn& txn, int column, Direction direction, int channel);

void AppendWrite(Txn& txn, uint32_t address, uint32_t value);

// The stream that runs the plan. Arguments 0, 1, 2 are its buffers A, B, C.
std::vector<uint32_t> StreamOf(const GemmPlan& plan);

// One line per operation: what it does, in terms of tiles, descriptors, queues and locks.
std::string Describe(const TxnOp& op);

}  // namespace jax_xdna
