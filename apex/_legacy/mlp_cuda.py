"""The functions of public apex's mlp_cuda. They record no gradients, as there."""

from __future__ import annotations

import torch

from apex._legacy._raw import raw as _raw
from apex._loader import bindings
from apex.mlp.mlp import activation_name, layers_of

bindings.load()
__all__ = ["backward", "forward"]


def _hidden(input, layers, reserved):
    """What each layer but the last one gave, as views of what `forward` kept; and before the sigmoid."""
    rows = input.numel() // input.shape[-1]
    sizes = [weight.shape[0] for weight, _ in layers]
    views = reserved.split([rows * size for size in sizes])
    return [view.view(*input.shape[:-1], size) for view, size in zip(views, sizes, strict=True)]


@_raw
def forward(use_bias, activation, inputs):
    """[output, what the backward needs of the layers, in one tensor]

    activation: 0 none, 1 ReLU, 2 sigmoid. inputs: [input, weights, biases].
    """
    name = activation_name(activation)
    output, layers = layers_of(use_bias, inputs)
    kept = []
    for weight, bias in layers:
        output, before = torch.ops.apex.dense_forward(output, weight, bias, name)
        kept.append((before if name == "sigmoid" else output).reshape(-1))
    return [output, torch.cat(kept)]


@_raw
def backward(use_bias, activation, grad_o, fprop_outputs, inputs):
    """[gradient of the input, of each weight, of each bias], of what `forward` returned."""
    name = activation_name(activation)
    input, layers = layers_of(use_bias, inputs)
    kept = _hidden(input, layers, fprop_outputs[1])
    fed = [input, *(k.sigmoid() if name == "sigmoid" else k for k in kept[:-1])]
    gradient, of_weights, of_biases = grad_o, [], []
    for (weight, bias), x, k in reversed(list(zip(layers, fed, kept, strict=True))):
        gradient, of_weight, of_bias = torch.ops.apex.dense_backward(gradient, x, weight, bias, k, name)
        of_weights.insert(0, of_weight)
        of_biases.insert(0, of_bias)
    return [gradient, *of_weights, *(of_biases if use_bias else [])]
