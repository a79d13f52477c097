// The virtual NPU behind the driver: hardware contexts, and one worker that runs commands in order
// on the exact simulator.
#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "memory.h"
#include "simulator.h"

namespace virtual_npu {

// What the driver knows of a kind of NPU.
struct Model {
  const char* vbnv;
  jax_xdna::Arch arch;
  int columns;
  int contexts;         // that may exist at a time
  uint64_t heap_limit;  // bytes
};
// By PCI device number; null when it is none of ours.
const Model* ModelOf(int device);

class Npu {
 public:
  Npu(int file, const Model& model);
  ~Npu();

  Memory& memory() { return memory_; }
  const Model& model() const { return model_; }

  // As a driver: a negative errno, or 0.
  int CreateContext(int tiles, uint32_t* handle);
  int Configure(uint32_t context, uint32_t cu_object);  // loads the design that it names
  int DestroyContext(uint32_t context);
  int Execute(uint32_t context, uint32_t command, uint64_t* sequence);
  // Until the command is complete or CLOCK_MONOTONIC shows `deadline` ns.
  int Wait(uint32_t context, uint64_t sequence, int64_t deadline);

 private:
  struct Context {
    jax_xdna::ArrayDesign design;
    std::unique_ptr<jax_xdna::Simulator> array;
    uint64_t submitted = 0, completed = 0;
  };
  struct Command {
    uint32_t context, object;
  };
  enum class State : uint32_t { kCompleted = 4, kError = 5, kAbort = 6, kTimeout = 8 };

  void Work();
  State Run(Context& context, uint32_t object);
  State RunPacket(Context& context, const uint32_t* packet, uint64_t words);
  void Start(Context& context, const uint32_t* packet, uint64_t words);
  void End(Context& context, uint32_t object, State state);

  Memory memory_;
  const Model& model_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<uint32_t, Context> contexts_;  // by handle; not moved while a command runs
  uint32_t next_ = 1;
  std::deque<Command> queue_;
  bool closed_ = false;
  std::thread worker_;
};

}  // namespace virtual_npu
