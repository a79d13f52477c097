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

// What flows through one channel of a shim.
class Lane {
 public:
  Lane(std::string name, ShimChannel& shim, bool to_host)
      : shim_(shim), name_(std::move(name)), to_host_(to_host) {
    shim.routed = true;
  }
  virtual ~Lane() = default;
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  const std::string& name() const { return name_; }
  const ShimChannel& channel() const { return shim_; }
  bool to_host() const { return to_host_; }

  virtual bool Advance() = 0;  // whether anything moved
  virtual bool idle() const = 0;
  virtual std::string State() const = 0;

 protected:
  // Bytes that shim_.Next() gave have moved, from then or later.
  void MoveThroughShim(size_t bytes, double from);

  ShimChannel& shim_;

 private:
  std::string name_;
  bool to_host_;
};

// The buffers in the cores of a row or of a column, which a lane fills all at once.
class Broadcast {
 public:
  void Add(Fifo& core_buffers) { consumers_.push_back(&core_buffers); }
  bool blocked() const;
  // Moves a tile that is there from `from` on; when it has arrived.
  double Move(const uint8_t* tile, size_t bytes, double from);
  std::string State() const;  // who blocks, if anyone

 private:
  Stream stream_;
  std::vector<Fifo*> consumers_;
};

// A or B: shim, memory tile, broadcast to the cores of a row or of a column.
class InputLane final : public Lane {
 public:
  InputLane(std::string name, ShimChannel& source, size_t tile_bytes)
      : Lane(std::move(name), source, false), memory_(kFifoDepth, tile_bytes) {}

  Broadcast cores;
  bool Advance() override;
  bool idle() const override { return memory_.empty() && filled_ == 0 && shim_.idle(); }
  std::string State() const override;

 private:
  bool Fill();
  bool Send();

  Fifo memory_;
  size_t filled_ = 0;  // bytes of the tile that is coming in
};

// C of a column: the tiles of its four cores, joined in the memory tile in the order of the rows.
class OutputLane final : public Lane {
 public:
  OutputLane(std::string name, ShimChannel& sink, size_t tile_bytes);

  void AddProducer(Fifo& core_buffers) { producers_.push_back(&core_buffers); }
  bool Advance() override;
  bool idle() const override;
  std::string State() const override;

 private:
  bool Collect();
  bool Drain();

  std::vector<Fifo> parts_;  // of the joined objects, one for each core row
  std::vector<Stream> collect_;
  std::vector<Fifo*> producers_;
  size_t drained_ = 0;  // bytes of the object that is going out
};

std::string Tiles(const Fifo& fifo);  // "1 of 2"

}  // namespace jax_xdna
