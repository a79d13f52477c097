// Aligned scratch memory that is kept and reused: XLA offers no scratch allocator on the CPU, and a
// steady training step must not allocate.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <new>

namespace jax_xdna {

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
#if defined(MADV_HUGEPAGE)
      if (align == kHugePage) madvise(data_, bytes, MADV_HUGEPAGE);  // a hint: failure costs speed only
#endif
      capacity_ = bytes / sizeof(float);
    }
    return data_;
  }

 private:
  static constexpr size_t kHugePage = size_t{2} << 20;
  float* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace jax_xdna
