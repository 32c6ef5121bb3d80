"""What each rank of test_te_ranks.py runs, on gloo. A case takes the device mesh; it raises on failure."""

from __future__ import annotations

import copy
import pathlib
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from te_common import RECIPES, random, train

import apex.transformer_engine.pytorch as te
from apex.transformer import parallel_state
from apex.transformer_engine.common.recipe import DelayedScaling
from apex.transformer_engine.pytorch import _state

F32 = torch.float32
OF = RECIPES["current"]


def group():
    """All ranks, as the tensor parallel group."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(dist.get_world_size())
    return parallel_state.get_tensor_model_parallel_group()


def part(tensor, dim):
    return tensor.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def near(found, expected, tolerance=1e-5):
    """Every number; of what is cast by other scales (tolerance above 1e-2), their whole."""
    if tolerance > 1e-2:
        assert (found - expected).norm() < tolerance * expected.norm()
        return
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance * max(1.0, expected.abs().max().item())
    )


def whole(make, **options):
    torch.manual_seed(3)
    made = make(device="cpu", **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def shared(make, **options):
    """A layer that ranks share, with the parts of the same weights; and these."""
    one = whole(make)
    made = make(device="cpu", tp_group=group(), **options)
    copy_parts(made, one)
    return made, one


def copy_parts(made, one):
    """This rank's parts of weights that are whole."""
    parts = dict(made.named_parameters())
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            dim = parts[name].partition_dim if hasattr(parts[name], "partition_dim") else -1
            parts[name].copy_(part(parameter, dim) if dim >= 0 else parameter)


def compare(made, one, of, sequence, tolerance=1e-5, inputs=32):
    """Outputs and gradients of the ranks' layer, and of the one that each has whole."""
    x = random(8, 3, inputs)
    mine, its = (part(x, 0) if sequence else x).clone().requires_grad_(), x.clone().requires_grad_()
    with te.fp8_autocast(enabled=of is not None, fp8_recipe=of):
        found, expected = made(mine), one(its)
    grad = random(*expected.shape, seed=5)
    found.backward(part(grad, 0) if sequence else grad)
    expected.backward(grad)
    near(found, part(expected, 0) if sequence else expected, tolerance)
    near(mine.grad, part(its.grad, 0) if sequence else its.grad, tolerance)
    parts = dict(made.named_parameters())
    for name, parameter in one.named_parameters():
        ours = parts[name]
        dim = getattr(ours, "partition_dim", -1)
        grad = ours.grad
        if getattr(ours, "sequence_parallel", False):
            dist.all_reduce(grad)
        near(grad, part(parameter.grad, dim) if dim >= 0 else parameter.grad, tolerance)


def mlp(mesh):
    """Column parallel, then row parallel; in float32 as without ranks, and near it in FP8."""
    for sequence in (False, True):
        for activation in ("gelu", "relu"):

            def make(**options):
                return te.LayerNormMLP(32, 64, activation=activation, **options)  # noqa: B023

            made, one = shared(make, set_parallel_mode=True, sequence_parallel=sequence)
            compare(made, one, None, sequence)
            made, one = shared(make, set_parallel_mode=True, sequence_parallel=sequence)
            compare(made, one, OF, sequence, 0.25)


def row(mesh):
    """A row parallel layer: its input is this rank's part of the last dimension, its bias is added once."""
    made, one = shared(lambda **o: te.Linear(32, 16, **o), parallel_mode="row")
    x = random(5, 32)
    near(made(part(x, -1)), one(x))
    assert made.in_features == 32 // dist.get_world_size() and not made.bias.sequence_parallel


def attention(mesh):
    """A whole layer: heads are shared."""
    for sequence in (False, True):

        def make(**options):
            return te.TransformerLayer(32, 64, 4, hidden_dropout=0.0, attention_dropout=0.0, **options)

        made, one = shared(make, set_parallel_mode=True, sequence_parallel=sequence)
        compare(made, one, None, sequence, 1e-4)
        assert made.self_attention.core_attention.num_attention_heads == 4 // dist.get_world_size()


