"""The functions of public apex's extension amp_C, with its argument orders, over the ops of this package.

chunk_size is taken and ignored: the ops cut tensors into chunks of their own. noop_flag: int32, one
element. tensor_lists: lists of equally many tensors, in the order that each function says. Beyond public
apex: any number of tensors, of any size, dtypes mixed within a list, empty lists, CPU tensors. Scalars are
not rounded to float32.

Errors: TypeError (dtypes), ValueError (devices, sizes, counts, values), before anything is written.
"""

from __future__ import annotations

import torch

from apex import _lists
from apex._loader import bindings, registry

bindings.load()  # before anything is traced: loading inside torch.compile would break the graph
_COUNTS = {name: len(op.lists) for name, op in registry.schemas().items()}

__all__ = [
    "multi_tensor_scale",
    "multi_tensor_axpby",
    "multi_tensor_l2norm",
    "multi_tensor_l2norm_mp",
    "multi_tensor_l2norm_scale",
    "multi_tensor_unscale_l2norm",
    "multi_tensor_sgd",
    "multi_tensor_adam",
    "multi_tensor_adam_capturable",
    "multi_tensor_adam_capturable_master",
    "multi_tensor_adagrad",
    "multi_tensor_novograd",
    "multi_tensor_lamb",
    "multi_tensor_lamb_mp",
    "multi_tensor_lamb_stage1_cuda",
    "multi_tensor_lamb_stage2_cuda",
    "multi_tensor_lars",
    "update_scale_hysteresis",
]


def _call(op, lists, *scalars, **keywords):
    """One call of an op. Lists that it can do without may lack at the end."""
    if _lists.module() is None:
        lists = [*lists, *[[]] * (_COUNTS[op] - len(lists))]
    _lists.call(op, lists, *scalars, **keywords)


# ---- scaling and norms -------------------------------------------------------------------------------------


def multi_tensor_scale(chunk_size, noop_flag, tensor_lists, scale):
    """outputs = scale * inputs, for tensor_lists [inputs, outputs]; noop_flag becomes 1 at an inf or nan."""
    inputs, outputs = tensor_lists
    _scale(noop_flag, inputs, outputs, scale)


def _scale(noop_flag, inputs, outputs, scale, scale_tensor=None, skip_one=False):
    _call("multi_tensor_scale", [inputs, outputs], noop_flag, scale, scale_tensor, skip_one)


def multi_tensor_axpby(chunk_size, noop_flag, tensor_lists, a, b, arg_to_check):
    """outputs = a * x + b * y, for [x, y, outputs].

    noop_flag becomes 1 at an inf or nan in x (arg_to_check 0), y (1) or either (-1).
    """
    _call("multi_tensor_axpby", tensor_lists, noop_flag, a, b, arg_to_check)


def _l2norm(noop_flag, tensors, per_tensor, **options):
    device = tensors[0].device if tensors else noop_flag.device
    total = torch.zeros(1, dtype=torch.float32, device=device)
    each = torch.zeros(len(tensors) if per_tensor else 0, dtype=torch.float32, device=device)
    options |= dict(total=total, noop_flag=noop_flag)
    if per_tensor and tensors:
        options["per_tensor"] = each
    _call("multi_tensor_l2norm", [tensors], **options)
    return total, each


def multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor_python=None):
    """(the L2 norm of all tensors of [tensors] together, of each), float32 of shapes (1,) and (n,).

    The second is empty unless per_tensor_python. noop_flag is not read; an inf or nan sets it to 1.
    """
    return _l2norm(noop_flag, tensor_lists[0], per_tensor_python)


def multi_tensor_l2norm_mp(chunk_size, noop_flag, tensor_lists, per_tensor_python=None):
    """As multi_tensor_l2norm, but where noop_flag is not 0 nothing is measured and the norms are 0."""
    return _l2norm(noop_flag, tensor_lists[0], per_tensor_python, check_noop=True)


def multi_tensor_l2norm_scale(chunk_size, noop_flag, tensor_lists, scale, per_tensor_python=None):
    """As multi_tensor_l2norm for the inputs of [inputs, outputs], and outputs = scale * inputs."""
    inputs, outputs = tensor_lists
    norms = _l2norm(noop_flag, inputs, per_tensor_python)
    _scale(noop_flag, inputs, outputs, scale)
    return norms


def multi_tensor_unscale_l2norm(chunk_size, noop_flag, tensor_lists, inv_scale, per_tensor_python=None):
    """As multi_tensor_l2norm, of the tensors times inv_scale (float32 of one element). They stay."""
    return _l2norm(noop_flag, tensor_lists[0], per_tensor_python, inv_scale=inv_scale)


