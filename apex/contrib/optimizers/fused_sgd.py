"""FusedSGD as public apex's contrib has it: FP16_Optimizer gives its step gradients and the model's parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import required

from apex._legacy import amp_C
from apex.contrib.optimizers._given import by_group, check_row
from apex.optimizers._amp_c import AmpCFunction, OverflowFlag
from apex.optimizers._arguments import check_arguments, check_numbers, evaluate
from apex.optimizers._kept_options import KeptOptions

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["FusedSGD"]


class FusedSGD(KeptOptions, torch.optim.Optimizer):
    """SGD over float32 masters, in one launch a group and kind of gradient.

        optimizer = FP16_Optimizer(FusedSGD(model.parameters(), lr=0.1, momentum=0.9), dynamic_loss_scale=True)

    New code: apex.optimizers.FusedSGD.

    Args:
        params: parameters, or dicts that define groups.
        lr, momentum, dampening, weight_decay, nesterov, wd_after_momentum: as in apex.optimizers.FusedSGD.
        materialize_master_grads: kept as an attribute; gradients are always those that step() is given.

    Raises ValueError for a number out of its bounds, and nesterov without momentum or with dampening.
    """

    multi_tensor_sgd = AmpCFunction()
    _dummy_overflow_buf = OverflowFlag()

    def __init__(
        self,
        params: ParamsT,
        lr: float = required,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
    ) -> None:
        given = {} if lr is required else {"lr": lr}
        check_arguments("FusedSGD", **given, momentum=momentum, weight_decay=weight_decay)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        self.wd_after_momentum = wd_after_momentum
        self.materialize_master_grads = materialize_master_grads
        defaults = dict(
            lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov
        )
        super().__init__(params, defaults)

    def __setstate__(self, state):
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("nesterov", False)

    def get_momentums(self, params: Iterable[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
        """Momentum buffers of these parameters, made where there is none, and whether all are new."""
        params = list(params)
        first_run = all("momentum_buffer" not in self.state[p] for p in params)
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return [self.state[p]["momentum_buffer"] for p in params], first_run

    @torch._disable_dynamo
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        grads: Sequence | None = None,
        output_params: Sequence | None = None,
        scale: float = 1.0,
        grad_norms: Sequence | None = None,
    ) -> Any:
        """One update of every parameter that is given a gradient; returns what `closure`, if given, returns.

        grads, output_params: of every parameter, in a list a group (or one list): its gradient (None: it stays), and
        the model's parameter, which receives its value. scale: gradients are divided by it. grad_norms is not read.

        Before anything is changed, raises RuntimeError without grads and output_params, for a sparse gradient, and
        under apex.amp; ValueError and TypeError for lists and tensors that do not fit.
        """
        if hasattr(self, "_amp_stash"):
            raise RuntimeError(
                "apex.contrib.optimizers.FusedSGD takes no part in apex.amp: use apex.optimizers.FusedSGD"
            )
        loss = evaluate(closure)
        if grads is None or output_params is None:
            raise RuntimeError(
                "apex.contrib.optimizers.FusedSGD is given grads and output_params by "
                "apex.contrib.optimizers.FP16_Optimizer: wrap it, or use apex.optimizers.FusedSGD"
            )
        grads = by_group(grads, self.param_groups, "gradients")
        outputs = by_group(output_params, self.param_groups, "output_params")
        for index, group in enumerate(self.param_groups):
            check_numbers("FusedSGD", index, group)
        work = [
            (group, self._kinds(group, own, copies))
            for group, own, copies in zip(self.param_groups, grads, outputs, strict=True)
        ]
        for group, kinds in work:
            self._step_group(group, kinds, scale)
        return loss

    def _kinds(self, group, grads, outputs):
        """(a first step, the kernel writes the model's) -> [(gradient, parameter, the model's)]."""
        kinds: dict[Any, list] = {}
        for p, grad, output in zip(group["params"], grads, outputs, strict=True):
            if grad is None:
                continue
            if output is None:
                raise ValueError(
                    "FusedSGD: output_params has None for a parameter with a gradient: give one for each"
                )
            state = self.state.get(p, {})
            new = "momentum_buffer" not in state
            check_row("FusedSGD", p, grad, output, () if new else (state["momentum_buffer"],))
            halves = output.dtype == grad.dtype and output.dtype in (torch.float16, torch.bfloat16)
            kinds.setdefault((new, halves), []).append((grad, p, output))
        return kinds

    def _step_group(self, group, kinds, scale):
        for (new, halves), rows in kinds.items():
            given, params, copies = map(list, zip(*rows, strict=True))
            momentums, _ = self.get_momentums(params)
            values = [p.detach() for p in params]
            copies = [copy.detach() for copy in copies]
            amp_C.multi_tensor_sgd(
                0, None, [given, values, momentums, *([copies] if halves else [])], group["weight_decay"],
                group["momentum"], group["dampening"], float(group["lr"]), group["nesterov"], new,
                self.wd_after_momentum, 1.0 / scale,
            )  # fmt: skip
            if not halves:
                torch._foreach_copy_(copies, values)
