#include "multi_tensor.h"

#include <algorithm>
#include <cstring>

#include "device/multi_tensor_table.h"
#include "host/multi_tensor_tiles.h"

namespace apex {
void copy_bytes(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, size_t(bytes)); }
void clear_bytes(void* to, int64_t bytes) { std::memset(to, 0, size_t(bytes)); }
}  // namespace apex

extern "C" size_t apex_tensor_table_words(uint32_t lists, uint32_t tensors) {
  return size_t(lists) * tensors + tensors + (size_t(tensors) + 2) / 2;
}

extern "C" size_t apex_reduction_scratch_bytes(const apex_tensor_lists* lists, uint32_t reductions) {
  // Runs of one chunk need the most.
  const size_t slots = size_t(reductions) * (size_t(lists->chunks) + 2 * size_t(lists->tensors));
  return slots * sizeof(double) + (size_t(lists->tensors) + 1) * sizeof(uint32_t);
}

extern "C" int32_t apex_tensor_table_write(const apex_place* place, const apex_tensor_lists* lists, size_t first,
                                           size_t words) {
  static apex_kernel kernel = {"multi_tensor_table", "multi_tensor_table_write", 0};
  for (size_t done = 0; done < words;) {
    const size_t count = std::min<size_t>(words - done, gpu::table_words_per_launch);
    gpu::TableWords run{};
    run.destination = static_cast<gpu::u64*>(lists->table) + first + done;
    run.count = static_cast<gpu::u32>(count);
    std::memcpy(run.words, lists->image + first + done, count * sizeof(uint64_t));
    void* parameters[] = {&run};
    const int32_t status = apex_launch(place, &kernel, {1, 1, 1}, {512, 1, 1}, 0, parameters);
    if (status != APEX_OK) return status;
    done += count;
  }
  return APEX_OK;
}
