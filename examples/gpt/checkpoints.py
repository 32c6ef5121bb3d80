"""Checkpoints that any split can go on from, by torch.distributed.checkpoint.

Each rank hands over what it holds under names that do not depend on the split, and says of a part of a weight, by a
DTensor, which part it is. Who loads says the same of what it is to hold.
"""

import json
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from apex.transformer import parallel_state

MOMENTS = ("exp_avg", "exp_avg_sq")


def tensors_by_name(parts, optimizer):
    """Weights and the optimizer's moments, which are the tensors themselves: loading writes into them."""
    group = parallel_state.get_tensor_model_parallel_group()
    mesh = DeviceMesh.from_group(group, next(parts[0].parameters()).device.type)
    found = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            state = optimizer.state[parameter]
            for kind in MOMENTS:
                if kind not in state:  # before the first step
                    state[kind] = torch.zeros_like(parameter)
            for kind, tensor in (("weight", parameter), *((kind, state[kind]) for kind in MOMENTS)):
                tensor = tensor.detach()
                if getattr(parameter, "tensor_model_parallel", False):
                    tensor = DTensor.from_local(tensor, mesh, [Shard(parameter.partition_dim)])
                found[f"{kind}.{name}"] = tensor
    return found


def save(folder, parts, optimizer, scaler, model, losses):
    """Into a folder, which every rank calls. model: sizes; losses: of the steps so far.

    progress.json is there only once all else is: what a run that was ended has left there is no checkpoint. Ends every
    process where one cannot write.
    """
    told = folder / "progress.json"
    on_first(folder, lambda: told.unlink(missing_ok=True))
    try:
        dcp.save(tensors_by_name(parts, optimizer), checkpoint_id=folder)
    except CheckpointException as error:  # on every rank, if it is on one
        end(folder, causes_of(error))

    def tell():
        progress = dict(model=model, losses=losses, scaler=scaler.state_dict())
        (folder / "progress.part").write_text(json.dumps(progress))
        (folder / "progress.part").replace(told)

    on_first(folder, tell)


def on_first(folder, step):
    """A step of rank 0 with files. The others wait for it, and end if it fails."""
    problem = [None]
    if dist.get_rank() == 0:
        try:
            step()
        except OSError as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem)
    if problem[0]:
        end(folder, problem[0])


def causes_of(error):
    """What ranks raised, a line of each."""
    return "; ".join(f"rank {rank}: {cause!r}".splitlines()[0] for rank, (cause, _) in error.failures.items())


def end(folder, why):
    """Ends the process, whose checkpoint could not be written."""
    free = shutil.disk_usage(folder.parent).free
    raise SystemExit(
        f"{folder}: the checkpoint could not be written: {why}. {free:,} bytes are free there. Those before "
        "are whole: make room, or choose another --out, and go on by --resume"
    )


def losses_of(folder, model):
    """The losses so far. Ends the process where the checkpoint is none, or of a model of other sizes."""
    try:
        progress = json.loads((folder / "progress.json").read_text())
        found, losses = progress["model"], progress["losses"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"--resume {folder}: no whole checkpoint: {error!r}") from None
    if found != model:
        raise SystemExit(f"--resume {folder}: it holds a model of {found}, and not of {model}")
    return losses


def load(folder, parts, optimizer, scaler):
    """What `save` saved, of any split, into these."""
    try:
        dcp.load(tensors_by_name(parts, optimizer), checkpoint_id=folder)
    except CheckpointException as error:
        raise SystemExit(f"--resume {folder}: it cannot be read: {causes_of(error)}") from None
    progress = json.loads((folder / "progress.json").read_text())
    scaler.load_state_dict(progress["scaler"])
    for group in optimizer.param_groups:
        group["step"] = len(progress["losses"])
