"""apex.transformer.functional's rotary embeddings and fused_rotary_positional_embedding, as users call them."""

from __future__ import annotations

import inspect
import os
import pathlib
import subprocess
import sys
import textwrap

import lists
import pytest
import rope
import torch
import torch_defaults
from lists import BF16, F16, F32, F64
from torch.library import opcheck

from apex._legacy import fused_rotary_positional_embedding as legacy
from apex.transformer import functional
from apex.transformer.functional import fused_rope

ROOT = pathlib.Path(__file__).resolve().parents[2]


def random(*shape, dtype=F32, seed=1):
    return lists.random(dtype, "cpu", (shape,), seed=seed)[0]


def four_forms(dtype=F32):
    """name -> (public function, its arguments, the op's arguments after the input)"""
    t, packed, image = (random(*s, dtype=dtype) for s in ((6, 2, 3, 16), (6, 3, 16), (2, 6, 3, 16)))
    freqs, ends = random(6, 1, 1, 8, seed=2), torch.tensor([0, 2, 2, 6], dtype=torch.int32, device="cpu")
    tables = [f(random(1, 4, 1, 8, seed=s)) for s in (3, 4) for f in (torch.cos, torch.sin)]
    return {
        "freqs": (functional.fused_apply_rotary_pos_emb, (t, freqs), (freqs,)),
        "cached": (
            functional.fused_apply_rotary_pos_emb_cached,
            (t, freqs.cos().to(dtype), freqs.sin().to(dtype)),
            (freqs.cos().to(dtype), freqs.sin().to(dtype)),
        ),
        "thd": (
            functional.fused_apply_rotary_pos_emb_thd,
            (packed, ends, freqs),
            (freqs, None, None, None, ends),
        ),
        "2d": (functional.fused_apply_rotary_pos_emb_2d, (image, 2, 3, *tables), tuple(tables)),
    }


def exact(form, x, tables):
    wide = [t if t is None or t.dtype == torch.int32 else t.double() for t in tables]
    if form == "2d":
        return rope.exact(x.unflatten(1, (2, 3)), *wide).flatten(1, 2)
    return rope.exact(x, *wide)


FORMS = list(four_forms())


