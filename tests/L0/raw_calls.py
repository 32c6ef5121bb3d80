"""Calls of the raw functions of public apex's extension modules, on the CPU: CALLS, module -> generator of calls.

Each gives (name, results) of one function after the other; some take what others returned.
"""

from __future__ import annotations

import importlib
import inspect

import torch

F32, F16, I32, I64, U8 = torch.float32, torch.float16, torch.int32, torch.int64, torch.uint8
CALLS = {}


def calls(*modules):
    """Enters a generator of such calls; it is given the module and `random`."""

    def enter(make):
        for name in modules:
            CALLS[name] = make
        return make

    return enter


def results_of(name):
    """{function's name: the tensors that it returned}, of every call of a module, on the same numbers each time."""
    generator = torch.Generator("cpu").manual_seed(3)

    def random(*shape, dtype=F32):
        return torch.randn(shape, generator=generator, dtype=F32, device="cpu").to(dtype)

    module = importlib.import_module(f"apex._legacy.{name}")
    found = {}
    for function, made in CALLS[name](module, random):
        made = [made] if isinstance(made, torch.Tensor) else made or []
        found[function] = [t for t in made if isinstance(t, torch.Tensor)]
    return found


def ints(*values, dtype=I32):
    return torch.tensor(values, dtype=dtype, device="cpu")


def zeros(*shape, dtype=F32):
    return torch.zeros(shape, dtype=dtype, device="cpu")


@calls("amp_C")
def _(m, random):
    x, y, flag = [random(5)], [zeros(5)], ints(0)
    m.multi_tensor_scale(64, flag, [x, y], 2.0)
    yield "multi_tensor_scale", y
    yield "multi_tensor_l2norm", m.multi_tensor_l2norm(64, flag, [x], True)
    m.multi_tensor_axpby(64, flag, [x, x, y], 1.0, 2.0, -1)
    yield "multi_tensor_axpby", y


@calls("fused_adam_cuda")
def _(m, random):
    p, exp_avg, g = random(6), random(6), random(6, dtype=F16)
    exp_avg_sq, copy, flag = random(6).square(), zeros(6, dtype=F16), ints(0)
    options = 0.1, 0.9, 0.99, 1e-3, 2.0, 3, 1, 1, 0.1
    for name in ("adam", "reversible_adam"):
        getattr(m, name)(p, copy, exp_avg, exp_avg_sq, g, *options)
        yield name, [t.clone() for t in (p, copy, exp_avg, exp_avg_sq)]
    m.adam_mt(64, flag, [[p], [exp_avg], [exp_avg_sq], [g], [copy]], *options)
    yield "adam_mt", [t.clone() for t in (p, copy, exp_avg, exp_avg_sq)]
    m.maybe_adam_undo(ints(1), p, exp_avg, exp_avg_sq, g, *options)
    yield "maybe_adam_undo", [p, exp_avg, exp_avg_sq]
    found = [zeros(6, dtype=F16), zeros(6, dtype=U8)]
    m.maybe_cast(flag, p, found[0])
    m.maybe_cast_mt(64, flag, [[p], [found[1]]])
    yield "maybe_cast", found[0]
    yield "maybe_cast_mt", found[1]
    m.strided_check_finite(flag, p, 1, 1)
    yield "strided_check_finite", flag


@calls("fused_lamb_cuda")
def _(m, random):
    lists = [[random(6)], [random(6)], [random(6)], [random(6).square()]]
    m.lamb(64, ints(0), lists, 0.1, 0.9, 0.99, 1e-3, 3, 1, 0.1, 1, 1, 2.0, 1.0)
    yield "lamb", [column[0] for column in lists]


