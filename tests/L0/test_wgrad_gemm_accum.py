"""wgrad_gemm_accum: the gradient of a weight added in place, by torch's products and by the vendor's BLAS on a GPU."""

from __future__ import annotations

import types

import lists
import pytest
import torch
import torch_defaults
import variants
from lists import BF16, F16, F32, F64
from torch.library import opcheck

from apex._legacy import fused_weight_gradient_mlp_cuda as legacy
from apex._loader import bindings

bindings.load()
op = torch.ops.apex.wgrad_gemm_accum
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# (dtype of input and grad_output, of main_grad)
DTYPES = [(F16, F32), (BF16, F32), (F32, F32), (F16, F16), (BF16, BF16), (F64, F64)]
# (leading dimensions, inputs, outputs): one row; odd; whole vectors; more dimensions.
SHAPES = [((), 5, 3), ((1,), 5, 3), ((7,), 13, 5), ((64,), 32, 48), ((2, 3), 16, 8), ((3, 2, 4), 8, 1)]


def make(leading, inputs, outputs, dtype, main_dtype, device="cpu"):
    """(input, grad_output, main_grad), of values that both dtypes of main_grad know."""
    x, g = lists.random(dtype, device, ((*leading, inputs), (*leading, outputs)), seed=1)
    (main,) = lists.random(BF16, device, ((outputs, inputs),), seed=3)
    return x, g, main.to(main_dtype)


