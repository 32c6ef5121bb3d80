#include "transducer_loss.h"

#define LOSS_KERNEL(bounds, name, Arguments, ...)                    \
  extern "C" GPU_KERNEL bounds void name(gpu::Arguments arguments) { \
    gpu::await_previous_kernel();                                    \
    __VA_ARGS__(arguments);                                          \
  }                                                                  \
  GPU_REGISTER(name)

#define KERNELS(bounds, name, type)                                            \
  LOSS_KERNEL(bounds, transducer_loss_emissions_##name, TransducerLossForward, \
              gpu::transducer_loss_emissions<gpu::type>)                       \
  LOSS_KERNEL(bounds, transducer_loss_backward_##name, TransducerLossBackward, gpu::transducer_loss_backward<gpu::type>)
KERNELS((gpu::transducer_loss_threads), f32, type_f32)
KERNELS((gpu::transducer_loss_threads), f16, type_f16)
KERNELS((gpu::transducer_loss_threads), bf16, type_bf16)
LOSS_KERNEL((gpu::transducer_lattice_threads), transducer_loss_lattice_f32, TransducerLossForward,
            gpu::transducer_loss_lattice<float>)
// One block a multiprocessor: from sm_100 on, ptxas would keep doubles to 64 registers, and spill.
KERNELS((gpu::transducer_loss_threads, 1), f64, type_f64)
LOSS_KERNEL((gpu::transducer_lattice_threads, 1), transducer_loss_lattice_f64, TransducerLossForward,
            gpu::transducer_loss_lattice<double>)
