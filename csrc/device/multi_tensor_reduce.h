// Operations over lists of tensors that also reduce: norms, and updates that need norms of what they wrote.
//
// Such an operation has, beside what multi_tensor.h asks for,
//   Reduction             Sum or Maximum
//   reductions            how many quantities each element contributes
//   update(x0, ..., add)  as there; writes the element's contributions to add[reductions]
//   finish_tensor(arguments, t, totals)  once for every tensor, empty and absent ones too (their totals are 0)
//   finish(arguments, totals)            once, after all tensors
// One launch does it all: the last block to finish a tensor reduces that tensor's partial results, the last of
// these ends the launch's work. The order of every sum is fixed, so results are the same from run to run.
#pragma once
#include "multi_tensor.h"
#include "reduce.h"

namespace gpu {
// A block takes a run of chunks, and reduces once for each tensor that its run touches: a segment. Along the
// table either the run or the tensor moves on, so run + tensor numbers the segments, and those of one tensor lie
// side by side. The memory is zeroed once when it is made; every launch leaves `done` zeroed.
struct ReductionScratch {
  double* partials;  // [reductions][runs + tensors]
  double* totals;    // [reductions][tensors]
  u32* done;         // [tensors + 1]: segments finished of each tensor; tensors finished
  u32 run;           // chunks
  u32 runs;          // of the whole table
};

// What a thread adds up between the elements.
template <class Op, class Math> struct Accumulating {
  static constexpr int unroll = Op::unroll;
  static constexpr u32 read = Op::read, written = Op::written;
  Op op;
  Math sums[Op::reductions];

  template <class... X> GPU_FN void update(X&... x) {
    Math add[Op::reductions];
    op.update(x..., add);
    GPU_UNROLL_FOR (int r = 0; r < Op::reductions; ++r) sums[r] = Op::Reduction::combine(sums[r], add[r]);
  }
};

#if !defined(GPU_HOST)
template <class Math, class... T> struct MultiTensorReduce {
  using Elements = MultiTensor<Math, T...>;

  // Partials and totals are stored as Math in slots of 8 bytes.
  static GPU_FN Math* slots(double* p) { return reinterpret_cast<Math*>(p); }
  static GPU_FN Math* partials(const TensorTable& table, const ReductionScratch& scratch, int r) {
    return slots(scratch.partials) + (u64)r * (scratch.runs + table.tensors);
  }

  template <class Op>
  static GPU_FN void run(const TensorTable& table, const typename Op::Arguments& arguments,
                         const ReductionScratch& scratch) {
    using Reduction = typename Op::Reduction;
    constexpr int reductions = Op::reductions;
    Accumulating<Op, Math> a;
    if (!a.op.begin(arguments)) return;
    const u32* first_chunk = global_pointer<const u32>((u64)table.first_chunk);
    GPU_SHARED(u32, is_last, 1);

    for (u32 b = block_x(); b < scratch.runs; b += grid_x()) {
      const u32 end = b + 1 < scratch.runs ? (b + 1) * scratch.run : table.chunks;
      for (u32 c = b * scratch.run; c < end;) {
        Chunk segment = find_chunk(table, c);
        const u32 t = segment.tensor, first = first_chunk[t], last = first_chunk[t + 1];
        const u32 next = last < end ? last : end;
        const i64 left = global_pointer<const i64>((u64)table.sizes)[t] - segment.begin;
        const i64 wanted = (i64)(next - c) * table.chunk_size;
        segment.length = (i32)(left < wanted ? left : wanted);
        c = next;

        a.op.tensor(arguments, t);
        GPU_UNROLL_FOR (int r = 0; r < reductions; ++r) a.sums[r] = Math(0);
        Elements::update_chunk(a, table, segment, typename MakeIndices<Elements::lists>::type());
        GPU_UNROLL_FOR (int r = 0; r < reductions; ++r) {
          const Math sum = block_reduce<Reduction>(a.sums[r]);
          if (thread_x() == 0) partials(table, scratch, r)[b + t] = sum;
        }
        const u32 first_run = first / scratch.run, segments = (last - 1) / scratch.run - first_run + 1;
        if (!is_last_of(scratch.done + t, segments, is_last)) continue;

        GPU_UNROLL_FOR (int r = 0; r < reductions; ++r) {
          const Math* of_tensor = partials(table, scratch, r) + first_run + t;
          Math total = Math(0);
          for (u32 i = thread_x(); i < segments; i += block_size_x())
            total = Reduction::combine(total, load_coherent(of_tensor + i));
          total = block_reduce<Reduction>(total);
          if (thread_x() == 0) slots(scratch.totals)[(u64)r * table.tensors + t] = total;
        }
        if (is_last_of(scratch.done + table.tensors, table.tensors_with_chunks, is_last))
          finish(a.op, table, arguments, scratch);
      }
    }
    if (table.chunks == 0) finish(a.op, table, arguments, scratch);
    a.op.end(arguments);
  }

 private:
  template <class Op>
  static GPU_FN void finish(Op& op, const TensorTable& table, const typename Op::Arguments& arguments,
                            const ReductionScratch& scratch) {
    const u32* first_chunk = global_pointer<const u32>((u64)table.first_chunk);
    Math all[Op::reductions];
    GPU_UNROLL_FOR (int r = 0; r < Op::reductions; ++r) all[r] = Math(0);
    for (u32 t = thread_x(); t < table.tensors; t += block_size_x()) {
      const bool empty = first_chunk[t] == first_chunk[t + 1];
      Math totals[Op::reductions];
      GPU_UNROLL_FOR (int r = 0; r < Op::reductions; ++r) {
        totals[r] = empty ? Math(0) : load_coherent(slots(scratch.totals) + (u64)r * table.tensors + t);
        all[r] = Op::Reduction::combine(all[r], totals[r]);
      }
      op.finish_tensor(arguments, t, totals);
    }
    GPU_UNROLL_FOR (int r = 0; r < Op::reductions; ++r) all[r] = block_reduce<typename Op::Reduction>(all[r]);
    if (thread_x() == 0) op.finish(arguments, all);
  }
};
#endif
}  // namespace gpu

// One kernel: MULTI_TENSOR_REDUCE_KERNEL(name, operation, arithmetic, element type of list 0, ...)
#define MULTI_TENSOR_REDUCE_KERNEL(name, Op, Math, ...)                                            \
  extern "C" GPU_KERNEL(gpu::multi_tensor_threads) void name(                                      \
      gpu::TensorTable table, gpu::Op<Math>::Arguments arguments, gpu::ReductionScratch scratch) { \
    gpu::MultiTensorReduce<Math, __VA_ARGS__>::run<gpu::Op<Math>>(table, arguments, scratch);      \
  }                                                                                                \
  GPU_REGISTER(name)
