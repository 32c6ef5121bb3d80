/* Products of matrices by the vendor's BLAS: cublasLt and hipBLASLt, with what they do on the way out.
 *
 * The library is opened beside torch's, as every vendor library is (vendor_library.h). It serves only where it helps:
 * whatever it lacks or refuses is APEX_USE_REFERENCE, and the caller multiplies by torch's own ops.
 */
#pragma once
#include "apex.h"

#if defined(__cplusplus)
extern "C" {
#endif

/* What is done to a product before it is stored. GELU is the tanh form. */
typedef enum apex_epilogue {
  APEX_EPILOGUE_NONE = 0,
  APEX_EPILOGUE_BIAS = 1,         /* + bias[n] */
  APEX_EPILOGUE_RELU_BIAS = 2,    /* relu(product + bias[n]) */
  APEX_EPILOGUE_GELU_BIAS = 3,    /* gelu(product + bias[n]); aux[m, n] gets what gelu was taken of */
  APEX_EPILOGUE_BIAS_GRADIENT = 4 /* the product itself; bias[m] gets the sums of op(a) over k */
} apex_epilogue;

/* d[m, n] = epilogue(op(a)[m, k] op(b)[k, n]) or, accumulating, += that. Matrices are row by row: element (i, j) is at
 * i * ld + j. op is the matrix, or its transpose: a is [k, m] then, and b [n, k]. a and b are of `type`; d, bias and
 * aux of `type_d`. Sums are float32; `tf32` allows float32 inputs to be rounded to TF32. */
typedef struct apex_matmul {
  const void* a;
  const void* b;
  void* d;
  void* bias;
  void* aux;
  void* workspace; /* of the device, used until the product is done */
  int64_t m, n, k;
  int64_t ld_a, ld_b, ld_d, ld_aux;
  int64_t workspace_bytes;
  int32_t transpose_a, transpose_b;
  int32_t type, type_d; /* apex_dtype */
  int32_t epilogue;     /* apex_epilogue */
  int32_t accumulate;
  int32_t tf32;
} apex_matmul;

/* Multiplies, on the place's stream. APEX_USE_REFERENCE: nothing was done, and apex_last_error() says why. */
APEX_EXPORT int32_t apex_matmul_run(const apex_place* place, const apex_matmul* matmul);

/* Workspace that makes the vendor's fastest algorithms eligible. */
#define APEX_MATMUL_WORKSPACE_BYTES (32 << 20)

typedef enum apex_blas {
  APEX_BLAS_DEFAULT = 0, /* Lt on CUDA; torch on HIP, where Lt has been measured on no card yet */
  APEX_BLAS_LT = 1,
  APEX_BLAS_TORCH = 2
} apex_blas;

/* Which of the two multiplies from now on. */
APEX_EXPORT int32_t apex_set_blas(int32_t blas);

/* What multiplies on this platform, as "cublasLt 13.1". APEX_USE_REFERENCE: torch; apex_last_error() says why. */
APEX_EXPORT int32_t apex_blas_name(int32_t platform, char* name, size_t bytes);

#if defined(__cplusplus)
}

namespace apex {
/* APEX_OK where the vendor's BLAS multiplies, as of apex_blas_name. */
int32_t blas_serves(int32_t platform);
}  // namespace apex
#endif
