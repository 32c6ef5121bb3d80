// The CPU variant of scaled_masked_softmax and masked_softmax_dropout: a row at a time, in pieces that stay in the
// first-level cache, at each x86-64 level.
#include "scaled_masked_softmax.h"

#include <algorithm>
#include <memory>
#include <new>

#include "device/philox.h"
#include "host/lanes.h"
#include "multi_tensor_cpu.h"

namespace apex {
namespace {
constexpr int64_t piece = 2048;  // elements; a few of them stay in the first-level cache
// Rows of so many at most are taken some at a time, step by step: one waits for its own steps alone.
constexpr int64_t short_row = 256, together = 8;

// Memory for all of a row, padded as `read` does it; of a long one where there is so much.
template <class Math> class RowBuffer {
 public:
  explicit RowBuffer(int64_t keys)
      : longer_(keys > piece ? new (std::nothrow) Math[size_t(keys + lanes)] : nullptr),
        holds(keys <= piece || longer_) {}
  // For elements from `i` on, of a piece at least.
  APEX_INLINE Math* at(int64_t i) { return longer_ ? longer_.get() + i : piece_; }

 private:
  alignas(64) Math piece_[piece];
  std::unique_ptr<Math[]> longer_;

 public:
  const bool holds;  // a row; else it is read three times, a piece at a time
};

// Zeros are zero bits in every element type.
APEX_INLINE void clear(void* tensor, int32_t type, int64_t i, int64_t n) {
  if (n) clear_bytes(static_cast<char*>(tensor) + i * bytes_of(type), n * bytes_of(type));
}

// Whether dropout keeps elements [element, element + n) of a tensor: bytes, 1 or 0.
template <class Arguments> APEX_INLINE void keep(const Arguments& a, int64_t element, int64_t n, uint8_t* kept) {
  const uint64_t key = *reinterpret_cast<const uint64_t*>(a.seed);
  for (int64_t j = 0; j < n;) {
    const int64_t at = element + j;
    uint32_t bits = gpu::philox_keep_eight_finely(key, uint64_t(at / 8), a.keep) >> at % 8;
    for (int64_t left = 8 - at % 8; left && j < n; --left, ++j, bits >>= 1) kept[j] = uint8_t(bits & 1);
  }
}

template <class Math> struct Forward {
  const gpu::SoftmaxForward& a;
  const bool fetched = is_fetched(a.rows * a.keys, a.type);

  // As `read_some`, with -inf behind the elements up to a `count` that has no rest over the lanes: rests take as long.
  APEX_INLINE const Math* read(const TileConversions<Math>& convert, int64_t base, const uint8_t* mask, int64_t i,
                               int64_t n, Math* buffer, bool* keeps, int64_t* count) const {
    const Math* x = read_some(convert, base, mask, i, n, buffer, keeps);
    *count = (n + lanes - 1) / lanes * lanes;
    if (*count == n) return x;
    if (x != buffer) copy_bytes(buffer, x, n * int64_t(sizeof(Math)));
    std::fill(buffer + n, buffer + *count, gpu::minus_infinity(Math()));
    return buffer;
  }
  // Elements [i, i + n) of a row, -inf in the place of those that the mask takes, as they lie or in `buffer`; sets
  // `keeps` if it leaves any.
  APEX_INLINE const Math* read_some(const TileConversions<Math>& convert, int64_t base, const uint8_t* mask, int64_t i,
                                    int64_t n, Math* buffer, bool* keeps) const {
    const Math* x = load_tile(convert, a.input, a.type, base + i, n, buffer);
    if (a.negative) {
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) buffer[j] = -x[j];
      x = buffer;
    }
    if (!mask) {
      *keeps = true;
      return x;
    }
    *keeps |= a.additive ? add(convert, mask, i, n, x, buffer) : leave_out(mask + i, n, x, buffer);
    return buffer;
  }
  APEX_INLINE bool leave_out(const uint8_t* mask, int64_t n, const Math* x, Math* y) const {
    uint8_t kept = 0;
    const Math least = gpu::minus_infinity(Math());
    for (int64_t j = 0; j < n; ++j) kept |= uint8_t(mask[j] == 0);
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) y[j] = mask[j] ? least : x[j];
    return kept;
  }
  // Likewise, of a mask of numbers.
  APEX_INLINE bool add(const TileConversions<Math>& convert, const uint8_t* mask, int64_t i, int64_t n, const Math* x,
                       Math* y) const {
    alignas(64) Math buffer[piece];
    const Math* m = load_tile(convert, mask, a.type, i, n, buffer);
    uint8_t kept = 0;
    const Math least = gpu::minus_infinity(Math());
    for (int64_t j = 0; j < n; ++j) kept |= uint8_t(m[j] != least);
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) y[j] = m[j] == least ? least : x[j] + m[j];
    return kept;
  }
  // Elements of a row whose softmax is x * share, as they are or as dropout leaves them.
  APEX_INLINE void write(const TileConversions<Math>& convert, int64_t element, int64_t n, Math* x, Math share) const {
    gpu::u8* const to = a.seed ? a.softmax : a.output;
    Math* const y = made_tile(to, a.type, element, x);
    if (fetched) fetch_tile(a.input, a.type, element + a.keys, n);
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) y[j] = x[j] * share;
    store_tile(convert, to, a.type, element, n, static_cast<const Math*>(y));
    if (!a.seed) return;
    alignas(64) uint8_t kept[piece];
    const Math scale = Math(a.kept_by);
    keep(a, element, n, kept);
    if (a.kept) copy_bytes(a.kept + element, kept, n);
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) x[j] = kept[j] ? y[j] * scale : Math(0);
    store_tile(convert, a.output, a.type, element, n, static_cast<const Math*>(x));
  }
  // y = e^(x - top), and their sum.
  APEX_INLINE Math powers(const Math* x, int64_t n, Math top, Math* y) const {
    const Math magnitude = Math(a.magnitude);
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) y[j] = gpu::exp_of_negative((x[j] - top) * magnitude);
    return sum_of<Math>(n, [&](int64_t j) APEX_INLINE_LAMBDA { return y[j]; });
  }
  APEX_INLINE int64_t length_of(int64_t row) const {
    return a.causal ? gpu::softmax_length(a.keys, a.queries, row % a.queries, a.causal) : a.keys;
  }
  APEX_INLINE const uint8_t* mask_of(int64_t row) const {
    if (!a.mask) return nullptr;
    const int64_t query = row % a.queries, group = row / a.queries;
    return a.mask + group / a.heads * a.mask_batch + group % a.heads * a.mask_head + query * a.mask_query;
  }
  APEX_INLINE void write_zeros(const TileConversions<Math>& convert, int64_t base, Math* buffer) const {
    for (int64_t i = 0; i < a.keys; i += piece) {
      const int64_t n = std::min<int64_t>(piece, a.keys - i);
      std::fill(buffer, buffer + n, Math(0));
      write(convert, base + i, n, buffer, Math(1));
    }
  }
  APEX_INLINE void run_short(const TileConversions<Math>& convert, int64_t row, int64_t rows, Math* buffer) const {
    const Math* x[together];
    Math top[together], total[together];
    int64_t count[together];
    bool keeps[together] = {};
    for (int64_t k = 0; k < rows; ++k) {
      const int64_t base = (row + k) * a.keys;
      x[k] = read(convert, base, mask_of(row + k), 0, length_of(row + k), buffer + k * short_row, keeps + k, count + k);
      keeps[k] = keeps[k] && count[k];
    }
    for (int64_t k = 0; k < rows; ++k) {
      Lanes<Highest, Math> highest(gpu::Least<Math>::finite);
      highest.take(count[k], [&](int64_t j) APEX_INLINE_LAMBDA { return x[k][j]; });
      top[k] = highest.whole();
    }
    for (int64_t k = 0; k < rows; ++k) total[k] = powers(x[k], count[k], top[k], buffer + k * short_row);
    for (int64_t k = 0; k < rows; ++k) {
      const int64_t base = (row + k) * a.keys, length = length_of(row + k);
      if (!keeps[k]) {
        write_zeros(convert, base, buffer + k * short_row);
        continue;
      }
      write(convert, base, length, buffer + k * short_row, Math(1) / total[k]);
      clear(a.output, a.type, base + length, a.keys - length);
    }
  }
  APEX_INLINE void run_row(const TileConversions<Math>& convert, int64_t row, RowBuffer<Math>& buffer) const {
    const int64_t base = row * a.keys, length = length_of(row);
    const uint8_t* mask = mask_of(row);
    const bool once = length <= piece;
    bool keeps = false;
    const Math* x = nullptr;
    int64_t count = 0;
    Lanes<Highest, Math> highest(gpu::Least<Math>::finite);
    for (int64_t i = 0; i < length; i += piece) {
      x = read(convert, base, mask, i, std::min(piece, length - i), buffer.at(i), &keeps, &count);
      highest.take(count, [&](int64_t j) APEX_INLINE_LAMBDA { return x[j]; });
    }
    if (!keeps) return write_zeros(convert, base, buffer.at(0));
    const Math top = highest.whole();
    Math total = Math(0);
    for (int64_t i = 0; i < length; i += piece) {
      if (!once) x = read(convert, base, mask, i, std::min(piece, length - i), buffer.at(i), &keeps, &count);
      total += powers(x, count, top, buffer.at(i));
    }
    const Math share = Math(1) / total;
    for (int64_t i = 0; i < length; i += piece) {
      const int64_t n = std::min(piece, length - i);
      if (!buffer.holds) {
        x = read(convert, base, mask, i, n, buffer.at(i), &keeps, &count);
        powers(x, count, top, buffer.at(i));
      }
      write(convert, base + i, n, buffer.at(i), share);
    }
    clear(a.output, a.type, base + length, a.keys - length);
  }
  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    RowBuffer<Math> buffer(a.keys);
    if (a.keys <= short_row)
      for (int64_t row = begin; row < end; row += together)
        run_short(convert, row, std::min<int64_t>(together, end - row), buffer.at(0));
    else
      for (int64_t row = begin; row < end; ++row) run_row(convert, row, buffer);
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

