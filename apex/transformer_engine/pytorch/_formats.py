"""Which FP8 formats a device has, and what multiplies them there."""

from __future__ import annotations

import torch

from apex.transformer_engine.common.recipe import Format, Recipe

OCP = (torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_LARGEST = {dtype: torch.finfo(dtype).max for dtype in OCP + FNUZ}
_SCALED = ("gfx94", "gfx95", "gfx12")


# Of devices that were asked before; torch.compile looks through a dict, and not through functools.cache.
_archs: dict[torch.device, str] = {}
_multiply: dict[torch.device, bool] = {}


def _arch(device: torch.device) -> str:
    """gfx942 and the like on ROCm, else an empty string."""
    if torch.version.hip is None or device.type != "cuda":
        return ""
    if device not in _archs:
        _archs[device] = torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
    return _archs[device]


def formats(device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """(E4M3, E5M2) as the device has them: FNUZ on gfx942 and its kin, OCP on every other one."""
    return FNUZ if _arch(device).startswith("gfx94") else OCP


def dtypes_of(recipe: Recipe, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """(of the forward pass, of gradients): E5M2 for gradients of the hybrid format, else E4M3."""
    both = formats(device)
    return both if recipe.fp8_format is Format.HYBRID else (both[0], both[0])


def dtype_of(recipe: Recipe, device: torch.device, forward: bool) -> torch.dtype:
    """One of dtypes_of."""
    return dtypes_of(recipe, device)[0 if forward else 1]


def largest(dtype: torch.dtype) -> float:
    """The largest number of a format."""
    return _LARGEST[dtype]


def multiplies(device: torch.device) -> bool:
    """Whether torch._scaled_mm multiplies FP8 there: from capability 8.9 on, gfx942, gfx950, gfx12."""
    if device.type != "cuda":
        return False
    if device not in _multiply:
        if torch.version.hip is not None:
            _multiply[device] = _arch(device).startswith(_SCALED)
        else:
            _multiply[device] = torch.cuda.get_device_capability(device) >= (8, 9)
    return _multiply[device]


def look_up(device: torch.device) -> None:
    """Asks a GPU what it has, before torch.compile traces the question."""
    if device.type == "cuda":
        known = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        multiplies(known)
        formats(known)


def served(device: torch.device | str | None = None) -> dict[str, str]:
    """What serves FP8 on a device (None: the current GPU, or the CPU where there is none).

    Returns:
        "formats": "OCP" or "FNUZ"; "products": "torch._scaled_mm" or "emulated": codes are widened, multiplied in
        float32 and scaled, which is exact but for the products' rounding.
    """
    found = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return {
        "formats": "FNUZ" if formats(found) == FNUZ else "OCP",
        "products": "torch._scaled_mm" if multiplies(found) else "emulated",
    }


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """True: where a card does not multiply FP8, its products are emulated. return_reason: (True, "")."""
    return (True, "") if return_reason else True
