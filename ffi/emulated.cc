// The emulated device: the contract of docs/numerics.md on CPU cores.
//
// The smaller operand is packed once for all threads, a super-block of K at a time, by tickets of
// their own. Each run ticket packs its strip of the larger operand into the thread's own memory
// and multiplies it at once with the shared panels, so neither operand is passed over twice. A
// strip of C belongs to one ticket at a time and its super-blocks of K run in order, hence one
// accumulator per element whatever the blocking.
#include "emulated.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>

#include "arena.h"
#include "bf16.h"
#include "exact.h"
#include "isa.h"

namespace jax_xdna {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

class Stopwatch {
 public:
  // Seconds since the last call.
  double Lap() {
    const auto now = std::chrono::steady_clock::now();
    const double seconds = std::chrono::duration<double>(now - last_).count();
    last_ = now;
    return seconds;
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// A thread's own memory.
struct Local {
  Arena strip;
  Arena tile;
};

class EmulatedWork;

// Works that are in nobody's hands, with the memory they have grown.
class Pool {
 public:
  Pool(const Isa& isa, const Blocking& blocking) : isa_(isa), blocking_(blocking) {}
  EmulatedWork* Take();
  void Give(EmulatedWork* work);

 private:
  const Isa& isa_;
  const Blocking blocking_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<EmulatedWork>> all_;
  std::vector<EmulatedWork*> idle_;
};

class EmulatedWork final : public Work {
 public:
  EmulatedWork(Pool& pool, const Isa& isa, const Blocking& blocking)
      : pool_(pool), isa_of_device_(isa), blocking_(blocking) {}

  void Prepare(const Gemm& gemm, int threads) {
    gemm_ = gemm;
    exact_ = gemm.numerics == Numerics::kBFP16 || gemm.rounding == Rounding::kFloor;
    // The other modes are written for panels of fp32.
    isa_ = exact_ && isa_of_device_.step != 1 ? &IsaWithFp32Panels() : &isa_of_device_;

    // Which operand the threads share, and which one they cut into strips.
    share_a_ = gemm.m <= gemm.n;
    shared_rows_ = share_a_ ? gemm.m : gemm.n;
    strip_rows_ = share_a_ ? gemm.n : gemm.m;
    const int64_t shared_width = share_a_ ? isa_->mr : isa_->nr;
    const int64_t strip_width = share_a_ ? isa_->nr : isa_->mr;

    // A very long shared operand goes in several bands, each with strips of its own.
    depth_block_ = std::min(blocking_.depth, RoundUpDepth(gemm.k));
    band_rows_ =
        std::min(CeilDiv(shared_rows_, shared_width),
                 std::max<int64_t>(1, 4 * blocking_.shared_floats / depth_block_ / shared_width)) *
        shared_width;
    bands_ = CeilDiv(shared_rows_, band_rows_);
    const int64_t super =
        std::max<int64_t>(1, blocking_.shared_floats / (band_rows_ * depth_block_));
    super_depth_ = std::min(RoundUpDepth(gemm.k), super * depth_block_);
    supers_ = CeilDiv(gemm.k, super_depth_);
    phases_ = gemm.batch * bands_ * supers_;

    strip_step_ =
        std::max<int64_t>(1, blocking_.strip_floats / depth_block_ / strip_width) * strip_width;
    // Every thread should get several strips, so that all of them finish together.
    while (strip_step_ > strip_width &&
           CeilDiv(strip_rows_, strip_step_) * phases_ < int64_t{8} * threads) {
      strip_step_ = CeilDiv(strip_step_ / strip_width, 2) * strip_width;
    }
    strips_ = CeilDiv(strip_rows_, strip_step_);

    pack_step_ =
        std::max<int64_t>(1, blocking_.pack_floats / super_depth_ / shared_width) * shared_width;
    packs_ = CeilDiv(band_rows_, pack_step_);

    // Phases packed ahead. With few strips in a phase, several phases must be open at a time.
    ring_ = std::min<int64_t>(phases_, strips_ >= threads ? 3 : threads + 2);
    ahead_ = std::max<int64_t>(1, ring_ - 1);
    slot_floats_ = CeilDiv(band_rows_ * super_depth_, 16) * 16;
    shared_ = memory_.Floats(static_cast<size_t>(ring_ * slot_floats_));

    // A bf16 result needs fp32 accumulators somewhere while K takes several blocks.
    wide_c_ = nullptr;
    if (gemm.c_dtype == DType::kBF16 && gemm.k > depth_block_) {
      wide_c_ = wide_.Floats(static_cast<size_t>(gemm.batch * gemm.m * gemm.n));
    }

    Reset(packed_, phases_);
    Reset(computed_, phases_);
    Reset(supers_done_, ring_ * strips_);
  }

  int64_t tickets() const override { return phases_ * (packs_ + strips_); }

  // Packing runs `ahead_` phases in front; then the strips of a phase alternate with the packing of
  // the phase that takes over the ring slot of the phase before.
  Ticket ticket(int64_t index) const override {
    const int64_t lead = ahead_ * packs_;
    if (index < lead) return {Stage::kPack, index};
    index -= lead;
    const int64_t round = strips_ + packs_;
    const int64_t full = (phases_ - ahead_) * round;  // rounds that still have packing in them
    if (index >= full) return {Stage::kRun, (phases_ - ahead_) * strips_ + index - full};
    const int64_t phase = index / round;
    const int64_t within = index % round;
    if (within < strips_) return {Stage::kRun, phase * strips_ + within};
    return {Stage::kPack, (phase + ahead_) * packs_ + within - strips_};
  }

  void Pack(int64_t piece, StageTimes& times) override {
    const Phase phase = PhaseAt(piece / packs_);
    const int64_t row = piece % packs_ * pack_step_;
    const int64_t rows = std::min(pack_step_, phase.rows - row);
    // The slot's last user must be through with it.
    const int64_t user = phase.index - ring_;
    if (user >= 0 && !WaitUntil([&] { return computed_[user].load() == strips_; })) {
      return;
    }
    Stopwatch watch;
    if (rows > 0) {
      // Each block of K is an array of panels of its own.
      for (int64_t k = 0; k < phase.depth; k += depth_block_) {
        const int64_t kc = std::min(depth_block_, phase.depth - k);
        float* out = Slot(phase) + band_rows_ * Steps(k) + row * Steps(kc);
        PackOperand(share_a_, phase.batch, phase.row + row, rows, phase.k + k, kc, out);
      }
    }
    (share_a_ ? times.pack_a : times.pack_b) += watch.Lap();
    packed_[phase.index].fetch_add(1);
    Signal();
  }

  void Run(int64_t piece, StageTimes& times) override {
    static thread_local Local local;
    const Phase phase = PhaseAt(piece / strips_);
    const int64_t strip = piece % strips_;
    const int64_t row = strip * strip_step_;
    const int64_t rows = std::min(strip_step_, strip_rows_ - row);
    // Products of a batch may overtake each other, so each has a set of strip counters; `ring_`
    // sets are enough, since its packing waited for the phase that many before.
    std::atomic<int64_t>& supers_done =
        supers_done_[phase.index / supers_ % ring_ * strips_ + strip];
    const int64_t super = phase.index % supers_;
    if (!WaitUntil([&] {
          return packed_[phase.index].load() == packs_ &&
                 (super == 0 || supers_done.load() == super);
        })) {
      return;
    }
    float* strip_panels = local.strip.Floats(static_cast<size_t>(
        CeilDiv(strip_step_, isa_->nr) * isa_->nr * depth_block_ + depth_block_));
    float* tile = local.tile.Floats(static_cast<size_t>(isa_->mr * isa_->nr));
    Stopwatch watch;
    for (int64_t k = 0; k < phase.depth; k += depth_block_) {
      const int64_t kc = std::min(depth_block_, phase.depth - k);
      PackOperand(!share_a_, phase.batch, row, rows, phase.k + k, kc, strip_panels);
      (share_a_ ? times.pack_b : times.pack_a) += watch.Lap();
      const float* shared_panels = Slot(phase) + band_rows_ * Steps(k);
      const bool last = phase.k + k + kc == gemm_.k;
      MultiplyBlock(phase, row, rows, Steps(kc), phase.k + k == 0, last, shared_panels,
                    strip_panels, tile);
      times.run += watch.Lap();
    }
    supers_done.store(super + 1);
    computed_[phase.index].fetch_add(1);
    Signal();
  }

 private:
  struct Phase {
    int64_t index, batch, row, rows, k, depth;
  };

  void Recycle() override { pool_.Give(this); }

  Phase PhaseAt(int64_t index) const {
    Phase phase;
    phase.index = index;
    phase.k = index % supers_ * super_depth_;
    phase.depth = std::min(super_depth_, gemm_.k - phase.k);
    index /= supers_;
    phase.row = index % bands_ * band_rows_;
    phase.rows = std::min(band_rows_, shared_rows_ - phase.row);
    phase.batch = index / bands_;
    return phase;
  }

  float* Slot(const Phase& phase) const { return shared_ + phase.index % ring_ * slot_floats_; }

  // bfp16 takes K in groups of eight; the last one is completed with zeros.
  int64_t RoundUpDepth(int64_t kc) const {
    return gemm_.numerics == Numerics::kBFP16 ? CeilDiv(kc, kBfpGroup) * kBfpGroup : kc;
  }

  // Lanes of a panel along K.
  int64_t Steps(int64_t kc) const { return CeilDiv(RoundUpDepth(kc), isa_->step); }

  void PackOperand(bool a, int64_t batch, int64_t row, int64_t rows, int64_t k, int64_t kc,
                   float* out) const {
    const Operand& operand = a ? gemm_.a : gemm_.b;
    if (exact_) {
      PackExact(operand, gemm_.numerics, gemm_.rounding, a ? isa_->mr : isa_->nr, batch, row, rows,
                k, kc, out);
    } else {
      (a ? isa_->pack_a : isa_->pack_b)(operand, batch, row, rows, k, kc, out);
    }
  }

  // The panels of the operand that changes slowest are the outer loop: each stays in L1 (A) or L2
  // (B) while the strip's own panels pass by.
  void MultiplyBlock(const Phase& phase, int64_t row, int64_t rows, int64_t steps, bool first,
                     bool last, const float* shared_panels, const float* strip_panels,
                     float* tile) const {
    const int64_t shared_width = share_a_ ? isa_->mr : isa_->nr;
    const int64_t strip_width = share_a_ ? isa_->nr : isa_->mr;
    for (int64_t s = 0; s < phase.rows; s += shared_width) {
      for (int64_t t = 0; t < rows; t += strip_width) {
        const float* shared = shared_panels + s * steps;
        const float* strip = strip_panels + t * steps;
        const int64_t i = share_a_ ? phase.row + s : row + t;
        const int64_t j = share_a_ ? row + t : phase.row + s;
        MultiplyTile(phase.batch, i, j, steps, first, last, share_a_ ? shared : strip,
                     share_a_ ? strip : shared, tile);
      }
    }
  }

  void MultiplyTile(int64_t batch, int64_t i, int64_t j, int64_t steps, bool first, bool last,
                    const float* a, const float* b, float* tile) const {
    const int64_t rows = std::min<int64_t>(isa_->mr, gemm_.m - i);
    const int64_t columns = std::min<int64_t>(isa_->nr, gemm_.n - j);
    const int64_t vectors = CeilDiv(columns, isa_->lanes);
    const int64_t at = batch * gemm_.m * gemm_.n + i * gemm_.n + j;
    const bool bf16 = gemm_.c_dtype == DType::kBF16;
    float* wide =
        bf16 ? (wide_c_ == nullptr ? nullptr : wide_c_ + at) : static_cast<float*>(gemm_.c) + at;

    // A tile that ends inside a vector is computed beside C and copied.
    const bool beside = wide == nullptr || columns % isa_->lanes != 0;
    float* out = beside ? tile : wide;
    const int64_t ldc = beside ? isa_->nr : gemm_.n;
    if (beside && !first) {
      for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(wide + r * gemm_.n, columns, tile + r * isa_->nr);
      }
    }
    if (gemm_.numerics == Numerics::kBFP16) {
      TileBfp16(steps, isa_->mr, isa_->nr, rows, vectors * isa_->lanes, a, b, out, ldc, first);
    } else {
      isa_->tile[rows - 1][vectors - 1](steps, a, b, out, ldc, first);
    }
    if (bf16 && last) {
      uint16_t* c = static_cast<uint16_t*>(gemm_.c) + at;
      for (int64_t r = 0; r < rows; ++r) {
        if (gemm_.rounding == Rounding::kNearest) {
          isa_->round_row(out + r * ldc, columns, c + r * gemm_.n);
        } else {
          for (int64_t x = 0; x < columns; ++x) {
            c[r * gemm_.n + x] = FloatToBF16(out[r * ldc + x], gemm_.rounding);
          }
        }
      }
    } else if (beside) {
      for (int64_t r = 0; r < rows; ++r) {
        std::copy_n(tile + r * isa_->nr, columns, wide + r * gemm_.n);
      }
    }
  }

  using Counters = std::deque<std::atomic<int64_t>>;  // grows without moving its elements
  static void Reset(Counters& counters, int64_t count) {
    while (static_cast<int64_t>(counters.size()) < count) counters.emplace_back(0);
    for (int64_t i = 0; i < count; ++i) counters[i].store(0, std::memory_order_relaxed);
  }

  Pool& pool_;
  Gemm gemm_;
  const Isa& isa_of_device_;
  const Isa* isa_ = nullptr;
  const Blocking blocking_;
  bool exact_ = false;
  bool share_a_ = true;
  int64_t shared_rows_ = 0, strip_rows_ = 0;
  int64_t depth_block_ = 0, super_depth_ = 0, supers_ = 0;
  int64_t band_rows_ = 0, bands_ = 0, phases_ = 0;
  int64_t strip_step_ = 0, strips_ = 0, pack_step_ = 0, packs_ = 0;
  int64_t ring_ = 0, ahead_ = 0, slot_floats_ = 0;
  float* shared_ = nullptr;
  float* wide_c_ = nullptr;
  Arena memory_, wide_;
  Counters packed_, computed_;  // per phase: pack tickets and strips that are done
  Counters supers_done_;        // per product and strip: super-blocks of K that are done
};

EmulatedWork* Pool::Take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (idle_.empty()) {
    all_.push_back(std::make_unique<EmulatedWork>(*this, isa_, blocking_));
    idle_.reserve(all_.size());  // so that Give() cannot throw
    return all_.back().get();
  }
  EmulatedWork* work = idle_.back();
  idle_.pop_back();
  return work;
}

void Pool::Give(EmulatedWork* work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(work);
}

class Emulated final : public Device {
 public:
  Emulated(const Isa& isa, const Blocking& blocking) : isa_(isa), pool_(isa, blocking) {}
  std::string name() const override { return "emulated"; }
  std::string description() const override { return std::string("CPU emulation, ") + isa_.name; }
  WorkRef Begin(const Gemm& gemm, int threads) override {
    EmulatedWork* work = pool_.Take();
    WorkRef reference(work);
    work->Prepare(gemm, threads);
    return reference;
  }

 private:
  const Isa& isa_;
  Pool pool_;
};

}  // namespace

std::unique_ptr<Device> MakeEmulatedDevice(const Isa& isa, const Blocking& blocking) {
  return std::make_unique<Emulated>(isa, blocking);
}

Device& EmulatedDevice() {
  // Never destroyed: threads of XLA's pool may still be at work when the process ends.
  static Emulated* device = new Emulated(ActiveIsa(), Blocking());
  return *device;
}

}  // namespace jax_xdna
