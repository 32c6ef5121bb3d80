"""Products by cublasLt and hipBLASLt, against fakes that keep their rules, multiply, and refuse on demand."""

import os
import signal
import threading

import pytest

from .apex_library import ARGUMENT, CPU, CUDA, FORKED, HIP, NO_DRIVER, OK, USE_REFERENCE
from .fresh_process import fresh_process

torch = pytest.importorskip("torch", reason="values of products are compared with torch's")
import torch.nn.functional as F  # noqa: E402

from .lt import (  # noqa: E402
    BIAS,
    BIAS_GRADIENT,
    DEFAULT,
    GELU_BIAS,
    LT,
    RELU_BIAS,
    TORCH,
    FakeLt,
    Matmul,
    describe,
    name,
    run,
)

HALVES = (torch.float16, torch.bfloat16)


def random(*shape, dtype=torch.float32, room=0):
    """Values whose rows are `room` elements longer than they look."""
    generator = torch.Generator().manual_seed(sum(shape))
    whole = torch.randn(*shape[:-1], shape[-1] + room, generator=generator, dtype=torch.float64, device="cpu")
    return whole.to(dtype)[..., : shape[-1]]


def near(found, wanted, dtype):
    unit = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(found.double(), wanted.double(), rtol=2 * unit, atol=2 * unit)


def check_products(apex, platform):
    """Every epilogue, type and transpose, with rows that are longer than the matrix."""
    for dtype in (torch.float32, *HALVES):
        for transpose_a in (False, True):
            for transpose_b in (False, True):
                a = random(*((7, 5) if transpose_a else (5, 7)), dtype=dtype, room=3)
                b = random(*((6, 7) if transpose_b else (7, 6)), dtype=dtype, room=1)
                exact = (a.t() if transpose_a else a).double() @ (b.t() if transpose_b else b).double()
                d = torch.zeros(5, 6 + 2, dtype=dtype, device="cpu")[:, :6]
                ways = dict(transpose_a=transpose_a, transpose_b=transpose_b)
                assert run(apex, platform, describe(a, b, d, **ways)) == OK, apex.last_error
                near(d, exact, dtype)
                assert run(apex, platform, describe(a, b, d, accumulate=True, **ways)) == OK, apex.last_error
                near(d, 2 * exact, dtype)
        check_epilogues(apex, platform, dtype)


def check_epilogues(apex, platform, dtype):
    a, b, bias = random(5, 7, dtype=dtype), random(8, 7, dtype=dtype), random(8, dtype=dtype)
    exact = a.double() @ b.double().t() + bias.double()
    d, aux = (torch.zeros(5, 8, dtype=dtype, device="cpu") for _ in range(2))
    for epilogue, wanted in (
        (BIAS, exact),
        (RELU_BIAS, exact.relu()),
        (GELU_BIAS, F.gelu(exact, approximate="tanh")),
    ):
        matmul = describe(a, b, d, transpose_b=True, epilogue=epilogue, bias=bias, aux=aux)
        assert run(apex, platform, matmul) == OK, apex.last_error
        near(d, wanted, dtype)
    near(aux, exact, dtype)
    grad, x, gradient = random(9, 5, dtype=dtype), random(9, 8, dtype=dtype), torch.zeros_like(bias[:5])
    matmul = describe(grad, x, d, transpose_a=True, epilogue=BIAS_GRADIENT, bias=gradient)
    assert run(apex, platform, matmul) == OK, apex.last_error
    near(d, grad.double().t() @ x.double(), dtype)
    near(gradient, grad.double().sum(0), dtype)


@fresh_process("cuda")
def test_cublaslt(apex, cuda):
    lt = FakeLt(CUDA)
    assert name(apex, CUDA) == (OK, "cublasLt 13.1")
    check_products(apex, CUDA)
    log = lt.log()
    assert log.count("create") == 1 and "compute 68" in log[2]
    assert lt.c.fake_live_objects() == 0


@fresh_process("hip")
def test_hipblaslt(apex, hip):
    lt = FakeLt(HIP)
    assert name(apex, HIP) == (USE_REFERENCE, "") and "has been measured on no card" in apex.last_error
    a = random(4, 4)
    assert run(apex, HIP, describe(a, a, a.clone())) == USE_REFERENCE
    apex.c.apex_set_blas(LT)
    assert name(apex, HIP) == (OK, "hipBLASLt")
    check_products(apex, HIP)
    assert "compute 2," in "\n".join(lt.log())
    lt.fail("states", 2)  # the first two algorithms do not serve, the third fails
    lt.fail("algorithms", 3)
    for stream in (16, 32, 16):
        assert run(apex, HIP, describe(a, a, a.clone()), stream=stream) == OK
    matmuls = [line for line in lt.log() if line.startswith("matmul")]
    assert all("algorithm 4," in line for line in matmuls)
    assert [line.split(", ")[-2] for line in matmuls] == ["handle 2", "handle 3", "handle 2"]
    assert lt.c.fake_live_objects() == 0


