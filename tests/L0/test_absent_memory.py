"""Tensors without memory: freed, as FSDP frees that of parameters after each use, or on the meta device."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from loader.described import ROOT
from op_samples import Call, samples

from apex._loader import bindings, registry

if not bindings.load().native:
    pytest.skip("the bindings look at memory; without them torch does", allow_module_level=True)

# In a process of its own: what reads a freed tensor ends the process.
FREED = """
import torch
from apex._loader import bindings

bindings.load()
op = torch.ops.apex
x, w, rows = torch.randn(4, 8), torch.rand(8), torch.rand(4)
image, labels, places = torch.randn(2, 8, 3, 3), torch.tensor([0, 1, 2, 3]), torch.randn(5, 2, 3, 8)
lengths, lattice = torch.tensor([3, 2]), torch.randn(2, 3, 3, 5)
sums, one = torch.rand(17), torch.ones(1)
calls = {
    op.layer_norm_forward: (x, (8,), w, w),
    op.layer_norm_backward: (x, x, rows, rows, (8,), w, w, 1e-5),
    op.add_layer_norm_forward: (x, x, (8,), w, w),
    op.rms_norm_forward: (x, (8,), w),
    op.rms_norm_backward: (x, x, rows, (8,), w, 1e-5),
    op.add_rms_norm_forward: (x, x, (8,), w),
    op.rope_forward: (places, torch.rand(5, 1, 1, 8), torch.rand(5, 1, 1, 8)),
    op.xentropy_forward: (x, labels),
    op.xentropy_backward: (rows, x, labels, torch.rand(4, 2)),
    op.scaled_masked_softmax_forward: (x, x > 0),
    op.scaled_masked_softmax_backward: (x, x),
    op.masked_softmax_dropout_forward: (x, x > 0, 0.5, torch.tensor([7])),
    op.masked_softmax_dropout_backward: (x, x, x > 0),
    op.bias_activation_forward: (x, w, "silu", True),
    op.bias_activation_backward: (x[:, :4].contiguous(), x, w, "silu", True),
    op.focal_loss_forward: (x, labels, one, 8, 0.25, 2.0),
    op.focal_loss_backward: (one, x, labels, one, 8, 0.25, 2.0),
    op.kept_magnitudes: (x, torch.zeros(2, 8, dtype=torch.int32)),
    op.index_mul_2d_forward: (x, x, labels),
    op.index_mul_2d_backward: (x, x, x, labels),
    op.group_norm_forward: (image, 4, w, w),
    op.group_norm_backward: (image, image, torch.rand(2, 4), torch.rand(2, 4), 4, w, w, 1e-5),
    op.welford_mean_var: (image,),
    op.welford_parallel: (sums[None, :8], sums[None, 8:16], sums[16:], 1e-5, w, w, 0.1),
    op.batchnorm_forward: (image, image, w, w, w, w),
    op.batchnorm_backward: (image, image, w, w, w, w, w, one),
    op.reduce_bn: (image, image, w, w, w),
    op.relu_bw: (image, image, image, w, w, w, w),
    op.groupbn_forward: (image, image, w, w, w, w),
    op.groupbn_backward: (image, image, None, w, w, w, w, w, one),
    op.transducer_joint_forward: (torch.rand(2, 3, 8), torch.rand(2, 3, 8), lengths, lengths),
    op.transducer_loss_forward: (lattice, torch.ones(2, 2, dtype=torch.int64), lengths, lengths - 1, 0),
}
for function, arguments in calls.items():
    function(*arguments)
    names = [argument.name for argument in function.default._schema.arguments]
    for i, argument in enumerate(arguments):
        if not isinstance(argument, torch.Tensor):
            continue
        freed = argument.clone()
        freed.untyped_storage().resize_(0)
        try:
            function(*arguments[:i], freed, *arguments[i + 1 :])
        except ValueError as error:
            assert f"{names[i]} has no memory: it was freed" in str(error), error
        else:
            raise AssertionError(f"{function}: argument {i} was freed, and something was computed")
print(len(calls), "ops")
"""


def printed_by(program):
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 0, (found.returncode, found.stderr[-2000:])
    return found.stdout


def test_freed_tensors_are_refused():
    """A weight without memory must not be taken for no weight, nor address 0 be read."""
    assert printed_by(FREED) == "32 ops\n"


FREED_COPIES = """
import torch
from apex._legacy import fast_multihead_attn
from apex.contrib.cudnn_gbn import GroupBatchNorm2d
from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.parallel import SyncBatchNorm

image = torch.randn(2, 8, 4, 4)
modules = [GroupBatchNorm2d(8, group_size=1), BatchNorm2d_NHWC(8, torch_channels_last=True), SyncBatchNorm(8)]
calls = [lambda x, m=module: m(x) for module in modules]
calls.append(lambda x: fast_multihead_attn.mask_softmax_dropout_forward(True, True, 2, x, None, 0.0))
for number, call in enumerate(calls):
    given = image.transpose(2, 3) if number < len(modules) else torch.randn(4, 4, 8).transpose(0, 1)
    call(given)
    given = given.clone()
    given.untyped_storage().resize_(0)
    try:
        call(given)
    except (ValueError, RuntimeError) as error:
        assert "freed" in str(error) or "not allocated" in str(error), error
    else:
        raise AssertionError(f"call {number} read freed memory")
print(len(calls), "calls")
"""


def test_freed_tensors_are_not_copied():
    """torch's own contiguous() reads them, which ends the process."""
    assert printed_by(FREED_COPIES) == "4 calls\n"


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
def test_meta_tensors_beside_others_are_refused(name):
    """One is enough for the dispatcher to ask for shapes alone: gradients of the others would hold what memory held."""
    x, w, rows = (
        torch.ones(3, 8, dtype=torch.float32, device="cpu"),
        torch.ones(8, dtype=torch.float32, device="cpu"),
        torch.ones(3, dtype=torch.float32, device="cpu"),
    )
    statistics = (rows, rows) if "layer" in name else (rows,)
    affine = (w, w) if "layer" in name else (w,)
    sums = (x,) if "add" in name else ()
    arguments = (x, *sums, x, *statistics, (8,), *affine, 1e-5)
    backward = getattr(torch.ops.apex, f"{name}_backward")
    tensors = [i for i, argument in enumerate(arguments) if isinstance(argument, torch.Tensor)]
    for i in tensors:
        with pytest.raises(ValueError, match="on cpu and on the meta device"):
            backward(*arguments[:i], arguments[i].to("meta"), *arguments[i + 1 :])
    found = backward(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments))
    assert found[0].shape == x.shape and all(gradient.is_meta for gradient in found)


FUNCTIONAL = [
    (op, index)
    for op, index in samples()
    if index is not None and not registry.schemas()[op].writes and registry.schemas()[op].entry != ()
]


@pytest.mark.parametrize(("op", "index"), FUNCTIONAL)
def test_entries_take_shapes_alone(op, index):
    """Eager calls go past the dispatcher, which knows where a meta tensor belongs."""
    call = Call(op, index, "cpu")
    entry = getattr(bindings.load().module, op.removesuffix("_forward"), None)
    if entry is None:
        entry = getattr(torch.ops.apex, op)
    arguments = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), call.arguments)
    found = torch.utils._pytree.tree_leaves(entry(**arguments))
    wanted = torch.utils._pytree.tree_leaves(entry(**call.arguments))
    assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in wanted]
    assert all(t.is_meta for t in found)
