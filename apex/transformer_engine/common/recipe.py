"""Recipes: in which formats, and with which scales, layers multiply in FP8.

Sources: P. Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433; DeepSeek-AI, "DeepSeek-V3 Technical
Report", arXiv:2412.19437 (blocks of 128).
"""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from apex._legacy import absent

__all__ = [
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Format",
    "MMParams",
    "QParams",
    "Recipe",
]


class _Largest(NamedTuple):
    """The largest numbers that a format holds, of the forward and of the backward pass."""

    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    """E4M3 (to 448), E5M2 (to 57344), or HYBRID: E4M3 forward, E5M2 for gradients.

    Where a device has the FNUZ formats (gfx942), E4M3 ends at 240; this is looked up when a tensor is cast.
    """

    E4M3 = _Largest(448.0, 448.0)
    E5M2 = _Largest(57344.0, 57344.0)
    HYBRID = _Largest(448.0, 57344.0)


class OverridePrecision(NamedTuple):
    """Which products are made without FP8."""

    fprop: bool = False
    dgrad: bool = False
    wgrad: bool = False


@dataclasses.dataclass(frozen=True)
class QParams:
    """How a tensor's scale is made of its largest magnitude.

    Args:
        power_2_scale: scales are powers of two (rounded down).
        amax_epsilon: magnitudes below count as this.
    """

    power_2_scale: bool = False
    amax_epsilon: float = 0.0


@dataclasses.dataclass(frozen=True)
class MMParams:
    """How a product is summed: use_split_accumulator=False lets a card sum with fewer bits, and faster."""

    use_split_accumulator: bool = True


class Recipe:
    """What all recipes are."""

    fp8_format: Format

    def delayed(self) -> bool:
        """Whether scales come from the steps before."""
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        """Whether each tensor's scale is made of its own values."""
        return isinstance(self, Float8CurrentScaling)

    def float8_block_scaling(self) -> bool:
        """Whether each block of a tensor has a scale."""
        return isinstance(self, Float8BlockScaling)

    def mxfp8(self) -> bool:
        """False: there is no such recipe here."""
        return False

    def _check_format(self) -> None:
        if not isinstance(self.fp8_format, Format):
            raise TypeError(f"fp8_format must be a recipe.Format, not {self.fp8_format!r}")
        if self.fp8_format is Format.E5M2:
            raise ValueError("pure E5M2 training is not supported: use Format.HYBRID or Format.E4M3")