@calls("distributed_adam_cuda")
def _(m, random):
    lists = [[random(6)], [random(6)], [random(6).square()], [random(6, dtype=F16)], [zeros(6, dtype=F16)]]
    flag, scale, end = ints(0), ints(1, dtype=F32), (1, 1, 0.1)
    m.multi_tensor_fused_adam(64, flag, lists, scale, 0.1, 0.9, 0.99, 1e-3, 3, *end)
    yield "multi_tensor_fused_adam", [column[0].clone() for column in lists]
    rate = ints(1, dtype=F32)
    m.multi_tensor_fused_adam_capturable(64, flag, lists, scale, rate, 0.9, 0.99, 1e-3, ints(3), *end)
    yield "multi_tensor_fused_adam_capturable", [column[0].clone() for column in lists]
    halves = [[random(6, dtype=torch.bfloat16)], [zeros(6, dtype=torch.int16)]]
    lists = [*halves, *lists[1:4], [zeros(6, dtype=torch.bfloat16)]]
    m.multi_tensor_fused_adam_with_param_remainders(64, flag, lists, scale, 0.1, 0.9, 0.99, 1e-3, 3, *end)
    yield "multi_tensor_fused_adam_with_param_remainders", [column[0] for column in lists]


@calls("distributed_lamb_cuda")
def _(m, random):
    one, g, p, u = ints(1, dtype=F32), [random(6)], [random(6)], [zeros(6)]
    m.multi_tensor_lamb_compute_update_term(
        64, ints(0), [g, p, [random(6)], [random(6).square()], u], one / 2, one / 2, one / 2, ints(1), ints(3), one, 1,
        one, one, one, 1.0,
    )  # fmt: skip
    yield "multi_tensor_lamb_compute_update_term", u
    copies = [zeros(6, dtype=F16)]
    m.multi_tensor_lamb_update_weights(
        64, ints(0), [u, p, copies], one, one, ints(0, dtype=I64), one, one, one, True
    )
    yield "multi_tensor_lamb_update_weights", [*p, *copies]


@calls("apex_C")
def _(m, random):
    flat = m.flatten([random(2, 3), random(4)])
    yield "flatten", flat
    yield "unflatten", m.unflatten(flat, [zeros(2, 3), zeros(4)])


@calls("fused_layer_norm_cuda")
def _(m, random):
    x, w, b, dy = random(4, 8), random(8), random(8), random(4, 8)
    y, mean, invvar = made = m.forward_affine(x, (8,), w, b, 1e-5)
    yield "forward_affine", made
    yield "forward", m.forward(x, (8,), 1e-5)
    yield "forward_affine_mixed_dtypes", m.forward_affine_mixed_dtypes(x.half(), (8,), w, b, 1e-5)
    yield "backward_affine", m.backward_affine(dy, mean, invvar, x, (8,), w, b, 1e-5, False)
    yield "backward", m.backward(dy, mean, invvar, x, (8,), 1e-5, False)
    y, invvar = made = m.rms_forward_affine(x, (8,), w, 1e-5)
    yield "rms_forward_affine", made
    yield "rms_forward", m.rms_forward(x, (8,), 1e-5)
    yield "rms_forward_affine_mixed_dtypes", m.rms_forward_affine_mixed_dtypes(x.half(), (8,), w, 1e-5)
    yield "rms_backward_affine", m.rms_backward_affine(dy, invvar, x, (8,), w, 1e-5, False)
    yield "rms_backward", m.rms_backward(dy, invvar, x, (8,), 1e-5, False)


@calls("fast_layer_norm")
def _(m, random):
    x, w, b = random(4, 8), random(8), random(8)
    y, mean, rsigma = made = m.ln_fwd(x, w, b, 1e-5)
    yield "ln_fwd", made
    yield "ln_bwd", m.ln_bwd(random(4, 8), x, mean, rsigma, w, b)


@calls("xentropy_cuda")
def _(m, random):
    x, labels = random(4, 8, dtype=F16), ints(0, 3, 2, 7, dtype=I64)
    losses, total = made = m.forward(x, labels, 0.1, False)
    yield "forward", made
    yield "backward", m.backward(random(4, dtype=F16), x, total, labels, 0.1)


@calls("focal_loss_cuda")
def _(m, random):
    positive = ints(2, dtype=F32)
    loss, grad = made = m.forward(random(4, 8), ints(0, -1, 2, 3, dtype=I64), positive, 8, 0.25, 2.0, 0.1)
    yield "forward", [t.clone() for t in made]
    yield "backward", m.backward(loss, grad, positive)


@calls("fused_bias_swiglu")
def _(m, random):
    x, b = random(4, 8), random(8)
    yield "forward", m.forward(x, b)
    yield "backward", m.backward(random(4, 4), x, b)


