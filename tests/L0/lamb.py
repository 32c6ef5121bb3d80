"""LAMB in float64, by You et al. 2019 (arXiv:1904.00962), algorithm 2, with public apex's clipping."""

from __future__ import annotations

import lists
import torch

DEFAULTS = dict(
    lr=0.05, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, adam_w_mode=True, grad_averaging=True,
    bias_correction=True, max_grad_norm=1.0, use_nvlamb=False,
)  # fmt: skip


def update(state, p, g, clip, step, options):
    """The parameter after one step. state: a dict that holds m and v from step to step."""
    o = DEFAULTS | options
    beta1, beta2 = o["betas"]
    g = g * clip + (0.0 if o["adam_w_mode"] else o["weight_decay"]) * p
    state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1 if o["grad_averaging"] else 1.0) * g
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g * g
    c1, c2 = (1 - beta1**step, 1 - beta2**step) if o["bias_correction"] else (1.0, 1.0)
    u = (state["m"] / c1) / ((state["v"] / c2).sqrt() + o["eps"])
    u = u + (o["weight_decay"] if o["adam_w_mode"] else 0.0) * p
    p_norm, u_norm = p.norm().item(), u.norm().item()
    scaled = (o["use_nvlamb"] or o["weight_decay"] != 0) and p_norm and u_norm
    return p - o["lr"] * (p_norm / u_norm if scaled else 1.0) * u


class Oracle:
    """Steps all twins together: they share the norm by which gradients are clipped."""

    def __init__(self, groups):
        self.groups = groups  # [(twins, options), ...]
        self.states = [[{} for _ in twins] for twins, _ in groups]
        self.steps = 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        gradients = [t.grad for twins, _ in self.groups for t in twins if t.grad is not None]
        limit = (DEFAULTS | self.groups[0][1])["max_grad_norm"]
        norm = lists.norm(gradients)
        clip = limit / norm if limit and norm > limit else 1.0
        for (twins, options), states in zip(self.groups, self.states, strict=True):
            for twin, state in zip(twins, states, strict=True):
                if twin.grad is not None:
                    twin.copy_(update(state, twin.detach().clone(), twin.grad, clip, self.steps, options))
