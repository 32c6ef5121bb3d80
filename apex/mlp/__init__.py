"""Multilayer perceptrons whose biases and activations are fused into the products of matrices."""

from apex.mlp.mlp import MLP, MlpFunction, mlp_function

__all__ = ["MLP", "MlpFunction", "mlp_function"]
