// The kernels of rotary positional embedding (rope.h says what they compute): for heads that lie anyhow; rope_even.h
// has those for even rows, rope_alone.h for few of them.
//
// A block takes a few positions, or a part of one, and makes their sines and cosines once, in shared memory; each of
// its threads keeps those of its own elements in registers over the heads that it takes. A thread moves two vectors of
// a head, half a pair each, and has several heads in flight.
#include "rope_alone.h"
#include "rope_block.h"
#include "rope_even.h"

namespace gpu {
namespace {
#if !defined(GPU_HOST)
// What one access moves, as it lies in memory (width 1: its value).
template <class Math, int width, i32 fixed> struct RopeVector {
  Words words;

  GPU_FN static i32 type_of(const Rope& a) { return fixed < 0 ? a.type : fixed; }
  GPU_FN void load(const Rope& a, i64 index) {
    words = load_words<width>(a.input + index * bytes_of(type_of(a)), type_of(a));
  }
  GPU_FN void store(const Rope& a, i64 index) const {
    store_words<width>(a.output + index * bytes_of(type_of(a)), type_of(a), words);
  }
  GPU_FN void get(const Rope& a, Math (&x)[width]) const { unpack(x, words, type_of(a)); }
  GPU_FN void set(const Rope& a, const Math (&x)[width]) { words = pack(x, type_of(a)); }
};
template <class Math, i32 fixed> struct RopeVector<Math, 1, fixed> {
  Math value[1];

  GPU_FN void load(const Rope& a, i64 index) { load_values(value, a.input, a.type, index); }
  GPU_FN void store(const Rope& a, i64 index) const { store_values(a.output, a.type, index, value); }
  GPU_FN void get(const Rope&, Math (&x)[1]) const { x[0] = value[0]; }
  GPU_FN void set(const Rope&, const Math (&x)[1]) { value[0] = x[0]; }
};

// One of a thread's heads: which position of the block, batch and head; they advance by the block's heads at once.
struct RopeItem {
  u32 index;  // among the block's
  i32 position;
  u32 batch, head;

  GPU_FN void advance(const RopeItem& step, u32 batches, u32 heads) {
    index += step.index;
    position += step.position;
    batch += step.batch;
    head += step.head;
    if (head >= heads) {
      head -= heads;
      ++batch;
    }
    if (batch >= batches) {
      batch -= batches;
      ++position;
    }
  }
};

template <class Math, int width, i32 fixed> GPU_FN void rope_heads(const Rope& a) {
  GPU_DYNAMIC_SHARED(Math, table);
  GPU_SHARED(i64, rows_of, rope_most_positions);
  GPU_SHARED(i32, broken, 1);
  using Cells = RopeVector<Math, width, fixed>;
  const u32 threads = block_size_x(), slots = threads / (u32)a.lane_threads;
  const u32 my_lane = thread_x() % (u32)a.lane_threads, my_slot = thread_x() / (u32)a.lane_threads;
  const bool works = my_slot < slots;
  const u32 batches = (u32)a.batch, heads = (u32)a.heads, rows = batches * heads;
  const RopeItem step{slots, a.step_positions, (u32)a.step_batches, (u32)a.step_heads};
  const i32 turned = a.groups * a.rotary, lanes = RopeLane<width>::count(a);
  const i64 places = a.height * a.width;
  const i64 input_step = width == 1 ? a.in_element : 1;  // wider vectors need elements side by side

  const auto row_of = [&](i32 position, i64 y, i64 x) {
    return a.cu_seqlens ? rows_of[position] : a.groups == 2 ? y : x;
  };
  for (u32 block = block_x(); block < a.blocks; block += grid_x()) {
    const i64 first = (i64)(block / a.chunks) * a.positions, first_row = block % a.chunks * a.chunk_rows;
    const i32 count = (i32)(places - first < a.positions ? places - first : a.positions);
    const u32 block_rows = (u32)(rows - first_row < a.chunk_rows ? rows - first_row : a.chunk_rows);
    const u32 items = (u32)count * block_rows;
    const auto y_of = [&](i64 place) { return a.height == 1 ? i64(0) : (i64)((u32)place / (u32)a.width); };

    bool made = false;  // the table
    for (i32 tile = 0; tile < lanes; tile += a.lane_threads) {
      const i32 lane_index = tile + (i32)my_lane;
      const bool active = works && lane_index < lanes;
      const RopeLane<width> lane(a, lane_index);
      const u32 start = (u32)first_row + my_slot;
      RopeItem item{my_slot, (i32)(start / rows), start % rows / heads, start % rows % heads};
      i32 known = -1;  // whose coefficients these are
      Math cos_low[width], cos_high[width], sin_low[width] = {}, sin_high[width] = {};
      const u32 at_once = slots * rope_in_flight;
      for (u32 begin = 0; begin < items; begin += at_once) {
        Cells low[rope_in_flight], high[rope_in_flight];
        i32 position[rope_in_flight];
        i64 to[rope_in_flight];
        GPU_UNROLL_FOR (int n = 0; n < rope_in_flight; ++n) {
          position[n] = active && item.index < items ? item.position : -1;
          if (position[n] >= 0) {
            const i64 place = first + item.position, y = y_of(place), x = place - y * a.width;
            const i64 from = y * a.in_y + x * a.in_x + item.batch * a.in_batch + item.head * a.in_head;
            to[n] = y * a.out_y + x * a.out_x + item.batch * a.out_batch + item.head * a.out_head;
            low[n].load(a, from + lane.low * input_step);
            if (lane.has_high) high[n].load(a, from + lane.high * input_step);
          }
          item.advance(step, batches, heads);
        }
        if (!made) {  // while the first loads are on their way
          sync_threads();
          if (a.cu_seqlens) {
            const bool has_span = (i32)thread_x() <= a.sequences;
            rope_find_rows(a, first, count, has_span ? rope_span(a, (i32)thread_x()) : RopeSpan{}, rows_of, broken);
          }
          if (a.table) {
            for (i32 i = (i32)thread_x(); i < count * turned; i += (i32)threads) {
              const i32 p = i / turned, e = i - p * turned;
              const i64 place = first + p, y = y_of(place), x = place - y * a.width;
              rope_entry(a, row_of(p, y, x), x, e, table[2 * p * turned + e], table[(2 * p + 1) * turned + e]);
            }
            sync_threads();
          }
          made = true;
        }
        GPU_UNROLL_FOR (int n = 0; n < rope_in_flight; ++n) {
          if (position[n] < 0) continue;
          if (lane.turns && !(a.cu_seqlens && row_of(position[n], 0, 0) == rope_unturned)) {
            if (position[n] != known) {
              known = position[n];
              const i32 sin_of_low = a.transposed ? lane.high : lane.low,
                        sin_of_high = a.transposed ? lane.low : lane.high;
              if (a.table) {
                const Math* const c = table + 2 * known * turned;
                const Math* const s = c + turned;
                rope_copy(cos_low, c + lane.low);
                rope_copy(cos_high, c + lane.high);
                rope_copy(sin_low, s + sin_of_low);
                rope_copy(sin_high, s + sin_of_high);
              } else if constexpr (width == 1) {
                const i64 place = first + known, y = y_of(place), x = place - y * a.width;
                const i64 row = row_of(known, y, x);
                Math s[2];
                rope_entry(a, row, x, lane.low, cos_low[0], s[0]);
                rope_entry(a, row, x, lane.high, cos_high[0], s[1]);
                sin_low[0] = a.transposed ? s[1] : s[0];
                sin_high[0] = a.transposed ? s[0] : s[1];
              }
            }
            Math u[width], v[width], turned_u[width], turned_v[width];
            low[n].get(a, u);
            high[n].get(a, v);
            GPU_UNROLL_FOR (int i = 0; i < width; ++i) {
              turned_u[i] = fma(v[i], sin_low[i], u[i] * cos_low[i]);
              turned_v[i] = fma(u[i], sin_high[i], v[i] * cos_high[i]);
            }
            low[n].set(a, turned_u);
            high[n].set(a, turned_v);
          }
          low[n].store(a, to[n] + lane.low);
          if (lane.has_high) high[n].store(a, to[n] + lane.high);
        }
      }
    }
  }
}
#endif
}  // namespace
}  // namespace gpu

