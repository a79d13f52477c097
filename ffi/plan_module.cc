#include "plan_module.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "predict.h"
#include "stream.h"

namespace nb = nanobind;

namespace jax_xdna {
namespace {

using TileTuple = std::tuple<int, int, int, int>;
using ShapeTuple = std::tuple<int64_t, int64_t, int64_t, int64_t>;

const std::map<std::string, TxnKind> kKinds = {{"write", TxnKind::kWrite},
                                               {"block_write", TxnKind::kBlockWrite},
                                               {"mask_write", TxnKind::kMaskWrite},
                                               {"wait", TxnKind::kWait},
                                               {"patch", TxnKind::kPatch}};

// One of two values by its name.
template <typename T>
T Choose(const char* what, const std::string& got, const char* first, T one, const char* second,
         T other) {
  if (got == first) return one;
  if (got == second) return other;
  throw std::invalid_argument(std::string(what) + " must be \"" + first + "\" or \"" + second +
                              "\", got \"" + got + "\"");
}

Arch ToArch(const std::string& name) {
  return Choose("arch", name, "npu1", Arch::kNpu1, "npu2", Arch::kNpu2);
}
Numerics ToNumerics(const std::string& name) {
  return Choose("numerics", name, "bf16", Numerics::kBF16, "bfp16", Numerics::kBFP16);
}
DType ToDType(const std::string& name) {
  return Choose("result", name, "f32", DType::kF32, "bf16", DType::kBF16);
}
Power ToPower(const std::string& name) {
  return Choose("power", name, "turbo", Power::kTurbo, "default", Power::kDefault);
}
Direction ToDirection(const std::string& name) {
  return Choose("direction", name, "S2MM", Direction::kS2mm, "MM2S", Direction::kMm2s);
}
const char* Name(Arch arch) { return arch == Arch::kNpu1 ? "npu1" : "npu2"; }
const char* Name(Direction direction) { return direction == Direction::kS2mm ? "S2MM" : "MM2S"; }

TileTuple ToTuple(const Tile& tile) { return {tile.m, tile.k, tile.n, tile.c_buffers}; }

nb::bytes ToBytes(const std::vector<uint32_t>& words) {
  return nb::bytes(words.data(), 4 * words.size());
}

nb::dict StepDict(const Step& step) {
  nb::dict d;
  static const char* const kNames[] = {"push",        "wait",      "runtime_words", "go_locks",
                                       "memory_lock", "memory_bd", "memory_push"};
  d["kind"] = kNames[step.kind];
  if (step.kind == Step::kRuntimeWords || step.kind == Step::kGoLocks) return d;
  d["column"] = step.column;
  if (step.kind == Step::kMemoryLock) {
    d["lock"] = step.lock;
    d["value"] = step.repeats;
    return d;
  }
  if (step.kind == Step::kMemoryBd) {
    d["bd"] = step.bd;
    d["words"] = step.memory.length;
    d["steps"] = step.memory.steps;
    d["stride"] = step.memory.stride;
    d["acquire"] = step.memory.acquire;
    d["release"] = step.memory.release;
    return d;
  }
  d["direction"] = Name(step.direction);
  d["channel"] = step.channel;
  if (step.kind == Step::kWait) return d;
  d["bd"] = step.bd;
  d["repeats"] = step.repeats;
  if (step.kind == Step::kMemoryPush) return d;
  d["buffer"] = std::string(1, "ABC"[static_cast<int>(step.buffer)]);
  d["write_bd"] = step.write_bd;
  d["offset"] = step.offset;
  d["bytes"] = step.bytes;
  d["token"] = step.token;
  return d;
}

nb::dict SecondsDict(const Prediction& predicted) {
  nb::dict d;
  d["dispatch"] = predicted.dispatch;
  d["compute"] = predicted.compute;
  d["dram"] = predicted.dram;
  d["lanes"] = predicted.lanes;
  d["edges"] = predicted.edges;
  d["total"] = predicted.total;
  return d;
}

nb::dict PlanDict(const std::string& arch, int64_t m, int64_t k, int64_t n,
                  const std::string& numerics, const std::optional<TileTuple>& wanted,
                  const std::string& result, bool resident, const std::string& power) {
  Tile tile;
  if (wanted) std::tie(tile.m, tile.k, tile.n, tile.c_buffers) = *wanted;
  const GemmPlan plan =
      PlanGemm(ToArch(arch), m, k, n, ToNumerics(numerics), wanted ? &tile : nullptr,
               ToDType(result), resident, ToPower(power));
  nb::dict d;
  d["arch"] = arch;
  d["numerics"] = numerics;
  d["result"] = result;
  d["m"] = m;
  d["k"] = k;
  d["n"] = n;
  d["transposed"] = plan.transposed;
  d["tile"] = ToTuple(plan.tile);
  d["micro_tile"] = nb::make_tuple(plan.micro.r, plan.micro.s, plan.micro.t);
  d["columns"] = plan.columns;
  d["padded"] = nb::make_tuple(plan.rows, plan.depth, plan.cols);
  d["tiles"] = nb::make_tuple(plan.row_tiles, plan.depth_tiles, plan.col_tiles);
  static const char* const kFeeds[] = {"fifo", "held", "ring"};
  d["feed"] = kFeeds[static_cast<int>(plan.feed)];
  d["columns_outer"] = plan.columns_outer;
  d["buffer_bytes"] = nb::make_tuple(plan.a_bytes, plan.b_bytes, plan.c_bytes);
  d["l1_bytes"] = plan.l1_bytes;
  d["l2_bytes"] = plan.l2_bytes;
  d["useful_share"] = plan.useful_share();
  d["seconds"] = SecondsDict(plan.predicted);
  d["dram_bytes"] = plan.predicted.dram_bytes;
  d["chunks_along"] = plan.chunks_along_rows != plan.transposed ? "m" : "n";
  nb::list chunks, steps;
  for (const Chunk& chunk : plan.chunks) chunks.append(nb::make_tuple(chunk.start, chunk.size));
  for (const Step& step : plan.steps) steps.append(StepDict(step));
  d["chunks"] = chunks;
  d["steps"] = steps;
  d["stream"] = ToBytes(StreamOf(plan));
  return d;
}

TileTuple BestTileTuple(const std::string& arch, const std::vector<ShapeTuple>& shapes,
                        const std::string& numerics, const std::string& result, bool resident,
                        const std::string& power) {
  std::vector<GemmShape> list;
  for (const auto& [m, k, n, calls] : shapes) list.push_back({m, k, n, calls});
  return ToTuple(BestTile(ToArch(arch), list, ToNumerics(numerics), ToDType(result), resident,
                          ToPower(power)));
}

nb::dict ConstantDict(const std::string& arch, const std::string& numerics,
                      const std::string& power) {
  nb::dict d;
  for (const ModelConstant& c :
       ModelConstants(ToArch(arch), ToNumerics(numerics), ToPower(power))) {
    d[c.name.c_str()] = nb::make_tuple(c.value, c.source);
  }
  return d;
}

// The model on another's design. Sizes of a tile and of the array, in the words of plan.h.
nb::dict PredictDesign(const std::tuple<int64_t, int64_t, int64_t>& tiles,
                       const std::tuple<int, int, int, int>& tile,
                       const std::tuple<int, int>& array, const std::tuple<double, double>& items,
                       const std::tuple<double, double, double>& bytes,
                       const std::tuple<double, double, double, double>& rates, bool rounds) {
  Workload work;
  std::tie(work.row_tiles, work.depth_tiles, work.col_tiles) = tiles;
  std::tie(work.m, work.k, work.n, work.c_buffers) = tile;
  std::tie(work.core_rows, work.columns) = array;
  std::tie(work.b_item, work.c_item) = items;
  work.rounds_c = rounds;
  std::tie(work.a_bytes, work.b_bytes, work.c_bytes) = bytes;
  work.first_bytes = std::max(2 * work.m * work.k, work.b_item * work.k * work.n);
  Rates machine;
  std::tie(machine.clock, machine.dram_bandwidth, machine.dispatch, machine.macs_per_cycle) = rates;
  return SecondsDict(Predict(work, machine));
}

nb::dict OpDict(const TxnOp& op) {
  nb::dict d;
  for (const auto& [name, kind] : kKinds) {
    if (kind == op.kind) d["kind"] = name;
  }
  d["words"] = op.words();
  if (op.kind == TxnKind::kWait) {
    d["column"] = op.column;
    d["row"] = op.row;
    d["direction"] = Name(op.direction);
    d["channel"] = op.channel;
    return d;
  }
  d["address"] = op.address;
  if (op.kind == TxnKind::kWrite || op.kind == TxnKind::kMaskWrite) d["value"] = op.value;
  if (op.kind == TxnKind::kMaskWrite) d["mask"] = op.mask;
  if (op.kind == TxnKind::kBlockWrite) d["block"] = op.block;
  if (op.kind == TxnKind::kPatch) {
    d["argument"] = op.argument;
    d["argument_offset"] = op.argument_offset;
  }
  return d;
}

TxnOp OpFrom(const nb::dict& d) {
  TxnOp op;
  const auto kind = kKinds.find(nb::cast<std::string>(d["kind"]));
  if (kind == kKinds.end()) throw std::invalid_argument("unknown kind of operation");
  op.kind = kind->second;
  if (op.kind == TxnKind::kWait) {
    op.column = nb::cast<int>(d["column"]);
    op.row = nb::cast<int>(d["row"]);
    op.direction = ToDirection(nb::cast<std::string>(d["direction"]));
    op.channel = nb::cast<int>(d["channel"]);
    return op;
  }
  op.address = nb::cast<uint32_t>(d["address"]);
  if (d.contains("value")) op.value = nb::cast<uint32_t>(d["value"]);
  if (d.contains("mask")) op.mask = nb::cast<uint32_t>(d["mask"]);
  if (d.contains("block")) op.block = nb::cast<std::vector<uint32_t>>(d["block"]);
  if (d.contains("argument")) op.argument = nb::cast<uint32_t>(d["argument"]);
  if (d.contains("argument_offset")) {
    op.argument_offset = nb::cast<uint64_t>(d["argument_offset"]);
  }
  return op;
}

nb::bytes Encode(const std::string& arch, const std::vector<nb::dict>& ops) {
  Txn txn;
  txn.arch = ToArch(arch);
  for (const nb::dict& op : ops) txn.ops.push_back(OpFrom(op));
  return ToBytes(EncodeTxn(txn));
}

Txn FromBytes(const nb::bytes& stream) {
  if (stream.size() % 4 != 0) {
    throw std::invalid_argument("instruction stream of " + std::to_string(stream.size()) +
                                " bytes, which is no whole number of words");
  }
  std::vector<uint32_t> words(stream.size() / 4);
  if (!words.empty()) std::memcpy(words.data(), stream.data(), stream.size());
  return DecodeTxn(words.data(), words.size());
}

nb::tuple Decode(const nb::bytes& stream) {
  const Txn txn = FromBytes(stream);
  nb::list ops;
  for (const TxnOp& op : txn.ops) ops.append(OpDict(op));
  return nb::make_tuple(Name(txn.arch), ops);
}

std::vector<std::string> DescribeStream(const nb::bytes& stream) {
  std::vector<std::string> lines;
  for (const TxnOp& op : FromBytes(stream).ops) lines.push_back(Describe(op));
  return lines;
}

}  // namespace

void BindPlan(nb::module_& m) {
  m.def("plan", &PlanDict, nb::arg("arch"), nb::arg("m"), nb::arg("k"), nb::arg("n"),
        nb::arg("numerics") = "bf16", nb::arg("tile") = nb::none(), nb::arg("result") = "f32",
        nb::arg("resident") = false, nb::arg("power") = "turbo");
  m.def("best_tile", &BestTileTuple, nb::arg("arch"), nb::arg("shapes"),
        nb::arg("numerics") = "bf16", nb::arg("result") = "f32", nb::arg("resident") = false,
        nb::arg("power") = "turbo");
  m.def("model_constants", &ConstantDict, nb::arg("arch"), nb::arg("numerics") = "bf16",
        nb::arg("power") = "turbo");
  m.def("predict_design", &PredictDesign, nb::kw_only(), nb::arg("tiles"), nb::arg("tile"),
        nb::arg("array"), nb::arg("items"), nb::arg("bytes"), nb::arg("rates"), nb::arg("rounds"));
  m.def("encode_stream", &Encode, nb::arg("arch"), nb::arg("ops"));
  m.def("decode_stream", &Decode, nb::arg("stream"));
  m.def("describe_stream", &DescribeStream, nb::arg("stream"));
}

}  // namespace jax_xdna
