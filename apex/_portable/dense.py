"""dense and dense_gelu_dense: csrc/bindings/dense.h in Python."""

from __future__ import annotations

import torch

from apex._portable import interface, products, workspace
from apex._portable.checks import like, type_, value
from apex._portable.functional import kernel
from apex._portable.tensors import address, code_of, contiguous

_ACTIVATIONS = ("none", "relu", "sigmoid", "gelu")  # by apex_activation
_GELU = 3
_pack = interface.layout("apex_dense").packer(
    "input", "weight", "bias", "inputs", "outputs", "rows", "type", "activation", "output", "before", "grad_output",
    "grad_input", "grad_weight", "grad_bias",
)  # fmt: skip
_c_forward = interface.function("apex_dense_forward")
_c_backward = interface.function("apex_dense_backward")


def _activation(name):
    value(name in _ACTIVATIONS, "dense: the activation must be none, relu, sigmoid or gelu, not '{}'", name)
    return _ACTIVATIONS.index(name)


def _check(op, input, inputs, weight, bias):
    code_of(op, input.dtype)
    value(
        weight.dim() == 2 and weight.shape[1] == inputs,
        "{}: a weight has shape {}, not [outputs, {}]", op, weight.shape, inputs,
    )  # fmt: skip
    value(
        bias is None or (bias.dim() == 1 and bias.shape[0] == weight.shape[0]),
        "{}: a bias has shape {} but the weight {} outputs",
        op, None if bias is None else bias.shape, weight.shape[0],
    )  # fmt: skip
    for tensor in (weight, bias):
        if tensor is None:
            continue
        type_(
            tensor.dtype is input.dtype,
            "{}: tensors must have one dtype, not {} and {}", op, input.dtype, tensor.dtype,
        )  # fmt: skip


def _check_input(op, input):
    value(input.dim() >= 1, "{}: the input must have at least one dimension", op)


def _check_like(op, tensor, input, outputs, name="what the forward kept"):
    like(op, name, tensor, (*input.shape[:-1], outputs), input.dtype)


class _Layer:
    """The operands of a layer, and its calls."""

    def __init__(self, op, input, weight, bias, activation):
        self.op, self.activation = op, activation
        self.input, self.weight, self.bias = input.contiguous(), weight.contiguous(), contiguous(bias)

    def run(self, call, place, *, output=None, before=None, grad=None, gradients=(None,) * 3):
        """False: the reference must run."""
        outputs, inputs = self.weight.shape
        packed = _pack(
            self.input.data_ptr(), self.weight.data_ptr(), address(self.bias), inputs, outputs,
            self.input.numel() // inputs if inputs else 0, code_of(self.op, self.input.dtype), self.activation,
            address(output), address(before), address(grad), *map(address, gradients),
        )  # fmt: skip
        try:
            status = workspace.status_of(call, self.input.device, place, packed)
        except torch.OutOfMemoryError:  # torch's own products may do with less
            return False
        return not products.was_refused(place, status, self.op)


def _like(tensor, wanted, input):
    wanted = wanted and tensor is not None
    return tensor.new_empty(tensor.shape) if wanted else input.new_empty(0)


def _wanted(*gradients):
    return [gradient if gradient.numel() else None for gradient in gradients]


@kernel
def dense_forward(input, weight, bias, activation):
    kind = _activation(activation)
    _check_input("dense", input)
    _check("dense", input, input.shape[-1], weight, bias)
    place = products.place_of(input)
    if place is None:
        return None
    shape = (*input.shape[:-1], weight.shape[0])
    output, before = input.new_empty(shape), input.new_empty(shape if kind >= 2 else 0)
    layer = _Layer("dense", input, weight, bias, kind)
    return (output, before) if layer.run(_c_forward, place, output=output, before=before) else None


@kernel
def dense_backward(grad_output, input, weight, bias, saved, activation, of_input, of_weight, of_bias):
    kind = _activation(activation)
    _check_input("dense", input)
    _check("dense", input, input.shape[-1], weight, bias)
    _check_like("dense", grad_output, input, weight.shape[0], "the gradient")
    if kind:
        _check_like("dense", saved, input, weight.shape[0])
    place = products.place_of(input)
    if place is None:
        return None
    grad, saved = grad_output.contiguous(), saved.contiguous()
    made = _like(input, of_input, input), _like(weight, of_weight, input), _like(bias, of_bias, input)
    layer = _Layer("dense", input, weight, bias, kind)
    served = layer.run(_c_backward, place, output=saved, before=saved, grad=grad, gradients=_wanted(*made))
    return made if served else None


_TWO = "dense_gelu_dense"


def _check_layers(input, weight1, bias1, weight2, bias2):
    _check_input(_TWO, input)
    _check(_TWO, input, input.shape[-1], weight1, bias1)
    _check(_TWO, input, weight1.shape[0], weight2, bias2)


@kernel
def dense_gelu_dense_forward(input, weight1, bias1, weight2, bias2):
    _check_layers(input, weight1, bias1, weight2, bias2)
    place = products.place_of(input)
    if place is None:
        return None
    output, hidden, before = (
        input.new_empty((*input.shape[:-1], weight.shape[0])) for weight in (weight2, weight1, weight1)
    )
    first = _Layer(_TWO, input, weight1, bias1, _GELU)
    if not first.run(_c_forward, place, output=hidden, before=before):
        return None
    second = _Layer(_TWO, hidden, weight2, bias2, 0)
    return (output, hidden, before) if second.run(_c_forward, place, output=output) else None


@kernel
def dense_gelu_dense_backward(
    grad_output, input, weight1, bias1, weight2, bias2, hidden, before, of_input, of_first, of_second
):
    _check_layers(input, weight1, bias1, weight2, bias2)
    _check_like(_TWO, grad_output, input, weight2.shape[0], "the gradient")
    for kept in (hidden, before):
        _check_like(_TWO, kept, input, weight1.shape[0])
    place = products.place_of(input)
    if place is None:
        return None
    grad, before = grad_output.contiguous(), before.contiguous()
    of_weight2, of_bias2 = _like(weight2, of_second, input), _like(bias2, of_second, input)
    of_hidden = before.new_empty(before.shape) if of_first or of_input else None
    second = _Layer(_TWO, hidden, weight2, bias2, 0)
    gradients = (of_hidden, *_wanted(of_weight2, of_bias2))
    if not second.run(_c_backward, place, grad=grad, gradients=gradients):
        return None
    made = _like(input, of_input, input), _like(weight1, of_first, input), _like(bias1, of_first, input)
    if of_hidden is not None:
        first = _Layer(_TWO, input, weight1, bias1, _GELU)
        if not first.run(_c_backward, place, before=before, grad=of_hidden, gradients=_wanted(*made)):
            return None
    return *made, of_weight2, of_bias2
