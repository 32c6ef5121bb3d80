"""Checkpoints that go to torch.optim and come from there, where each parameter has a step count of its own."""

from __future__ import annotations

import torch

from apex.optimizers._capturable import counted_by

LAG = "step_lag"


class OwnSteps:
    """Mixin, before Capturable. A state dict holds public apex's count, `step` of a group, and torch's, of a parameter.

    A parameter that had made fewer steps than others of its group where torch saved it keeps its distance: `step_lag`
    in its state (of a group, while there is no state) is subtracted from the group's count. Those of one distance are
    updated together.
    """

    count_names: tuple[str, ...] = ("step", LAG)
    _lagging = False  # whether a parameter has a step_lag

    def state_dict(self):
        """As torch's; with `step`, a float32 tensor without dimensions, in the state of each parameter too."""
        saved = super().state_dict()
        for group, packed in zip(self.param_groups, saved["param_groups"], strict=True):
            for place, (p, key) in enumerate(zip(group["params"], packed["params"], strict=True)):
                lag = self._lag(p)
                if self._has_state(p):
                    saved["state"][key] = {**saved["state"][key], "step": _own(group.get("step", 0), lag)}
                elif lag:  # torch takes any state for a whole one
                    del saved["state"][key]
                    packed.setdefault(LAG, {})[place] = lag
        return saved

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self._note_lags()

    def __setstate__(self, state):
        super().__setstate__(state)
        self._note_lags()

    def _note_lags(self):
        self._lagging = any(LAG in state for state in self.state.values())

    def _load_step(self, index, group):
        own = {p: self.state[p].pop("step") for p in group["params"] if "step" in self.state.get(p, ())}
        waiting = group.pop(LAG, {})  # of parameters without a state: place in the group -> lag
        # torch's groups have "foreach"; they may hold a step from before torch went on.
        if not own or ("step" in group and "foreach" not in group):
            for place, lag in waiting.items():
                self.state[group["params"][place]][LAG] = lag
            return
        counts = {p: int(step) for p, step in own.items()}
        group["step"] = max(counts.values())
        for p in group["params"]:
            lag = group["step"] - counts.get(p, 0)
            if lag:
                self.state[p][LAG] = lag
            else:
                self.state[p].pop(LAG, None)

    # ---- plans: one for each distance --------------------------------------------------------------------

    def _has_state(self, p):
        return any(name not in self.count_names for name in self.state.get(p, ()))

    def _lag(self, p):
        return self.state.get(p, {}).get(LAG, 0)

    def _parts(self, index):
        lags = {self._lag(p) for p in self.param_groups[index]["params"]} if self._lagging else {0}
        return (index,) if lags == {0} else tuple((index, lag) for lag in sorted(lags))

    def _group(self, index):
        if not isinstance(index, tuple):
            return super()._group(index)
        group = super()._group(index[0])
        return {**group, "params": [p for p in group["params"] if self._lag(p) == index[1]]}

    def _joined(self, index, plans):
        parts = self._parts(index)
        if parts == (index,):
            return plans[0]
        return _Plans([(lag, plan) for (_, lag), plan in zip(parts, plans, strict=True)])


class _Plans:
    """Several plans as one; each is told its own step."""

    def __init__(self, plans):
        self._plans = plans
        self.shards = [pair for _, plan in plans for pair in plan.shards or ()] or None

    def run(self, op, step, step_tensor=None, advance_step=False, **scalars):
        if step_tensor is None:
            return sum(plan.run(op, step=max(step - lag, 1), **scalars) for lag, plan in self._plans)
        following = step_tensor
        if advance_step:
            following = step_tensor + counted_by(scalars.get("found_inf"))
        launches = 0
        for lag, plan in self._plans:
            own = (following - lag).clamp_(min=1)
            launches += plan.run(op, step=0, step_tensor=own, advance_step=False, **scalars)
        if advance_step and launches:
            step_tensor.copy_(following)
        return launches


def _own(step, lag):
    if isinstance(step, torch.Tensor):
        return (step - lag).to(torch.float32).reshape(())
    return torch.tensor(float(step - lag), dtype=torch.float32, device="cpu")
