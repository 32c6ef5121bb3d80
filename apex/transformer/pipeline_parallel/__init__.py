"""Models whose layers are split over the stages of a pipeline, which work on several microbatches at once."""

from apex.transformer.pipeline_parallel.schedules import get_forward_backward_func
from apex.transformer.pipeline_parallel.schedules.common import build_model

__all__ = ["build_model", "get_forward_backward_func"]
