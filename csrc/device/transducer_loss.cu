#include "transducer_loss.h"

#define LOSS_KERNEL(threads, name, Arguments, ...)                                                        \
  extern "C" GPU_KERNEL(threads) void name(gpu::Arguments arguments) { __VA_ARGS__(arguments); } \
  GPU_REGISTER(name)

#define KERNELS(name, type)                                                                                                                        \
  LOSS_KERNEL(gpu::transducer_loss_threads, transducer_loss_emissions_##name, TransducerLossForward, gpu::transducer_loss_emissions<gpu::type>) \
  LOSS_KERNEL(gpu::transducer_loss_threads, transducer_loss_backward_##name, TransducerLossBackward, gpu::transducer_loss_backward<gpu::type>)
KERNELS(f32, type_f32)
KERNELS(f16, type_f16)
KERNELS(bf16, type_bf16)
KERNELS(f64, type_f64)
LOSS_KERNEL(gpu::transducer_lattice_threads, transducer_loss_lattice_f32, TransducerLossForward, gpu::transducer_loss_lattice<float>)
LOSS_KERNEL(gpu::transducer_lattice_threads, transducer_loss_lattice_f64, TransducerLossForward, gpu::transducer_loss_lattice<double>)
