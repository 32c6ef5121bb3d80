"""The launch contract on CUDA, against a fake driver that keeps the real one's rules and records calls."""

import ctypes
import os
import signal
import subprocess
import sys
import threading

import pytest

from . import build
from .apex_library import (
    CUDA,
    DRIVER,
    FORKED,
    KERNEL,
    NO_DRIVER,
    NO_KERNEL,
    OK,
    REFERENCE,
    USE_REFERENCE,
    Kernel,
    image,
)
from .fresh_process import fresh_process

SM_90 = image("sm_90", "scale_f32", "scale_f16 4096")
SM_80 = image("sm_80", "scale_f32", "scale_f16 4096")
KERNEL_NAME = "scale/scale_f32"


def register(apex):
    assert apex.register(CUDA, 0, "scale", SM_90) == OK
    assert apex.register(CUDA, 1, "scale", SM_80) == OK


def launched(context, device, stream="default", first=0):
    return (
        f"launch scale_f32 in {context} {device}, grid 1 1 1, block 32 1 1, shared 0, "
        f"stream {stream}, first {first}"
    )


@fresh_process("cuda")
def test_first_launch_of_a_plain_thread(apex, cuda):
    """No context is current: the device's primary one is pushed and popped; all is loaded on the way."""
    register(apex)
    assert apex.launch(CUDA, 0, KERNEL_NAME, parameters=[7]) == OK
    log = cuda.log()
    assert log == [
        "cuInit",
        "mode 2",
        "retain 0",
        "mode 0",
        "push primary 0",
        "mode 2",
        "load on 0: arch sm_90",
        "find scale_f32",
        "mode 0",
        "pop",
        "push primary 0",
        launched("primary", 0, first=7),
        "pop",
    ]
    assert cuda.c.fake_depth() == 0
    assert apex.launch(CUDA, 0, KERNEL_NAME) == OK
    assert cuda.log() == ["push primary 0", launched("primary", 0), "pop"]  # nothing is loaded twice
    assert cuda.c.fake_retained(0) == 1


@fresh_process("cuda")
def test_context_of_another_device_is_current(apex, cuda):
    """Device 0 current and the tensor on device 1, and the other way round; given and default streams."""
    register(apex)
    cuda.c.cuInit(0)
    for device in (1, 0):
        other = cuda.c.fake_context(1 - device, b"primary")
        cuda.c.fake_push(other)
        stream = cuda.c.fake_stream(device)
        assert apex.launch(CUDA, device, KERNEL_NAME, stream=stream) == OK
        assert apex.launch(CUDA, device, KERNEL_NAME) == OK
        log = cuda.log()
        assert launched("primary", device, "given") in log and launched("primary", device) in log
        assert cuda.c.fake_retained(1 - device) == (
            0 if device == 1 else 1
        )  # no memory taken on the other card
        assert cuda.c.fake_current() == other and cuda.c.fake_depth() == 1
        cuda.c.fake_empty_stack()


@fresh_process("cuda")
def test_green_context_of_the_right_device_stays(apex, cuda):
    """A current context of the tensor's device is used as it is, and no primary context is made beside it."""
    register(apex)
    green = cuda.c.fake_context(1, b"green")
    cuda.c.cuInit(0)
    cuda.c.fake_push(green)
    assert apex.launch(CUDA, 1, KERNEL_NAME) == OK
    assert apex.is_capturing(CUDA, 1) == 0
    log = cuda.log()
    assert log[-1] == launched("green", 1)
    assert not any(line.startswith(("push", "pop", "retain")) for line in log)
    assert cuda.c.fake_current() == green


@fresh_process("cuda")
def test_primary_context_current_is_the_common_case(apex, cuda):
    """torch's own state: the primary context is current. A launch is then two driver calls and no push."""
    register(apex)
    assert apex.launch(CUDA, 0, KERNEL_NAME) == OK
    cuda.c.fake_push(cuda.c.fake_primary(0))
    cuda.log()
    assert apex.launch(CUDA, 0, KERNEL_NAME, stream=cuda.c.fake_stream(0)) == OK
    assert cuda.log() == [launched("primary", 0, "given")]


