"""LAMB on this rank's shards: moments and updates, the norms of whole parameters over all ranks, then the step."""

from __future__ import annotations

import torch

from apex import _loader
from apex._bits import to_e5m2
from apex.optimizers._scalars import learning_rate


class Fragments:
    """The local fragments whose parameters are updated, group by group, and what does not change from step to step.

    Args:
        buckets: all StateBuckets.
        place: parameter's (group, place in the group) -> its number among all parameters.
        is_updated: fragment -> whether its parameter is.
        device: where they are.

    Attributes:
        of_group: {group: [(number of the bucket, slice of its shard)]}.
        parameters: {group: int64 tensor, the number of each fragment's parameter}.
        count: of parameters.
    """

    def __init__(self, buckets, place, is_updated, device):
        self.count = len(place)
        self.of_group = {}
        numbers = {}
        for number, bucket in enumerate(buckets):
            for fragment in bucket.local_fragments:
                if is_updated(fragment):
                    group = fragment.param_group_id
                    self.of_group.setdefault(group, []).append((number, slice(*fragment.shard_range)))
                    numbers.setdefault(group, []).append(place[group, fragment.param_id])
        self.parameters = {
            group: torch.tensor(found, dtype=torch.int64, device=device) for group, found in numbers.items()
        }
        order = [number for found in numbers.values() for number in found]
        self._table = _table(order, self.count, device)

    def sums(self, of_fragments):
        """(k, fragments, in the order of the groups) -> (k, parameters): sums, in one order at every step."""
        padded = torch.cat([of_fragments, of_fragments.new_zeros(of_fragments.size(0), 1)], dim=1)
        return padded[:, self._table].sum(-1)


def _table(order, count, device):
    """(parameters, most fragments of one): places in `order` where the parameter stands, and len(order) beyond them."""
    places = [[] for _ in range(count)]
    for place, number in enumerate(order):
        places[number].append(place)
    most = max(map(len, places), default=0)
    rows = [row + [len(order)] * (most - len(row)) for row in places]
    return torch.tensor(rows, dtype=torch.int64, device=device).view(count, most)


class LocalLamb:
    """One step of all buckets, whose state is float32.

    Args:
        optimizer: DistributedFusedLAMB.
        fragments: Fragments.
        inv_scale: float32 tensor of one element: gradients are multiplied by it.
        norm: float32 tensor of one element, of all gradients times inv_scale.
        max_norm: gradients are scaled down to this norm; 0: never.
        found_inf: float32 tensor of one element: not 0: nothing is to change.
    """

    def __init__(self, optimizer, fragments, inv_scale, norm, max_norm, found_inf):
        _loader.load()
        self._o, self._fragments = optimizer, fragments
        self._inv_scale, self._norm, self._max_norm, self._found_inf = inv_scale, norm, max_norm, found_inf
        # Of all groups, on every rank: what raises does so before anything is updated, and on all ranks alike.
        self._options = [self._options_of(group) for group in optimizer.param_groups]

    def update(self, buckets, gradients, copies):
        """Updates buckets, and returns this rank's shard of each as it is to be sent.

        gradients: this rank's shard of each bucket's. copies: of the shard of parameters, in half precision, which the
        step updates with it, or None.
        """
        updates = [torch.empty_like(bucket.params_shard) for bucket in buckets]
        rows = {
            group: [
                [shards[number][part] for number, part in fragments]
                for shards in (
                    gradients,
                    [b.params_shard for b in buckets],
                    [b.exp_avg_shard for b in buckets],
                    [b.exp_avg_sq_shard for b in buckets],
                    updates,
                )
            ]
            for group, fragments in self._fragments.of_group.items()
        }
        norms = self._norms(self._moments(rows))
        for group, lists in rows.items():
            self._apply(group, lists, norms, copies)
        return [_sent(bucket, copy) for bucket, copy in zip(buckets, copies, strict=True)]

    def _options_of(self, group):
        beta1, beta2 = map(float, group["betas"])
        moments = dict(
            beta1=beta1, beta2=beta2, eps=float(group["eps"]), bias_correction=bool(group["bias_correction"]),
            grad_averaging=bool(group["grad_averaging"]),
        )  # fmt: skip
        return moments, float(group["weight_decay"]), learning_rate(group, self._o.device, kept_there=True)

    def _moments(self, rows):
        """Updates the averages. Returns (2, fragments): the norms of parameters and of updates; 0 where nothing is to
        change."""
        counts = [len(lists[0]) for lists in rows.values()]
        norms = torch.zeros(2, sum(counts), dtype=torch.float32, device=self._o.device)
        for (group, lists), (of_params, of_updates) in zip(
            rows.items(), norms.split(counts, dim=1), strict=True
        ):
            moments, decay, _ = self._options[group]
            torch.ops.apex.multi_tensor_lamb_stage1(
                *lists, torch.full_like(of_params, decay), 0, global_grad_norm=self._norm,
                max_global_grad_norm=self._max_norm, decay_mode=int(self._o.adam_w_mode),
                step_tensor=self._o.state["step"], inv_scale=self._inv_scale, found_inf=self._found_inf,
                per_tensor_param_norm=of_params, per_tensor_update_norm=of_updates, **moments,
            )  # fmt: skip
        return norms

    def _norms(self, of_fragments):
        """(2, parameters): of whole parameters, and of their updates."""
        found = self._fragments.sums(of_fragments.square_())
        self._o._ranks.sum_over_shards(found)
        return found.sqrt_()

    def _apply(self, group, lists, norms, of_buckets):
        _, decay, rate = self._options[group]
        fragments = self._fragments.of_group[group]
        of_fragments = norms[:, self._fragments.parameters[group]]
        kinds = {}
        for place, (number, _) in enumerate(fragments):
            kinds.setdefault(of_buckets[number] is not None, []).append(place)
        for has_copies, places in kinds.items():
            chosen = of_fragments if len(kinds) == 1 else of_fragments[:, places]
            copies = [of_buckets[fragments[i][0]][fragments[i][1]] for i in places] if has_copies else []
            torch.ops.apex.multi_tensor_lamb_stage2(
                [lists[1][i] for i in places], [lists[4][i] for i in places], copies, *chosen.contiguous().unbind(),
                rate["lr"], decay, self._o.use_nvlamb, lr_tensor=rate["lr_tensor"], found_inf=self._found_inf,
            )  # fmt: skip


def copy_of(bucket, target):
    """What the step keeps a half-precision copy of the parameters in, to be sent; None: it is another dtype.

    target: where it lies if the parameters are gathered in place, or None.
    """
    if bucket.param_sync_dtype not in (torch.float16, torch.bfloat16):
        return None
    if target is None:
        target = torch.empty_like(bucket.params_shard, dtype=bucket.param_sync_dtype)
    return target.copy_(bucket.params_shard)


def _sent(bucket, copy):
    if copy is not None:
        return copy
    return to_e5m2(bucket.params_shard) if bucket.param_sync_dtype == torch.uint8 else bucket.params_shard
