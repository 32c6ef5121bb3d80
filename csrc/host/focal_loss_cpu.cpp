// The CPU variant of the sigmoid focal loss, at each x86-64 level: a row's classes all as negatives, in loops that
// vectorise, and then the one that is positive again.
#include <algorithm>

#include "device/focal_loss.h"
#include "focal_loss.h"
#include "host/lanes.h"
#include "multi_tensor_cpu.h"

namespace apex {
namespace {
template <class Math> struct Rows {
  const gpu::FocalLoss& a;
  const gpu::FocalFormula<Math> formula{a};

  // What a row is: its target, and how many of its classes count.
  struct Row { int64_t target, classes; };
  APEX_INLINE Row row_of(int64_t row) const {
    const int64_t target = a.wide_targets ? reinterpret_cast<const int64_t*>(a.targets)[row]
                                          : reinterpret_cast<const int32_t*>(a.targets)[row];
    return {target, target == gpu::focal_loss_ignored ? 0 : a.real_classes};
  }
  APEX_INLINE const Math* load(const TileConversions<Math>& convert, int64_t i, int64_t n, Math* buffer) const {
    return load_tile(convert, a.logits, a.type, i, n, buffer);
  }
};

template <class Math> struct Forward : Rows<Math> {
  using Rows<Math>::a;
  using Rows<Math>::formula;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    alignas(64) Math buffer[tile], terms[tile];
    for (int64_t part = begin; part < end; ++part) {
      double sum = 0;
      for (int64_t row = a.rows * part / a.blocks; row < a.rows * (part + 1) / a.blocks; ++row) {
        const auto [target, classes] = this->row_of(row);
        for (int64_t i = 0; i < classes; i += tile) {
          const int64_t n = std::min<int64_t>(tile, classes - i);
          const Math* x = this->load(convert, row * a.classes + i, n, buffer);
          for (int64_t j = 0; j < n; ++j) terms[j] = formula(x[j], false).loss;
          if (target >= i && target < i + n) terms[target - i] = formula(x[target - i], true).loss;
          sum += double(sum_of<Math>(n, [&](int64_t j) APEX_INLINE_LAMBDA { return terms[j]; }));  // of millions
        }
      }
      reinterpret_cast<Math*>(a.partials)[part] = Math(sum);
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

template <class Math> struct Backward : Rows<Math> {
  using Rows<Math>::a;
  using Rows<Math>::formula;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    const Math scale = *reinterpret_cast<const Math*>(a.grad_loss) / *reinterpret_cast<const Math*>(a.num_positives);
    alignas(64) Math buffer[tile], gradient[tile];
    for (int64_t row = begin; row < end; ++row) {
      const auto [target, classes] = this->row_of(row);
      for (int64_t i = 0; i < a.classes; i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.classes - i), real = std::clamp<int64_t>(classes - i, 0, n);
        const Math* x = this->load(convert, row * a.classes + i, n, buffer);
        for (int64_t j = 0; j < real; ++j) gradient[j] = formula(x[j], false).derivative * scale;
        if (target >= i && target < i + real) gradient[target - i] = formula(x[target - i], true).derivative * scale;
        std::fill(gradient + real, gradient + n, Math(0));
        store_tile(convert, a.result, a.type, row * a.classes + i, n, static_cast<const Math*>(gradient));
      }
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

template <class Math> void forward(const gpu::FocalLoss& a) {
  run_at_level(Forward<Math>{{a}}, 0, a.blocks, 1);
  double sum = 0;
  for (int32_t part = 0; part < a.blocks; ++part) sum += double(reinterpret_cast<const Math*>(a.partials)[part]);
  *reinterpret_cast<Math*>(a.result) = Math(sum / double(*reinterpret_cast<const Math*>(a.num_positives)));
}
template <class Math> void backward(const gpu::FocalLoss& a) {
  run_at_level(Backward<Math>{{a}}, 0, a.rows, std::max<int64_t>(1, elements_per_task / a.classes));
}
}  // namespace

void focal_loss_forward_cpu(const gpu::FocalLoss& a) { a.type == APEX_F64 ? forward<double>(a) : forward<float>(a); }
void focal_loss_backward_cpu(const gpu::FocalLoss& a) { a.type == APEX_F64 ? backward<double>(a) : backward<float>(a); }
}  // namespace apex