# ---- optimizers --------------------------------------------------------------------------------------------


def multi_tensor_sgd(
    chunk_size,
    noop_flag,
    tensor_lists,
    wd,
    momentum,
    dampening,
    lr,
    nesterov,
    first_run,
    wd_after_momentum,
    scale,
):
    """One SGD step on [gradients, parameters, momentum buffers[, half-precision copies of the parameters]].

    Gradients are multiplied by scale first; first_run sets the buffers to them. Nothing is done if noop_flag
    is not 0.
    """
    _call(
        "multi_tensor_sgd",
        tensor_lists,
        weight_decay=wd,
        momentum=momentum,
        dampening=dampening,
        lr=lr,
        nesterov=bool(nesterov),
        first_run=bool(first_run),
        wd_after_momentum=bool(wd_after_momentum),
        scale=scale,
        noop_flag=noop_flag,
    )


def multi_tensor_adam(
    chunk_size,
    noop_flag,
    tensor_lists,
    lr,
    beta1,
    beta2,
    epsilon,
    step,
    mode,
    bias_correction,
    weight_decay,
):
    """One Adam (mode 0) or AdamW (mode 1) step on [gradients, parameters, exp_avgs, exp_avg_sqs].

    noop_flag is not read.
    """
    _call(
        "multi_tensor_adam",
        tensor_lists,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=step,
        decay_mode=mode,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
    )


def multi_tensor_adam_capturable(
    chunk_size,
    noop_flag,
    tensor_lists,
    lr,
    beta1,
    beta2,
    epsilon,
    step,
    mode,
    bias_correction,
    weight_decay,
    inv_scale,
):
    """As multi_tensor_adam, with lr, inv_scale (float32) and step (int32) as tensors of one element.

    Gradients are multiplied by inv_scale, and left so. Nothing is done if noop_flag is 1.
    """
    _call(
        "multi_tensor_adam",
        tensor_lists,
        lr=0.0,
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=0,
        decay_mode=mode,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
        lr_tensor=lr,
        step_tensor=step,
        inv_scale=inv_scale,
        noop_flag=noop_flag,
        unscale_grads=True,
    )


def multi_tensor_adam_capturable_master(
    chunk_size,
    noop_flag,
    tensor_lists,
    lr,
    beta1,
    beta2,
    epsilon,
    step,
    mode,
    bias_correction,
    weight_decay,
    inv_scale,
):
    """As multi_tensor_adam_capturable on [gradients, parameters, exp_avgs, exp_avg_sqs, master parameters].

    The masters (float32) are what is updated; the parameters become their roundings.
    """
    gradients, parameters, exp_avgs, exp_avg_sqs, masters = tensor_lists
    multi_tensor_adam_capturable(
        chunk_size,
        noop_flag,
        [gradients, masters, exp_avgs, exp_avg_sqs, parameters],
        lr,
        beta1,
        beta2,
        epsilon,
        step,
        mode,
        bias_correction,
        weight_decay,
        inv_scale,
    )


def multi_tensor_adagrad(chunk_size, noop_flag, tensor_lists, lr, epsilon, mode, weight_decay):
    """One Adagrad step on [gradients, parameters, sums]; mode 0: L2 penalty, 1: decoupled decay.

    noop_flag is not read.
    """
    _call(
        "multi_tensor_adagrad", tensor_lists, lr=lr, eps=epsilon, decay_mode=mode, weight_decay=weight_decay
    )


def multi_tensor_novograd(
    chunk_size,
    noop_flag,
    tensor_lists,
    grad_norms,
    lr,
    beta1,
    beta2,
    epsilon,
    step,
    bias_correction,
    weight_decay,
    grad_averaging,
    moment_mode,
    norm_type,
):
    """One NovoGrad step on [gradients, parameters, exp_avgs]; noop_flag is not read.

    grad_norms: float32, one element a tensor, the averaged norms, to which this step's are added.
    """
    _call(
        "multi_tensor_novograd",
        tensor_lists,
        grad_norms=grad_norms,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=step,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
        grad_averaging=bool(grad_averaging),
        moment_mode=moment_mode,
        norm_type=norm_type,
    )


def multi_tensor_lamb(
    chunk_size,
    noop_flag,
    tensor_lists,
    lr,
    beta1,
    beta2,
    epsilon,
    step,
    bias_correction,
    weight_decay,
    grad_averaging,
    mode,
    global_grad_norm,
    max_grad_norm,
    use_nvlamb_python=None,
):
    """One LAMB step on [gradients, parameters, exp_avgs, exp_avg_sqs]; gradients become the updates.

    noop_flag is not read. global_grad_norm: float32 of one element.
    """
    _call(
        "multi_tensor_lamb",
        tensor_lists,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=step,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
        grad_averaging=bool(grad_averaging),
        decay_mode=mode,
        global_grad_norm=global_grad_norm,
        max_grad_norm=max_grad_norm,
        use_nvlamb=bool(use_nvlamb_python),
    )


