"""Calls of every op of the library, for tests that hold of all: SAMPLES, op -> functions that make its arguments.

Each takes Values of a device and returns a dict of keyword arguments. On a GPU the sizes are those at which several
blocks work on one result.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from lists import FP8, comparable

from apex import _loader
from apex._loader import registry

F32, F16, I32, I64 = torch.float32, torch.float16, torch.int32, torch.int64
SAMPLES = defaultdict(list)
SHAPES = ((70001,), (33, 5), (0,), (7,))


class Values:
    """Tensors on one device, the same each time."""

    def __init__(self, device):
        self.device = torch.device(device)
        self.generator = torch.Generator("cpu").manual_seed(11)

    def normal(self, *shape, dtype=F32):
        """Normal values; of halves the rounded floats, which every version of torch makes alike."""
        wide = F32 if dtype.itemsize < 4 else dtype
        return torch.randn(shape, generator=self.generator, dtype=wide, device="cpu").to(self.device, dtype)

    def positive(self, *shape):
        """In [0.5, 1.5), float32."""
        return (torch.rand(shape, generator=self.generator, dtype=F32, device="cpu") + 0.5).to(self.device)

    def below(self, end, *shape, dtype=I64):
        """Integers in [0, end)."""
        return torch.randint(0, end, shape, generator=self.generator, dtype=dtype, device="cpu").to(
            self.device
        )

    def of(self, *values, dtype=F32):
        """These values."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def list(self, make=None):
        """A tensor a shape: normal values, or what `make` (self.positive) gives."""
        return [(make or self.normal)(*shape) for shape in SHAPES]

    def lists(self, *names):
        """name -> such a list."""
        return {name: self.list() for name in names}

    def either(self, cpu, gpu):
        """A size."""
        return cpu if self.device.type == "cpu" else gpu


def sample(op):
    """Adds a function to SAMPLES[op]."""
    return lambda make: SAMPLES[op].append(make) or make


def samples():
    """[(op, index of its sample)] of the whole library; an op without one has the index None."""
    found = []
    for op, schema in registry.schemas().items():
        if not SAMPLES[op] and (made := _of_lists_and_numbers(schema.text)):
            SAMPLES[op].append(made)
        found += [(op, index) for index in range(len(SAMPLES[op]))] or [(op, None)]
    return found


def _of_lists_and_numbers(schema):
    """The sample of an op that takes nothing but lists of tensors and floats; None for others."""
    arguments = torch._C.parse_schema(schema).arguments
    if not {str(a.type) for a in arguments} <= {"List[Tensor]", "float"}:
        return None
    return lambda v: {a.name: 0.5 if str(a.type) == "float" else v.list() for a in arguments}


# ---- lists of tensors --------------------------------------------------------------------------------------


@sample("multi_tensor_scale")
def _(v):
    return dict(**v.lists("inputs", "outputs"), noop_flag=v.of(0, dtype=I32), scale=0.5)


@sample("multi_tensor_axpby")
def _(v):
    return dict(**v.lists("x", "y", "outputs"), noop_flag=v.of(0, dtype=I32), a=0.5, b=2.0)


@sample("multi_tensor_l2norm")
def _(v):
    return dict(
        tensors=v.list(),
        total=v.of(0.0),
        per_tensor=torch.zeros_like(v.normal(4)),
        max_norm=1.0,
        clip_coefficient=v.of(0.0),
    )


def _mixed(v):
    """Two dtypes in turn: each launch has every second tensor's numbers."""
    return [v.normal(*shape, dtype=dtype) for shape, dtype in zip(SHAPES, (F32, F16, F32, F16), strict=True)]


@sample("multi_tensor_l2norm")
def _(v):
    return dict(tensors=_mixed(v), total=v.of(0.0), per_tensor=v.normal(4))


ADAM = dict(lr=0.01, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1)


def _adam(v):
    return dict(
        **v.lists("grads", "params", "exp_avgs"), exp_avg_sqs=v.list(v.positive), **ADAM, bias_correction=True
    )


@sample("multi_tensor_adam")
def _(v):
    return dict(**_adam(v), model_params=[], step=3, decay_mode=1)


@sample("multi_tensor_adam")
def _(v):
    """The kernel counts its blocks, to advance the step."""
    return dict(
        **_adam(v), model_params=[], step=0, decay_mode=0, step_tensor=v.of(2, dtype=I32), advance_step=True,
        inv_scale=v.of(0.5), found_inf=v.of(0.0), unscale_grads=True,
    )  # fmt: skip


