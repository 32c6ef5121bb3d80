// The CPU variant of every multi-tensor operation: the operation's own update(), in loops that vectorise,
// compiled once for each x86-64 level.
#pragma once
#include <algorithm>
#include <type_traits>

#include "device/multi_tensor.h"
#include "host/multi_tensor.h"
#include "host/parallel.h"

// Inside a class with run_chunks(begin, end): the same once more for each x86-64 level, whose instructions the
// attribute lets g++ use.
#define APEX_CPU_LEVEL(Class, name, ...) \
  __VA_ARGS__ static void name(const Class& c, int64_t begin, int64_t end) { c.run_chunks(begin, end); }
#if defined(__x86_64__)
#define APEX_CPU_LEVELS(Class)                                                  \
  APEX_CPU_LEVEL(Class, level1)                                                 \
  APEX_CPU_LEVEL(Class, level2, __attribute__((target("arch=x86-64-v2"))))      \
  APEX_CPU_LEVEL(Class, level3, __attribute__((target("arch=x86-64-v3"))))      \
  APEX_CPU_LEVEL(Class, level4, __attribute__((target("arch=x86-64-v4,prefer-vector-width=512"))))
#else
#define APEX_CPU_LEVELS(Class) APEX_CPU_LEVEL(Class, level1)
#endif

namespace apex {
// All chunks of the table, on the caller's threads, at this machine's level.
template <class Chunked> void run_on_threads(const Chunked& chunked, const apex_tensor_lists& tensors) {
  auto* run_level = Chunked::level1;
#if defined(__x86_64__)
  const int32_t level = apex_cpu_level();
  run_level = level >= 4 ? Chunked::level4 : level == 3 ? Chunked::level3 : level == 2 ? Chunked::level2 : Chunked::level1;
#endif
  constexpr int64_t elements_per_task = 32768;
  const int64_t grain = std::max<int64_t>(1, elements_per_task / std::max<uint32_t>(1, tensors.chunk_size));
  parallel_for(0, tensors.chunks, grain, [&](int64_t begin, int64_t end) { run_level(chunked, begin, end); });
}

template <class Op, class Math, class... T> struct CpuOperation {
  static constexpr int lists = sizeof...(T);
  static constexpr bool all_math = (std::is_same_v<T, Math> && ...);

  const apex_tensor_lists* tensors;
  const typename Op::Arguments* arguments;

  // Elements [begin, end) of one tensor.
  template <int... I>
  static inline __attribute__((always_inline)) void run_range(Op& op, const uint64_t (&base)[lists], int64_t begin,
                                                              int64_t end, gpu::Indices<I...>) {
    if constexpr (all_math) {
      // Tensors of one call are the same element or none: an element never depends on another.
#pragma GCC ivdep
      for (int64_t i = begin; i < end; ++i) op.update(reinterpret_cast<Math*>(base[I])[i]...);
    } else {
      constexpr int64_t tile = 128;  // converted in stack buffers that stay in the first-level cache
      alignas(64) Math x[lists][tile];
      for (int64_t i = begin; i < end; i += tile) {
        const int64_t n = std::min(tile, end - i);
        (load_tile<(Op::read >> I & 1), T>(x[I], base[I], i, n), ...);
#pragma GCC ivdep
        for (int64_t j = 0; j < n; ++j) op.update(x[I][j]...);
        (store_tile<(Op::written >> I & 1), T>(x[I], base[I], i, n), ...);
      }
    }
  }
  template <bool wanted, class E>
  static inline __attribute__((always_inline)) void load_tile(Math* x, uint64_t base, int64_t i, int64_t n) {
    if constexpr (wanted)
      for (int64_t j = 0; j < n; ++j) x[j] = gpu::load_as<Math>(reinterpret_cast<const E*>(base)[i + j]);
  }
  template <bool wanted, class E>
  static inline __attribute__((always_inline)) void store_tile(const Math* x, uint64_t base, int64_t i, int64_t n) {
    if constexpr (wanted)
      for (int64_t j = 0; j < n; ++j) gpu::store_as(reinterpret_cast<E*>(base)[i + j], x[j]);
  }

  // Chunks [begin, end) of the table.
  inline __attribute__((always_inline)) void run_chunks(int64_t begin, int64_t end) const {
    const auto& t = *tensors;
    const uint64_t* sizes = t.image + size_t(t.lists) * t.tensors;
    const uint32_t* first_chunk = reinterpret_cast<const uint32_t*>(sizes + t.tensors);
    Op op;
    if (!op.begin(*arguments)) return;
    uint32_t tensor = uint32_t(std::upper_bound(first_chunk, first_chunk + t.tensors + 1, uint32_t(begin)) - first_chunk) - 1;
    for (int64_t c = begin; c < end; ++tensor) {
      const int64_t last = std::min<int64_t>(end, first_chunk[tensor + 1]);
      if (last <= c) continue;
      uint64_t base[lists];
      for (int k = 0; k < lists; ++k) base[k] = t.image[size_t(k) * t.tensors + tensor];
      if (base[0] != 0) {
        op.tensor(*arguments, tensor);
        const int64_t from = (c - first_chunk[tensor]) * t.chunk_size;
        const int64_t to = std::min<int64_t>((last - first_chunk[tensor]) * int64_t(t.chunk_size), int64_t(sizes[tensor]));
        run_range(op, base, from, to, typename gpu::MakeIndices<lists>::type());
      }
      c = last;
    }
    op.end(*arguments);
  }

  APEX_CPU_LEVELS(CpuOperation)

  static void run(const apex_tensor_lists* tensors, const void* arguments) {
    const CpuOperation operation{tensors, static_cast<const typename Op::Arguments*>(arguments)};
    run_on_threads(operation, *tensors);
    Op::after_cpu(*operation.arguments);
  }
};
}  // namespace apex