@calls("group_norm_cuda")
def _(m, random):
    x, w, b = random(2, 8, 3, 3), random(8), random(8)
    y, sums = made = m.forward(x, 4, w, b, 1e-5, 1, True)
    yield "forward", made
    yield "backward", m.backward(random(2, 8, 3, 3), sums, x, 4, w, b, 1e-5, 1, True)


@calls("group_norm_v2_cuda")
def _(m, random):
    x, w, b, sums = random(2, 8, 3, 3), random(8), random(8), zeros(16)
    yield "gn", [m.gn(x, w, b, 1e-5, True, 4, sums), sums]
    yield "gn_bwd", m.gn_bwd(random(2, 8, 3, 3), x, w, b, sums, 1e-5, True, 4)


@calls(
    "scaled_masked_softmax_cuda", "generic_scaled_masked_softmax_cuda", "scaled_softmax_cuda",
    "scaled_upper_triang_masked_softmax_cuda",
)  # fmt: skip
def _(m, random):
    x = random(2, 8, 8) if "triang" in m.__name__ else random(2, 2, 8, 8)
    masks = (
        [zeros(2, 1, 8, 8, dtype=U8)]
        if "_masked_softmax" in m.__name__ and "triang" not in m.__name__
        else []
    )
    y = m.forward(x, *masks, 0.5)
    yield "forward", y
    yield "backward", m.backward(random(*x.shape), y.clone(), 0.5)


@calls("fused_index_mul_2d")
def _(m, random):
    in1, in2, index = random(3, 4), random(5, 4), ints(0, 2, 2, 1, 0, dtype=I64)
    for kind in ("float", "half"):
        out, of1, of2 = zeros(5, 4), zeros(3, 4), zeros(5, 4)
        getattr(m, f"{kind}_forward")(out, in1, in2, index)
        yield f"{kind}_forward", out.clone()
        getattr(m, f"{kind}_backward")(of1, of2, out, in1, in2, index)
        yield f"{kind}_backward", [of1.clone(), of2.clone()]
        grad = zeros(5, 4)
        getattr(m, f"{kind}_backward_backward")(grad, of1, of2, out, in1, in2, in1, in2, index)
        yield f"{kind}_backward_backward", [grad, of1, of2]


@calls("fused_rotary_positional_embedding")
def _(m, random):
    x, angles = random(4, 2, 3, 8), random(4, 1, 1, 8)
    tables, starts = [random(1, n, 1, 4) for n in (3, 3, 5, 5)], ints(0, 2, 4)
    for direction in ("forward", "backward"):
        yield direction, getattr(m, direction)(x, angles, True)
        cached = getattr(m, f"{direction}_cached")(x, angles.cos(), angles.sin(), False)
        yield f"{direction}_cached", cached
        yield f"{direction}_thd", getattr(m, f"{direction}_thd")(x[:, 0], starts, angles)
        yield f"{direction}_2d", getattr(m, f"{direction}_2d")(random(2, 3, 5, 2, 8), *tables)


@calls("transducer_joint_cuda")
def _(m, random):
    f, g, lengths = random(2, 3, 4), random(2, 2, 4), (ints(3, 2), ints(2, 2))
    made = m.forward(f, g, *lengths, None, 0, 1, False, True, False, 0.0, 4)
    yield "forward", made
    yield "backward", m.backward([random(2, 3, 2, 4), made[1]], *lengths, None, 3, 2, False, 1.0)


@calls("transducer_loss_cuda")
def _(m, random):
    x, label, lengths = random(2, 3, 3, 5).log_softmax(-1), ints((1, 2), (3, 4)), (ints(3, 2), ints(2, 1))
    alpha, beta, loss = made = m.forward(x, label, *lengths, None, 0, 0, 1, False)
    yield "forward", made
    end = (*lengths, label, None, 0, 0, 1, True, False)
    yield "backward", m.backward(x, random(2), alpha, beta, *end)


