// The second half of LAMB as public apex splits it: each parameter moves by its update, scaled by the ratio of
// norms that the caller measured.
#pragma once
#include "multi_tensor_lamb.h"

namespace gpu {
struct LambStage2Arguments {
  double lr;
  i32 scaled;  // 0: every step is lr, whatever the norms
  i32 reserved;
  const float* parameter_norms;  // [tensors]
  const float* update_norms;     // [tensors]
};

// Lists: parameter, update.
template <class Math> struct LambStage2 : ElementwiseOperation {
  using Arguments = LambStage2Arguments;
  static constexpr int lists = 2, unroll = 2;
  static constexpr u32 read = 0b11, written = 0b01;
  Math step_size;

  GPU_FN bool begin(const Arguments&) { return true; }
  GPU_FN void tensor(const Arguments& a, u32 t) {
    step_size = lamb_step_size((Math)a.lr, a.scaled != 0, (Math)a.parameter_norms[t], (Math)a.update_norms[t]);
  }
  GPU_FN void update(Math& parameter, const Math& update) { parameter = fma(-step_size, update, parameter); }
};
}  // namespace gpu

// V(name, operation, arithmetic, parameter, update)
#define MULTI_TENSOR_LAMB_STAGE2(V)                    \
  V(f32_f32, LambStage2, float, float, float)          \
  V(f32_f16, LambStage2, float, float, gpu::half)      \
  V(f32_bf16, LambStage2, float, float, gpu::bfloat16) \
  V(f16_f32, LambStage2, float, gpu::half, float)      \
  V(f16_f16, LambStage2, float, gpu::half, gpu::half)  \
  V(bf16_f32, LambStage2, float, gpu::bfloat16, float) \
  V(bf16_bf16, LambStage2, float, gpu::bfloat16, gpu::bfloat16)
