/* A layer of a perceptron: products by the vendor's BLAS, activations and sums of ours around them. */
#pragma once
#include "apex.h"

#if defined(__cplusplus)
extern "C" {
#endif

typedef enum apex_activation {
  APEX_ACTIVATION_NONE = 0,
  APEX_ACTIVATION_RELU = 1,
  APEX_ACTIVATION_SIGMOID = 2,
  APEX_ACTIVATION_GELU = 3 /* its tanh form */
} apex_activation;

/* output = activation(input weight^T + bias). Matrices are dense, row by row, of `type`: APEX_F16 or APEX_BF16. */
typedef struct apex_dense {
  const void* input;       /* [rows, inputs] */
  const void* weight;      /* [outputs, inputs] */
  const void* bias;        /* [outputs]; or null */
  void* output;            /* [rows, outputs]; the backward of ReLU reads it */
  void* before;            /* [rows, outputs]: what GELU or the sigmoid is taken of; the backward of these reads it */
  const void* grad_output; /* [rows, outputs] */
  void* grad_input;        /* of the backward: null where not wanted */
  void* grad_weight;
  void* grad_bias; /* without an activation, beside grad_weight alone */
  int64_t rows, inputs, outputs;
  int32_t type, activation;
} apex_dense;

/* APEX_USE_REFERENCE: something was refused, and outputs hold nothing; apex_last_error() says what. */
APEX_EXPORT int32_t apex_dense_forward(const apex_place* place, const apex_dense* dense,
                                       const apex_workspace* workspace);
APEX_EXPORT int32_t apex_dense_backward(const apex_place* place, const apex_dense* dense,
                                        const apex_workspace* workspace);

#if defined(__cplusplus)
}
#endif