@calls("syncbn")
def _(m, random):
    x, dy, w, b = random(3, 4, 5), random(3, 4, 5), random(4), random(4)
    mean, var = made = m.welford_mean_var(x)
    yield "welford_mean_var", made
    statistics = m.welford_parallel(mean[None], var[None], ints(15), 1e-5)
    yield "welford_parallel", statistics
    mean, _, inv_std = statistics
    yield "batchnorm_forward", m.batchnorm_forward(x, mean, inv_std, w, b)
    yield "reduce_bn", m.reduce_bn(dy, x, mean, inv_std, w)
    sums = (random(4), random(4), ints(15))
    yield "batchnorm_backward", m.batchnorm_backward(dy, x, mean, inv_std, w, *sums)
    x, dy = (t.transpose(1, 2).contiguous() for t in (x, dy))
    yield "welford_mean_var_c_last", m.welford_mean_var_c_last(x)
    yield "batchnorm_forward_c_last", m.batchnorm_forward_c_last(x, dy, mean, inv_std, w, b, True)
    yield "reduce_bn_c_last", m.reduce_bn_c_last(dy, x, mean, inv_std, w)
    yield "batchnorm_backward_c_last", m.batchnorm_backward_c_last(dy, x, mean, inv_std, w, *sums)
    yield "relu_bw_c_last", m.relu_bw_c_last(dy, x, dy, mean, inv_std, w, b)


