"""The raw functions of the public engine's transformer_engine_extensions, and those by a layer's state around them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from te_common import DEVICES, EPSILON, FORMULAS, TENSOR_CORES, random
from torch_defaults import float32_on_cpu

from apex import _legacy
from apex._legacy import transformer_engine_extensions as tex
from apex._loader import registry
from apex.reference import fp8 as reference
from apex.transformer_engine.pytorch import _formats, constants, cpp_extensions
from apex.transformer_engine.pytorch.attention import _masks

pytestmark = pytest.mark.usefixtures("plain_defaults")
U8, F32, BF16 = torch.uint8, torch.float32, torch.bfloat16
CODES = pytest.mark.parametrize("otype", [tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2], ids=lambda d: d.name)
ON = pytest.mark.parametrize("device", DEVICES)
NONE = torch.empty(0, dtype=F32, device="cpu")


@pytest.fixture
def plain_defaults():
    with float32_on_cpu():
        yield


def state(device, scale=3.0, amax=0.5):
    return [torch.full((1,), number, dtype=F32, device=device) for number in (scale, amax, 7.0)]


def fp8_of(otype, device):
    return _formats.formats(torch.device(device))[otype - tex.DType.kFloat8E4M3]


def bytes_of(tensor):
    return tensor.contiguous().view(U8)


def sums(expected, quantized=True):
    """What a product may be off by: of the largest of its numbers where a card adds FP8 products."""
    if quantized and _formats.multiplies(expected.device):
        return dict(rtol=TENSOR_CORES, atol=TENSOR_CORES * expected.abs().max().item())
    return dict(rtol=1e-4, atol=1e-4)


def empty(*shape, device="cpu"):
    return torch.zeros(shape, dtype=U8, device=device)


def seen(given, x, scale=3.0):
    """Checks what a cast of x wrote beside its codes."""
    assert given[1] == max(0.5, x.abs().max().float()) and given[2] == 1 / torch.tensor(
        scale, dtype=F32, device="cpu"
    )


# ---- casts and transposes --------------------------------------------------------------------------------------------


@ON
@CODES
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float16], ids=str)
def test_casts(device, otype, dtype):
    x, of = 4 * random(5, 3, 33, dtype=dtype, device=device), fp8_of(otype, device)
    wanted = reference.quantize(x, state(device)[0], of)
    given = state(device)
    codes = tex.cast_to_fp8(x, *given, otype)
    assert codes.dtype == U8 and torch.equal(codes, bytes_of(wanted))
    seen(given, x)
    given, out = state(device), empty(5, 3, 33, device=device)
    tex.cast_to_fp8_noalloc(x, given[0], out, *given[1:], otype)
    assert torch.equal(out, codes)
    for wide in (tex.DType.kFloat32, tex.DType.kBFloat16, torch.float16):
        back = tex.cast_from_fp8(codes, given[2], otype, wide)
        to = constants.torch_dtype(wide, back.device)
        assert torch.equal(back, reference.dequantize(wanted, given[2], to))
    assert torch.equal(tex.cast_to_fp8(x, *state(device), of), codes)  # by torch's dtype, too


@ON
@CODES
def test_casts_with_transposes(device, otype):
    x, of = 4 * random(48, 33, dtype=BF16, device=device), fp8_of(otype, device)
    wanted = bytes_of(reference.quantize(x, state(device)[0], of))
    for noop in (None, 0.0, 1.0):
        given, codes, turned = state(device), empty(48, 33, device=device), empty(33, 48, device=device)
        if noop is None:
            tex.fused_cast_transpose(x, *given, codes, turned, otype)
        else:
            flag = torch.full((1,), noop, dtype=F32, device=device)
            tex.fused_cast_transpose_noop(x, flag, *given, codes, turned, otype)
        if noop == 1:
            assert not codes.any() and not turned.any() and given[1] == 0.5 and given[2] == 7
            continue
        assert torch.equal(codes, wanted) and torch.equal(turned, wanted.t())
        seen(given, x)
    flag = torch.ones(1, dtype=F32, device=device)
    out = empty(33, 48, device=device)
    tex.fp8_transpose_noalloc_noop(wanted, out, flag, otype)
    assert not out.any()
    tex.fp8_transpose_noalloc_noop(wanted, out, flag - 1, otype)
    assert torch.equal(out, wanted.t()) and torch.equal(tex.fp8_transpose(wanted, otype), wanted.t())
    tex.fp8_transpose_noalloc(wanted[:3], out[:, :3].contiguous(), otype)


@ON
@CODES
def test_casts_with_bias_gradients(device, otype):
    grad, before = (random(48, 33, seed=seed, dtype=BF16, device=device) for seed in (0, 1))
    of, scale = fp8_of(otype, device), state(device)[0]
    given = state(device)
    sums, codes, turned = tex.fused_cast_transpose_bgrad(grad, *given, otype)
    wanted = reference.quantize_transpose(grad, scale, of, bias_gradient=True)
    assert torch.equal(codes, bytes_of(wanted[0])) and torch.equal(turned, bytes_of(wanted[1]))
    assert sums.dtype == BF16
    assert torch.allclose(sums.double(), grad.double().sum(0), rtol=2 * EPSILON[BF16], atol=1e-5)
    seen(given, grad)
    sums, codes, turned = tex.fused_cast_transpose_bgrad_dgelu(grad, before, *state(device), otype)
    leaf = before.double().requires_grad_()
    F.gelu(leaf, approximate="tanh").backward(grad.double())
    back = reference.from_codes(codes, of).double()
    assert torch.equal(codes.t(), turned)
    step = 2.0 ** -(3 if otype == tex.DType.kFloat8E4M3 else 2)
    assert torch.allclose(back / 3, leaf.grad, rtol=step, atol=2.0**-7)
    assert torch.allclose(sums.double(), leaf.grad.sum(0), rtol=2 * EPSILON[BF16], atol=1e-4)
    inverse = torch.full((1,), 0.25, dtype=F32, device=device)
    codes = bytes_of(wanted[0])
    sums, turned = tex.fused_fp8_transpose_bgrad(
        codes, *state(device)[:2], inverse, otype, tex.DType.kFloat32
    )
    assert torch.equal(turned, codes.t()) and sums.dtype == F32
    assert torch.allclose(sums.double(), (reference.from_codes(codes, of).double() / 4).sum(0), rtol=1e-5)


@ON
def test_casts_of_many(device):
    """Dtypes may be mixed; each has its own scale."""
    otype, of = tex.DType.kFloat8E4M3, fp8_of(6, device)
    inputs = [random(8 + i, 16, seed=i, dtype=BF16 if i % 2 else F32, device=device) for i in range(4)]
    states = [state(device, scale=1.0 + i) for i in range(4)]
    codes = [empty(*x.shape, device=device) for x in inputs]
    turned = [empty(16, x.shape[0], device=device) for x in inputs]
    scales, amaxes, inverses = zip(*states, strict=True)
    tex.fused_multi_cast_transpose(inputs, [*scales], codes, turned, [*amaxes], [*inverses], otype)
    for i, x in enumerate(inputs):
        wanted = bytes_of(reference.quantize(x, scales[i], of))
        assert torch.equal(codes[i], wanted) and torch.equal(turned[i], wanted.t())
        seen(states[i], x, 1.0 + i)


# ---- activations and norms -------------------------------------------------------------------------------------------


@ON
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_activations(device, name, dtype):
    x = random(4, 6, 32, dtype=dtype, device=device)
    leaf = x.double().requires_grad_()
    wanted = FORMULAS[name](leaf).flatten(0, 1)
    grad = random(*wanted.shape, seed=1, dtype=dtype, device=device)
    wanted.backward(grad.double())
    rtol, function = 4 * EPSILON[dtype], getattr(tex, name)
    found = function(x, NONE, NONE, NONE, tex.DType.kBFloat16 if dtype == BF16 else tex.DType.kFloat32)
    assert found.dtype == dtype and found.shape == wanted.shape
    assert torch.allclose(found.double(), wanted.detach(), rtol=rtol, atol=1e-6)
    given = state(device)
    codes = function(x, *given, tex.DType.kFloat8E4M3)
    back = reference.from_codes(codes, fp8_of(6, device)).double() / 3
    assert torch.allclose(back, wanted.detach(), rtol=2.0**-3, atol=2.0**-9)
    assert torch.allclose(given[1].double(), wanted.detach().abs().max().clamp_min(0.5), rtol=rtol)
    slope = getattr(tex, f"d{name}")(grad, x, tex.DType.kFloat32)
    assert slope.dtype == F32
    assert torch.allclose(slope.double(), leaf.grad.flatten(0, 1), rtol=rtol, atol=2 * EPSILON[dtype])


@ON
@pytest.mark.parametrize("centered", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_norms(device, centered, zero_centered, dtype):
    x, weight, bias, grad = (
        random(*shape, seed=i, dtype=dtype, device=device)
        for i, shape in enumerate([(24, 64), (64,), (64,), (24, 64)])
    )
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    gamma = leaves[1] + 1 if zero_centered else leaves[1]
    if centered:
        wanted = F.layer_norm(leaves[0], (64,), gamma, leaves[2], 1e-5)
    else:
        wanted = F.rms_norm(leaves[0], (64,), gamma, 1e-5)
    wanted.backward(grad.double())
    given = (weight, bias) if centered else (weight,)
    name = "layernorm" if centered else "rmsnorm"
    near = dict(rtol=8 * EPSILON[dtype], atol=8 * EPSILON[dtype])
    made, *statistics = getattr(tex, f"{name}_fwd")(x, *given, 1e-5, 0, zero_centered)
    assert made.dtype == dtype and torch.allclose(made.double(), wanted.detach(), **near)
    assert all(s.shape == (24,) and s.dtype == F32 for s in statistics) and len(statistics) == 1 + centered
    out = torch.empty_like(made)
    assert getattr(tex, f"{name}_fwd_noalloc")(x, *given, out, 1e-5, 0, zero_centered)[0] is out
    assert torch.equal(out, made)
    cast = state(device)
    codes, *others = getattr(tex, f"{name}_fwd_fp8")(
        x, *given, 1e-5, *cast, tex.DType.kFloat8E4M3, 0, zero_centered
    )
    back = reference.from_codes(codes, fp8_of(6, device)).double() / 3
    assert torch.allclose(back, wanted.detach(), rtol=2.0**-3, atol=2.0**-6) and cast[2] == 1 / cast[0]
    assert torch.allclose(cast[1].double(), wanted.detach().abs().max(), rtol=8 * EPSILON[F32])
    assert all(torch.allclose(a, b) for a, b in zip(others, statistics, strict=True))
    out, (scale, amax, inverse) = empty(24, 64, device=device), state(device)
    arguments = scale, out, amax, inverse, tex.DType.kFloat8E4M3, 0, zero_centered
    getattr(tex, f"{name}_fwd_fp8_noalloc")(x, *given, 1e-5, *arguments)
    assert torch.equal(out, codes)
    made = getattr(tex, f"{name}_bwd")(grad, x, *statistics, weight, 0, zero_centered)
    assert len(made) == 2 + centered
    for found, leaf in zip(made, leaves, strict=False):
        assert found.dtype == dtype
        assert torch.allclose(found.double(), leaf.grad, rtol=16 * EPSILON[dtype], atol=32 * EPSILON[dtype])


# ---- products --------------------------------------------------------------------------------------------------------


EPILOGUES = ["", "bias", "gelu", "bias gelu", "accumulate", "grad bias", "grad gelu", "grad bias gelu"]


def slope_of_gelu(x):
    leaf = x.detach().requires_grad_()
    F.gelu(leaf, approximate="tanh").sum().backward()
    return leaf.grad


@ON
@pytest.mark.parametrize("quantized", [True, False], ids=["fp8", "plain"])
@pytest.mark.parametrize("transa", [True, False])
@pytest.mark.parametrize("transb", [True, False])
@pytest.mark.parametrize(
    "epilogue", ["", "bias", "gelu", "bias gelu", "accumulate", "grad bias", "grad gelu", "grad bias gelu"]
)
def test_products(device, quantized, transa, transb, epilogue):
    m, n, k, of = 32, 48, 64, fp8_of(6, device)
    a, b = random(m, k, dtype=BF16, device=device), random(n, k, seed=1, dtype=BF16, device=device)
    inverses, types = [None, None], [tex.DType.kBFloat16] * 2
    wide = [t.double() for t in (a, b)]
    if quantized:
        inverses = [torch.full((1,), 2.0**-p, dtype=F32, device=device) for p in (1, 2)]
        types = [tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2]
        formats = of, fp8_of(7, device)
        codes = [reference.quantize(t, 1 / i, f) for t, i, f in zip((a, b), inverses, formats, strict=True)]
        wide = [
            reference.from_codes(bytes_of(c), f).double() * i
            for c, f, i in zip(codes, formats, inverses, strict=True)
        ]
        a, b = map(bytes_of, codes)
    product = wide[1] @ wide[0].t()
    given_a, given_b = a if transa else a.t().contiguous(), b.t().contiguous() if transb else b
    grad = "grad" in epilogue
    bias, before = NONE.to(device), NONE.to(device)
    out = random(n, m, seed=4, device=device)
    if "bias" in epilogue:
        sizes = n if epilogue == "grad bias" else m
        bias = random(sizes, seed=2, device=device)
    if "gelu" in epilogue:
        before = random(n, m, seed=3, device=device)
    wanted, wanted_bias = product, None
    if grad:
        wanted = product * slope_of_gelu(before.double()) if "gelu" in epilogue else product
        wanted_bias = wanted.sum(0) if "gelu" in epilogue else wide[1].sum(1)
    elif "bias" in epilogue:
        wanted = product + bias.double()
    before_gelu = wanted
    if "gelu" in epilogue and not grad:
        wanted = F.gelu(wanted, approximate="tanh")
    if epilogue == "accumulate":
        wanted = wanted + out.double()
    tex.te_gemm(
        *(given_a, inverses[0], types[0], transa, given_b, inverses[1], types[1], transb),
        *(out, NONE, tex.DType.kFloat32, NONE, bias, tex.DType.kFloat32, before, grad),
        *(empty(1), 1, epilogue == "accumulate", True, 0),
    )
    near = sums(product, quantized)
    assert torch.allclose(out.double(), wanted, **near)
    if grad and "bias" in epilogue:
        assert torch.allclose(bias.double(), wanted_bias, **near)
    if "gelu" in epilogue and not grad:
        assert torch.allclose(before.double(), before_gelu, **near)


@ON
def test_products_that_are_cast(device):
    a, b, of = random(32, 64, device=device), random(48, 64, seed=1, device=device), fp8_of(6, device)
    one = torch.ones(1, dtype=F32, device=device)
    codes = [bytes_of(reference.quantize(t, one, of)) for t in (a, b)]
    wide = [reference.from_codes(c, of) for c in codes]
    scale, amax, _ = state(device, amax=0.0)
    out, e4m3 = empty(48, 32, device=device), tex.DType.kFloat8E4M3
    tex.te_gemm(
        *(
            codes[0],
            one,
            e4m3,
            True,
            codes[1],
            one,
            e4m3,
            False,
            out,
            scale,
            e4m3,
            amax,
            NONE,
            e4m3,
            NONE,
            False,
        ),
    )
    wanted = wide[1] @ wide[0].t()
    assert torch.allclose(reference.from_codes(out, of) / 3, wanted, rtol=2.0**-3, atol=2.0**-9)
    assert torch.allclose(amax, wanted.abs().max(), **sums(wanted))
    with pytest.raises(ValueError, match="accumulate"):
        tex.te_gemm(
            *(
                codes[0],
                one,
                e4m3,
                True,
                codes[1],
                one,
                e4m3,
                False,
                out,
                scale,
                e4m3,
                amax,
                NONE,
                e4m3,
                NONE,
                False,
            ),
            *(NONE, 0, True),
        )


# ---- scales, softmax, rotary positions -------------------------------------------------------------------------------


@ON
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("reduced", [True, False])
def test_new_scales(device, algorithm, reduced):
    """By the public kernel's rule, one column after the other."""
    sizes, rows = (3, 2), 4
    histories = [random(rows, n, seed=n, device=device).abs() for n in sizes]
    histories[0][0, 1] = 0.0  # nothing was seen: scale and history stay
    histories[1][0, 1] = float("inf")  # the scale stays, and the history moves on
    scales = [random(n, seed=9, device=device).abs() for n in sizes]
    inverses = [torch.zeros(n, dtype=F32, device=device) for n in sizes]
    buffer = torch.tensor([5.0, 0.0, 0.0, 2.0, 0.0], dtype=F32, device=device) if reduced else NONE.to(device)
    wanted = []
    largest, at = _formats.largest(fp8_of(6, device)), 0
    for history, scale in zip(histories, scales, strict=True):
        for column in range(history.shape[1]):
            values, old = history[:, column].tolist(), scale[column].item()
            newest = buffer[at].item() if reduced and buffer[at] != 0 else values[0]
            at += 1
            if newest == 0:
                wanted.append((values, old))
                continue
            amax = newest if algorithm == "most_recent" else max(newest, *values[1:])
            new = largest / amax / 2 if amax < float("inf") else old
            wanted.append(([0.0, *values[2:], newest], new))
    tex.fused_amax_and_scale_update_after_reduction(
        buffer, histories, scales, inverses, algorithm, tex.DType.kFloat8E4M3, 1.0
    )
    found = [
        (history[:, i], scale[i], inverse[i])
        for history, scale, inverse in zip(histories, scales, inverses, strict=True)
        for i in range(scale.numel())
    ]
    for (history, scale, inverse), (values, new) in zip(found, wanted, strict=True):
        assert torch.allclose(history.cpu(), torch.tensor(values, dtype=F32, device="cpu"), rtol=0, atol=0)
        assert abs(scale.item() / new - 1) < 1e-6 and abs(inverse.item() * new - 1) < 1e-6


