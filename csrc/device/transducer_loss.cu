#include "transducer_loss_emissions.h"
#include "transducer_loss_gradient.h"
#include "transducer_loss_lattice.h"

#define LOSS_KERNEL(bounds, name, Arguments, ...)                    \
  extern "C" GPU_KERNEL bounds void name(gpu::Arguments arguments) { \
    gpu::await_previous_kernel();                                    \
    __VA_ARGS__(arguments);                                          \
  }                                                                  \
  GPU_REGISTER(name)

// Blocks a multiprocessor: what all of them have on its way keeps the memory busy.
#define KERNELS(forward_blocks, blocks, name, type)                                                                    \
  LOSS_KERNEL((gpu::transducer_loss_threads, forward_blocks), transducer_loss_emissions_##name, TransducerLossForward, \
              gpu::transducer_loss_emissions<gpu::type>)                                                               \
  LOSS_KERNEL((gpu::transducer_loss_threads, blocks), transducer_loss_backward_##name, TransducerLossBackward,         \
              gpu::transducer_loss_backward<gpu::type>)
KERNELS(2, 3, f32, type_f32)
KERNELS(2, 3, f16, type_f16)
KERNELS(2, 3, bf16, type_bf16)
LOSS_KERNEL((gpu::transducer_lattice_threads), transducer_loss_lattice_f32, TransducerLossForward,
            gpu::transducer_loss_lattice<float>)
// One block a multiprocessor: from sm_100 on, ptxas would keep doubles to 64 registers, and spill.
KERNELS(1, 1, f64, type_f64)
LOSS_KERNEL((gpu::transducer_lattice_threads, 1), transducer_loss_lattice_f64, TransducerLossForward,
            gpu::transducer_loss_lattice<double>)
