#include "isa.h"
#include "isa_template.h"

namespace jax_xdna {
namespace {

// Plain C++ for CPUs without a fused multiply-add. The product of two bf16 numbers
// is exact in double, and a sum of two 24-bit numbers rounded to 53 bits and then to 24 is the sum
// rounded once (Figueroa 1995: 53 ≥ 2·24 + 2), so this equals the fused instruction.
struct Plain {
  typedef float Reg __attribute__((vector_size(32)));
  typedef double Wide __attribute__((vector_size(64)));
  static constexpr int kLanes = 8;
  static constexpr int kStep = 1;
  static Reg Zero() { return Reg{}; }
  static Reg Load(const float* p) { return LoadAs<Reg>(p); }
  static void Store(float* p, Reg v) { StoreAs(p, v); }
  static Reg Broadcast(const float* p) { return Reg{} + *p; }
  static Reg Fma(Reg a, Reg b, Reg acc) {
    const Wide sum = __builtin_convertvector(a, Wide) * __builtin_convertvector(b, Wide) +
                     __builtin_convertvector(acc, Wide);
    return __builtin_convertvector(sum, Reg);
  }
  static void Pin(Reg&) {}
  static void Prefetch(const float*, const float*) {}
};

constexpr Isa kIsa = MakeIsa<Plain, 4>("baseline");

}  // namespace

const Isa* IsaBaseline() { return &kIsa; }

}  // namespace jax_xdna
