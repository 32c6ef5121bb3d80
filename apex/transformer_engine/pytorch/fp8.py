"""The public engine's module of FP8's state: contexts, what a device offers, and FP8GlobalStateManager."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from apex.transformer_engine.common.recipe import DelayedScaling, Recipe
from apex.transformer_engine.pytorch import _state
from apex.transformer_engine.pytorch._formats import is_fp8_available
from apex.transformer_engine.pytorch._state import (
    autocast,
    current,
    fp8_autocast,
    fp8_model_init,
    quantized_model_init,
)

__all__ = [
    "FP8GlobalStateManager",
    "autocast",
    "check_fp8_block_scaling_support",
    "check_fp8_support",
    "check_mxfp8_support",
    "fp8_autocast",
    "fp8_model_init",
    "get_default_fp8_recipe",
    "get_default_recipe",
    "is_fp8_available",
    "is_fp8_block_scaling_available",
    "is_mxfp8_available",
    "quantized_model_init",
]

_NO_MXFP8 = "apex.transformer_engine has no MXFP8 recipe: blocks of 1 x 32 with E8M0 scales, of Blackwell"


def check_fp8_support() -> tuple[bool, str]:
    """(True, ""): where a card does not multiply FP8, its products are emulated."""
    return True, ""


def check_fp8_block_scaling_support() -> tuple[bool, str]:
    """(True, ""), as check_fp8_support."""
    return True, ""


def check_mxfp8_support() -> tuple[bool, str]:
    """(False, why)."""
    return False, _NO_MXFP8


def get_default_fp8_recipe() -> Recipe:
    """What fp8_autocast takes without a recipe."""
    return DelayedScaling()


def get_default_recipe() -> Recipe:
    """As get_default_fp8_recipe."""
    return get_default_fp8_recipe()


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """False: there is no such recipe here. return_reason: (False, why)."""
    return check_mxfp8_support() if return_reason else False


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """True, as is_fp8_available. return_reason: (True, "")."""
    return check_fp8_block_scaling_support() if return_reason else True


class FP8GlobalStateManager:
    """What the innermost fp8_autocast and fp8_model_init say, asked by the public engine's names."""

    @staticmethod
    def reset() -> None:
        """As it is at the start of a process: outside of any autocast, and no layer waits for new scales."""
        _state.forget()
        current.__init__()  # type: ignore[misc]

    @staticmethod
    def is_fp8_available() -> tuple[bool, str]:
        """As check_fp8_support."""
        return check_fp8_support()

    @staticmethod
    def is_mxfp8_available() -> tuple[bool, str]:
        """As check_mxfp8_support."""
        return check_mxfp8_support()

    @staticmethod
    def is_fp8_block_scaling_available() -> tuple[bool, str]:
        """As check_fp8_block_scaling_support."""
        return check_fp8_block_scaling_support()

    @staticmethod
    def is_fp8_enabled() -> bool:
        """Whether layers multiply in FP8 here."""
        return bool(current.enabled)

    @staticmethod
    def is_fp8_calibration() -> bool:
        """Whether magnitudes are recorded, and nothing is multiplied in FP8."""
        return bool(current.calibrating)

    @staticmethod
    def with_fp8_parameters() -> bool:
        """Whether layers that are made here keep their weights in FP8 alone."""
        return bool(current.quantized_init)

    @staticmethod
    def with_high_precision_init_val() -> bool:
        """Whether they keep their first values on the CPU, too."""
        return bool(current.preserve)

    @staticmethod
    def get_fp8_recipe() -> Recipe:
        """The autocast's recipe; outside, the default one."""
        return current.recipe or get_default_fp8_recipe()

    @staticmethod
    def get_fp8_group() -> dist.ProcessGroup | None:
        """Whose ranks reduce magnitudes; None: all ranks."""
        return current.group

    @staticmethod
    def get_meta_tensor_key(forward: bool = True) -> str:
        """By which name a layer's fp8_meta has a direction."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @staticmethod
    def get_fp8_autocast_state() -> tuple[Any, ...]:
        """What set_fp8_autocast_state takes."""
        return current.keep()

    @staticmethod
    def set_fp8_autocast_state(fp8_state: tuple[Any, ...]) -> None:
        """Puts back what get_fp8_autocast_state gave."""
        current.restore(fp8_state)
        if current.depth == 0:
            current.outside = fp8_state

    @staticmethod
    def reduce_and_update_fp8_tensors(forward: bool = True) -> None:
        """New scales now, of what layers recorded, in place of at the next autocast. One update makes both directions'.

        A collective, where ranks reduce magnitudes.
        """
        _state.flush(True)
        _state.flush(False)
