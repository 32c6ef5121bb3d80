"""Dense layers whose backward adds the gradients of weights to `weight.main_grad`, as Megatron-LM's layers do."""

from __future__ import annotations

import torch

from apex._functional import call
from apex._once import runs_in_given_dtypes

_wgrad = torch.ops.apex.wgrad_gemm_accum.default
_dense_backward = torch.ops.apex.dense_backward.default
_activation_backward = torch.ops.apex.bias_activation_backward.default


def accumulate_weight_gradient(
    input: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
) -> None:
    """main_grad += grad_output^T input, in place: the gradient of a weight, added by the product that makes it.

    Args:
        input: [..., inputs], of a layer input weight^T; float16, bfloat16, float32 or float64.
        grad_output: [..., outputs], the gradient of what the layer gave, with as many rows and of the same dtype.
        main_grad: [outputs, inputs], of that dtype or, beside halves, float32; any view that does not overlap itself,
            one into a flat buffer among them.

    Products of halves are summed in float32. No gradients are recorded. Without rows main_grad stays as it is.

    Raises:
        TypeError: dtypes that do not fit.
        ValueError: shapes or devices that do not fit; a main_grad that requires a gradient, overlaps itself or shares
            memory with another argument.
    """
    call("wgrad_gemm_accum", _wgrad, 0, (input, grad_output, main_grad))


def main_grad_of(weight: torch.Tensor) -> torch.Tensor:
    """weight.main_grad. Raises ValueError where there is none."""
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            "the weight has no main_grad to add its gradient to (main_grad=True, gradient_accumulation_fusion=True); "
            "give it one, as weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)"
        )
    return main_grad


def is_wanted(*weights: torch.Tensor) -> bool:
    """Whether any of them gets a gradient. Raises ValueError for one that does, and has no main_grad."""
    if (
        not torch.is_grad_enabled() or torch.jit.is_tracing()
    ):  # what is traced is run without a backward of this
        return False
    wanted = [weight for weight in weights if weight.requires_grad]
    return all(main_grad_of(weight) is not None for weight in wanted) and bool(wanted)


def shown(module: torch.nn.Module) -> str:
    """Of a layer's repr."""
    return ", main_grad=True" if module.main_grad else ""


def add(weight, input, grad_output):
    """Adds to weight.main_grad; what autograd is given in the gradient's place."""
    # What writes in place takes no lazy negatives, which are gradients of imaginary parts.
    accumulate_weight_gradient(input.resolve_neg(), grad_output.resolve_neg(), main_grad_of(weight))
    return _stand_in(weight)


def add_made(weight, gradient):
    """The same, of a gradient that is there: [outputs, inputs], of any dtype."""
    main_grad_of(weight).add_(gradient)
    return _stand_in(weight)


def _stand_in(weight):
    """What autograd is given for a gradient that was added to main_grad."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return make(weight.main_grad.shape, dtype=weight.dtype, device=weight.device)


def _of_input(grad_output, input, weight):
    return _dense_backward(grad_output, input, weight, None, grad_output, "none", True, False, False)[0]


def _of_bias(grad_output):
    return grad_output.sum(tuple(range(grad_output.dim() - 1))) if grad_output.dim() > 1 else grad_output


def _detached(tensor):
    """What amp and autocast may cast, but not keep: the copy, which has no history, would serve the next layer, too."""
    return None if tensor is None else tensor.detach()


def _first(grad_output):
    """The gradient, of a backward whose own gradients nobody wants. Raises RuntimeError for create_graph=True."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "main_grad=True: what is added to main_grad has no history, so that create_graph=True would lose "
            "gradients; use the layer without main_grad"
        )
    return grad_output


class Dense(torch.autograd.Function):
    """apply(layer, input, weight, bias): layer(input, weight, bias); the gradient of weight goes to its main_grad."""

    @staticmethod
    def forward(ctx, layer, input, weight, bias):
        ctx.weight = weight
        ctx.save_for_backward(input, weight)
        return layer(*map(_detached, (input, weight, bias)))

    @staticmethod
    @runs_in_given_dtypes
    def backward(ctx, grad_output):
        g = _first(grad_output)
        x, w = (t.to(g.dtype) for t in ctx.saved_tensors)
        _, of_input, of_weight, of_bias = ctx.needs_input_grad
        return (
            None,
            _of_input(g, x, w) if of_input else None,
            add(ctx.weight, x, g) if of_weight else None,
            _of_bias(g) if of_bias else None,
        )


class DenseGeluDense(torch.autograd.Function):
    """apply(layers, input, weight1, bias1, weight2, bias2); `layers` gives (output, hidden, before) of the five."""

    @staticmethod
    def forward(ctx, layers, input, weight1, bias1, weight2, bias2):
        output, hidden, before = layers(*map(_detached, (input, weight1, bias1, weight2, bias2)))
        ctx.weights = weight1, weight2
        ctx.save_for_backward(input, weight1, weight2, hidden, before)
        return output

    @staticmethod
    @runs_in_given_dtypes
    def backward(ctx, grad_output):
        g = _first(grad_output)
        x, w1, w2, hidden, before = (t.to(g.dtype) for t in ctx.saved_tensors)
        _, of_input, *first, of_weight2, of_bias2 = ctx.needs_input_grad
        second = add(ctx.weights[1], hidden, g) if of_weight2 else None, _of_bias(g) if of_bias2 else None
        if not of_input and not any(first):
            return None, None, None, None, *second
        g, _ = _activation_backward(_of_input(g, hidden, w2), before, None, "gelu", False, False)
        return (
            None,
            _of_input(g, x, w1) if of_input else None,
            add(ctx.weights[0], x, g) if first[0] else None,
            _of_bias(g) if first[1] else None,
            *second,
        )