@sample("multi_tensor_amsgrad")
def _(v):
    return dict(
        **_adam(v), max_exp_avg_sqs=v.list(v.positive), step=0, decay_mode=0, step_tensor=v.of(2, dtype=I32),
        advance_step=True,
    )  # fmt: skip


@sample("multi_tensor_lamb")
def _(v):
    return dict(
        **_adam(v), model_params=[], step=3, decay_mode=1, grad_averaging=True, global_grad_norm=v.of(2.0),
        max_grad_norm=1.0,
    )  # fmt: skip


@sample("multi_tensor_lamb_stage1")
def _(v):
    return dict(
        grads=_mixed(v), **v.lists("params", "exp_avgs", "updates"), exp_avg_sqs=v.list(v.positive),
        per_tensor_decay=v.positive(4), step=3, beta1=0.9, beta2=0.99, eps=1e-6, global_grad_norm=v.of(2.0),
        max_global_grad_norm=1.0, per_tensor_param_norm=v.positive(4), per_tensor_update_norm=v.positive(4),
    )  # fmt: skip


@sample("multi_tensor_lamb_stage2")
def _(v):
    return dict(
        params=_mixed(v), updates=v.list(), model_params=[], per_tensor_param_norm=v.positive(4),
        per_tensor_update_norm=v.positive(4), lr=0.01, weight_decay=0.1,
    )  # fmt: skip


@sample("multi_tensor_reversible_adam")
def _(v):
    return dict(
        **v.lists("grads", "params", "exp_avgs"), exp_avg_sqs=v.list(v.positive), model_params=[], step_size=0.01,
        beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.1, scale=2.0, skip_non_finite=True,
        overflow_flag=v.of(0, dtype=I32),
    )  # fmt: skip


@sample("multi_tensor_sgd")
def _(v):
    return dict(
        **v.lists("grads", "params", "momentums"), model_params=[], weight_decay=0.1, momentum=0.9, dampening=0.1,
        lr=0.01, nesterov=False, first_run=False, wd_after_momentum=False, scale=0.5,
    )  # fmt: skip


@sample("multi_tensor_adagrad")
def _(v):
    return dict(
        **v.lists("grads", "params"),
        sums=v.list(v.positive),
        lr=0.01,
        eps=1e-6,
        decay_mode=0,
        weight_decay=0.1,
    )


@sample("multi_tensor_novograd")
def _(v):
    return dict(
        grads=_mixed(v), **v.lists("params", "exp_avgs"), grad_norms=v.positive(4), **ADAM, step=3,
        bias_correction=True, grad_averaging=True, moment_mode=0, norm_type=2,
    )  # fmt: skip


@sample("multi_tensor_lars")
def _(v):
    return dict(
        **v.lists("grads", "params", "momentums"), model_params=[], lr=0.01, trust_coefficient=0.02, eps=1e-6,
        weight_decay=0.1, momentum=0.9, nesterov=False, is_skipped=False,
    )  # fmt: skip


@sample("multi_tensor_adadelta")
def _(v):
    return dict(
        **v.lists("grads", "params"), square_avgs=v.list(v.positive), acc_deltas=v.list(v.positive), lr=0.01, rho=0.9,
        eps=1e-6, weight_decay=0.1,
    )  # fmt: skip


@sample("multi_tensor_rmsprop")
def _(v):
    return dict(
        **v.lists("grads", "params", "momentums"), square_avgs=v.list(v.positive), grad_avgs=[], lr=0.01, alpha=0.9,
        eps=1e-6, weight_decay=0.1, momentum=0.9,
    )  # fmt: skip


@sample("update_scale_hysteresis")
def _(v):
    return dict(
        current_scale=v.of(1024.0), growth_tracker=v.of(1, dtype=I32), hysteresis_tracker=v.of(1, dtype=I32),
        found_inf=v.of(1.0), growth_factor=2.0, backoff_factor=0.5, growth_interval=2, hysteresis=2,
    )  # fmt: skip


# ---- norms -------------------------------------------------------------------------------------------------

ROWS, HIDDEN = 96, 1024


