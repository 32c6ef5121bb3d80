// The CPU variant of softmax cross entropy: rows in tiles that stay in the first-level cache, read once, at each x86-64
// level.
#include <algorithm>
#include <limits>

#include "device/logarithm.h"
#include "host/lanes.h"
#include "multi_tensor_cpu.h"
#include "xentropy.h"

namespace apex {
namespace {
constexpr int64_t piece = 2048;  // elements; a few of them stay in the first-level cache

enum class Label { taken, ignored, outside };
template <class Arguments> APEX_INLINE Label label_of(const Arguments& a, int64_t row, int64_t* label) {
  *label =
      a.wide_labels ? reinterpret_cast<const int64_t*>(a.labels)[row] : reinterpret_cast<const int32_t*>(a.labels)[row];
  if (*label == gpu::xentropy_ignored_label || (a.has_padding && *label == a.padding_index)) return Label::ignored;
  return *label >= 0 && *label < a.classes ? Label::taken : Label::outside;
}

// What is known of the logits so far, as in csrc/device/xentropy.h, in lanes.
template <class Math> struct LogitSums {
  Math largest = std::numeric_limits<Math>::lowest();
  Lanes<Added, Math> sum{Math(0)}, total{Math(0)};

  APEX_INLINE static Math power(Math x) { return gpu::exp2(x * Math(1.4426950408889634)); }
  APEX_INLINE void add(const Math* x, int64_t n) {
    Lanes<Highest, Math> most(largest);
    most.take(n, [&](int64_t j) APEX_INLINE_LAMBDA { return x[j]; });
    const Math now = most.whole(), scale = power(largest - now);
    for (int64_t l = 0; l < lanes; ++l) sum.of[l] *= scale;
    largest = now;
    each_lane(n, [&](int64_t j, int64_t l) APEX_INLINE_LAMBDA {
      sum.of[l] += power(x[j] - now);
      total.of[l] += x[j];
    });
  }
};

template <class Math> struct Forward {
  const gpu::XentropyForward& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    alignas(64) Math buffer[piece];
    for (int64_t row = begin; row < end; ++row) {
      int64_t label;
      const Label kind = label_of(a, row, &label);
      Math loss = Math(0), largest = Math(0), sum = Math(1);
      if (kind != Label::ignored) {
        const int64_t base = row * a.row_stride;
        LogitSums<Math> sums;
        for (int64_t i = 0; i < a.classes; i += piece) {
          const int64_t n = std::min<int64_t>(piece, a.classes - i);
          sums.add(load_tile(convert, a.logits, a.logits_type, base + i, n, buffer), n);
        }
        largest = sums.largest;
        sum = sums.sum.whole();
        const Math log_sum = gpu::log(sum), smoothing = Math(a.smoothing);
        if (kind == Label::outside) {
          loss = std::numeric_limits<Math>::quiet_NaN();
        } else {
          loss = (Math(1) - smoothing) *
                 (largest - *load_tile(convert, a.logits, a.logits_type, base + label, 1, buffer) + log_sum);
          // Not where it is 0: 0 times infinity is nan.
          if (smoothing != Math(0)) loss += smoothing * (largest - sums.total.whole() / Math(a.classes) + log_sum);
        }
      }
      reinterpret_cast<Math*>(a.normalizers)[2 * row] = largest;
      reinterpret_cast<Math*>(a.normalizers)[2 * row + 1] = sum;
      store_tile(convert, a.losses, a.loss_type, row, 1, &loss);
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

template <class Math> struct Backward {
  const gpu::XentropyBackward& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    alignas(64) Math buffer[piece], made[piece];
    for (int64_t row = begin; row < end; ++row) {
      int64_t label;
      const Label kind = label_of(a, row, &label);
      Math g = *load_tile(convert, a.grad_losses, a.grad_type, row * a.grad_stride, 1, buffer);
      if (kind == Label::outside) g = std::numeric_limits<Math>::quiet_NaN();
      const Math largest = reinterpret_cast<const Math*>(a.normalizers)[2 * row], smoothing = Math(a.smoothing);
      const Math scale = g / reinterpret_cast<const Math*>(a.normalizers)[2 * row + 1],
                 every = g * smoothing / Math(a.classes);
      for (int64_t i = 0; i < a.classes; i += piece) {
        const int64_t n = std::min<int64_t>(piece, a.classes - i);
        Math* const gradient = made_tile(a.grad_logits, a.logits_type, row * a.classes + i, made);
        if (kind == Label::ignored) {
          std::fill(gradient, gradient + n, Math(0));
        } else {
          const Math* x = load_tile(convert, a.logits, a.logits_type, row * a.row_stride + i, n, buffer);
#pragma GCC ivdep
          for (int64_t j = 0; j < n; ++j) gradient[j] = LogitSums<Math>::power(x[j] - largest) * scale - every;
          if (label >= i && label < i + n) gradient[label - i] -= g * (Math(1) - smoothing);
        }
        store_tile(convert, a.grad_logits, a.logits_type, row * a.classes + i, n, static_cast<const Math*>(gradient));
      }
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

template <class Work, class Arguments> void run(const Arguments& a) {
  run_at_level(Work{a}, 0, a.rows, std::max<int64_t>(1, elements_per_task / std::max<int64_t>(1, a.classes)));
}
}  // namespace

void xentropy_forward_cpu(const gpu::XentropyForward& a) {
  a.logits_type == APEX_F64 ? run<Forward<double>>(a) : run<Forward<float>>(a);
}
void xentropy_backward_cpu(const gpu::XentropyBackward& a) {
  a.logits_type == APEX_F64 ? run<Backward<double>>(a) : run<Backward<float>>(a);
}
}  // namespace apex
