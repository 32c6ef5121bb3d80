"""Fused optimizers with the interface of public apex, and those over combined tensors (docs/combined_tensors.md)."""

from apex.optimizers.combined_adadelta import CombinedAdadelta
from apex.optimizers.combined_adam import CombinedAdam, CombinedAdamW
from apex.optimizers.combined_adamp import CombinedAdamP
from apex.optimizers.combined_bert_adam import CombinedBertAdam
from apex.optimizers.combined_lamb import CombinedLamb
from apex.optimizers.combined_rmsprop import CombinedRMSprop, CombinedRMSpropTF
from apex.optimizers.combined_sgd import CombinedSGD
from apex.optimizers.fused_adagrad import FusedAdagrad
from apex.optimizers.fused_adam import FusedAdam
from apex.optimizers.fused_lamb import FusedLAMB
from apex.optimizers.fused_lars import FusedLARS
from apex.optimizers.fused_mixed_precision_lamb import FusedMixedPrecisionLamb
from apex.optimizers.fused_novograd import FusedNovoGrad
from apex.optimizers.fused_sgd import FusedSGD
from apex.optimizers.lamb import Lamb
from apex.optimizers.npu_fused import (
    NpuFusedAdadelta,
    NpuFusedAdam,
    NpuFusedAdamP,
    NpuFusedAdamW,
    NpuFusedBertAdam,
    NpuFusedLamb,
    NpuFusedRMSprop,
    NpuFusedRMSpropTF,
    NpuFusedSGD,
)

__all__ = [
    "CombinedAdadelta",
    "CombinedAdam",
    "CombinedAdamP",
    "CombinedAdamW",
    "CombinedBertAdam",
    "CombinedLamb",
    "CombinedRMSprop",
    "CombinedRMSpropTF",
    "CombinedSGD",
    "FusedAdagrad",
    "FusedAdam",
    "FusedLAMB",
    "FusedLARS",
    "FusedMixedPrecisionLamb",
    "FusedNovoGrad",
    "FusedSGD",
    "Lamb",
    "NpuFusedAdadelta",
    "NpuFusedAdam",
    "NpuFusedAdamP",
    "NpuFusedAdamW",
    "NpuFusedBertAdam",
    "NpuFusedLamb",
    "NpuFusedRMSprop",
    "NpuFusedRMSpropTF",
    "NpuFusedSGD",
]
