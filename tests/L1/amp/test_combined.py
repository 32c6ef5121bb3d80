"""opt_level x combined tensors x optimizer, training on real digits: the same curves, and the same weights where the
formula is the same."""

from __future__ import annotations

import amp_runs as runs
import pytest
import torch
from test_cross_product import STEPS, digits, network
from torch import nn

from apex import amp, optimizers

OPTIMIZERS = {
    "SGD": (torch.optim.SGD, optimizers.FusedSGD, optimizers.CombinedSGD, dict(lr=0.02, momentum=0.9)),
    "AdamW": (
        torch.optim.AdamW,
        optimizers.FusedAdam,
        optimizers.CombinedAdamW,
        dict(lr=2e-3, eps=1e-4, weight_decay=0.01),
    ),
    "RMSprop": (torch.optim.RMSprop, None, optimizers.CombinedRMSprop, dict(lr=1e-3, momentum=0.5, eps=1e-4)),
    "Adadelta": (torch.optim.Adadelta, None, optimizers.CombinedAdadelta, dict(lr=0.5, eps=1e-4)),
}
# Rounding of half-precision arithmetic, which a last bit of a weight sets off.
AGREE = {"O1": 2e-2, "O2": 2e-2, "O4": 8e-2, "O5": 8e-2}
ACCUMULATE = {"every batch": 1, "two batches": 2}


def train(level, make, options, combine, accumulate):
    """(losses, weights): `accumulate` batches a step, and a batch whose gradient overflows among them."""
    runs.forget()
    model = network()
    model, optimizer = amp.initialize(
        model,
        make(model.parameters(), **options),
        opt_level=level,
        loss_scale="dynamic",
        dynamic_init_scale=2.0**10,
        scale_window=6,
        combine_grad=combine,
        check_combined_tensors=combine,
        verbosity=0,
    )
    losses = []
    for epoch in range(2):
        for step, (images, labels) in enumerate(zip(*digits(), strict=True)):
            if step % accumulate == 0:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            with amp.scale_loss(
                loss * (float("inf") if (epoch, step) == (0, 5) else 1), optimizer
            ) as scaled_loss:
                scaled_loss.backward()
            if step % accumulate == accumulate - 1:
                nn.utils.clip_grad_norm_(list(amp.master_params(optimizer)), 5.0)
                optimizer.step()
            losses.append(loss.item())
    assert runs.scaler().loss_scale() == 2.0**10 * 0.5 * 2.0 ** ((2 * STEPS - 6) // 6)
    return losses, runs.values(model)


@pytest.mark.parametrize("accumulate", ACCUMULATE)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("level", AGREE)
def test_curves(level, name, accumulate):
    torchs, fused, combined, options = OPTIMIZERS[name]
    found = []
    for make in filter(None, (torchs, fused, combined)):
        alone, together = (
            train(level, make, options, combine, ACCUMULATE[accumulate]) for combine in (None, True)
        )
        assert alone[0] == together[0] and runs.equal(alone[1], together[1])
        found.append(together)
    reference, _ = found[0]
    assert reference[-1] < 0.75 * reference[0]
    for losses, _ in found[1:]:
        assert losses == pytest.approx(reference, abs=AGREE[level])