@dataclasses.dataclass
class DelayedScaling(Recipe):
    """A scale for each tensor, made of the largest magnitudes of the steps before.

    scale = (largest of the format / amax) / 2^margin, and the old one where amax is 0, infinite or nan.

    Args:
        margin: as above.
        interval: accepted, and without effect, as in the public engine: scales are made anew every step.
        fp8_format: HYBRID or E4M3.
        amax_history_len: how many steps are kept.
        amax_compute_algo: "max" of the history, its "most_recent" row, or a function of the history [length, tensors]
            that gives [tensors].
        scaling_factor_compute_algo: None, or a function (amax, scale before, largest of the format, recipe) -> scale.
        override_linear_precision: (fprop, dgrad, wgrad): wgrad=True makes the weights' gradients without FP8.
        reduce_amax: magnitudes are those of all ranks of the group that fp8_autocast names.
        fp8_dpa, fp8_mha: False: attention itself is not made in FP8.
        params_dtype, device: accepted, and without effect, as in the public engine, to which Megatron-LM passes them.

    Raises:
        TypeError, ValueError: a value that is none of these.
    """

    margin: float = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Any], Any] = "max"
    override_linear_precision: tuple[bool, bool, bool] = OverridePrecision()
    scaling_factor_compute_algo: Callable[[Any, Any, Any, Recipe], Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    params_dtype: dataclasses.InitVar[Any] = None
    device: dataclasses.InitVar[Any] = None

    def __post_init__(self, params_dtype: Any, device: Any) -> None:
        self._check_format()
        _refuse_attention(self)
        self.override_linear_precision = OverridePrecision(*self.override_linear_precision)
        if self.override_linear_precision not in ((False, False, False), (False, False, True)):
            raise ValueError("override_linear_precision: only wgrad may be made without FP8")
        if isinstance(self.amax_history_len, bool) or not isinstance(self.amax_history_len, int):
            raise TypeError(f"amax_history_len must be an int, not {self.amax_history_len!r}")
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len must be 1 or more, not {self.amax_history_len}")
        if self.amax_compute_algo not in ("max", "most_recent") and not callable(self.amax_compute_algo):
            raise ValueError("amax_compute_algo must be 'max', 'most_recent' or a function of the history")
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise TypeError("scaling_factor_compute_algo must be a function or None")


@dataclasses.dataclass
class Float8CurrentScaling(Recipe):
    """A scale for each tensor, made of its own largest magnitude; 1 where that is 0, infinite or nan.

    Args:
        fp8_format: HYBRID or E4M3.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: of inputs, weights and gradients.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: of the three products.
        fp8_dpa, fp8_mha: False: attention itself is not made in FP8.
    """

    fp8_format: Format = Format.HYBRID
    fp8_quant_fwd_inp: QParams = QParams()
    fp8_quant_fwd_weight: QParams = QParams()
    fp8_quant_bwd_grad: QParams = QParams()
    fp8_gemm_fprop: MMParams = MMParams(use_split_accumulator=False)
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        self._check_format()
        _refuse_attention(self)


def _block_scales() -> QParams:
    """Powers of two, unless NVTE_FP8_BLOCK_SCALING_FP32_SCALES is 1."""
    return QParams(power_2_scale=os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") != "1")


@dataclasses.dataclass
class Float8BlockScaling(Recipe):
    """A scale for every 128 numbers of a row (or 128 x 128 of a matrix), made of its own largest magnitude.

    Args:
        fp8_format: E4M3 or HYBRID.
        fp8_quant_fwd_inp, fp8_quant_fwd_weight, fp8_quant_bwd_grad: of inputs, weights and gradients. By default
            scales are powers of two; NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 takes any.
        x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1: blocks of 1 x 128; 2: of 128 x 128.
        fp8_gemm_fprop, fp8_gemm_dgrad, fp8_gemm_wgrad: of the three products.
        fp8_dpa, fp8_mha: False: attention itself is not made in FP8.
    """

    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp: QParams = dataclasses.field(default_factory=_block_scales)
    fp8_quant_fwd_weight: QParams = dataclasses.field(default_factory=_block_scales)
    fp8_quant_bwd_grad: QParams = dataclasses.field(default_factory=_block_scales)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False

    def __post_init__(self) -> None:
        self._check_format()
        _refuse_attention(self)
        for name in ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"):
            if getattr(self, name) not in (1, 2):
                raise ValueError(f"{name} must be 1 (1 x 128) or 2 (128 x 128), not {getattr(self, name)}")


def _refuse_attention(recipe: Any) -> None:
    if recipe.fp8_dpa or recipe.fp8_mha:
        raise ValueError("fp8_dpa and fp8_mha: attention is not made in FP8 here; leave both False")


_HERE = "there are DelayedScaling, Float8CurrentScaling and Float8BlockScaling"
_ABSENT = {
    "MXFP8BlockScaling": f"blocks of 1 x 32 with E8M0 scales, which Blackwell multiplies, are not here; {_HERE}",
    "NVFP4BlockScaling": f"FP4 is not here; {_HERE}",
    "CustomRecipe": f"quantizers of one's own are not taken; {_HERE}",
}


def __getattr__(name: str) -> Any:
    why = f": {_ABSENT[name]}" if name in _ABSENT else ""
    raise absent.refused(f"module {__name__!r} has no attribute {name!r}{why}", __name__, sys._getframe(1))
