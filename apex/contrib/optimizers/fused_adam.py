"""FusedAdam as public apex had it first: its step takes gradients, copies of parameters and a loss scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from apex._legacy import fused_adam_cuda
from apex.contrib.optimizers._given import by_group, check_row
from apex.optimizers._arguments import check_arguments, check_numbers, evaluate
from apex.optimizers._kept_options import KeptOptions

if TYPE_CHECKING:
    from torch.optim.optimizer import ParamsT

__all__ = ["FusedAdam"]


class FusedAdam(KeptOptions, torch.optim.Optimizer):
    """Adam with decoupled weight decay over float32 parameters, in one launch a group.

        optimizer = FusedAdam(masters, lr=1e-3)
        optimizer.step(grads=gradients, output_params=model_parameters, scale=loss_scale)

    It is of old: FP16_Optimizer of this package wraps it. New code: apex.optimizers.FusedAdam. It differs from that
    one: eps is not corrected with the averages, and weight decay takes part in the correction of the step's size.

    Args:
        params: parameters (float32 or float64), or dicts that define groups.
        lr, bias_correction, betas, eps, weight_decay: as in apex.optimizers.FusedAdam.
        eps_inside_sqrt: eps is added under the square root.
        max_grad_norm: gradients of a group are scaled down to this norm by step(grad_norms=...); 0: never.
        amsgrad: must be False.
        use_mt: changes nothing: a group is always one launch.
        amp_scale_adjustment: kept as an attribute; apex.amp scales by itself.

    Raises:
        RuntimeError: amsgrad.
        ValueError: a number out of its bounds.
    """

    _saved_options = ("_amp_scale_adjustment",)

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        bounds = dict(lr=lr, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
        check_arguments("FusedAdam", amsgrad=amsgrad, betas=betas, **bounds)
        self.eps_mode = 0 if eps_inside_sqrt else 1
        self._amp_scale_adjustment = amp_scale_adjustment
        super().__init__(params, dict(bounds, bias_correction=bias_correction, betas=betas))

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
        """One update of every parameter that has a gradient; returns what `closure`, if given, returns.

        grads: gradients, in a list a group (or one list), None among them: such a parameter's own, if it has one.
        float16, bfloat16 or the parameter's dtype. output_params: tensors that receive the parameters, likewise.
        scale: gradients are divided by it. grad_norms: norms of the groups' gradients as they come, for max_grad_norm,
        each a number, or a tensor, for which the host waits.

        Before anything is changed, raises ValueError for lists and tensors that do not fit, or max_grad_norm without
        grad_norms; RuntimeError for a sparse gradient; TypeError for dtypes that do not go together.
        """
        loss = evaluate(closure)
        grads = by_group(grads, self.param_groups, "gradients")
        outputs = by_group(output_params, self.param_groups, "output_params")
        norms = [None] * len(self.param_groups) if grad_norms is None else list(grad_norms)
        work = []
        for index, (group, own, copies, norm) in enumerate(
            zip(self.param_groups, grads, outputs, norms, strict=True)
        ):
            check_numbers("FusedAdam", index, group)
            divisor = scale * _clip(group["max_grad_norm"], norm, scale)
            work.append((group, self._lists(group, own, copies), divisor))
        for of_group in work:
            self._step_group(*of_group)
        return loss

    def _step_group(self, group, lists_of, scale):
        beta1, beta2 = group["betas"]
        for step, lists in lists_of.items():
            columns = list(map(list, zip(*lists, strict=True)))
            self.state.update(zip(columns[5], columns[6], strict=True))
            with_copies = any(copy is not None for copy in columns[4])
            copies = [columns[4]] if with_copies else []
            fused_adam_cuda.adam_mt(
                0, None, [*columns[:4], *copies], float(group["lr"]), beta1, beta2, group["eps"], scale, step[0],
                self.eps_mode, group["bias_correction"], group["weight_decay"],
            )  # fmt: skip
            for p in columns[5]:
                self.state[p]["step"] = step[0]

    def _lists(self, group, grads, outputs):
        """(the step's number, whether with copies) -> [(value, exp_avg, exp_avg_sq, gradient, copy, parameter, state)].

        grads, outputs: one, or None, a parameter. A new state is kept once its step runs.
        """
        found = {}
        for p, grad, output in zip(group["params"], grads, outputs, strict=True):
            grad = p.grad if grad is None else grad
            if grad is None:
                continue
            state = self.state.get(p) or dict(
                step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p)
            )
            check_row("FusedAdam", p, grad, output, (state["exp_avg"], state["exp_avg_sq"]))
            row = p.detach(), state["exp_avg"], state["exp_avg_sq"], grad.detach()
            row = *row, None if output is None else output.detach(), p, state
            found.setdefault((int(state["step"]) + 1, output is not None), []).append(row)
        return found


def _clip(limit, norm, scale):
    """What gradients are divided by beside the scale."""
    if not limit > 0:
        return 1.0
    if norm is None:
        raise ValueError("FusedAdam: max_grad_norm needs grad_norms in step(): one norm a group")
    return max((float(norm) / scale + 1e-6) / limit, 1.0)
