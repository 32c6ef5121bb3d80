"""The state of a sharded optimizer as a checkpoint, and back (_checkpoint.py has the two formats)."""

from __future__ import annotations

from typing import Any

import torch

from apex.contrib.optimizers import _checkpoint


class Saving:
    """Mixin of ShardedOptimizer, before torch's Optimizer; the optimizer makes these attributes."""

    device: Any
    state: Any
    param_groups: list[dict[str, Any]]
    dtype: torch.dtype
    capturable: bool
    with_scaled_states: bool
    grad_sync: Any
    param_sync: Any
    parameter: Any
    parameters: Any
    _ranks: Any
    _materialize: Any
    _check_strides: Any

    @torch.no_grad()
    def state_dict(
        self, *, state_dict_format: int | None = None, gather_on_root: bool | None = None
    ) -> dict[str, Any] | None:
        """The optimizer's state. Every rank must call it.

        state_dict_format: 2 (None): the same dict on every rank, with each parameter's "param", "exp_avg" and
        "exp_avg_sq" whole, shaped like it, on the CPU: fits any number of ranks and any options. 1: what this
        rank keeps, as it is; gather_on_root (None: True): all ranks' on the first one, None on the others.
        """
        if state_dict_format not in (None, 1, 2):
            raise ValueError(
                f"apex.contrib.optimizers: there is no state dict format {state_dict_format}: 1 or 2"
            )
        if gather_on_root is not None and state_dict_format != 1:
            raise ValueError("gather_on_root belongs to state_dict_format=1: format 2 is whole on every rank")
        self._materialize()
        self.grad_sync()
        self.param_sync()
        self._check_strides()
        state_dict = super().state_dict()  # type: ignore[misc]  # Optimizer's
        if state_dict_format == 1:
            if gather_on_root is None or gather_on_root:
                state_dict = _checkpoint.gather_bytes(state_dict, self._ranks)
            if state_dict is not None:
                state_dict["format"] = 1
            return state_dict
        params = list(self.parameters())
        whole = _checkpoint.gather(
            self.state["buckets"],
            params,
            self.parameter,
            self._ranks,
            torch.float32 if self.with_scaled_states else self.dtype,
        )
        keys = _checkpoint.check_groups(state_dict, self.param_groups)
        state_dict["state"] = {"step": self.state["step"], **dict(zip(keys, whole, strict=True))}
        return {**_checkpoint.without_aliases(state_dict), "format": 2}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes what state_dict() returned: format 2 into any number of ranks and options, format 1 as saved.

        Parameters get their values, too (format 2). Every rank must call it, and nothing is changed if one of
        these is raised:

        ValueError: the checkpoint is another optimizer's, or of other parameters. RuntimeError: format 1, saved
        with another number of ranks or other options.
        """
        form = state_dict.get("format")
        if form is None:
            form = 1 if "gathered_states" in state_dict or "buckets" in state_dict["state"] else 2
        if form not in (1, 2):
            raise ValueError(f"apex.contrib.optimizers: there is no state dict format {form}: 1 or 2")
        if form == 1:
            state_dict = _checkpoint.shard_of(state_dict, self._ranks)
            _checkpoint.check_groups(state_dict, self.param_groups)
        else:
            states = _checkpoint.check_whole(state_dict, self.param_groups)
        self._materialize()
        self.grad_sync()
        self.param_sync()
        self._check_strides()
        if form == 1:
            _checkpoint.load_shard(state_dict, self.state["buckets"])
        else:
            _checkpoint.scatter(states, self.state["buckets"], list(self.parameters()), self.parameter)
        _checkpoint.load_options(state_dict["param_groups"], self.param_groups)
        step = state_dict["state"]["step"]
        if self.capturable:
            self.state["step"].copy_(torch.as_tensor(step, dtype=torch.int32, device=self.device))
        else:
            self.state["step"] = int(step)