@pytest.mark.parametrize("dtype", [F32, F16, BF16, F64], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_functions(form, dtype):
    function, (t, *rest), tables = four_forms(dtype)[form]
    wide = t.double().requires_grad_()
    expected = exact(form, wide, tables)
    t = t.requires_grad_()
    y = function(t, *rest)
    assert y.dtype == dtype and y.shape == t.shape
    rope.near(y, expected)
    g = torch.ones(1, dtype=dtype, device="cpu").expand(t.shape)  # what sum() gives: no stride at all
    rope.near(torch.autograd.grad(y, t, g)[0], torch.autograd.grad(expected, wide, g.double())[0])


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_as_exact_as_torch(dtype):
    """Against float64, no worse than torch's own ops in the same dtype, in the maximum and the root mean square."""
    x, g = (random(128, 2, 4, 64, dtype=dtype, seed=s) for s in (1, 2))
    freqs = torch.cat((angles := random(128, 1, 1, 32, seed=3) * 100, angles), -1)

    def everything(function, x, g):
        x = x.clone().requires_grad_()
        y = function(x)
        return (y, *torch.autograd.grad(y, x, g))

    exact = everything(lambda x: rope.exact(x, freqs.double()), x.double(), g.double())
    ours = everything(lambda x: functional.fused_apply_rotary_pos_emb(x, freqs), x, g)
    theirs = everything(lambda x: rope.rotate(x, freqs.cos().to(dtype), freqs.sin().to(dtype)), x, g)
    for a, b, e in zip(ours, theirs, exact, strict=True):
        own, other = (a.double() - e).abs(), (b.double() - e).abs()
        slack = 2 * lists.ROUNDING[F32]
        assert own.max() <= other.max() * 1.05 + slack
        assert own.square().mean().sqrt() <= other.square().mean().sqrt() * 1.05 + slack / 4


@pytest.mark.parametrize("cached", [False, True], ids=["freqs", "cached"])
def test_transpose_output_memory(cached):
    function, arguments, _ = four_forms()["cached" if cached else "freqs"]
    plain, swapped = function(*arguments), function(*arguments, True)
    assert torch.equal(plain, swapped) and swapped.transpose(0, 1).is_contiguous()
    t = arguments[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(t, *arguments[1:], True).sum(), t)
    assert gradient.transpose(0, 1).is_contiguous()


def test_legacy_functions():
    """Every function of the module that public apex compiles; none records gradients."""
    for form, (function, (t, *rest), tables) in four_forms().items():
        wide = t.double().requires_grad_()
        expected = exact(form, wide, tables)
        g = random(*t.shape, seed=7)
        (gradient,) = torch.autograd.grad(expected, wide, g.double())

        def split(x, form=form):
            return x.unflatten(1, (2, 3)) if form == "2d" else x

        end = "" if form == "freqs" else f"_{form}"
        order = (
            tuple(rest[2:]) if form == "2d" else (*rest, *([False] if form in ("freqs", "cached") else []))
        )
        y = getattr(legacy, f"forward{end}")(split(t.requires_grad_()), *order)
        assert not y.requires_grad
        rope.near(y, expected)
        rope.near(getattr(legacy, f"backward{end}")(split(g), *order), gradient)
        assert torch.equal(y, function(t, *rest))
    t, freqs = four_forms()["freqs"][1]
    assert legacy.forward(t, freqs, True).transpose(0, 1).is_contiguous()
    assert legacy.backward(t, freqs, True).transpose(0, 1).is_contiguous()


SIGNATURES = {
    "FusedRoPEFunc": "(ctx, t: torch.Tensor, freqs: torch.Tensor, transpose_output_memory: bool = False)",
    "FusedRoPECachedFunc": (
        "(ctx, t: torch.Tensor, cos_: torch.Tensor, sin_: torch.Tensor, transpose_output_memory: bool = False)"
    ),
    "FusedRoPETHDFunc": "(ctx, t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor)",
    "FusedRoPE2DFunc": (
        "(ctx, t: torch.Tensor, img_h: int, img_w: int, cos_h: torch.Tensor, sin_h: torch.Tensor, "
        "cos_w: torch.Tensor, sin_w: torch.Tensor)"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_public_classes(name):
    """Report: a new positional argument broke downstream callers."""
    form = dict(zip(SIGNATURES, FORMS, strict=True))[name]
    function, arguments, _ = four_forms()[form]
    for end in ("", "Apex", "Aiter"):
        made = getattr(fused_rope, name + end)
        found = inspect.signature(made.forward)
        assert (
            str(found.replace(return_annotation=inspect.Signature.empty)).replace("'", "") == SIGNATURES[name]
        )
        assert issubclass(made, getattr(fused_rope, name))
        if end != "Aiter":
            assert torch.equal(made.apply(*arguments), function(*arguments))
    assert str(inspect.signature(function)).split(" ->")[0] == str(found).split(" ->")[0].replace("ctx, ", "")
    with pytest.raises(RuntimeError, match="aiter is not in use"):
        made.apply(*arguments)


@pytest.mark.parametrize("form", FORMS)
def test_opcheck(form):
    _, (t, *_), tables = four_forms()[form]
    x = (t.unflatten(1, (2, 3)) if form == "2d" else t).requires_grad_()
    for op in (torch.ops.apex.rope_forward, torch.ops.apex.rope_backward):
        opcheck(op, (x, *tables))
        opcheck(
            op, (x.transpose(0, 1).contiguous().transpose(0, 1), *tables), {"transpose_output": form != "thd"}
        )


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_gradients(form):
    function, (t, *rest), _ = four_forms(F64)[form]
    x = t[:, :, :, :8].requires_grad_() if form == "freqs" else t.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: function(x, *rest), x)
    assert torch.autograd.gradgradcheck(lambda x: function(x, *rest), x)


def test_transforms():
    """torch.func.grad and vmap work; forward mode is refused, not silently zero."""
    function, (t, freqs), _ = four_forms()["freqs"]
    freqs = torch.cat((freqs, freqs), -1)
    found = torch.func.grad(lambda x: function(x, freqs).square().sum())(t)
    torch.testing.assert_close(found, 2 * t)  # a turn keeps lengths, if both halves have one angle
    many = torch.stack((t, -t))
    assert torch.equal(torch.vmap(lambda x: function(x, freqs))(many)[1], -function(t, freqs))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda x: function(x, freqs), (t,), (t,))


def test_angles_are_constants():
    """As in public apex: no gradient reaches them, and asking for one is an error, not zeros."""
    t, freqs = four_forms()["freqs"][1]
    freqs.requires_grad_()
    y = functional.fused_apply_rotary_pos_emb(t.requires_grad_(), freqs)
    with pytest.raises(RuntimeError, match="to not have been used"):
        torch.autograd.grad(y.sum(), freqs)
    assert not functional.fused_apply_rotary_pos_emb(t.detach(), freqs).requires_grad


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_autocast_changes_nothing(dtype):
    function, (t, freqs), _ = four_forms()["freqs"]
    with torch.autocast("cpu", dtype):
        assert torch.equal(function(t, freqs), function(t, freqs))
        assert function(t, freqs).dtype == F32 and function(t.to(dtype), freqs).dtype == dtype


@pytest.mark.parametrize("form", FORMS)
def test_compile_fullgraph(form):
    """One graph for every length and batch, equal to eager; export works."""
    from torch._dynamo.testing import CompileCounterWithBackend

    if form == "2d":
        torch_defaults.skip_compiled("Tensor.unflatten")
    function, (t, *rest), _ = four_forms(BF16)[form]

    class Block(torch.nn.Module):
        def forward(self, t, *rest):
            return function(t * 2, *rest) + 1

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(Block(), fullgraph=True, dynamic=True, backend=counter)
    compiled(t.clone().requires_grad_(), *rest)
    once = counter.frame_count
    for heads in (2, 5):
        shape = (*t.shape[:-2], heads, t.shape[-1])
        x = random(*shape, dtype=BF16).requires_grad_()
        ours, eager = compiled(x, *rest), Block()(x, *rest)
        assert torch.equal(ours, eager)
        assert torch.equal(torch.autograd.grad(ours.sum(), x)[0], torch.autograd.grad(eager.sum(), x)[0])
    assert counter.frame_count == once
    exported = torch.export.export(Block(), (t, *rest))
    assert torch.equal(exported.module()(t, *rest), Block()(t, *rest))


def test_2d_needs_all_of_the_image():
    _, (t, _, _, *tables), _ = four_forms()["2d"]
    with pytest.raises(ValueError, match=r"2 \* 4"):
        functional.fused_apply_rotary_pos_emb_2d(t, 2, 4, *tables)


def test_without_bindings():
    """The reference, registered from Python, gives the same values and gradients of gradients."""
    from apex._loader import reference

    library = reference.define("apex_rope_test", reference.implementation, ["rope_forward", "rope_backward"])
    reference.record("apex_rope_test", library, ["rope_forward", "rope_backward"])
    for form, (_, (t, *_), tables) in four_forms(F64).items():
        x = (t.unflatten(1, (2, 3)) if form == "2d" else t).requires_grad_()
        found, wanted = (
            torch.ops.apex_rope_test.rope_forward(x, *tables),
            torch.ops.apex.rope_forward(x, *tables),
        )
        torch.testing.assert_close(found, wanted)
        assert torch.autograd.gradgradcheck(
            lambda x, tables=tables: torch.ops.apex_rope_test.rope_forward(x, *tables), x
        )
        with torch.autocast("cpu", BF16):
            assert torch.ops.apex_rope_test.rope_forward(x, *tables).dtype == F64


# ---- aiter -------------------------------------------------------------------------------------------------------

AITER = """
    import torch
    calls = []
    def _of(kind, back):
        def impl(output, t, *rest):
            assert rest[-3:] == (0, False, False) and t.stride(-1) == 1
            calls.append((kind, back))
            op = torch.ops.apex.rope_backward if back else torch.ops.apex.rope_forward
            if kind == "thd_": found = op(t, rest[1], cu_seqlens=rest[0])
            elif kind == "2d_": found = op(t.unflatten(1, rest[4:6]), *rest[:4]).flatten(1, 2)
            else: found = op(t, *rest[:-3])
            output.copy_(found)
        return impl
    for _kind in ("", "cached_", "thd_", "2d_"):
        for _back in (False, True):
            globals()[f"rope_{_kind}{'bwd' if _back else 'fwd'}_impl"] = _of(_kind, _back)
"""


def run(tmp_path, script, hip="7.2", aiter=None, **environment):
    """Runs a script in a process of its own, with a torch that says it is of ROCm. Returns what it prints."""
    if aiter is not None:
        (tmp_path / "aiter.py").write_text(textwrap.dedent(aiter))
    begin = f"import sys, torch; torch.version.hip = {hip!r}; sys.path.insert(0, {str(tmp_path)!r})\n"
    begin += f"sys.path[1:1] = {[str(ROOT), str(ROOT / 'tests'), str(ROOT / 'tests' / 'L0')]!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", begin + textwrap.dedent(script)],
        env=os.environ | environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


