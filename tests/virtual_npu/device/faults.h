// What goes wrong, by the environment variable VIRTUAL_NPU_FAULTS: names with commas between.
// "hang" happens every time it can, "hang@3" the third time, "hang@3+" from the third time on. The
// counts start anew when the variable changes.
#pragma once

#include <string>

namespace virtual_npu {

// Whether this event is to fail. Thread-safe.
bool Fails(const std::string& event);

// Of the environment, or the default.
int Setting(const char* name, int otherwise);

}  // namespace virtual_npu