def late_group(mesh):
    """The group may come after the layer."""
    made = te.LayerNormMLP(32, 64, tp_size=dist.get_world_size(), set_parallel_mode=True, device="cpu")
    try:
        made(random(2, 32))
    except RuntimeError as error:
        assert "set_tensor_parallel_group" in str(error)
    else:
        raise AssertionError("a layer without a group ran")
    made.set_tensor_parallel_group(group())
    assert made(random(2, 32)).shape == (2, 32)


def scales(mesh):
    """Magnitudes are those of all ranks, unless the recipe says no; evaluation of one rank alone waits for none."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for reduce in (True, False):
        _state.forget()
        of, layer = (
            DelayedScaling(amax_history_len=2, reduce_amax=reduce),
            whole(lambda **o: te.Linear(16, 16, **o)),
        )
        x = torch.full((4, 16), 1.0 + rank, dtype=F32, device="cpu")
        train(layer, of, x, torch.full((4, 16), 3.0 * (1 + rank), dtype=F32, device="cpu"))
        if rank == 0:
            layer.eval()
            with te.fp8_autocast(fp8_recipe=of), torch.no_grad():
                layer(x)
            layer.train()
        with te.fp8_autocast(fp8_recipe=of):
            layer(x)
        largest = ranks if reduce else 1 + rank
        assert layer.fp8_meta["scaling_fwd"].scale[0] == 448 / largest
        near(
            layer.fp8_meta["scaling_bwd"].scale[:1],
            torch.tensor([57344 / (3 * largest)], dtype=F32, device="cpu"),
        )


def scales_of_a_group(mesh):
    """fp8_group: only its ranks."""
    _state.forget()
    alone = [dist.new_group([r]) for r in range(dist.get_world_size())][dist.get_rank()]
    layer = whole(lambda **o: te.Linear(16, 16, **o))
    x = torch.full((4, 16), 1.0 + dist.get_rank(), dtype=F32, device="cpu")
    for _ in range(2):
        with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=2), fp8_group=alone):
            layer(x)
    assert layer.fp8_meta["scaling_fwd"].scale[0] == 448 / (1 + dist.get_rank())


def compiled(mesh):
    """The collective of magnitudes does not break a graph that fp8_autocast is around of."""
    _state.forget()
    of, made = DelayedScaling(amax_history_len=2), whole(lambda **o: te.Linear(16, 16, **o))
    other, x = copy.deepcopy(made), random(4, 16, seed=dist.get_rank())
    run = torch.compile(made, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        near(train(run, of, x), train(other, of, x))


def distributed_activations(mesh):
    """A checkpoint of which each rank keeps a part of the input: the same bits, and every magnitude once."""
    group()
    _state.forget()
    of, made = RECIPES["delayed"], whole(lambda **o: te.LayerNormMLP(32, 64, **o))
    other, x, x2 = copy.deepcopy(made), random(4, 32, grad=True), random(4, 32, grad=True)
    for step in range(3):
        grad = random(4, 32, seed=step)
        for module, value, again in ((made, x, True), (other, x2, False)):
            module.zero_grad()
            value.grad = None
            with te.fp8_autocast(fp8_recipe=of):
                y = (
                    te.checkpoint(module, value, distribute_saved_activations=True)
                    if again
                    else module(value)
                )
            y.backward(grad)
        assert torch.equal(x.grad, x2.grad)
        assert all(
            torch.equal(p.grad, q.grad) for p, q in zip(made.parameters(), other.parameters(), strict=True)
        )


def distributed_checkpoints(mesh):
    """FSDP2 and torch.distributed.checkpoint: weights are shards, the FP8 state is whole on each rank."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    def model():
        _state.forget()
        made = whole(lambda **o: torch.nn.Sequential(te.LayerNormMLP(32, 64, **o), te.Linear(32, 16, **o)))
        for layer in (*made, made):
            fully_shard(layer, mesh=mesh)
        return made

    of, x = RECIPES["delayed"], random(4, 32)
    made = model()
    train(made, of, x, steps=2)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = pathlib.Path(folder[0]) / "there"
    dcp.save({"model": get_model_state_dict(made)}, checkpoint_id=path)
    with te.fp8_autocast(fp8_recipe=of):  # new scales, which loading puts back
        expected = made(x)
    other = model()
    state = {"model": get_model_state_dict(other)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other, state["model"])
    with te.fp8_autocast(fp8_recipe=of):
        found = other(x)
    assert torch.equal(found, expected)


