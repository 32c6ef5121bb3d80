#include "focal_loss.h"

#define FOCAL_KERNEL(name, ...)                                                                                  \
  extern "C" GPU_KERNEL(gpu::focal_loss_threads) void name(gpu::FocalLoss arguments) { __VA_ARGS__(arguments); } \
  GPU_REGISTER(name)

#define KERNELS(name, type)                                                   \
  FOCAL_KERNEL(focal_loss_forward_##name, gpu::focal_loss_forward<gpu::type>) \
  FOCAL_KERNEL(focal_loss_backward_##name, gpu::focal_loss_backward<gpu::type>)
KERNELS(f32, type_f32)
KERNELS(f16, type_f16)
KERNELS(bf16, type_bf16)
KERNELS(f64, type_f64)
FOCAL_KERNEL(focal_loss_finish, gpu::focal_loss_finish<float>)
FOCAL_KERNEL(focal_loss_finish_f64, gpu::focal_loss_finish<double>)
