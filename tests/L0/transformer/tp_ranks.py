"""What each rank of test_tensor_parallel_ranks.py runs, on gloo. A case takes the device mesh; it raises on failure."""

from __future__ import annotations

import tp_layer_uses
import tp_layers
import tp_losses
import tp_mappings
import tp_model
import tp_state

CASES = {
    **tp_state.CASES,
    **tp_mappings.CASES,
    **tp_layers.CASES,
    **tp_layer_uses.CASES,
    **tp_losses.CASES,
    **tp_model.CASES,
}
