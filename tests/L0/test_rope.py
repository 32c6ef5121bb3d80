"""The ops of rotary embeddings against float64, on everything that can serve them."""

from __future__ import annotations

import lists
import pytest
import rope
import torch
from lists import BF16, F16, F32, F64
from rope import CASES, Case

from apex._loader import bindings

bindings.load()
op = torch.ops.apex


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(variant, case):
    """Forward, backward, double backward; the same input gives the same bits again."""
    first, again = rope.check(case, variant.device), rope.check(case, variant.device)
    lists.assert_same_bits(first, again)
    if variant.simt and all(case.shape):
        assert variant.kernels.total() > 0


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_large_angles(variant, dtype):
    """Angles of long contexts keep their digits; the largest, inf and nan give nan, in their element alone."""
    angles = torch.tensor([0.0, 1.0, 3e3, 1e5, 131071.0, 7e6, 1e9, 1e12], dtype=dtype, device="cpu")
    freqs = torch.stack((angles, -angles), 0).reshape(2, 1, 1, 8).to(variant.device)
    x = (
        torch.eye(8, dtype=dtype, device="cpu")
        .reshape(1, 8, 1, 8)
        .expand(2, 8, 1, 8)
        .contiguous()
        .to(variant.device)
    )
    found = op.rope_forward(x, freqs)
    rope.near(found, rope.exact(x.cpu().double(), freqs.cpu().double()))
    wrong = freqs.clone()
    wrong[0, 0, 0, :3] = torch.tensor([float("inf"), float("nan"), 1e20], dtype=dtype, device="cpu")
    found = op.rope_forward(torch.ones_like(x), wrong)
    assert (
        found[0, :, :, :3].isnan().all() and found[0, :, :, 3:].isfinite().all() and found[1].isfinite().all()
    )


def test_angles_differ_within_a_pair(variant):
    """The gradient is the transpose, also where the two halves of freqs are not the same."""
    x = lists.random(F64, variant.device, ((2, 1, 1, 4),), seed=1)[0].requires_grad_()
    freqs = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=F64, device=variant.device).expand(2, 1, 1, 4)
    y = op.rope_forward(x, freqs)
    g = lists.random(F64, variant.device, ((2, 1, 1, 4),), seed=2)[0]
    (dx,) = torch.autograd.grad(y, x, g)
    torch.testing.assert_close((g * y).sum(), (dx * x).sum())


def test_tables_lie_anyhow(variant):
    """Tables with strides of their own: a cut of a longer one, elements apart, cos and sin that lie differently."""
    device = variant.device
    x = lists.random(F32, device, ((3, 2, 2, 8),))[0]
    freqs = lists.random(F32, device, ((6, 1, 1, 16),), seed=4)[0]
    expected = op.rope_forward(x, freqs[::2, ..., ::2].contiguous())
    assert torch.equal(op.rope_forward(x, freqs[::2, ..., ::2]), expected)
    cos, sin = (
        freqs[::2, ..., ::2].cos(),
        freqs[::2, ..., ::2].sin().transpose(0, 3).contiguous().transpose(0, 3),
    )
    torch.testing.assert_close(op.rope_forward(x, cos, sin), expected, rtol=1e-6, atol=1e-6)


def test_copied_elements_are_exact(variant):
    """What does not turn keeps inf beside it from becoming nan."""
    x = torch.full((3, 2, 24), 5.0, dtype=F16, device=variant.device)
    x[:, :, 20:] = float("inf")
    x[2] = float("inf")  # padding
    ends = torch.tensor([0, 2], dtype=torch.int32, device=variant.device)
    y = op.rope_forward(x, torch.ones(2, 1, 1, 16, device=variant.device, dtype=F32), cu_seqlens=ends)
    assert (
        torch.equal(y[..., 16:], x[..., 16:]) and torch.equal(y[2], x[2]) and y[:2, :, :16].isfinite().all()
    )


@pytest.mark.gpu
@pytest.mark.parametrize(
    "ends", [(0, 5, 3, 8), (1, 8), (0, 900), (0, -4, 8), (-5, 8), (0, 8, 2**31 - 1)], ids=str
)
def test_cu_seqlens_that_make_no_sense_give_nan_on_a_gpu(ends):
    x = torch.ones(8, 2, 16, device="cuda", dtype=BF16)
    y = op.rope_forward(
        x,
        torch.ones(8, 1, 1, 8, device="cuda", dtype=F32),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32, device="cpu").cuda(),
    )
    assert y[..., :8].isnan().all() and torch.equal(y[..., 8:], x[..., 8:])


