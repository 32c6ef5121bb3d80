"""Mixed precision with the interface of public apex.

    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()

docs/amp.md tells what each level does and what misuse raises; docs/torch_amp.md has the same script on torch.amp.
"""

from apex.amp._amp_state import _amp_state, master_params
from apex.amp._errors import AmpUsageError, AmpWarning, MovedFunctionWarning
from apex.amp.amp import (
    bfloat16_function,
    float_function,
    half_function,
    init,
    promote_function,
    register_bfloat16_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from apex.amp.frontend import initialize, load_state_dict, state_dict
from apex.amp.handle import disable_casts, scale_loss

__all__ = [
    "AmpUsageError",
    "AmpWarning",
    "MovedFunctionWarning",
    "_amp_state",
    "bfloat16_function",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_bfloat16_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
