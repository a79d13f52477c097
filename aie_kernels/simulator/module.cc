// The simulator as a Python module.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include "simulator.h"

namespace nb = nanobind;

namespace jax_xdna {
namespace {

template <typename T>
using Array = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

ArrayDesign Design(const std::string& arch, const std::string& numerics, int m, int k, int n,
                   int c_buffers, const std::string& result, bool resident) {
  ArrayDesign design;
  if (arch != "npu1" && arch != "npu2") {
    throw std::invalid_argument("arch must be 'npu1' or 'npu2', got '" + arch + "'");
  }
  if (numerics != "bf16" && numerics != "bfp16") {
    throw std::invalid_argument("numerics must be 'bf16' or 'bfp16', got '" + numerics + "'");
  }
  if (result != "f32" && result != "bf16") {
    throw std::invalid_argument("result must be 'f32' or 'bf16', got '" + result + "'");
  }
  design.c_dtype = result == "f32" ? DType::kF32 : DType::kBF16;
  design.arch = arch == "npu1" ? Arch::kNpu1 : Arch::kNpu2;
  design.numerics = numerics == "bf16" ? Numerics::kBF16 : Numerics::kBFP16;
  design.tile.m = m;
  design.tile.k = k;
  design.tile.n = n;
  design.tile.c_buffers = c_buffers;
  design.resident = resident;
  return design;
}

Report Run(Simulator& simulator, Array<const uint32_t> stream, Array<const uint16_t> a,
           Array<const uint16_t> b, Array<uint8_t> c) {
  // Streams name buffers and say nothing about their direction; those of a plan only read A and B.
  const std::vector<Argument> arguments = {{const_cast<uint16_t*>(a.data()), a.nbytes()},
                                           {const_cast<uint16_t*>(b.data()), b.nbytes()},
                                           {c.data(), c.nbytes()}};
  const nb::gil_scoped_release release;
  return simulator.Run(stream.data(), stream.size(), arguments);
}

NB_MODULE(_simulator, m) {
  nb::exception<SimulationError>(m, "SimulationError", PyExc_RuntimeError);
  nb::class_<Report>(m, "Report")
      .def_ro("cycles", &Report::cycles)
      .def_ro("dram_cycles", &Report::dram_cycles)
      .def_ro("clock_hz", &Report::clock_hz)
      .def_ro("bytes_read", &Report::bytes_read)
      .def_ro("bytes_written", &Report::bytes_written)
      .def("__str__", &Report::Table);
  nb::class_<Simulator>(m, "Simulator")
      .def(
          "__init__",
          [](Simulator* self, const std::string& arch, const std::string& numerics, int m, int k,
             int n, int c_buffers, const std::string& result, bool resident) {
            new (self) Simulator(Design(arch, numerics, m, k, n, c_buffers, result, resident));
          },
          nb::arg("arch"), nb::arg("numerics"), nb::arg("m"), nb::arg("k"), nb::arg("n"),
          nb::arg("c_buffers"), nb::arg("result") = "f32", nb::arg("resident") = false)
      .def("run", &Run, nb::arg("stream"), nb::arg("a"), nb::arg("b"), nb::arg("c"));
}

}  // namespace
}  // namespace jax_xdna