def multi_tensor_lamb_mp(
    chunk_size,
    noop_flag,
    tensor_lists,
    lr,
    beta1,
    beta2,
    epsilon,
    step,
    bias_correction,
    weight_decay,
    grad_averaging,
    mode,
    global_grad_norm,
    max_grad_norm,
    use_nvlamb_python,
    found_inf,
    inv_scale,
):
    """As multi_tensor_lamb on [..., exp_avg_sqs[, half-precision copies of the parameters]].

    lr, global_grad_norm, max_grad_norm, found_inf, inv_scale (float32) and step (int32) are tensors of one
    element. Nothing is done if noop_flag or found_inf is not 0.
    """
    _call(
        "multi_tensor_lamb",
        tensor_lists,
        lr=0.0,
        beta1=beta1,
        beta2=beta2,
        eps=epsilon,
        step=0,
        bias_correction=bool(bias_correction),
        weight_decay=weight_decay,
        grad_averaging=bool(grad_averaging),
        decay_mode=mode,
        global_grad_norm=global_grad_norm,
        max_grad_norm=0.0,
        use_nvlamb=bool(use_nvlamb_python),
        lr_tensor=lr,
        step_tensor=step,
        max_grad_norm_tensor=max_grad_norm,
        inv_scale=inv_scale,
        found_inf=found_inf,
        noop_flag=noop_flag,
    )


def multi_tensor_lamb_stage1_cuda(
    chunk_size,
    noop_flag,
    tensor_lists,
    per_tensor_decay,
    step,
    beta1,
    beta2,
    epsilon,
    global_grad_norm,
    max_global_grad_norm,
):
    """LAMB's updates and moments, on [gradients, parameters, exp_avgs, exp_avg_sqs, updates].

    per_tensor_decay: float32, one element a tensor. global_grad_norm: float32 of one element. noop_flag is
    not read.
    """
    scalars = (per_tensor_decay, step, beta1, beta2, epsilon, global_grad_norm, max_global_grad_norm)
    _call("multi_tensor_lamb_stage1", tensor_lists, *scalars)


def multi_tensor_lamb_stage2_cuda(
    chunk_size,
    noop_flag,
    tensor_lists,
    per_tensor_param_norm,
    per_tensor_update_norm,
    lr,
    weight_decay,
    use_nvlamb_python=None,
):
    """LAMB's second half, on [parameters, updates].

    per_tensor_param_norm, per_tensor_update_norm: float32, one element a tensor. noop_flag is not read.
    """
    scalars = (per_tensor_param_norm, per_tensor_update_norm, lr, weight_decay, bool(use_nvlamb_python))
    _call("multi_tensor_lamb_stage2", tensor_lists, *scalars)


def multi_tensor_lars(
    chunk_size,
    noop_flag,
    tensor_lists,
    grad_norms,
    param_norms,
    lr,
    trust_coefficient,
    epsilon,
    weight_decay,
    momentum,
    dampening,
    nesterov,
    first_run,
    wd_after_momentum,
    scale,
    is_skipped,
):
    """One LARS step on [gradients, parameters, momentum buffers[, half-precision copies of the parameters]].

    grad_norms, param_norms: float32, one element a tensor. is_skipped: the learning rate is not adapted. As
    in public apex, dampening, first_run, wd_after_momentum and scale have no effect. Nothing is done if
    noop_flag is not 0.
    """
    _call(
        "multi_tensor_lars",
        tensor_lists,
        lr=lr,
        trust_coefficient=trust_coefficient,
        eps=epsilon,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=bool(nesterov),
        is_skipped=bool(is_skipped),
        grad_norms=grad_norms,
        param_norms=param_norms,
        noop_flag=noop_flag,
    )


# ---- loss scale --------------------------------------------------------------------------------------------


def update_scale_hysteresis(
    current_scale,
    growth_tracker,
    hysteresis_tracker,
    found_inf,
    growth_factor,
    backoff_factor,
    growth_interval,
    hysteresis,
):
    """Updates the loss scale and its trackers in place, see apex/reference; returns current_scale."""
    (_lists.module() or torch.ops.apex).update_scale_hysteresis(
        current_scale,
        growth_tracker,
        hysteresis_tracker,
        found_inf,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
    )
    return current_scale
