"""One call of every op of csrc/ops.schemas: every tensor that it takes, in the form in which it writes what it can."""

from __future__ import annotations

import torch

F32, I32, I64 = torch.float32, torch.int32, torch.int64


def call_of(name, device):
    """Keywords of the op `name`: new tensors on `device`, lists of two."""
    make = _Make(device)
    kind = next(kind for prefix, kind in _KINDS.items() if name.startswith(prefix))
    return kind(make, name)


def checks_of(arguments):
    """The checks of opcheck that a call can have. Its look at the schema multiplies tensors, which torch cannot do with
    FP8's."""
    given = [t for value in arguments.values() for t in (value if isinstance(value, list) else [value])]
    codes = any(
        isinstance(t, torch.Tensor) and t.dtype.is_floating_point and t.dtype.itemsize == 1 for t in given
    )
    known = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    return known[1:] if codes else known


class _Make:
    """Tensors with values that depend on how many were made before."""

    def __init__(self, device):
        self.device = device
        self.random = torch.Generator().manual_seed(1)

    def __call__(self, *shape):
        return torch.randn(shape, generator=self.random, dtype=F32, device="cpu").to(self.device)

    def positive(self, *shape):
        return torch.rand(shape, generator=self.random, dtype=F32, device="cpu").add(0.5).to(self.device)

    def full(self, value, *shape, dtype=F32):
        return torch.full(shape, value, dtype=dtype, device=self.device)

    def integers(self, *values, dtype=I64):
        return torch.tensor(values, dtype=dtype, device=self.device)

    def lists(self, *names):
        return {name: [self(3, 4), self(5)] for name in names}

    def squares(self, *names):
        return {name: [self.positive(3, 4), self.positive(5)] for name in names}

    def halves(self, name):
        return {name: [t.half() for t in self.lists(name)[name]]}

    def scaling(self):
        """No overflow, gradients of half the scale."""
        return dict(
            inv_scale=self.full(0.5, 1), found_inf=self.full(0.0, 1), noop_flag=self.full(0, 1, dtype=I32)
        )

    def counted(self):
        return dict(step=0, step_tensor=self.full(3, 1, dtype=I32), advance_step=True)


def _scale(make, name):
    flag = make.full(0, 1, dtype=I32)
    return make.lists("inputs", "outputs") | dict(noop_flag=flag, scale=2.0, scale_tensor=make.full(3.0, 1))


def _axpby(make, name):
    flag = make.full(0, 1, dtype=I32)
    return make.lists("x", "y", "outputs") | dict(noop_flag=flag, a=2.0, b=3.0, a_tensor=make.full(0.5, 1))


def _l2norm(make, name):
    return make.lists("tensors") | dict(
        total=make.full(7.0, 1), per_tensor=make.positive(2), noop_flag=make.full(0, 1, dtype=I32), scale=2.0,
        inv_scale=make.full(0.5, 1), check_noop=True, blend_new=0.5, blend_old=0.5, max_norm=0.5,
        clip_coefficient=make.full(7.0, 1),
    )  # fmt: skip


def _adam(make, name):
    lists = make.lists("grads", "params", "exp_avgs") | make.squares("exp_avg_sqs")
    extra = "max_exp_avg_sqs" if name == "multi_tensor_amsgrad" else "model_params"
    last, options = make.squares(extra), {}
    if name == "multi_tensor_adam":
        last, options = make.halves(extra), dict(unscale_grads=True)
    return lists | last | make.counted() | make.scaling() | options | dict(
        lr=0.0, beta1=0.9, beta2=0.99, eps=1e-3, decay_mode=1, bias_correction=True, weight_decay=0.1,
        lr_tensor=make.full(0.1, 1),
    )  # fmt: skip


def _lamb(make, name):
    lists = (
        make.lists("grads", "params", "exp_avgs") | make.squares("exp_avg_sqs") | make.halves("model_params")
    )
    return lists | make.counted() | make.scaling() | dict(
        lr=0.0, beta1=0.9, beta2=0.99, eps=1e-3, bias_correction=True, weight_decay=0.1, grad_averaging=True,
        decay_mode=1, global_grad_norm=make.full(5.0, 1), max_grad_norm=1.0, lr_tensor=make.full(0.1, 1),
        max_grad_norm_tensor=make.full(2.0, 1),
    )  # fmt: skip


