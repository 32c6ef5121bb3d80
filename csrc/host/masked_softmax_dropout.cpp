#include "masked_softmax_dropout.h"

#include <algorithm>
#include <cmath>

#include "scaled_masked_softmax.h"
#include "softmax_layout.h"
#include "status.h"

namespace apex {
namespace {
constexpr const char* unit = "masked_softmax_dropout";

#define KERNEL(name) {unit, "masked_softmax_dropout_" name, 0, 1}
// Of one element type. `rows`, `odd`: by vectors a thread, 1 and 4. `fixed`: 2 and 4 of them, a warp a row.
struct Kernels { apex_kernel rows[2], odd[2], fixed[2], whole; };
#define KERNELS(direction, type)                                             \
  {{KERNEL(direction type "x1"), KERNEL(direction type "x4")},               \
   {KERNEL(direction "odd_" type "x1"), KERNEL(direction "odd_" type "x4")}, \
   {KERNEL(direction type "x2w1"), KERNEL(direction type "x4w1")},           \
   KERNEL(direction "long_" type)}
#define TYPES(direction) {KERNELS(direction, "f32"), KERNELS(direction, "f16"), KERNELS(direction, "bf16")}
// In the order of apex_dtype.
Kernels forward_kernels[] = TYPES("forward_"), backward_kernels[] = TYPES("backward_");
// Element by element: tensors that begin at different places between two vectors, and doubles.
apex_kernel forward_elements[] = {KERNEL("forward_long_any"), KERNEL("forward_long_f64")};
apex_kernel backward_elements[] = {KERNEL("backward_long_any"), KERNEL("backward_long_f64")};

apex_kernel& pick(Kernels* kernels, apex_kernel* elements, int32_t type, const SoftmaxLayout& l) {
  if (l.kind == SoftmaxLayout::elements) return elements[type == APEX_F64];
  Kernels& of_type = kernels[type];
  if (l.kind == SoftmaxLayout::whole) return of_type.whole;
  if (l.kind == SoftmaxLayout::fixed) return of_type.fixed[l.which];
  return (l.aligned ? of_type.rows : of_type.odd)[l.which];
}

// How many dropout keeps of 2^32.
uint32_t kept_of(double dropout) { return uint32_t(std::min(4294967295.0, std::round((1 - dropout) * 4294967296.0))); }
double scale_of(double dropout) { return dropout < 1 ? 1 / (1 - dropout) : 0; }

int32_t check_dropout(double dropout, const void* seed) {
  if (!(dropout >= 0 && dropout <= 1))
    return fail(APEX_ERROR_VALUE, "%s: the dropout probability must be between 0 and 1, not %g", unit, dropout);
  if (dropout > 0 && !seed) return fail(APEX_ERROR_VALUE, "%s: dropout needs a seed", unit);
  return APEX_OK;
}
}  // namespace
}  // namespace apex

extern "C" int32_t apex_masked_softmax_dropout_forward(const apex_place* place, const gpu::SoftmaxForward* arguments,
                                                       double dropout) {
  using namespace apex;
  gpu::SoftmaxForward a = *arguments;
  bool cpu;
  if (const int32_t status = resolve_softmax(place, unit, a.rows, a.keys, a.type, &cpu)) return status;
  if (a.rows == 0 || a.keys == 0) return APEX_OK;
  if (const int32_t status = check_dropout(dropout, a.seed)) return status;
  set_softmax_scale(1, &a);
  if (dropout == 0) a.seed = nullptr;
  a.keep = kept_of(dropout);
  a.kept_by = scale_of(dropout);
  a.kept_scale = float(a.kept_by);
  if (cpu) {
    scaled_masked_softmax_forward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  if (a.seed && reinterpret_cast<uintptr_t>(a.kept) % 8 != 0)
    return fail(APEX_ERROR_VALUE, "%s: the bytes of what is kept must begin at a multiple of 8", unit);
  const SoftmaxLayout l =
      choose_softmax({a.rows, a.keys, a.type, false, false, 1, true}, mask_fits(a), place->platform == APEX_HIP,
                     {a.input, a.output, a.seed ? a.softmax : a.output}, limits);
  return launch_softmax(place, pick(forward_kernels, forward_elements, a.type, l), l, a);
}

extern "C" int32_t apex_masked_softmax_dropout_backward(const apex_place* place, const gpu::SoftmaxBackward* arguments,
                                                        double dropout) {
  using namespace apex;
  gpu::SoftmaxBackward a = *arguments;
  bool cpu;
  if (const int32_t status = resolve_softmax(place, unit, a.rows, a.keys, a.type, &cpu)) return status;
  if (a.rows == 0 || a.keys == 0) return APEX_OK;
  if (const int32_t status = check_dropout(dropout, a.kept ? a.kept : a.seed)) return status;
  a.scale = scale_of(dropout);
  a.factor = float(a.scale);
  a.keep = kept_of(dropout);
  if (dropout == 0) a.seed = nullptr;
  if (cpu) {
    scaled_masked_softmax_backward_cpu(a);
    return APEX_OK;
  }
  DeviceLimits limits;
  if (const int32_t status = device_limits(*place, &limits)) return status;
  const bool kept_fits = reinterpret_cast<uintptr_t>(a.kept) % 8 == 0;
  const SoftmaxLayout l = choose_softmax({a.rows, a.keys, a.type, false, false, 2, true}, kept_fits,
                                         place->platform == APEX_HIP, {a.output, a.grad_output, a.grad_input}, limits);
  return launch_softmax(place, pick(backward_kernels, backward_elements, a.type, l), l, a);
}
