// The functions that the preloaded library puts before the C library's: those on the accel node are
// answered by the virtual driver, all others go on.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "driver.h"
#include "faults.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace virtual_npu {
namespace {

constexpr char kNode[] = "/dev/accel/accel0";
constexpr char kDeviceNumber[] = "/sys/bus/pci/devices/0000:c5:00.1/device";
constexpr off_t kFileBytes = off_t{256} << 30;

template <typename Function>
Function Next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

// Open nodes by descriptor. Never destroyed: threads use them until the process has ended.
struct Nodes {
  std::mutex mutex;
  std::map<int, std::shared_ptr<Driver>> drivers;
  static Nodes& All() {
    static auto& nodes = *new Nodes;
    return nodes;
  }
  std::shared_ptr<Driver> Find(int file) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = drivers.find(file);
    return found == drivers.end() ? nullptr : found->second;
  }
};

int OpenNode() {
  if (Fails("access")) {
    errno = EACCES;
    return -1;
  }
  std::string number;
  std::ifstream(kDeviceNumber) >> number;
  const Model* model = ModelOf(static_cast<int>(std::strtol(number.c_str(), nullptr, 16)));
  if (model == nullptr) {
    errno = ENODEV;
    return -1;
  }
  const int file = memfd_create("virtual-npu", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, kFileBytes) != 0) return -1;
  auto driver = std::make_shared<Driver>(file, *model);
  Nodes& nodes = Nodes::All();
  const std::lock_guard<std::mutex> lock(nodes.mutex);
  nodes.drivers[file] = std::move(driver);
  return file;
}

int Open(const char* name, const char* path, int flags, va_list arguments) {
  if (std::string(path) == kNode) return OpenNode();
  const bool creates = (flags & (O_CREAT | O_TMPFILE)) != 0;
  const mode_t mode = creates ? va_arg(arguments, mode_t) : 0;
  return Next<int (*)(const char*, int, ...)>(name)(path, flags, mode);
}

void* Map(void* address, size_t length, int protection, int flags, int file, off_t offset) {
  static const auto next = Next<void* (*)(void*, size_t, int, int, int, off_t)>("mmap");
  const std::shared_ptr<Driver> driver = file < 0 ? nullptr : Nodes::All().Find(file);
  if (driver == nullptr) return next(address, length, protection, flags, file, offset);
  if (Fails("memlock")) {
    errno = EAGAIN;
    return MAP_FAILED;
  }
  void* data = next(address, length, protection, flags & ~MAP_LOCKED, file, offset);
  if (data != MAP_FAILED) driver->Mapped(static_cast<uint64_t>(offset), data);
  return data;
}

// bo.sync is a loop of cache flushes, unless XRT is told that the driver does it.
__attribute__((constructor)) void Configure() { setenv("Debug.force_driver_sync", "true", 1); }

}  // namespace
}  // namespace virtual_npu

EXPORT int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const int file = virtual_npu::Open("open", path, flags, arguments);
  va_end(arguments);
  return file;
}

EXPORT int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const int file = virtual_npu::Open("open64", path, flags, arguments);
  va_end(arguments);
  return file;
}

EXPORT int ioctl(int file, unsigned long request, ...) {
  va_list arguments;
  va_start(arguments, request);
  void* data = va_arg(arguments, void*);
  va_end(arguments);
  const auto driver = virtual_npu::Nodes::All().Find(file);
  if (driver == nullptr) {
    static const auto next = virtual_npu::Next<int (*)(int, unsigned long, ...)>("ioctl");
    return next(file, request, data);
  }
  const int result = driver->Ioctl(request, data);
  if (result >= 0) return result;
  errno = -result;
  return -1;
}

EXPORT void* mmap(void* address, size_t length, int protection, int flags, int file, off_t offset) {
  return virtual_npu::Map(address, length, protection, flags, file, offset);
}

EXPORT void* mmap64(void* address, size_t length, int protection, int flags, int file,
                    off_t offset) {
  return virtual_npu::Map(address, length, protection, flags, file, offset);
}

EXPORT int close(int file) {
  {
    auto& nodes = virtual_npu::Nodes::All();
    std::shared_ptr<virtual_npu::Driver> last;  // destroyed after the lock
    const std::lock_guard<std::mutex> lock(nodes.mutex);
    const auto found = nodes.drivers.find(file);
    if (found != nodes.drivers.end()) {
      last = std::move(found->second);
      nodes.drivers.erase(found);
    }
  }
  static const auto next = virtual_npu::Next<int (*)(int)>("close");
  return next(file);
}
