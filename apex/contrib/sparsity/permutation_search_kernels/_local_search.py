"""Local search: the best order within a few stripes (four columns each) at a time, until no few can be improved."""

from __future__ import annotations

import dataclasses
import operator
import time

import torch

from apex.contrib.sparsity.permutation_search_kernels import _magnitudes

# Improvements below this fraction of what a group keeps are rounding.
_ROUNDING = 4e-6


@dataclasses.dataclass
class _Order:
    """An order of columns, and what every group of stripes would gain by its best order."""

    columns: torch.Tensor
    groups: torch.Tensor
    orders: torch.Tensor
    stripes: torch.Tensor  # [stripes, 4]: the order itself
    gains: torch.Tensor
    choices: torch.Tensor
    threshold: float = 0.0

    def update(self, changed):
        """Evaluates the groups with a changed stripe anew. changed: bool [stripes]."""
        need = changed[self.groups].any(1).nonzero().flatten()
        chosen = self.stripes[self.groups[need]].flatten(1).to(torch.int32)
        gains, which, base = _magnitudes.best_orders(
            self.columns, chosen.to(self.columns.device), self.orders
        )
        least = (base * _ROUNDING).clamp(min=self.threshold)
        # "not above", rather than "below": a comparison with NaN is false.
        self.gains[need], self.choices[need] = gains.masked_fill(~(gains > least), 0), which

    def apply(self, group, order):
        stripes = self.groups[group]
        self.stripes[stripes] = self.stripes[stripes].flatten()[order].view(-1, 4)
        return stripes

    def improve(self):
        """Takes the groups from the largest gain on, those that share no stripe; bool [stripes], which changed."""
        changed = torch.zeros(len(self.stripes), dtype=torch.bool, device="cpu")
        positive = self.gains.nonzero().flatten()
        by_gain = positive[torch.argsort(self.gains[positive], descending=True, stable=True)]
        taken: set[int] = set()
        picked = []
        for group, stripes in zip(by_gain.tolist(), self.groups[by_gain].tolist(), strict=True):
            if taken.isdisjoint(stripes):
                taken.update(stripes)
                picked.append(group)
                if len(taken) + len(stripes) > len(self.stripes):
                    break
        for group in picked:
            changed[self.apply(group, self.orders[self.choices[group]])] = True
        return changed

    def disturb(self):
        """Swaps two columns of a random group, of different stripes; bool [stripes], which changed."""
        pick = _magnitudes.generator.randrange
        order = self.orders[0].clone()
        half = len(order) // 2
        one, two = pick(half), half + pick(half)
        order[[one, two]] = order[[two, one]]
        changed = torch.zeros(len(self.stripes), dtype=torch.bool, device="cpu")
        changed[self.apply(pick(len(self.groups)), order)] = True
        return changed

    def total(self):
        return _magnitudes.kept_magnitude(self.columns[self.stripes.flatten().to(self.columns.device)].t())


def local_search(
    matrix: torch.Tensor,
    orders: torch.Tensor,
    escape_attempts: int = 0,
    time_limit: float = float("inf"),
    threshold: float = 0.0,
) -> list[int]:
    """A good order of the matrix's columns.

    Groups of stripes get the best of `orders`, those of largest gain first, until none has a gain. Then, so many
    times, two columns are swapped at random and the search goes on from there; of all orders found the best remains.

    Args:
        matrix: [rows, columns], a multiple of 4 columns and more than one group.
        orders: int64 [orders, 8 or 12], how a group's columns may be ordered; the first changes nothing.
        time_limit: seconds; what has been found by then is returned.
        threshold: gains that are no larger are none.

    Raises ValueError, TypeError for escape_attempts that are no number of times.
    """
    if operator.index(escape_attempts) < 0:
        raise ValueError(f"escape_attempts is how many times the search goes on, not {escape_attempts}")
    matrix = _magnitudes.summable(matrix)
    stripes = torch.arange(matrix.shape[1], dtype=torch.int64, device="cpu").view(-1, 4)
    each = torch.arange(len(stripes), dtype=torch.int64, device="cpu")
    groups = torch.combinations(each, orders.shape[1] // 4)
    gains = torch.zeros(len(groups), dtype=torch.float32, device="cpu")
    choices = torch.zeros(len(groups), dtype=torch.int64, device="cpu")
    now = _Order(_magnitudes.columns_of(matrix), groups, orders, stripes, gains, choices, threshold)
    end = time.perf_counter() + time_limit
    changed = torch.ones(len(stripes), dtype=torch.bool, device="cpu")
    best, most = stripes.clone(), now.total()
    attempts = 0
    while time.perf_counter() < end:
        now.update(changed)
        changed = now.improve()
        if changed.any():
            continue
        total = now.total()
        if total > most:
            best, most = now.stripes.clone(), total
        elif attempts:
            changed = (now.stripes != best).any(1)  # the disturbance did not help
            now.stripes.copy_(best)
        if attempts >= escape_attempts:
            break
        attempts += 1
        changed |= now.disturb()
    return (now.stripes if now.total() > most else best).flatten().tolist()
