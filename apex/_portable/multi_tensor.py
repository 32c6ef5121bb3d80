"""The ops over lists of tensors: what csrc/bindings/multi_tensor_*.h write by hand of each."""

from __future__ import annotations

import functools

import torch

from apex._loader import registry
from apex._portable import tensors
from apex._portable.list_op import ListOp, PerTensor, Running


class Lamb(ListOp):
    extra = ("global_grad_norm",)

    def more(self, call, launch, kept):
        norm = _on(call["global_grad_norm"], launch.device)
        kept.append(norm)
        return (tensors.scalar(norm, "global_grad_norm", torch.float32, launch.device),)

    def before_reference(self, call, launch, kept):
        call = super().before_reference(call, launch, kept)
        return {**call, "global_grad_norm": _on(call["global_grad_norm"], launch.device)}


def _on(norm, device):
    """The norm of all gradients was measured on one device; a group may have parameters on others."""
    return norm if norm is None or norm.device == device else norm.to(device, non_blocking=True)


class LambStage1(ListOp):
    def check_more(self, call):
        names = ("beta1", "beta2", "gradient_share", "eps", "bias_correction")
        if len({call[f"per_tensor_{name}"] is None for name in names}) > 1:
            raise ValueError(
                "multi_tensor_lamb_stage1: per_tensor_beta1, _beta2, _gradient_share, _eps and _bias_correction go "
                "together"
            )
        if (call["per_tensor_param_norm"] is None) != (call["per_tensor_update_norm"] is None):
            raise ValueError(
                "multi_tensor_lamb_stage1: per_tensor_param_norm and per_tensor_update_norm go together"
            )


class ReversibleAdam(ListOp):
    def check_more(self, call):
        if call["scale"] == 0:
            raise ValueError("multi_tensor_reversible_adam: gradients are divided by scale, which is 0")
        left = call["beta1"] > 0 and call["beta2"] > 0 and call["step_size"] * call["weight_decay"] != 1
        if call["undo"] and not left:
            raise ValueError(
                "multi_tensor_reversible_adam: nothing is left to undo a step from where a beta is 0, or step_size * "
                "weight_decay is 1"
            )


class Lars(ListOp):
    def check_more(self, call):
        if (call["grad_norms"] is None) != (call["param_norms"] is None):
            raise ValueError("multi_tensor_lars: norms of gradients and parameters go together")


class Novograd(ListOp):
    def check_more(self, call):
        if call["moment_mode"] not in (0, 1):
            raise ValueError(
                "multi_tensor_novograd: moment_mode is 0 (decay inside the average) or 1 (decoupled), not "
                f"{call['moment_mode']}"
            )
        if call["norm_type"] not in (0, 2):
            raise ValueError(
                f"multi_tensor_novograd: norm_type is 2 (L2) or 0 (largest magnitude), not {call['norm_type']}"
            )
        if not call["update_norms"] and call["advance_step"]:
            raise ValueError("multi_tensor_novograd: only a call that updates the norms advances the step")


class Sgd(ListOp):
    def chosen(self, call, given):
        names, lists = ["grads", "params"], [given["grads"], given["params"]]
        if call["momentum"] != 0 or given["model_params"]:  # else the buffers are neither read nor written
            if not given["momentums"] and given["grads"]:
                more = " and model parameters" if given["model_params"] else ""
                raise ValueError(
                    f"multi_tensor_sgd: momentum buffers are required, for momentum {call['momentum']:g}{more}"
                )
            names, lists = [*names, "momentums"], [*lists, given["momentums"]]
        if given["model_params"]:
            names, lists = [*names, "model_params"], [*lists, given["model_params"]]
        return names, lists


class Axpby(ListOp):
    def check_more(self, call):
        if not -1 <= call["arg_to_check"] <= 1:
            raise ValueError(
                f"multi_tensor_axpby: arg_to_check is 0 (x), 1 (y) or -1 (both), not {call['arg_to_check']}"
            )


class Rmsprop(ListOp):
    extra = ("centered",)

    @staticmethod
    def _centered(call, lists):
        return lists > (4 if call["momentum"] != 0 else 3)

    def more(self, call, launch, kept):
        return (self._centered(call, launch.list_count),)

    def place_lists(self, call, lists):
        named = dict(zip(self.lists[:3], lists, strict=False))
        if self._centered(call, len(lists)):
            named["grad_avgs"] = lists[3]
        if call["momentum"] != 0:
            named["momentums"] = lists[-1]
        return named

    def chosen(self, call, given):
        names = self.lists[:3]
        if given["grad_avgs"]:
            names = [*names, "grad_avgs"]
        if call["momentum"] != 0:  # else the buffers are neither read nor written
            if not given["momentums"] and given["grads"]:
                raise ValueError(
                    f"multi_tensor_rmsprop: momentum buffers are required, for momentum {call['momentum']:g}"
                )
            names = [*names, "momentums"]
        return names, [given[name] for name in names]


class L2norm(ListOp):
    def run_on(self, names, lists, call):
        if lists[0]:
            super().run_on(names, lists, call)
        else:
            self._of_nothing(call)

    def step(self, plan, call):
        plan.run(self.on(call))
        if plan.launches == 0:
            self._of_nothing(call)

    @staticmethod
    def _of_nothing(call):
        """The norm of no tensors at all."""
        call["total"].zero_()
        if call["clip_coefficient"] is not None:
            call["clip_coefficient"].fill_(1.0)

    def on(self, call):
        return _MeasuringNorm(self, call)


class _MeasuringNorm(Running):
    def reference(self, lists, launch):
        call, total, clip = self.call, self.call["total"], self.call["clip_coefficient"]
        results = PerTensor(call["per_tensor"], launch, "per_tensor")
        # A raised flag leaves its outputs as they are: the first bucket's is `total` itself, a later one's adds 0.
        of_bucket = total if launch.first else torch.zeros_like(total)
        watch = launch.last and not launch.first and clip is not None
        flag = call["noop_flag"] if watch and call["check_noop"] else None
        skipped = None if flag is None else flag.ne(0)
        alone = launch.first and launch.last
        scalars = call | {
            "total": of_bucket, "per_tensor": results.bucket, "clip_coefficient": clip if alone else None
        }  # fmt: skip
        torch.ops.apex_reference.multi_tensor_l2norm(lists[0], **scalars)
        results.write_back()
        if not launch.first:
            total.copy_(total.maximum(of_bucket) if call["maximum"] else total.hypot(of_bucket))
        if watch:
            factor = total.add(1e-6).reciprocal().mul(call["max_norm"]).clamp_max(1.0).view_as(clip)
            clip.copy_(factor if skipped is None else factor.where(~skipped.view_as(factor), clip))


_CLASSES = {
    "multi_tensor_lamb": Lamb, "multi_tensor_lamb_stage1": LambStage1, "multi_tensor_lars": Lars,
    "multi_tensor_reversible_adam": ReversibleAdam,
    "multi_tensor_novograd": Novograd, "multi_tensor_sgd": Sgd, "multi_tensor_axpby": Axpby,
    "multi_tensor_rmsprop": Rmsprop, "multi_tensor_l2norm": L2norm,
}  # fmt: skip


def names():
    """The ops over lists of tensors."""
    return [name for name, op in registry.schemas().items() if op.lists and op.launch]


@functools.cache
def op(name):
    """The ListOp of that name."""
    return _CLASSES.get(name, ListOp)(name)
