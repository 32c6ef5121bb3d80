"""What functions of the legacy modules refuse, that torch would convert, broadcast or take to mean something else.

Nothing is written to the caller's tensors then.
"""

from __future__ import annotations

import inspect

import pytest
import torch

from apex._legacy import (
    bnp,
    focal_loss_cuda,
    fused_index_mul_2d,
    fused_rotary_positional_embedding,
    group_norm_cuda,
    group_norm_v2_cuda,
    transducer_joint_cuda,
    transducer_loss_cuda,
    xentropy_cuda,
)
from apex.transformer import functional


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=F32, device="cpu")


def zeros(*shape):
    return torch.zeros(shape, dtype=F32, device="cpu")


def index_mul_2d(function, **changed):
    def call():
        in1, in2, index = random(5, 4), random(1, 4), torch.tensor([2], dtype=torch.int64, device="cpu")
        given = dict(
            out=zeros(1, 4), grad_grad_out=zeros(1, 4), grad_in1=zeros(5, 4), grad_in2=zeros(1, 4),
            grad_out=in2, grad_grad_in1=in1, grad_grad_in2=in2, in1=in1, in2=in2, idx1=index,
        )  # fmt: skip
        given |= {
            name: torch.zeros(shape, dtype=dtype, device="cpu") for name, (shape, dtype) in changed.items()
        }
        written = ("out", "grad_grad_out", "grad_in1", "grad_in2")
        names = inspect.signature(function).parameters
        try:
            function(**{name: given[name] for name in names})
        finally:
            assert not any(given[name].any() for name in written)

    return call


def focal(**changed):
    given = dict(
        grad_output=torch.ones((), dtype=F32, device="cpu"),
        partial_grad=random(3, 4),
        num_positives_sum=torch.ones(1, dtype=F32, device="cpu"),
    )
    return lambda: focal_loss_cuda.backward(**given | changed)


def group_norm(sums):
    x, w = random(2, 8, 3), torch.ones(8, dtype=F32, device="cpu")
    return lambda: group_norm_cuda.backward(x, sums, x, 4, w, w, 1e-5, 1)


def group_norm_v2(mean_var):
    x, w = random(2, 8, 3), torch.ones(8, dtype=F32, device="cpu")
    return lambda: group_norm_v2_cuda.gn(x, w, w, 1e-5, False, 4, mean_var)


def batch_norm(minibatch=torch.float32, dtype=torch.int32, device="cpu"):
    def call():
        x, ones = random(2, 3, 3, 8), torch.ones(8, dtype=F32, device="cpu")
        running = torch.zeros(8, dtype=F32, device="cpu"), torch.ones(8, dtype=F32, device="cpu")
        batch = [torch.zeros(8, dtype=minibatch, device="cpu") for _ in range(2)]
        mask = torch.zeros(36, dtype=dtype, device=device)
        end = (None, 0.1, 1e-5, None, None, None, None, 1, None, 2, 1, False)
        try:
            bnp.bn_addrelu_fwd_nhwc(x, x, ones, ones, *running, *batch, mask, *end)
        finally:
            assert not running[0].any() and not any(b.any() for b in batch)  # nothing was counted

    return call


LENGTHS = torch.tensor([3, 2], dtype=torch.int32, device="cpu")


def joint(offset):
    f, g = random(2, 3, 8), random(2, 3, 8)
    return lambda: transducer_joint_cuda.forward(
        f, g, LENGTHS, LENGTHS, offset, 13, 1, True, False, False, 0, 4
    )


def joint_backward(mask):
    grad = random(2, 3, 3, 8)
    return lambda: transducer_joint_cuda.backward([grad, mask], LENGTHS, LENGTHS, None, 3, 3, False, 1.0)


def loss(x):
    label = torch.ones(2, 2, dtype=torch.int64, device="cpu")
    return lambda: transducer_loss_cuda.forward(x, label, LENGTHS, LENGTHS - 1, None, 3, 0, 1, True)


def xentropy(saved):
    labels = torch.tensor([1, 2], dtype=torch.int64, device="cpu")
    return lambda: xentropy_cuda.backward(
        torch.ones(2, dtype=F32, device="cpu"), random(2, 5), saved, labels, 0.0
    )


