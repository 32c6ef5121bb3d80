#include "scaled_masked_softmax.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "device_limits.h"
#include "status.h"

namespace apex {
namespace {
constexpr const char* unit = "scaled_masked_softmax";
constexpr int64_t most_keys = 0xfffff000;

#define KERNEL(name) {unit, "scaled_masked_softmax_" name, 0, 1}
// Of one element type. `rows`, `masked`, `odd`: by vectors a thread, 1 and 4. `fixed`: 8 of them, one or two warps a
// row; `odd_fixed`: 9, one. `strip`: by elements of a row a lane, 9 and 19. `held`: 8 vectors a thread of the largest
// block.
struct Forward { apex_kernel rows[2], masked[2], odd[2], fixed[2], odd_fixed, strip[2], held, whole; };
struct Backward { apex_kernel rows[2], odd[2], fixed[2], odd_fixed, strip[2], held, whole; };
#define FORWARD(type)                                                          \
  {{KERNEL("forward_" type "x1"), KERNEL("forward_" type "x4")},               \
   {KERNEL("forward_masked_" type "x1"), KERNEL("forward_masked_" type "x4")}, \
   {KERNEL("forward_odd_" type "x1"), KERNEL("forward_odd_" type "x4")},       \
   {KERNEL("forward_" type "x8"), KERNEL("forward_" type "x8w2")},             \
   KERNEL("forward_odd_" type "x9"),                                           \
   {KERNEL("forward_strip_" type "x9"), KERNEL("forward_strip_" type "x19")},  \
   KERNEL("forward_held_" type),                                               \
   KERNEL("forward_long_" type)}
#define BACKWARD(type)                                                          \
  {{KERNEL("backward_" type "x1"), KERNEL("backward_" type "x4")},              \
   {KERNEL("backward_odd_" type "x1"), KERNEL("backward_odd_" type "x4")},      \
   {KERNEL("backward_" type "x8"), KERNEL("backward_" type "x8w2")},            \
   KERNEL("backward_odd_" type "x9"),                                           \
   {KERNEL("backward_strip_" type "x9"), KERNEL("backward_strip_" type "x19")}, \
   KERNEL("backward_held_" type),                                               \
   KERNEL("backward_long_" type)}
// In the order of apex_dtype.
Forward forward_kernels[] = {FORWARD("f32"), FORWARD("f16"), FORWARD("bf16")};
Backward backward_kernels[] = {BACKWARD("f32"), BACKWARD("f16"), BACKWARD("bf16")};
// Element by element: tensors that begin at different places between two vectors, and doubles.
apex_kernel forward_elements[] = {KERNEL("forward_long_any"), KERNEL("forward_long_f64")};
apex_kernel backward_elements[] = {KERNEL("backward_long_any"), KERNEL("backward_long_f64")};

// How threads share a row.
struct Layout {
  enum Kind { registers, fixed, odd_fixed, strip, held, whole, elements } kind;
  bool aligned;  // rows begin and end with a vector of 16 bytes
  int which;     // of the table's two
  int32_t lanes, shift;
  int32_t waiting, strip_rows;  // of `held` and `strip`
  uint32_t threads;
  int64_t blocks, shared;
};

// What a launch is asked to do. `tensors`: how many are read; `simple`: no mask.
struct Shape {
  int64_t rows, keys;
  int32_t type;
  bool simple, causal;
  int tensors;
};

constexpr int64_t held_vectors = 8, shared_beside = 1024;  // a thread; bytes that a block uses besides
constexpr int64_t vector_bytes = 16;

// Rows of a block of the largest size, of which one a multiprocessor works. False: there is no room for what registers
// do not hold, the second tensor; on AMD that of floats.
bool hold(const Shape& s, bool on_amd, const DeviceLimits& limits, Layout& l) {
  if (on_amd && s.tensors > 1 && s.type == APEX_F32) return false;
  const int64_t vectors = on_amd ? 0
                                 : std::min<int64_t>(s.tensors * held_vectors,
                                                     limits.shared_bytes / (gpu::softmax_held_threads * vector_bytes));
  const int64_t kept = on_amd ? 0 : (s.tensors - 1) * held_vectors;
  if (vectors < kept) return false;
  l.kind = Layout::held;
  l.waiting = int32_t(vectors - kept);
  l.threads = gpu::softmax_held_threads;
  l.shared = vectors * gpu::softmax_held_threads * vector_bytes;
  l.blocks = std::min<int64_t>(
      s.rows, on_amd ? most_threads / l.threads : limits.multiprocessors);  // there nothing stays for the next row
  return true;
}

// Strips of some 4 KB, enough of them for every multiprocessor. False: there are not.
bool cut_strips(const Shape& s, bool on_amd, const DeviceLimits& limits, Layout& l) {
  constexpr int64_t wanted_bytes = 4096, least_warps = 8;  // of a strip; of a multiprocessor
  const int64_t size = s.type == APEX_F32 ? 4 : 2, width = vector_bytes / size;
  const int64_t rows = width * std::max<int64_t>(1, wanted_bytes / (width * s.keys * size)),
                strips = ceil_divide(s.rows, rows);
  const int64_t warp_shared = (on_amd ? 1 : 2) * s.tensors * rows * s.keys * size;
  if (strips < limits.multiprocessors * least_warps || warp_shared > limits.shared_bytes) return false;
  int64_t warps = gpu::softmax_fixed_threads / limits.warp_size;
  while (warps > 1 && 2 * warps * warp_shared > limits.shared_bytes) warps /= 2;
  l.kind = Layout::strip;
  l.which = s.keys <= 9 * limits.warp_size ? 0 : 1;
  l.strip_rows = int32_t(rows);
  l.threads = uint32_t(ceil_divide(warps * limits.warp_size, limits.block_multiple) * limits.block_multiple);
  l.shared = l.threads / limits.warp_size * warp_shared;
  if (l.shared > limits.shared_bytes) return false;
  const int64_t at_once = std::clamp<int64_t>((limits.shared_bytes + shared_beside) / (l.shared + shared_beside), 1, 8);
  l.blocks = std::min(ceil_divide(strips, l.threads / limits.block_multiple), limits.multiprocessors * at_once);
  return true;
}

// Everything that says which kernel serves a shape is here. `tensors`: all of them, the first one first.
Layout choose(const Shape& s, bool mask_fits, bool on_amd, std::initializer_list<const void*> tensors,
              const DeviceLimits& limits) {
  const int64_t size = s.type == APEX_F32 ? 4 : 2, width = vector_bytes / size,
                first = reinterpret_cast<uintptr_t>(*tensors.begin()) % vector_bytes;
  Layout l{Layout::registers, false, 0, -1, int32_t(first / size), 0, 0, gpu::softmax_fixed_threads, 0, 0};
  const bool alike = std::all_of(tensors.begin(), tensors.end(), [&](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % vector_bytes == uintptr_t(first);
  });
  l.aligned = alike && first == 0 && s.keys % width == 0 && mask_fits;
  const int64_t vectors = l.aligned ? s.keys / width : ceil_divide(s.keys + width - 1, width), warp = limits.warp_size;
  int64_t rows_at_once = l.threads / warp;  // of a block
  if (s.type == APEX_F64 || !alike || first % size != 0) {
    l.kind = Layout::elements;
  } else if (s.simple && !s.causal && first == 0 && s.keys % width != 0 && s.keys >= 3 * warp && s.keys <= 19 * warp &&
             cut_strips(s, on_amd, limits, l)) {
    return l;
  } else if (vectors <= 4 * warp) {
    l.which = vectors <= warp ? 0 : 1;
    for (l.lanes = 0; (int64_t(l.which ? 4 : 1) << l.lanes) < vectors;) ++l.lanes;
    rows_at_once *= warp >> l.lanes;
  } else if (l.aligned && s.simple && vectors <= 8 * warp) {
    l.kind = Layout::fixed;
  } else if (!l.aligned && s.simple && vectors <= 9 * warp) {
    l.kind = Layout::odd_fixed;
  } else if (l.aligned && s.simple && vectors <= 16 * warp &&
             limits.block_multiple == warp) {  // not so on the executor
    l.kind = Layout::fixed;
    l.which = 1;
    l.threads = uint32_t(2 * warp);
    rows_at_once = 1;
  } else if (vectors <= 4 * int64_t(gpu::softmax_threads)) {
    l.which = 1;
    l.threads = uint32_t(ceil_divide(ceil_divide(vectors, 4), limits.block_multiple) * limits.block_multiple);
    rows_at_once = 1;
  } else if (l.aligned && s.simple && vectors <= held_vectors * gpu::softmax_held_threads &&
             hold(s, on_amd, limits, l)) {
    return l;
  } else {
    l.kind = Layout::whole;
  }
  if (l.kind == Layout::whole || l.kind == Layout::elements) {
    const int64_t wanted =
        ceil_divide(l.kind == Layout::elements ? s.keys : vectors, limits.block_multiple) * limits.block_multiple;
    l.threads = uint32_t(std::min<int64_t>(gpu::softmax_threads, wanted));
    rows_at_once = 1;
  }
  // Enough blocks for every multiprocessor; beyond, a block takes four turns or more, so that fewer have to be started.
  const int64_t blocks = ceil_divide(s.rows, rows_at_once);
  l.blocks =
      std::min<int64_t>(most_threads / l.threads,
                        std::max(std::min<int64_t>(blocks, limits.multiprocessors * 32), ceil_divide(blocks, 4)));
  return l;
}

// The kernel that a layout is for, elements aside. `rows`: the table's of aligned rows in registers.
template <class Kernels> apex_kernel& pick(Kernels& kernels, apex_kernel* rows, const Layout& l) {
  switch (l.kind) {
    case Layout::fixed:
      return kernels.fixed[l.which];
    case Layout::odd_fixed:
      return kernels.odd_fixed;
    case Layout::strip:
      return kernels.strip[l.which];
    case Layout::held:
      return kernels.held;
    case Layout::whole:
      return kernels.whole;
    default:
      return (l.aligned ? rows : kernels.odd)[l.which];
  }
}

// Whether a vector's worth of the mask can be read at once, in every row.
bool fits(const gpu::SoftmaxForward& a) {
  const int64_t width = a.type == APEX_F32 ? 4 : 8;
  return (int64_t(reinterpret_cast<uintptr_t>(a.mask)) | a.mask_batch | a.mask_head | a.mask_query) % width == 0;
}

int32_t check(int64_t rows, int64_t keys, int32_t type) {
  if (type < APEX_F32 || type > APEX_F64)
    return fail(APEX_ERROR_ARGUMENT, "%s: element types are float32, float16, bfloat16 and float64", unit);
  if (rows < 0 || keys < 0)
    return fail(APEX_ERROR_VALUE, "%s: %lld rows of %lld keys", unit, (long long)rows, (long long)keys);
  return APEX_OK;
}

template <class Arguments>
int32_t launch(const apex_place* place, apex_kernel& kernel, const Layout& layout, Arguments& a) {
  a.lanes = layout.lanes;
  a.shift = layout.shift;
  a.waiting = layout.waiting;
  a.strip_rows = layout.strip_rows;
  void* parameters[] = {&a};
  return apex_launch(place, &kernel, {uint32_t(layout.blocks), 1, 1}, {layout.threads, 1, 1}, uint32_t(layout.shared),
                     parameters);
}

// Answers APEX_OK with *cpu or not, or what the caller must answer.
int32_t resolve(const apex_place* place, int64_t keys, bool* cpu) {
  int32_t variant;
  if (const int32_t status = choose_variant(*place, unit, &variant)) return status;
  *cpu = variant == APEX_VARIANT_CPU;
  return keys > most_keys ? APEX_USE_REFERENCE : APEX_OK;
}
}  // namespace
}  // namespace apex

