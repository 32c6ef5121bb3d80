"""How channels flow through each kind of layer, and in which of its parameters they are."""

from __future__ import annotations

import dataclasses
import re

import torch
import torch.nn.modules.module as _global
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.instancenorm import _InstanceNorm

from apex.contrib.sparsity._reshape import flattened, pooled, spatial
from apex.contrib.sparsity._spaces import Site
from apex.contrib.sparsity._values import Channels

_ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh,
    nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Softmax, nn.Softmin,
    nn.Softmax2d, nn.LogSoftmax, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout,
    nn.FeatureAlphaDropout, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink, nn.Threshold, nn.RReLU,
)  # fmt: skip
POOL = re.compile(r"(?:adaptive_?)?(?:max|avg|lp)_?pool([123])d", re.IGNORECASE)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def why_unknown(module: nn.Module) -> str | None:
    """Why a layer may do otherwise than layers of its type do; None where it does the same."""
    if _global._global_forward_hooks or _global._global_forward_pre_hooks:
        return "is called with hooks of all modules"
    for part in module.modules():
        if not type(part).__module__.startswith(("torch.nn.modules.", "apex.")):
            return f"is a {type(part).__name__}, such as a parametrization makes"
        if any(getattr(part, hooks, None) for hooks in _HOOKS):
            return "has hooks"
        if "forward" in vars(part):
            return "has a forward() of its own"
        if any(torch.is_tensor(value) for value in vars(part).values()):
            return "has a weight that is no parameter of its own"
    return None


class Layers:
    """The layers that Flow knows."""

    def _known(self, x, made):
        """What a layer makes of x, which stops here where that is not known."""
        return made if made is not None else self._stop(x)

    def _handler(self, module):
        name = type(module).__name__
        if isinstance(module, _ConvTransposeNd):
            return None
        if isinstance(module, _ConvNd):
            return self._convolution
        if isinstance(module, nn.Linear) or (name == "FusedDense" and hasattr(module, "out_features")):
            return self._linear
        if isinstance(module, nn.Embedding):
            return self._embedding
        if isinstance(module, (_BatchNorm, _InstanceNorm)):
            return self._channel_norm
        if hasattr(module, "normalized_shape") or name == "FastLayerNorm":
            return self._row_norm
        if isinstance(module, nn.PReLU):
            return self._prelu
        if isinstance(module, (nn.Upsample, nn.Flatten, *_ACTIVATIONS)) or POOL.fullmatch(name):
            return self._without_parameters
        return None

    def _without_parameters(self, module, x):
        if x is None:
            return None
        name = type(module).__name__
        if isinstance(module, nn.Flatten):
            return self._known(x, flattened(x, module.start_dim, module.end_dim))
        if isinstance(module, nn.Upsample):
            return self._known(x, spatial(x))
        pool = POOL.fullmatch(name)
        return self._known(x, pooled(x, int(pool[1]))) if pool else x

    def _convolution(self, module, x):
        path, rank = self.node.target, module.weight.dim()
        batch = x.batch if x else object()
        fits = x is not None and x.dim == 1 - rank and not x.flat and x.size == module.in_channels
        if module.groups == module.in_channels == module.out_channels > 1:  # each channel by itself
            if not fits:
                return self._stop_at(x, module)
            self._sites(x, module.weight, f"{path}.weight", 0, "K")
            self._sites(x, module.bias, f"{path}.bias", 0, "K")
            return dataclasses.replace(x, rank=rank)
        if not (fits and self._input_of_groups(module, x)):
            self._stop_input(x, module.weight)
        made = self._new(module.out_channels, 1 - rank, rank, batch)
        self._sites(made, module.weight, f"{path}.weight", 0, "K", makes=True)
        self._sites(made, module.bias, f"{path}.bias", 0, "K", makes=True)
        if module.groups > 1:
            made.freeze("outputs of a grouped convolution belong to their group")
        return made

    def _input_of_groups(self, module, x):
        """The sites of a convolution's inputs. With groups each has its own part of the channels."""
        name, width = f"{self.node.target}.weight", module.in_channels // module.groups
        if module.groups == 1:
            self._sites(x, module.weight, name, 1, "C")
            return True
        if len(x.parts) > 1:
            return False
        x.parts[0].limit(width)
        rows = module.out_channels // module.groups
        for group in range(module.groups):
            of_group = (group * rows, (group + 1) * rows)
            x.parts[0].add(
                Site(self.node.name, name, module.weight, 1, "C", width, begin=group * width, rows=of_group)
            )
        return True

    def _linear(self, module, x):
        path = self.node.target
        if x is not None and x.dim == -1 and x.size == module.in_features:
            self._sites(x, module.weight, f"{path}.weight", 1, "C")
        else:
            self._stop_input(x, module.weight)
        rank = None if x is None or x.flat else x.rank
        made = self._new(module.out_features, -1, 2 if x and x.flat else rank, x.batch if x else object())
        self._sites(made, module.weight, f"{path}.weight", 0, "K", makes=True)
        self._sites(made, module.bias, f"{path}.bias", 0, "K", makes=True)
        return made

    def _embedding(self, module, x):
        self._stop(x)
        made = self._new(module.embedding_dim, -1, None, object())
        self._sites(made, module.weight, f"{self.node.target}.weight", 1, "K", makes=True)
        return made

    def _channel_norm(self, module, x):
        if x is None or not x.second or x.size != module.num_features:
            return self._stop_at(x, module)
        for name in ("weight", "bias", "running_mean", "running_var"):
            self._sites(x, getattr(module, name, None), f"{self.node.target}.{name}", 0, "K")
        return x

    def _row_norm(self, module, x):
        shape = tuple(getattr(module, "normalized_shape", ())) or tuple(module.weight.shape)
        if x is None or x.flat or (-x.dim <= len(shape) and shape[x.dim] != x.size):
            return self._stop_at(x, module)
        for name in ("weight", "bias") if -x.dim <= len(shape) else ():
            self._sites(x, getattr(module, name, None), f"{self.node.target}.{name}", len(shape) + x.dim, "K")
        return x

    def _prelu(self, module, x):
        if module.num_parameters > 1:
            if x is None or not x.second or x.size != module.num_parameters:
                return self._stop_at(x, module)
            self._sites(x, module.weight, f"{self.node.target}.weight", 0, "K")
        return x

    def _attention(self, node, module):
        args, kwargs = self._given(node)
        inputs = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
        fits = module._qkv_same_embed_dim and module.bias_k is None and len(inputs) == 3
        fits = fits and all(
            isinstance(x, Channels) and x.dim == -1 and x.size == module.embed_dim for x in inputs
        )
        if fits and self._unite(inputs[0], inputs[1]) and self._unite(inputs[0], inputs[2]):
            self._sites(inputs[0], module.in_proj_weight, f"{node.target}.in_proj_weight", 1, "C")
        else:
            self._stop(*inputs)
            self._stop_input(None, module.in_proj_weight)
        self._stop(*args[3:], *(v for k, v in kwargs.items() if k not in ("query", "key", "value")))
        query = inputs[0] if inputs and isinstance(inputs[0], Channels) else None
        made = self._new(
            module.embed_dim, -1, query.rank if query else None, query.batch if query else object()
        )
        for name in ("weight", "bias"):
            tensor = getattr(module.out_proj, name)
            self._sites(made, tensor, f"{node.target}.out_proj.{name}", 0, "K", makes=True)
        return made, None
