"""What this build of torch is for: functions that public apex has at its top level."""

from __future__ import annotations

import warnings

import torch


def check_if_rocm_pytorch():
    """Whether this torch is one for AMD GPUs."""
    return torch.version.hip is not None


IS_ROCM_PYTORCH = check_if_rocm_pytorch()


def check_cudnn_version_and_warn(global_option: str, required_cudnn_version: int) -> bool:
    """Whether torch has a cuDNN of this version (90100 for 9.1) or later; warns, with the option's name, if not.

    True for AMD GPUs, where MIOpen is in its place. Nothing of apex needs cuDNN.
    """
    if IS_ROCM_PYTORCH:
        return True
    found = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    if found is not None and found >= required_cudnn_version:
        return True
    here = "is not here" if found is None else f"is {found}"
    warnings.warn(
        f"{global_option} needs cuDNN {required_cudnn_version} or later, which {here}", stacklevel=2
    )
    return False
