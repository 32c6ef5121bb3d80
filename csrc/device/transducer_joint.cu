#include "transducer_joint.h"
#include "transducer_joint_apart.h"
#include "transducer_joint_shifted.h"
#include "transducer_joint_staged.h"

// Blocks a multiprocessor. Where 128 registers hold a thread's sums and all its loads of a frame without a spill, the
// backward has two; elsewhere, and of doubles, one. The forward has one more, where 80 registers are enough for it, so
// that its stores keep the memory busy; elsewhere two.
#if defined(GPU_CUDA) && __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1100
#define JOINT_BLOCKS 2
#else
#define JOINT_BLOCKS 1
#endif
// Where rows begin anywhere, it is four of 64 registers and two of 128.
#if defined(GPU_CUDA) && __CUDA_ARCH__ == 900
#define JOINT_FORWARD_BLOCKS 3
#define JOINT_STAGED_BLOCKS 4
#define JOINT_SHIFTED_BLOCKS 2
#else
#define JOINT_FORWARD_BLOCKS 2
#define JOINT_STAGED_BLOCKS 2
#define JOINT_SHIFTED_BLOCKS 1
#endif

#define FORWARD(blocks, name, ...)                                                        \
  extern "C" GPU_KERNEL(gpu::joint_forward_threads, blocks) void transducer_joint_##name( \
      gpu::TransducerJointForward arguments) {                                            \
    gpu::await_previous_kernel();                                                         \
    gpu::transducer_joint_forward<__VA_ARGS__>(arguments);                                \
  }                                                                                       \
  GPU_REGISTER(transducer_joint_##name)
#define BACKWARD(blocks, name, mask, ...)                                                                    \
  extern "C" GPU_KERNEL(gpu::joint_backward_threads, blocks) void transducer_joint_backward_##mask##_##name( \
      gpu::TransducerJointBackward arguments) {                                                              \
    gpu::await_previous_kernel();                                                                            \
    gpu::transducer_joint_backward<__VA_ARGS__, gpu::JointMask::mask>(arguments);                            \
  }                                                                                                          \
  GPU_REGISTER(transducer_joint_backward_##mask##_##name)

// Vectors: of 16 bytes; eight columns where a byte of the mask is written.
#define KERNELS(forward_blocks, blocks, name, type)                                                          \
  FORWARD(forward_blocks, forward_##name, gpu::JointVector<gpu::type, gpu::Packet<gpu::type>::width>, false) \
  FORWARD(blocks, dropout_##name, gpu::JointVector<gpu::type, 8>, true)                                      \
  BACKWARD(blocks, name, none, gpu::JointVector<gpu::type, gpu::Packet<gpu::type>::width>, 8)                \
  BACKWARD(blocks, name, relu, gpu::JointVector<gpu::type, gpu::Packet<gpu::type>::width>, 8)                \
  BACKWARD(blocks, name, bits, gpu::JointVector<gpu::type, gpu::Packet<gpu::type>::width>, 8)
KERNELS(JOINT_FORWARD_BLOCKS, JOINT_BLOCKS, f32, type_f32)
KERNELS(JOINT_FORWARD_BLOCKS, JOINT_BLOCKS, f16, type_f16)
KERNELS(JOINT_FORWARD_BLOCKS, JOINT_BLOCKS, bf16, type_bf16)
KERNELS(2, 1, f64, type_f64)

// Little work. One block a multiprocessor: from sm_100 on, ptxas would keep some to 64 registers, and spill.
#define APART(name, mask, ...)                                                                             \
  extern "C" GPU_KERNEL(gpu::joint_apart_threads, 1) void transducer_joint_backward_##mask##_apart_##name( \
      gpu::TransducerJointBackward arguments) {                                                            \
    gpu::await_previous_kernel();                                                                          \
    gpu::transducer_joint_backward_apart<__VA_ARGS__, gpu::JointMask::mask>(arguments);                    \
  }                                                                                                        \
  GPU_REGISTER(transducer_joint_backward_##mask##_apart_##name)
#define APART_KERNELS(name, ...) \
  APART(name, none, __VA_ARGS__) \
  APART(name, relu, __VA_ARGS__) \
  APART(name, bits, __VA_ARGS__)
#define APART_VECTORS(name, type) APART_KERNELS(name, gpu::JointVector<gpu::type, gpu::Packet<gpu::type>::width>)
APART_VECTORS(f32, type_f32)
APART_VECTORS(f16, type_f16)
APART_VECTORS(bf16, type_bf16)
APART_VECTORS(f64, type_f64)
APART_KERNELS(elements_f32, gpu::JointElements<float, 1>)
APART_KERNELS(elements_f64, gpu::JointElements<double, 1>)

// Rows that do not begin at multiples of 16 bytes: one column a thread, of any element type.
#define ELEMENT_KERNELS(name, Math)                                               \
  FORWARD(1, forward_elements_##name, gpu::JointElements<Math, 1>, false)         \
  FORWARD(1, dropout_elements_##name, gpu::JointElements<Math, 8>, true)          \
  BACKWARD(1, elements_##name, none, gpu::JointElements<Math, 1>, gpu::warp_size) \
  BACKWARD(1, elements_##name, relu, gpu::JointElements<Math, 1>, gpu::warp_size) \
  BACKWARD(1, elements_##name, bits, gpu::JointElements<Math, 1>, gpu::warp_size)
ELEMENT_KERNELS(f32, float)
ELEMENT_KERNELS(f64, double)

// Rows of halves that do not, of other widths than a few.
#define ODD_KERNELS(name)                                                                                             \
  extern "C" GPU_KERNEL(gpu::joint_forward_threads, JOINT_STAGED_BLOCKS) void transducer_joint_forward_staged_##name( \
      gpu::TransducerJointForward arguments) {                                                                        \
    gpu::await_previous_kernel();                                                                                     \
    gpu::transducer_joint_forward_staged<gpu::type_##name>(arguments);                                                \
  }                                                                                                                   \
  GPU_REGISTER(transducer_joint_forward_staged_##name)                                                                \
  BACKWARD(JOINT_SHIFTED_BLOCKS, shifted_##name, none, gpu::JointShifted<gpu::type_##name>, 8)                        \
  BACKWARD(JOINT_SHIFTED_BLOCKS, shifted_##name, relu, gpu::JointShifted<gpu::type_##name>, 8)
ODD_KERNELS(f16)
ODD_KERNELS(bf16)

#if !defined(GPU_HIP)
#include "transducer_joint_held.h"

#define HELD_KERNEL(name, mask)                                                                          \
  extern "C" GPU_KERNEL(gpu::joint_held_threads, 1) void transducer_joint_backward_##mask##_held_##name( \
      gpu::TransducerJointBackward arguments) {                                                          \
    gpu::await_previous_kernel();                                                                        \
    gpu::transducer_joint_backward_held<gpu::type_##name, gpu::JointMask::mask>(arguments);              \
  }                                                                                                      \
  GPU_REGISTER(transducer_joint_backward_##mask##_held_##name)
HELD_KERNEL(f16, none)
HELD_KERNEL(bf16, none)
HELD_KERNEL(f16, relu)
HELD_KERNEL(bf16, relu)
HELD_KERNEL(f16, bits)
HELD_KERNEL(bf16, bits)
#endif