def _forward_of_norm(op, residual):
    @sample(op)
    def make(v):
        found = dict(input=v.normal(ROWS, HIDDEN), normalized_shape=[HIDDEN], weight=v.positive(HIDDEN))
        found |= dict(residual=v.normal(ROWS, HIDDEN)) if residual else {}
        return found | (dict(bias=v.normal(HIDDEN)) if "layer" in op else {})

    @sample(op.replace("forward", "backward"))
    def make_backward(v):
        given = make(v)
        _, *kept = getattr(torch.ops.apex, op)(**given)
        found = dict(
            grad_output=v.normal(ROWS, HIDDEN), normalized_shape=[HIDDEN], weight=given["weight"], eps=1e-5
        )
        found |= (
            dict(saved=kept.pop(0), grad_sum=v.normal(ROWS, HIDDEN))
            if residual
            else dict(saved=given["input"])
        )
        if "layer" in op:
            found |= dict(mean=kept.pop(0), bias=given["bias"])
        return found | dict(rstd=kept.pop(0))


for _norm in ("layer_norm", "rms_norm"):
    _forward_of_norm(f"{_norm}_forward", residual=False)
    _forward_of_norm(f"add_{_norm}_forward", residual=True)


@sample("group_norm_forward")
def _group_norm(v):
    return dict(
        input=v.normal(4, 32, 24, 24), num_groups=8, weight=v.positive(32), bias=v.normal(32), silu=True
    )


@sample("group_norm_backward")
def _(v):
    given = _group_norm(v)
    _, mean, rstd = torch.ops.apex.group_norm_forward(**given)
    return given | dict(grad_output=v.normal(4, 32, 24, 24), mean=mean, rstd=rstd, eps=1e-5)


# ---- batch norm --------------------------------------------------------------------------------------------


def _images(v, last=False):
    found = v.normal(v.either(8, 64), 64, v.either(12, 56), v.either(12, 56))
    return found.contiguous(memory_format=torch.channels_last) if last else found


def _statistics(v):
    return dict(mean=v.normal(64), inv_std=v.positive(64))


for _last in (False, True):

    @sample("welford_mean_var")
    def _(v, last=_last):
        return dict(input=_images(v, last))

    @sample("batchnorm_forward")
    def _(v, last=_last):
        affine = dict(weight=v.positive(64), shift=v.normal(64))
        return dict(input=_images(v, last), z=_images(v, last), **_statistics(v), **affine, fuse_relu=True)

    @sample("batchnorm_backward")
    def _(v, last=_last):
        sums = dict(sum_dy=v.normal(64), sum_dy_xmu=v.normal(64), count=v.of(1000, dtype=I32))
        given = dict(
            grad_output=_images(v, last), input=_images(v, last), **_statistics(v), weight=v.positive(64)
        )
        return given | sums

    @sample("reduce_bn")
    def _(v, last=_last):
        return dict(
            grad_output=_images(v, last), input=_images(v, last), **_statistics(v), weight=v.positive(64)
        )

    @sample("relu_bw")
    def _(v, last=_last):
        affine = dict(weight=v.positive(64), shift=v.normal(64))
        return dict(
            grad_output=_images(v, last),
            input=_images(v, last),
            z=_images(v, last),
            **_statistics(v),
            **affine,
        )


@sample("welford_parallel")
def _(v):
    return dict(
        mean=v.normal(3, 64), var_biased=v.positive(3, 64), numel=v.of(10, 20, 30, dtype=I32), eps=1e-5,
        running_mean=v.normal(64), running_var=v.positive(64), momentum=0.1,
    )  # fmt: skip


@sample("groupbn_forward")
def _groupbn(v):
    affine = dict(weight=v.positive(64), shift=v.normal(64))
    images = dict(input=_images(v, True), z=_images(v, True))
    return images | dict(**_statistics(v), **affine, fuse_relu=True, make_bitmask=True)


@sample("groupbn_backward")
def _(v):
    given = _groupbn(v)
    _, bitmask = torch.ops.apex.groupbn_forward(**given)
    kept = {name: given[name] for name in ("input", "mean", "inv_std", "weight")}
    sums = dict(sum_dy=v.normal(64), sum_dy_xmu=v.normal(64), count=v.of(1000, dtype=I32))
    return kept | sums | dict(grad_output=_images(v, True), bitmask=bitmask, of_z=True)


# ---- attention, activations, losses ------------------------------------------------------------------------


@sample("rope_forward")
@sample("rope_backward")
def _(v):
    angles = v.normal(128, 1, 1, 32)
    return dict(input=v.normal(128, 4, 4, 64), cos=angles.cos(), sin=angles.sin())


