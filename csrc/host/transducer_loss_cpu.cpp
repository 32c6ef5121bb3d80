// The CPU variant of the transducer loss, at each x86-64 level: rows in tiles that stay in the first-level cache; the
// lattice of an item by one thread.
#include <algorithm>
#include <limits>

#include "device/logarithm.h"
#include "device/transducer_loss.h"
#include "host/lanes.h"
#include "multi_tensor_cpu.h"
#include "transducer_loss.h"

namespace apex {
namespace {
template <class Math> APEX_INLINE Math load_one(const TileConversions<Math>& convert, const void* tensor, int32_t type,
                                                int64_t i) {
  Math buffer[1];
  return *load_tile(convert, tensor, type, i, 1, buffer);
}
template <class Math> APEX_INLINE Math power(Math x) { return gpu::exp2(x * Math(gpu::log2_of_e)); }

// The lengths, rows and labels of an item, which the bindings have checked.
template <class Arguments> struct Item {
  const Arguments& a;
  int64_t b, frames, labels, first, stride;
  Item(const Arguments& a_, int64_t b_) : a(a_), b(b_) {
    frames =
        a.wide_lengths ? reinterpret_cast<const int64_t*>(a.f_len)[b] : reinterpret_cast<const int32_t*>(a.f_len)[b];
    labels =
        (a.wide_lengths ? reinterpret_cast<const int64_t*>(a.g_len)[b] : reinterpret_cast<const int32_t*>(a.g_len)[b]) +
        1;
    const int64_t* offset = reinterpret_cast<const int64_t*>(a.batch_offset);
    first = offset ? (b ? offset[b - 1] : 0) : b * a.frames * a.labels;
    stride = offset ? labels : a.labels;
  }
  int64_t label(int64_t u) const {
    const int64_t at = b * (a.labels - 1) + u;
    return a.wide_labels ? reinterpret_cast<const int64_t*>(a.label)[at]
                         : reinterpret_cast<const int32_t*>(a.label)[at];
  }
};
template <class Arguments> int64_t first_row_of_the_rest(const Arguments& a) {
  return !a.batch_offset ? a.rows : a.batch ? reinterpret_cast<const int64_t*>(a.batch_offset)[a.batch - 1] : 0;
}

// Frames of all items: log p of the blank and of the next label of each row.
template <class Math> struct Emissions {
  using LogP = gpu::LogP<Math>;
  const gpu::TransducerLossForward& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    for (int64_t frame = begin; frame < end; ++frame) {
      const int64_t b = frame / a.frames, t = frame % a.frames;
      const Item<gpu::TransducerLossForward> item(a, b);
      for (int64_t u = 0; u < a.labels; ++u) {
        const int64_t node = frame * a.labels + u;
        if (t >= item.frames || u >= item.labels) {
          reinterpret_cast<LogP*>(a.alpha)[node] = reinterpret_cast<LogP*>(a.beta)[node] = LogP{};
          if (a.normalizers && !a.batch_offset) reinterpret_cast<LogP*>(a.normalizers)[node] = LogP{};
          continue;
        }
        const int64_t row = item.first + t * item.stride + u;
        LogP normalizer{};
        if (a.normalizers) reinterpret_cast<LogP*>(a.normalizers)[row] = normalizer = log_of_sum(convert, row);
        const auto log_p = [&](int64_t index) APEX_INLINE_LAMBDA {
          return (load_one(convert, a.x, a.type, row * a.classes + index) - normalizer.whole) - normalizer.rest;
        };
        Math* const to =
            reinterpret_cast<Math*>(a.emissions) + ((b * (a.frames + a.labels - 1) + t + u) * a.labels + u) * 2;
        to[0] = log_p(a.blank);
        to[1] = u + 1 < item.labels ? log_p(item.label(u)) : -std::numeric_limits<Math>::infinity();
      }
    }
  }
  // The largest logit, and the logarithm of the sum of exponentials of what the others have less.
  APEX_INLINE LogP log_of_sum(const TileConversions<Math>& convert, int64_t row) const {
    alignas(64) Math buffer[tile];
    Lanes<Added, Math> sum(Math(0));
    Math largest = std::numeric_limits<Math>::lowest();
    for (int64_t i = 0; i < a.classes; i += tile) {
      const int64_t n = std::min<int64_t>(tile, a.classes - i);
      const Math* x = load_tile(convert, a.x, a.type, row * a.classes + i, n, buffer);
      Lanes<Highest, Math> highest(largest);
      highest.take(n, [&](int64_t j) APEX_INLINE_LAMBDA { return x[j]; });
      const Math most = highest.whole(), scale = power(largest - most);
      for (int64_t l = 0; l < lanes; ++l) sum.of[l] *= scale;
      largest = most;
      sum.take(n, [&](int64_t j) APEX_INLINE_LAMBDA { return power(x[j] - most); });
    }
    return {largest, gpu::log(sum.whole())};
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

// Items [begin, end): both directions.
template <class Math> struct Lattice {
  using LogP = gpu::LogP<Math>;
  const gpu::TransducerLossForward& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    for (int64_t b = begin; b < end; ++b) {
      const Item<gpu::TransducerLossForward> item(a, b);
      const int64_t T = item.frames, U = item.labels, nodes = b * a.frames * a.labels;
      const Math* emissions = reinterpret_cast<const Math*>(a.emissions) + b * (a.frames + a.labels - 1) * a.labels * 2;
      LogP *alpha = reinterpret_cast<LogP*>(a.alpha) + nodes, *beta = reinterpret_cast<LogP*>(a.beta) + nodes;
      const LogP impossible = gpu::impossible<Math>();
      const auto edge = [&](int64_t t, int64_t u, int which) APEX_INLINE_LAMBDA {
        return gpu::in_parts(emissions[((t + u) * a.labels + u) * 2 + which]);
      };
      const auto at = [&](int64_t t, int64_t u) APEX_INLINE_LAMBDA { return t * a.labels + u; };
      for (int64_t t = 0; t < T; ++t)
        for (int64_t u = 0; u < U; ++u) {
          const LogP stay = t ? alpha[at(t - 1, u)].then(edge(t - 1, u, 0)) : impossible,
                     go = u ? alpha[at(t, u - 1)].then(edge(t, u - 1, 1)) : impossible;
          alpha[at(t, u)] = t || u ? gpu::log_add(stay, go) : LogP{};
        }
      for (int64_t t = T; t-- > 0;)
        for (int64_t u = U; u-- > 0;) {
          const bool can_stay = t + 1 < T, can_go = u + 1 < U;
          const LogP stay = can_stay ? beta[at(t + 1, u)].then(edge(t, u, 0)) : impossible,
                     go = can_go ? beta[at(t, u + 1)].then(edge(t, u, 1)) : impossible;
          beta[at(t, u)] = can_stay || can_go ? gpu::log_add(stay, go) : edge(t, u, 0);
        }
      const Math loss = -(beta[0].whole + beta[0].rest);
      store_tile(convert, a.loss, a.loss_type, b, 1, &loss);
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

// Frames of all items; the one after the last is the rest of a packed x.
template <class Math> struct Backward {
  using LogP = gpu::LogP<Math>;
  const gpu::TransducerLossBackward& a;

  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    alignas(64) Math buffer[tile], gradient[tile];
    for (int64_t frame = begin; frame < end; ++frame) {
      if (frame == a.batch * a.frames) {
        for (int64_t row = first_row_of_the_rest(a); row < a.rows; ++row) zero(convert, row, gradient);
        continue;
      }
      const int64_t b = frame / a.frames, t = frame % a.frames;
      const Item<gpu::TransducerLossBackward> item(a, b);
      if (a.batch_offset && t >= item.frames) continue;
      for (int64_t u = 0; u < item.stride; ++u) {
        const int64_t row = item.first + t * item.stride + u;
        if (t < item.frames && u < item.labels) one_row(convert, item, t, u, row, buffer, gradient);
        else zero(convert, row, gradient);
      }
    }
  }
  APEX_INLINE void zero(const TileConversions<Math>& convert, int64_t row, Math* gradient) const {
    std::fill(gradient, gradient + tile, Math(0));
    for (int64_t i = 0; i < a.classes; i += tile)
      store_tile(convert, a.grad_x, a.type, row * a.classes + i, std::min<int64_t>(tile, a.classes - i),
                 static_cast<const Math*>(gradient));
  }
  APEX_INLINE void one_row(const TileConversions<Math>& convert, const Item<gpu::TransducerLossBackward>& item,
                           int64_t t, int64_t u, int64_t row, Math* buffer, Math* made) const {
    const int64_t nodes = item.b * a.frames * a.labels, at = nodes + t * a.labels + u, base = row * a.classes;
    const Math g = load_one(convert, a.grad_loss, a.grad_type, item.b * a.grad_stride);
    const LogP before = gpu::log_p_of<Math>(a.alpha, at), all = gpu::log_p_of<Math>(a.beta, nodes);
    const LogP normalizer = a.normalizers ? gpu::log_p_of<Math>(a.normalizers, row) : LogP{};
    // Given the labels: p of going on from the node with `p`.
    const auto passing = [&](Math p, LogP onward) APEX_INLINE_LAMBDA {
      return power(((before.whole + onward.whole - all.whole) + p) + (before.rest + onward.rest - all.rest));
    };
    const auto log_p = [&](int64_t index) APEX_INLINE_LAMBDA {
      return (load_one(convert, a.x, a.type, base + index) - normalizer.whole) - normalizer.rest;
    };
    const bool last_frame = t + 1 == item.frames, last_label = u + 1 == item.labels;
    const Math scale =
        a.of_logits && g != Math(0) ? g * passing(-normalizer.rest, gpu::log_p_of<Math>(a.beta, at)) : Math(0);
    const Math of_blank =
        last_frame && !last_label
            ? Math(0)
            : g * passing(log_p(a.blank), last_frame ? LogP{} : gpu::log_p_of<Math>(a.beta, at + a.labels));
    const int64_t label = last_label ? -1 : item.label(u);
    const Math of_label = last_label ? Math(0) : g * passing(log_p(label), gpu::log_p_of<Math>(a.beta, at + 1));
    for (int64_t i = 0; i < a.classes; i += tile) {
      const int64_t n = std::min<int64_t>(tile, a.classes - i);
      const Math* x = load_tile(convert, a.x, a.type, base + i, n, buffer);
      Math* const gradient = made_tile(a.grad_x, a.type, base + i, made);
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) gradient[j] = scale == Math(0) ? Math(0) : scale * power(x[j] - normalizer.whole);
      if (a.blank >= i && a.blank < i + n) gradient[a.blank - i] -= of_blank;
      if (label >= i && label < i + n) gradient[label - i] -= of_label;
      store_tile(convert, a.grad_x, a.type, base + i, n, static_cast<const Math*>(gradient));
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

int64_t frames_of_a_task(int64_t elements_of_a_frame) {
  return std::max<int64_t>(1, elements_per_task / std::max<int64_t>(1, elements_of_a_frame));
}

template <class Math> void forward(const gpu::TransducerLossForward& a) {
  run_at_level(Emissions<Math>{a}, 0, a.batch * a.frames, frames_of_a_task(a.labels * a.classes));
  for (int64_t row = first_row_of_the_rest(a); a.normalizers && row < a.rows; ++row)
    reinterpret_cast<gpu::LogP<Math>*>(a.normalizers)[row] = {};
  run_at_level(Lattice<Math>{a}, 0, a.batch, 1);
}
template <class Math> void backward(const gpu::TransducerLossBackward& a) {
  run_at_level(Backward<Math>{a}, 0, a.batch * a.frames + 1, frames_of_a_task(a.labels * a.classes));
}
}  // namespace

void transducer_loss_forward_cpu(const gpu::TransducerLossForward& a) {
  a.type == APEX_F64 ? forward<double>(a) : forward<float>(a);
}
void transducer_loss_backward_cpu(const gpu::TransducerLossBackward& a) {
  a.type == APEX_F64 ? backward<double>(a) : backward<float>(a);
}
}  // namespace apex
