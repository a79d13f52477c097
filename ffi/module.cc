// The Python side of the extension: jax_xdna._ffi.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "counters.h"
#include "device.h"
#include "handler.h"
#include "isa.h"
#include "plan_module.h"
#include "tiles.h"

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

using Tile = std::array<int64_t, 4>;

// Tiles in a matrix of this size, down and across.
std::pair<int64_t, int64_t> TileCounts(const TileShape& s, int64_t rows, int64_t columns) {
  return {(rows + s.rows - 1) / s.rows, (columns + s.columns - 1) / s.columns};
}

TileShape ReadTile(const Tile& tile, std::pair<int64_t, int64_t> range, int64_t rows,
                   int64_t columns, size_t packed, bool result) {
  const TileShape shape = {tile[0], tile[1], tile[2], tile[3]};
  CheckTileShape(shape, result);
  const auto [down, across] = TileCounts(shape, rows, columns);
  if (range.first < 0 || range.first > range.second || range.second > down) {
    throw std::invalid_argument("rows_of_tiles is (" + std::to_string(range.first) + ", " +
                                std::to_string(range.second) + "); there are " +
                                std::to_string(down));
  }
  const int64_t want = down * across * shape.rows * shape.columns;
  if (static_cast<int64_t>(packed) != want) {
    throw std::invalid_argument("the packed matrix has " + std::to_string(packed) +
                                " elements; its tiles take " + std::to_string(want));
  }
  return shape;
}

void PackMatrix(nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu> source,
                nb::ndarray<uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> packed, Tile tile,
                bool transposed, std::pair<int64_t, int64_t> rows_of_tiles) {
  const bool f32 = source.dtype() == nb::dtype<float>();
  if (!f32 && source.dtype() != nb::dtype<uint16_t>()) {
    throw std::invalid_argument("source must be float32, or uint16 with the bits of bfloat16");
  }
  if (reinterpret_cast<uintptr_t>(packed.data()) % 64 != 0) {
    throw std::invalid_argument("packed must be aligned to 64 bytes");
  }
  const int64_t outer = source.shape(0), inner = source.shape(1);
  const TileSource matrix = {
      source.data(),          f32 ? DType::kF32 : DType::kBF16, transposed ? 1 : inner,
      transposed ? inner : 1, transposed ? inner : outer,       transposed ? outer : inner};
  const TileShape shape =
      ReadTile(tile, rows_of_tiles, matrix.rows, matrix.columns, packed.size(), false);
  const int64_t across = TileCounts(shape, matrix.rows, matrix.columns).second;
  uint16_t* out = packed.data();
  const nb::gil_scoped_release release;
  const auto [first, last] = rows_of_tiles;
  std::vector<uint16_t*> tiles;
  const auto tile_at = [&](int64_t i, int64_t j) {
    return out + (i * across + j) * shape.rows * shape.columns;
  };
  for (int64_t i = first; !transposed && i < last; ++i) {
    tiles.clear();
    for (int64_t j = 0; j < across; ++j) tiles.push_back(tile_at(i, j));
    PackTiles(matrix, shape, i * shape.rows, 0, across, tiles.data());
  }
  for (int64_t j = 0; transposed && j < across; ++j) {
    tiles.clear();
    for (int64_t i = first; i < last; ++i) tiles.push_back(tile_at(i, j));
    PackTiles(matrix, shape, first * shape.rows, j * shape.columns, last - first, tiles.data());
  }
  StreamFence();
}

void UnpackMatrix(nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu> packed,
                  nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> matrix, Tile tile,
                  bool stream, std::pair<int64_t, int64_t> rows_of_tiles) {
  const int64_t rows = matrix.shape(0), columns = matrix.shape(1);
  const TileShape shape = ReadTile(tile, rows_of_tiles, rows, columns, packed.size(), true);
  const int64_t across = TileCounts(shape, rows, columns).second;
  const float* in = packed.data();
  float* out = matrix.data();
  const nb::gil_scoped_release release;
  std::vector<const float*> tiles(across);
  for (int64_t i = rows_of_tiles.first; i < rows_of_tiles.second; ++i) {
    for (int64_t j = 0; j < across; ++j) {
      tiles[j] = in + (i * across + j) * shape.rows * shape.columns;
    }
    UnpackTiles(tiles.data(), shape, i * shape.rows, 0, across, {out, columns, rows, columns},
                stream);
  }
  StreamFence();
}

std::pair<double, double> KernelRates(int64_t steps) {
  const nb::gil_scoped_release release;
  const KernelRate rate = MeasureKernel(ActiveIsa(), steps);
  return {rate.multiply_add, rate.tile};
}

}  // namespace
}  // namespace jax_xdna

NB_MODULE(_ffi, m) {
  m.def("registrations", &jax_xdna::Registrations);
  m.def("devices", &jax_xdna::DeviceList);
  m.def("counters", &jax_xdna::CounterList);
  m.def("cpu_features", &jax_xdna::CpuFeatures);
  m.def("pack_tiles", &jax_xdna::PackMatrix, nb::arg("source"), nb::arg("packed"), nb::arg("tile"),
        nb::kw_only(), nb::arg("transposed"), nb::arg("rows_of_tiles"));
  m.def("unpack_tiles", &jax_xdna::UnpackMatrix, nb::arg("packed"), nb::arg("matrix"),
        nb::arg("tile"), nb::kw_only(), nb::arg("stream"), nb::arg("rows_of_tiles"));
  m.def("kernel_rates", &jax_xdna::KernelRates, nb::arg("steps"));
  m.def("isa", [] { return std::string(jax_xdna::ActiveIsa().name); });
  jax_xdna::BindPlan(m);
}
