// The CPU variant of multi-tensor operations that reduce: partial results a chunk, added up in a fixed order, so
// that the number of threads does not show in the result.
#pragma once
#include "device/multi_tensor_reduce.h"
#include "host/lanes.h"
#include "host/multi_tensor_cpu.h"

namespace apex {
// How apex_tensor_lists.scratch is divided. Totals stand where every launch of these lists finds them, whatever
// the length of its runs.
inline gpu::ReductionScratch reduction_scratch(const apex_tensor_lists& lists, uint32_t reductions, uint32_t run = 1) {
  gpu::ReductionScratch scratch{};
  scratch.run = run;
  scratch.runs = (lists.chunks + run - 1) / run;
  scratch.partials = static_cast<double*>(lists.scratch);
  scratch.totals = scratch.partials + size_t(reductions) * (size_t(lists.chunks) + lists.tensors);
  scratch.done = reinterpret_cast<gpu::u32*>(scratch.totals + size_t(reductions) * lists.tensors);
  return scratch;
}

// Looks like an elementwise operation to CpuOperation's loops: results of one chunk go to its partials.
template <class Op, class Math> struct CpuReduction {
  static constexpr int lists = Op::lists, reductions = Op::reductions;

  const apex_tensor_lists* tensors;
  const typename Op::Arguments* arguments;
  Math* partials;
  Math* all_totals;  // [reductions][tensors]: a later launch may read them

  const uint64_t* sizes() const { return tensors->image + size_t(tensors->lists) * tensors->tensors; }
  const uint32_t* first_chunk() const { return reinterpret_cast<const uint32_t*>(sizes() + tensors->tensors); }

  // Independent lanes keep the additions vectorised, and their order fixed.
  template <int... I>
  inline __attribute__((always_inline)) void run_range(int level, Op& op, const uint64_t (&base)[lists], int64_t begin,
                                                       int64_t end, Math (&sums)[reductions],
                                                       gpu::Indices<I...>) const {
    const auto& convert = tile_conversions(level, Math());
    CpuTiles<Op, Math> tiles;
    alignas(64) Math lane_sums[reductions][lanes] = {};
    for (int64_t i = begin; i < end; i += tile) {
      const int64_t n = std::min(tile, end - i);
      tiles.load(convert, tensors->dtypes, base, i, n);
      Math* const x[lists] = {tiles.x[I]...};
      each_lane(n, [&](int64_t j, int64_t l) APEX_INLINE_LAMBDA {
        Math add[reductions];
        op.update(x[I][j]..., add);
        for (int r = 0; r < reductions; ++r) lane_sums[r][l] = Op::Reduction::combine(lane_sums[r][l], add[r]);
      });
      tiles.store(convert, tensors->dtypes, base, i, n);
    }
    for (int r = 0; r < reductions; ++r) {
      sums[r] = Math(0);
      for (int64_t l = 0; l < lanes; ++l) sums[r] = Op::Reduction::combine(sums[r], lane_sums[r][l]);
    }
  }

  inline __attribute__((always_inline)) void run_chunks(int level, int64_t begin, int64_t end) const {
    const auto& t = *tensors;
    Op op;
    if (!op.begin(*arguments)) return;
    uint32_t tensor =
        uint32_t(std::upper_bound(first_chunk(), first_chunk() + t.tensors + 1, uint32_t(begin)) - first_chunk()) - 1;
    for (int64_t c = begin; c < end; ++c) {
      while (c >= first_chunk()[tensor + 1]) ++tensor;
      uint64_t base[lists];
      for (int k = 0; k < lists; ++k) base[k] = t.image[size_t(k) * t.tensors + tensor];
      Math sums[reductions] = {};
      if (base[0] != 0) {
        op.tensor(*arguments, tensor);
        const int64_t from = (c - first_chunk()[tensor]) * int64_t(t.chunk_size);
        const int64_t to = std::min<int64_t>(from + t.chunk_size, int64_t(sizes()[tensor]));
        run_range(level, op, base, from, to, sums, typename gpu::MakeIndices<lists>::type());
      }
      for (int r = 0; r < reductions; ++r) partials[size_t(r) * t.chunks + c] = sums[r];
    }
    op.end(*arguments);
  }

  void finish() const {
    Op op;
    if (!op.begin(*arguments)) return;
    // In double: these sums have as many terms as there are chunks and tensors, one after the other.
    double sums[reductions] = {};
    Math all[reductions], totals[reductions];
    for (uint32_t tensor = 0; tensor < tensors->tensors; ++tensor) {
      for (int r = 0; r < reductions; ++r) {
        const Math* partial = partials + size_t(r) * tensors->chunks;
        double sum = 0;
        for (uint32_t c = first_chunk()[tensor]; c < first_chunk()[tensor + 1]; ++c)
          sum = Op::Reduction::combine(sum, double(partial[c]));
        totals[r] = all_totals[size_t(r) * tensors->tensors + tensor] = Math(sum);
        sums[r] = Op::Reduction::combine(sums[r], sum);
      }
      op.finish_tensor(*arguments, tensor, totals);
    }
    for (int r = 0; r < reductions; ++r) all[r] = Math(sums[r]);
    op.finish(*arguments, all);
  }

  APEX_CPU_LEVELS(APEX_RUN_LEVEL)

  static void run(const apex_tensor_lists* tensors, const void* arguments) {
    const auto scratch = reduction_scratch(*tensors, reductions);
    const CpuReduction reduction{tensors, static_cast<const typename Op::Arguments*>(arguments),
                                 reinterpret_cast<Math*>(scratch.partials), reinterpret_cast<Math*>(scratch.totals)};
    run_on_threads(reduction, *tensors);
    reduction.finish();
    Op::after_cpu(*reduction.arguments);
  }
};
}  // namespace apex
