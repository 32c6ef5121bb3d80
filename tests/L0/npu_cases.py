"""What the process of test_npu.py runs: ops of every family on a device "npu", against the same on the CPU.

usage: python npu_cases.py FILE, which then says how each case ended ("" is well)
"""

from __future__ import annotations

import copy
import json
import pathlib
import sys
import traceback
import types

import torch
from torch import nn

import apex
from apex import amp, optimizers
from apex._loader import reference
from apex.contrib.clip_grad import clip_grad_norm_
from apex.contrib.combine_tensors import combine_tensors, is_combined_tensor_valid
from apex.contrib.focal_loss.focal_loss import focal_loss
from apex.contrib.group_norm import GroupNorm
from apex.contrib.groupbn import BatchNorm2d_NHWC
from apex.contrib.index_mul_2d import index_mul_2d
from apex.contrib.transducer import TransducerJoint, TransducerLoss
from apex.contrib.xentropy import SoftmaxCrossEntropyLoss
from apex.normalization import FusedLayerNorm, FusedRMSNorm
from apex.parallel import SyncBatchNorm
from apex.transformer import functional
from apex.transformer.functional import fused_softmax


class References:
    """Which references ran: stands in the place of the loader's look-up, each op's first call passes there."""

    def __init__(self):
        self.ran, self.modules = set(), reference.module
        reference.module = self

    def __call__(self, name):
        function = getattr(self.modules(name), name)
        return types.SimpleNamespace(**{name: lambda *a, **k: (self.ran.add(name), function(*a, **k))[1]})


def tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compare(run, tolerance=1e-5):
    """The case of run(device) -> tensors: the npu's come from references alone, and are the CPU's."""

    def case(references):
        served = apex.served()
        references.ran.clear()
        found = run("npu")
        assert references.ran, "no reference ran"
        assert apex.served() == served, "a kernel or a CPU variant ran"
        assert all(t.device.type == "npu" for t in found)
        for a, b in zip(found, run("cpu"), strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance)

    return case


def with_gradients(function, *inputs, weights=()):
    """Outputs of `function(*inputs)` on a device, and the gradients of inputs and of modules' weights."""

    def run(device):
        here = [t.to(device) for t in inputs]
        leaves = [t.requires_grad_() for t in here if t.is_floating_point()]
        parts = [copy.deepcopy(module).to(device) for module in weights]
        output = function(*here, *parts)
        outputs = output if isinstance(output, tuple) else (output,)
        leaves += [p for module in parts for p in module.parameters()]
        loss = sum((t.float() * t.float()).sum() for t in outputs)
        return [t.detach() for t in (*outputs, *torch.autograd.grad(loss, leaves))]

    return compare(run)


def module(make, *inputs):
    torch.manual_seed(0)
    return with_gradients(lambda *all_: all_[-1](*all_[:-1]), *inputs, weights=[make()])


def optimizer(name, **options):
    def run(device):
        params = [nn.Parameter(tensor(*shape, seed=i).to(device)) for i, shape in enumerate([(3,), (4, 5)])]
        stepping = getattr(optimizers, name)(params, lr=0.01, **options)
        for step in range(3):
            for i, p in enumerate(params):
                p.grad = tensor(*p.shape, seed=10 * step + i).to(device)
            clip_grad_norm_(params, 1.0)
            stepping.step()
        return [p.detach() for p in params]

    return compare(run)


def amp_run(level, make, **options):
    def run(device):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), FusedLayerNorm(8), nn.Linear(8, 3)
        )
        model = model.to(device)
        scale = {"dynamic_init_scale": 128.0} if level in ("O1", "O2") else {}
        model, stepping = amp.initialize(
            model, make(model.parameters()), opt_level=level, verbosity=0, **scale, **options
        )
        for step in range(3):
            stepping.zero_grad()
            loss = model(tensor(16, 6, seed=step).to(device)).float().square().mean()
            with amp.scale_loss(loss, stepping) as scaled:
                scaled.backward()
            stepping.step()
        return [p.detach().float() for p in model.parameters()]

    return compare(run, tolerance=1e-5 if level == "O0" else 1e-2)


def one_rank(case):
    """A case in a group of this process alone, whose collectives leave tensors of any device as they are: gloo takes
    CPU tensors alone, and torch_npu's hccl is not here."""

    def within(references):
        from torch.testing._internal.distributed import fake_pg

        torch.distributed.init_process_group(
            "cpu:fake,npu:fake", store=fake_pg.FakeStore(), rank=0, world_size=1
        )
        try:
            case(references)
        finally:
            torch.distributed.destroy_process_group()

    return within


def methods(references):
    """What torch adds to tensors and modules with the device, apex's modules among them."""
    norm = FusedLayerNorm(4).npu()
    assert norm.weight.is_npu and norm(tensor(2, 4).npu()).device == torch.device("npu:0")


def combined(references):
    parts = [tensor(3).npu(), tensor(2, 5).npu()]
    flat = combine_tensors(parts)
    assert flat.is_npu and is_combined_tensor_valid(flat, parts)


def _labels(*shape, classes):
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))


