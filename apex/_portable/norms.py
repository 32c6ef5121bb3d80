"""layer_norm and rms_norm, alone and after an addition: csrc/bindings/{norm,layer_norm,rms_norm}.h in Python."""

from __future__ import annotations

import math

import torch

from apex._portable import checks, fast, interface, tensors, workspace
from apex._portable.functional import kernel
from apex._portable.tensors import CODES, F32, F64, address, code_of, contiguous

_empty_like = torch.empty_like
_forward = interface.layout("NormForward").packer(
    "input", "residual", "sum", "weight", "bias", "output", "mean", "rstd", "rows", "hidden", "eps", "input_type",
    "output_type", "weight_type",
)  # fmt: skip
_backward = interface.layout("NormBackward").packer(
    "grad_output", "saved", "grad_sum", "mean", "rstd", "weight", "bias", "grad_input", "grad_weight", "grad_bias",
    "rows", "hidden", "eps", "input_type", "output_type", "weight_type", "from_output",
)  # fmt: skip


def _math(dtype):
    return F64 if dtype is F64 else F32


def _list(shape):
    return f"[{', '.join(map(str, shape))}]"


def _check(op, input, shape, weight, bias):
    """Raises ValueError or TypeError, as the compiled bindings do."""
    sizes = tuple(input.shape)
    if not shape:
        raise ValueError(f"{op}: normalized_shape must have at least one dimension")
    if sizes[-len(shape) :] != shape:
        raise ValueError(
            f"{op}: normalized_shape {_list(shape)} is not how the input's shape {_list(sizes)} ends"
        )
    for name, w in (("weight", weight), ("bias", bias)):
        checks.like(op, name, w, shape, None, "normalized_shape ")
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise TypeError(f"{op}: weight and bias must have one dtype")


def _fits(input, shape, weight, bias):
    """Whether all is well, in a few comparisons: `_check` says what is not."""
    if not shape or input.shape[-len(shape) :] != shape:
        return False
    index, cpu = input.get_device(), input.is_cpu
    for w in (weight, bias):
        if w is not None and (w.shape != shape or w.get_device() != index or w.is_cpu is not cpu):
            return False
    return weight is None or bias is None or weight.dtype is bias.dtype


