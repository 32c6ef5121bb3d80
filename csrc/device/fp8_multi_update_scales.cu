// The kernel of delayed scaling's update of many histories (fp8_multi_update_scales.h): as fp8_update_scales', a block
// looks up whose it is.
#include "fp8_multi_update_scales.h"

namespace gpu {
namespace {
#if !defined(GPU_HOST)
GPU_FN void multi_update_scales(const Fp8MultiUpdateScales& a) {
  i32 own = 0, high = a.count - 1;
  while (own < high) {
    const i32 middle = (own + high + 1) / 2;
    if (a.first_block[middle] <= block_x()) own = middle;
    else high = middle - 1;
  }
  const i64 written = update_scales(one_of(a, own, global_pointer<float>(a.history[own])),
                                    global_pointer<const float>(a.old[own]), block_x() - a.first_block[own]);
  if (!a.scale_inv_apart || written < 0) return;
  const i64 column = a.first[own] + written;
  a.scale_inv_apart[column * 4] = a.scale_inv[column];
}
#endif
}  // namespace
}  // namespace gpu

extern "C" GPU_KERNEL(gpu::fp8_update_threads) void fp8_multi_update_scales_f32(gpu::Fp8MultiUpdateScales arguments) {
  gpu::await_previous_kernel();
  gpu::multi_update_scales(arguments);
}
GPU_REGISTER(fp8_multi_update_scales_f32)
