// Kernels that test the executor: what it must run rightly, and planted bugs that it must name.
#include "reduce.h"
#include "selftest.h"

using namespace gpu;
constexpr u32 most_threads = 1024;

// ---- semantics ---------------------------------------------------------------------------------------
// Threads leave at different points; the last warp is partial; the array is dynamic.
extern "C" GPU_KERNEL(1024) void selftest_early_exit(float* out, i32 n) {
  GPU_DYNAMIC_SHARED(float, s);
  const i32 t = (i32)thread_x();
  if (t >= n) return;
  s[t] = (float)t;
  sync_threads();
  out[t] = s[n - 1 - t];
  if (t % 3 == 0) return;
  sync_threads();
  out[t] += 1000.0f;
}
GPU_REGISTER(selftest_early_exit)

extern "C" GPU_KERNEL(1024) void selftest_shuffle(u32* out) {
  out[thread_x()] = shuffle_xor(1000u + thread_x(), 1) + 10000u * (shuffle_xor(lane_id(), 5) + 1);
}
GPU_REGISTER(selftest_shuffle)

extern "C" GPU_KERNEL(96, 2) void selftest_bounded(u32* out) { out[thread_x()] = thread_x(); }
GPU_REGISTER(selftest_bounded)

extern "C" GPU_KERNEL(1024) void selftest_count(u32* counter, u32* seen) {
  seen[atomic_increment(counter)] = block_x() * block_size_x() + thread_x();
}
GPU_REGISTER(selftest_count)

// Every thread leaves a number; the last block adds all of them up.
extern "C" GPU_KERNEL(1024) void selftest_last_block(float* numbers, u32* counter, float* total) {
  numbers[block_x() * block_size_x() + thread_x()] = (float)(thread_x() + 1);
  GPU_SHARED(u32, is_last, 1);
  if (!is_last_of(counter, grid_x(), is_last)) return;
  float sum = 0.0f;
  for (u32 b = 0; b < grid_x(); ++b) sum += load_coherent(numbers + b * block_size_x() + thread_x());
  sum = block_reduce<Sum>(sum);
  if (thread_x() == 0) total[0] += sum;
}
GPU_REGISTER(selftest_last_block)

// Sum of the block by way of shared memory; the warp's part by shuffles.
GPU_FN float warp_total(float v) {
  GPU_UNROLL_FOR (int m = warp_size / 2; m; m >>= 1) v += bit_cast<float>(shuffle_xor(bit_cast<u32>(v), m));
  return v;
}
template <bool barrier_before_read, bool barrier_before_write> GPU_FN float block_total(float v) {
  GPU_SHARED(float, partial, most_threads / warp_size);
  v = warp_total(v);
  if (barrier_before_write) sync_threads();
  if (lane_id() == 0) partial[thread_x() / warp_size] = v;
  if (barrier_before_read) sync_threads();
  float total = 0;
  for (u32 w = 0; w < block_size_x() / warp_size; ++w) total += partial[w];
  return total;
}
template <bool before_read, bool before_write> GPU_FN void two_totals(const float* x, float* out) {
  const float a = block_total<before_read, before_write>(x[thread_x()]);
  const float b = block_total<before_read, before_write>(x[thread_x()] * a);
  if (thread_x() == 0) out[0] = b;
}
extern "C" GPU_KERNEL(1024) void selftest_totals(const float* x, float* out) { two_totals<true, true>(x, out); }
GPU_REGISTER(selftest_totals)

// Device addresses three ways: an argument, inside a struct by value, and in a table that the struct points to.
extern "C" GPU_KERNEL(1024) void selftest_addresses(SelftestTable table, double scale, u8 add, float* total) {
  const u64* addresses = global_pointer<const u64>((u64)table.addresses);
  for (u32 k = 0; k < table.count; ++k) {
    float* list = global_pointer<float>(addresses[k]);
    for (i64 i = thread_x(); i < table.sizes[k]; i += block_size_x()) list[i] = (float)(list[i] * scale) + (float)add;
  }
  if (thread_x() == 0) total[block_x()] = (float)table.count;
}
GPU_REGISTER(selftest_addresses)