@ON
def test_softmax_and_rotary_positions(device):
    """The functions of the other modules by this one's names; of aligned masks the last query sees all keys."""
    scores, grad = (random(2, 3, 4, 8, seed=s, dtype=BF16, device=device) for s in (0, 1))
    leaf = scores.double().requires_grad_()
    hidden = torch.ones(4, 8, dtype=torch.bool, device=device).triu(5)
    wanted = (leaf * 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    wanted.backward(grad.double())
    made = tex.scaled_aligned_causal_masked_softmax_forward(scores, 0.5)
    assert torch.allclose(made.double(), wanted.detach(), atol=EPSILON[BF16])
    back = tex.scaled_aligned_causal_masked_softmax_backward(grad, made, 0.5)
    assert torch.allclose(back.double(), leaf.grad, atol=4 * EPSILON[BF16])
    mask = hidden.expand(2, 1, 4, 8)
    assert torch.equal(tex.scaled_masked_softmax_forward(scores, mask, 0.5), made)
    square = scores[..., :4].flatten(0, 1)
    upper = torch.ones(4, 4, dtype=torch.bool, device=device).triu(1).expand(1, 1, 4, 4)
    wanted = tex.scaled_masked_softmax_forward(square[None], upper, 0.5)[0]
    assert torch.equal(tex.scaled_upper_triang_masked_softmax_forward(square, 0.5), wanted)
    x, angles = random(4, 2, 3, 8, device=device), random(4, 1, 1, 8, seed=1, device=device)
    turned = torch.cat((-x[..., 4:], x[..., :4]), -1)
    wanted = x * angles.cos() + turned * angles.sin()
    assert torch.allclose(tex.fused_rope_forward(x, angles, False), wanted, atol=1e-6)
    back = tex.fused_rope_backward(tex.fused_rope_forward(x, angles, True), angles, False)
    both = angles.clone()
    both[..., 4:] = both[..., :4]  # a turn that the other undoes
    again = tex.fused_rope_backward(tex.fused_rope_forward(x, both, True), both, False)
    assert torch.allclose(again, x, atol=1e-6) and back.shape == x.shape


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_refusals():
    x, e4m3 = random(4, 8), tex.DType.kFloat8E4M3
    codes, given = empty(4, 8), state("cpu")
    cases = [
        (TypeError, "FP8", lambda: tex.cast_to_fp8(x, *given, tex.DType.kBFloat16)),
        (TypeError, "takes float32", lambda: tex.cast_to_fp8(x.double(), *given, e4m3)),
        (TypeError, "DType", lambda: tex.cast_to_fp8(x, *given, "e4m3")),
        (TypeError, "DType", lambda: tex.cast_to_fp8(x, *given, 12)),
        (TypeError, "uint8", lambda: tex.cast_from_fp8(x, given[2], e4m3, tex.DType.kFloat32)),
        (TypeError, "uint8", lambda: tex.cast_to_fp8_noalloc(x, given[0], x.clone(), *given[1:], e4m3)),
        (
            ValueError,
            "shape",
            lambda: tex.fused_multi_cast_transpose(
                [x], *[[g] for g in (given[0], codes, codes, *given[1:])], e4m3
            ),
        ),
        (ValueError, "shape", lambda: tex.cast_to_fp8_noalloc(x, given[0], codes.t(), *given[1:], e4m3)),
        (ValueError, "shape", lambda: tex.fused_cast_transpose(x, *given, codes, codes, e4m3)),
        (ValueError, "lengths", lambda: tex.fused_multi_cast_transpose([x], [], [], [], [], [], e4m3)),
        (
            ValueError,
            "scale",
            lambda: tex.cast_to_fp8(x, torch.ones(2, dtype=F32, device="cpu"), *given[1:], e4m3),
        ),
        (ValueError, "product", lambda: products(D=x)),
        (ValueError, "matrix", lambda: products(A=x[0])),
        (ValueError, "A_scale_inverse", lambda: products(A=codes, A_type=e4m3, B=codes, B_type=e4m3)),
        (
            TypeError,
            "one floating-point dtype",
            lambda: products(B=codes, B_type=e4m3, B_scale_inverse=given[0]),
        ),
        (TypeError, "is said to be", lambda: products(B_type=tex.DType.kBFloat16)),
        (ValueError, "rows", lambda: new_scales([random(2, 3), random(3, 3)])),
    ]
    for error, text, call in cases:
        with pytest.raises(error, match=text):
            call()
        assert not codes.any() and given[1] == 0.5 and given[2] == 7  # nothing is written


def many(*given):
    tex.fused_multi_cast_transpose(*([tensor] for tensor in given), tex.DType.kFloat8E4M3)


def products(**changed):
    f32 = tex.DType.kFloat32
    given = dict(
        A=random(6, 8), A_scale_inverse=NONE, A_type=f32, transa=True, B=random(4, 8), B_scale_inverse=NONE, B_type=f32,
        transb=False, D=torch.zeros(4, 6, dtype=F32, device="cpu"), D_scale=NONE, D_type=f32, D_amax=NONE, bias=NONE,
        bias_type=f32, pre_gelu_out=NONE, grad=False,
    )  # fmt: skip
    if "A" in changed and changed["A"].dim() == 2:
        given["D"] = torch.zeros(4, 4, dtype=F32, device="cpu")
    tex.te_gemm(**given | changed)


def new_scales(histories):
    ones = [torch.ones(3, dtype=F32, device="cpu") for _ in histories]
    tex.fused_amax_and_scale_update_after_reduction(
        NONE, histories, ones, ones, "max", tex.DType.kFloat8E4M3, 0.0
    )


# ---- names -----------------------------------------------------------------------------------------------------------

# Of the public module, releases 1.0 to 1.13, what is not here.
ELSEWHERE = """
    fused_attn_fwd fused_attn_bwd fused_attn_fwd_qkvpacked fused_attn_bwd_qkvpacked fused_attn_fwd_kvpacked
    fused_attn_bwd_kvpacked fa_prepare_fwd fa_prepare_bwd get_fused_attn_backend NVTE_Bias_Type NVTE_Mask_Type
    NVTE_QKV_Layout NVTE_Fused_Attn_Backend UbufOverlapAlgo UbufCommOverlap UbufP2PCommOverlap
    ubuf_built_with_mpi CommOverlap te_atomic_gemm te_grouped_gemm moe_permute_fwd moe_unpermute_bwd
    multi_tensor_adam_fp8 thd_read_half_tensor thd_get_partitioned_indices quantize dequantize
    generic_gemm
"""


def test_names_that_are_not_here_say_why():
    for module in (tex, cpp_extensions):
        for name in ELSEWHERE.split():
            assert not hasattr(module, name)
            with pytest.raises(AttributeError, match=f"has no attribute '{name}': .*here|use|by"):
                getattr(module, name)
            with pytest.raises(ImportError, match=f"has no attribute '{name}': "):
                exec(f"from {module.__name__} import {name}")
        with pytest.raises(AttributeError, match="no attribute 'no_such'$"):
            _ = module.no_such


def test_the_import_name():
    """A wheel's top-level module has the functions, and says the same of the others."""
    assert registry.extensions()["transformer_engine_extensions"].state == "complete"
    found = {"__name__": "transformer_engine_extensions"}
    exec(_legacy.module_text("transformer_engine_extensions"), found)
    assert all(found[name] is getattr(tex, name) for name in tex.__all__)
    with pytest.raises(AttributeError, match="DotProductAttention"):
        found["__getattr__"]("fused_attn_fwd")


def test_enumerations_have_the_engine_s_numbers():
    names = ["kByte", "kInt32", "kInt64", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2"]
    assert [d.name for d in tex.DType] == names and [*tex.DType] == [*range(8)]
    assert [t.name for t in tex.FP8FwdTensors][:4] == [
        "GEMM1_INPUT",
        "GEMM1_WEIGHT",
        "GEMM1_OUTPUT",
        "GEMM2_INPUT",
    ]
    assert [t.name for t in tex.FP8BwdTensors] == [
        "GRAD_OUTPUT1", "GRAD_INPUT1", "GRAD_OUTPUT2", "GRAD_INPUT2", "GRAD_OUTPUT3", "GRAD_INPUT3",
    ]  # fmt: skip
    assert (
        tex.FP8FwdTensors.GEMM3_OUTPUT == 8
        and torch.arange(9, dtype=F32, device="cpu")[tex.FP8FwdTensors.GEMM2_WEIGHT] == 4
    )
    assert sorted(constants.AttnMaskTypes) == sorted(_masks.KINDS)
    for dtype, name in constants.TE_DType.items():
        assert constants.torch_dtype(name, torch.device("cpu")) == dtype or "fnuz" in str(dtype)


# ---- arguments that are no tensors, or not such --------------------------------------------------------------------


def well_called():
    """Arguments of each raw function, which it takes."""
    one, x, codes = (lambda v=1.0: torch.full((1,), v, dtype=F32, device="cpu")), random(4, 16), empty(4, 16)
    turned, ones = codes.t().contiguous(), torch.ones(16, dtype=F32, device="cpu")
    e4m3, f32 = tex.DType.kFloat8E4M3, tex.DType.kFloat32
    rows, cast = torch.ones(4, dtype=F32, device="cpu"), (one(), one(0.0), one(), e4m3)
    return {
        "cast_to_fp8": (x, *cast),
        "cast_to_fp8_noalloc": (x, one(), codes, one(0.0), one(), e4m3),
        "cast_from_fp8": (codes, one(), e4m3, f32),
        "fused_cast_transpose": (x, one(), one(0.0), one(), codes, turned, e4m3),
        "fused_cast_transpose_bgrad": (x, *cast),
        "fused_cast_transpose_bgrad_dgelu": (x, x, *cast),
        "fused_fp8_transpose_bgrad": (codes, *cast, f32),
        "fp8_transpose": (codes, e4m3),
        "fp8_transpose_noalloc": (codes, turned, e4m3),
        "gelu": (x, *cast),
        "swiglu": (x, *cast),
        "dgelu": (x, x, f32),
        "layernorm_fwd": (x, ones, ones, 1e-5, 0, False),
        "layernorm_fwd_noalloc": (x, ones, ones, torch.empty_like(x), 1e-5, 0, False),
        "layernorm_bwd": (x, x, rows, rows, ones, 0, False),
        "rmsnorm_fwd": (x, ones, 1e-5, 0, False),
        "rmsnorm_bwd": (x, x, rows, ones, 0, False),
        "rmsnorm_fwd_fp8": (x, ones, 1e-5, *cast, 0, False),
    }


@pytest.mark.parametrize("name", well_called())
def test_arguments_that_are_no_such_tensors(name):
    """Each tensor of each function in turn: refused in words, and nothing of torch's or Python's own."""
    function = getattr(tex, name)
    function(*well_called()[name])
    several = sum(isinstance(argument, torch.Tensor) for argument in well_called()[name]) > 1
    for place, argument in enumerate(well_called()[name]):
        if not isinstance(argument, torch.Tensor):
            continue
        whole = argument.shape != (1,)
        bad = [3, "x", [1.0], argument.to(torch.complex64), argument.to_sparse()]
        bad += [argument.to("meta")] if several else []  # alone it is a tensor as any other
        bad += [None, argument.flatten()[0], argument.to(torch.int32)] if whole else [argument.double()]
        for other in bad:
            arguments = list(well_called()[name])
            arguments[place] = other
            with pytest.raises((TypeError, ValueError), match=name):
                function(*arguments)