F32, HALF = torch.float32, torch.float16
rotary = fused_rotary_positional_embedding
T, ANGLES = random(5, 2, 3, 8), random(5, 1, 1, 8)
CASES = {
    # The result would be broadcast.
    "out of more rows": (
        index_mul_2d(fused_index_mul_2d.float_forward, out=((7, 4), F32)),
        ValueError,
        r"forward: out must be \[1, 4\]",
    ),
    "gradient of more dimensions": (
        index_mul_2d(fused_index_mul_2d.float_backward, grad_in1=((2, 5, 4), F32)),
        ValueError,
        "grad_in1 must be",
    ),
    "gradient of more rows": (
        index_mul_2d(fused_index_mul_2d.half_backward, grad_in2=((5, 4), F32)),
        ValueError,
        "grad_in2 must be",
    ),
    "second gradient of more rows": (
        index_mul_2d(fused_index_mul_2d.float_backward_backward, grad_grad_out=((6, 4), F32)),
        ValueError,
        "grad_grad_out must be",
    ),
    # It would be rounded, or cut to whole numbers.
    "out of integers": (
        index_mul_2d(fused_index_mul_2d.float_forward, out=((1, 4), torch.int64)),
        TypeError,
        "must be a tensor of torch.float32, not torch.int64",
    ),
    "gradient of half": (
        index_mul_2d(fused_index_mul_2d.float_backward, grad_in1=((5, 4), HALF)),
        TypeError,
        "not torch.float16",
    ),
    "focal gradient of integers": (
        focal(partial_grad=torch.ones(3, 4, dtype=torch.int32, device="cpu")),
        TypeError,
        "partial_grad must be a floating-point tensor",
    ),
    "focal complex": (
        focal(grad_output=torch.ones((), dtype=torch.complex64, device="cpu")),
        TypeError,
        "grad_output must be",
    ),
    "focal number": (focal(num_positives_sum=3), TypeError, "num_positives_sum must be .*not int"),
    "focal devices": (
        focal(partial_grad=torch.ones(3, 4, device="meta", dtype=F32)),
        ValueError,
        "on cpu, meta and cpu",
    ),
    "sums of integers": (
        group_norm(torch.ones(16, dtype=torch.int32, device="cpu")),
        TypeError,
        "sums must be",
    ),
    "too few sums": (group_norm(torch.ones(14, dtype=F32, device="cpu")), ValueError, "16, not 14"),
    "mean and variance elsewhere": (
        group_norm_v2(torch.empty(16, device="meta", dtype=F32)),
        ValueError,
        "is on meta",
    ),
    "normalizers of integers": (
        xentropy(torch.ones(2, dtype=torch.int64, device="cpu")),
        TypeError,
        "max_log_sum_exp must be a floating-point tensor",
    ),
    "minibatch of half": (batch_norm(HALF), TypeError, "must be torch.float32, not torch.float16"),
    "minibatch of integers": (batch_norm(torch.int32), TypeError, "not torch.int32"),
    "mask of numbers": (batch_norm(dtype=F32), TypeError, "bitmask must be of integers"),
    "mask elsewhere": (batch_norm(device="meta"), ValueError, "bitmask is on meta"),
    # It would be another form of the work.
    "joint without offsets": (joint(None), TypeError, "batchOffset must be a tensor, not None"),
    "loss without offsets": (loss(random(2, 3, 3, 5)), TypeError, "batchOffset must be a tensor, not None"),
    "narrower mask of the joint": (
        joint_backward(torch.ones(2, 3, 3, 7, dtype=torch.uint8, device="cpu")),
        ValueError,
        "the mask's shape",
    ),
    "no sines": (lambda: rotary.forward_cached(T, ANGLES, None, False), TypeError, "sin must be a tensor"),
    "no sines of the gradient": (
        lambda: rotary.backward_cached(T, ANGLES, None, False),
        TypeError,
        "sin must be",
    ),
    "no sequences": (lambda: rotary.forward_thd(T, None, ANGLES), TypeError, "cu_seqlens must be"),
    "no sequences of the gradient": (
        lambda: rotary.backward_thd(T, None, ANGLES),
        TypeError,
        "cu_seqlens must be",
    ),
    "no sines in public": (
        lambda: functional.fused_apply_rotary_pos_emb_cached(T, ANGLES, None),
        TypeError,
        "sin_ must be",
    ),
    "no sequences in public": (
        lambda: functional.fused_apply_rotary_pos_emb_thd(T, None, ANGLES),
        TypeError,
        "cu_seqlens must be",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refused(case):
    call, error, text = CASES[case]
    with pytest.raises(error, match=text):
        call()