@sample("scaled_masked_softmax_forward")
def _(v):
    return dict(input=v.normal(2, 4, 64, 128), mask=v.below(2, 2, 1, 64, 128).to(torch.uint8), scale=0.5)


@sample("scaled_masked_softmax_forward")
def _(v):
    return dict(input=v.normal(8, 96, 96), scale=0.5, causal=True)


@sample("scaled_masked_softmax_backward")
def _(v):
    return dict(grad_output=v.normal(2, 4, 64, 128), output=v.normal(2, 4, 64, 128).softmax(-1), scale=0.5)


@sample("masked_softmax_dropout_forward")
def _(v):
    mask = v.below(2, 2, 1, 1, 128).to(torch.uint8)
    return dict(
        input=v.normal(2, 4, 64, 128), mask=mask, dropout=0.25, seed=v.of(7, dtype=I64), keep_mask=True
    )


@sample("masked_softmax_dropout_forward")
def _(v):
    return dict(input=v.normal(2, 3, 64, 100), mask=v.normal(64, 100))


@sample("masked_softmax_dropout_backward")
def _(v):
    given = dict(grad_output=v.normal(2, 4, 64, 128), softmax=v.normal(2, 4, 64, 128).softmax(-1))
    return given | dict(dropout=0.25, seed=v.of(7, dtype=I64))


@sample("bias_activation_forward")
def _(v):
    return dict(input=v.normal(256, 512), bias=v.normal(512), activation="silu", gated=True)


@sample("bias_activation_backward")
def _(v):
    given = dict(grad_output=v.normal(256, 256), input=v.normal(256, 512), bias=v.normal(512))
    return given | dict(activation="silu", gated=True)


@sample("dense_forward")
def _dense(v):
    return dict(input=v.normal(64, 256), weight=v.normal(128, 256), bias=v.normal(128), activation="gelu")


@sample("dense_backward")
def _(v):
    return dict(grad_output=v.normal(64, 128), saved=v.normal(64, 128)) | _dense(v)


@sample("dense_gelu_dense_forward")
def _two(v):
    first = dict(input=v.normal(64, 256), weight1=v.normal(128, 256), bias1=v.normal(128))
    return first | dict(weight2=v.normal(32, 128), bias2=v.normal(32))


@sample("dense_gelu_dense_backward")
def _(v):
    kept = dict(hidden=v.normal(64, 128), before=v.normal(64, 128))
    return dict(grad_output=v.normal(64, 32)) | _two(v) | kept


@sample("conv_bias_relu_forward")
def _conv_bias_relu(v):
    given = dict(
        input=v.normal(2, 64, 20, 20), weight=v.normal(64, 64, 3, 3), scale=v.normal(64), bias=v.normal(64)
    )
    return given | dict(residual=v.normal(2, 64, 20, 20), padding=1)


@sample("conv_bias_relu_backward")
def _(v):
    given = _conv_bias_relu(v)
    given["grad_output"] = given.pop("residual")
    given["input"] = given["input"].contiguous(memory_format=torch.channels_last)
    return given | dict(output=v.normal(2, 64, 20, 20), of_residual=True)


@sample("xentropy_forward")
def _xentropy(v):
    return dict(logits=v.normal(64, 1000), labels=v.below(1000, 64), smoothing=0.1, padding_idx=0)


@sample("xentropy_backward")
def _(v):
    given = _xentropy(v)
    _, normalizers = torch.ops.apex.xentropy_forward(**given)
    return given | dict(grad_losses=v.normal(64), normalizers=normalizers)


@sample("wgrad_gemm_accum")
def _(v):
    return dict(input=v.normal(64, 256), grad_output=v.normal(64, 128), main_grad=v.normal(128, 256))


@sample("wgrad_gemm_accum")
def _(v):
    halves = dict(input=v.normal(64, 256, dtype=F16), grad_output=v.normal(64, 128, dtype=F16))
    return halves | dict(main_grad=v.normal(128, 256))


@sample("focal_loss_forward")
def _focal_loss(v):
    return dict(
        logits=v.normal(2, 600, 80), targets=v.below(82, 2, 600) - 2, num_positives=v.of(300.0), num_real_classes=80,
        alpha=0.25, gamma=2.0, smoothing=0.1,
    )  # fmt: skip


@sample("focal_loss_backward")
def _(v):
    return _focal_loss(v) | dict(grad_loss=v.of(2.0).reshape(()))