def _lamb_stage1(make, name):
    lists = make.lists("grads", "params", "exp_avgs", "updates") | make.squares("exp_avg_sqs")
    return lists | dict(
        per_tensor_decay=make.positive(2), step=3, beta1=0.9, beta2=0.99, eps=1e-3,
        global_grad_norm=make.full(5.0, 1), max_global_grad_norm=1.0, step_tensor=make.full(3, 1, dtype=I32),
        **make.scaling(), per_tensor_beta1=make.full(0.9, 2), per_tensor_beta2=make.full(0.99, 2),
        per_tensor_gradient_share=make.positive(2), per_tensor_eps=make.positive(2),
        per_tensor_bias_correction=make.positive(2), per_tensor_param_norm=make.positive(2),
        per_tensor_update_norm=make.positive(2),
    )  # fmt: skip


def _lamb_stage2(make, name):
    norms = dict(per_tensor_param_norm=make.positive(2), per_tensor_update_norm=make.positive(2))
    flags = {name: value for name, value in make.scaling().items() if name != "inv_scale"}
    return make.lists("params", "updates") | make.halves("model_params") | norms | flags | dict(
        lr=0.0, weight_decay=0.0, lr_tensor=make.full(0.1, 1), per_tensor_decay=make.positive(2)
    )  # fmt: skip


def _reversible_adam(make, name):
    lists = make.lists("grads", "params", "exp_avgs", "model_params") | make.squares("exp_avg_sqs")
    return lists | dict(
        step_size=0.1, beta1=0.9, beta2=0.99, eps=1e-3, weight_decay=0.1, scale=2.0, skip_non_finite=True,
        overflow_flag=make.full(0, 1, dtype=I32),
    )  # fmt: skip


def _sgd(make, name):
    return make.lists("grads", "params", "momentums") | make.halves("model_params") | make.scaling() | dict(
        weight_decay=0.1, momentum=0.9, dampening=0.1, lr=0.0, nesterov=False, first_run=False,
        wd_after_momentum=False, scale=2.0, lr_tensor=make.full(0.1, 1), unscale_grads=True,
    )  # fmt: skip


def _adagrad(make, name):
    options = dict(
        lr=0.0, eps=1e-3, decay_mode=0, weight_decay=0.1, lr_tensor=make.full(0.1, 1), unscale_grads=True
    )
    return make.lists("grads", "params") | make.squares("sums") | make.scaling() | options


def _novograd(make, name):
    return make.lists("grads", "params", "exp_avgs") | make.counted() | make.scaling() | dict(
        grad_norms=make.positive(2), lr=0.0, beta1=0.9, beta2=0.99, eps=1e-3, bias_correction=True,
        weight_decay=0.1, grad_averaging=True, moment_mode=0, norm_type=2, lr_tensor=make.full(0.1, 1),
        unscale_grads=True,
    )  # fmt: skip


def _lars(make, name):
    norms = dict(grad_norms=make.positive(2), param_norms=make.positive(2))
    return make.lists("grads", "params", "momentums") | make.halves("model_params") | norms | make.scaling() | dict(
        lr=0.0, trust_coefficient=0.01, eps=1e-3, weight_decay=0.1, momentum=0.9, nesterov=True,
        is_skipped=False, scale=2.0, lr_tensor=make.full(0.1, 1), unscale_grads=True,
    )  # fmt: skip


def _adadelta(make, name):
    options = dict(lr=0.0, rho=0.9, eps=1e-3, weight_decay=0.1, lr_tensor=make.full(0.1, 1))
    return (
        make.lists("grads", "params") | make.squares("square_avgs", "acc_deltas") | make.scaling() | options
    )


def _rmsprop(make, name):
    lists = make.lists("grads", "params", "momentums")
    squares = {"square_avgs": [make.full(9.0, 3, 4), make.full(9.0, 5)]}
    return lists | squares | make.squares("grad_avgs") | make.scaling() | dict(
        lr=0.0, alpha=0.9, eps=1e-3, weight_decay=0.1, momentum=0.9, lr_tensor=make.full(0.1, 1)
    )  # fmt: skip


