"""The functions of public Transformer Engine's transformer_engine_extensions: apex.transformer_engine.pytorch._tex."""

import sys

from apex.transformer_engine.pytorch import _tex
from apex.transformer_engine.pytorch._tex import *  # noqa: F403

__all__ = [*_tex.__all__, "__getattr__"]  # the latter says of public names that are not here, why


def __getattr__(name):
    raise _tex.missing(name, sys._getframe(1))
