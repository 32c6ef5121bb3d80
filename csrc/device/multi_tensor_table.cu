// Writes a run of words into a tensor table.
#include "multi_tensor_table.h"

extern "C" GPU_KERNEL(512) void multi_tensor_table_write(gpu::TableWords run) {
  const gpu::u32 i = gpu::thread_x();
  if (i < run.count) run.destination[i] = run.words[i];
}
GPU_REGISTER(multi_tensor_table_write)
