"""MLP and mlp_function, with public apex's names, arguments and initial values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from apex import _symbolic as symbolic
from apex import amp
from apex._functional import Function, call

_dense = torch.ops.apex.dense_forward.default
Layer = tuple[torch.Tensor, torch.Tensor | None]  # weight, bias
_ACTIVATIONS = ("none", "relu", "sigmoid")  # by public apex's numbers


def activation_name(activation: int | str) -> str:
    """The name of public apex's number, or the name itself. Raises ValueError for another."""
    if activation in _ACTIVATIONS:
        return activation
    if activation in range(len(_ACTIVATIONS)):
        return _ACTIVATIONS[int(activation)]
    raise ValueError(f"mlp: the activation is 0 or none, 1 or relu, 2 or sigmoid, not {activation!r}")


def layers_of(bias: bool, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[Layer]]:
    """(input, [(weight, bias or None) of each layer]) of (input, *weights, *biases).

    bias: whether there are biases. Raises ValueError where there is no layer, or not as many biases as weights.
    """
    input, *parameters = tensors
    count = len(parameters) // 2 if bias else len(parameters)
    if not count or (bias and len(parameters) % 2):
        raise ValueError(
            f"mlp: an input, weights and {'as many biases' if bias else 'no biases'} are wanted, not "
            f"{len(tensors)} tensors"
        )
    biases = parameters[count:] if bias else [None] * count
    return input, list(zip(parameters[:count], biases, strict=True))


class MlpFunction(Function):
    """MlpFunction.apply(bias, activation, input, *weights, *biases)."""

    @staticmethod
    def forward(ctx: None, bias: bool, activation: int | str, *args: torch.Tensor) -> torch.Tensor:
        """Every layer's activation(output) in turn, the last one's, too.

        bias: whether `args` holds a bias for each weight. activation: 0 none, 1 ReLU, 2 sigmoid, or its name.
        """
        name = activation_name(activation)
        output, layers = layers_of(bias, args)
        for weight, b in layers:
            output = call("dense", _dense, 1, (output, weight, b, name))
        return output


@amp.half_function
def mlp_function(bias: bool, activation: int | str, *args: torch.Tensor) -> torch.Tensor:
    """A multilayer perceptron whose layers are all activation(x weight^T + bias).

    Args:
        bias: whether there are biases.
        activation: 0 or "none", 1 or "relu", 2 or "sigmoid".
        args: the input [..., features[0]]; a weight [features[i + 1], features[i]] for each layer; then, with `bias`,
            a bias [features[i + 1]] for each. float16, bfloat16, float32 or float64, all of one dtype; amp's O1 and
            torch.autocast cast them to half.

    Returns:
        [..., features[-1]]. Differentiable any number of times.

    Raises:
        ValueError, TypeError: tensors that do not fit.
    """
    return MlpFunction.apply(bias, activation, *args)


class MLP(nn.Module):
    """A multilayer perceptron; every layer has the activation, the last one, too.

    Args:
        mlp_sizes: features of the input, of each hidden layer and of the output: [1024, 4096, 1024] are two layers.
        bias: False: there are none.
        activation: "none", "relu" or "sigmoid".
        device, dtype: of the parameters; None: torch's defaults.

    Attributes:
        weights, biases: the parameters, lists of them; in the state_dict they are weight_0, bias_0, weight_1, ...

    Raises:
        TypeError: another activation.
        ValueError: fewer than two sizes.
    """

    def __init__(
        self,
        mlp_sizes: list[int],
        bias: bool = True,
        activation: str = "relu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise TypeError(f"MLP: activation must be one of {', '.join(_ACTIVATIONS)}, not {activation!r}")
        if len(mlp_sizes) < 2:
            raise ValueError(
                f"MLP: mlp_sizes are the features of the input and of each layer, not {mlp_sizes}"
            )
        self.num_layers, self.mlp_sizes, self.bias = len(mlp_sizes) - 1, list(mlp_sizes), bias
        self.activation = _ACTIVATIONS.index(activation)
        for i in range(self.num_layers):
            shape = (mlp_sizes[i + 1], mlp_sizes[i])
            setattr(self, f"weight_{i}", nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
            if bias:
                setattr(self, f"bias_{i}", nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)))
        self.reset_parameters()

    @property
    def weights(self) -> list[nn.Parameter]:
        """Of all layers."""
        return [getattr(self, f"weight_{i}") for i in range(self.num_layers)]

    @property
    def biases(self) -> list[nn.Parameter]:
        """Of all layers; none without `bias`."""
        return [getattr(self, f"bias_{i}") for i in range(self.num_layers)] if self.bias else []

    def reset_parameters(self) -> None:
        """Weights are normal with variance 2 / (inputs + outputs), biases with 1 / outputs, as public apex's."""
        for weight in self.weights:
            nn.init.normal_(weight, 0.0, (2.0 / sum(weight.shape)) ** 0.5)
        for bias in self.biases:
            nn.init.normal_(bias, 0.0, (1.0 / bias.shape[0]) ** 0.5)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., mlp_sizes[-1]] of input [..., mlp_sizes[0]]."""
        node = symbolic.leaf(self, input)
        if node is not None:
            return node
        return mlp_function(self.bias, self.activation, input, *self.weights, *self.biases)

    def extra_repr(self) -> str:
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={_ACTIVATIONS[self.activation]}"