def _hysteresis(make, name):
    return dict(
        current_scale=make.full(8.0, 1), growth_tracker=make.full(1, 1, dtype=I32),
        hysteresis_tracker=make.full(1, 1, dtype=I32), found_inf=make.full(1.0, 1), growth_factor=2.0,
        backoff_factor=0.5, growth_interval=10, hysteresis=2,
    )  # fmt: skip


def _norm(make, name):
    x, w, b, rows = make(4, 8), make(8), make(8), make.positive(4)
    centred, added = "layer" in name, name.startswith("add_")
    affine = dict(weight=w, bias=b) if centred else dict(weight=w)
    common = dict(normalized_shape=(8,), eps=1e-5) | affine
    if name.endswith("_forward"):
        return dict(input=x) | (dict(residual=make(4, 8)) if added else {}) | common
    saved = dict(grad_output=make(4, 8), saved=x, rstd=rows) | (dict(mean=make(4)) if centred else {})
    return saved | (dict(grad_sum=make(4, 8)) if added else {}) | common


def _rope(make, name):
    if name.endswith("backward"):
        height, width = make(1, 3, 1, 4), make(1, 5, 1, 4)
        return dict(
            input=make(2, 3, 5, 2, 8), cos=height, sin=height.clone(), cos_w=width, sin_w=width.clone()
        )
    return dict(
        input=make(5, 3, 8),
        cos=make(6, 1, 1, 8),
        sin=make(6, 1, 1, 8),
        cu_seqlens=make.integers(0, 2, 5, dtype=I32),
    )


def _xentropy(make, name):
    logits, labels = make(4, 8), make.integers(0, 1, 2, 3)
    if name.endswith("forward"):
        return dict(logits=logits, labels=labels, smoothing=0.1)
    normalizers = torch.ops.apex_reference.xentropy_forward(logits, labels, 0.1)[1]
    return dict(grad_losses=make(4), logits=logits, labels=labels, normalizers=normalizers, smoothing=0.1)


def _softmax(make, name):
    x = make(2, 2, 4, 8)
    if name.endswith("forward"):
        return dict(input=x, mask=make(2, 1, 4, 8) > 1.0, scale=0.5)
    return dict(grad_output=make(2, 2, 4, 8), output=torch.softmax(x, -1), scale=0.5)


def _masked_softmax_dropout(make, name):
    common = dict(dropout=0.25, seed=make.integers(5))
    x = make(2, 2, 4, 8)
    if name.endswith("forward"):
        return common | dict(input=x, mask=make(2, 1, 1, 8), keep_mask=True)
    return common | dict(grad_output=make(2, 2, 4, 8), softmax=torch.softmax(x, -1), kept_mask=None)


def _bias_activation(make, name):
    common = dict(input=make(4, 8), bias=make(8), activation="silu", gated=True)
    return common if name.endswith("forward") else dict(grad_output=make(4, 4)) | common


def _dense(make, name):
    common = dict(input=make(4, 8), weight=make(6, 8), bias=make(6), activation="gelu")
    return common if name.endswith("forward") else dict(grad_output=make(4, 6), saved=make(4, 6)) | common


def _dense_gelu_dense(make, name):
    common = dict(
        input=make(4, 8), weight1=make(6, 8), bias1=make(6), weight2=make(3, 6), bias2=make(3)
    )  # fmt: skip
    if name.endswith("forward"):
        return common
    return dict(grad_output=make(4, 3), hidden=make(4, 6), before=make(4, 6)) | common


def _wgrad_gemm_accum(make, name):
    return dict(input=make(4, 8), grad_output=make(4, 6), main_grad=make(6, 8))


def _conv_bias_relu(make, name):
    common = dict(input=make(2, 8, 4, 4), weight=make(8, 8, 3, 3), scale=make(8), bias=make(8), padding=1)
    if name.endswith("forward"):
        return common | dict(residual=make(2, 8, 4, 4), mask=make(2, 8, 4, 4))
    return common | dict(grad_output=make(2, 8, 4, 4), output=make(2, 8, 4, 4), of_residual=True)


def _focal_loss(make, name):
    common = dict(
        logits=make(4, 8), targets=make.integers(0, -1, 2, 3), num_positives=make.full(3.0, 1),
        num_real_classes=8, alpha=0.25, gamma=2.0, smoothing=0.1,
    )  # fmt: skip
    return common if name.endswith("forward") else dict(grad_loss=make.full(2.0, 1)) | common


