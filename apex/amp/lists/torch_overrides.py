"""torch itself. Methods of the same names on torch.Tensor follow: see tensor_overrides."""

import torch

MODULE = torch

FP16_FUNCS = [
    # what torch.nn's layers call
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "conv_tbc",
    "prelu",
    # matrix products
    "addbmm",
    "addmm",
    "addmv",
    "addr",
    "baddbmm",
    "bmm",
    "chain_matmul",
    "einsum",
    "matmul",
    "mm",
    "mv",
    "tensordot",
    # the fast paths that transformer layers take in evaluation, weights and all
    "_native_multi_head_attention",
    "_transformer_encoder_layer_fwd",
]

BFLOAT16_FUNCS = list(FP16_FUNCS)

FP32_FUNCS = [
    # pointwise
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "log",
    "log10",
    "log1p",
    "log2",
    "logit",
    "pow",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    # reductions
    "cumprod",
    "cumsum",
    "dist",
    "log_softmax",
    "logcumsumexp",
    "logsumexp",
    "norm",
    "prod",
    "softmax",
    "std",
    "std_mean",
    "sum",
    "var",
    "var_mean",
    # norms and distances
    "cdist",
    "cosine_similarity",
    "group_norm",
    "layer_norm",
    "pairwise_distance",
    "pdist",
    "renorm",
    "rms_norm",
    # decompositions
    "cholesky",
    "cholesky_inverse",
    "cholesky_solve",
    "det",
    "geqrf",
    "inverse",
    "logdet",
    "matrix_exp",
    "matrix_power",
    "pinverse",
    "qr",
    "slogdet",
    "svd",
    "triangular_solve",
    # signals
    "istft",
    "stft",
]

CASTS = [
    "addcdiv",
    "addcmul",
    "allclose",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "index_add",
    "index_copy",
    "index_put",
    "inner",
    "isclose",
    "kron",
    "lerp",
    "masked_scatter",
    "outer",
    "scatter",
    "scatter_add",
    "scatter_reduce",
    "vdot",
    # elements or whole tensors
    "add",
    "div",
    "mul",
    "sub",
    # comparisons
    "eq",
    "equal",
    "ge",
    "gt",
    "le",
    "lt",
    "ne",
]

SEQUENCE_CASTS = ["cat", "stack"]