// Both ways for both 16-bit types: float -> 16 bits -> float.
extern "C" GPU_KERNEL(1024) void selftest_convert(const float* x, half* h, bfloat16* b, float* from_h, float* from_b,
                                                  i32 n) {
  const i32 i = (i32)(block_x() * block_size_x() + thread_x());
  if (i >= n) return;
  from_float(h[i], x[i]);
  from_float(b[i], x[i]);
  from_h[i] = to_float(h[i]);
  from_b[i] = to_float(b[i]);
}
GPU_REGISTER(selftest_convert)

// Every 16-bit pattern to float: the shortest way to all of to_float().
extern "C" GPU_KERNEL(1024) void selftest_widen(const half* h, const bfloat16* b, float* from_h, float* from_b, i32 n) {
  const i32 i = (i32)(block_x() * block_size_x() + thread_x());
  if (i >= n) return;
  from_h[i] = to_float(h[i]);
  from_b[i] = to_float(b[i]);
}
GPU_REGISTER(selftest_widen)

// Only the last element of each block's row: an index past 2^31 with only_block on sparse memory.
extern "C" GPU_KERNEL(1024) void selftest_far(u8* x, i64 row) {
  if (thread_x() == 0) x[(i64)block_x() * row + row - 1] = 7;
}
GPU_REGISTER(selftest_far)
extern "C" GPU_KERNEL(1024) void selftest_far_in_32_bits(u8* x, i32 row) {
  if (thread_x() == 0) x[(i32)block_x() * row + row - 1] = 7;
}
GPU_REGISTER(selftest_far_in_32_bits)

// ---- what cannot go on -------------------------------------------------------------------------------
extern "C" GPU_KERNEL(1024) void selftest_divergent_barrier(float* out) {
  if (thread_x() < 32) {
    sync_threads();
    out[0] = 1;
  } else {
    sync_threads();
    out[1] = 1;
  }
}
GPU_REGISTER(selftest_divergent_barrier)

extern "C" GPU_KERNEL(1024) void selftest_barrier_against_shuffle(u32* out) {
  if (thread_x() % 2) sync_threads();
  else out[thread_x()] = shuffle_xor(1, 2);
}
GPU_REGISTER(selftest_barrier_against_shuffle)

extern "C" GPU_KERNEL(1024) void selftest_divergent_shuffle(u32* out) {
  if (thread_x() % 2) out[0] = shuffle_xor(1, 1);
  else out[1] = shuffle_xor(2, 1);
}
GPU_REGISTER(selftest_divergent_shuffle)

// Waits for another block: blocks run one after another here, so that never comes.
extern "C" GPU_KERNEL(1024) void selftest_spin(volatile u32* flag) {
  while (!*flag) {}
}
GPU_REGISTER(selftest_spin)
extern "C" GPU_KERNEL(1024) void selftest_spin_at_barrier(volatile u32* flag) {
  while (!*flag) sync_threads();
}
GPU_REGISTER(selftest_spin_at_barrier)

// ---- planted bugs ------------------------------------------------------------------------------------
extern "C" GPU_KERNEL(1024) void selftest_past_tensor(float* x, i32 n) {
  for (i32 i = (i32)thread_x(); i <= n; i += (i32)block_size_x()) x[i] += 1.0f;
}
GPU_REGISTER(selftest_past_tensor)

extern "C" GPU_KERNEL(1024) void selftest_past_static_shared(float* out) {
  GPU_SHARED(float, a, 64);
  float* p = a;  // through a pointer: the bounds check of the array type would see it first
  p[thread_x() + 1] = 1;
  sync_threads();
  out[thread_x()] = p[thread_x()];
}
GPU_REGISTER(selftest_past_static_shared)

extern "C" GPU_KERNEL(1024) void selftest_past_dynamic_shared(float* out) {
  GPU_DYNAMIC_SHARED(float, s);
  s[thread_x() + 1] = 1;
  sync_threads();
  out[thread_x()] = s[thread_x()];
}
GPU_REGISTER(selftest_past_dynamic_shared)

extern "C" GPU_KERNEL(1024) void selftest_past_registers(float* out, i32 n) {
  float r[4] = {1, 2, 3, 4};
  for (i32 i = 0; i < n; ++i) r[i] *= 2;
  out[thread_x()] = r[0] + r[3];
}
GPU_REGISTER(selftest_past_registers)

