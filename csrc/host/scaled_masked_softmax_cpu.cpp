// The CPU variant of scaled_masked_softmax and masked_softmax_dropout: a row at a time, in pieces that stay in the
// first-level cache, at each x86-64 level.
#include "scaled_masked_softmax.h"

#include <algorithm>
#include <cstring>

#include "device/exponential.h"
#include "device/philox.h"
#include "multi_tensor_cpu.h"

namespace apex {
namespace {
constexpr int64_t lanes = 16;    // independent sums: they vectorise, and their order is fixed
constexpr int64_t piece = 2048;  // elements; a row that is one piece is read once, a longer one three times

template <class Math>
APEX_INLINE void load(const TileConversions<Math>& convert, const void* tensor, int32_t type, int64_t i, int64_t n,
                      Math* to) {
  if (type == DtypeOf<Math>::value) std::memcpy(to, static_cast<const Math*>(tensor) + i, size_t(n) * sizeof(Math));
  else convert.load[type](to, tensor, i, n);
}
template <class Math>
APEX_INLINE void store(const TileConversions<Math>& convert, void* tensor, int32_t type, int64_t i, int64_t n,
                       const Math* x) {
  if (type == DtypeOf<Math>::value) std::memcpy(static_cast<Math*>(tensor) + i, x, size_t(n) * sizeof(Math));
  else convert.store[type](tensor, i, x, n);
}
template <class Math> APEX_INLINE void fill(Math* x, int64_t n, Math value) {
  for (int64_t j = 0; j < n; ++j) x[j] = value;
}
APEX_INLINE int64_t bytes_of(int32_t type) { return type == APEX_F64 ? 8 : type == APEX_F32 ? 4 : 2; }
// Zeros are zero bits in every element type.
APEX_INLINE void clear(void* tensor, int32_t type, int64_t i, int64_t n) {
  std::memset(static_cast<char*>(tensor) + i * bytes_of(type), 0, size_t(n * bytes_of(type)));
}
struct Sum {
  template <class Math> static APEX_INLINE Math combine(Math a, Math b) { return a + b; }
};
struct Highest {
  template <class Math> static APEX_INLINE Math combine(Math a, Math b) { return gpu::max_number(a, b); }
};
template <class Reduction, class Math> APEX_INLINE Math reduce(const Math* x, int64_t n, Math start) {
  alignas(64) Math of[lanes];
  for (int64_t l = 0; l < lanes; ++l) of[l] = start;
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes)
    for (int64_t l = 0; l < lanes; ++l) of[l] = Reduction::combine(of[l], x[j + l]);
  for (int64_t l = 0; j < n; ++j, ++l) of[l] = Reduction::combine(of[l], x[j]);
  for (int64_t half = lanes / 2; half; half /= 2)
    for (int64_t l = 0; l < half; ++l) of[l] = Reduction::combine(of[l], of[l + half]);
  return of[0];
}
// Of a block at a time: fewer roundings come one after the other.
template <class Math> APEX_INLINE Math sum(const Math* x, int64_t n) {
  constexpr int64_t block = 128;
  Math total = Math(0);
  for (int64_t i = 0; i < n; i += block) total += reduce<Sum>(x + i, std::min(block, n - i), Math(0));
  return total;
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

  // Elements [i, i + n) of a row, -inf in the place of those that the mask takes; whether it leaves any.
  APEX_INLINE bool read(const TileConversions<Math>& convert, int64_t base, const uint8_t* mask, int64_t i, int64_t n,
                        Math* x) const {
    load(convert, a.input, a.type, base + i, n, x);
    if (a.negative)
      for (int64_t j = 0; j < n; ++j) x[j] = -x[j];
    if (!mask) return true;
    if (a.additive) return add(convert, mask, i, n, x);
    uint8_t kept = 0;
    const Math least = gpu::minus_infinity(Math());
    for (int64_t j = 0; j < n; ++j) {
      kept |= uint8_t(mask[i + j] == 0);
      x[j] = mask[i + j] ? least : x[j];
    }
    return kept;
  }
  // Likewise, of a mask of numbers.
  APEX_INLINE bool add(const TileConversions<Math>& convert, const uint8_t* mask, int64_t i, int64_t n, Math* x) const {
    alignas(64) Math m[piece];
    load(convert, mask, a.type, i, n, m);
    uint8_t kept = 0;
    const Math least = gpu::minus_infinity(Math());
    for (int64_t j = 0; j < n; ++j) {
      kept |= uint8_t(m[j] != least);
      x[j] = m[j] == least ? least : x[j] + m[j];
    }
    return kept;
  }
  // Elements of a row whose softmax is x, as they are or as dropout leaves them.
  APEX_INLINE void write(const TileConversions<Math>& convert, int64_t element, int64_t n, Math* x) const {
    if (a.seed) {
      alignas(64) uint8_t kept[piece];
      const Math scale = Math(a.kept_by);
      store(convert, a.softmax, a.type, element, n, static_cast<const Math*>(x));
      keep(a, element, n, kept);
      if (a.kept) std::memcpy(a.kept + element, kept, size_t(n));
      for (int64_t j = 0; j < n; ++j) x[j] = kept[j] ? x[j] * scale : Math(0);
    }
    store(convert, a.output, a.type, element, n, static_cast<const Math*>(x));
  }
  APEX_INLINE void powers(Math* x, int64_t n, Math top) const {
    const Math magnitude = Math(a.magnitude);
    for (int64_t j = 0; j < n; ++j) x[j] = gpu::exp_series((x[j] - top) * magnitude);
  }
  APEX_INLINE void run_row(const TileConversions<Math>& convert, int64_t row, Math* x) const {
    const int64_t query = row % a.queries, group = row / a.queries, base = row * a.keys;
    const int64_t length = gpu::softmax_length(a.keys, a.queries, query, a.causal);
    const uint8_t* mask =
        a.mask ? a.mask + group / a.heads * a.mask_batch + group % a.heads * a.mask_head + query * a.mask_query
               : nullptr;
    const bool once = length <= piece;
    bool keeps = false;
    Math top = gpu::Least<Math>::finite;
    for (int64_t i = 0; i < length; i += piece) {
      const int64_t n = std::min(piece, length - i);
      keeps |= read(convert, base, mask, i, n, x);
      top = reduce<Highest>(x, n, top);
    }
    if (!keeps) {
      for (int64_t i = 0; i < a.keys; i += piece) {
        const int64_t n = std::min<int64_t>(piece, a.keys - i);
        fill(x, n, Math(0));
        write(convert, base + i, n, x);
      }
      return;
    }
    Math total = Math(0);
    for (int64_t i = 0; i < length; i += piece) {
      const int64_t n = std::min(piece, length - i);
      if (!once) read(convert, base, mask, i, n, x);
      powers(x, n, top);
      total += sum(x, n);
    }
    for (int64_t i = 0; i < length; i += piece) {
      const int64_t n = std::min(piece, length - i);
      if (!once) {
        read(convert, base, mask, i, n, x);
        powers(x, n, top);
      }
      for (int64_t j = 0; j < n; ++j) x[j] /= total;
      write(convert, base + i, n, x);
    }
    clear(a.output, a.type, base + length, a.keys - length);
  }
  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    alignas(64) Math x[piece];
    for (int64_t row = begin; row < end; ++row) run_row(convert, row, x);
  }
  APEX_CPU_LEVELS(APEX_RUN_LEVEL)
};

