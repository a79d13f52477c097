// A device takes a matrix product as an ordered list of tickets, so that packing, running and
// unpacking of different pieces overlap and any number of threads can share the work.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "gemm.h"
#include "run.h"

namespace jax_xdna {

enum class Stage { kPack, kRun, kUnpack };

struct Ticket {
  Stage stage;
  int64_t piece;
};

// One product in flight, shared by the caller and its helpers (see run.h) and recycled by its
// device when the last of them lets go. A ticket may wait only for tickets with a lower number, and
// those have been claimed by a thread that is at work on them: no order of arrival can deadlock.
class Work {
 public:
  virtual ~Work() = default;

  virtual int64_t tickets() const = 0;
  virtual Ticket ticket(int64_t index) const = 0;

  // Rounds and packs a piece of an operand into the order in which the device reads it.
  virtual void Pack(int64_t piece, StageTimes& times) = 0;
  // Multiplies a piece.
  virtual void Run(int64_t piece, StageTimes& times) = 0;
  // Writes a piece of C in row-major order. Devices that write C in place have no such tickets.
  virtual void Unpack(int64_t, StageTimes&) {}

 protected:
  // Waits until `ready()`; false when another ticket has failed and this one should give up. What
  // `ready` reads must be written with sequential consistency and followed by Signal().
  template <typename Ready>
  bool WaitUntil(Ready ready) {
    Wait([&] { return ready() || failed_.load(); });
    return ready();
  }

  void Signal() {
    if (waiters_.load() == 0) return;
    const std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }

 private:
  friend class WorkRef;
  friend RunResult RunToEnd(WorkRef work, Helpers& helpers);
  friend void Help(Work& work);
  virtual void Recycle() = 0;
  void Execute(int64_t index, StageTimes& times);

  template <typename Ready>
  void Wait(Ready ready) {
    constexpr int kSpins = 500;
    for (int look = 0; look < kSpins; ++look) {
      if (ready()) return;
      PauseBriefly();
    }
    // The thread waited for may have lost its core to this one: sleep.
    ++waiters_;
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait(lock, ready);
    --waiters_;
  }

  std::atomic<int> references_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<bool> failed_{false};
  std::atomic<int> waiters_{0};
  std::condition_variable wake_;
  std::mutex mutex_;  // guards what follows
  std::exception_ptr error_;
  RunResult result_;
};

// Counted reference to a Work. A std::shared_ptr would allocate for every product.
class WorkRef {
 public:
  explicit WorkRef(Work* work) : work_(work) { ++work_->references_; }
  WorkRef(const WorkRef& other) : WorkRef(other.work_) {}
  WorkRef(WorkRef&& other) noexcept : work_(std::exchange(other.work_, nullptr)) {}
  WorkRef& operator=(const WorkRef&) = delete;
  ~WorkRef() {
    if (work_ != nullptr && --work_->references_ == 0) work_->Recycle();
  }
  Work& operator*() const { return *work_; }
  Work* operator->() const { return work_; }

 private:
  Work* work_;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual std::string name() const = 0;
  virtual std::string description() const = 0;
  // Cuts a product (no dimension of it empty) for up to `threads` threads. Throws DeviceError when
  // the device cannot take it, std::bad_alloc when memory is short.
  virtual WorkRef Begin(const Gemm& gemm, int threads) = 0;
};

// The CPU as a device: always there, and the reference for every other one.
Device& EmulatedDevice();

// Every device of this process, and one by its name; throws DeviceError naming those that exist.
const std::vector<Device*>& Devices();
Device& FindDevice(std::string_view name);

}  // namespace jax_xdna