extern "C" GPU_KERNEL(1024) void selftest_misaligned(const float* x, float* out) {
  using Four = Vector<float, 4>;
  *reinterpret_cast<Four*>(out + 4 * thread_x()) = *reinterpret_cast<const Four*>(x + 4 * thread_x());
}
GPU_REGISTER(selftest_misaligned)

extern "C" GPU_KERNEL(1024) void selftest_missing_barrier(const float* x, float* out) {
  two_totals<false, true>(x, out);
}
GPU_REGISTER(selftest_missing_barrier)
extern "C" GPU_KERNEL(1024) void selftest_reused_buffer(const float* x, float* out) { two_totals<true, false>(x, out); }
GPU_REGISTER(selftest_reused_buffer)

extern "C" GPU_KERNEL(1024) void selftest_unset_shared(float* out) {
  GPU_SHARED(float, a, 64);
  if (thread_x() % 2) a[thread_x()] = 1;
  sync_threads();
  out[thread_x()] = a[thread_x()];
}
GPU_REGISTER(selftest_unset_shared)

extern "C" GPU_KERNEL(1024) void selftest_divide(i32* out, i32 by) { out[thread_x()] = (i32)thread_x() / by; }
GPU_REGISTER(selftest_divide)

// ---- what only the executor has (until gpu.h has it too) ---------------------------------------------
#if defined(GPU_SIMT)
static void fill_stack(volatile char* outer, u64 depth) {
  volatile char frame[512];
  frame[0] = *outer;
  if (depth) fill_stack(frame, depth - 1);
  *outer = frame[0];
}
extern "C" GPU_KERNEL(1024) void selftest_stack_overflow(char* out) { fill_stack(out, 100000); }
GPU_REGISTER(selftest_stack_overflow)

extern "C" GPU_KERNEL(1024) void selftest_ballot(u64* out) {
  out[thread_x()] = simt::ballot(thread_x() % 3 == 0, __LINE__);
}
GPU_REGISTER(selftest_ballot)

// Where a thread is, in three dimensions: one line a thread of x, y, z of thread, block and sizes.
extern "C" GPU_KERNEL(1024) void selftest_where(u32* out) {
  const simt::Dim t = simt::self->thread, b = simt::current->block, n = simt::current->block_size,
                  g = simt::current->grid;
  const u32 block_index = (b.z * g.y + b.y) * g.x + b.x, index = (t.z * n.y + t.y) * n.x + t.x;
  out[block_index * (n.x * n.y * n.z) + index] += t.x + 10 * t.y + 100 * t.z + 1000 * b.x + 10000 * b.y + 100000 * b.z;
}
GPU_REGISTER(selftest_where)

// Neighbours in one warp exchange by shared memory; only a warp barrier lies between.
template <bool barrier> static void swap_neighbours(u32* out) {
  GPU_SHARED(u32, a, most_threads);
  a[thread_x()] = thread_x();
  if (barrier) simt::warp_barrier(__LINE__);
  out[thread_x()] = a[thread_x() ^ 1];
}
extern "C" GPU_KERNEL(1024) void selftest_warp_barrier(u32* out) { swap_neighbours<true>(out); }
GPU_REGISTER(selftest_warp_barrier)
extern "C" GPU_KERNEL(1024) void selftest_no_warp_barrier(u32* out) { swap_neighbours<false>(out); }
GPU_REGISTER(selftest_no_warp_barrier)

// Atomics on one shared word, both ways in which gpu.h may say so: no race; a plain read beside them: one.
template <bool plain_read> static void count_in_shared(u32* out) {
  GPU_SHARED(u32, count, 1);
  if (thread_x() == 0) count[0] = 0;
  sync_threads();
  __atomic_fetch_add(&count[0], 1u, __ATOMIC_RELAXED);
  {
    simt::Atomic atomic;
    count[0] += 1;
  }
  if (!plain_read) sync_threads();
  if (thread_x() == 0) out[0] = count[0];
}
extern "C" GPU_KERNEL(1024) void selftest_shared_atomics(u32* out) { count_in_shared<false>(out); }
GPU_REGISTER(selftest_shared_atomics)
extern "C" GPU_KERNEL(1024) void selftest_shared_atomics_and_read(u32* out) { count_in_shared<true>(out); }
GPU_REGISTER(selftest_shared_atomics_and_read)
#endif