@sample("kept_magnitudes")
def _(v):
    rows = v.either(70, 2048)
    return dict(columns=v.normal(64, rows), groups=v.below(64, 50, 8, dtype=I32))


@sample("index_mul_2d_forward")
def _index_mul_2d(v):
    return dict(in1=v.normal(40, 64), in2=v.normal(1000, 64), idx1=v.below(40, 1000))


@sample("index_mul_2d_backward")
def _(v):
    return _index_mul_2d(v) | dict(grad_out=v.normal(1000, 64))


def _joint(v):
    batch, frames, labels, hidden = 2, v.either(40, 400), v.either(12, 60), v.either(48, 512)
    lengths = dict(f_len=v.of(*[frames] * batch, dtype=I32), g_len=v.of(*[labels] * batch, dtype=I32))
    return dict(f=v.normal(batch, frames, hidden), g=v.normal(batch, labels, hidden), **lengths)


@sample("transducer_joint_forward")
def _(v):
    return _joint(v) | dict(relu=True)


@sample("transducer_joint_forward")
def _(v):
    return _joint(v) | dict(dropout=0.25, seed=v.of(7, dtype=I64))


@sample("transducer_joint_backward")
def _(v):
    given = _joint(v)
    (batch, frames, hidden), labels = given["f"].shape, given["g"].shape[1]
    sizes = dict(mask=None, batch_offset=None, max_f_len=frames, max_g_len=labels)
    return given | sizes | dict(grad_output=v.normal(batch, frames, labels, hidden))


@sample("transducer_loss_forward")
def _transducer_loss(v):
    batch, frames, labels, classes = 3, 20, 6, 96
    lengths = dict(f_len=v.of(*[frames] * batch, dtype=I32), y_len=v.of(*[labels] * batch, dtype=I32))
    label = v.below(classes - 1, batch, labels, dtype=I32) + 1
    return dict(x=v.normal(batch, frames, labels + 1, classes), label=label, **lengths, blank_idx=0)


@sample("transducer_loss_backward")
def _(v):
    given = _transducer_loss(v)
    loss, alpha, beta, normalizers = torch.ops.apex.transducer_loss_forward(**given)
    kept = dict(alpha=alpha, beta=beta, normalizers=normalizers, batch_offset=None, of_logits=True)
    return given | kept | dict(grad_loss=v.normal(*loss.shape))


# ---- calling them ------------------------------------------------------------------------------------------


class Call:
    """One sample of an op on a device, as a function of its tensors alone.

    tensors: those among the arguments, in one flat list. Tensors that the op writes are copied first, and the copies
    returned beside its results. wanted: which of `tensors` have a gradient.
    """

    def __init__(self, op, index, device):
        _loader.load()
        self.op = getattr(torch.ops.apex, op).default
        self.arguments = SAMPLES[op][index](Values(device))
        self.written = [a.name for a in self.op._schema.arguments if a.alias_info and a.alias_info.is_write]
        self.tensors, self.spec = torch.utils._pytree.tree_flatten(self.arguments)
        self.places = [i for i, x in enumerate(self.tensors) if isinstance(x, torch.Tensor)]
        self.rest = [None if isinstance(x, torch.Tensor) else x for x in self.tensors]
        self.tensors = [self.tensors[i] for i in self.places]
        schema = registry.schemas()[op]
        chosen = [self.arguments.get(name) for name in schema.differentiable] if schema.backward else []
        self.wanted = [i for i, t in enumerate(self.tensors) if any(t is x for x in chosen)]

    def __call__(self, *tensors):
        """The op's results and what it wrote, as a list."""
        leaves = list(self.rest)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        arguments = torch.utils._pytree.tree_unflatten(leaves, self.spec)
        for name in self.written:
            arguments[name] = torch.utils._pytree.tree_map(
                lambda t: t.clone() if t is not None else None, arguments.get(name)
            )
        results = self.op(**arguments)
        return torch.utils._pytree.tree_leaves([results, [arguments[name] for name in self.written]])

    def fresh(self, turn=0):
        """Copies of the tensors, that require gradients where they have one; another turn has other values."""
        copies = [t.detach().clone(memory_format=torch.preserve_format) for t in self.tensors]
        copies = [_changed(t, turn) for t in copies]
        for i in self.wanted:
            copies[i].requires_grad_()
        return copies

    def run(self, function=None, turn=0):
        """Results, then gradients, of this call, or of `function` (it, compiled), as copies that nothing overwrites."""
        tensors = self.fresh(turn)
        results = [x for x in (function or self)(*tensors) if isinstance(x, torch.Tensor)]
        found = [x.detach().clone() for x in results]
        terms = []
        for x in results:
            if x.requires_grad:
                terms.append(
                    (x.flatten() * torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype, device=x.device)).sum()
                )
        if not terms:  # under no_grad, or an op without gradients
            return found
        sum(terms).backward()
        return found + [tensors[i].grad.clone() for i in self.wanted]