@fresh_process("cuda")
def test_weight_gradients_are_accumulated_in_float32(apex, cuda):
    FakeLt(CUDA)
    for dtype in HALVES:
        grad, x = random(9, 5, dtype=dtype), random(9, 8, dtype=dtype)
        main = random(5, 8)
        wanted = main.double() + grad.double().t() @ x.double()
        matmul = describe(grad, x, main, transpose_a=True, accumulate=True)
        assert run(apex, CUDA, matmul) == OK, apex.last_error
        near(main, wanted, torch.float32)


@fresh_process("cuda")
def test_what_is_refused_is_left_to_torch(apex, cuda):
    """Nothing is written, the text names the call and its status, and the next product is asked for again."""
    lt = FakeLt(CUDA)
    a = random(4, 8, dtype=torch.bfloat16)
    d = torch.full((4, 4), 7.0, dtype=torch.bfloat16, device="cpu")
    for call, code, text in (
        ("create", 1, "cublasLtCreate failed with status 1"),
        ("desc", 3, "cublasLtMatmulDescCreate refused [4, 8] x [8, 4], epilogue 0, with status 3"),
        (
            "heuristic",
            15,
            "cublasLtMatmulAlgoGetHeuristic refused [4, 8] x [8, 4], epilogue 0, with status 15",
        ),
        ("found", 1, "cublasLtMatmulAlgoGetHeuristic refused [4, 8] x [8, 4], epilogue 0, with status -1"),
        ("states", 1, "cublasLtMatmulAlgoGetHeuristic refused [4, 8] x [8, 4], epilogue 0, with status -1"),
        ("matmul", 15, "cublasLtMatmul refused [4, 8] x [8, 4], epilogue 0, with status 15"),
    ):
        lt.fail(call, code)
        assert run(apex, CUDA, describe(a, a, d, transpose_b=True)) == USE_REFERENCE
        assert apex.last_error == text
        assert bool((d == 7).all()) and lt.c.fake_live_objects() == 0
        lt.fail(call, 0)
    assert run(apex, CUDA, describe(a, a, d, transpose_b=True)) == OK
    double = a.double()
    assert run(apex, CUDA, describe(double, double, double.clone(), transpose_b=True)) == USE_REFERENCE
    assert apex.last_error == "torch multiplies these types"


@fresh_process("cuda")
def test_alignment_and_workspace_are_told(apex, cuda):
    lt = FakeLt(CUDA)
    a = torch.zeros(2 + 16 * 8, dtype=torch.float16, device="cpu")[1:65].view(8, 8)
    d = torch.zeros(8, 8, dtype=torch.float16, device="cpu")
    work = torch.zeros(512, dtype=torch.uint8, device="cpu")
    matmul = describe(a, d, d.clone(), workspace_bytes=512)
    matmul.workspace = work.data_ptr()
    assert run(apex, CUDA, matmul) == OK
    (line,) = (line for line in lt.log() if line.startswith("heuristic"))
    told = [int(number) for number in line.split("alignment ")[1].split(",")[0].split()]
    assert told[1] == 2 and told[0] >= 16 and line.endswith("workspace 512")


@fresh_process("cuda")
def test_a_faster_answer_than_the_first(apex, cuda):
    """Only on Hopper, of a large product, where the first answer's tile is known to be slow."""
    lt = FakeLt(CUDA)
    here = torch.zeros(64, dtype=torch.float16, device="cpu")
    shape = dict(a=here.data_ptr(), b=here.data_ptr(), d=here.data_ptr(), type=1, type_d=1)
    large = Matmul(m=8192, n=4096, k=8192, ld_a=8192, ld_b=4096, ld_d=4096, **shape)
    small = Matmul(m=2048, n=2048, k=2048, ld_a=2048, ld_b=2048, ld_d=2048, **shape)
    for n, (tile, device, matmul, answer, asked) in enumerate((
        (0, 0, large, 1, [1]),
        (209, 0, large, 5, [1, 8]),
        (248, 0, large, 5, [1, 8]),
        (209, 1, large, 1, [1]),  # Ampere
        (209, 0, small, 1, [1]),
    )):  # fmt: skip
        lt.fail("tile", tile)
        matmul.n = matmul.ld_b = matmul.ld_d = matmul.n + 8 * n  # what was asked before is not asked again
        lt.log()
        assert run(apex, CUDA, matmul, device=device) == OK, apex.last_error
        new = lt.log()
        assert [int(line.split()[2].strip(",")) for line in new if line.startswith("heuristic")] == asked
        assert f"algorithm {answer}," in new[-1]


