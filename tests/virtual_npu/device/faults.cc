#include "faults.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>

namespace virtual_npu {

bool Fails(const std::string& event) {
  // Never destroyed: threads may run until the process has ended.
  static auto& mutex = *new std::mutex;
  static auto& variable = *new std::string;
  static auto& counts = *new std::map<std::string, int>;
  const std::lock_guard<std::mutex> lock(mutex);
  const char* now = std::getenv("VIRTUAL_NPU_FAULTS");
  if (variable != (now == nullptr ? "" : now)) {
    variable = now == nullptr ? "" : now;
    counts.clear();
  }
  const int count = ++counts[event];
  std::istringstream faults(variable);
  for (std::string fault; std::getline(faults, fault, ',');) {
    const size_t at = fault.find('@');
    if (fault.substr(0, at) != event) continue;
    if (at == std::string::npos) return true;
    const int number = std::atoi(fault.c_str() + at + 1);
    if (fault.back() == '+' ? count >= number : count == number) return true;
  }
  return false;
}

int Setting(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

}  // namespace virtual_npu
