"""Loss scaling over model parallel ranks."""

from apex.transformer.amp.grad_scaler import GradScaler

__all__ = ["GradScaler"]
