"""Fused operations that public apex keeps under `contrib`. Submodules are imported when they are named."""
