// Aligned scratch memory that is kept and reused: XLA offers no scratch allocator on the CPU, and a
// steady training step must not allocate.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace jax_xdna {

constexpr size_t kHugePage = size_t{2} << 20;

// Asks for huge pages under a large block: a fresh result of a training step otherwise costs a page
// fault for every 4 KB written. A hint only; failure costs speed.
inline void AdviseHugePages(void* data, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t begin =
      (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

class Arena {
 public:
  Arena() = default;
  ~Arena() { std::free(data_); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // At least `count` floats, 64-byte aligned; old contents are lost when the block grows.
  float* Floats(size_t count) {
    if (count > capacity_) {
      std::free(data_);
      data_ = nullptr;
      capacity_ = 0;
      const size_t align = count * sizeof(float) >= kHugePage ? kHugePage : 64;
      const size_t bytes = (count * sizeof(float) + align - 1) / align * align;
      data_ = static_cast<float*>(std::aligned_alloc(align, bytes));
      if (data_ == nullptr) throw std::bad_alloc();
      AdviseHugePages(data_, bytes);
      capacity_ = bytes / sizeof(float);
    }
    return data_;
  }

 private:
  float* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace jax_xdna