template <class Math> struct Backward {
  const gpu::SoftmaxBackward& a;

  // No gradient for what dropout did not keep.
  APEX_INLINE void drop(int64_t element, int64_t n, Math* dy) const {
    alignas(64) uint8_t made[piece];
    const uint8_t* kept = a.kept ? a.kept + element : made;
    if (!a.kept) {
      if (!a.seed) return;
      keep(a, element, n, made);
    }
    for (int64_t j = 0; j < n; ++j) dy[j] = kept[j] ? dy[j] : Math(0);
  }
  APEX_INLINE void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& convert = tile_conversions(level, Math());
    const Math scale = Math(a.scale);
    alignas(64) Math y[piece], dy[piece], product[piece];
    const auto read = [&](int64_t at, int64_t n) {
      load(convert, a.output, a.type, at, n, y);
      load(convert, a.grad_output, a.type, at, n, dy);
      drop(at, n, dy);
    };
    for (int64_t row = begin; row < end; ++row) {
      const int64_t base = row * a.keys, length = gpu::softmax_length(a.keys, a.queries, row % a.queries, a.causal);
      const bool once = length <= piece;
      Math total = Math(0);
      for (int64_t i = 0; i < length; i += piece) {
        const int64_t n = std::min(piece, length - i);
        read(base + i, n);
        for (int64_t j = 0; j < n; ++j) product[j] = y[j] * dy[j];
        total += sum(product, n);
      }
      for (int64_t i = 0; i < length; i += piece) {
        const int64_t n = std::min(piece, length - i);
        if (!once) read(base + i, n);
        for (int64_t j = 0; j < n; ++j) product[j] = y[j] * ((dy[j] - total) * scale);
        store(convert, a.grad_input, a.type, base + i, n, static_cast<const Math*>(product));
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