def npu_fused(name):
    options = {"lr": 0.05, "momentum": 0.9} if name == "NpuFusedSGD" else {"lr": 0.01}
    return lambda params: getattr(optimizers, name)(params, **options)


NPU_FUSED = [name for name in optimizers.__all__ if name.startswith("NpuFused")]

CASES = {
    "methods": methods,
    "combine_tensors": combined,
    "layer norm": module(lambda: FusedLayerNorm(8), tensor(5, 8)),
    "rms norm": module(lambda: FusedRMSNorm(8), tensor(5, 8)),
    "group norm": module(lambda: GroupNorm(2, 8, act="silu"), tensor(2, 8, 3, 3)),
    "batch norm over ranks": module(lambda: SyncBatchNorm(4), tensor(3, 4, 5)),
    "batch norm NHWC": module(
        lambda: BatchNorm2d_NHWC(8, fuse_relu=True, torch_channels_last=True), tensor(2, 8, 3, 3)
    ),
    "causal softmax": with_gradients(
        lambda x: fused_softmax.scaled_upper_triang_masked_softmax(x, None, 0.5), tensor(4, 6, 6)
    ),
    "masked softmax": with_gradients(
        lambda x, mask: fused_softmax.scaled_masked_softmax(x, mask, 0.5),
        tensor(2, 3, 4, 6),
        torch.arange(24).reshape(1, 1, 4, 6) % 3 == 0,
    ),
    "softmax": with_gradients(
        lambda x: fused_softmax.ScaledSoftmax.apply(x, 0.5), tensor(2, 3, 4, 6)
    ),
    "softmax of any mask": with_gradients(
        lambda x, mask: fused_softmax.generic_scaled_masked_softmax(x, mask, 0.5),
        tensor(2, 3, 4, 7),
        torch.arange(28).reshape(1, 1, 4, 7) % 3 == 0,
    ),
    "rotary": with_gradients(
        lambda t: functional.fused_apply_rotary_pos_emb(t, tensor(5, 1, 1, 8).to(t.device)), tensor(5, 2, 3, 8)
    ),
    "bias swiglu": with_gradients(functional.fused_bias_swiglu, tensor(5, 8), tensor(8, seed=1)),
    "cross entropy": with_gradients(
        lambda x, labels: SoftmaxCrossEntropyLoss.apply(x, labels, 0.1), tensor(5, 30), _labels(5, classes=30)
    ),
    "focal loss": with_gradients(
        lambda x, labels: focal_loss(x, labels, torch.ones(1, device=x.device), 8, 0.25, 2.0),
        tensor(2, 6, 8),
        _labels(2, 6, classes=8),
    ),
    "index_mul_2d": with_gradients(index_mul_2d, tensor(4, 8), tensor(6, 8, seed=1), _labels(6, classes=4)),
    "transducer joint": with_gradients(
        lambda f, g, fl, gl: TransducerJoint()(f, g, fl, gl),
        tensor(2, 3, 8), tensor(2, 4, 8, seed=1), torch.tensor([3, 2]), torch.tensor([4, 3]),
    ),
    "transducer loss": with_gradients(
        lambda x, y, fl, yl: TransducerLoss()(x, y, fl, yl, 0),
        tensor(2, 4, 3, 7), _labels(2, 2, classes=7), torch.tensor([4, 3]), torch.tensor([2, 1]),
    ),
    "FusedAdam": optimizer("FusedAdam"),
    "FusedAdam capturable": optimizer("FusedAdam", capturable=True),
    "FusedSGD": optimizer("FusedSGD", momentum=0.9),
    "FusedLAMB": optimizer("FusedLAMB"),
    "FusedMixedPrecisionLamb": optimizer("FusedMixedPrecisionLamb"),
    "FusedNovoGrad": optimizer("FusedNovoGrad"),
    "FusedAdagrad": optimizer("FusedAdagrad"),
    "FusedLARS": optimizer("FusedLARS", momentum=0.9),
    **{
        f"amp {level} {name}": amp_run(level, make)
        for level in ("O0", "O1", "O2", "O3", "O4", "O5")
        for name, make in (
            ("SGD", lambda params: torch.optim.SGD(params, 0.05, momentum=0.9)),
            ("FusedAdam", lambda params: optimizers.FusedAdam(params, 0.01, eps=0.01)),
        )
    },
    **{
        f"combined gradients {level}": amp_run(
            level, lambda params: torch.optim.SGD(params, 0.05), combine_grad=True
        )
        for level in ("O1", "O2")
    },
    "combined gradients over ranks": one_rank(
        amp_run("O2", lambda params: torch.optim.SGD(params, 0.05), combine_grad=True, combine_ddp=True)
    ),
    **{f"{name} {level}": amp_run(level, npu_fused(name)) for level in ("O1", "O2") for name in NPU_FUSED},
}  # fmt: skip


def main(file):
    import npu_device  # noqa: F401  makes the device, for good

    references = References()
    results = {}
    for name, case in CASES.items():
        results[name] = ""
        try:
            case(references)
        except Exception:
            results[name] = traceback.format_exc()
        amp.amp.unpatch()
    pathlib.Path(file).write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
