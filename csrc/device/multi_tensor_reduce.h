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
// Device memory of one launch, zeroed once when it is made; every launch leaves `done` zeroed.
struct ReductionScratch {
  double* partials;  // [reductions][chunks]
  double* totals;    // [reductions][tensors]
  u32* done;         // [tensors + 1]: chunks finished of each tensor; tensors finished
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
    GPU_UNROLL for (int r = 0; r < Op::reductions; ++r) sums[r] = Op::Reduction::combine(sums[r], add[r]);
  }
};

#if !defined(GPU_HOST)
template <class Math, class... T> struct MultiTensorReduce {
  using Elements = MultiTensor<Math, T...>;

  // Partials and totals are stored as Math in slots of 8 bytes.
  static GPU_FN Math* slots(double* p) { return reinterpret_cast<Math*>(p); }

  template <class Op>
  static GPU_FN void run(const TensorTable& table, const typename Op::Arguments& arguments, const ReductionScratch& scratch) {
    using Reduction = typename Op::Reduction;
    constexpr int reductions = Op::reductions;
    Accumulating<Op, Math> a;
    if (!a.op.begin(arguments)) return;
    const u32* first_chunk = global_pointer<const u32>((u64)table.first_chunk);
    GPU_SHARED(u32, is_last, 1);

    for (u32 c = block_x(); c < table.chunks; c += grid_x()) {
      const Chunk chunk = find_chunk(table, c);
      a.op.tensor(arguments, chunk.tensor);
      GPU_UNROLL for (int r = 0; r < reductions; ++r) a.sums[r] = Math(0);
      Elements::update_chunk(a, table, chunk, typename MakeIndices<Elements::lists>::type());
      GPU_UNROLL for (int r = 0; r < reductions; ++r) {
        const Math sum = block_reduce<Reduction>(a.sums[r]);
        if (thread_x() == 0) slots(scratch.partials)[(u64)r * table.chunks + c] = sum;
      }
      const u32 first = first_chunk[chunk.tensor], count = first_chunk[chunk.tensor + 1] - first;
      if (!is_last_of(scratch.done + chunk.tensor, count, is_last)) continue;

      GPU_UNROLL for (int r = 0; r < reductions; ++r) {
        const Math* partials = slots(scratch.partials) + (u64)r * table.chunks + first;
        Math total = Math(0);
        for (u32 i = thread_x(); i < count; i += block_size_x()) total = Reduction::combine(total, load_coherent(partials + i));
        total = block_reduce<Reduction>(total);
        if (thread_x() == 0) slots(scratch.totals)[(u64)r * table.tensors + chunk.tensor] = total;
      }
      if (is_last_of(scratch.done + table.tensors, table.tensors_with_chunks, is_last)) finish(a.op, table, arguments, scratch);
    }
    if (table.chunks == 0) finish(a.op, table, arguments, scratch);
    a.op.end(arguments);
  }

 private:
  // Counts this block in; true, to all its threads, in the block that completes `count` (the counter is 0 again).
  static GPU_FN bool is_last_of(u32* counter, u32 count, u32 (&is_last)[1]) {
    sync_threads();
    if (thread_x() == 0) {
      device_fence();
      is_last[0] = atomic_increment(counter) == count - 1;
      if (is_last[0]) *counter = 0;
      device_fence();
    }
    sync_threads();
    return is_last[0];
  }

  template <class Op>
  static GPU_FN void finish(Op& op, const TensorTable& table, const typename Op::Arguments& arguments,
                            const ReductionScratch& scratch) {
    const u32* first_chunk = global_pointer<const u32>((u64)table.first_chunk);
    Math all[Op::reductions];
    GPU_UNROLL for (int r = 0; r < Op::reductions; ++r) all[r] = Math(0);
    for (u32 t = thread_x(); t < table.tensors; t += block_size_x()) {
      const bool empty = first_chunk[t] == first_chunk[t + 1];
      Math totals[Op::reductions];
      GPU_UNROLL for (int r = 0; r < Op::reductions; ++r) {
        totals[r] = empty ? Math(0) : load_coherent(slots(scratch.totals) + (u64)r * table.tensors + t);
        all[r] = Op::Reduction::combine(all[r], totals[r]);
      }
      op.finish_tensor(arguments, t, totals);
    }
    GPU_UNROLL for (int r = 0; r < Op::reductions; ++r) all[r] = block_reduce<typename Op::Reduction>(all[r]);
    if (thread_x() == 0) op.finish(arguments, all);
  }
};
#endif
}  // namespace gpu

// One kernel: MULTI_TENSOR_REDUCE_KERNEL(name, operation, arithmetic, element type of list 0, ...)
#define MULTI_TENSOR_REDUCE_KERNEL(name, Op, Math, ...)                                                           \
  extern "C" GPU_KERNEL(gpu::multi_tensor_threads) void name(                                                     \
      gpu::TensorTable table, gpu::Op<Math>::Arguments arguments, gpu::ReductionScratch scratch) {                \
    gpu::MultiTensorReduce<Math, __VA_ARGS__>::run<gpu::Op<Math>>(table, arguments, scratch);                     \
  }                                                                                                               \
  GPU_REGISTER(name)