USE = """
    from test_fused_rope import four_forms, fused_rope, legacy
    assert fused_rope.IS_ROCM_PYTORCH
    print("backend", fused_rope.AITER_ROPE_BACKEND)
    for form, (function, (t, *rest), _) in four_forms().items():
        x = t.transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_()
        y = function(x, *rest)
        (found,) = torch.autograd.grad(y.sum(), x)
        native = getattr(fused_rope, {"freqs": "FusedRoPEFunc", "cached": "FusedRoPECachedFunc",
                                      "thd": "FusedRoPETHDFunc", "2d": "FusedRoPE2DFunc"}[form])
        assert torch.equal(y, native.apply(x, *rest))
        assert torch.equal(found, torch.autograd.grad(native.apply(x, *rest).sum(), x)[0])
        if form in ("freqs", "cached"):
            assert function(x, *rest, True).transpose(0, 1).is_contiguous()
"""


def test_aiter_serves_where_it_is_asked_for(tmp_path):
    said = run(
        tmp_path,
        USE + "    import aiter; print(len(set(aiter.calls)))",
        aiter=AITER,
        USE_ROCM_AITER_ROPE_BACKEND="1",
    )
    assert "backend True" in said and said.split()[-1] == "8" and "asks for aiter" not in said


def test_aiter_is_not_used_unasked(tmp_path):
    for value in ("", "0"):
        said = run(tmp_path, USE, aiter="raise SystemExit('imported')", USE_ROCM_AITER_ROPE_BACKEND=value)
        assert "backend False" in said and "aiter," not in said


def test_absent_aiter_is_said_in_words(tmp_path):
    said = run(tmp_path, USE, USE_ROCM_AITER_ROPE_BACKEND="1")
    assert "backend False" in said and "No module named 'aiter'" in said and "`make aiter`" in said
    said = run(tmp_path, USE, aiter="import no_such_kernels", USE_ROCM_AITER_ROPE_BACKEND="1")
    assert "No module named 'no_such_kernels'" in said and "apex's own kernels serve" in said
    said = run(tmp_path, "import apex.transformer.functional", hip=None, USE_ROCM_AITER_ROPE_BACKEND="1")
    assert "is not a ROCm build" in said


def test_make_aiter_says_what_it_runs():
    said = subprocess.run(
        ["make", "-n", "aiter"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert "pip install" in said and "github.com/ROCm/aiter@" in said and "--no-deps" in said
