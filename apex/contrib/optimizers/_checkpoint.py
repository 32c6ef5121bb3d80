"""State dicts of a sharded optimizer: format 2, whole and the same for any number of ranks; format 1, shards."""

from __future__ import annotations

import copy
import io

import torch
import torch.distributed as dist

from apex._bits import split_remainders
from apex.contrib.optimizers import _states
from apex.contrib.optimizers._buckets import ParameterFragment, StateBucket
from apex.contrib.optimizers._flat import flat, flat_like
from apex.contrib.optimizers._ranks import waiting_for_ranks

NAMES = ("param", *_states.MOMENTS)
torch.serialization.add_safe_globals([StateBucket, ParameterFragment])  # format 1 has them in it


# ---- format 2: each state as a whole, on the CPU --------------------------------------------------------


def gather(buckets, params, parameter_of, ranks, dtype):
    """[{name: tensor shaped like the parameter, on the CPU}] of all parameters. Every rank must call it.

    parameter_of: fragment -> parameter.
    """
    found = [{name: torch.empty_like(p, dtype=dtype, device="cpu") for name in NAMES} for p in params]
    place_of = {id(p): place for place, p in enumerate(params)}
    for name in NAMES:
        for bucket in buckets:
            shard = _load(bucket, name, parameter_of).to(dtype)
            whole = shard.new_empty(bucket.bucket_size)
            work = ranks.all_gather(whole, shard)
            if work is not None:
                work.wait()
            whole = whole.cpu()
            for fragment in bucket.fragments:
                kept = flat(found[place_of[id(parameter_of(fragment))]][name])
                kept[slice(*fragment.param_range)] = whole[slice(*fragment.bucket_range)]
    return found


def scatter(saved, buckets, params, parameter_of):
    """Takes this rank's shards of what `gather` returned, and gives the parameters their values."""
    flats = {
        id(p): {name: flat_like(state[name].float(), p) for name in NAMES}
        for p, state in zip(params, saved, strict=True)
    }
    for bucket in buckets:
        device = bucket.exp_avg_shard.device
        for name in NAMES:
            shard = torch.zeros(bucket.shard_size, dtype=torch.float32, device=device)
            for fragment in bucket.local_fragments:
                part = flats[id(parameter_of(fragment))][name][slice(*fragment.shard_param_range)]
                shard[slice(*fragment.shard_range)] = part.to(device)
            if name == "param":
                _states.store_parameters(bucket, shard)
            else:
                _states.store_moment(bucket, name, shard)
        for fragment in bucket.fragments:
            p = parameter_of(fragment)
            part = flats[id(p)]["param"][slice(*fragment.param_range)]
            if bucket.param_remainders_shard is not None:
                part = split_remainders(part.clone())[0]
            flat(p)[slice(*fragment.param_range)] = part.to(p.device)


def check_whole(state_dict, groups):
    """Raises unless a state dict of format 2 fits the groups. Returns [state of each parameter]."""
    here = [p for group in groups for p in group["params"]]
    keys = check_groups(state_dict, groups)
    states = state_dict["state"]
    for key, p in zip(keys, here, strict=True):
        missing = [name for name in NAMES if name not in states.get(key, ())]
        if missing:
            raise ValueError(
                f"apex.contrib.optimizers: the checkpoint has no {', '.join(missing)} for parameter {key}: it is not "
                "one of this optimizer. Load torch's and FusedAdam's into those optimizers"
            )
        shapes = {tuple(states[key][name].shape) for name in NAMES}
        if shapes != {tuple(p.shape)}:
            raise ValueError(
                f"apex.contrib.optimizers: parameter {key} has shape {tuple(p.shape)} here and "
                f"{', '.join(map(str, shapes))} in the checkpoint: build the model that was saved"
            )
    if "step" not in states:
        raise ValueError(
            "apex.contrib.optimizers: the checkpoint counts no steps: it is not one of this optimizer"
        )
    return [states[key] for key in keys]