template <class Math> struct Backward {
  const gpu::SoftmaxBackward& a;
  const bool fetched = is_fetched(a.rows * a.keys, a.type);

  APEX_INLINE int64_t length_of(int64_t row) const {
    return a.causal ? gpu::softmax_length(a.keys, a.queries, row % a.queries, a.causal) : a.keys;
  }

  // No gradient for what dropout did not keep.
  APEX_INLINE const Math* drop(int64_t element, int64_t n, const Math* dy, Math* buffer) const {
    if (!a.kept && !a.seed) return dy;
    alignas(64) uint8_t made[piece];
    const uint8_t* kept = a.kept ? a.kept + element : made;
    if (!a.kept) keep(a, element, n, made);
#pragma GCC ivdep
    for (int64_t j = 0; j < n; ++j) buffer[j] = kept[j] ? dy[j] : Math(0);
    return buffer;
  }
  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    const Math scale = Math(a.scale);
    alignas(64) Math first[piece], second[piece], third[piece], total[together];
    const Math *y = first, *dy = second;
    const auto read = [&](int64_t at, int64_t n) APEX_INLINE_LAMBDA {
      y = load_tile(convert, a.output, a.type, at, n, first);
      dy = drop(at, n, load_tile(convert, a.grad_output, a.type, at, n, second), second);
    };
    for (int64_t row = begin; a.keys <= short_row && row < end; row += together) {
      const int64_t rows = std::min<int64_t>(together, end - row), base = row * a.keys, n = rows * a.keys;
      read(base, n);
      for (int64_t k = 0; k < rows; ++k)
        total[k] = sum_of<Math>(length_of(row + k),
                                [&](int64_t j) APEX_INLINE_LAMBDA { return y[k * a.keys + j] * dy[k * a.keys + j]; });
      Math* const dx = made_tile(a.grad_input, a.type, base, third);
      for (int64_t k = 0; k < rows; ++k) {
        const int64_t from = k * a.keys, length = length_of(row + k);
#pragma GCC ivdep
        for (int64_t j = from; j < from + length; ++j) dx[j] = y[j] * ((dy[j] - total[k]) * scale);
        std::fill(dx + from + length, dx + from + a.keys, Math(0));
      }
      store_tile(convert, a.grad_input, a.type, base, n, static_cast<const Math*>(dx));
    }
    if (a.keys <= short_row) return;
    for (int64_t row = begin; row < end; ++row) {
      const int64_t base = row * a.keys, length = length_of(row);
      const bool once = length <= piece;
      Math total = Math(0);
      for (int64_t i = 0; i < length; i += piece) {
        const int64_t n = std::min(piece, length - i);
        read(base + i, n);
        total += sum_of<Math>(n, [&](int64_t j) APEX_INLINE_LAMBDA { return y[j] * dy[j]; });
      }
      for (int64_t i = 0; i < length; i += piece) {
        const int64_t n = std::min(piece, length - i);
        if (!once) read(base + i, n);
        Math* const dx = made_tile(a.grad_input, a.type, base + i, third);
        if (fetched) {
          fetch_tile(a.output, a.type, base + a.keys, n);
          fetch_tile(a.grad_output, a.type, base + a.keys, n);
        }
#pragma GCC ivdep
        for (int64_t j = 0; j < n; ++j) dx[j] = y[j] * ((dy[j] - total) * scale);
        store_tile(convert, a.grad_input, a.type, base + i, n, static_cast<const Math*>(dx));
      }
      clear(a.grad_input, a.type, base + length, a.keys - length);
    }
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

template <class Rows> void run(const Rows& rows, int64_t count, int64_t keys) {
  run_at_level(rows, 0, count, std::max<int64_t>(1, elements_per_task / 4 / keys));
}
}  // namespace

void scaled_masked_softmax_forward_cpu(const gpu::SoftmaxForward& a) {
  if (a.type == APEX_F64) run(Forward<double>{a}, a.rows, a.keys);
  else run(Forward<float>{a}, a.rows, a.keys);
}
void scaled_masked_softmax_backward_cpu(const gpu::SoftmaxBackward& a) {
  if (a.type == APEX_F64) run(Backward<double>{a}, a.rows, a.keys);
  else run(Backward<float>{a}, a.rows, a.keys);
}
}  // namespace apex