def expected(x, g, main):
    """In float64 on the CPU."""
    x, g, main = (t.detach().cpu().double() for t in (x, g, main))
    return main + g.reshape(-1, g.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def check(found, wanted, rows, times=1):
    """One rounding to main_grad's dtype each time, and sums of `rows` products in float32 (float64)."""
    own, work = 1.01 * times * lists.ROUNDING[found.dtype], lists.ROUNDING[lists.math_dtype(found.dtype)]
    scale = max(1.0, wanted.abs().max().item())
    bound = own * scale + times * (rows + 2) * work * scale
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=own, atol=bound)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype, main_dtype", DTYPES, ids=str)
def test_values(device, dtype, main_dtype):
    for shape in SHAPES:
        x, g, main = make(*shape, dtype, main_dtype, device)
        wanted, address, version = expected(x, g, main), main.data_ptr(), main._version
        assert op(x, g, main) is None
        check(main, wanted, x.numel() // x.shape[-1])
        assert main.data_ptr() == address and main._version > version
        again = make(*shape, dtype, main_dtype, device)
        op(*again)
        lists.assert_same_bits([again[2]], [main])


def test_sums_of_halves_are_float32s():
    """A thousand small products do not vanish beside what is there, and are rounded once."""
    x, g = (
        torch.full((1024, 1), 2.0**-6, dtype=BF16, device="cpu"),
        torch.full((1024, 1), 2.0**-6, dtype=BF16, device="cpu"),
    )
    for dtype in (F32, BF16):
        main = torch.full((1, 1), 64.0, dtype=dtype, device="cpu")
        for _ in range(4):
            op(x, g, main)
        assert main.item() == (65.0 if dtype is F32 else 64.0)
    main = torch.full((1, 1), 1.0, dtype=BF16, device="cpu")
    op(x, g, main)
    assert main.item() == 1.25


@pytest.mark.parametrize("device", DEVICES)
def test_views_of_a_flat_buffer(device):
    """main_grad at any offset; what lies around it stays."""
    for dtype, main_dtype in DTYPES:
        for offset in (0, 1, 3, 8):
            x, g, main = make((16,), 24, 40, dtype, main_dtype, device)
            flat = torch.full((offset + 960 + 5,), 7.0, dtype=main_dtype, device=device)
            view = flat[offset : offset + 960].view(40, 24)
            view.copy_(main)
            op(x, g, view)
            check(view, expected(x, g, main), 16)
            assert (flat[:offset] == 7).all() and (flat[offset + 960 :] == 7).all()


@pytest.mark.parametrize("device", DEVICES)
def test_layouts(device):
    """Rows that are longer than they look, transposed, expanded and misaligned tensors count by their values."""
    for dtype, main_dtype in DTYPES:
        x, g, main = make((8,), 16, 24, dtype, main_dtype, device)
        wanted = expected(x, g, main)
        wide = torch.full((24, 20), 7.0, dtype=main_dtype, device=device)
        for view in (wide[:, :16], wide[:, 3:19]):
            view.copy_(main)
            op(torch.cat((x, x), 1)[:, 16:], torch.stack((g, g), -1)[..., 0], view)
            check(view, wanted, 8)
        assert (wide[:, 19:] == 7).all()
        for view in (main.t().contiguous().t(), torch.stack((main, main), -1)[..., 0]):
            op(x.t().contiguous().t(), lists.misaligned([g])[0], view)
            check(view, wanted, 8)
        one = torch.ones(1, device=device, dtype=dtype).expand(8, 24)
        found = main.clone()
        op(x, one, found)
        check(found, expected(x, one, main), 8)


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_set_elsewhere_changes_nothing(device):
    """Autocast, the default dtype and device: the op computes in the dtypes that it is given."""
    wanted = make((16,), 24, 40, F32, F32, device)
    op(*wanted)
    found = make((16,), 24, 40, F32, F32, device)
    with torch_defaults.set_to(F64, "meta"), torch.autocast(device, BF16):
        op(*found)
    lists.assert_same_bits([found[2]], [wanted[2]])


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_to_add(device):
    for dtype, main_dtype in DTYPES:
        for leading in ((0,), (2, 0, 3)):
            x, g, main = make(leading, 5, 3, dtype, main_dtype, device)
            before = main.clone()
            op(x, g, main)
            lists.assert_same_bits([main], [before])
        for inputs, outputs in ((0, 3), (3, 0)):
            op(*make((4,), inputs, outputs, dtype, main_dtype, device))


def test_gradients_are_not_recorded_and_not_lost():
    x, g, main = make((4,), 5, 3, F32, F32)
    x.requires_grad_()
    op(x, g, main)
    assert not main.requires_grad
    with pytest.raises(ValueError, match="requires a gradient itself"):
        op(x, g, main.requires_grad_())


def test_a_saved_tensor_that_is_written_is_noticed():
    x, g, main = make((4,), 5, 3, F32, F32)
    leaf = torch.ones(3, 5, dtype=F32, device="cpu", requires_grad=True)
    product = (leaf * main).sum()
    op(x, g, main)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_inference_mode():
    with torch.inference_mode():
        x, g, main = make((4,), 5, 3, BF16, F32)
        wanted = expected(x, g, main)
        op(x, g, main)
        check(main, wanted, 4)


def refusals():
    """(exception, words, change of the arguments)"""
    ones = lambda *shape, dtype=F32: torch.ones(shape, dtype=dtype, device="cpu")  # noqa: E731
    flat = ones(100)
    return [
        (TypeError, "takes float32, float16", dict(input=ones(4, 5, dtype=torch.int32))),
        (TypeError, "grad_output is", dict(grad_output=ones(4, 3, dtype=F16))),
        (TypeError, "main_grad is", dict(main_grad=ones(3, 5, dtype=F16))),
        (TypeError, "main_grad is", dict(main_grad=ones(3, 5, dtype=F64))),
        (ValueError, "at least one dimension", dict(input=ones())),
        (ValueError, "the input has 4 rows but grad_output 5", dict(grad_output=ones(5, 3))),
        (ValueError, r"main_grad has shape \[5, 3\], not \[3, 5\]", dict(main_grad=ones(5, 3))),
        (ValueError, r"main_grad has shape \[15\]", dict(main_grad=ones(15))),
        (ValueError, "overlaps itself", dict(main_grad=ones(1, 5).expand(3, 5))),
        (ValueError, "overlaps itself", dict(main_grad=flat.as_strided((3, 5), (4, 1)))),
        (ValueError, "overlaps itself", dict(main_grad=flat.as_strided((3, 5), (1, 2)))),
        (
            ValueError,
            "shares memory with the input",
            dict(input=flat[:20].view(4, 5), main_grad=flat[19:34].view(3, 5)),
        ),
        (
            ValueError,
            "shares memory with grad_output",
            dict(grad_output=flat[20:32].view(4, 3), main_grad=flat[8:23].view(3, 5)),
        ),
        (ValueError, "meta", dict(main_grad=ones(3, 5).to("meta"))),
        (ValueError, "meta", dict(grad_output=ones(4, 3).to("meta"))),
    ]


@pytest.mark.parametrize("error, words, change", refusals(), ids=lambda value: "")
def test_refused(error, words, change):
    """Every wrong shape, dtype, device and memory, before anything is written."""
    x, g, main = make((4,), 5, 3, F32, F32)
    given = dict(input=x, grad_output=g, main_grad=main) | change
    before = given["main_grad"].clone()
    with pytest.raises(error, match=words):
        op(**given)
    if not before.is_meta:
        assert torch.equal(given["main_grad"], before)


def test_neighbours_in_one_storage_are_not_refused():
    flat = torch.ones(47, dtype=F32, device="cpu")
    op(flat[:20].view(4, 5), flat[20:32].view(4, 3), flat[32:].view(3, 5))
    assert (flat[32:] == 5).all() and (flat[:32] == 1).all()


def test_lazy_copies_are_not_shared_memory():
    x, g = torch.ones(3, 5, dtype=F32, device="cpu"), torch.ones(3, 3, dtype=F32, device="cpu")
    main = torch._lazy_clone(x)
    op(x, g, main)
    assert (main == 4).all() and (x == 1).all()


@pytest.mark.parametrize("dtype, main_dtype", DTYPES, ids=str)
def test_opcheck(dtype, main_dtype):
    opcheck(op.default, make((2, 3), 5, 4, dtype, main_dtype))


def test_shapes_alone():
    """The meta kernel checks, and writes nothing."""
    with torch.device("meta"):
        x, g, main = (torch.empty(shape, dtype=F32, device="meta") for shape in ((4, 5), (4, 3), (3, 5)))
        assert op(x, g, main) is None
        with pytest.raises(ValueError, match="main_grad has shape"):
            op(x, g, main.t())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled(device, dynamic, counting_backend):
    def step(x, g, main):
        op(x * 2, g, main)
        return main.sum()

    graph = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=counting_backend)
    for rows in (4, 6, 8):
        x, g, main = make((rows,), 5, 3, BF16, F32, device)
        other = main.clone()
        assert torch.equal(graph(x, g, main), step(x, g, other)) and torch.equal(main, other)
    assert counting_backend.frame_count == (1 if dynamic else 3)


