"""What layer_norm and rms_norm share: their formulas, and how autograd and autocast treat the pair.

Where no binding fits this torch, the loader registers `Pair`'s functions for the ops; the bindings
(csrc/bindings/norm.h) do the same in C++.
"""

import math

import torch

from apex.reference._leaves import given_if_compiled, leaf


def math_dtype(dtype):
    """float64 for itself, float32 for the rest: what sums are made in, and the dtype of mean and rstd."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check(op, input, normalized_shape, weight, bias=None):
    """Raises ValueError or TypeError, as the bindings do."""
    shape = tuple(normalized_shape)
    if not shape or tuple(input.shape[-len(shape) :]) != shape:
        raise ValueError(
            f"{op}: normalized_shape {list(shape)} is not how the input's shape {list(input.shape)} ends"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)} but normalized_shape is {list(shape)}"
            )
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        raise TypeError(f"{op}: weight and bias must have one dtype")
    dtypes = [t.dtype for t in (input, weight, bias) if t is not None]
    if any((d == torch.float64) != (input.dtype == torch.float64) for d in dtypes):
        raise TypeError(
            f"{op}: float64 goes with float64 alone: input, weight and output alike, not {dtypes}"
        )
    if not input.dtype.is_floating_point:
        raise TypeError(f"{op} takes float32, float16, bfloat16 and float64, not {input.dtype}")


def check_residual(op, input, residual):
    """Raises ValueError or TypeError, as the bindings do."""
    if residual.shape != input.shape or residual.device != input.device:
        raise ValueError(
            f"{op}: the residual must have the input's shape {list(input.shape)} and be on its device, {input.device}"
        )
    if residual.dtype != input.dtype:
        raise TypeError(f"{op}: the residual must have the input's dtype {input.dtype}")


def check_backward(op, grad_output, grad_sum, saved, mean, rstd, normalized_shape, weight, bias):
    """Raises ValueError or TypeError where a backward op is not given what its forward left.

    Not where sizes are symbols: to compare them would bind a compiled graph to them.
    """
    given = [t for t in (grad_output, grad_sum, saved, mean, rstd) if t is not None]
    if any(isinstance(size, torch.SymInt) for tensor in given for size in tensor.shape):
        return
    check(op, saved, normalized_shape, weight, bias)
    for name, tensor in (("gradient", grad_output), ("gradient of the sum", grad_sum)):
        if tensor is not None and tensor.shape != saved.shape:
            raise ValueError(f"{op}: the {name} has shape {list(tensor.shape)}, not {list(saved.shape)}")
    rows = math.prod(saved.shape[: saved.dim() - len(normalized_shape)])
    for name, tensor in (("mean", mean), ("rstd", rstd)):
        if tensor is not None and tensor.numel() != rows:
            raise ValueError(f"{op}: {name} must hold one number for each row")


def dims(tensor, normalized_shape):
    """(dimensions of the rows, dimensions that are normalised over)"""
    rows = tensor.dim() - len(normalized_shape)
    return list(range(rows)), list(range(rows, tensor.dim()))


def forward(input, normalized_shape, weight, bias, eps, dtype, centered):
    """(output, mean or None, rstd); statistics have one element a row."""
    math = math_dtype(input.dtype)
    over = dims(input, normalized_shape)[1]
    x = input.to(math)
    mean = x.mean(over, keepdim=True) if centered else None
    x = x - mean if centered else x
    rstd = torch.rsqrt(x.square().mean(over, keepdim=True) + eps)
    x = x * rstd
    if weight is not None:
        x = x * weight.to(math)
    if bias is not None:
        x = x + bias.to(math)
    output = x.to(input.dtype if dtype is None else dtype).contiguous()
    return output, mean.reshape(-1) if centered else None, rstd.reshape(-1)


def _normalized(saved, mean, rstd, weight, bias, eps, from_output):
    if not from_output:
        return (saved if mean is None else saved - mean) * rstd
    if bias is not None:
        saved = saved - bias
    if weight is None:
        return saved
    magnitude = weight.abs().clamp_min(eps)  # of weights nearer to 0, which forget the input
    return saved / torch.where(weight < 0, -magnitude, magnitude)


def backward(
    grad_output,
    grad_sum,
    saved,
    mean,
    rstd,
    normalized_shape,
    weight,
    bias,
    eps,
    from_output,
    dtype,
    weight_gradients,
    centered,
):
    """(gradient of the input, of the weight, of the bias); the last two empty where not wanted or not there."""
    op = "layer_norm" if centered else "rms_norm"
    read = None if from_output else mean
    check_backward(op, grad_output, grad_sum, saved, read, rstd, normalized_shape, weight, bias)
    dtype = saved.dtype if dtype is None else dtype
    if grad_sum is not None and grad_sum.dtype != dtype:
        raise TypeError(f"{op}: the gradient of the sum has dtype {grad_sum.dtype}, not {dtype}")
    math = math_dtype(dtype)
    rows, over = dims(saved, normalized_shape)
    shape = list(saved.shape[: len(rows)]) + [1] * len(over)
    w = None if weight is None else weight.to(math)
    b = None if bias is None else bias.to(math)
    r = rstd.reshape(shape)
    m = mean.reshape(shape) if centered and not from_output else None
    x = _normalized(saved.to(math), m, r, w, b, eps, from_output)
    dy = grad_output.to(math)
    return _gradients(dy, grad_sum, x, r, w, weight, bias, rows, over, dtype, weight_gradients, centered)


def _gradients(dy, grad_sum, x, r, w, weight, bias, rows, over, dtype, wanted, centered):
    g = dy if w is None else dy * w
    grad = g - x * (g * x).mean(over, keepdim=True)
    if centered:
        grad = grad - g.mean(over, keepdim=True)
    grad = grad * r
    if grad_sum is not None:
        grad = grad + grad_sum.to(grad.dtype)

    def over_rows(value, like):
        if like is None or not wanted:
            return value.new_empty(0, dtype=dtype)
        return (value.sum(rows) if rows else value.clone()).to(like.dtype).contiguous()

    return grad.to(dtype).contiguous(), over_rows(dy * x, weight), over_rows(dy, bias)


class Pair:
    """autograd and autocast of one pair of ops, forward and backward, as torch.library wants them.

    centered: layer norm. residual: the pair that adds one first.
    """

    def __init__(self, name, centered, residual):
        self.name = name
        self.centered = centered
        self.residual = residual

    def _forward(self, arguments):
        """(input, residual, normalized_shape, weight, bias, eps, memory_efficient, dtype)"""
        arguments = list(arguments)
        if not self.residual:
            arguments.insert(1, None)
        if not self.centered:
            arguments.insert(4, None)
        return arguments

    def setup_context(self, ctx, inputs, output):
        """Keeps what the backward needs."""
        input, _, shape, weight, bias, eps, from_output, _ = self._forward(inputs)
        rest = list(output[1:])
        total = rest.pop(0) if self.residual else None
        mean = rest.pop(0) if self.centered else None
        ctx.mark_non_differentiable(*([mean] if self.centered else []), rest[0])
        saved = output[0] if from_output else total if self.residual else input
        ctx.save_for_backward(saved, None if from_output else mean, rest[0], weight, bias)
        ctx.known = (list(shape), eps, from_output, input.dtype)
        ctx.set_materialize_grads(False)

    def backward(self, ctx, grad_output, *others):
        """Gradients of the forward's inputs, through the backward op."""
        saved, mean, rstd, weight, bias = ctx.saved_tensors
        shape, eps, from_output, dtype = ctx.known
        grad_sum = others[0] if self.residual else None
        of_input = of_weight = of_bias = None
        if grad_output is not None:
            first = 2 if self.residual else 1
            # torch leaves arguments out that have their default and come last.
            needed = (*ctx.needs_input_grad, *[False] * 8)
            wanted = needed[first + 1] or (self.centered and needed[first + 2])
            op = getattr(torch.ops.apex, f"{self.name}_backward")
            arguments = [grad_output, *([grad_sum] if self.residual else []), saved]
            arguments += [*([mean] if self.centered else []), rstd, shape, weight]
            arguments += [*([bias] if self.centered else []), eps, from_output, dtype, wanted]
            found = op(*arguments)
            of_input = found[0]
            of_weight = found[1] if weight is not None and wanted else None
            of_bias = found[2] if bias is not None and wanted else None
        elif grad_sum is not None:
            of_input = grad_sum
            of_weight, of_bias = given_if_compiled(None, weight), given_if_compiled(None, bias)
        gradients = [of_input, *([of_input] if self.residual else []), None, of_weight]
        return (*gradients, *([of_bias] if self.centered else []), None, None, None)

    # ---- the derivative of the backward itself

    def _backward(self, arguments):
        arguments = list(arguments)
        if not self.residual:
            arguments.insert(1, None)
        if not self.centered:
            arguments.insert(3, None)
            arguments.insert(7, None)
        return arguments

    def setup_double_context(self, ctx, inputs, output):
        """Keeps all inputs of the backward."""
        ctx.tensors = [isinstance(x, torch.Tensor) for x in inputs]
        ctx.save_for_backward(*(x for x in inputs if isinstance(x, torch.Tensor)))
        ctx.others = [None if isinstance(x, torch.Tensor) else x for x in inputs]

    def double_backward(self, ctx, *gradients):
        """By torch's own differentiable ops. Raises NotImplementedError with memory_efficient=True."""
        kept = iter(ctx.saved_tensors)
        inputs = [
            next(kept) if is_tensor else other
            for is_tensor, other in zip(ctx.tensors, ctx.others, strict=True)
        ]
        named = self._backward(inputs)
        if named[9]:
            raise NotImplementedError(
                f"apex {self.name}: the gradient of its gradient (double backward) needs the input, which "
                "memory_efficient=True does not keep"
            )
        with torch.enable_grad():
            leaves = {i: leaf(named[i]) for i in (0, 1, 2, 6, 7) if named[i] is not None}
            outputs = self._differentiable(
                [leaves.get(i, value) for i, value in enumerate(named)], gradients[0].dtype
            )
            pairs = [
                (o, g)
                for o, g in zip(outputs, gradients, strict=False)
                if g is not None and o.requires_grad and o.numel() == g.numel()
            ]
            found = torch.autograd.grad(
                [o for o, _ in pairs], list(leaves.values()), [g for _, g in pairs], allow_unused=True
            )
        found = [given_if_compiled(g, t) for g, t in zip(found, leaves.values(), strict=True)]
        by_index = dict(zip(leaves, found, strict=True))
        all_of_them = [by_index.get(i) for i in range(12)]
        unused = [] if self.residual else [1]
        unused += [] if self.centered else [3, 7]
        return tuple(g for i, g in enumerate(all_of_them) if i not in unused)

    def _differentiable(self, named, dtype):
        dy, grad_sum, x, _, _, shape, weight, bias, eps, _, _, wanted = named
        math = math_dtype(x.dtype)
        rows, over = dims(x, shape)
        centred = x.to(math)
        if self.centered:
            centred = centred - centred.mean(over, keepdim=True)
        rstd = torch.rsqrt(centred.square().mean(over, keepdim=True) + eps)
        w = None if weight is None else weight.to(math)
        return _gradients(
            dy.to(math),
            grad_sum,
            centred * rstd,
            rstd,
            w,
            weight,
            bias,
            rows,
            over,
            dtype,
            wanted,
            self.centered,
        )

    def autocast(self, device_type, arguments, keywords):
        """Arguments of the forward as autocast changes them: the output has autocast's dtype."""
        names = ["input", *(["residual"] if self.residual else []), "normalized_shape", "weight"]
        names += [*(["bias"] if self.centered else []), "eps", "memory_efficient", "dtype"]
        given = dict(zip(names, arguments, strict=False)) | keywords
        if given["input"].dtype != torch.float64:
            given["dtype"] = torch.get_autocast_dtype(device_type)
        return given
