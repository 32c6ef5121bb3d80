"""apex.contrib.multihead_attn against its formula in float64, and how the modules behave in torch."""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings

import pytest
import torch
from lists import BF16, F16, F32, F64
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from apex import amp
from apex.contrib import multihead_attn
from apex.contrib.multihead_attn import (
    EncdecMultiheadAttn,
    SelfMultiheadAttn,
    _core,
    fast_mask_softmax_dropout_func,
)
from tests.L0.signatures import signature

T, S, B, C, H = 5, 7, 3, 24, 4


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)


def normal(*shape, dtype=F64):
    return torch.randn(shape, dtype=F64, device="cpu").to(dtype)


def padding(keys=T):
    """The second item has no key left; the third all but one."""
    mask = torch.zeros(B, keys, dtype=torch.uint8, device="cpu")
    mask[1] = 1
    mask[2, 2] = 1
    return mask


def time_mask(queries=T, keys=T):
    return torch.ones(queries, keys, dtype=torch.uint8, device="cpu").triu(1)


def attend(q, k, v, left_out, added):
    """[Tq, B, C] of [T, B, H, d] each, by its formula: queries that keep nothing are zeros."""
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * q.shape[-1] ** -0.5
    if added is not None:
        scores, left_out = scores + added, (added == -torch.inf).expand(scores.shape)
    if left_out is not None:
        scores = scores.masked_fill(left_out, -torch.inf)
    p = torch.softmax(scores, -1)
    if left_out is not None:
        p = p.masked_fill(left_out.expand(scores.shape).all(-1, keepdim=True), 0.0)
    return torch.einsum("bhqk,kbhd->qbhd", p, v).flatten(2)


def expected(module, query, key, mask=None, is_time=False):
    """What a module must give without dropout, in the dtype of its inputs, differentiable."""
    x = query
    if module.include_norm_add:
        fast = module.impl == "fast"
        gamma = module.lyr_nrm_gamma_weights if fast else module.lyr_nrm.weight
        beta = module.lyr_nrm_beta_weights if fast else module.lyr_nrm.bias
        x = functional.layer_norm(query, (C,), gamma, beta, 1e-5)
    if isinstance(module, SelfMultiheadAttn):
        if module.separate_qkv_params:
            parts = [(getattr(module, f"{n}_weight"), getattr(module, f"{n}_bias")) for n in "qkv"]
            q, k, v = (functional.linear(x, w, b).unflatten(2, (H, -1)) for w, b in parts)
        else:
            q, k, v = (
                functional.linear(x, module.in_proj_weight, module.in_proj_bias)
                .unflatten(2, (H, 3, -1))
                .unbind(3)
            )
    else:
        q = functional.linear(x, module.in_proj_weight_q, module.in_proj_bias_q).unflatten(2, (H, -1))
        k, v = (
            functional.linear(key, module.in_proj_weight_kv, module.in_proj_bias_kv)
            .unflatten(2, (H, 2, -1))
            .unbind(3)
        )
    added = left_out = None
    if mask is not None:
        mask = mask[None, None] if is_time else mask[:, None, None]
        added, left_out = (mask, None) if mask.is_floating_point() else (None, mask.bool())
    out = functional.linear(attend(q, k, v, left_out, added), module.out_proj_weight, module.out_proj_bias)
    return out + query if module.include_norm_add else out


def randomize(module):
    """Biases and the norm's parameters too: what begins as 0 and 1 proves nothing."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) / 4)
    return module


def both_agree(module, *inputs, tolerance=1e-9, **masks):
    """Outputs and all gradients of the module and of its formula."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    wanted = [t.detach().clone().requires_grad_() for t in inputs]
    key = leaves[1] if len(leaves) > 1 else leaves[0]
    output, weights = module(leaves[0], key, key, **masks)
    assert weights is None
    mask = next((m for m in masks.values() if m is not None), None)
    right = expected(module, wanted[0], wanted[-1], mask, "attn_mask" in masks)
    torch.testing.assert_close(output, right, rtol=tolerance, atol=tolerance)
    dy = torch.randn_like(output)
    parameters = list(module.parameters())
    found = torch.autograd.grad(output, [*leaves, *parameters], dy)
    torch.testing.assert_close(
        found, torch.autograd.grad(right, [*wanted, *parameters], dy), rtol=tolerance, atol=tolerance
    )


