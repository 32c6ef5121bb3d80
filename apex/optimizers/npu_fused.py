"""The optimizers over combined tensors, under the names that the Ascend patch gives them."""

from apex.optimizers.combined_adadelta import CombinedAdadelta
from apex.optimizers.combined_adam import CombinedAdam, CombinedAdamW
from apex.optimizers.combined_adamp import CombinedAdamP
from apex.optimizers.combined_bert_adam import CombinedBertAdam
from apex.optimizers.combined_lamb import CombinedLamb
from apex.optimizers.combined_rmsprop import CombinedRMSprop, CombinedRMSpropTF
from apex.optimizers.combined_sgd import CombinedSGD


class NpuFusedSGD(CombinedSGD):
    """CombinedSGD, on every device."""


class NpuFusedAdam(CombinedAdam):
    """CombinedAdam, on every device."""


class NpuFusedAdamW(CombinedAdamW):
    """CombinedAdamW, on every device."""


class NpuFusedAdamP(CombinedAdamP):
    """CombinedAdamP, on every device."""


class NpuFusedBertAdam(CombinedBertAdam):
    """CombinedBertAdam, on every device."""


class NpuFusedAdadelta(CombinedAdadelta):
    """CombinedAdadelta, on every device."""


class NpuFusedLamb(CombinedLamb):
    """CombinedLamb, on every device."""


class NpuFusedRMSprop(CombinedRMSprop):
    """CombinedRMSprop, on every device."""


class NpuFusedRMSpropTF(CombinedRMSpropTF):
    """CombinedRMSpropTF, on every device."""
