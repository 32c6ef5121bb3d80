"""Cases of test_distributed_fused_adam.py: checkpoints that other numbers of ranks continue."""

from __future__ import annotations

import contextlib
import copy
import io

import torch
import torch.distributed as dist
from ddp_common import raises
from zero_common import SMALL, backward, clones, equal, make, parameters, rank, ranks

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
REMAINDERS = dict(param_sync_dtype=BF16, store_params=False, store_param_remainders=True)


def _groups(size):
    """A group of each `size` ranks; this rank's."""
    made = [dist.new_group(list(range(first, first + size))) for first in range(0, ranks(), size)]
    return made[rank() // size]


def _step(params, optimizer, seed):
    """Every rank has the same gradients, so that their mean is the same whatever the group."""
    optimizer.zero_grad()
    backward(params, seed, of_rank=0)
    optimizer.step()
    optimizer.param_sync()


def _stored(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file)  # with weights_only


def _resumes(mesh, shapes=((6,), (33, 5), (1,), (2, 3, 4, 5)), dtype=F32, **options):
    """Saved by groups of one size, continued by groups of any other: the next steps are the same, bit for bit."""
    sizes = [size for size in (1, 2, 4) if size <= ranks()]
    groups = {size: _groups(size) for size in sizes}
    for saving in sizes[-2:]:
        params = parameters(dtype, shapes)
        optimizer = make(params, process_group=groups[saving], **SMALL, **options)
        for seed in range(2):
            _step(params, optimizer, seed)
        saved = _stored(optimizer.state_dict())
        others = []
        for loading in sizes:
            ps = parameters(dtype, shapes, seed=2)
            other = make(ps, process_group=groups[loading], lr=7.0, **SMALL, **options)
            other.load_state_dict(copy.deepcopy(saved))
            equal(clones(ps), clones(params))
            assert other.param_groups[0]["lr"] == 1e-2
            others.append((ps, other))
        for seed in (2, 3):
            _step(params, optimizer, seed)
            for ps, other in others:
                _step(ps, other, seed)
                equal(clones(ps), clones(params))
        again = others[0][1].state_dict()
        for key, state in optimizer.state_dict()["state"].items():
            if key == "step":
                assert again["state"]["step"] == state == 4
            else:
                equal([again["state"][key][name] for name in state], state.values())


def _other_options(mesh):
    """Saved with float32 parameters, continued with remainders, and the other way round."""
    params = parameters(BF16)
    optimizer = make(params, **SMALL, param_sync_dtype=BF16)
    _step(params, optimizer, 0)
    for options in (REMAINDERS, dict(param_sync_dtype=BF16, contiguous_param_buffer=True)):
        ps = parameters(BF16, seed=3)
        other = make(ps, **options)
        _step(ps, other, 5)
        other.load_state_dict(optimizer.state_dict())
        for seed in (1, 2):
            _step(params, optimizer, seed)
            _step(ps, other, seed)
        for found, wanted in zip(
            other.state_dict()["state"].items(), optimizer.state_dict()["state"].items(), strict=True
        ):
            if found[0] != "step":
                equal(found[1].values(), wanted[1].values())


def _empty_shards(mesh):
    """Fewer elements than ranks: some hold nothing, and step, clip and save all the same."""
    _resumes(mesh, shapes=((6,),))
    _resumes(mesh, shapes=((1,), (0, 3)))
    params = parameters(shapes=((6,),))
    optimizer = make(params)
    _step(params, optimizer, 0)
    held = [sum(len(b.local_fragments) for b in optimizer.state["buckets"])]
    everyone = [None] * ranks()
    dist.all_gather_object(everyone, held[0])
    assert sum(everyone) == 1


def _channels_last(mesh):
    """Saved from one memory format, continued in another."""
    weight = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    first = torch.nn.Parameter(weight.clone().to(memory_format=torch.channels_last))
    other = torch.nn.Parameter(torch.zeros_like(weight))
    optimizers = [make([p], **SMALL) for p in (first, other)]
    _step([first], optimizers[0], 0)
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for p, optimizer in zip((first, other), optimizers, strict=True):
        _step([p], optimizer, 1)
    equal([first.detach()], [other.detach()])


def _format_1(mesh):
    """Shards as they are, on each rank or gathered on the first; refused untouched by other ranks and options."""
    for options in (dict(SMALL), dict(SMALL, dtype=F16, with_scaled_states=True), dict(SMALL, **REMAINDERS)):
        half = BF16 if "store_param_remainders" in options else F32
        params = parameters(half)
        optimizer = make(params, **options)
        _step(params, optimizer, 0)
        shard = copy.deepcopy(optimizer.state_dict(state_dict_format=1, gather_on_root=False))
        gathered = [optimizer.state_dict(state_dict_format=1)]
        assert (gathered[0] is None) == (rank() > 0)
        dist.broadcast_object_list(gathered)
        values = clones(params)
        _step(params, optimizer, 1)
        for saved in (shard, gathered[0]):
            ps = [torch.nn.Parameter(v.clone()) for v in values]
            other = make(ps, **options)
            other.load_state_dict(saved)
            _step(ps, other, 1)
            equal(clones(ps), clones(params))
        other = make(parameters(half), **{**options, "bucket_cap_mb": 0.002})
        before = copy.deepcopy(other.state_dict()["state"])
        with raises(RuntimeError, "state_dict_format=2"):
            other.load_state_dict(shard)
        alone = make(parameters(half), process_group=_groups(1), **options)
        with (
            raises(RuntimeError, "state_dict_format=2", "ranks") if ranks() > 1 else contextlib.nullcontext()
        ):
            alone.load_state_dict(gathered[0])
        for key, state in other.state_dict()["state"].items():
            if key != "step":
                equal(state.values(), before[key].values())


def _refused(mesh):
    """Another model's or optimizer's checkpoint is refused with everything as it was."""
    params = parameters()
    optimizer = make(params, **SMALL)
    _step(params, optimizer, 0)
    before, values = copy.deepcopy(optimizer.state_dict()), clones(params)
    twins = parameters()
    adamw = torch.optim.AdamW(twins)
    backward(twins, 0)
    adamw.step()
    wrong = copy.deepcopy(before)
    wrong["state"][0]["exp_avg"] = torch.zeros(3)
    fewer = copy.deepcopy(before)
    fewer["param_groups"][0]["params"].pop()
    for state_dict, words in (
        (adamw.state_dict(), "not one of this optimizer"),
        (wrong, "shape"),
        (fewer, "groups"),
        ({**before, "format": 3}, "1 or 2"),
    ):
        with raises(ValueError, words):
            optimizer.load_state_dict(state_dict)
    after = optimizer.state_dict()
    for key, state in before["state"].items():
        if key != "step":
            equal(after["state"][key].values(), state.values())
    assert after["state"]["step"] == 1 and after["param_groups"] == before["param_groups"]
    equal(clones(params), values)


CASES = {
    "resumes": _resumes,
    "resumes_halves": lambda mesh: _resumes(mesh, dtype=F16),
    "resumes_remainders": lambda mesh: _resumes(mesh, dtype=BF16, **REMAINDERS),
    "resumes_late": lambda mesh: _resumes(mesh, overlap_param_sync=True),
    "other_options": _other_options,
    "empty_shards": _empty_shards,
    "checkpoint_channels_last": _channels_last,
    "format_1": _format_1,
    "refused": _refused,
}