@calls("bnp")
def _(m, random):
    x, z, dy = (random(2, 3, 3, 8) for _ in range(3))
    end = (None, None, None, None, 1, ints(0), 2, 16, False)
    affine, running, batch = (random(8), random(8)), (zeros(8), zeros(8) + 1), (zeros(8), zeros(8))
    state = (*affine, *running, *batch)
    yield "bn_fwd_nhwc", m.bn_fwd_nhwc(x, *state, None, 0.1, 1e-3, True, *end)
    yield "bn_fwd_eval_nhwc", m.bn_fwd_eval_nhwc(x, *affine, *running, None, 1, 0.1, 1e-3, True)
    yield "bn_bwd_nhwc", m.bn_bwd_nhwc(x, dy, *state, None, 0.1, 1e-3, True, *end)
    bits = zeros(x.numel() // 32 * 2 + 64, dtype=I32)
    yield "bn_addrelu_fwd_nhwc", m.bn_addrelu_fwd_nhwc(x, z, *state, bits, None, 0.1, 1e-3, *end)
    yield "bn_addrelu_fwd_eval_nhwc", m.bn_addrelu_fwd_eval_nhwc(x, z, *affine, *running, None, 1, 0.1, 1e-3)
    yield "bn_addrelu_bwd_nhwc", m.bn_addrelu_bwd_nhwc(x, dy, *state, bits, None, 0.1, 1e-3, *end)


@calls("cudnn_gbn_lib")
def _(m, random):
    x, group, (mean, inv_std) = random(2, 8, 3, 3), (1, 0, [0]), (zeros(8), zeros(8))
    state = (zeros(8), zeros(8) + 1, mean, inv_std)
    yield "forward", m.forward(x, random(8), random(8), *state, 0.1, 1e-3, *group)
    yield "backward", m.backward(x, random(2, 8, 3, 3), random(8), mean, inv_std, 1e-3, *group)


@calls("fused_weight_gradient_mlp_cuda")
def _(m, random):
    total = zeros(4, 8)
    m.wgrad_gemm_accum_fp32(random(5, 8, dtype=F16), random(5, 4, dtype=F16), total)
    yield "wgrad_gemm_accum_fp32", total
    total = zeros(4, 8, dtype=F16)
    m.wgrad_gemm_accum_fp16(random(5, 8, dtype=F16), random(5, 4, dtype=F16), total)
    yield "wgrad_gemm_accum_fp16", total


@calls("mlp_cuda")
def _(m, random):
    inputs = [random(5, 3), random(4, 3), random(2, 4), random(4), random(2)]
    made = m.forward(True, 1, inputs)
    yield "forward", made
    yield "backward", m.backward(True, 1, random(5, 2), made, inputs)


@calls("fused_dense_cuda")
def _(m, random):
    x, first, second = random(5, 3), (random(4, 3), random(4)), (random(2, 4), random(2))
    yield "linear_bias_forward", m.linear_bias_forward(x, *first)
    yield "linear_bias_backward", m.linear_bias_backward(x, first[0], random(5, 4))
    hidden, output, before = made = m.linear_gelu_linear_forward(x, *first, *second)
    yield "linear_gelu_linear_forward", made
    back = m.linear_gelu_linear_backward(x, before, hidden, first[0], second[0], random(5, 2))
    yield "linear_gelu_linear_backward", back


@calls("fused_conv_bias_relu")
def _(m, random):
    x, w, b, dy = random(2, 5, 7, 6), random(4, 5, 3, 3), random(1, 4, 1, 1), random(2, 4, 7, 6)
    (y,) = made = m.forward([x, w, b], 1, 1)
    yield "forward", made
    yield "forward_no_relu", m.forward_no_relu([x, w, b], 1, 1)
    yield "forward_mask", m.forward_mask([x, w, b, dy > 0], 1, 1)
    yield "forward_cscale_cbias_relu", m.forward_cscale_cbias_relu([x, w, b, b], 1, 1)
    yield "backward", m.backward([x, w, y, dy], 1, 1)
    yield "backward_no_relu", m.backward_no_relu([x, w, dy], 1, 1)
    yield "backward_cscale_cbias_relu", m.backward_cscale_cbias_relu([x, w, b, y, dy], 1, 1)


@calls("fmhalib")
def _(m, random):
    qkv, starts = random(5, 3, 2, 32, dtype=F16), ints(0, 2, 5)
    y, softmax = made = m.fwd(qkv, starts, 0.0, 128, True, False, False)
    yield "fwd", made
    yield "bwd", m.bwd(y, qkv, softmax, starts, 0.0, 128, False)
    yield "bwd_nl", m.bwd_nl(y, qkv, softmax, starts, 0.0, 128, False)


@calls("fast_multihead_attn")
def _(m, random):
    mask, scores = zeros(2, 4, dtype=U8), random(4, 3, 4)
    y, kept, softmax = made = m.mask_softmax_dropout_forward(True, False, 2, scores, mask, 0.0)
    yield "mask_softmax_dropout_forward", made
    yield (
        "mask_softmax_dropout_backward",
        m.mask_softmax_dropout_backward(True, 2, scores, y, kept, mask, 0.0),
    )
    x, w, out, dy = random(3, 2, 8), random(24, 8), random(8, 8), random(3, 2, 8)
    lin, softmax, dropped, kept, context, y = made = m.self_attn_forward(
        False, False, False, 2, x, w, out, None, 0.0
    )
    yield "self_attn_forward", made
    yield (
        "self_attn_backward",
        m.self_attn_backward(2, dy, context, dropped, softmax, lin, x, w, out, kept, 0.0),
    )


@calls("fast_bottleneck")
def _(m, random):
    inputs = [random(2, 3, 3, 4), random(4, 1, 1, 4), random(4, 3, 3, 4), random(4, 1, 1, 4)]
    inputs += [random(1, 1, 1, 4) for _ in range(6)]
    outputs = m.forward(True, 1, inputs)
    yield "forward", outputs
    g = random(2, 3, 3, 4)
    yield "backward", m.backward(True, 1, [*inputs, g, g, *outputs[:2]])


def functions(name):
    """{name: function} of a module's public functions."""
    module = importlib.import_module(f"apex._legacy.{name}")
    names = [n for n in module.__all__ if inspect.isfunction(getattr(module, n)) and not n.startswith("__")]
    return {n: getattr(module, n) for n in names}


@calls("permutation_search_cuda")
def _(m, random):
    x, orders = random(6, 16), ints(*range(8), 0, 1, 2, 4, 3, 5, 6, 7)
    one, gains, best, swaps = zeros(1), zeros(2), zeros(2, dtype=I32), zeros(2, 16)
    m.sum_after_2_to_4(x, 6, 16, 0, 16, 1, 32, one)
    yield "sum_after_2_to_4", one
    m.build_permute_map(x, 6, 16, ints(0, 1, 1, 3), 2, 2, orders, 8, gains, best)
    yield "build_permute_map", [gains.clone(), best.clone()]
    m.check_permutations(x, 6, 16, ints(0, 1), 2, 1, orders, 2, gains, best)
    yield "check_permutations", [gains[:1], best[:1]]
    m.build_swap_map(x, 6, 16, ints(0, 1, 1, 3), swaps)
    yield "build_swap_map", swaps
