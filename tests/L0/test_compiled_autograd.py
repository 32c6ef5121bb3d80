"""Backward passes that compiled autograd takes as one graph: the nodes of every op, and of the layers that have nodes
of their own, give the gradients that they give without it."""

from __future__ import annotations

import pytest
import torch
from op_samples import SAMPLES, Call, assert_same, samples
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

from apex import _functional, _loader
from apex._loader import registry
from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.parallel import SyncBatchNorm

F32 = torch.float32
RECORDED = [name for name, op in registry.schemas().items() if op.backward]
EVERY = pytest.mark.parametrize(
    ("op", "index"), [(op, index) for op, index in samples() if op in RECORDED and index is not None]
)


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Each test compiles anew, and leaves no graph behind."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled():
    """Every backward pass within it is one graph."""
    return compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True))


def check_captured(captures):
    """Raises unless backward passes were captured so often: else eager's would be compared with themselves."""
    assert counters["compiled_autograd"]["captures"] == captures


def random(*shape, seed=0, dtype=F32):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=F32, device="cpu").to(dtype).requires_grad_()


def entry_of(call):
    """The sample by the direct entry, whose node is not the dispatcher's where the binding is portable; None for an op
    without one."""
    schema = registry.schemas()[call.op._schema.name.partition("::")[2]]
    if schema.entry == () or _functional.entry(schema.name.removesuffix("_forward")) is None:
        return None
    entry = _functional.entry(schema.name.removesuffix("_forward"))

    def function(*tensors):
        leaves = list(call.rest)
        for place, tensor in zip(call.places, tensors, strict=True):
            leaves[place] = tensor
        found = entry(**torch.utils._pytree.tree_unflatten(leaves, call.spec))
        return [found] if isinstance(found, torch.Tensor) else list(found)

    return function


def test_every_recorded_op_has_a_sample():
    assert [op for op in RECORDED if not SAMPLES[op]] == []


@EVERY
@pytest.mark.parametrize("by", ("dispatcher", "entry"))
def test_gradients(op, index, by):
    call = Call(op, index, "cpu")
    function = call if by == "dispatcher" else entry_of(call)
    if function is None:
        pytest.skip("reference: no entry")
    wanted = [call.run(function, turn) for turn in (0, 1)]
    with compiled():
        found = [call.run(function, turn) for turn in (0, 1)]
    check_captured(1)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same(ours, theirs)


@EVERY
@pytest.mark.filterwarnings(
    "error:.*must not also be an input"
)  # nor alias another output: what is not wanted is new
def test_each_gradient_alone(op, index):
    """A graph of its own for each input that is asked for: which one is no secret of the node."""
    call = Call(op, index, "cpu")
    everything = call.wanted
    for graphs, alone in enumerate(everything, 1):
        call.wanted = [alone]
        wanted = call.run()
        with compiled():
            assert_same(call.run(), wanted)
        check_captured(graphs)


@pytest.mark.parametrize("layer", (FusedLayerNorm, FusedRMSNorm))
def test_some_inputs_of_a_node(layer):
    """torch.autograd.grad for the weight alone, then for the input alone, of one recorded graph."""
    norm, x = layer(8), random(4, 8)
    for inputs in ([norm.weight], [x], [norm.weight, x]):
        wanted = torch.autograd.grad(norm(x).square().sum(), inputs)
        with compiled():
            found = torch.autograd.grad(norm(x).square().sum(), inputs)
        assert_same(list(found), list(wanted))
    check_captured(3)


def test_sizes_that_change():
    """One graph for every size."""
    norm = FusedLayerNorm(8)
    for rows in (3, 5, 7, 9):
        x = random(rows, 8)
        (wanted,) = torch.autograd.grad(norm(x).square().sum(), x)
        with compiled():
            (found,) = torch.autograd.grad(norm(x).square().sum(), x)
        assert_same([found], [wanted])
    check_captured(1)


def test_numbers_that_change():
    """eps and the like are told from each other."""
    x = random(4, 8, seed=1)
    for eps in (1e-5, 0.5):
        norm = FusedRMSNorm(8, eps=eps)
        (wanted,) = torch.autograd.grad(norm(x).square().sum(), x)
        with compiled():
            (found,) = torch.autograd.grad(norm(x).square().sum(), x)
        assert_same([found], [wanted])
    assert counters["compiled_autograd"]["captures"] >= 1


@pytest.mark.parametrize("memory_efficient", (False, True))
def test_hooks_of_saved_tensors(memory_efficient):
    """What hooks gave in the tensors' place is what gradients are made of."""
    norm, x = FusedLayerNorm(8, memory_efficient=memory_efficient), random(4, 8)

    def gradient():
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t.float()):
            output = norm(x)
        return torch.autograd.grad(output.square().sum(), [x, norm.weight])

    wanted = gradient()
    with compiled():
        found = gradient()
    check_captured(1)
    assert_same(list(found), list(wanted))


