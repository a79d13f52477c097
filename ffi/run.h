// Runs the tickets of a product on the calling thread and on whatever helpers turn up.
#pragma once

#include "gemm.h"

namespace jax_xdna {

class Work;
class WorkRef;

// A moment for the sibling hardware thread.
void PauseBriefly();

struct RunResult {
  StageTimes times;
  int threads = 0;  // that took at least one ticket
};

// Threads that may come to help.
class Helpers {
 public:
  virtual ~Helpers() = default;
  virtual int count() const = 0;
  // Has some thread call Help(*work), now or later, or never.
  virtual void Offer(WorkRef work) = 0;
};

// Takes tickets until none is left. Safe at any time: on a finished product it returns at once.
void Help(Work& work);

// Returns when every ticket is done. No helper is needed, so neither an empty pool nor one whose
// threads are all busy (or are the caller) can deadlock. Rethrows the first exception of a ticket.
RunResult RunToEnd(WorkRef work, Helpers& helpers);

}  // namespace jax_xdna