// V(name, arithmetic, elements of a vector, element type or -1: as the arguments say)
#define ROPE_KERNELS(V)               \
  V(bf16x8, float, 8, gpu::type_bf16) \
  V(f16x8, float, 8, gpu::type_f16)   \
  V(f32x4, float, 4, gpu::type_f32)   \
  V(any4, float, 4, -1)               \
  V(any1, float, 1, -1)               \
  V(f64, double, 1, gpu::type_f64)
// Registers for four blocks at once; compilers for Volta spill then.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750
#define ROPE_BLOCKS 3
#else
#define ROPE_BLOCKS 4
#endif
#define KERNEL(name, Math, width, type)                                                         \
  extern "C" GPU_KERNEL(gpu::rope_threads, ROPE_BLOCKS) void rope_##name(gpu::Rope arguments) { \
    gpu::await_previous_kernel();                                                               \
    gpu::rope_heads<Math, width, type>(arguments);                                              \
  }                                                                                             \
  GPU_REGISTER(rope_##name)
ROPE_KERNELS(KERNEL)

// W(name, elements of a vector, element type); those of small tensors are short, as a thread has one head.
#define ROPE_EVEN_KERNELS(W) W(bf16x8, 8, gpu::type_bf16) W(f16x8, 8, gpu::type_f16) W(f32x4, 4, gpu::type_f32)
#define EVEN_KERNEL(name, ...)                                                                  \
  extern "C" GPU_KERNEL(gpu::rope_threads, ROPE_BLOCKS) void rope_##name(gpu::Rope arguments) { \
    gpu::await_previous_kernel();                                                               \
    gpu::rope_even<__VA_ARGS__>(arguments);                                                     \
  }                                                                                             \
  GPU_REGISTER(rope_##name)
#define EVEN_KERNELS(name, width, type)                       \
  EVEN_KERNEL(even_##name, width, type, gpu::rope_even_heads) \
  EVEN_KERNEL(single_##name, width, type, 1)
ROPE_EVEN_KERNELS(EVEN_KERNELS)
#define ALONE_KERNEL(name, type)                                                                           \
  extern "C" GPU_KERNEL(gpu::rope_threads, ROPE_BLOCKS) void rope_alone_##name(gpu::RopeAlone arguments) { \
    gpu::rope_alone<type>(arguments);                                                                      \
  }                                                                                                        \
  GPU_REGISTER(rope_alone_##name)
ALONE_KERNEL(bf16, gpu::bfloat16)
ALONE_KERNEL(f16, gpu::half)
ALONE_KERNEL(f32, float)
