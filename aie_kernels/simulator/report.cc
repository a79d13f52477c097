#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "simulator.h"

namespace jax_xdna {
namespace {

void Append(std::string& out, const char* format, ...) {
  char line[160];
  va_list values;
  va_start(values, format);
  std::vsnprintf(line, sizeof line, format, values);
  va_end(values);
  out += line;
}

}  // namespace

std::string Report::Table() const {
  const auto share = [this](double busy) { return cycles > 0 ? 100 * busy / cycles : 0; };
  std::string out;
  Append(out, "%-28s %12s %14s %7s\n", "lane", "bytes", "busy cycles", "busy");
  for (const LaneUse& lane : lanes) {
    Append(out, "%-28s %12lld %14.0f %6.1f%%\n", lane.name.c_str(),
           static_cast<long long>(lane.bytes), lane.busy, share(lane.busy));
  }
  Append(out, "%-28s %5s %6s %14s %7s\n", "core", "tiles", "steps", "busy cycles", "busy");
  for (const CoreUse& core : cores) {
    Append(out, "column %d row %d %14s %5lld %6lld %14.0f %6.1f%%\n", core.column, core.row, "",
           static_cast<long long>(core.tiles), static_cast<long long>(core.steps), core.busy,
           share(core.busy));
  }
  const double ms = 1e3 / clock_hz;
  Append(out, "array %.0f cycles (%.3f ms at %.1f GHz); DRAM %lld bytes in, %lld out: %.3f ms\n",
         cycles, cycles * ms, clock_hz / 1e9, static_cast<long long>(bytes_read),
         static_cast<long long>(bytes_written), dram_cycles * ms);
  Append(out, "dispatch at least %.3f ms, bound by %s\n", std::max(cycles, dram_cycles) * ms,
         cycles > dram_cycles ? "the array" : "DRAM");
  return out;
}

}  // namespace jax_xdna
