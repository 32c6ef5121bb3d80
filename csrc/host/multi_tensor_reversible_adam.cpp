#include "multi_tensor_reversible_adam.h"

#include "host/multi_tensor_variants.h"

#define STEP(name, ...) MULTI_TENSOR_VARIANT(multi_tensor_reversible_adam, step_##name, ReversibleAdamStep, __VA_ARGS__)
#define COPY(name, ...) \
  MULTI_TENSOR_VARIANT(multi_tensor_reversible_adam, copy_##name, ReversibleAdamCopyStep, __VA_ARGS__)
static apex::MultiTensorVariant steps[] = {MULTI_TENSOR_REVERSIBLE_ADAM(STEP) MULTI_TENSOR_REVERSIBLE_ADAM_COPY(COPY)};
#define UNDO(name, ...) MULTI_TENSOR_VARIANT(multi_tensor_reversible_adam, undo_##name, ReversibleAdamUndo, __VA_ARGS__)
static apex::MultiTensorVariant undos[] = {MULTI_TENSOR_REVERSIBLE_ADAM(UNDO)};

extern "C" int32_t apex_multi_tensor_reversible_adam(const apex_place* place, const apex_tensor_lists* lists,
                                                     const gpu::ReversibleAdamArguments* arguments) {
  if (arguments->undo) return apex::run_multi_tensor(undos, place, lists, arguments);
  return apex::run_multi_tensor(steps, place, lists, arguments);
}