def collectives(mesh):
    """te.ops' AllReduce, AllGather and ReduceScatter: values, gradients, groups of one, and what does not divide."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    of_rank = [random(4, 3, 6, seed=1 + r) for r in range(ranks)]
    grads = [random(4 * ranks, 3, 6, seed=9 + r) for r in range(ranks)]
    total, gathered = sum(of_rank), torch.cat(of_rank)
    for operation, wanted, grad, wanted_grad in (
        (te.ops.AllReduce, total, grads[rank][:4], grads[rank][:4]),
        (te.ops.AllGather, gathered, grads[rank], part(sum(grads), 0)),
        (
            te.ops.ReduceScatter,
            part(total, 0),
            grads[rank][: 4 // ranks],
            torch.cat([g[: 4 // ranks] for g in grads]),
        ),
    ):
        for within in (None, group()):
            for dtype in (F32, torch.bfloat16):
                x = of_rank[rank].to(dtype, copy=True).requires_grad_()
                found = operation(within)(x)
                found.backward(grad.to(dtype))
                assert found.dtype == x.grad.dtype == dtype
                near(found.detach().float(), wanted, 1e-5 if dtype == F32 else 1e-2)
                near(x.grad.float(), wanted_grad, 1e-5 if dtype == F32 else 1e-2)
    alone = [dist.new_group([r]) for r in range(ranks)][rank]
    for operation in (te.ops.AllReduce, te.ops.AllGather, te.ops.ReduceScatter):
        assert torch.equal(operation(alone)(of_rank[rank]), of_rank[rank])
    odd = random(2 * ranks + 1, 3)
    try:
        te.ops.ReduceScatter()(odd)
    except ValueError as error:
        assert f"{2 * ranks + 1} is not divisible by {ranks}" in str(error)
    else:
        raise AssertionError(f"{2 * ranks + 1} rows were scattered over {ranks} ranks")


def operations(mesh):
    """te.ops.Sequential of layers that ranks share, with and without parts of a sequence, in float32 and FP8; a row
    parallel layer is also a product of parts, a collective and a bias."""

    def make(sequence=False, **shared_by):
        column, row = (
            {"tensor_parallel_mode": mode, **shared_by} if shared_by else {} for mode in ("column", "row")
        )
        options = {"sequence_parallel": sequence} if shared_by else {}
        return te.ops.Sequential(
            te.ops.LayerNorm(32, device="cpu"),
            te.ops.Linear(32, 64, device="cpu", **column, **options),
            te.ops.GELU(),
            te.ops.Linear(64, 32, device="cpu", **row, **options),
        )

    def in_parts(sequence):
        ranks = dist.get_world_size()
        return te.ops.Sequential(
            te.ops.LayerNorm(32, device="cpu"),
            *([te.ops.AllGather()] if sequence else []),
            te.ops.Linear(32, 64 // ranks, device="cpu"),
            te.ops.GELU(),
            te.ops.BasicLinear(64 // ranks, 32, device="cpu"),
            te.ops.ReduceScatter() if sequence else te.ops.AllReduce(),
            te.ops.Bias(32, device="cpu"),
        )

    for sequence in (False, True):
        for of, tolerance in ((None, 1e-5), (OF, 0.25)):
            one = whole(lambda device: make())
            made = make(sequence, tensor_parallel_group=group())
            copy_parts(made, one)
            for parameter in made[0].parameters():  # of parts of a sequence: its gradients add up over ranks
                parameter.sequence_parallel = sequence
            compare(made, one, of, sequence, tolerance)
    for sequence in (False, True):
        one = whole(lambda device: make())
        made, first = in_parts(sequence), [*one.parameters()]
        dims = (-1, -1, 0, 0, 1, -1)
        with torch.no_grad():
            for parameter, its, dim in zip(made.parameters(), first, dims, strict=True):
                parameter.copy_(part(its, dim) if dim >= 0 else its)
        x = random(8, 3, 32)
        near(made(part(x, 0) if sequence else x), part(one(x), 0) if sequence else one(x))


CASES = {
    case.__name__: case
    for case in (
        mlp,
        row,
        attention,
        late_group,
        scales,
        scales_of_a_group,
        compiled,
        distributed_activations,
        distributed_checkpoints,
        collectives,
        operations,
    )
}
