#include "isa.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#include "isa_template.h"

namespace jax_xdna {
namespace {

// Two registers make one vector of the template: 4 × 3 of them leave room for the operands.
struct Neon {
  using Reg = float32x4x2_t;
  static constexpr int kLanes = 8;
  static constexpr int kStep = 1;
  static Reg Zero() { return {{vdupq_n_f32(0.0f), vdupq_n_f32(0.0f)}}; }
  static Reg Load(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4)}}; }
  static void Store(float* p, Reg v) {
    vst1q_f32(p, v.val[0]);
    vst1q_f32(p + 4, v.val[1]);
  }
  static Reg Broadcast(const float* p) {
    const float32x4_t v = vld1q_dup_f32(p);
    return {{v, v}};
  }
  static Reg Fma(Reg a, Reg b, Reg acc) {
    return {{vfmaq_f32(acc.val[0], a.val[0], b.val[0]), vfmaq_f32(acc.val[1], a.val[1], b.val[1])}};
  }
  static void Pin(Reg&) {}
  static void Prefetch(const float*, const float* b) { __builtin_prefetch(b + 256); }
};

constexpr Isa kIsa = MakeIsa<Neon, 4>("neon");

}  // namespace

const Isa* IsaNeon() { return &kIsa; }

}  // namespace jax_xdna

#else
namespace jax_xdna {
const Isa* IsaNeon() { return nullptr; }
}  // namespace jax_xdna
#endif
