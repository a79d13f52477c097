#include "simulator.h"

#include <algorithm>
#include <deque>

#include "core.h"
#include "host/kernels.h"
#include "isa.h"
#include "lanes.h"
#include "shim.h"
#include "timing.h"

namespace jax_xdna {

// The array's controller and the array itself, wired as the packed design is.
class Simulator::Controller {
 public:
  explicit Controller(const ArrayDesign& design);
  Report Run(const Txn& txn, const std::vector<Argument>& arguments);

 private:
  void Execute(const TxnOp& op, const HostMemory& memory);
  void Wait(const TxnOp& op);
  void Advance();  // until nothing can move
  void Finish();
  std::string State() const;
  Report Measured() const;

  Shim& ShimAt(int column);
  Core& CoreAt(int column, int row);

  ArrayDesign design_;
  int columns_;
  Timing timing_;
  double now_ = 0;      // of the controller; runs on from dispatch to dispatch
  double started_ = 0;  // this dispatch
  // Lanes hold references to their neighbours: deques do not move what they hold.
  std::deque<Shim> shims_;
  std::deque<Core> cores_;  // [column][core row]
  std::deque<InputLane> inputs_;
  std::deque<OutputLane> outputs_;
};

Simulator::Controller::Controller(const ArrayDesign& design)
    : design_(design),
      columns_(design.arch == Arch::kNpu1 ? 4 : 8),
      timing_(TimingOf(design.arch, design.numerics)) {
  const Tile& tile = design.tile;
  const auto refuse = [](const std::string& what, int got, int multiple) {
    if (got <= 0 || got % multiple != 0) {
      throw std::invalid_argument("tile " + what + " " + std::to_string(got) +
                                  ": the kernel takes multiples of " + std::to_string(multiple));
    }
  };
  refuse("m", tile.m, packed_gemm::kBlock);
  refuse("k", tile.k, packed_gemm::kDepth);
  refuse("n", tile.n, packed_gemm::kBlock);
  refuse("c_buffers", tile.c_buffers, 1);
  if (design.arch == Arch::kNpu1 && design.numerics == Numerics::kBFP16) {
    throw std::invalid_argument("npu1 has no bfp16 datapath");
  }
  for (int column = 0; column < columns_; ++column) {
    shims_.emplace_back(column);
    for (int row = 0; row < kCoreRows; ++row) {
      cores_.emplace_back(column, kFirstCoreRow + row, design);
    }
  }
  const int spacing = columns_ / kCoreRows;  // of the shims with an A lane
  for (int row = 0; row < kCoreRows; ++row) {
    inputs_.emplace_back("A " + std::to_string(row),
                         shims_[row * spacing].Channel(Direction::kMm2s, 0), cores_[0].a.bytes());
    for (int column = 0; column < columns_; ++column) {
      inputs_.back().AddConsumer(CoreAt(column, kFirstCoreRow + row).a);
    }
  }
  for (int column = 0; column < columns_; ++column) {
    const int channel = column % spacing == 0 ? 1 : 0;  // A has the first one where it enters
    inputs_.emplace_back("B " + std::to_string(column),
                         shims_[column].Channel(Direction::kMm2s, channel), cores_[0].b.bytes());
    outputs_.emplace_back("C " + std::to_string(column),
                          shims_[column].Channel(Direction::kS2mm, 0), cores_[0].c.bytes());
    for (int row = 0; row < kCoreRows; ++row) {
      inputs_.back().AddConsumer(CoreAt(column, kFirstCoreRow + row).b);
      outputs_.back().AddProducer(CoreAt(column, kFirstCoreRow + row).c);
    }
  }
}

Shim& Simulator::Controller::ShimAt(int column) {
  if (column < 0 || column >= columns_) {
    throw SimulationError("column " + std::to_string(column) + ": this array has " +
                          std::to_string(columns_));
  }
  return shims_[column];
}

Core& Simulator::Controller::CoreAt(int column, int row) {
  if (column < 0 || column >= columns_ || row < kFirstCoreRow || row >= kFirstCoreRow + kCoreRows) {
    throw SimulationError("a register of column " + std::to_string(column) + " row " +
                          std::to_string(row) + ", which the design does not use");
  }
  return cores_[column * kCoreRows + row - kFirstCoreRow];
}

void Simulator::Controller::Advance() {
  for (bool moved = true; moved;) {
    moved = false;
    for (InputLane& lane : inputs_) moved |= lane.Advance();
    for (Core& core : cores_) moved |= core.Advance();
    for (OutputLane& lane : outputs_) moved |= lane.Advance();
  }
}

std::string Simulator::Controller::State() const {
  std::string state;
  for (const InputLane& lane : inputs_) state += "\n  " + lane.State();
  for (const OutputLane& lane : outputs_) state += "\n  " + lane.State();
  for (const Core& core : cores_) state += "\n  " + core.State();
  return state;
}

void Simulator::Controller::Wait(const TxnOp& op) {
  if (op.row != 0) throw SimulationError("a wait for a token of row " + std::to_string(op.row));
  ShimChannel& channel = ShimAt(op.column).Channel(op.direction, op.channel);
  Advance();
  const std::optional<double> token = channel.TakeToken();
  if (!token) {
    throw SimulationError("deadlock: no token will come from " + channel.name() + State());
  }
  now_ = std::max(now_, *token);
}

void Simulator::Controller::Execute(const TxnOp& op, const HostMemory& memory) {
  now_ += kOperationSeconds * timing_.clock;
  const int column = RegisterColumn(op.address);
  const int row = RegisterRow(op.address);
  const uint32_t offset = RegisterOffset(op.address);
  if (op.kind == TxnKind::kWait) return Wait(op);
  if (op.kind == TxnKind::kWrite && row != 0)
    return CoreAt(column, row).Write(offset, op.value, now_);
  if (row != 0)
    throw SimulationError("a block or masked write outside the shim, row " + std::to_string(row));
  Shim& shim = ShimAt(column);
  switch (op.kind) {
    case TxnKind::kWrite:
      return shim.Write(offset, op.value, memory, now_);
    case TxnKind::kBlockWrite:
      return shim.WriteBlock(offset, op.block, design_.arch);
    case TxnKind::kMaskWrite:
      return shim.MaskWrite(offset, op.value, op.mask);
    case TxnKind::kPatch:
      return shim.Patch(offset, memory.AddressOf(op.argument, op.argument_offset),
                        op.argument_offset);
    case TxnKind::kWait:
      break;
  }
}

// The host reads C when the stream has ended: all of it must be known to be there. And the next
// dispatch must find an array at rest.
void Simulator::Controller::Finish() {
  for (OutputLane& lane : outputs_) {
    if (!lane.channel().awaited()) {
      throw SimulationError(lane.name() + ": the stream ends without waiting for it");
    }
  }
  Advance();
  for (InputLane& lane : inputs_) {
    if (lane.channel().has_token()) {
      throw SimulationError(lane.name() + ": the stream ends with a token that nothing waits for");
    }
  }
  const auto idle = [](const auto& part) { return part.idle(); };
  if (!std::all_of(inputs_.begin(), inputs_.end(), idle) ||
      !std::all_of(outputs_.begin(), outputs_.end(), idle) ||
      !std::all_of(cores_.begin(), cores_.end(), idle)) {
    throw SimulationError("the stream ends and the array is not at rest" + State());
  }
}

Report Simulator::Controller::Measured() const {
  Report report;
  report.cycles = now_ - started_;
  report.clock_hz = timing_.clock;
  const auto add = [&](const auto& lane, int64_t& total) {
    const ShimChannel& channel = lane.channel();
    report.lanes.push_back({lane.name(), channel.bytes_moved, channel.busy});
    total += channel.bytes_moved;
  };
  for (const InputLane& lane : inputs_) add(lane, report.bytes_read);
  for (const OutputLane& lane : outputs_) add(lane, report.bytes_written);
  for (const Core& core : cores_) report.cores.push_back(core.Use());
  report.dram_cycles = static_cast<double>(report.bytes_read + report.bytes_written) /
                       timing_.dram_bandwidth * timing_.clock;
  return report;
}

Report Simulator::Controller::Run(const Txn& txn, const std::vector<Argument>& arguments) {
  if (txn.arch != design_.arch) {
    throw SimulationError("the stream is for another generation of the array than the design");
  }
  const FlushSubnormals mode;
  const HostMemory memory(arguments);
  started_ = now_;
  for (const TxnOp& op : txn.ops) Execute(op, memory);
  Finish();
  const Report report = Measured();
  for (Shim& shim : shims_) shim.EndDispatch();
  for (Core& core : cores_) core.EndDispatch();
  return report;
}

Simulator::Simulator(const ArrayDesign& design)
    : controller_(std::make_unique<Controller>(design)) {}
Simulator::~Simulator() = default;

Report Simulator::Run(const uint32_t* words, size_t count, const std::vector<Argument>& arguments) {
  return controller_->Run(DecodeTxn(words, count), arguments);
}

}  // namespace jax_xdna