extern "C" int32_t apex_scaled_masked_softmax_forward(const apex_place* place, const gpu::SoftmaxForward* arguments,
                                                      double scale) {
  using namespace apex;
  gpu::SoftmaxForward a = *arguments;
  bool cpu;
  if (const int32_t status = check(a.rows, a.keys, a.type)) return status;
  if (const int32_t status = resolve(place, a.keys, &cpu)) return status;
  if (a.rows == 0 || a.keys == 0) return APEX_OK;
  a.magnitude = std::max(std::fabs(scale), 0x1p-126);
  if (scale != scale) a.magnitude = scale;
  const double factor = a.magnitude * 1.4426950408889634;
  a.factor = float(factor);
  a.factor_rest = std::isfinite(a.factor) ? float(factor - a.factor) : 0.0f;
  a.negative = scale < 0;
  if (cpu) {
    scaled_masked_softmax_forward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const Layout l = choose({a.rows, a.keys, a.type, !a.mask, a.causal != 0, 1}, !a.mask || fits(a),
                          place->platform == APEX_HIP, {a.input, a.output}, limits);
  if (l.kind == Layout::elements) return launch(place, forward_elements[a.type == APEX_F64], l, a);
  Forward& kernels = forward_kernels[a.type];
  return launch(place, pick(kernels, a.mask ? kernels.masked : kernels.rows, l), l, a);
}

extern "C" int32_t apex_scaled_masked_softmax_backward(const apex_place* place, const gpu::SoftmaxBackward* arguments,
                                                       double scale) {
  using namespace apex;
  gpu::SoftmaxBackward a = *arguments;
  bool cpu;
  if (const int32_t status = check(a.rows, a.keys, a.type)) return status;
  if (const int32_t status = resolve(place, a.keys, &cpu)) return status;
  if (a.rows == 0 || a.keys == 0) return APEX_OK;
  a.scale = scale;
  a.factor = float(scale);
  if (cpu) {
    scaled_masked_softmax_backward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const Layout l = choose({a.rows, a.keys, a.type, true, a.causal != 0, 2}, true, place->platform == APEX_HIP,
                          {a.output, a.grad_output, a.grad_input}, limits);
  if (l.kind == Layout::elements) return launch(place, backward_elements[a.type == APEX_F64], l, a);
  Backward& kernels = backward_kernels[a.type];
  return launch(place, pick(kernels, kernels.rows, l), l, a);
}
