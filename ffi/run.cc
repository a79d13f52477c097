#include "run.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "device.h"
#include "isa.h"

namespace jax_xdna {

void PauseBriefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void Work::Execute(int64_t index, StageTimes& times) {
  if (failed_.load(std::memory_order_relaxed)) return;
  try {
    const Ticket next = ticket(index);
    switch (next.stage) {
      case Stage::kPack:
        return Pack(next.piece, times);
      case Stage::kRun:
        return Run(next.piece, times);
      case Stage::kUnpack:
        return Unpack(next.piece, times);
    }
  } catch (...) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
    failed_.store(true);
    Signal();
  }
}

void Help(Work& work) {
  // A finished product may be looked at long after its operands are gone: only the counter is read.
  const int64_t total = work.tickets();
  int64_t index = work.next_.fetch_add(1, std::memory_order_relaxed);
  if (index >= total) return;
  StageTimes times;
  int64_t taken = 0;
  {
    const FlushSubnormals mode;
    for (; index < total; index = work.next_.fetch_add(1, std::memory_order_relaxed)) {
      work.Execute(index, times);
      ++taken;
    }
  }
  {
    const std::lock_guard<std::mutex> lock(work.mutex_);
    work.result_.times += times;
    work.result_.threads += 1;
  }
  work.done_.fetch_add(taken);
  work.Signal();
}

RunResult RunToEnd(WorkRef work, Helpers& helpers) {
  const int64_t total = work->tickets();
  work->next_.store(0, std::memory_order_relaxed);
  work->done_.store(0, std::memory_order_relaxed);
  work->failed_.store(false, std::memory_order_relaxed);
  work->error_ = nullptr;
  work->result_ = RunResult();
  for (int i = 0; i < helpers.count() && i + 1 < total; ++i) helpers.Offer(work);
  Help(*work);
  work->Wait([&] { return work->done_.load() == total; });
  const std::lock_guard<std::mutex> lock(work->mutex_);
  if (work->error_) std::rethrow_exception(work->error_);
  return work->result_;
}

}  // namespace jax_xdna