class Adds(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("main", torch.ones(3, 5, dtype=F32, device="cpu"))

    def forward(self, x, g):
        op(x, g, self.main)
        return self.main * 1


def test_exported():
    """A buffer that is written stays the module's."""
    x, g, _ = make((4,), 5, 3, BF16, F32)
    program = torch.export.export(Adds(), (x, g)).module()
    for times in (1, 2):
        check(
            program(x, g),
            expected(x, g, torch.ones(3, 5, dtype=F32, device="cpu")) * times - (times - 1),
            4,
            times,
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, main_dtype", DTYPES, ids=str)
def test_captured(dtype, main_dtype):
    x, g, main = make((64,), 32, 48, dtype, main_dtype, "cuda")
    wanted = expected(x, g, expected(x, g, main))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        op(x, g, torch.zeros_like(main))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        op(x, g, main)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    check(main, wanted, 64, times=2)


def test_what_torch_is_told_of_products_holds(monkeypatch):
    """The portable binding asks the vendor's BLAS where sums in reduced precision may be, and hipBLASLt where it is
    torch's preferred one."""
    if bindings.load().module is None:
        pytest.skip(f"no bindings: {bindings.load().reason}")
    from apex._portable import products, tensors

    monkeypatch.setattr(tensors, "place_of", lambda tensor: "there")
    on_gpu = {t: types.SimpleNamespace(is_cuda=True, dtype=t) for t in (F16, BF16, F32)}
    asked = lambda: [t for t, tensor in on_gpu.items() if products.place_of(tensor)]  # noqa: E731
    assert asked() == [F16, BF16, F32]
    assert products.place_of(torch.ones(1, dtype=F32, device="cpu")) is None
    for kept, option in ((BF16, "fp16"), (F16, "bf16")):
        with monkeypatch.context() as told:
            told.setattr(torch.backends.cuda.matmul, f"allow_{option}_reduced_precision_reduction", False)
            assert asked() == [kept, F32]
    assert asked() == [F16, BF16, F32]
    monkeypatch.setattr(torch.version, "hip", "7.2")
    for backend, served in (("Cublas", []), ("Ck", []), ("Cublaslt", [F16, BF16, F32])):
        preferred = getattr(torch._C._BlasBackend, backend)
        monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda p=preferred: p)
        assert asked() == served


@pytest.mark.gpu
def test_sums_in_reduced_precision_that_are_forbidden(monkeypatch):
    """torch multiplies, and does again what it did when they are allowed again."""
    options, calls = torch.backends.cuda.matmul, variants._references
    x, g, main = make((64,), 32, 48, BF16, F32, "cuda")
    before = calls["wgrad_gemm_accum"]
    op(x, g, main)
    allowed = calls["wgrad_gemm_accum"] - before
    kept = options.allow_bf16_reduced_precision_reduction
    try:
        options.allow_bf16_reduced_precision_reduction = False
        op(x, g, main)
        assert calls["wgrad_gemm_accum"] == before + allowed + 1
    finally:
        options.allow_bf16_reduced_precision_reduction = kept
    op(x, g, main)
    assert calls["wgrad_gemm_accum"] == before + 2 * allowed + 1


@pytest.mark.parametrize("device", DEVICES)
def test_as_megatron_calls_it(device):
    """By public names: float32 main gradients of any inputs; half ones of their own dtype; more than two dimensions."""
    for dtype, main_dtype in DTYPES[:5]:
        x, g, main = make((4, 2), 24, 16, dtype, main_dtype, device)
        wanted = expected(x, g, main)
        wide = main_dtype is F32
        function = legacy.wgrad_gemm_accum_fp32 if wide else legacy.wgrad_gemm_accum_fp16
        other = legacy.wgrad_gemm_accum_fp16 if wide else legacy.wgrad_gemm_accum_fp32
        assert function(x.requires_grad_(), g, main) is None
        check(main, wanted, 8)
        with pytest.raises(TypeError, match="d_weight must be"):
            other(x, g, main)
    with pytest.raises(TypeError, match="floating-point tensor, not NoneType"):
        legacy.wgrad_gemm_accum_fp32(x, g, None)
    with pytest.raises(TypeError, match="d_weight must be torch.float32"):
        legacy.wgrad_gemm_accum_fp32(*make((4,), 5, 3, F64, F64))
