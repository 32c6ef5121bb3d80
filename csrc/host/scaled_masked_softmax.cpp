#include "scaled_masked_softmax.h"

#include <cmath>

#include "softmax_layout.h"
#include "status.h"

namespace apex {
namespace {
constexpr const char* unit = "scaled_masked_softmax";

#define KERNEL(name) {unit, "scaled_masked_softmax_" name, 0, 1}
// Of one element type. `few`: without a mask, and with one. `rows`, `masked`, `odd`: by vectors a thread, 1 and 4.
// `fixed`: 8 of them, one or two warps a row; `odd_fixed`: 9, one. `strip`: by elements of a row a lane, 9 and 19.
// `held`: 8 vectors a thread of the largest block.
struct Forward { apex_kernel few[2], rows[2], masked[2], odd[2], fixed[2], odd_fixed, strip[2], held, whole; };
struct Backward { apex_kernel few[1], rows[2], odd[2], fixed[2], odd_fixed, strip[2], held, whole; };
#define FORWARD(type)                                                          \
  {{KERNEL("forward_few_" type), KERNEL("forward_few_masked_" type)},          \
   {KERNEL("forward_" type "x1"), KERNEL("forward_" type "x4")},               \
   {KERNEL("forward_masked_" type "x1"), KERNEL("forward_masked_" type "x4")}, \
   {KERNEL("forward_odd_" type "x1"), KERNEL("forward_odd_" type "x4")},       \
   {KERNEL("forward_" type "x8"), KERNEL("forward_" type "x8w2")},             \
   KERNEL("forward_odd_" type "x9"),                                           \
   {KERNEL("forward_strip_" type "x9"), KERNEL("forward_strip_" type "x19")},  \
   KERNEL("forward_held_" type),                                               \
   KERNEL("forward_long_" type)}
#define BACKWARD(type)                                                          \
  {{KERNEL("backward_few_" type)},                                              \
   {KERNEL("backward_" type "x1"), KERNEL("backward_" type "x4")},              \
   {KERNEL("backward_odd_" type "x1"), KERNEL("backward_odd_" type "x4")},      \
   {KERNEL("backward_" type "x8"), KERNEL("backward_" type "x8w2")},            \
   KERNEL("backward_odd_" type "x9"),                                           \
   {KERNEL("backward_strip_" type "x9"), KERNEL("backward_strip_" type "x19")}, \
   KERNEL("backward_held_" type),                                               \
   KERNEL("backward_long_" type)}
// In the order of apex_dtype.
Forward forward_kernels[] = {FORWARD("f32"), FORWARD("f16"), FORWARD("bf16")};
Backward backward_kernels[] = {BACKWARD("f32"), BACKWARD("f16"), BACKWARD("bf16")};
// Element by element: tensors that begin at different places between two vectors, and doubles.
apex_kernel forward_elements[] = {KERNEL("forward_long_any"), KERNEL("forward_long_f64")};
apex_kernel backward_elements[] = {KERNEL("backward_long_any"), KERNEL("backward_long_f64")};

// The kernel that a layout is for, elements aside. `rows`: the table's of aligned rows in registers.
template <class Kernels> apex_kernel& pick(Kernels& kernels, apex_kernel* rows, bool masked, const SoftmaxLayout& l) {
  switch (l.kind) {
    case SoftmaxLayout::few:
      return kernels.few[masked];
    case SoftmaxLayout::fixed:
      return kernels.fixed[l.which];
    case SoftmaxLayout::odd_fixed:
      return kernels.odd_fixed;
    case SoftmaxLayout::strip:
      return kernels.strip[l.which];
    case SoftmaxLayout::held:
      return kernels.held;
    case SoftmaxLayout::whole:
      return kernels.whole;
    default:
      return (l.aligned ? rows : kernels.odd)[l.which];
  }
}

}  // namespace
}  // namespace apex

extern "C" int32_t apex_scaled_masked_softmax_forward(const apex_place* place, const gpu::SoftmaxForward* arguments,
                                                      double scale) {
  using namespace apex;
  gpu::SoftmaxForward a = *arguments;
  bool cpu;
  if (const int32_t status = resolve_softmax(place, unit, a.rows, a.keys, a.type, &cpu)) return status;
  if (a.rows == 0 || a.keys == 0) return APEX_OK;
  set_softmax_scale(scale, &a);
  if (cpu) {
    scaled_masked_softmax_forward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const SoftmaxLayout l = choose_softmax({a.rows, a.keys, a.type, !a.mask, a.causal != 0, 1}, mask_fits(a),
                                         place->platform == APEX_HIP, {a.input, a.output}, limits);
  if (l.kind == SoftmaxLayout::elements) return launch_softmax(place, forward_elements[a.type == APEX_F64], l, a);
  Forward& kernels = forward_kernels[a.type];
  return launch_softmax(place, pick(kernels, a.mask ? kernels.masked : kernels.rows, a.mask, l), l, a);
}

extern "C" int32_t apex_scaled_masked_softmax_backward(const apex_place* place, const gpu::SoftmaxBackward* arguments,
                                                       double scale) {
  using namespace apex;
  gpu::SoftmaxBackward a = *arguments;
  bool cpu;
  if (const int32_t status = resolve_softmax(place, unit, a.rows, a.keys, a.type, &cpu)) return status;
  if (a.rows == 0 || a.keys == 0) return APEX_OK;
  a.scale = scale;
  a.factor = float(scale);
  if (cpu) {
    scaled_masked_softmax_backward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const SoftmaxLayout l = choose_softmax({a.rows, a.keys, a.type, true, a.causal != 0, 2}, true,
                                         place->platform == APEX_HIP, {a.output, a.grad_output, a.grad_input}, limits);
  if (l.kind == SoftmaxLayout::elements) return launch_softmax(place, backward_elements[a.type == APEX_F64], l, a);
  Backward& kernels = backward_kernels[a.type];
  return launch_softmax(place, pick(kernels, kernels.rows, false, l), l, a);
}
