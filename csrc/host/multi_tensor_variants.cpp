#include "multi_tensor_variants.h"

#include <cstring>
#include <string>

#include "host/device_limits.h"
#include "host/status.h"

namespace apex {
namespace {
const char* dtype_name(int32_t dtype) {
  static const char* const names[] = {"float32", "float16", "bfloat16", "float64"};
  return dtype >= 0 && dtype < 4 ? names[dtype] : "an unknown dtype";
}

std::string describe(const int32_t* dtypes, uint32_t lists) {
  std::string text = "(";
  for (uint32_t k = 0; k < lists; ++k) text.append(k ? ", " : "").append(dtype_name(dtypes[k]));
  return text + ")";
}

MultiTensorVariant* find(MultiTensorVariant* variants, size_t count, const int32_t* dtypes, uint32_t lists) {
  for (size_t i = 0; i < count; ++i)
    if (variants[i].lists == lists && std::memcmp(variants[i].dtypes, dtypes, lists * sizeof(int32_t)) == 0)
      return &variants[i];
  return nullptr;
}

// A block's reduction costs about what moving some ten thousand bytes does, so a block should move many more;
// but enough blocks must be left to keep every multiprocessor busy to the end.
uint32_t chunks_per_block(const MultiTensorVariant& variant, const apex_tensor_lists& lists) {
  constexpr uint32_t bytes_per_block = 512 << 10, fewest_blocks = 4096;
  const uint32_t by_bytes = bytes_per_block / (variant.bytes_per_element * lists.chunk_size);
  return std::clamp<uint32_t>(std::min(by_bytes, lists.chunks / fewest_blocks), 1, 16);
}

int32_t launch(MultiTensorVariant& variant, const apex_place* place, const apex_tensor_lists& lists,
               const void* arguments) {
  const auto* words = static_cast<const gpu::u64*>(lists.table);
  gpu::TensorTable table{};
  table.addresses = words;
  table.sizes = reinterpret_cast<const gpu::i64*>(words + size_t(lists.lists) * lists.tensors);
  table.first_chunk = reinterpret_cast<const gpu::u32*>(table.sizes + lists.tensors);
  table.tensors = lists.tensors;
  table.chunks = lists.chunks;
  table.chunk_size = lists.chunk_size;
  table.tensors_with_chunks = lists.tensors_with_chunks;
  uint32_t blocks = lists.chunks;
  gpu::ReductionScratch scratch{};
  if (variant.reductions) {
    scratch = reduction_scratch(lists, variant.reductions, chunks_per_block(variant, lists));
    blocks = scratch.runs;
  }
  void* parameters[] = {&table, const_cast<void*>(arguments), &scratch};  // elementwise kernels take the first two
  constexpr uint32_t threads = 512;
  blocks = std::clamp<uint32_t>(blocks, 1, most_threads / threads);  // beyond that a block takes several turns
  return apex_launch(place, &variant.kernel, {blocks, 1, 1}, {threads, 1, 1}, 0, parameters);
}
}  // namespace

int32_t run_multi_tensor(MultiTensorVariant* variants, size_t count, const apex_place* place,
                         const apex_tensor_lists* lists, const void* arguments, uint32_t used) {
  MultiTensorVariant* variant = find(variants, count, lists->dtypes, used);
  if (!variant) {
    std::string text = std::string(variants[0].kernel.unit) + ": no variant takes element types " +
                       describe(lists->dtypes, used) + "; there are";
    for (size_t i = 0; i < count; ++i) text += (i ? ", " : " ") + describe(variants[i].dtypes, variants[i].lists);
    return fail(APEX_ERROR_ARGUMENT, "%s", text.c_str());
  }
  if (lists->check_only) return APEX_OK;
  if (lists->chunks == 0 && variant->reductions == 0) return APEX_OK;  // a reduction still has results to write
  int32_t chosen = lists->variant;
  if (chosen != APEX_VARIANT_KERNEL && chosen != APEX_VARIANT_CPU)
    if (const int32_t status = choose_variant(*place, variant->kernel.unit, &chosen)) return status;
  if (chosen == APEX_VARIANT_KERNEL) return launch(*variant, place, *lists, arguments);
  variant->cpu(lists, arguments);
  return APEX_OK;
}
}  // namespace apex
