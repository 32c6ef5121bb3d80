"""What both FP16_Optimizers are: an optimizer over float32 masters, its parameters, its checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from apex.amp._errors import warn


class MasterOptimizer:
    """Wraps an optimizer, in whose groups masters take the place of the model's parameters.

    Attributes:
        optimizer, state, param_groups: the wrapped optimizer and its own.
        verbose: print what happens.

    Raises:
        TypeError: no optimizer, or one that is wrapped already.
        ValueError: static_loss_scale is not above 0.
    """

    def __init__(
        self,
        init_optimizer: torch.optim.Optimizer,
        static_loss_scale: float,
        dynamic_loss_scale: bool,
        verbose: bool,
        instead: str,
    ) -> None:
        warn(f"FP16_Optimizer is of old: use {instead}", DeprecationWarning)
        if isinstance(init_optimizer, MasterOptimizer) or not hasattr(init_optimizer, "param_groups"):
            raise TypeError(f"FP16_Optimizer wraps an optimizer, not {type(init_optimizer).__name__}")
        if not (dynamic_loss_scale or 0.0 < static_loss_scale < float("inf")):
            raise ValueError(f"static_loss_scale must be a number above 0, not {static_loss_scale}")
        self.optimizer, self.verbose = init_optimizer, verbose
        self.dynamic_loss_scale = bool(dynamic_loss_scale)

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optimizer.param_groups = value

    # ---- masters -------------------------------------------------------------------------------------------

    def _take_masters(self):
        """`_adopt` for each group; then states get their masters' dtype."""
        for index, group in enumerate(self.optimizer.param_groups):
            self._adopt(index, group)
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def _adopt(self, index, group):
        """Puts masters into a group."""
        raise NotImplementedError

    def _master_of(self, param):
        """A new float32 master, with what the optimizer knew of the parameter."""
        master = param.detach().clone().float().requires_grad_()
        if param in self.optimizer.state:
            self.optimizer.state[master] = self.optimizer.state.pop(param)
        return master

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def _check_saved(self, state_dict, names, key, masters):
        """Raises ValueError for what is no state dict of this class, or of other masters; `key`: where they are."""
        missing = [name for name in names if name not in state_dict]
        if missing:
            raise ValueError(
                f"this is no state dict of FP16_Optimizer: it lacks {', '.join(missing)}. One of a bare optimizer, of "
                "master weights, is for FP16_Optimizer(...).optimizer.load_state_dict"
            )
        ours = [[tuple(p.shape) for p in group] for group in masters]
        saved = [[tuple(p.shape) for p in group] for group in state_dict[key]]
        if ours != saved:
            raise ValueError(
                "the checkpoint's master weights are another model's, or have other shapes: "
                f"{sum(map(len, saved))} of them in {len(saved)} groups, here {sum(map(len, ours))} in {len(ours)}"
            )

    @staticmethod
    def _load_masters(groups, saved_groups):
        with torch.no_grad():
            for masters, values in zip(groups, saved_groups, strict=True):
                for master, value in zip(masters, values, strict=True):
                    master.copy_(value)
