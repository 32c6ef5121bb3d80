// The CPU variant of the transducer joint, at each x86-64 level: rows in tiles that stay in the first-level cache.
#include <algorithm>
#include <cstring>
#include <limits>

#include "device/philox.h"
#include "multi_tensor_cpu.h"
#include "transducer_joint.h"

namespace apex {
namespace {
constexpr int64_t run_rows = 16;  // of a sum: in one long sum, most additions would round to the sum's last bit

// The lengths and rows of an item, which the bindings have checked.
struct Item {
  int64_t frames, labels, first, stride;
  template <class Arguments> Item(const Arguments& a, int64_t b) {
    frames =
        a.wide_lengths ? reinterpret_cast<const int64_t*>(a.f_len)[b] : reinterpret_cast<const int32_t*>(a.f_len)[b];
    labels =
        a.wide_lengths ? reinterpret_cast<const int64_t*>(a.g_len)[b] : reinterpret_cast<const int32_t*>(a.g_len)[b];
    const int64_t* offset = reinterpret_cast<const int64_t*>(a.batch_offset);
    first = offset ? (b ? offset[b - 1] : 0) : b * a.frames * a.labels;
    stride = offset ? labels : a.labels;
  }
};

template <class Math> struct Forward {
  const gpu::TransducerJointForward& a;

  // Frames [begin, end) of all items, one item behind another; the one after the last is the rest of a packed output.
  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    alignas(64) Math f[tile], g[tile], made[tile];
    for (int64_t frame = begin; frame < end; ++frame) {
      if (frame == a.batch * a.frames) {
        const int64_t rest =
            a.batch_offset && a.batch ? reinterpret_cast<const int64_t*>(a.batch_offset)[a.batch - 1] : 0;
        for (int64_t row = rest; a.batch_offset && row < a.rows; ++row) fill(convert, row, made);
        continue;
      }
      const int64_t b = frame / a.frames, t = frame % a.frames;
      const Item item(a, b);
      if (a.batch_offset && t >= item.frames) continue;
      for (int64_t u = 0; u < item.stride; ++u) {
        const int64_t row = item.first + t * item.stride + u;
        if (t >= item.frames || u >= item.labels) {
          fill(convert, row, made);
          continue;
        }
        for (int64_t i = 0; i < a.hidden; i += tile) {
          const int64_t n = std::min<int64_t>(tile, a.hidden - i);
          const Math* x = load_tile(convert, a.f, a.type, frame * a.hidden + i, n, f);
          const Math* y = load_tile(convert, a.g, a.type, (b * a.labels + u) * a.hidden + i, n, g);
          Math* const out = made_tile(a.output, a.type, row * a.hidden + i, made);
#pragma GCC ivdep
          for (int64_t j = 0; j < n; ++j) out[j] = x[j] + y[j];
          if (a.seed) drop(row, i, n, out);
          else if (a.relu)
            for (int64_t j = 0; j < n; ++j) out[j] = out[j] < Math(0) ? Math(0) : out[j];
          store_tile(convert, a.output, a.type, row * a.hidden + i, n, static_cast<const Math*>(out));
        }
      }
    }
  }
  APEX_INLINE void fill(const TileConversions<Math>& convert, int64_t row, Math* out) const {
    std::fill(out, out + tile, Math(-1));
    for (int64_t i = 0; i < a.hidden; i += tile)
      store_tile(convert, a.output, a.type, row * a.hidden + i, std::min<int64_t>(tile, a.hidden - i),
                 static_cast<const Math*>(out));
    const int64_t parts = (a.hidden + 7) / 8;
    if (a.seed) clear_bytes(a.mask + row * parts, parts);
  }
  // Columns [i, i + n) of a row; i is a multiple of 8.
  APEX_INLINE void drop(int64_t row, int64_t i, int64_t n, Math* out) const {
    const int64_t parts = (a.hidden + 7) / 8;
    const uint64_t seed = *reinterpret_cast<const uint64_t*>(a.seed);
    const Math scale = Math(a.scale);
    for (int64_t j = 0; j < n; j += 8) {
      const int64_t at = row * parts + (i + j) / 8;
      uint32_t bits = gpu::philox_keep_eight(seed, uint64_t(at), a.keep);
      if (n - j < 8) bits &= (1u << (n - j)) - 1;
      for (int64_t k = 0; k < 8 && j + k < n; ++k) {
        if (a.relu && out[j + k] <= Math(0)) bits &= ~(1u << k);
        out[j + k] = bits >> k & 1 ? out[j + k] * scale : Math(0);
      }
      a.mask[at] = gpu::u8(bits);
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

// Both gradients: the sums of one frame's labels, or of one label's frames.
template <class Math> struct Backward {
  const gpu::TransducerJointBackward& a;
  bool of_frames;

  // Rows [begin, end) of the gradient of f (or g).
  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    alignas(64) Math own[tile], other[tile], grad[tile], run[tile], sum[tile];
    const int64_t per_item = of_frames ? a.frames : a.labels, others = of_frames ? a.labels : a.frames,
                  parts = (a.hidden + 7) / 8;
    gpu::u8* const to = of_frames ? a.grad_f : a.grad_g;
    const gpu::u8 *const mine = of_frames ? a.f : a.g, *const theirs = of_frames ? a.g : a.f;
    for (int64_t r = begin; r < end; ++r) {
      const int64_t b = r / per_item, k = r % per_item;
      const Item item(a, b);
      const bool has = k < (of_frames ? item.frames : item.labels);
      const int64_t count = has ? (of_frames ? item.labels : item.frames) : 0;
      for (int64_t i = 0; i < a.hidden; i += tile) {
        const int64_t n = std::min<int64_t>(tile, a.hidden - i);
        std::fill(sum, sum + n, Math(0));
        const Math* x = count && a.f ? load_tile(convert, mine, a.type, r * a.hidden + i, n, own) : own;
        for (int64_t m = 0; m < count; ++m) {
          if (m % run_rows == 0) std::fill(run, run + n, Math(0));
          const int64_t row = item.first + (of_frames ? k * item.stride + m : m * item.stride + k);
          const Math* g = load_tile(convert, a.grad_output, a.type, row * a.hidden + i, n, grad);
          if (a.mask) {
            for (int64_t j = 0; j < n; ++j)
              run[j] += a.mask[row * parts + (i + j) / 8] >> (i + j) % 8 & 1 ? g[j] : Math(0);
          } else if (a.f) {
            const Math* y = load_tile(convert, theirs, a.type, (b * others + m) * a.hidden + i, n, other);
            for (int64_t j = 0; j < n; ++j) run[j] += x[j] <= -y[j] ? Math(0) : g[j];
          } else {
            for (int64_t j = 0; j < n; ++j) run[j] += g[j];
          }
          if ((m + 1) % run_rows == 0 || m + 1 == count)
            for (int64_t j = 0; j < n; ++j) sum[j] += run[j];
        }
        for (int64_t j = 0; j < n; ++j) sum[j] *= Math(a.scale);
        store_tile(convert, to, a.type, r * a.hidden + i, n, static_cast<const Math*>(sum));
      }
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

int64_t rows_of_a_task(int64_t elements_of_a_row) {
  return std::max<int64_t>(1, elements_per_task / std::max<int64_t>(1, elements_of_a_row));
}
template <class Math> void forward(const gpu::TransducerJointForward& a) {
  run_at_level(Forward<Math>{a}, 0, a.batch * a.frames + 1, rows_of_a_task(a.labels * a.hidden));
}
template <class Math> void backward(const gpu::TransducerJointBackward& a) {
  run_at_level(Backward<Math>{a, true}, 0, a.batch * a.frames, rows_of_a_task(a.labels * a.hidden));
  run_at_level(Backward<Math>{a, false}, 0, a.batch * a.labels, rows_of_a_task(a.frames * a.hidden));
}
}  // namespace

void transducer_joint_forward_cpu(const gpu::TransducerJointForward& a) {
  a.type == APEX_F64 ? forward<double>(a) : forward<float>(a);
}
void transducer_joint_backward_cpu(const gpu::TransducerJointBackward& a) {
  a.type == APEX_F64 ? backward<double>(a) : backward<float>(a);
}
}  // namespace apex
