#include "update_scale_hysteresis.h"

extern "C" GPU_KERNEL(64) void update_scale_hysteresis_f32(gpu::ScaleHysteresis arguments) {
  if (gpu::thread_x() == 0) gpu::update_scale_hysteresis(arguments);
}
GPU_REGISTER(update_scale_hysteresis_f32)
