"""What amp does to the gradients of an optimizer: one policy each.

| policy | where | what it does |
|---|---|---|
| Plain | no master weights (O0, O1, O3, O4) | gradients are unscaled where they are |
| Masters | master weights (O2, O5) | the model's half-precision gradients go, unscaled, to float32 masters |
| ScaledModel | FusedSGD with master weights | with materialize_master_grads=False, step() reads the model's own |

`apex.amp._combined` puts its own around any of them. When each method is called: _policies/base.py.
"""

from apex.amp._policies.masters import Masters
from apex.amp._policies.plain import Plain
from apex.amp._policies.scaled_model import ScaledModel
from apex.optimizers import FusedSGD


def choose(optimizer, master_weights):
    """The class of the policy of an optimizer."""
    if not master_weights:
        return Plain
    return ScaledModel if isinstance(optimizer, FusedSGD) else Masters
