"""multi_tensor_rmsprop kernels against float64, on every SIMT build and the emulated AMD targets."""

from __future__ import annotations

import numpy as np
import pytest

from simt.tensor_lists import TensorLists

TYPES = ["f32", "f64"]
SCALARS = dict(lr=0.1, alpha=0.9, eps=0.1, weight_decay=0.3)
FORMS = ["eps_inside", "decoupled_decay", "lr_in_momentum"]
GRADIENT, PARAMETER, SQUARE = range(3)


class Rmsprop:
    """Lists of one of the four kinds of kernels, the launch, and the step in float64."""

    def __init__(self, device, kind="f32", centered=False, momentum=False):
        self.centered, self.momentum = centered, momentum
        # Variances stay well above zero: averages of squares are above 1, averages below.
        self.lists = TensorLists(device, [kind] * (3 + centered + momentum), [1, 1, 1, 0.1, 1], [SQUARE])
        self.lists.replace(SQUARE, [1 + b.numpy() for b in self.lists.buffers[SQUARE]])

    def launch(self, **changes):
        name = ("centered_" if self.centered else "") + ("momentum_" if self.momentum else "")
        arguments = (
            SCALARS | dict(momentum=0.9 if self.momentum else 0.0, centered=int(self.centered)) | changes
        )
        self.lists.launch(
            name + "_".join(self.lists.types), "RmspropArguments", "multi_tensor_rmsprop", **arguments
        )

    def check(self, lr=SCALARS["lr"], inv_scale=1.0, eps_inside=0, decoupled_decay=0, lr_in_momentum=0):
        alpha, eps, decay = SCALARS["alpha"], SCALARS["eps"], SCALARS["weight_decay"]
        results = []
        for g, p, s, *more in zip(*self.lists.values, strict=True):
            g = g * inv_scale + (0 if decoupled_decay else decay * p)
            p = p * (1 - decay) if decoupled_decay else p
            s = square = alpha * s + (1 - alpha) * g * g
            written = []
            if self.centered:
                written.append(alpha * more[0] + (1 - alpha) * g)
                square = s - written[0] ** 2
            step = g / (np.sqrt(square + eps) if eps_inside else np.sqrt(square) + eps)
            if self.momentum:
                step = 0.9 * more[-1] + (lr * step if lr_in_momentum else step)
                written.append(step)
            results.append((p - (step if self.momentum and lr_in_momentum else lr * step), s, *written))
        for k, expected in enumerate(zip(*results, strict=True), start=PARAMETER):
            self.lists.check(k, list(expected), self.lists.types[k], absolute=16)
        self.lists.check_untouched([GRADIENT])


@pytest.mark.parametrize("momentum", [False, True], ids=["", "momentum"])
@pytest.mark.parametrize("centered", [False, True], ids=["plain", "centered"])
@pytest.mark.parametrize("kind", TYPES)
def test_step(device, kind, centered, momentum):
    rmsprop = Rmsprop(device, kind, centered, momentum)
    rmsprop.launch()
    rmsprop.check()


@pytest.mark.parametrize("form", FORMS)
def test_forms(device, form):
    rmsprop = Rmsprop(device, centered=True, momentum=True)
    rmsprop.launch(**{form: 1})
    rmsprop.check(**{form: 1})


def test_values_that_lie_on_the_device(device):
    rmsprop = Rmsprop(device, momentum=True)
    rmsprop.launch(lr=99.0, lr_on_device=device.full(1, 0.25), inv_scale=device.full(1, 0.125))
    rmsprop.check(lr=0.25, inv_scale=0.125)


@pytest.mark.parametrize("flag", ["found_inf", "noop_flag"])
def test_a_flagged_step_changes_nothing(device, flag):
    rmsprop = Rmsprop(device)
    rmsprop.launch(**{flag: device.full(1, 1, np.float32 if flag == "found_inf" else np.int32)})
    rmsprop.lists.check_untouched()
