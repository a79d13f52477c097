#include "handler.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

#include "arena.h"
#include "counters.h"
#include "device.h"
#include "run.h"

namespace jax_xdna {

namespace ffi = xla::ffi;

Counters& ProcessCounters() {
  static Counters* counters = new Counters;
  return *counters;
}

namespace {

// Below this a helper's wake-up costs more than it saves.
constexpr double kSerialFlops = 4e6;

std::string ShapeText(std::string_view name, const ffi::AnyBuffer& buffer) {
  std::string text = std::string(name) + " (";
  for (size_t i = 0; i < buffer.dimensions().size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(buffer.dimensions()[i]);
  }
  return text + ")";
}

DType ToDType(std::string_view name, const ffi::AnyBuffer& buffer) {
  switch (buffer.element_type()) {
    case ffi::DataType::F32:
      return DType::kF32;
    case ffi::DataType::BF16:
      return DType::kBF16;
    default:
      throw std::invalid_argument("jax_xdna gemm: " + std::string(name) +
                                  " must be float32 or bfloat16");
  }
}

// An operand as the caller stored it: (batch,) rows, depth; or depth, rows when transposed.
struct Stored {
  Operand operand;
  int64_t batch = -1;  // -1: no batch dimension
  int64_t rows = 0;
  int64_t depth = 0;
};

Stored ReadOperand(std::string_view name, const ffi::AnyBuffer& buffer, bool rows_first) {
  const auto dims = buffer.dimensions();
  if (dims.size() != 2 && dims.size() != 3) {
    throw std::invalid_argument("jax_xdna gemm: " + ShapeText(name, buffer) +
                                " must have rank 2, or rank 3 with a leading batch");
  }
  const int64_t outer = dims[dims.size() - 2];
  const int64_t inner = dims[dims.size() - 1];
  Stored stored;
  stored.rows = rows_first ? outer : inner;
  stored.depth = rows_first ? inner : outer;
  stored.operand.data = buffer.untyped_data();
  stored.operand.dtype = ToDType(name, buffer);
  stored.operand.row_stride = rows_first ? inner : 1;
  stored.operand.depth_stride = rows_first ? 1 : inner;
  if (dims.size() == 3) {
    stored.batch = dims[0];
    stored.operand.batch_stride = outer * inner;
  }
  return stored;
}

[[noreturn]] void UnknownAttribute(std::string_view name, std::string_view got,
                                   std::string_view choices) {
  throw std::invalid_argument("jax_xdna gemm: " + std::string(name) + " is '" + std::string(got) +
                              "'; it must be one of " + std::string(choices));
}

Gemm Describe(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b, ffi::AnyBuffer& c,
              std::string_view layout, std::string_view numerics, std::string_view rounding) {
  if (layout != "NN" && layout != "NT" && layout != "TN" && layout != "TT") {
    UnknownAttribute("layout", layout, "NN, NT, TN, TT");
  }
  const Stored left = ReadOperand("a", a, layout[0] == 'N');
  const Stored right = ReadOperand("b", b, layout[1] == 'T');
  const std::string both =
      ShapeText("a", a) + " and " + ShapeText("b", b) + " with layout " + std::string(layout);
  if (left.depth != right.depth) {
    throw std::invalid_argument("jax_xdna gemm: " + both + " differ in K: " +
                                std::to_string(left.depth) + " and " + std::to_string(right.depth));
  }
  if (left.batch >= 0 && right.batch >= 0 && left.batch != right.batch) {
    throw std::invalid_argument("jax_xdna gemm: " + both + " differ in their batch size");
  }
  Gemm gemm;
  const bool batched = left.batch >= 0 || right.batch >= 0;
  gemm.batch = left.batch >= 0 ? left.batch : (right.batch >= 0 ? right.batch : 1);
  gemm.m = left.rows;
  gemm.k = left.depth;
  gemm.n = right.rows;
  gemm.a = left.operand;
  gemm.b = right.operand;
  gemm.c = c.untyped_data();
  gemm.c_dtype = ToDType("c", c);
  const auto dims = c.dimensions();
  const size_t lead = batched ? 1 : 0;
  if (dims.size() != lead + 2 || (batched && dims[0] != gemm.batch) || dims[lead] != gemm.m ||
      dims[lead + 1] != gemm.n) {
    throw std::invalid_argument("jax_xdna gemm: " + ShapeText("c", c) + " does not fit " + both);
  }
  if (numerics == "bf16") {
    gemm.numerics = Numerics::kBF16;
  } else if (numerics == "bfp16") {
    gemm.numerics = Numerics::kBFP16;
  } else {
    UnknownAttribute("numerics", numerics, "bf16, bfp16");
  }
  if (rounding == "nearest") {
    gemm.rounding = Rounding::kNearest;
  } else if (rounding == "floor") {
    gemm.rounding = Rounding::kFloor;
  } else {
    UnknownAttribute("rounding", rounding, "nearest, floor");
  }
  return gemm;
}

// XLA's own pool: a second one would fight it for the cores. Valid until the handler returns.
class PoolHelpers final : public Helpers {
 public:
  PoolHelpers(ffi::ThreadPool& pool, int count) : pool_(pool), count_(count) {}
  int count() const override { return count_; }
  void Offer(WorkRef work) override {
    pool_.Schedule([work = std::move(work)] { Help(*work); });
  }

