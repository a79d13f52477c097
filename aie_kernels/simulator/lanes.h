// The ways of A, B and C between the shim and the cores. Each holds two objects in the memory tile.
#pragma once

#include <string>
#include <vector>

#include "fifo.h"
#include "shim.h"

namespace jax_xdna {

constexpr int kFifoDepth = 2;

// A stream of 32 bits: when it is next free, and how long it has moved.
struct Stream {
  double clock = 0;
  double Move(size_t bytes, double from);  // from then or later; when it is over
};

// A or B: shim, memory tile, broadcast to the cores of a row or of a column.
class InputLane {
 public:
  InputLane(std::string name, ShimChannel& source, size_t tile_bytes)
      : name_(std::move(name)), source_(source), memory_(kFifoDepth, tile_bytes) {
    source.routed = true;
  }

  void AddConsumer(Fifo& core_buffers) { consumers_.push_back(&core_buffers); }
  const std::string& name() const { return name_; }
  const ShimChannel& channel() const { return source_; }
  bool Advance();  // whether anything moved
  bool idle() const { return memory_.empty() && filled_ == 0 && source_.idle(); }
  std::string State() const;

 private:
  bool Fill();
  bool Broadcast();

  std::string name_;
  ShimChannel& source_;
  Fifo memory_;
  size_t filled_ = 0;  // bytes of the tile that is coming in
  Stream broadcast_;
  std::vector<Fifo*> consumers_;
};

// C of a column: the tiles of its four cores, joined in the memory tile in the order of the rows.
class OutputLane {
 public:
  OutputLane(std::string name, ShimChannel& sink, size_t tile_bytes);

  void AddProducer(Fifo& core_buffers) { producers_.push_back(&core_buffers); }
  const std::string& name() const { return name_; }
  const ShimChannel& channel() const { return sink_; }
  bool Advance();
  bool idle() const;
  std::string State() const;

 private:
  bool Collect();
  bool Drain();

  std::string name_;
  ShimChannel& sink_;
  std::vector<Fifo> parts_;  // of the joined objects, one for each core row
  std::vector<Stream> collect_;
  std::vector<Fifo*> producers_;
  size_t drained_ = 0;  // bytes of the object that is going out
};

}  // namespace jax_xdna