def _index_mul_2d(make, name):
    common = dict(in1=make(3, 4), in2=make(4, 4), idx1=make.integers(0, 2, 2, 1))
    return common if name.endswith("forward") else dict(grad_out=make(4, 4)) | common


def _kept_magnitudes(make, name):
    return dict(columns=make(9, 5), groups=make.integers(*range(8), 8, *range(7), dtype=I32).view(2, 8))


def _image(make):
    return make(2, 8, 3, 3)


def _welford_mean_var(make, name):
    return dict(input=_image(make))


def _welford_parallel(make, name):
    return dict(
        mean=make(2, 8), var_biased=make.positive(2, 8), numel=make.integers(5, 7, dtype=I32), eps=1e-5,
        running_mean=make(8), running_var=make.positive(8), momentum=0.1,
        num_batches_tracked=make.full(3, dtype=I64),
    )  # fmt: skip


def _batchnorm(make, name):
    common = dict(input=_image(make), mean=make(8), inv_std=make.positive(8), weight=make(8))
    if name in ("batchnorm_forward", "groupbn_forward"):
        return common | dict(z=_image(make), shift=make(8), fuse_relu=True)
    common["grad_output"] = _image(make)
    if name == "relu_bw":
        return common | dict(z=_image(make), shift=make(8))
    bitmask = make.integers(*range(100, 118), dtype=torch.uint8)
    if name == "reduce_bn":
        return common | dict(bitmask=bitmask)
    sums = dict(sum_dy=make(8), sum_dy_xmu=make(8), count=make.integers(36, dtype=I32))
    return common | sums | (dict(bitmask=bitmask, of_z=True) if name == "groupbn_backward" else {})


def _group_norm(make, name):
    common = dict(input=_image(make), num_groups=4, weight=make(8), bias=make(8), eps=1e-5, silu=True)
    if name.endswith("forward"):
        return common
    return common | dict(grad_output=_image(make), mean=make(2, 4), rstd=make.positive(2, 4))


def _lengths(make):
    return dict(f_len=make.integers(3, 2), g_len=make.integers(3, 2))


def _transducer_joint(make, name):
    if name.endswith("forward"):
        packed = dict(batch_offset=make.integers(9, 13), packed_batch=13)
        return (
            dict(f=make(2, 3, 8), g=make(2, 3, 8), relu=True, dropout=0.5, seed=make.integers(5))
            | packed
            | _lengths(make)
        )
    dropped = dict(dropout=0.5, seed=make.integers(5)) | _lengths(make)
    mask = torch.ops.apex_reference.transducer_joint_forward(make(2, 3, 8), make(2, 3, 8), **dropped)[1]
    return dict(
        grad_output=make(2, 3, 3, 8),
        f=None,
        g=None,
        mask=mask,
        batch_offset=None,
        max_f_len=3,
        max_g_len=3,
        scale=2.0,
    ) | _lengths(make)


def _transducer_loss(make, name):
    forward = dict(
        x=make(13, 5), label=make.integers((1, 2), (3, 0)), f_len=make.integers(3, 2), y_len=make.integers(2, 1),
        blank_idx=0, batch_offset=make.integers(9, 13), max_f_len=3,
    )  # fmt: skip
    if name.endswith("forward"):
        return forward
    _, alpha, beta, normalizers = torch.ops.apex_reference.transducer_loss_forward(**forward)
    del forward["max_f_len"]
    return forward | dict(grad_loss=make(2), alpha=alpha, beta=beta, normalizers=normalizers, of_logits=True)


def _fp8_quantize(make, name):
    amax, scale = make.full(0.0, 1), make.full(2.0, 1)
    shared = dict(scale=scale, amax=amax, dtype=torch.float8_e4m3fn, rowwise=True, columnwise=True)
    gradient = dict(before=make(4, 16), activation="silu", gated=True, bias_gradient=True)
    return dict(input=make(4, 8)) | shared | gradient


def _fp8_of(make):
    codes = torch.arange(64, dtype=torch.int32, device="cpu").to(torch.uint8).view(4, 16)
    return codes.to(make.device).view(torch.float8_e4m3fn)


