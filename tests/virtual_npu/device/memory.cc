#include "memory.h"

#include <drm/amdxdna_accel.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace virtual_npu {
namespace {

constexpr uint64_t kLine = 64;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kHeapAlignment = 64 << 20;
constexpr uint64_t kDeviceAlignment = 32 << 10;
constexpr uint64_t kHeapAddress = 0x4000000;     // on the device
constexpr uint64_t kHeapRoom = 1 << 30;          // of the file; the heap objects come first
constexpr uint64_t kRoom = uint64_t{256} << 30;  // of the file, which is sparse

constexpr uint64_t Up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

uint8_t* Reserve(int file) {
  const int flags = (file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED) | MAP_NORESERVE;
  void* data = mmap(nullptr, kRoom, PROT_READ | PROT_WRITE, flags, file, 0);
  return data == MAP_FAILED ? nullptr : static_cast<uint8_t*>(data);
}

// Calls what(offset, bytes) for every cache line that the range touches.
template <typename What>
void ForLines(uint64_t offset, uint64_t bytes, uint64_t end, What what) {
  for (uint64_t at = offset / kLine * kLine; at < std::min(end, offset + bytes); at += kLine) {
    what(at, std::min(kLine, end - at));
  }
}

}  // namespace

uint64_t Extents::Take(uint64_t size, uint64_t alignment) {
  uint64_t at = begin_;
  for (const auto& [from, to] : used_) {
    if (at + size <= from) break;
    at = Up(to, alignment);
  }
  if (at + size > end_) return kNone;
  used_[at] = at + size;
  return at;
}

uint64_t Place::dirty_lines(uint64_t offset, uint64_t count) const {
  if (std::memcmp(host + offset, clean + offset, std::min(count, bytes - offset)) == 0) return 0;
  uint64_t dirty = 0;
  ForLines(offset, count, bytes, [&](uint64_t at, uint64_t size) {
    dirty += std::memcmp(host + at, clean + at, size) != 0;
  });
  return dirty;
}

void Place::Flush(uint64_t offset, uint64_t count) const {
  ForLines(offset, count, bytes, [&](uint64_t at, uint64_t size) {
    if (std::memcmp(host + at, clean + at, size) != 0) {
      std::memcpy(device + at, host + at, size);
    } else {
      std::memcpy(host + at, device + at, size);
    }
    std::memcpy(clean + at, host + at, size);
  });
}

void Place::PoisonDirty(uint64_t offset, uint64_t count) const {
  ForLines(offset, count, bytes, [&](uint64_t at, uint64_t size) {
    if (std::memcmp(host + at, clean + at, size) != 0) std::memset(device + at, kPoison, size);
  });
}

void Place::PoisonStale(uint64_t offset, uint64_t count) const {
  ForLines(offset, count, bytes, [&](uint64_t at, uint64_t size) {
    if (std::memcmp(host + at, clean + at, size) != 0) return;
    std::memset(host + at, kPoison, size);
    std::memset(clean + at, kPoison, size);
  });
}

Memory::Memory(int file, uint64_t heap_limit)
    : file_(file),
      heap_limit_(heap_limit),
      host_(Reserve(file)),
      device_(Reserve(-1)),
      clean_(Reserve(-1)),
      heap_(0, 0),
      rest_(kHeapRoom, kRoom) {}

Memory::~Memory() {
  for (uint8_t* data : {host_, device_, clean_}) munmap(data, kRoom);
}

int Memory::Create(uint32_t type, uint64_t size, uint8_t* user, uint32_t* handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (size == 0) return -EINVAL;
  BufferObject bo;
  bo.type = type;
  bo.size = size;
  if (type == AMDXDNA_BO_DEV_HEAP) {
    if (size % kHeapAlignment != 0) return -EINVAL;
    if (heap_.end() + size > heap_limit_) return -ENOSPC;
    bo.offset = heap_.end();
    heap_.Grow(size);
  } else if (type == AMDXDNA_BO_DEV) {
    if (heap_.end() == 0) return -ENOENT;
    bo.offset = heap_.Take(size, kDeviceAlignment);
    if (bo.offset == Extents::kNone) return -EAGAIN;
  } else if (type == AMDXDNA_BO_SHARE || type == AMDXDNA_BO_CMD) {
    bo.offset = rest_.Take(Up(size, kPage), kPage);
    if (bo.offset == Extents::kNone) return -ENOMEM;
  } else {
    return -EINVAL;
  }
  const bool in_heap = bo.offset < kHeapRoom;
  bo.address = in_heap ? kHeapAddress + bo.offset : reinterpret_cast<uint64_t>(user);
  bo.host = user != nullptr ? user : host_ + bo.offset;
  // The kernel gives pages of zeros that are flushed, but the user's own are as they are.
  if (user != nullptr) std::memcpy(clean_ + bo.offset, user, size);
  if (user != nullptr) std::memcpy(device_ + bo.offset, user, size);
  *handle = next_++;
  objects_[*handle] = bo;
  return 0;
}

int Memory::Close(uint32_t handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = objects_.find(handle);
  if (found == objects_.end()) return -EINVAL;
  const BufferObject bo = found->second;
  objects_.erase(found);
  if (bo.type == AMDXDNA_BO_DEV) {
    heap_.Give(bo.offset);
  } else if (bo.offset >= kHeapRoom) {
    rest_.Give(bo.offset);
    const uint64_t bytes = Up(bo.size, kPage);
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(bo.offset),
              static_cast<off_t>(bytes));
    for (uint8_t* data : {device_, clean_}) madvise(data + bo.offset, bytes, MADV_DONTNEED);
  }
  return 0;
}

int Memory::Info(uint32_t handle, uint64_t* map_offset, uint64_t* address) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = objects_.find(handle);
  if (found == objects_.end()) return -ENOENT;
  const BufferObject& bo = found->second;
  const bool own = bo.type == AMDXDNA_BO_DEV || bo.host != host_ + bo.offset;
  *map_offset = own ? ~uint64_t{0} : bo.offset;
  *address = bo.offset < kHeapRoom ? bo.address : ~uint64_t{0};
  return 0;
}

int Memory::Sync(uint32_t handle, uint64_t offset, uint64_t size) const {
  BufferObject bo;
  if (!Find(handle, &bo)) return -ENOENT;
  if (offset > bo.size || size > bo.size - offset) return -EINVAL;
  if (bo.type != AMDXDNA_BO_CMD) Of(bo).Flush(offset, size);
  return 0;
}

void Memory::Mapped(uint64_t map_offset, void* address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [handle, bo] : objects_) {
    if (bo.offset == map_offset && bo.offset >= kHeapRoom) {
      bo.address = reinterpret_cast<uint64_t>(address);
    }
  }
}

bool Memory::Find(uint32_t handle, BufferObject* found) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto object = objects_.find(handle);
  if (object == objects_.end()) return false;
  *found = object->second;
  return true;
}

Place Memory::At(uint64_t address) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [handle, bo] : objects_) {
    if (bo.type == AMDXDNA_BO_DEV_HEAP || bo.address == 0) continue;
    if (address < bo.address || address - bo.address >= bo.size) continue;
    Place place = Of(bo);
    place.offset = address - bo.address;
    return place;
  }
  return {};
}

Place Memory::Of(const BufferObject& bo) const {
  return {bo.host, device_ + bo.offset, clean_ + bo.offset, bo.size, 0};
}

}  // namespace virtual_npu