 private:
  ffi::ThreadPool& pool_;
  int count_;
};

void Multiply(ffi::ThreadPool& pool, const ffi::AnyBuffer& a, const ffi::AnyBuffer& b,
              ffi::AnyBuffer& c, std::string_view layout, std::string_view numerics,
              std::string_view rounding, std::string_view device_name) {
  const auto start = std::chrono::steady_clock::now();
  const Gemm gemm = Describe(a, b, c, layout, numerics, rounding);
  Device& device = FindDevice(device_name);
  CounterRow row;
  row.calls = 1;
  row.flops = gemm.flops();
  if (gemm.batch * gemm.m * gemm.n == 0 || gemm.k == 0) {
    std::memset(c.untyped_data(), 0, c.size_bytes());
  } else {
    AdviseHugePages(c.untyped_data(), c.size_bytes());
    const int threads = static_cast<int>(std::max<int64_t>(1, pool.num_threads()));
    PoolHelpers helpers(pool, gemm.flops() < kSerialFlops ? 0 : threads - 1);
    const RunResult result = RunToEnd(device.Begin(gemm, helpers.count() + 1), helpers);
    row.threads = result.threads;
    row.stages = result.times;
  }
  row.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  ProcessCounters().Add({std::string(device_name), std::string(layout), std::string(numerics),
                         gemm.batch, gemm.m, gemm.k, gemm.n},
                        row);
}

ffi::Error Handle(ffi::ThreadPool pool, ffi::AnyBuffer a, ffi::AnyBuffer b,
                  ffi::Result<ffi::AnyBuffer> c, std::string_view layout, std::string_view numerics,
                  std::string_view rounding, std::string_view device) {
  try {
    Multiply(pool, a, b, *c, layout, numerics, rounding, device);
    return ffi::Error::Success();
  } catch (const std::invalid_argument& error) {
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, error.what());
  } catch (const DeviceError& error) {
    return ffi::Error(ffi::ErrorCode::kUnavailable, std::string("jax_xdna gemm: ") + error.what());
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                      "jax_xdna gemm: no memory for the packed operands of " + ShapeText("a", a) +
                          " and " + ShapeText("b", b));
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string("jax_xdna gemm: ") + error.what());
  }
}

}  // namespace
}  // namespace jax_xdna

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxXdnaGemm, jax_xdna::Handle,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<std::string_view>("layout")
                                  .Attr<std::string_view>("numerics")
                                  .Attr<std::string_view>("rounding")
                                  .Attr<std::string_view>("device"));
