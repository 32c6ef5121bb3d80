// The second half of LAMB as public apex splits it: each parameter moves by its update, scaled by the ratio of
// norms that the caller measured.
#pragma once
#include "multi_tensor_lamb.h"

namespace gpu {
struct LambStage2Arguments {
  double lr;
  i32 scaled;                    // 0: every step is lr, whatever the norms
  i32 use_nvlamb;                // with per_tensor_decay: scaled also where that is 0
  const float* parameter_norms;  // [tensors]
  const float* update_norms;     // [tensors]
  // All nullable.
  const float* per_tensor_decay;  // [tensors]: in place of `scaled`
  const float* lr_on_device;      // in place of lr
  const float* found_inf;         // not zero: the launch leaves everything as it is
  const i32* noop_flag;           // likewise
};

// Lists: parameter, update and, optionally, a lower-precision copy of the parameter.
template <class Math> struct LambStage2 : ElementwiseOperation {
  using Arguments = LambStage2Arguments;
  static constexpr int lists = 2, unroll = 2;
  static constexpr u32 read = 0b11, written = 0b01;
  Math step_size;

  Math lr;

  GPU_FN bool begin(const Arguments& a) {
    if ((a.found_inf && *a.found_inf != 0.0f) || (a.noop_flag && *a.noop_flag != 0)) return false;
    lr = a.lr_on_device ? (Math)*a.lr_on_device : (Math)a.lr;
    return true;
  }
  GPU_FN void tensor(const Arguments& a, u32 t) {
    const bool scaled = a.per_tensor_decay ? a.use_nvlamb || a.per_tensor_decay[t] != 0.0f : a.scaled != 0;
    step_size = lamb_step_size(lr, scaled, (Math)a.parameter_norms[t], (Math)a.update_norms[t]);
  }
  GPU_FN void update(Math& parameter, const Math& update) { parameter = fma(-step_size, update, parameter); }
};
template <class Math> struct LambStage2Model : LambStage2<Math> {
  static constexpr int lists = 3;
  static constexpr u32 read = 0b011, written = 0b101;
  GPU_FN void update(Math& parameter, const Math& update, Math& model) {
    LambStage2<Math>::update(parameter, update);
    model = parameter;
  }
};
}  // namespace gpu

// V(name, operation, arithmetic, parameter, update[, model])
#define MULTI_TENSOR_LAMB_STAGE2(V)                               \
  V(f32_f32, LambStage2, float, float, float)                     \
  V(f32_f16, LambStage2, float, float, gpu::half)                 \
  V(f32_bf16, LambStage2, float, float, gpu::bfloat16)            \
  V(f16_f32, LambStage2, float, gpu::half, float)                 \
  V(f16_f16, LambStage2, float, gpu::half, gpu::half)             \
  V(bf16_f32, LambStage2, float, gpu::bfloat16, float)            \
  V(bf16_bf16, LambStage2, float, gpu::bfloat16, gpu::bfloat16)   \
  V(f32_f32_f16, LambStage2Model, float, float, float, gpu::half) \
  V(f32_f32_bf16, LambStage2Model, float, float, float, gpu::bfloat16)
