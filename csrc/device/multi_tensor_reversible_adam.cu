#include "multi_tensor_reversible_adam.h"

#define STEP(name, ...) MULTI_TENSOR_KERNEL(multi_tensor_reversible_adam_step_##name, ReversibleAdamStep, __VA_ARGS__)
#define COPY(name, ...) \
  MULTI_TENSOR_KERNEL(multi_tensor_reversible_adam_copy_##name, ReversibleAdamCopyStep, __VA_ARGS__)
#define UNDO(name, ...) MULTI_TENSOR_KERNEL(multi_tensor_reversible_adam_undo_##name, ReversibleAdamUndo, __VA_ARGS__)
MULTI_TENSOR_REVERSIBLE_ADAM(STEP)
MULTI_TENSOR_REVERSIBLE_ADAM_COPY(COPY)
MULTI_TENSOR_REVERSIBLE_ADAM(UNDO)
