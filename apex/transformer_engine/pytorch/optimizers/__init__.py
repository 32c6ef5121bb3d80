"""The public engine's optimizers and functions over lists of tensors: those of apex.optimizers and amp_C."""

from apex._legacy.amp_C import (  # noqa: F401  of amp_C, by this name, too
    multi_tensor_adam,
    multi_tensor_adam_capturable,
    multi_tensor_adam_capturable_master,
    multi_tensor_l2norm,
    multi_tensor_scale,
    multi_tensor_sgd,
    multi_tensor_unscale_l2norm,
)
from apex.multi_tensor_apply import MultiTensorApply, multi_tensor_applier
from apex.transformer_engine.pytorch.optimizers.fused_adam import FusedAdam
from apex.transformer_engine.pytorch.optimizers.fused_sgd import FusedSGD

__all__ = ["FusedAdam", "FusedSGD", "MultiTensorApply", "multi_tensor_applier"]
