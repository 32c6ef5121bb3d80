// Elementwise operations over whole lists of tensors in one launch.
//
// An operation is a struct (AdamUpdate, ScaleUpdate, ...) with
//   Arguments             the scalars, passed by value
//   lists                 how many tensors it sees at once: element i of every list makes one call
//   read, written         bit k: list k is loaded, stored
//   begin(arguments)      once a block; false: the launch does nothing (an overflow was flagged)
//   tensor(arguments, t)  once a tensor and block: scalars that differ from tensor to tensor
//   update(x0, x1, ...)   one element of each list, in registers
//   end(arguments)        once a thread, after its last element
//   after_cpu(arguments)  CPU alone: once, by the calling thread, after all elements
// The same struct runs on the CPU (csrc/host/multi_tensor_cpu.h), so that each formula stands once.
#pragma once
#include "multi_tensor_table.h"

namespace gpu {
template <int... I> struct Indices {};
template <int N, int... I> struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I> struct MakeIndices<0, I...> { using type = Indices<I...>; };

// Defaults of what most operations do not need.
struct ElementwiseOperation {
  static constexpr int reductions = 0;
  template <class Arguments> GPU_FN void tensor(const Arguments&, u32) {}
  template <class Arguments> GPU_FN void end(const Arguments&) {}
#if defined(GPU_HOST)
  template <class Arguments> static void after_cpu(const Arguments&) {}
#endif
};

#if !defined(GPU_HOST)
constexpr int bytes_per_access = 16;
constexpr u32 multi_tensor_threads = 512;

// N elements as accesses of 16 bytes (or one smaller access).
template <class T, int N, class Math> GPU_FN void load_vector(Math (&x)[N], const T* p) {
  constexpr int width = N * sizeof(T) > bytes_per_access ? bytes_per_access / sizeof(T) : N;
  GPU_UNROLL_FOR (int i = 0; i < N; i += width) {
    const Vector<T, width> a = *reinterpret_cast<const Vector<T, width>*>(p + i);
    GPU_UNROLL_FOR (int j = 0; j < width; ++j) x[i + j] = load_as<Math>(a.v[j]);
  }
}
template <class T, int N, class Math> GPU_FN void store_vector(T* p, const Math (&x)[N]) {
  constexpr int width = N * sizeof(T) > bytes_per_access ? bytes_per_access / sizeof(T) : N;
  GPU_UNROLL_FOR (int i = 0; i < N; i += width) {
    Vector<T, width> a;
    GPU_UNROLL_FOR (int j = 0; j < width; ++j) store_as(a.v[j], x[i + j]);
    *reinterpret_cast<Vector<T, width>*>(p + i) = a;
  }
}

struct Chunk {
  u32 tensor;
  i64 begin;   // first element
  i32 length;  // elements
};
// Every thread of the block asks for the same chunk, so each step of the search is one broadcast load.
GPU_FN Chunk find_chunk(const TensorTable& table, u32 chunk) {
  const u32* first_chunk = global_pointer<const u32>((u64)table.first_chunk);
  u32 low = 0, high = table.tensors;  // first_chunk[low] <= chunk < first_chunk[high]
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    if (first_chunk[middle] <= chunk) low = middle;
    else high = middle;
  }
  const i64 begin = (i64)(chunk - first_chunk[low]) * table.chunk_size;
  const i64 left = global_pointer<const i64>((u64)table.sizes)[low] - begin;
  return {low, begin, left < (i64)table.chunk_size ? (i32)left : (i32)table.chunk_size};
}

template <class Math, class... T> struct MultiTensor {
  static constexpr int lists = sizeof...(T);
  static constexpr int smallest() {
    const int sizes[] = {(int)sizeof(T)...};
    int bytes = bytes_per_access;
    for (int k = 0; k < lists; ++k) bytes = sizes[k] < bytes ? sizes[k] : bytes;
    return bytes;
  }
  static constexpr int width = bytes_per_access / smallest();

  template <class Op, int... I>
  static GPU_FN void update_chunk(Op& op, const TensorTable& table, const Chunk& chunk, Indices<I...>) {
    const u64* addresses = global_pointer<const u64>((u64)table.addresses) + chunk.tensor;
    const u64 base[lists] = {addresses[(u64)I * table.tensors]...};
    if (base[0] == 0) return;
    const u64 at[lists] = {base[I] + (u64)chunk.begin * sizeof(T)...};
    u64 bits = 0;
    GPU_UNROLL_FOR (int k = 0; k < lists; ++k) bits |= at[k];

    i32 done = 0;
    if (bits % bytes_per_access == 0) {
      const i32 vectors = chunk.length / width, stride = block_size_x();
      for (i32 i = thread_x(); i < vectors; i += Op::unroll * stride) {
        Math x[Op::unroll][lists][width];
        GPU_UNROLL_FOR (int u = 0; u < Op::unroll; ++u) {
          const i32 j = i + u * stride;
          if (j < vectors) (load_list<(Op::read >> I & 1), T>(x[u][I], at[I], j), ...);
        }
        GPU_UNROLL_FOR (int u = 0; u < Op::unroll; ++u) {
          const i32 j = i + u * stride;
          if (j >= vectors) break;
          GPU_UNROLL_FOR (int v = 0; v < width; ++v) op.update(x[u][I][v]...);
          (store_list<(Op::written >> I & 1), T>(at[I], j, x[u][I]), ...);
        }
      }
      done = vectors * width;
    }
    for (i32 i = done + thread_x(); i < chunk.length; i += block_size_x()) {
      Math x[lists];
      ((x[I] = (Op::read >> I & 1) ? load_as<Math>(global_pointer<const T>(at[I])[i]) : Math(0)), ...);
      op.update(x[I]...);
      (store_element<(Op::written >> I & 1), T>(at[I], i, x[I]), ...);
    }
  }

  template <class Op> static GPU_FN void run(const TensorTable& table, const typename Op::Arguments& arguments) {
    Op op;
    if (!op.begin(arguments)) return;
    for (u32 c = block_x(); c < table.chunks; c += grid_x()) {
      const Chunk chunk = find_chunk(table, c);
      op.tensor(arguments, chunk.tensor);
      update_chunk(op, table, chunk, typename MakeIndices<lists>::type());
    }
    op.end(arguments);
  }

 private:
  template <bool wanted, class E> static GPU_FN void load_list(Math (&x)[width], u64 at, i32 vector) {
    if constexpr (wanted) load_vector<E>(x, global_pointer<const E>(at) + (i64)vector * width);
    else
      GPU_UNROLL_FOR (int v = 0; v < width; ++v) x[v] = Math(0);
  }
  template <bool wanted, class E> static GPU_FN void store_list(u64 at, i32 vector, const Math (&x)[width]) {
    if constexpr (wanted) store_vector<E>(global_pointer<E>(at) + (i64)vector * width, x);
  }
  template <bool wanted, class E> static GPU_FN void store_element(u64 at, i32 i, Math x) {
    if constexpr (wanted) store_as(global_pointer<E>(at)[i], x);
  }
};
#endif
}  // namespace gpu

// One kernel: MULTI_TENSOR_KERNEL(name, operation, arithmetic, element type of list 0, of list 1, ...)
#define MULTI_TENSOR_KERNEL(name, Op, Math, ...)                                                   \
  extern "C" GPU_KERNEL(gpu::multi_tensor_threads) void name(gpu::TensorTable table,               \
                                                             gpu::Op<Math>::Arguments arguments) { \
    gpu::MultiTensor<Math, __VA_ARGS__>::run<gpu::Op<Math>>(table, arguments);                     \
  }                                                                                                \
  GPU_REGISTER(name)
