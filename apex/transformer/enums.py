"""The kinds of layers, attention, masks and models that transformer code names."""

import enum


class LayerType(enum.Enum):
    """Of a transformer's layer."""

    encoder = 1
    decoder = 2


class AttnType(enum.Enum):
    """Whether keys come from the queries' own sequence or another."""

    self_attn = 1
    cross_attn = 2


class AttnMaskType(enum.Enum):
    """What attention leaves out: what a mask says, or what comes later."""

    padding = 1
    causal = 2


class ModelType(enum.Enum):
    """Of a whole model."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
