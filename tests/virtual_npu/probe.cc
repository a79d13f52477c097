// One product through XRT, right or with a mistake of synchronisation:
//   probe XCLBIN ARCH m k n C_BUFFERS [--no-input-sync | --dirty-output | --no-output-sync]
// Exit code 0 when C has the emulated device's bits, 2 when not, 3 when the command failed,
// 4 when XRT threw.
#include <xrt/xrt_bo.h>
#include <xrt/xrt_device.h>
#include <xrt/xrt_hw_context.h>
#include <xrt/xrt_kernel.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "simulator_support.h"

using namespace jax_xdna;

namespace {

int Probe(const std::vector<std::string>& words) {
  const std::string mistake = words.back().rfind("--", 0) == 0 ? words.back() : "";
  const Arch arch = words.at(1) == "npu1" ? Arch::kNpu1 : Arch::kNpu2;
  const auto number = [&](int at) { return std::stoi(words.at(at)); };
  const Tile tile = {number(2), number(3), number(4), number(5)};
  Dispatch product(arch, Numerics::kBF16, tile, 200, 130, 300, 1);
  const std::vector<uint32_t> stream = product.Stream();

  xrt::device device(0);
  xrt::xclbin xclbin(words.at(0));
  device.register_xclbin(xclbin);
  const xrt::hw_context context(device, xclbin.get_uuid());
  xrt::kernel kernel(context, "MLIR_AIE");
  const auto host_only = [&](int argument, size_t bytes) {
    return xrt::bo(device, bytes, XRT_BO_FLAGS_HOST_ONLY, kernel.group_id(argument));
  };
  xrt::bo code(device, stream.size() * 4, XCL_BO_FLAGS_CACHEABLE, kernel.group_id(1));
  xrt::bo a = host_only(3, product.a.size() * 2);
  xrt::bo b = host_only(4, product.b.size() * 2);
  xrt::bo c = host_only(5, product.plan.c_bytes);
  std::memcpy(code.map(), stream.data(), stream.size() * 4);
  std::memcpy(a.map(), product.a.data(), product.a.size() * 2);
  std::memcpy(b.map(), product.b.data(), product.b.size() * 2);
  code.sync(XCL_BO_SYNC_BO_TO_DEVICE);
  a.sync(XCL_BO_SYNC_BO_TO_DEVICE);
  if (mistake != "--no-input-sync") b.sync(XCL_BO_SYNC_BO_TO_DEVICE);
  if (mistake == "--dirty-output") std::memset(c.map(), 1, 64);
  xrt::run run = kernel(3, code, static_cast<uint32_t>(stream.size()), a, b, c);
  const ert_cmd_state state = run.wait(60000);
  if (state != ERT_CMD_STATE_COMPLETED) {
    std::printf("state %d\n", state);
    return 3;
  }
  if (mistake != "--no-output-sync") c.sync(XCL_BO_SYNC_BO_FROM_DEVICE);
  product.c.assign(c.map<uint8_t*>(), c.map<uint8_t*>() + product.plan.c_bytes);
  const int64_t wrong = product.Wrong();
  std::printf("%lld elements differ from the emulated device\n", static_cast<long long>(wrong));
  return wrong == 0 ? 0 : 2;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    return Probe({arguments + 1, arguments + count});
  } catch (const std::exception& error) {
    std::printf("%s\n", error.what());
    return 4;
  }
}