@fresh_process("cuda")
def test_first_launch_inside_a_capture(apex, cuda):
    """The load switches the thread to the relaxed capture mode and back; the capture survives."""
    register(apex)
    cuda.c.cuInit(0)
    stream = cuda.c.fake_stream(0)
    cuda.c.fake_push(cuda.c.fake_context(0, b"primary"))
    cuda.c.fake_set_capture_mode(1)
    assert apex.is_capturing(CUDA, 0, stream) == 0
    cuda.c.fake_begin_capture(stream)
    assert apex.is_capturing(CUDA, 0, stream) == 1
    assert apex.launch(CUDA, 0, KERNEL_NAME, stream=stream) == OK, apex.last_error
    cuda.c.fake_end_capture(stream)
    log = cuda.log()
    assert not any("broke" in line for line in log)
    assert log[1:] == [
        "mode 2",
        "load on 0: arch sm_90",
        "find scale_f32",
        "mode 1",
        launched("primary", 0, "given"),
    ]
    assert cuda.c.fake_capture_mode() == 1


@fresh_process("cuda")
def test_first_launch_of_a_plain_thread_while_another_captures(apex, cuda):
    """The primary context too is only retained in a way that a capture elsewhere allows."""
    register(apex)
    cuda.c.cuInit(0)
    stream = cuda.c.fake_stream(0)
    cuda.c.fake_begin_capture(stream)
    assert apex.launch(CUDA, 1, KERNEL_NAME) == OK, apex.last_error
    assert not any("broke" in line for line in cuda.log())
    assert cuda.c.fake_capture_mode() == 0


