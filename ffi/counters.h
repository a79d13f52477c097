// What ran where, since the library was loaded. Rows only grow, so a reader takes two snapshots and
// subtracts.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gemm.h"

namespace jax_xdna {

struct CounterKey {
  std::string device, layout, numerics;
  int64_t batch, m, k, n;

  bool operator<(const CounterKey& o) const {
    return std::tie(device, layout, numerics, batch, m, k, n) <
           std::tie(o.device, o.layout, o.numerics, o.batch, o.m, o.k, o.n);
  }
};

struct CounterRow {
  int64_t calls = 0;
  int64_t threads = 0;  // summed over calls: those that took work
  double flops = 0;
  double seconds = 0;  // wall time in the handler, summed over calls
  StageTimes stages;
};

class Counters {
 public:
  void Add(const CounterKey& key, const CounterRow& call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    CounterRow& row = rows_[key];
    row.calls += call.calls;
    row.threads += call.threads;
    row.flops += call.flops;
    row.seconds += call.seconds;
    row.stages += call.stages;
  }

  std::vector<std::pair<CounterKey, CounterRow>> Snapshot() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return {rows_.begin(), rows_.end()};
  }

 private:
  mutable std::mutex mutex_;
  std::map<CounterKey, CounterRow> rows_;
};

// Never destroyed, like the devices.
Counters& ProcessCounters();

}  // namespace jax_xdna