MASKS = {
    "none": {},
    "padding": dict(key_padding_mask=padding()),
    "padding of bool": dict(key_padding_mask=padding().bool()),
    "padding of int64": dict(key_padding_mask=padding().long()),
    "time": dict(attn_mask=time_mask()),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("impl", ["fast", "default"])
@pytest.mark.parametrize(("bias", "norm", "separate"), itertools.product([False, True], repeat=3))
def test_self_attention(mask, impl, bias, norm, separate):
    module = SelfMultiheadAttn(C, H, 0.0, bias, norm, impl, separate).double()
    both_agree(randomize(module), normal(T, B, C), **MASKS[mask])


@pytest.mark.parametrize("impl", ["fast", "default"])
@pytest.mark.parametrize(("bias", "is_time"), itertools.product([False, True], repeat=2))
def test_additive_masks(impl, bias, is_time):
    mask = normal(T, T) if is_time else normal(B, T).masked_fill(padding().bool(), -torch.inf)
    module = SelfMultiheadAttn(C, H, 0.0, bias, False, impl, True, mask_additive=True).double()
    both_agree(randomize(module), normal(T, B, C), **{"attn_mask" if is_time else "key_padding_mask": mask})


@pytest.mark.parametrize("impl", ["fast", "default"])
@pytest.mark.parametrize("mask", ["none", "padding", "time"])
@pytest.mark.parametrize(("bias", "norm"), itertools.product([False, True], repeat=2))
def test_attention_to_other_keys(impl, mask, bias, norm):
    masks = {
        "none": {}, "padding": dict(key_padding_mask=padding(S)), "time": dict(attn_mask=time_mask(T, S)),
    }[mask]  # fmt: skip
    module = randomize(EncdecMultiheadAttn(C, H, 0.0, bias, norm, impl).double())
    both_agree(module, normal(T, B, C), normal(S, B, C), **masks)


@pytest.mark.parametrize("long", [False, True], ids=["by our kernels", "by torch"])
def test_long_rows_go_to_torch(monkeypatch, long):
    """The same results, rows that keep nothing too, whichever way."""
    if long:
        monkeypatch.setattr(_core, "LONG", 1)
        monkeypatch.setattr(_core, "LONG_UNMASKED", 1)
        monkeypatch.setattr(_core, "_Attention", None)
    added = normal(B, T).masked_fill(padding().bool(), -torch.inf)
    for masks in (
        {},
        dict(key_padding_mask=padding()),
        dict(attn_mask=time_mask()),
        dict(key_padding_mask=added),
    ):
        additive = any(m.is_floating_point() for m in masks.values())
        module = SelfMultiheadAttn(C, H, 0.0, True, False, "fast", False, additive).double()
        both_agree(randomize(module), normal(T, B, C), **masks)


def test_which_rows_are_long(monkeypatch):
    taken = []
    monkeypatch.setattr(_core, "_by_torch", lambda packed, *_: taken.append(len(packed)) or packed[..., :1])
    for keys, masked in ((511, False), (512, False), (512, True), (1024, True), (1025, True)):
        mask = torch.zeros(1, 1, 1, keys, dtype=torch.bool, device="cpu") if masked else None
        _core.attention(torch.zeros(keys, 1, 3, dtype=torch.float32, device="cpu"), None, 1, mask, 0.0)
    assert taken == [512, 1025]


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_dtypes(dtype):
    """No further from float64 than torch's own composition in the same dtype, forward and backward."""
    module = randomize(SelfMultiheadAttn(64, 4, 0.0, True)).to(dtype)
    x, dy = normal(33, 4, 64, dtype=dtype), normal(33, 4, 64, dtype=dtype)
    mask = torch.zeros(4, 33, dtype=torch.uint8, device="cpu")
    mask[:, 25:] = 1
    exact, theirs = copy.deepcopy(module).double(), module

    def composed(m, x):
        q, k, v = functional.linear(x, m.in_proj_weight, m.in_proj_bias).unflatten(2, (4, 3, -1)).unbind(3)
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        scores = (torch.matmul(q, k.transpose(2, 3)) * 0.25).masked_fill(
            mask[:, None, None].bool(), -torch.inf
        )
        context = torch.matmul(scores.softmax(-1), v).permute(2, 0, 1, 3).flatten(2)
        return functional.linear(context, m.out_proj_weight, m.out_proj_bias)

    def run(function, m, x, dy):
        x = x.detach().requires_grad_()
        y = function(m, x)
        return [y.detach(), *torch.autograd.grad(y, [x, *m.parameters()], dy)]

    right = run(composed, exact, x.double(), dy.double())
    ours = run(lambda m, x: m(x, x, x, key_padding_mask=mask)[0], module, x, dy)
    torchs = run(composed, theirs, x, dy)
    for a, b, c in zip(ours, torchs, right, strict=True):
        assert a.dtype == dtype
        mine, other = ((t.double() - c).norm().item() for t in (a, b))
        assert mine <= 1.1 * other + 1e-7 * c.norm().item()


# ---- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout_is_what_the_seed_says(monkeypatch):
    """Probabilities with the mask that the op returns for the same seed, forward and backward."""
    key = torch.tensor([77], dtype=torch.int64, device="cpu")
    monkeypatch.setattr(_core, "new_seed", lambda device: key)
    module = SelfMultiheadAttn(C, H, 0.4).double()
    x = normal(T, B, C).requires_grad_()
    mask = padding()
    output, _ = module(x, x, x, key_padding_mask=mask)
    kept = torch.ops.apex.masked_softmax_dropout_forward(
        torch.zeros(B, H, T, T, dtype=F64, device="cpu"), None, 0.4, key, True
    )[2]
    q, k, v = functional.linear(x, module.in_proj_weight).unflatten(2, (H, 3, -1)).unbind(3)
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) * (C // H) ** -0.5
    p = torch.softmax(scores.masked_fill(mask[:, None, None].bool(), -torch.inf), -1).nan_to_num(0.0)
    p = p * kept / 0.6
    right = functional.linear(torch.einsum("bhqk,kbhd->qbhd", p, v).flatten(2), module.out_proj_weight)
    torch.testing.assert_close(output, right)
    dy = torch.randn_like(output)
    leaves = [module.in_proj_weight, module.out_proj_weight]
    safe = torch.autograd.grad(output, [x, *leaves], dy)
    mine = torch.ones(B, dtype=torch.bool, device="cpu")
    mine[1] = False  # torch's own masked row has a gradient of nan
    wanted = torch.autograd.grad(right, x, dy)[0]
    torch.testing.assert_close(safe[0][:, mine], wanted[:, mine])
    assert all(t.isfinite().all() for t in safe) and safe[0][:, 1].eq(0).all()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", [SelfMultiheadAttn, EncdecMultiheadAttn])
def test_dropout_replays_in_a_checkpoint(kind, norm):
    """The same random numbers when the forward runs again: the same gradients, bit for bit."""
    module, gradients = kind(C, H, 0.5, include_norm_add=norm), []
    x, y = normal(T, B, C, dtype=F32), normal(S, B, C, dtype=F32)

    def run(x, y):
        return module(x, y, y)[0]

    for again in (False, True):
        torch.manual_seed(5)
        leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        output = checkpoint(run, *leaves, use_reentrant=False) if again else run(*leaves)
        gradients.append([output, *torch.autograd.grad(output.square().sum(), list(module.parameters()))])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_dropout_follows_torchs_generator():
    module, x, outputs = SelfMultiheadAttn(C, H, 0.5), normal(T, B, C, dtype=F32), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append([module(x, x, x)[0], module(x, x, x)[0]])
    assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1])
    assert not torch.equal(outputs[0][0], outputs[0][1]) and not torch.equal(outputs[0][0], outputs[2][0])
    still = module(x, x, x, is_training=False)[0]
    assert torch.equal(still, module(x, x, x, is_training=False)[0])
    torch.testing.assert_close(still, expected(module, x, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("additive", [False, True])
def test_the_softmax_alone(additive):
    scores = normal(B * H, T, S).requires_grad_()
    mask = normal(B, S) if additive else padding(S)
    y = fast_mask_softmax_dropout_func(True, H, scores, mask, additive, 0.0)
    given = scores.view(B, H, T, S)
    wide = mask[:, None, None]
    right = torch.softmax(
        given + wide if additive else given.masked_fill(wide.bool(), -torch.inf), -1
    ).nan_to_num(0.0)
    torch.testing.assert_close(y, right.view_as(y))
    dropped = fast_mask_softmax_dropout_func(True, H, scores, mask, additive, 0.5)
    at = dropped != 0
    torch.testing.assert_close(dropped[at], 2 * y[at])
    assert 0.2 < at.double().mean() < 0.6
    assert torch.equal(fast_mask_softmax_dropout_func(False, H, scores, mask, additive, 0.5), y)


# ---- in torch --------------------------------------------------------------------------------------------------------


def test_compiled():
    """One graph, with dropout too, by our op and by torch's attention."""
    for keys, mask in ((T, padding()), (T, None), (600, None)):
        module = randomize(SelfMultiheadAttn(C, H, 0.0, True, True))
        x = normal(keys, B, C, dtype=F32).requires_grad_()

        def run(x, module=module, mask=mask):
            return module(x, x, x, key_padding_mask=mask)[0]

        graph = torch.compile(run, fullgraph=True, backend="aot_eager")
        ours, eager = ([y, *torch.autograd.grad(y.square().sum(), x)] for y in (graph(x), run(x)))
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
        module.dropout = 0.5
        torch._dynamo.reset()
        graph = torch.compile(run, fullgraph=True, backend="aot_eager")
        assert not torch.equal(graph(x), graph(x))
        torch.autograd.grad(graph(x).sum(), x)


def test_sizes_that_are_no_numbers():
    """Sizes of a trace are tensors, those of a dynamic graph symbols: they are compared, and not put into a set."""
    module = EncdecMultiheadAttn(C, H)
    query, key = normal(T, B, C, dtype=F32), normal(S, B, C, dtype=F32)
    wanted = module(query, key, key)[0]

    class Output(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.module = module

        def forward(self, query, key):
            return self.module(query, key, key)[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a size that becomes a constant, which is what is wanted
        traced = torch.jit.trace(Output(), (query, key), check_trace=False)
    torch.testing.assert_close(traced(query, key), wanted)
    graph = torch.compile(Output(), fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(graph(query, key), wanted)
    with pytest.raises(ValueError, match=r"different batches: \[2, 3\]"):
        module(normal(T, 2, C, dtype=F32), normal(S, 3, C, dtype=F32), normal(S, 3, C, dtype=F32))


def test_compiled_backward():
    """Compiled autograd takes the backward, which writes into views, in one graph."""
    module, x = (
        randomize(SelfMultiheadAttn(C, H, 0.5, True, True)),
        normal(T, B, C, dtype=F32).requires_grad_(),
    )
    loss = module(x, x, x, key_padding_mask=padding())[0].square().sum()
    wanted = torch.autograd.grad(loss, [x, *module.parameters()], retain_graph=True)
    compiled = torch.compile(backend="aot_eager", fullgraph=True)
    with torch._dynamo.compiled_autograd._enable(compiled):
        loss.backward()
    torch.testing.assert_close(
        [x.grad, *(p.grad for p in module.parameters())], list(wanted), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_autocast(dtype):
    for module in (SelfMultiheadAttn(C, H, 0.1, True), EncdecMultiheadAttn(C, H, 0.1)):
        x = normal(T, B, C, dtype=F32).requires_grad_()
        with torch.autocast("cpu", dtype):
            y, _ = module(x, x, x, key_padding_mask=padding())
        assert y.dtype == dtype
        y.float().sum().backward()
        assert x.grad.dtype == F32 and all(p.grad.dtype == F32 for p in module.parameters())


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_backward_under_an_autocast(dropout):
    """That of the backward alone: the attention's gradients are not rounded to another dtype."""
    packed = normal(T, B, 3 * C, dtype=F32).requires_grad_()
    y = _core.attention(packed, None, H, None, dropout)
    g = normal(T, B, C, dtype=F32)
    (wanted,) = torch.autograd.grad(y, packed, g, retain_graph=True)
    with torch.autocast("cpu", BF16):
        (found,) = torch.autograd.grad(y, packed, g)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("long", [False, True])
def test_masks_get_no_gradient(monkeypatch, long):
    """However long the rows are."""
    monkeypatch.setattr(_core, "LONG", 1 if long else 10**9)
    mask = normal(B, T).requires_grad_()
    module = SelfMultiheadAttn(C, H, mask_additive=True).double()
    module(normal(T, B, C), key_padding_mask=mask)[0].sum().backward()
    assert mask.grad is None


def test_functional_transforms():
    """torch.func differentiates a module; a gradient of the gradient is refused in words."""
    module = SelfMultiheadAttn(C, H).double()
    x, parameters = normal(T, B, C), dict(module.named_parameters())

    def loss(p):
        return torch.func.functional_call(module, p, (x, x, x, padding()))[0].square().sum()

    found = torch.func.grad(loss)(parameters)
    wanted = torch.autograd.grad(loss(parameters), list(parameters.values()))
    torch.testing.assert_close(list(found.values()), list(wanted))
    batch = normal(2, T, B, C)
    mapped = torch.vmap(lambda x: module(x, x, x)[0])(batch)
    torch.testing.assert_close(mapped, torch.stack([module(x, x, x)[0] for x in batch]))
    first = torch.func.grad(lambda x: module(x, x, x)[0].square().sum())
    second, along = torch.func.grad(lambda x: first(x).sum())(x), normal(T, B, C) * 1e-5
    differences = (first(x + along).sum() - first(x - along).sum()) / 2
    torch.testing.assert_close((second * along).sum(), differences, rtol=1e-5, atol=0)
    with pytest.raises(NotImplementedError, match="masked_softmax_dropout: forward-mode"):
        torch.func.hessian(lambda x: module(x, x, x)[0].square().sum())(x)
    leaf = x.clone().requires_grad_()
    for loss in (lambda y: y.square().sum(), torch.sum):  # a sum's gradient has no history
        (first,) = torch.autograd.grad(loss(module(leaf, leaf, leaf)[0]), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable|double backward"):
            torch.autograd.grad(first.square().sum() + leaf.sum(), leaf)


def test_without_memory():
    """On the meta device, and of tensors that torch.export makes up; subclasses of tensors stay what they are."""
    mask = padding()
    module = SelfMultiheadAttn(C, H, 0.5, True, True)
    exported = torch.export.export(module, (normal(T, B, C, dtype=F32), None, None, mask))
    assert exported.module()(normal(T, B, C, dtype=F32), None, None, mask)[0].shape == (T, B, C)

    class Own(torch.Tensor):
        pass

    x = normal(T, B, C, dtype=F32).as_subclass(Own)
    assert type(module(x, x, x)[0]) is Own
    x = torch.empty(T, B, C, dtype=torch.float32, device="meta", requires_grad=True)
    output, _ = module.to("meta")(x, x, x, key_padding_mask=mask.to("meta"))
    output.sum().backward()
    assert output.shape == x.grad.shape and x.grad.device.type == "meta"


def test_layouts_and_empty_batches():
    """Transposed inputs give the same; a batch of none, and no queries, give none."""
    module = SelfMultiheadAttn(C, H).double()
    x = normal(T, B, C)
    wanted = module(x, x, x)[0]
    torch.testing.assert_close(module(*[x.transpose(0, 1).contiguous().transpose(0, 1)] * 3)[0], wanted)
    for shape in ((T, 0, C), (0, B, C)):
        leaf = normal(*shape).requires_grad_()
        output, _ = module(leaf, leaf, leaf)
        assert output.shape == shape
        output.sum().backward()
        assert leaf.grad.shape == shape


def test_parameters_are_publics():
    """Names, order and shapes, and the same values from the same seed."""
    names = [n for n, _ in SelfMultiheadAttn(C, H, bias=True, include_norm_add=True).named_parameters()]
    assert names == [
        "in_proj_weight", "out_proj_weight", "in_proj_bias", "out_proj_bias", "lyr_nrm_gamma_weights",
        "lyr_nrm_beta_weights",
    ]  # fmt: skip
    separate = SelfMultiheadAttn(C, H, bias=True, separate_qkv_params=True)
    assert [n for n, _ in separate.named_parameters()] == [
        "q_weight", "k_weight", "v_weight", "out_proj_weight", "q_bias", "k_bias", "v_bias", "out_proj_bias",
    ]  # fmt: skip
    module = EncdecMultiheadAttn(C, H, bias=True, include_norm_add=True, impl="default")
    assert [n for n, _ in module.named_parameters()] == [
        "in_proj_weight_q", "in_proj_weight_kv", "out_proj_weight", "in_proj_bias_q", "in_proj_bias_kv",
        "out_proj_bias", "lyr_nrm.weight", "lyr_nrm.bias",
    ]  # fmt: skip
    wide = SelfMultiheadAttn(512, 4).in_proj_weight
    bound = (6 / 1024) ** 0.5  # of a [C, C] matrix
    assert 0.99 * bound < wide.abs().max() <= bound


def test_deepcopy_and_state():
    module = randomize(SelfMultiheadAttn(C, H, 0.0, True, True))
    other = SelfMultiheadAttn(C, H, 0.0, True, True)
    other.load_state_dict(module.state_dict())
    x = normal(T, B, C, dtype=F32)
    assert torch.equal(other(x, x, x)[0], copy.deepcopy(module)(x, x, x)[0])


def test_refusals():
    for arguments, words in (
        (dict(num_heads=5), "not divisible"), (dict(num_heads=H, impl="quick"), "'fast' or 'default'"),
        (dict(num_heads=H, dropout=1.5), "between 0 and 1"),
    ):  # fmt: skip
        for kind in (SelfMultiheadAttn, EncdecMultiheadAttn):
            with pytest.raises(ValueError, match=words):
                kind(C, **arguments)
    module, x = SelfMultiheadAttn(C, H), normal(T, B, C, dtype=F32)
    for given, error, words in (
        (dict(key_padding_mask=padding(), attn_mask=time_mask()), ValueError, "cannot both be given"),
        (dict(key_padding_mask=padding()[0]), ValueError, r"padding mask is \[batch, Sk\]"),
        (dict(attn_mask=time_mask()[None]), ValueError, r"time mask is \[Sq, Sk\]"),
        (dict(key_padding_mask=padding(S)), ValueError, "does not broadcast"),
    ):
        with pytest.raises(error, match=words):
            module(x, x, x, **given)
    with pytest.raises(ValueError, match=r"query is \[time, batch, 24\]"):
        module(x[0], x[0], x[0])
    with pytest.raises(TypeError, match="has floating-point numbers"):
        SelfMultiheadAttn(C, H, mask_additive=True)(x, x, x, key_padding_mask=padding())
    for heads in (0, -2, 5):
        with pytest.raises(ValueError, match="do not divide into"):
            _core.attention(normal(T, B, 3 * C), None, heads, None, 0.0)
        with pytest.raises(ValueError, match=f"of {heads} heads"):
            fast_mask_softmax_dropout_func(True, heads, normal(2, T, T), None, False, 0.0)
    with pytest.raises(ValueError, match="different batches"):
        EncdecMultiheadAttn(C, H)(x, x[:, :2], x)
    for keys in (S, _core.LONG):  # by products, and by torch's attention, which would broadcast
        for shape in ((keys, 1, 2 * C), (keys, B, 3 * C)):
            with pytest.raises(ValueError, match="need keys and values"):
                _core.attention(normal(T, B, C), normal(*shape), H, None, 0.0)
    with pytest.raises(ValueError, match="of 5 heads"):
        fast_mask_softmax_dropout_func(True, 5, normal(B * H, T, T), None, False, 0.0)


def test_signatures():
    assert signature(SelfMultiheadAttn) == (
        "(embed_dim, num_heads, dropout=0.0, bias=False, include_norm_add=False, impl='fast', "
        "separate_qkv_params=False, mask_additive=False)"
    )
    names = list(inspect.signature(SelfMultiheadAttn.forward).parameters)[1:]
    public = ["query", "key", "value", "key_padding_mask", "need_weights", "attn_mask", "is_training"]
    assert names == public == list(inspect.signature(EncdecMultiheadAttn.forward).parameters)[1:]
    assert all(hasattr(multihead_attn, name) for name in multihead_attn.__all__)


def test_amp_o1():
    module = SelfMultiheadAttn(C, H, 0.1, True, True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model, optimizer = amp.initialize(module, optimizer, opt_level="O1", verbosity=0)
    try:
        x = normal(T, B, C, dtype=F32)
        y, _ = model(x, x, x, key_padding_mask=padding())
        with amp.scale_loss(y.float().square().mean(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    finally:
        amp._amp_state.handle._deactivate()


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [64, 1100])
def test_in_a_cuda_graph(keys):
    """Forward, dropout and backward in one graph: every replay drops others."""
    module = SelfMultiheadAttn(64, 4, 0.5, include_norm_add=True).cuda().half()
    x = torch.randn(keys, 2, 64, dtype=F16, device="cuda", requires_grad=True)
    mask = torch.zeros(2, keys, dtype=torch.uint8, device="cuda")

    def step():
        y, _ = module(x, x, x, key_padding_mask=mask)
        return y, torch.autograd.grad(y.float().square().sum(), x)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    seen = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        seen.append((y.clone(), dx.clone()))
    assert not torch.equal(seen[0][0], seen[1][0]) and not torch.equal(seen[1][1], seen[2][1])
    assert all(t.isfinite().all() for pair in seen for t in pair)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
def test_on_the_gpu(dtype):
    """The sizes of public's own tests, as float64 on the CPU has them."""
    module = randomize(SelfMultiheadAttn(C, H, 0.0, True, True))
    x, mask = normal(80, B, C), torch.zeros(B, 80, dtype=torch.uint8, device="cpu")
    mask[:, 60:] = 1
    right = expected(copy.deepcopy(module).double(), x, x, mask)
    x = x.to(dtype).cuda()
    found = module.cuda().to(dtype)(x, x, x, key_padding_mask=mask.cuda())[0]
    tolerance = {F16: 1e-2, BF16: 6e-2, F32: 1e-4}[dtype]
    torch.testing.assert_close(found.cpu().double(), right, rtol=tolerance, atol=tolerance)