@fresh_process("cuda")
def test_what_is_known_is_not_asked_again(apex, cuda):
    """Of matrices anywhere else, of the same alignment; an algorithm that no longer serves is asked for anew."""
    lt = FakeLt(CUDA)
    memory = torch.zeros(3, 512, dtype=torch.bfloat16, device="cpu")

    def asked(offset=0, status=OK, **others):
        """How often the heuristic was, for one product."""
        lt.log()
        a, b, d = (row[-row.data_ptr() % 256 // 2 + offset :][:64].view(8, 8) for row in memory.clone())
        assert run(apex, CUDA, describe(a, b, d, **others)) == status, apex.last_error
        return sum(line.startswith("heuristic") for line in lt.log())

    for other in ({}, dict(transpose_b=True), dict(accumulate=True), dict(offset=1)):
        assert [asked(**other) for _ in range(3)] == [1, 0, 0]
    lt.fail("algorithms", 1)
    assert asked(status=USE_REFERENCE) == 1
    lt.fail("algorithms", 0)
    assert [asked() for _ in range(2)] == [1, 0] and lt.c.fake_live_objects() == 0


@fresh_process("cuda")
def test_tf32_is_asked_for_alone(apex, cuda):
    lt = FakeLt(CUDA)
    a, half = random(8, 8), random(8, 8, dtype=torch.float16)
    for operand, tf32, compute in ((a, 0, 68), (a, 1, 77), (half, 1, 68)):
        assert run(apex, CUDA, describe(operand, operand, operand.clone(), tf32=tf32)) == OK
        assert f"compute {compute}," in lt.log()[-1]


@fresh_process("cuda")
def test_no_library(apex, cuda):
    a = random(4, 4)
    assert run(apex, CUDA, describe(a, a, a.clone())) == USE_REFERENCE
    assert "no libcublasLt.so is mapped in this process" in apex.last_error
    FakeLt(CUDA)
    assert run(apex, CUDA, describe(a, a, a.clone())) == USE_REFERENCE, "the answer is kept"
    apex.c.apex_set_blas(DEFAULT)
    assert run(apex, CUDA, describe(a, a, a.clone())) == OK, "until the choice is made again"
    apex.c.apex_set_blas(TORCH)
    assert run(apex, CUDA, describe(a, a, a.clone())) == USE_REFERENCE and "APEX_BLAS" in apex.last_error


@fresh_process("cuda")
def test_an_older_library(apex, cuda):
    """cublasLt of a major whose numbers nobody has looked at is not called."""
    FakeLt(CUDA, 110100)
    assert name(apex, CUDA) == (USE_REFERENCE, "")
    assert apex.last_error == "cublasLt of version 110100 is none of 120000 to 139999"


@fresh_process("cuda")
def test_a_newer_library(apex, cuda):
    FakeLt(CUDA, 140000)
    a = random(4, 4)
    assert run(apex, CUDA, describe(a, a, a.clone())) == USE_REFERENCE
    assert apex.last_error == "cublasLt of version 140000 is none of 120000 to 139999"


@fresh_process("cuda")
def test_context_and_capture(apex, cuda):
    """The device's context is current while the library works, in the relaxed mode, and not afterwards."""
    FakeLt(CUDA)
    a = random(4, 4)
    for device in (1, 0):
        assert run(apex, CUDA, describe(a, a, a.clone()), device=device) == OK
        log = cuda.log()
        assert log[-4:] == [f"push primary {device}", "mode 2", "mode 0", "pop"]
        assert cuda.c.fake_depth() == 0


@fresh_process("cuda")
def test_threads(apex, cuda):
    """Sixteen first products at once: one handle, right values."""
    lt, wrong = FakeLt(CUDA), []
    a = random(16, 16)
    barrier = threading.Barrier(16)

    def multiply():
        d = torch.zeros(16, 16, device="cpu", dtype=torch.float32)
        barrier.wait()
        if run(apex, CUDA, describe(a, a, d)) != OK or not torch.allclose(d, a @ a, atol=1e-4):
            wrong.append(d)

    threads = [threading.Thread(target=multiply) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and lt.log().count("create") == 1 and lt.c.fake_live_objects() == 0


@fresh_process("cuda")
def test_forked_child(apex, cuda):
    FakeLt(CUDA)
    a = random(4, 4)
    assert run(apex, CUDA, describe(a, a, a.clone())) == OK
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if run(apex, CUDA, describe(a, a, a.clone())) == FORKED else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@fresh_process()
def test_no_driver(apex):
    a = random(4, 4)
    assert run(apex, CPU, describe(a, a, a.clone())) == USE_REFERENCE
    assert apex.last_error == "torch multiplies on a CPU"
    assert run(apex, HIP, describe(a, a, a.clone())) == NO_DRIVER


@fresh_process("cuda")
def test_arguments(apex, cuda):
    """What is wrong is named before any library is asked."""
    a = random(4, 4)
    for change, text in (
        (dict(m=0), "m, n and k must be positive"),
        (dict(k=-1), "m, n and k must be positive"),
        (dict(a=None), "a, b and d must not be null"),
        (dict(ld_a=3), "a leading dimension is shorter than a row"),
        (dict(ld_d=3), "a leading dimension is shorter than a row"),
        (dict(epilogue=6), "no such epilogue"),
        (dict(epilogue=BIAS), "bias must not be null"),
        (dict(epilogue=GELU_BIAS), "aux is null"),
        (dict(workspace_bytes=8), "workspace must not be null"),
    ):
        matmul = describe(a, a, a.clone())
        for field, value in change.items():
            setattr(matmul, field, value)
        assert run(apex, CUDA, matmul) == ARGUMENT
        assert text in apex.last_error
    assert run(apex, CUDA, describe(a, a, a.clone()), device=-1) == ARGUMENT
    assert apex.c.apex_set_blas(3) == ARGUMENT