@fresh_process("cuda")
def test_sixteen_threads_at_once_load_once(apex, cuda):
    """Sixteen first launches on two devices: one load per device, every launch on its device."""
    register(apex)
    gate = threading.Barrier(16)
    results = []

    def work(device):
        gate.wait()
        results.append(apex.launch(CUDA, device, KERNEL_NAME))

    threads = [threading.Thread(target=work, args=(index % 2,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [OK] * 16
    log = cuda.log()
    assert log.count("cuInit") == 1
    assert sorted(line for line in log if line.startswith("load")) == [
        "load on 0: arch sm_90",
        "load on 1: arch sm_80",
    ]
    assert log.count("find scale_f32") == 2
    assert log.count(launched("primary", 0)) == log.count(launched("primary", 1)) == 8
    assert [cuda.c.fake_retained(0), cuda.c.fake_retained(1)] == [1, 1]


@fresh_process("cuda")
def test_primary_context_is_held_once(apex, cuda):
    """Threads that meet at its first use keep one hold of it between them."""
    gate = threading.Barrier(8)
    results = []

    def work():
        gate.wait()
        results.append(apex.is_capturing(CUDA, 0))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [0] * 8
    assert cuda.log().count("retain 0") > 1 and cuda.c.fake_retained(0) == 1


@fresh_process("cuda")
def test_more_than_48_kilobytes_of_shared_memory(apex, cuda):
    """The attribute is what the device offers, less the kernel's own; more is refused with both numbers."""
    register(apex)
    assert apex.launch(CUDA, 0, "scale/scale_f16", shared=232448 - 4096) == OK
    assert apex.launch(CUDA, 1, "scale/scale_f16", shared=166912 - 4096) == OK
    assert apex.launch(CUDA, 1, "scale/scale_f16", shared=166913) == DRIVER
    for words in (
        "scale_f16",
        "cuda:1",
        "166913 bytes",
        "CUDA_ERROR_INVALID_VALUE (1)",
        "at most 166912 bytes",
    ):
        assert words in apex.last_error
    assert cuda.c.fake_depth() == 0


@fresh_process("cuda")
def test_launch_geometry_and_empty_grid(apex, cuda):
    """Grid, block and shared bytes arrive as given; a grid without blocks is no work and opens nothing."""
    register(apex)
    assert apex.launch(CUDA, 0, KERNEL_NAME, grid=(0, 1, 1)) == OK
    assert cuda.log() == []
    assert apex.launch(CUDA, 0, KERNEL_NAME, grid=(5, 6, 7), block=(8, 9, 2), shared=33) == OK
    assert "grid 5 6 7, block 8 9 2, shared 33" in cuda.log()[-2]


@fresh_process("cuda")
def test_driver_refusals_are_said_with_code_and_name(apex, cuda):
    """Each driver call that can refuse, on the way to a first launch."""
    register(apex)
    assert apex.launch(CUDA, 5, KERNEL_NAME) == USE_REFERENCE  # nothing registered there, no resolver
    for call in (
        "cuCtxGetCurrent",
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent",
        "cuLibraryLoadData",
        "cuLibraryGetKernel",
        "cuKernelGetFunction",
        "cuFuncLoad",
        "cuKernelGetAttribute",
        "cuKernelSetAttribute",
        "cuLaunchKernel",
    ):
        cuda.fail(call, 4)
        assert apex.launch(CUDA, 0, KERNEL_NAME) == DRIVER, call
        assert "CUDA_ERROR_DEINITIALIZED (4), words of the driver" in apex.last_error, call
        assert "cuda:0" in apex.last_error, call
        cuda.fail(call, 0)
        assert cuda.c.fake_depth() == 0 and cuda.c.fake_capture_mode() == 0, call
    assert apex.launch(CUDA, 0, KERNEL_NAME) == OK  # no failure was kept
    cuda.fail("cuStreamIsCapturing", 700)
    assert apex.is_capturing(CUDA, 0) == -DRIVER
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in apex.last_error and "ran earlier" in apex.last_error
    cuda.fail("cuLaunchKernel", 12345)
    assert apex.launch(CUDA, 0, KERNEL_NAME) == DRIVER
    assert "unknown CUDA error (12345)" in apex.last_error


@fresh_process("cuda")
def test_kernels_that_await_begin_beside_the_end_of_the_one_before(apex, cuda):
    """Where the code waits by itself: compiled for sm_90 or later, not made from older PTX, not on an older device."""
    register(apex)
    awaiting = Kernel(b"scale", b"scale_f32", 0, 1)
    beside = "beside the end of the one before"
    assert apex.launch(CUDA, 0, awaiting, grid=(5, 6, 7), block=(8, 9, 2), shared=33) == OK
    *_, first, launch, last = cuda.log()
    assert first == beside and "grid 5 6 7, block 8 9 2, shared 33" in launch and last.startswith("pop")
    cuda.fail("cuLaunchKernelEx", 4)
    assert apex.launch(CUDA, 0, awaiting) == DRIVER and "launch of scale_f32 on cuda:0" in apex.last_error
    cuda.fail("cuLaunchKernelEx", 0)
    cuda.log()
    # Another launch site of the same kernel, which does not ask.
    assert apex.launch(CUDA, 0, KERNEL_NAME) == OK
    assert apex.launch(CUDA, 1, awaiting) == OK
    assert apex.register(CUDA, 0, "scale", SM_90 + b"from compute_80\n") == OK
    assert apex.launch(CUDA, 0, awaiting) == OK
    lines = cuda.log()
    assert sum(line.startswith("launch scale_f32") for line in lines) == 3 and beside not in lines


@fresh_process("cuda")
def test_code_object_of_another_architecture(apex, cuda):
    """Error 209 names the device's architecture."""
    assert apex.register(CUDA, 1, "scale", SM_90) == OK
    assert apex.launch(CUDA, 1, KERNEL_NAME) == DRIVER
    for words in (
        "scale_f32",
        "cuda:1 (sm_80)",
        "CUDA_ERROR_NO_BINARY_FOR_GPU (209)",
        "another architecture",
    ):
        assert words in apex.last_error


@fresh_process("cuda")
def test_missing_kernel(apex, cuda):
    """A code object without the kernel is an error of its own, not a driver's."""
    register(apex)
    assert apex.launch(CUDA, 0, "scale/scale_f64") == NO_KERNEL
    assert apex.last_error == "the code object registered for cuda:0 has no kernel scale_f64"
    assert apex.launch(CUDA, 0, KERNEL_NAME) == OK
    assert cuda.log().count("load on 0: arch sm_90") == 1


@fresh_process("cuda")
def test_no_device(apex, cuda):
    """cuInit without a device, as in a container without --gpus."""
    cuda.fail("cuInit", 100)
    register(apex)
    assert apex.launch(CUDA, 0, KERNEL_NAME) == DRIVER
    assert apex.last_error == "cuInit: CUDA_ERROR_NO_DEVICE (100)"
    cuda.fail("cuInit", 0)
    assert apex.launch(CUDA, 0, KERNEL_NAME) == OK  # asked again


def driver_is_here():
    """Whether this machine has a real NVIDIA driver."""
    return (
        subprocess.run(
            [sys.executable, "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"], capture_output=True
        ).returncode
        == 0
    )


@pytest.mark.skipif(driver_is_here(), reason="the NVIDIA driver is here")
@fresh_process()
def test_no_driver_library(apex):
    """Without libcuda.so.1 everything but a launch works, and a launch says what is missing."""
    register(apex)
    for _ in range(2):
        assert apex.launch(CUDA, 0, KERNEL_NAME) == NO_DRIVER
        assert "libcuda.so.1" in apex.last_error
    assert apex.is_capturing(CUDA, 0) == -NO_DRIVER
    assert apex.device_info(CUDA, 0)[0] == NO_DRIVER


@fresh_process("cuda", mapped=False)
def test_driver_is_opened_at_first_need(apex, path):
    """Loading, registering and resolving map no driver: an image build must work."""

    def mapped():
        with open("/proc/self/maps") as maps:
            return str(path) in maps.read()

    register(apex)
    assert apex.resolve(CUDA, 0, "scale") == KERNEL
    assert not mapped()
    assert apex.launch(CUDA, 0, KERNEL_NAME) == OK
    assert mapped()


@fresh_process("old_cuda")
def test_driver_too_old(apex, cuda):
    """A driver before CUDA 12 lacks cuLibraryLoadData: said with the release that has it."""
    register(apex)
    assert apex.launch(CUDA, 0, KERNEL_NAME) == DRIVER
    assert "cuLibraryLoadData" in apex.last_error and "525" in apex.last_error


def in_child(body):
    """Runs `body` in a forked child; its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@fresh_process("cuda")
def test_fork_after_the_driver_was_opened(apex, cuda):
    """One named error with both process ids and the remedy; in the grandchild too; the parent goes on."""
    register(apex)
    assert apex.launch(CUDA, 0, KERNEL_NAME) == OK
    parent = os.getpid()

    def child():
        assert apex.launch(CUDA, 0, KERNEL_NAME) == FORKED
        for words in (f"process {parent} ", f"({os.getpid()})", "spawn"):
            assert words in apex.last_error
        assert apex.is_capturing(CUDA, 0) == -FORKED
        assert apex.device_info(CUDA, 0)[0] == FORKED
        assert apex.resolve(CUDA, 0, "scale") == KERNEL  # the table itself works

        def grandchild():
            assert apex.launch(CUDA, 0, KERNEL_NAME) == FORKED
            assert f"process {parent} " in apex.last_error

        assert in_child(grandchild) == 0

    assert in_child(child) == 0
    assert apex.launch(CUDA, 0, KERNEL_NAME) == OK


@fresh_process("cuda", mapped=False)
def test_fork_before_the_driver_is_opened(apex, path):
    """A child that is the first to use the driver may."""
    register(apex)

    def child():
        assert apex.launch(CUDA, 0, KERNEL_NAME) == OK, apex.last_error

    assert in_child(child) == 0
    assert apex.launch(CUDA, 0, KERNEL_NAME) == OK


@fresh_process("cuda")
def test_fork_after_torch_alone_opened_the_driver(apex, cuda):
    """The parent initialised CUDA by itself: cuInit's answer in the child is named for what it is."""
    register(apex)
    assert cuda.c.cuInit(0) == 0

    def child():
        assert apex.launch(CUDA, 0, KERNEL_NAME) == FORKED
        assert "spawn" in apex.last_error

    assert in_child(child) == 0


@fresh_process("cuda")
def test_fork_while_other_threads_use_the_library(apex, cuda):
    """No lock of the library stays locked in the child."""
    register(apex)
    hammer = ctypes.CDLL(str(build.build_shared("libhammer.so", build.FAKES / "hammer.cpp")))

    def child():
        signal.alarm(10)  # ends a child that waits for a lock
        assert apex.register(CUDA, 0, "other", SM_90) == OK
        assert apex.resolve(CUDA, 0, "other") == KERNEL
        assert apex.launch(CUDA, 0, KERNEL_NAME) == OK, apex.last_error

    hammer.hammer_start(apex.c.apex_forget_choices)  # holds the table's lock most of the time
    try:
        assert [in_child(child) for _ in range(20)] == [0] * 20
    finally:
        hammer.hammer_stop()


@fresh_process("cuda")
def test_device_info_is_asked_per_device(apex, cuda):
    """Every value is the device's own; no context is made for it."""
    cases = ((0, 100, 50, 232448, b"sm_90"), (1, 101, 51, 166912, b"sm_80"))
    for device, multiprocessors, megabytes, shared, arch in cases:
        status, info = apex.device_info(CUDA, device)
        assert status == OK
        assert (info.multiprocessors, info.warp_size, info.l2_bytes) == (multiprocessors, 32, megabytes << 20)
        assert (info.shared_bytes_per_block, info.driver_version, info.arch) == (shared, 13000, arch)
    assert cuda.log() == ["cuInit"]
    status, info = apex.device_info(CUDA, 2)
    assert (
        status == DRIVER
        and "CUDA_ERROR_INVALID_DEVICE (101)" in apex.last_error
        and "cuda:2" in apex.last_error
    )


@fresh_process("cuda")
def test_resolver_registers_at_the_first_launch(apex, cuda):
    """The first launch asks the resolver; an offer without a code object, and no offer, are told apart."""
    asked = []

    def resolver(platform, device, unit):
        asked.append((platform, device, unit))
        if unit == b"scale":
            apex.register(platform, device, "scale", SM_90)
        return REFERENCE if unit == b"absent" else KERNEL

    apex.set_resolver(resolver)
    kernel = Kernel(b"scale", b"scale_f32", 0)
    for _ in range(3):
        assert apex.launch(CUDA, 0, kernel) == OK
    assert kernel.slot > 0
    assert asked == [(CUDA, 0, b"scale")]
    assert apex.launch(CUDA, 0, "absent/absent_f32") == USE_REFERENCE
    assert apex.launch(CUDA, 0, "liar/liar_f32") == NO_KERNEL


@fresh_process("cuda")
def test_newly_registered_object_serves_later_launches(apex, cuda):
    """Another image replaces the first under the same handle; going back or the same again loads nothing."""
    kernel = Kernel(b"scale", b"scale_f32", 0)
    other = SM_90.replace(b"arch", b"# jit\narch")
    for number, (code, load) in enumerate([(SM_90, True), (SM_90, False), (other, True), (SM_90, False)]):
        assert apex.register(CUDA, 0, "scale", code) == OK
        apex.c.apex_forget_choices()
        assert apex.launch(CUDA, 0, kernel) == OK
        log = cuda.log()
        assert any(line.startswith("load") for line in log) == load, number
        assert any(line.startswith("find") for line in log) == (number != 1), number


@fresh_process("cuda")
def test_two_handles_of_one_kernel_share_its_slot(apex, cuda):
    """Launch sites in templates have a handle each."""
    register(apex)
    handles = [Kernel(b"scale", b"scale_f32", 0) for _ in range(2)]
    assert [apex.launch(CUDA, 0, handle) for handle in handles] == [OK, OK]
    assert handles[0].slot == handles[1].slot
    assert cuda.log().count("find scale_f32") == 1
