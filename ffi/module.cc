// The Python side of the extension: jax_xdna._ffi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "counters.h"
#include "device.h"
#include "handler.h"
#include "isa.h"
#include "plan_module.h"

namespace nb = nanobind;

namespace jax_xdna {
namespace {

nb::dict Registrations() {
  nb::dict targets;
  targets["jax_xdna_gemm"] = nb::capsule(reinterpret_cast<void*>(JaxXdnaGemm));
  return targets;
}

std::vector<std::pair<std::string, std::string>> DeviceList() {
  std::vector<std::pair<std::string, std::string>> list;
  for (const Device* device : Devices()) list.emplace_back(device->name(), device->description());
  return list;
}

nb::list CounterList() {
  nb::list list;
  for (const auto& [key, row] : ProcessCounters().Snapshot()) {
    nb::dict entry;
    entry["device"] = key.device;
    entry["layout"] = key.layout;
    entry["numerics"] = key.numerics;
    entry["batch"] = key.batch;
    entry["m"] = key.m;
    entry["k"] = key.k;
    entry["n"] = key.n;
    entry["calls"] = row.calls;
    entry["threads"] = row.threads;
    entry["flops"] = row.flops;
    entry["seconds"] = row.seconds;
    entry["pack_a"] = row.stages.pack_a;
    entry["pack_b"] = row.stages.pack_b;
    entry["run"] = row.stages.run;
    entry["unpack"] = row.stages.unpack;
    list.append(entry);
  }
  return list;
}

}  // namespace
}  // namespace jax_xdna

NB_MODULE(_ffi, m) {
  m.def("registrations", &jax_xdna::Registrations);
  m.def("devices", &jax_xdna::DeviceList);
  m.def("counters", &jax_xdna::CounterList);
  m.def("cpu_features", &jax_xdna::CpuFeatures);
  m.def("isa", [] { return std::string(jax_xdna::ActiveIsa().name); });
  jax_xdna::BindPlan(m);
}