class _Norm:
    """One of the two ops."""

    def __init__(self, name, centered):
        self.name, self.centered = name, centered
        self.c_forward = interface.function(f"apex_{name}_forward")
        self.c_backward = interface.function(f"apex_{name}_backward")

    def forward(self, input, residual, shape, weight, bias, eps, dtype):
        """(output, sum, mean, rstd); None: the reference must."""
        shape = tuple(shape)
        if not _fits(input, shape, weight, bias):
            _check(self.name, input, shape, weight, bias)
        if residual is not None:
            checks.like(self.name, "the residual", residual, input.shape, input.dtype, "the input's ")
        place = tensors.place_of(input)
        if place is None:
            return None
        kind = input.dtype
        x, r, w, b = input.contiguous(), contiguous(residual), contiguous(weight), contiguous(bias)
        output = _empty_like(x) if dtype is None or dtype is kind else _empty_like(x, dtype=dtype)
        total = None if r is None else _empty_like(x)
        hidden = math.prod(shape)
        rows = x.numel() // hidden if hidden else math.prod(x.shape[: x.dim() - len(shape)])
        rstd = x.new_empty(rows) if kind is F32 or kind is F64 else x.new_empty(rows, dtype=F32)
        mean = _empty_like(rstd) if self.centered else None
        like = w if w is not None else b
        code = CODES.get(kind)
        if code is None:
            code = code_of(self.name, kind)
        packed = _forward(
            x.data_ptr(), address(r), address(total), address(w), address(b), output.data_ptr(), address(mean),
            rstd.data_ptr(), rows, hidden, eps, code, code if dtype is None else code_of(self.name, dtype),
            code if like is None else code_of(self.name, like.dtype),
        )  # fmt: skip
        status = self.c_forward(place, packed)
        if status and tensors.must_use_reference(status, self.name):
            return None
        if not hidden:
            rstd.fill_(math.nan)
            if mean is not None:
                mean.fill_(math.nan)
        return output, total, mean, rstd

    def quick_forward(self, input, residual, shape, weight, bias, eps, dtype):
        """`forward` by the module in C, which checks what it is given; None: `forward` must do it."""
        hidden = shape[0] if len(shape) == 1 else math.prod(shape)
        if hidden <= 0:
            return None
        kind = input.dtype
        output = _empty_like(input) if dtype is None or dtype is kind else _empty_like(input, dtype=dtype)
        rows = input.numel() // hidden
        rstd = input.new_empty(rows) if kind is F32 or kind is F64 else input.new_empty(rows, dtype=F32)
        mean = _empty_like(rstd) if self.centered else None
        total = None if residual is None else _empty_like(input)
        status = fast.module.norm_forward(
            self.centered, shape, eps, input, residual, weight, bias, output, total, mean, rstd
        )
        if status is None or (status and tensors.must_use_reference(status, self.name)):
            return None
        return output, total, mean, rstd

    def quick_backward(
        self, grad, grad_sum, saved, mean, rstd, shape, weight, bias, eps, from_output, dtype, wanted
    ):
        """Likewise."""
        of_input = _empty_like(saved, dtype=dtype)
        of_weight = _empty_like(weight) if wanted and weight is not None else None
        of_bias = _empty_like(bias) if wanted and bias is not None else None
        if of_bias is not None and of_weight is None:
            return None
        status = fast.module.norm_backward(
            self.centered, bool(from_output), shape, eps, grad, saved, grad_sum,
            mean if self.centered and not from_output else None, rstd, weight, bias, of_input, of_weight, of_bias,
        )  # fmt: skip
        if status is None or (status and tensors.must_use_reference(status, self.name)):
            return None
        return self._gradients(saved, of_input, of_weight, of_bias)

    def _gradients(self, saved, of_input, of_weight, of_bias):
        """Those of weights that are not there, or not wanted, are empty."""
        if of_weight is None:
            of_weight = saved.new_empty(0)
        return of_input, of_weight, saved.new_empty(0) if self.centered and of_bias is None else of_bias

    def _fits_backward(self, grad, grad_sum, saved, mean, rstd, shape, weight, bias, from_output, dtype):
        """Whether all is well, in a few comparisons: `_check_backward` says what is not."""
        math_dtype, index, cpu = F64 if dtype is F64 else F32, saved.get_device(), saved.is_cpu
        rows = math.prod(saved.shape[: saved.dim() - len(shape)])
        statistics = (rstd, mean) if self.centered and not from_output else (rstd,)
        for one in statistics:
            if one is None or one.dtype is not math_dtype or one.numel() != rows:
                return False
            if one.get_device() != index or one.is_cpu is not cpu:
                return False
        return (
            grad_sum is None
            and grad.shape == saved.shape
            and grad.get_device() == index
            and grad.is_cpu is cpu
            and saved.dtype is (grad.dtype if from_output else dtype)
            and _fits(saved, shape, weight, bias)
        )

    def _check_backward(self, grad, grad_sum, saved, mean, rstd, shape, weight, bias, from_output, dtype):
        op, name_of = self.name, tensors.dtype_name
        if not _fits(saved, shape, weight, bias):
            _check(op, saved, shape, weight, bias)
        checks.like(op, "the gradient", grad, saved.shape)
        checks.like(op, "the saved tensor", saved, saved.shape, grad.dtype if from_output else dtype)
        checks.like(op, "the gradient of the sum", grad_sum, saved.shape, dtype)
        kind, rows = _math(dtype), math.prod(saved.shape[: saved.dim() - len(shape)])
        for name, one in (("rstd", rstd), ("mean", mean)):
            if name == "mean" and (not self.centered or from_output):
                continue
            if one is None or one.numel() != rows or one.dtype is not kind:
                raise ValueError(f"{op}: {name} must hold one {name_of(kind)} for each row")

    def backward(
        self, grad, grad_sum, saved, mean, rstd, shape, weight, bias, eps, from_output, dtype, wanted
    ):
        """(gradient of the input, of the weight, of the bias); None: the reference must."""
        shape, dtype = tuple(shape), saved.dtype if dtype is None else dtype
        checked = grad, grad_sum, saved, mean, rstd, shape, weight, bias, from_output, dtype
        if not self._fits_backward(*checked):
            self._check_backward(*checked)
        place = tensors.place_of(saved)
        if place is None:
            return None
        g, x, r = grad.contiguous(), saved.contiguous(), rstd.contiguous()
        more, w, b = contiguous(grad_sum), contiguous(weight), contiguous(bias)
        m = contiguous(mean) if self.centered and not from_output else None
        of_input = _empty_like(x) if dtype is x.dtype else _empty_like(x, dtype=dtype)
        of_weight = _empty_like(w) if wanted and w is not None else None
        of_bias = _empty_like(b) if wanted and b is not None else None
        if of_bias is not None and of_weight is None:
            raise ValueError(f"{self.name}: a bias needs a weight beside it")
        hidden, rows, name = math.prod(shape), r.numel(), self.name
        code = code_of(name, dtype)
        packed = _backward(
            g.data_ptr(), x.data_ptr(), address(more), address(m), r.data_ptr(), address(w), address(b),
            of_input.data_ptr(), address(of_weight), address(of_bias), rows, hidden, eps, code, code_of(name, g.dtype),
            code if w is None else code_of(name, w.dtype), bool(from_output),
        )  # fmt: skip
        if not workspace.run(self.c_backward, place, packed, name, saved):
            return None
        return self._gradients(saved, of_input, of_weight, of_bias)


