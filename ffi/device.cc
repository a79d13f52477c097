#include "device.h"

namespace jax_xdna {

const std::vector<Device*>& Devices() {
  static const auto* devices = new std::vector<Device*>{&EmulatedDevice()};
  return *devices;
}

Device& FindDevice(std::string_view name) {
  for (Device* device : Devices()) {
    if (device->name() == name) return *device;
  }
  std::string names;
  for (Device* device : Devices()) names += (names.empty() ? "" : ", ") + device->name();
  throw DeviceError("no device is named '" + std::string(name) + "'; this process has: " + names);
}

}  // namespace jax_xdna
