"""torch.linalg: products in half precision, everything else, which has no half kernels or needs the digits,
in float32."""

import torch

MODULE = torch.linalg

FP16_FUNCS = ["matmul", "multi_dot"]

BFLOAT16_FUNCS = list(FP16_FUNCS)

FP32_FUNCS = [
    "cholesky",
    "cholesky_ex",
    "cond",
    "det",
    "eig",
    "eigh",
    "eigvals",
    "eigvalsh",
    "householder_product",
    "inv",
    "inv_ex",
    "ldl_factor",
    "ldl_factor_ex",
    "ldl_solve",
    "lstsq",
    "lu",
    "lu_factor",
    "lu_factor_ex",
    "lu_solve",
    "matrix_exp",
    "matrix_norm",
    "matrix_power",
    "matrix_rank",
    "norm",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "solve_ex",
    "solve_triangular",
    "svd",
    "svdvals",
    "tensorinv",
    "tensorsolve",
    "vander",
    "vector_norm",
]

CASTS = ["cross", "vecdot"]

SEQUENCE_CASTS: list[str] = []
