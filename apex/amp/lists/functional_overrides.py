"""torch.nn.functional. instance_norm is missing on purpose: it calls batch_norm, which takes half inputs with
float32 weights."""

import torch.nn.functional

MODULE = torch.nn.functional

FP16_FUNCS = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "conv_tbc",
    "linear",
    "prelu",
    "scaled_dot_product_attention",
]

BFLOAT16_FUNCS = list(FP16_FUNCS)

FP32_FUNCS = [
    # resampling
    "interpolate",
    "grid_sample",
    "affine_grid",
    # pointwise
    "softplus",
    "softmin",
    "log_softmax",
    "softmax",
    "gumbel_softmax",
    "logsigmoid",
    "gelu",
    "rrelu",
    # norms
    "layer_norm",
    "group_norm",
    "rms_norm",
    "local_response_norm",
    "normalize",
    "cosine_similarity",
    "pairwise_distance",
    "pdist",
    # losses
    "poisson_nll_loss",
    "gaussian_nll_loss",
    "cosine_embedding_loss",
    "cross_entropy",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "huber_loss",
    "smooth_l1_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "multilabel_soft_margin_loss",
    "multi_margin_loss",
    "nll_loss",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
    "triplet_margin_loss",
    "triplet_margin_with_distance_loss",
    "ctc_loss",
]

CASTS = ["bilinear"]

SEQUENCE_CASTS: list[str] = []

BANNED_FUNCS = [
    (
        "binary_cross_entropy",
        "binary_cross_entropy (BCELoss) overflows on half-precision probabilities. Use "
        "torch.nn.BCEWithLogitsLoss without the sigmoid before it, or make the sigmoid float32 before "
        "amp.initialize:\n    amp.register_float_function(torch, 'sigmoid')",
    )
]
