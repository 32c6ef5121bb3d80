// output = scale * input over lists of tensors; notes whether an input was inf or nan.
#pragma once
#include "multi_tensor.h"

namespace gpu {
struct ScaleArguments {
  double scale;
  const float* scale_on_device;  // replaces `scale` if not null (a clip coefficient that never visits the host)
  i32* noop_flag;                // set to 1 if an input or a result is not finite; may be null
};

template <class Math> struct ScaleUpdate : ElementwiseOperation {
  using Arguments = ScaleArguments;
  static constexpr int lists = 2, unroll = 2;
  static constexpr u32 read = 0b01, written = 0b10;
  Math scale;
  bool finite;

  GPU_FN bool begin(const Arguments& a) {
    scale = a.scale_on_device ? (Math)*a.scale_on_device : (Math)a.scale;
    finite = true;
    return true;
  }
  GPU_FN void update(const Math& input, Math& output) {
    output = input * scale;
    finite = finite && is_finite(input) && is_finite(output);
  }
  GPU_FN void end(const Arguments& a) {
    if (!finite && a.noop_flag) *a.noop_flag = 1;
  }
};
}  // namespace gpu