def _changed(tensor, turn):
    if tensor.dtype in FP8:  # torch has no arithmetic for it
        codes = tensor.contiguous().view(torch.uint8).flatten().roll(turn)
        return codes.view(tensor.shape).view(tensor.dtype)
    return tensor * (1 + turn / 8) if tensor.is_floating_point() else tensor


def assert_same(found, wanted):
    """Two answers of Call.run: the same op on the same values, but for the order in which atomic additions came."""
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(comparable(ours), comparable(theirs), rtol=1e-5, atol=1e-5, equal_nan=True)


# ---- FP8 ---------------------------------------------------------------------------------------------------


@sample("fp8_quantize")
def _(v):
    return dict(
        input=v.normal(300, 272), scale=v.of(2.0), amax=v.of(0.0), dtype=torch.float8_e4m3fn, rowwise=True,
        columnwise=True, bias_gradient=True,
    )  # fmt: skip


@sample("fp8_quantize")
def _(v):
    given = dict(rowwise=True, columnwise=True, bias_gradient=True, power_of_two=True, epsilon=0.5)
    return dict(input=v.normal(300, 272), scale=None, amax=v.of(0.0), dtype=torch.float8_e5m2) | given


@sample("fp8_quantize")
def _(v):
    return dict(
        input=v.normal(300, 136), scale=v.of(2.0), amax=v.of(0.0), dtype=torch.float8_e5m2, rowwise=True,
        columnwise=True, bias_gradient=True, before=v.normal(300, 272), activation="silu", gated=True,
    )  # fmt: skip


def _codes(v):
    return v.below(120, 300, 272, dtype=I32).to(torch.uint8).view(torch.float8_e4m3fn)


@sample("fp8_dequantize")
def _(v):
    return dict(input=_codes(v), scale_inv=v.of(0.5))


@sample("fp8_transpose")
def _(v):
    return dict(input=_codes(v), scale_inv=v.of(0.5), bias_gradient=True)


@sample("fp8_update_scales")
def _(v):
    numbers = dict(scale=v.positive(300), scale_inv=v.positive(300), fp8_max=v.positive(300))
    return dict(amax_history=v.positive(40, 300)) | numbers


@sample("fp8_multi_update_scales")
def _(v):
    sizes = (3, 2, 20)
    held = dict(amax_histories=[v.positive(40, n) for n in sizes], scales=[v.positive(n) for n in sizes])
    return held | dict(fp8_max=v.positive(25), scale=v.positive(25), scale_inv=v.positive(25))


@sample("fp8_multi_quantize")
def _(v):
    shapes = ((300, 272), (16, 32), (0, 8))
    outputs = [
        [torch.zeros(s, dtype=torch.uint8, device=v.device).view(torch.float8_e4m3fn) for s in sizes]
        for sizes in (shapes, [s[::-1] for s in shapes])
    ]
    given = dict(scales=v.positive(3), amaxes=v.of(0.0, 0.0, 0.0), inputs=[v.normal(*s) for s in shapes])
    return given | dict(rows=outputs[0], columns=outputs[1])


@sample("fp8_quantize_blocks")
def _(v):
    return dict(input=v.normal(300, 272), dtype=torch.float8_e4m3fn, columnwise=True)


@sample("fp8_quantize_blocks")
def _(v):
    return dict(input=v.normal(300, 272), dtype=torch.float8_e4m3fn, square=True, columnwise=True)


@sample("fp8_layer_norm")
def _(v):
    weights = dict(weight=v.normal(1024), bias=v.normal(1024))
    return _fp8_norm(v) | weights


@sample("fp8_rms_norm")
def _fp8_norm(v):
    given = dict(input=v.normal(300, 1024), weight=v.normal(1024), eps=1e-5, scale=v.of(2.0), amax=v.of(0.0))
    return given | dict(dtype=torch.float8_e4m3fn)
