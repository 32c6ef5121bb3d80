#include "softmax_layout.h"

#include <algorithm>
#include <cmath>

#include "few_rows.h"
#include "status.h"

namespace apex {
namespace {
constexpr int64_t held_vectors = 8, shared_beside = 1024;  // a thread; bytes that a block uses besides
constexpr int64_t vector_bytes = 16;

int64_t whole_warps(int64_t threads, const DeviceLimits& limits) {
  return ceil_divide(threads, limits.block_multiple) * limits.block_multiple;
}

// Rows of a block of the largest size, of which one a multiprocessor works. False: there is no room for what registers
// do not hold, the second tensor; on AMD that of floats.
bool hold(const SoftmaxRows& s, bool on_amd, const DeviceLimits& limits, SoftmaxLayout& l) {
  if (on_amd && s.tensors > 1 && s.type == APEX_F32) return false;
  const int64_t vectors = on_amd ? 0
                                 : std::min<int64_t>(s.tensors * held_vectors,
                                                     limits.shared_bytes / (gpu::softmax_held_threads * vector_bytes));
  const int64_t kept = on_amd ? 0 : (s.tensors - 1) * held_vectors;
  if (vectors < kept) return false;
  l.kind = SoftmaxLayout::held;
  l.waiting = int32_t(vectors - kept);
  l.threads = gpu::softmax_held_threads;
  l.shared = vectors * gpu::softmax_held_threads * vector_bytes;
  l.blocks = std::min<int64_t>(
      s.rows, on_amd ? most_threads / l.threads : limits.multiprocessors);  // there nothing stays for the next row
  return true;
}

// Strips of some 4 KB, enough of them for every multiprocessor. False: there are not.
bool cut_strips(const SoftmaxRows& s, bool on_amd, const DeviceLimits& limits, SoftmaxLayout& l) {
  constexpr int64_t wanted_bytes = 4096, least_warps = 8;  // of a strip; of a multiprocessor
  const int64_t size = s.type == APEX_F32 ? 4 : 2, width = vector_bytes / size;
  const int64_t rows = width * std::max<int64_t>(1, wanted_bytes / (width * s.keys * size)),
                strips = ceil_divide(s.rows, rows);
  const int64_t warp_shared = (on_amd ? 1 : 2) * s.tensors * rows * s.keys * size;
  if (strips < limits.multiprocessors * least_warps || warp_shared > limits.shared_bytes) return false;
  int64_t warps = gpu::softmax_fixed_threads / limits.warp_size;
  while (warps > 1 && 2 * warps * warp_shared > limits.shared_bytes) warps /= 2;
  l.kind = SoftmaxLayout::strip;
  l.which = s.keys <= 9 * limits.warp_size ? 0 : 1;
  l.strip_rows = int32_t(rows);
  l.threads = uint32_t(whole_warps(warps * limits.warp_size, limits));
  l.shared = l.threads / limits.warp_size * warp_shared;
  if (l.shared > limits.shared_bytes) return false;
  const int64_t at_once = std::clamp<int64_t>((limits.shared_bytes + shared_beside) / (l.shared + shared_beside), 1, 8);
  l.blocks = std::min(ceil_divide(strips, l.threads / limits.block_multiple), limits.multiprocessors * at_once);
  return true;
}
// So few rows that all are at work at once, with a vector a thread. False: they are more, or longer.
bool take_few(const SoftmaxRows& s, const DeviceLimits& limits, SoftmaxLayout& l) {
  FewRows few;
  if (!take_few_rows(s.rows, s.keys * (s.type == APEX_F32 ? 4 : 2) / vector_bytes, limits, &few)) return false;
  l.kind = SoftmaxLayout::few;
  l.lanes = few.log_threads;
  l.threads = few.threads;
  l.blocks = few.blocks;
  return true;
}
}  // namespace

SoftmaxLayout choose_softmax(const SoftmaxRows& s, bool mask_fits, bool on_amd,
                             std::initializer_list<const void*> tensors, const DeviceLimits& limits) {
  const int64_t size = s.type == APEX_F32 ? 4 : 2, width = vector_bytes / size,
                first = reinterpret_cast<uintptr_t>(*tensors.begin()) % vector_bytes;
  SoftmaxLayout l{SoftmaxLayout::registers,   false, 0, -1, int32_t(first / size), 0, 0,
                  gpu::softmax_fixed_threads, 0,     0};
  const bool alike = std::all_of(tensors.begin(), tensors.end(), [&](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % vector_bytes == uintptr_t(first);
  });
  l.aligned = alike && first == 0 && s.keys % width == 0 && mask_fits;
  const int64_t vectors = l.aligned ? s.keys / width : ceil_divide(s.keys + width - 1, width), warp = limits.warp_size;
  int64_t rows_at_once = l.threads / warp;  // of a block
  if (s.type == APEX_F64 || !alike || first % size != 0 || (s.drops && first != 0)) {
    l.kind = SoftmaxLayout::elements;
  } else if (l.aligned && !s.drops && take_few(s, limits, l)) {
    return l;
  } else if (s.simple && !s.causal && first == 0 && s.keys % width != 0 && s.keys >= 3 * warp && s.keys <= 19 * warp &&
             cut_strips(s, on_amd, limits, l)) {
    return l;
  } else if (s.drops && l.aligned && vectors > warp && vectors <= 4 * warp) {
    l.kind = SoftmaxLayout::fixed;
    l.which = vectors <= 2 * warp ? 0 : 1;
  } else if (!s.drops && vectors > warp && vectors <= 4 * warp &&
             s.rows * whole_warps(vectors, limits) <= limits.multiprocessors * threads_at_once) {
    // Few rows: a vector a thread, so that all are done soonest.
    l.threads = uint32_t(whole_warps(vectors, limits));
    rows_at_once = 1;
  } else if (vectors <= 4 * warp) {
    l.which = vectors <= warp ? 0 : 1;
    for (l.lanes = 0; (int64_t(l.which ? 4 : 1) << l.lanes) < vectors;) ++l.lanes;
    rows_at_once *= warp >> l.lanes;
  } else if (l.aligned && s.simple && vectors <= 8 * warp) {
    l.kind = SoftmaxLayout::fixed;
  } else if (!l.aligned && s.simple && vectors <= 9 * warp) {
    l.kind = SoftmaxLayout::odd_fixed;
  } else if (l.aligned && s.simple && vectors <= 16 * warp &&
             limits.block_multiple == warp) {  // not so on the executor
    l.kind = SoftmaxLayout::fixed;
    l.which = 1;
    l.threads = uint32_t(2 * warp);
    rows_at_once = 1;
  } else if (vectors <= 4 * int64_t(gpu::softmax_threads)) {
    l.which = 1;
    l.threads = uint32_t(whole_warps(ceil_divide(vectors, 4), limits));
    rows_at_once = 1;
  } else if (l.aligned && s.simple && vectors <= held_vectors * gpu::softmax_held_threads &&
             hold(s, on_amd, limits, l)) {
    return l;
  } else {
    l.kind = SoftmaxLayout::whole;
  }
  if (l.kind == SoftmaxLayout::whole || l.kind == SoftmaxLayout::elements) {
    const int64_t wanted = whole_warps(l.kind == SoftmaxLayout::elements ? s.keys : vectors, limits);
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

bool mask_fits(const gpu::SoftmaxForward& a) {
  if (!a.mask) return true;
  const int64_t at_once = a.additive ? vector_bytes : a.type == APEX_F32 ? 4 : 8;
  return (int64_t(reinterpret_cast<uintptr_t>(a.mask)) | a.mask_batch | a.mask_head | a.mask_query) % at_once == 0;
}

int32_t resolve_softmax(const apex_place* place, const char* unit, int64_t rows, int64_t keys, int32_t type,
                        bool* cpu) {
  constexpr int64_t most_keys = 0xfffff000;
  if (type < APEX_F32 || type > APEX_F64)
    return fail(APEX_ERROR_ARGUMENT, "%s: element types are float32, float16, bfloat16 and float64", unit);
  if (rows < 0 || keys < 0)
    return fail(APEX_ERROR_VALUE, "%s: %lld rows of %lld keys", unit, (long long)rows, (long long)keys);
  int32_t variant;
  if (const int32_t status = choose_variant(*place, unit, &variant)) return status;
  *cpu = variant == APEX_VARIANT_CPU;
  return keys > most_keys ? APEX_USE_REFERENCE : APEX_OK;
}

void set_softmax_scale(double scale, gpu::SoftmaxForward* a) {
  a->magnitude = std::max(std::fabs(scale), 0x1p-126);
  if (scale != scale) a->magnitude = scale;
  const double factor = a->magnitude * 1.4426950408889634;
  a->factor = float(factor);
  a->factor_rest = std::isfinite(a->factor) ? float(factor - a->factor) : 0.0f;
  a->negative = scale < 0;
}
}  // namespace apex