_layer, _rms = _Norm("layer_norm", True), _Norm("rms_norm", False)


def _kernel(careful, quick):
    """Enters the kernel that the decorated function makes of a method, and of its quick twin."""
    return lambda make: kernel(quick=make(quick))(make(careful))


@_kernel(_layer.forward, _layer.quick_forward)
def _(run):
    def layer_norm_forward(input, normalized_shape, weight, bias, eps, memory_efficient, dtype):
        found = run(input, None, normalized_shape, weight, bias, eps, dtype)
        return found and (found[0], found[2], found[3])

    return layer_norm_forward


@_kernel(_layer.backward, _layer.quick_backward)
def _(run):
    def layer_norm_backward(
        grad_output,
        saved,
        mean,
        rstd,
        normalized_shape,
        weight,
        bias,
        eps,
        memory_efficient,
        dtype,
        weight_gradients,
    ):
        return run(
            grad_output, None, saved, mean, rstd, normalized_shape, weight, bias, eps, memory_efficient, dtype,
            weight_gradients,
        )  # fmt: skip

    return layer_norm_backward


@_kernel(_layer.forward, _layer.quick_forward)
def _(run):
    def add_layer_norm_forward(input, residual, normalized_shape, weight, bias, eps, memory_efficient, dtype):
        return run(input, residual, normalized_shape, weight, bias, eps, dtype)

    return add_layer_norm_forward


@_kernel(_layer.backward, _layer.quick_backward)
def _(run):
    def add_layer_norm_backward(
        grad_output, grad_sum, saved, mean, rstd, normalized_shape, weight, bias, eps, memory_efficient, dtype,
        weight_gradients,
    ):  # fmt: skip
        return run(
            grad_output, grad_sum, saved, mean, rstd, normalized_shape, weight, bias, eps, memory_efficient, dtype,
            weight_gradients,
        )  # fmt: skip

    return add_layer_norm_backward


@_kernel(_rms.forward, _rms.quick_forward)
def _(run):
    def rms_norm_forward(input, normalized_shape, weight, eps, memory_efficient, dtype):
        found = run(input, None, normalized_shape, weight, None, eps, dtype)
        return found and (found[0], found[3])

    return rms_norm_forward


@_kernel(_rms.backward, _rms.quick_backward)
def _(run):
    def rms_norm_backward(
        grad_output, saved, rstd, normalized_shape, weight, eps, memory_efficient, dtype, weight_gradients
    ):
        found = run(
            grad_output, None, saved, None, rstd, normalized_shape, weight, None, eps, memory_efficient, dtype,
            weight_gradients,
        )  # fmt: skip
        return found and found[:2]

    return rms_norm_backward


@_kernel(_rms.forward, _rms.quick_forward)
def _(run):
    def add_rms_norm_forward(input, residual, normalized_shape, weight, eps, memory_efficient, dtype):
        found = run(input, residual, normalized_shape, weight, None, eps, dtype)
        return found and (found[0], found[1], found[3])

    return add_rms_norm_forward


@_kernel(_rms.backward, _rms.quick_backward)
def _(run):
    def add_rms_norm_backward(
        grad_output,
        grad_sum,
        saved,
        rstd,
        normalized_shape,
        weight,
        eps,
        memory_efficient,
        dtype,
        weight_gradients,
    ):
        found = run(
            grad_output, grad_sum, saved, None, rstd, normalized_shape, weight, None, eps, memory_efficient, dtype,
            weight_gradients,
        )  # fmt: skip
        return found and found[:2]

    return add_rms_norm_backward