@pytest.mark.gpu
def test_huge():
    if torch.cuda.mem_get_info()[0] < 10 * 2**30:
        pytest.skip("needs 10 GiB of free GPU memory")
    x = torch.ones(2**24 + 3, 1, 128, device="cuda", dtype=BF16)
    ends = torch.tensor([0, x.shape[0]], dtype=torch.int32, device="cuda")
    y = op.rope_forward(
        x, torch.ones(1, 1, 1, 2, device="cuda", dtype=F32).expand(x.shape[0], 1, 1, 2), cu_seqlens=ends
    )
    assert torch.equal(y[-5:], y[:5]) and y[-1, 0, 0] < 0


CASE = Case("freqs", (3, 2, 2, 8), 8)


def test_refused():
    """Every wrong shape, dtype and device by name, before anything runs."""
    x, freqs = (
        torch.ones(3, 2, 2, 8, dtype=F32, device="cpu"),
        torch.ones(3, 1, 1, 8, dtype=F32, device="cpu"),
    )
    ends = torch.tensor([0, 3], dtype=torch.int32, device="cpu")
    image, table = (
        torch.ones(1, 2, 2, 1, 8, dtype=F32, device="cpu"),
        torch.ones(1, 2, 1, 4, dtype=F32, device="cpu"),
    )
    meta = torch.ones(3, 1, 1, 8, device="meta", dtype=F32)
    for error, text, arguments in [
        (ValueError, "4 dimensions", (x[0], freqs)),
        (ValueError, "4 dimensions", (x, freqs[0])),
        (ValueError, "2 places but the input 3", (x, freqs[:2])),
        (ValueError, r"\[places, 1, 1, dim\]", (x, freqs.reshape(3, 2, 1, 4))),
        (ValueError, "more than the input's 8", (x, torch.ones(3, 1, 1, 10, dtype=F32, device="cpu"))),
        (ValueError, "even", (x, freqs[..., :7])),
        (TypeError, "not Int", (x.int(), freqs)),
        (TypeError, "not Long", (x, freqs.long())),
        (TypeError, "one dtype", (x, freqs, freqs.half())),
        (ValueError, "sin has shape", (x, freqs, freqs[..., :4])),
        (ValueError, "meta", (x, freqs, meta)),
        (ValueError, "3 dimensions", (x, freqs, None, None, None, ends)),
        (TypeError, "int32", (x[0], freqs, None, None, None, ends.long())),
        (ValueError, "sequences", (x[0], freqs, None, None, None, ends[None])),
        (ValueError, "sequences", (x[0], freqs, None, None, None, ends[:0])),
        (ValueError, "both directions", (image, table, table, table)),
        (ValueError, "both directions", (image, table, table, table, table, ends)),
        (ValueError, "5 dimensions", (image[0], table, table, table, table)),
        (ValueError, "at least 2", (image, table[:, :1], table[:, :1], table, table)),
        (ValueError, "half of the input's", (image, table[..., :2], table[..., :2], table, table)),
        (
            ValueError,
            "even",
            (image[..., :6], table[..., :3], table[..., :3], table[..., :3], table[..., :3]),
        ),
    ]:
        for function in (op.rope_forward, op.rope_backward):
            with pytest.raises(error, match=text):
                function(*arguments)


@pytest.mark.parametrize(
    "ends, text",
    [
        ((0, 5, 3, 8), "falls from 5 to 3"),
        ((1, 8), "from 1 to 8"),
        ((0, 9), "from 0 to 9"),
        ((0, 8), "sequence 0 has 8"),
    ],
    ids=str,
)
def test_cu_seqlens_that_make_no_sense_are_refused_on_a_cpu(variant, ends, text):
    if variant.name == "cuda":
        pytest.skip("a GPU answers with nan: the host would have to wait to know")
    variant.mixed = True  # refused before anything runs
    x = torch.ones(8, 2, 16, dtype=F32, device="cpu")
    with pytest.raises(ValueError, match=text):
        op.rope_forward(
            x,
            torch.ones(7, 1, 1, 8, dtype=F32, device="cpu"),
            cu_seqlens=torch.tensor(ends, dtype=torch.int32, device="cpu"),
        )