def test_gradients_of_a_backward_op():
    """The op has a node of its own, beside those of torch's ops."""
    given = [random(3, 5, seed=1), random(2, 5, seed=2), random(3, 5, seed=3)]
    index = torch.tensor([1, 0, 1], dtype=torch.int64, device="cpu")
    _loader.load()

    def gradients():
        made = torch.ops.apex.index_mul_2d_backward(*given, index)
        return torch.autograd.grad(made[0].square().sum() + made[1].sin().sum(), given)

    wanted = gradients()
    with compiled():
        found = gradients()
    check_captured(1)
    assert_same(list(found), list(wanted))


def absent_of_a_norm():
    """Only the sum is used, and the weight elsewhere too."""
    x, residual, weight = random(4, 8), random(4, 8, seed=1), random(8, seed=2)
    for op in (torch.ops.apex.add_rms_norm_forward, torch.ops.apex.add_layer_norm_forward):
        summed = op(x, residual, [8], weight)[1]
        yield summed.square().sum() + weight.square().sum() + x.sin().sum(), [x, residual, weight]


def absent_of_a_backward():
    """One of the two gradients is used, and all that they come from elsewhere too."""
    given = [random(3, 5, seed=1), random(2, 5, seed=2), random(3, 5, seed=3)]
    index = torch.tensor([1, 0, 1], dtype=torch.int64, device="cpu")
    for used in (0, 1):
        made = torch.ops.apex.index_mul_2d_backward(*given, index)[used]
        yield made.square().sum() + sum(t.sin().sum() for t in given), given


def absent_of_double_backward():
    """The second pass through the norm has a gradient of the sum alone."""
    x, residual, weight = random(4, 8), random(4, 8, seed=1), random(8, seed=2)
    output, summed = torch.ops.apex.add_rms_norm_forward(x, residual, [8], weight)[:2]
    first = torch.autograd.grad((output * 2 + summed).sum(), [x, weight], create_graph=True)
    yield sum(g.square().sum() for g in first), [x, residual, weight]


@pytest.mark.parametrize("losses", (absent_of_a_norm, absent_of_a_backward, absent_of_double_backward))
def test_a_gradient_that_is_not_there_is_added_to_nothing(losses):
    """An input that also has another gradient keeps that one."""
    _loader.load()
    wanted = [torch.autograd.grad(loss, inputs) for loss, inputs in losses()]
    with compiled():
        found = [torch.autograd.grad(loss, inputs) for loss, inputs in losses()]
    assert counters["compiled_autograd"]["captures"] >= len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_same(list(ours), list(theirs))


def test_what_has_no_derivative_says_so():
    """A node in C++ itself; one in Python through torch.compile, which wraps what it raised."""
    _loader.load()
    made = torch.ops.apex.transducer_joint_backward(random(1, 2, 3, 4), *LENGTHS)
    with (
        compiled(),
        pytest.raises(
            (NotImplementedError, torch._dynamo.exc.Unsupported),
            match=r"transducer_joint: the gradient of its gradient \(double backward\) is not implemented",
        ),
    ):
        made[0].sum().backward()


LENGTHS = (
    None, None, None, torch.tensor([2], dtype=torch.int32, device="cpu"),
    torch.tensor([3], dtype=torch.int32, device="cpu"), None, 2, 3,
)  # fmt: skip


MAKE = (
    lambda relu: BatchNorm2d_NHWC(8, fuse_relu=relu, torch_channels_last=True),
    lambda relu: SyncBatchNorm(8, fuse_relu=relu),
)


@pytest.mark.parametrize("training", (True, False))
@pytest.mark.parametrize("fuse_relu", (True, False))
@pytest.mark.parametrize("make", MAKE, ids=("group", "sync"))
def test_batch_norms(make, fuse_relu, training):
    x = random(2, 8, 3, 3).detach().contiguous(memory_format=torch.channels_last).requires_grad_()

    def gradients():
        layer = make(fuse_relu).train(training)
        loss = layer(x).square().sum()
        return list(torch.autograd.grad(loss, [x, layer.weight, layer.bias]))

    wanted = gradients()
    with compiled():
        found = gradients()
    check_captured(1)
    assert_same(found, wanted)


def test_a_compiled_step():
    """As programs turn it on: torch._dynamo.config.compiled_autograd, and the whole step compiled."""
    model = torch.nn.Sequential(FusedLayerNorm(8), torch.nn.Linear(8, 8), FusedRMSNorm(8))
    x = random(4, 8)

    def step(x):
        model(x).square().sum().backward()
        found = [x.grad.clone(), *(p.grad.clone() for p in model.parameters())]
        x.grad = None
        model.zero_grad()
        return found

    wanted = step(x)
    with torch._dynamo.config.patch(compiled_autograd=True):
        found = torch.compile(step, backend="aot_eager")(x)
    assert counters["compiled_autograd"]["captures"] >= 1
    assert_same(found, wanted)
