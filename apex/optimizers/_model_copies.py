"""Under amp's master weights: the optimizer's own launch writes the model's parameters too."""

from __future__ import annotations

import itertools

from apex._sharding import is_sharded


class ModelCopies:
    """Mixin, before FusedOptimizer, of optimizers whose op takes a last list: copies of parameters, rounded.

    Where amp put master weights into the groups, the copies are the model's half-precision parameters, and amp
    has nothing to copy after a step (`writes_models`). Other parameters of a group are without copy.
    """

    def writes_models(self):
        """Whether the last step gave the model all that its master weights hold."""
        indices = [index for index, group in enumerate(self.param_groups) if group["params"]]
        keys = [self._plan_key(part) for index in indices for part in self._parts(index)]
        return all(key in self._plans and self._plans[key][1].writes_models for key in keys)

    def _behind(self, params):
        """The model's parameter behind each of these that is a master weight of amp's, None for the others."""
        stash = getattr(self, "_amp_stash", None)
        masters = itertools.chain.from_iterable(getattr(stash, "fp32_from_fp16_groups", ()))
        models = itertools.chain.from_iterable(getattr(stash, "fp16_groups", ()))
        model_of = {id(master): model for master, model in zip(masters, models, strict=True)}
        return [model_of.get(id(p)) for p in params]

    def _models(self, params, group):
        """The op's last list; None if it is to have none.

        Elements are matched by position in memory: models that no longer lie as their masters do are left to amp.
        """
        models = self._behind(params)
        pairs = [(p, model) for p, model in zip(params, models, strict=True) if model is not None]
        fit = all(p.stride() == model.stride() and not is_sharded(p) for p, model in pairs)
        return models if pairs and fit else None

    # ---- what FusedOptimizer makes its plans of ----------------------------------------------------------

    def _make_plan(self, index):
        plan = super()._make_plan(index)
        group = self._group(index)
        written = {id(model) for model in self._models(group["params"], group) or ()}
        behind = self._behind(group["params"])
        plan.writes_models = all(model is None or id(model) in written for model in behind)
        return plan

    def _lists(self, params, group):
        lists, models = super()._lists(params, group), self._models(params, group)
        return lists if models is None else [*lists, models]

    def _list_names(self, params, group):
        names = super()._list_names(params, group)
        return names if self._models(params, group) is None else (*names, "model parameter")

    def _written(self, group):
        return super()._written(group) | 1 << len(self._states(group)) + 2  # the models, where there are
