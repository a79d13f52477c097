#include "simulator.h"

#include <algorithm>
#include <deque>

#include "core.h"
#include "host/kernels.h"
#include "isa.h"
#include "lanes.h"
#include "resident.h"
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
  ResidentLane& ResidentAt(int column);

  ArrayDesign design_;
  int columns_;
  Timing timing_;
  double now_ = 0;      // of the controller; runs on from dispatch to dispatch
  double started_ = 0;  // this dispatch
  // Lanes hold references to their neighbours: deques do not move what they hold.
  std::deque<Shim> shims_;
  std::deque<Core> cores_;  // [column][core row]
  std::vector<std::unique_ptr<Lane>> lanes_;
  std::vector<ResidentLane*> residents_;  // by column; null where none enters
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
  residents_.resize(columns_);
  const int spacing = columns_ / kCoreRows;  // of the shims with an A lane
  const auto broadcast = [&](auto& lane, int row) {
    for (int column = 0; column < columns_; ++column) {
      lane.cores.Add(CoreAt(column, kFirstCoreRow + row).a);
    }
  };
  for (int row = 0; row < kCoreRows; ++row) {
    const std::string name = "A " + std::to_string(row);
    const int column = row * spacing;
    const size_t bytes = cores_[0].a.bytes();
    if (design.resident) {
      auto lane =
          std::make_unique<ResidentLane>(name, shims_[column].Channel(Direction::kMm2s, 1), bytes);
      broadcast(*lane, row);
      residents_[column] = lane.get();
      lanes_.push_back(std::move(lane));
    } else {
      auto lane =
          std::make_unique<InputLane>(name, shims_[column].Channel(Direction::kMm2s, 0), bytes);
      broadcast(*lane, row);
      lanes_.push_back(std::move(lane));
    }
  }
  for (int column = 0; column < columns_; ++column) {
    // A fifo of A has the first channel where it enters.
    const int channel = !design.resident && column % spacing == 0 ? 1 : 0;
    auto b = std::make_unique<InputLane>("B " + std::to_string(column),
                                         shims_[column].Channel(Direction::kMm2s, channel),
                                         cores_[0].b.bytes());
    for (int row = 0; row < kCoreRows; ++row) b->cores.Add(CoreAt(column, kFirstCoreRow + row).b);
    lanes_.push_back(std::move(b));
  }
  for (int column = 0; column < columns_; ++column) {
    auto c = std::make_unique<OutputLane>("C " + std::to_string(column),
                                          shims_[column].Channel(Direction::kS2mm, 0),
                                          cores_[0].c.bytes());
    for (int row = 0; row < kCoreRows; ++row) c->AddProducer(CoreAt(column, kFirstCoreRow + row).c);
    lanes_.push_back(std::move(c));
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

ResidentLane& Simulator::Controller::ResidentAt(int column) {
  if (column < 0 || column >= columns_ || residents_[column] == nullptr) {
    throw SimulationError("a register of the memory tile of column " + std::to_string(column) +
                          ", which the design does not use");
  }
  return *residents_[column];
}

void Simulator::Controller::Advance() {
  for (bool moved = true; moved;) {
    moved = false;
    for (const auto& lane : lanes_) moved |= lane->Advance();
    for (Core& core : cores_) moved |= core.Advance();
  }
}

std::string Simulator::Controller::State() const {
  std::string state;
  for (const auto& lane : lanes_) state += "\n  " + lane->State();
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
  if (row >= kFirstCoreRow && op.kind == TxnKind::kWrite) {
    return CoreAt(column, row).Write(offset, op.value, now_);
  }
  if (row == 1) {
    ResidentLane& lane = ResidentAt(column);
    if (op.kind == TxnKind::kWrite) return lane.Write(offset, op.value, now_);
    if (op.kind == TxnKind::kBlockWrite) return lane.WriteBlock(offset, op.block);
    if (op.kind == TxnKind::kMaskWrite) return lane.MaskWrite(offset, op.value, op.mask);
  }
  if (row != 0) {
    throw SimulationError("an operation on row " + std::to_string(row) +
                          " that has no sense there");
  }
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
  for (const auto& lane : lanes_) {
    if (lane->to_host() && !lane->channel().awaited()) {
      throw SimulationError(lane->name() + ": the stream ends without waiting for it");
    }
  }
  Advance();
  for (const auto& lane : lanes_) {
    if (lane->channel().has_token()) {
      throw SimulationError(lane->name() + ": the stream ends with a token that nothing waits for");
    }
  }
  if (!std::all_of(lanes_.begin(), lanes_.end(), [](const auto& lane) { return lane->idle(); }) ||
      !std::all_of(cores_.begin(), cores_.end(), [](const Core& core) { return core.idle(); })) {
    throw SimulationError("the stream ends and the array is not at rest" + State());
  }
}

Report Simulator::Controller::Measured() const {
  Report report;
  report.cycles = now_ - started_;
  report.clock_hz = timing_.clock;
  for (const auto& lane : lanes_) {
    const ShimChannel& channel = lane->channel();
    report.lanes.push_back({lane->name(), channel.bytes_moved, channel.busy});
    (lane->to_host() ? report.bytes_written : report.bytes_read) += channel.bytes_moved;
  }
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
  for (ResidentLane* lane : residents_) {
    if (lane != nullptr) lane->EndDispatch();
  }
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