def check_groups(state_dict, groups):
    """Raises unless there are as many parameters in as many groups. Returns the parameters' keys, in order."""
    found = [len(group["params"]) for group in state_dict["param_groups"]]
    wanted = [len(group["params"]) for group in groups]
    if found != wanted:
        raise ValueError(
            f"apex.contrib.optimizers: the checkpoint has groups of {found} parameters, this optimizer of {wanted}: "
            "make the groups that were saved"
        )
    return [key for group in state_dict["param_groups"] for key in group["params"]]


def without_aliases(state_dict):
    """A copy in which tensors that change with the next step (a step count, a learning rate) are copies, too."""

    def settled(value):
        return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value

    groups = [{name: settled(value) for name, value in group.items()} for group in state_dict["param_groups"]]
    state = {**state_dict["state"], "step": settled(state_dict["state"]["step"])}
    return {**state_dict, "state": state, "param_groups": groups}


def load_options(saved_groups, groups):
    """Learning rates and other options; a learning rate on the device changes where it lies."""
    for group, saved in zip(groups, saved_groups, strict=True):
        for name, value in saved.items():
            if name == "params":
                continue
            if isinstance(group.get(name), torch.Tensor):
                group[name].copy_(torch.as_tensor(value, dtype=group[name].dtype, device=group[name].device))
            else:
                group[name] = value.item() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _load(bucket, name, parameter_of):
    if name == "param":
        return _states.load_parameters(bucket, parameter_of)
    return _states.load_moment(bucket, name)


# ---- format 1: this rank's buckets as they are --------------------------------------------------------------


def gather_bytes(state_dict, ranks):
    """{"gathered_states": [one tensor of bytes a shard]} on the first rank, None on the others."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    root = dist.get_global_rank(ranks.distributed, 0)
    found = [None] * ranks.shards if ranks.rank == 0 else None
    with waiting_for_ranks("a checkpoint", ranks.distributed):
        dist.gather_object(buffer.getvalue(), found, dst=root, group=ranks.distributed)
    if dist.get_rank() != ranks.root:
        return None
    return {"gathered_states": [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in found]}


def shard_of(state_dict, ranks):
    """The state dict of this rank's shard, from what `gather_bytes` returned; any other is returned as it is."""
    if "gathered_states" not in state_dict:
        return state_dict
    gathered = state_dict["gathered_states"]
    if len(gathered) != ranks.shards:
        raise _other_layout(f"it was saved over {len(gathered)} ranks and there are {ranks.shards}")
    return torch.load(io.BytesIO(gathered[ranks.rank].numpy().tobytes()), map_location="cpu")


def load_shard(state_dict, buckets):
    """Copies the tensors of saved buckets into these, once all are known to fit."""
    saved = state_dict["state"].get("buckets")
    if saved is None:
        raise ValueError("apex.contrib.optimizers: the checkpoint has no buckets: it is not one of format 1")
    if [b.fragments for b in saved] != [b.fragments for b in buckets]:
        raise _other_layout("parameters lie in other places of the buckets")
    pairs = []
    for theirs, ours in zip(saved, buckets, strict=True):
        found, wanted = _tensors(theirs), _tensors(ours)
        if {n: (t.shape, t.dtype) for n, t in found.items()} != {
            n: (t.shape, t.dtype) for n, t in wanted.items()
        }:
            raise _other_layout(
                f"its buckets keep {sorted(found)}, these {sorted(wanted)}, or in other dtypes"
            )
        pairs += [(wanted[name], found[name]) for name in wanted]
    for ours, theirs in pairs:
        ours.copy_(theirs)


def _tensors(bucket):
    scales = getattr(bucket, "state_scales", None) or {}
    tensors = {
        name: getattr(bucket, name)
        for name in ("params_shard", "param_remainders_shard", "exp_avg_shard", "exp_avg_sq_shard")
    }
    tensors.update({f"scale of {name}": scale for name, scale in scales.items()})
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _other_layout(why):
    return RuntimeError(
        "apex.contrib.optimizers: this checkpoint of format 1 fits the ranks and options that it was saved with "
        f"alone: {why}. Load it there, and save it with state_dict(state_dict_format=2), which fits any"
    )
