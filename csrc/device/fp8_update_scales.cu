// The kernel of delayed scaling's update (fp8_update_scales.h): one read and one write of the history, 8 bytes a
// number.
#include "fp8_update_scales.h"

extern "C" GPU_KERNEL(gpu::fp8_update_threads) void fp8_update_scales_f32(gpu::Fp8UpdateScales arguments) {
  gpu::await_previous_kernel();
  gpu::update_scales(arguments, arguments.scale, gpu::block_x());
}
GPU_REGISTER(fp8_update_scales_f32)