def _fp8_dequantize(make, name):
    return dict(input=_fp8_of(make), scale_inv=make.full(0.5, 1))


def _fp8_transpose(make, name):
    return dict(input=_fp8_of(make), scale_inv=make.full(0.5, 1), bias_gradient=True)


def _fp8_update_scales(make, name):
    numbers = dict(scale=make.positive(5), scale_inv=make.positive(5), fp8_max=make.full(448.0, 5))
    return dict(amax_history=make.positive(3, 5), reduced=make.positive(5)) | numbers


def _fp8_multi_update_scales(make, name):
    held = dict(
        amax_histories=[make.positive(3, 5), make.positive(3, 2)], scales=[make.positive(5), make.positive(2)]
    )
    return held | dict(fp8_max=make.full(448.0, 7), scale=make.positive(7), scale_inv=make.positive(7))


def _fp8_multi_quantize(make, name):
    inputs = [make(4, 16), make(3, 8)]
    outputs = [[make.full(0, *size, dtype=torch.uint8).view(torch.float8_e5m2) for size in sizes]
               for sizes in (((4, 16), (3, 8)), ((16, 4), (8, 3)))]  # fmt: skip
    return dict(
        scales=make.positive(2), amaxes=make.full(0.0, 2), inputs=inputs, rows=outputs[0], columns=outputs[1]
    )


def _fp8_quantize_blocks(make, name):
    return dict(input=make(5, 16), dtype=torch.float8_e4m3fn, columnwise=True)


def _fp8_norm(make, name):
    codes = dict(scale=make.full(2.0, 1), amax=make.full(0.0, 1), dtype=torch.float8_e4m3fn)
    bias = dict(bias=make(8)) if name == "fp8_layer_norm" else {}
    return dict(input=make(4, 8), weight=make(8), eps=1e-5, zero_centered_gamma=True) | codes | bias


_KINDS = {
    "fp8_layer_norm": _fp8_norm,
    "fp8_rms_norm": _fp8_norm,
    "fp8_quantize_blocks": _fp8_quantize_blocks,
    "fp8_multi_update_scales": _fp8_multi_update_scales,
    "fp8_multi_quantize": _fp8_multi_quantize,
    "fp8_quantize": _fp8_quantize,
    "fp8_dequantize": _fp8_dequantize,
    "fp8_transpose": _fp8_transpose,
    "fp8_update_scales": _fp8_update_scales,
    "multi_tensor_scale": _scale,
    "multi_tensor_axpby": _axpby,
    "multi_tensor_l2norm": _l2norm,
    "multi_tensor_adam": _adam,
    "multi_tensor_amsgrad": _adam,
    "multi_tensor_lamb_stage1": _lamb_stage1,
    "multi_tensor_lamb_stage2": _lamb_stage2,
    "multi_tensor_lamb": _lamb,
    "multi_tensor_reversible_adam": _reversible_adam,
    "multi_tensor_sgd": _sgd,
    "multi_tensor_adagrad": _adagrad,
    "multi_tensor_novograd": _novograd,
    "multi_tensor_lars": _lars,
    "multi_tensor_adadelta": _adadelta,
    "multi_tensor_rmsprop": _rmsprop,
    "update_scale_hysteresis": _hysteresis,
    "layer_norm": _norm,
    "rms_norm": _norm,
    "add_": _norm,
    "rope": _rope,
    "xentropy": _xentropy,
    "scaled_masked_softmax": _softmax,
    "masked_softmax_dropout": _masked_softmax_dropout,
    "bias_activation": _bias_activation,
    "dense_gelu_dense": _dense_gelu_dense,
    "dense": _dense,
    "wgrad_gemm_accum": _wgrad_gemm_accum,
    "conv_bias_relu": _conv_bias_relu,
    "focal_loss": _focal_loss,
    "index_mul_2d": _index_mul_2d,
    "kept_magnitudes": _kept_magnitudes,
    "welford_mean_var": _welford_mean_var,
    "welford_parallel": _welford_parallel,
    "batchnorm": _batchnorm,
    "groupbn": _batchnorm,
    "reduce_bn": _batchnorm,
    "relu_bw": _batchnorm,
    "group_norm": _group_norm,
    "transducer_joint": _transducer_joint,
    "transducer_loss": _transducer_loss,
}
