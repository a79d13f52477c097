#include "device.h"

namespace jax_xdna {

std::vector<Device*> Devices() { return {&EmulatedDevice()}; }

Device& FindDevice(const std::string& name) {
  std::string names;
  for (Device* device : Devices()) {
    if (device->name() == name) return *device;
    names += (names.empty() ? "" : ", ") + device->name();
  }
  throw DeviceError("no device is named '" + name + "'; this process has: " + names);
}

}  // namespace jax_xdna
