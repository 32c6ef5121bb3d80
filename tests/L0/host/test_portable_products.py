"""The portable binding's products by a fake cublasLt: what is handed to the vendor's BLAS, on tensors of the host."""

import os
import types

from .apex_library import CUDA, HIP
from .fresh_process import fresh_process
from .lt import FakeLt


def served_by_fakes(platform=CUDA):
    """(FakeLt, torch.ops.apex), whose tensors seem to lie on a device of the fake driver."""
    os.environ |= {"APEX_BINDING": "portable", "APEX_BLAS": "lt"}
    lt = FakeLt(platform)
    import torch

    from apex._loader import bindings
    from apex._portable import products, tensors

    bindings._refuse_second_copy = lambda: None  # the fixture's libapex, which nothing here uses
    assert bindings.load().kind == "portable"
    products.place_of = lambda input: tensors._place(platform, 0, 0)
    return lt, torch.ops.apex


def near(found, wanted):
    import torch

    unit = {torch.float32: 2**-22, torch.float16: 2**-10, torch.bfloat16: 2**-7}[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=2 * unit, atol=2 * unit)


def check_weight_gradients(platform, compute):
    lt, ops = served_by_fakes(platform)
    import torch

    for dtype in (torch.float16, torch.bfloat16):
        for main_dtype in (torch.float32, dtype):
            flat = torch.randn(2 + 24 * 40, dtype=torch.float64).to(main_dtype)
            main, x, g = flat[2:].view(24, 40), torch.randn(3, 5, 40).to(dtype), torch.randn(15, 24).to(dtype)
            wanted = main.double() + g.double().t() @ x.reshape(15, 40).double()
            version, calls = main._version, len(lt.log())
            ops.wgrad_gemm_accum(x, g, main)
            near(main, wanted)
            asked, multiplied = lt.log()[calls:][-2:]
            assert multiplied.startswith(f"matmul 40x24x15, compute {compute}, epilogue 1,")
            assert main._version > version
            assert asked.endswith(f"workspace {32 << 20}")
    assert lt.c.fake_live_objects() == 0


@fresh_process("cuda")
def test_weight_gradients(apex, cuda):
    """Float32 and half main gradients are the product's own output: C is D, added to, in float32."""
    check_weight_gradients(CUDA, 68)


@fresh_process("hip")
def test_weight_gradients_of_hip(apex, hip):
    check_weight_gradients(HIP, 2)


@fresh_process("cuda")
def test_weight_gradients_that_are_refused(apex, cuda):
    """torch multiplies, once: nothing was written before. The first refusal of the process is told."""
    lt, ops = served_by_fakes()
    import warnings

    import torch

    x, g = torch.randn(4, 8).bfloat16(), torch.randn(4, 6).bfloat16()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for call, code in (("create", 1), ("heuristic", 15), ("matmul", 15), ("found", 1)):
            lt.fail(call, code)
            main = torch.ones(6, 8)
            ops.wgrad_gemm_accum(x, g, main)
            near(main, 1 + g.double().t() @ x.double())
            lt.fail(call, 0)
    (warning,) = said
    assert str(warning.message).endswith("is multiplied by torch where cublasLtCreate failed with status 1")
    transposed, single = torch.ones(8, 6).t(), torch.ones(6, 8)
    ops.wgrad_gemm_accum(x, g, transposed)
    ops.wgrad_gemm_accum(x.float(), g.float(), single)
    near(transposed, 1 + g.double().t() @ x.double())
    near(single, 1 + g.double().t() @ x.double())
    assert not [line for line in lt.log() if line.startswith("matmul")], "transposed and float32 are torch's"


@fresh_process("cuda")
def test_no_workspace(apex, cuda):
    """Where the device has no room the vendor does without, and layers are torch's."""
    lt, ops = served_by_fakes()
    import torch

    from apex._portable import products, workspace

    def full(*size, **options):
        raise torch.OutOfMemoryError

    products.workspace = lambda size, like: None
    x, g, main = torch.ones(4, 8).half(), torch.ones(4, 6).half(), torch.ones(6, 8)
    ops.wgrad_gemm_accum(x, g, main)
    assert (main == 5).all() and lt.log()[-2].endswith("workspace 0")
    calls = len(lt.log())
    weight = g.t() @ x
    workspace.torch = types.SimpleNamespace(empty=full, uint8=torch.uint8)
    output, _ = ops.dense_forward(x, weight)
    assert (output == 32).all() and len(lt.log()) == calls


@fresh_process("cuda")
def test_layers(apex, cuda):
    """dense and dense_gelu_dense, forward and backward, all products the fake's. (GELU's slope is a kernel, which the
    fake driver does not run: gradients of the second layer alone.)"""
    lt, ops = served_by_fakes()
    import torch
    import torch.nn.functional as F

    x, w1, b1, w2, b2 = (
        (0.5 * torch.randn(shape, dtype=torch.float64)).bfloat16().requires_grad_()
        for shape in ((9, 16), (24, 16), (24,), (8, 24), (8,))
    )
    leaves = (x, w1, b1, w2, b2)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    hidden = F.linear(*wide[:3])
    frozen = [tensor.detach() for tensor in leaves[:3]]
    checks = (
        (
            ops.dense_gelu_dense_forward(*frozen, w2, b2),
            F.linear(F.gelu(hidden, approximate="tanh"), *wide[3:]),
            (3, 4),
        ),
        (ops.dense_forward(x, w1, b1, "none"), hidden, (0, 1, 2)),
    )
    for outputs, wanted, of in checks:
        output = outputs[0]
        g = torch.randn(output.shape).bfloat16()
        found = torch.autograd.grad(output, [leaves[i] for i in of], g)
        exact = torch.autograd.grad(wanted, [wide[i] for i in of], g.double(), retain_graph=True)
        for a, b in ((output, wanted), *zip(found, exact, strict=True)):
            assert (a.double() - b).abs().max() < 2**-6 * b.abs().max()
    epilogues = [line.split("epilogue ")[1].split(",")[0] for line in lt.log() if line.startswith("matmul")]
    assert epilogues == ["164", "4", "4", "512", "512", "1"]
    assert lt.c.fake_live_objects() == 0
