// The CPU variant of every multi-tensor operation: the operation's own update(), in loops that vectorise,
// compiled once for each level of the processor.
#pragma once
#include <algorithm>

#include "device/multi_tensor.h"
#include "host/multi_tensor.h"
#include "host/multi_tensor_tiles.h"
#include "host/parallel.h"

// LEVEL(number, attributes) for each level of cpu_level.h; the attributes let g++ use its instructions.
#if defined(__x86_64__)
#define APEX_CPU_LEVELS(LEVEL)                        \
  LEVEL(1)                                            \
  LEVEL(2, __attribute__((target("arch=x86-64-v2")))) \
  LEVEL(3, __attribute__((target("arch=x86-64-v3")))) \
  LEVEL(4, __attribute__((target("arch=x86-64-v4,prefer-vector-width=512"))))
#elif defined(__aarch64__)
#define APEX_CPU_LEVELS(LEVEL) \
  LEVEL(1)                     \
  LEVEL(2, __attribute__((target("arch=armv8.2-a+sve"))))
#else
#define APEX_CPU_LEVELS(LEVEL) LEVEL(1)
#endif
// Inside a class with run_chunks(level, begin, end): the same once more for each level.
#define APEX_RUN_LEVEL(number, ...) \
  __VA_ARGS__ void level##number(int64_t begin, int64_t end) const { this->run_chunks(number, begin, end); }

namespace apex {
// Runs [begin, end) on the caller's threads, at this machine's level.
template <class Chunked> void run_at_level(const Chunked& chunked, int64_t begin, int64_t end, int64_t grain) {
  auto run_level = &Chunked::level1;
#if defined(__x86_64__)
  const int32_t level = apex_cpu_level();
  run_level = level >= 4 ? &Chunked::level4 : level == 3 ? &Chunked::level3 : level == 2 ? &Chunked::level2 : run_level;
#elif defined(__aarch64__)
  if (apex_cpu_level() >= 2) run_level = &Chunked::level2;
#endif
  parallel_for(begin, end, grain, [&](int64_t first, int64_t last) {
    (chunked.*run_level)(first, last);
    finish_streams();
  });
}
constexpr int64_t elements_per_task = 32768;

// All chunks of the table.
template <class Chunked> void run_on_threads(const Chunked& chunked, const apex_tensor_lists& tensors) {
  run_at_level(chunked, 0, tensors.chunks,
               std::max<int64_t>(1, elements_per_task / std::max<uint32_t>(1, tensors.chunk_size)));
}

// A tile of every list of an operation: tensors of the arithmetic's own type are worked on in place, others are
// converted, by what the lists say they are.
template <class Op, class Math> struct CpuTiles {
  static constexpr int lists = Op::lists;
  alignas(64) Math converted[lists][tile];
  Math* x[lists];

  // Elements [i, i + n), of the lists that the operation reads.
  inline __attribute__((always_inline)) void load(const TileConversions<Math>& convert, const int32_t* dtypes,
                                                  const uint64_t (&base)[lists], int64_t i, int64_t n) {
    for (int k = 0; k < lists; ++k) {
      const bool in_place = dtypes[k] == DtypeOf<Math>::value;
      x[k] = in_place ? reinterpret_cast<Math*>(base[k]) + i : converted[k];
      if (!in_place && (Op::read >> k & 1))
        convert.load[dtypes[k]](converted[k], reinterpret_cast<const void*>(base[k]), i, n);
    }
  }
  // Likewise, of those that it writes.
  inline __attribute__((always_inline)) void store(const TileConversions<Math>& convert, const int32_t* dtypes,
                                                   const uint64_t (&base)[lists], int64_t i, int64_t n) const {
    for (int k = 0; k < lists; ++k)
      if (x[k] == converted[k] && (Op::written >> k & 1))
        convert.store[dtypes[k]](reinterpret_cast<void*>(base[k]), i, converted[k], n);
  }
};

// Of an operation that has a shorter way for some elements: of [begin, end) of the tensors at `base` it updates as many
// as it can, and returns where it stopped. As a rule there is none.
template <class Op> struct CpuShortcut {
  static APEX_INLINE int64_t run(int, const Op&, const int32_t*, const uint64_t*, int64_t begin, int64_t) {
    return begin;
  }
};

template <class Op, class Math> struct CpuOperation {
  static constexpr int lists = Op::lists;

  const apex_tensor_lists* tensors;
  const typename Op::Arguments* arguments;

  // Elements [begin, end) of one tensor.
  template <int... I>
  inline __attribute__((always_inline)) void run_range(int level, Op& op, const uint64_t (&base)[lists], int64_t begin,
                                                       int64_t end, gpu::Indices<I...>) const {
    const auto& convert = tile_conversions(level, Math());
    CpuTiles<Op, Math> tiles;
    for (int64_t i = begin, n; i < end; i += n) {
      i = CpuShortcut<Op>::run(level, op, tensors->dtypes, base, i, end);
      n = std::min(tile, end - i);
      tiles.load(convert, tensors->dtypes, base, i, n);
      Math* const x[lists] = {tiles.x[I]...};
      // Tensors of one call are the same element or none: an element never depends on another.
#pragma GCC ivdep
      for (int64_t j = 0; j < n; ++j) op.update(x[I][j]...);
      tiles.store(convert, tensors->dtypes, base, i, n);
    }
  }

  // Chunks [begin, end) of the table.
  inline __attribute__((always_inline)) void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& t = *tensors;
    const uint64_t* sizes = t.image + size_t(t.lists) * t.tensors;
    const uint32_t* first_chunk = reinterpret_cast<const uint32_t*>(sizes + t.tensors);
    Op op;
    if (!op.begin(*arguments)) return;
    uint32_t tensor =
        uint32_t(std::upper_bound(first_chunk, first_chunk + t.tensors + 1, uint32_t(begin)) - first_chunk) - 1;
    for (int64_t c = begin; c < end; ++tensor) {
      const int64_t last = std::min<int64_t>(end, first_chunk[tensor + 1]);
      if (last <= c) continue;
      uint64_t base[lists];
      for (int k = 0; k < lists; ++k) base[k] = t.image[size_t(k) * t.tensors + tensor];
      if (base[0] != 0) {
        op.tensor(*arguments, tensor);
        const int64_t from = (c - first_chunk[tensor]) * t.chunk_size;
        const int64_t to =
            std::min<int64_t>((last - first_chunk[tensor]) * int64_t(t.chunk_size), int64_t(sizes[tensor]));
        run_range(level, op, base, from, to, typename gpu::MakeIndices<lists>::type());
      }
      c = last;
    }
    op.end(*arguments);
  }

  APEX_CPU_LEVELS(APEX_RUN_LEVEL)

  static void run(const apex_tensor_lists* tensors, const void* arguments) {
    const CpuOperation operation{tensors, static_cast<const typename Op::Arguments*>(arguments)};
    run_on_threads(operation, *tensors);
    Op::after_cpu(*operation.arguments);
  }
};
}  // namespace apex
