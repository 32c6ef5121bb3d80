"""The launch contract on an NVIDIA device, under torch. Each test has a process of its own.

The kernels are PTX text, so that no compiler is needed and any device runs them.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from . import build
from .apex_library import CUDA, DRIVER, FORKED, KERNEL, NO_KERNEL, OK, Kernel, Place
from .fresh_process import fresh_process
from .test_cuda_launch import in_child

pytestmark = pytest.mark.gpu

PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.extern .shared .align 16 .b8 room[];

// data[i] += amount for i < count
.visible .entry probe_add(.param .u64 data, .param .u32 count, .param .u32 amount)
{
  .reg .pred %outside;
  .reg .b32 %r<8>;
  .reg .b64 %d<4>;
  ld.param.u64 %d1, [data];
  ld.param.u32 %r5, [count];
  ld.param.u32 %r7, [amount];
  mov.u32 %r1, %ctaid.x;
  mov.u32 %r2, %ntid.x;
  mov.u32 %r3, %tid.x;
  mad.lo.s32 %r4, %r1, %r2, %r3;
  setp.ge.u32 %outside, %r4, %r5;
  @%outside bra done;
  cvta.to.global.u64 %d1, %d1;
  mul.wide.u32 %d2, %r4, 4;
  add.s64 %d3, %d1, %d2;
  ld.global.u32 %r6, [%d3];
  add.u32 %r6, %r6, %r7;
  st.global.u32 [%d3], %r6;
done:
  ret;
}

// Sends `value` through the shared memory at `offset`.
.visible .entry probe_shared(.param .u64 data, .param .u32 offset, .param .u32 value)
{
  .reg .b32 %r<8>;
  .reg .b64 %d<2>;
  ld.param.u64 %d1, [data];
  cvta.to.global.u64 %d1, %d1;
  ld.param.u32 %r1, [offset];
  ld.param.u32 %r2, [value];
  mov.u32 %r3, room;
  add.u32 %r3, %r3, %r1;
  st.shared.u32 [%r3], %r2;
  ld.shared.u32 %r4, [%r3];
  st.global.u32 [%d1], %r4;
  ret;
}

.visible .entry probe_nothing() { ret; }
"""


def visible_devices():
    """How many NVIDIA devices torch sees, asked in another process: this one must not open the driver."""
    code = "import torch; print(torch.cuda.device_count() if torch.version.cuda else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return int(done.stdout or 0)


@pytest.fixture(scope="module", autouse=True)
def devices():
    """Skips the file where there is no device; says how many there are."""
    count = visible_devices()
    if not count:
        pytest.skip("no NVIDIA device is here: nothing of this file ran")
    return count


def prepare(apex, devices=1):
    """torch, with the PTX registered for the first devices."""
    import torch

    for device in range(devices):
        assert apex.register(CUDA, device, "probe", PTX) == OK
    return torch


def add(apex, tensor, amount=1, stream=None):
    """Launches probe_add on a tensor of int32, on torch's stream of its device unless given."""
    import torch

    if stream is None:
        stream = torch.cuda.current_stream(tensor.device).cuda_stream
    arguments = [ctypes.c_uint64(tensor.data_ptr()), tensor.numel(), amount]
    blocks = (-(-tensor.numel() // 128), 1, 1)
    return apex.launch(
        CUDA, tensor.device.index, "probe/probe_add", stream or None, blocks, (128, 1, 1), 0, arguments
    )


class Driver:
    """The real driver, for looking and for making odd states."""

    def __init__(self):
        self.c = ctypes.CDLL("libcuda.so.1")

    def current(self):
        """The current context's address, or None."""
        context = ctypes.c_void_p()
        assert self.c.cuCtxGetCurrent(ctypes.byref(context)) == 0
        return context.value

    def active(self, device):
        """Whether the primary context of the device exists."""
        flags, active = ctypes.c_uint(), ctypes.c_int()
        assert self.c.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
        return bool(active.value)


def in_thread(function):
    """Runs it in a new thread; its result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


@fresh_process()
def test_first_launch_of_a_plain_thread(apex):
    """The thread has no context before and none after."""
    torch = prepare(apex)
    x = torch.arange(1000, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    driver = Driver()

    def work():
        before = driver.current()
        return before, add(apex, x, 5, stream=0), driver.current()

    assert in_thread(work) == (None, OK, None), apex.last_error
    torch.cuda.synchronize()
    assert torch.equal(x.cpu(), torch.arange(1000, dtype=torch.int32) + 5)


@fresh_process()
def test_first_launch_in_backward_only(apex):
    """Autograd's own thread of the device launches first."""
    torch = prepare(apex)
    statuses = []

    class Touch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, counter):
            ctx.counter = counter
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            statuses.append((threading.get_ident(), add(apex, ctx.counter)))
            return grad, None

    counter = torch.zeros(3, dtype=torch.int32, device="cuda")
    x = torch.ones(3, device="cuda", requires_grad=True)
    Touch.apply(x, counter).sum().backward()
    assert [status for _, status in statuses] == [OK], apex.last_error
    assert counter.tolist() == [1, 1, 1]


@fresh_process()
def test_first_launch_inside_a_graph(apex):
    """In torch's default capture mode (global). The load leaves the capture whole; replays do the work."""
    torch = prepare(apex)
    x = torch.zeros(1000, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    capturing = []
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        capturing.append(apex.is_capturing(CUDA, 0, stream))
        status = add(apex, x, 2)
        text = apex.last_error
        x.mul_(1)
    assert (status, capturing) == (OK, [1]), text
    assert apex.is_capturing(CUDA, 0, stream) == 0
    assert x.sum().item() == 0
    for _ in range(3):
        graph.replay()
    assert x.unique().tolist() == [6]


@fresh_process()
def test_first_launch_of_another_thread_during_a_capture(apex):
    """A capture of the global mode forbids unsafe calls to every thread; a load elsewhere does not end it."""
    torch = prepare(apex)
    x = torch.zeros(8, dtype=torch.int32, device="cuda")
    y = torch.zeros(8, dtype=torch.int32, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        status = in_thread(lambda: add(apex, y, 3, stream=side.cuda_stream))
        x.add_(1)
    assert status == OK
    graph.replay()
    torch.cuda.synchronize()
    assert x.unique().tolist() == [2] and y.unique().tolist() == [3]


@fresh_process()
def test_sixteen_threads_at_once(apex):
    """Each adds to its own tensor on its own stream."""
    torch = prepare(apex)
    tensors = [torch.zeros(1000, dtype=torch.int32, device="cuda") for _ in range(16)]
    streams = [torch.cuda.Stream() for _ in tensors]
    torch.cuda.synchronize()
    gate = threading.Barrier(16)
    statuses = []

    def work(index):
        gate.wait()
        for _ in range(100):
            statuses.append(add(apex, tensors[index], 1, stream=streams[index].cuda_stream))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert set(statuses) == {OK} and len(statuses) == 1600
    assert all(tensor.unique().tolist() == [100] for tensor in tensors)


@fresh_process()
def test_green_context_stays(apex):
    """A current green context of the device: used as it is, on its own stream, before and after others."""
    torch = prepare(apex)
    x = torch.zeros(1000, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    c = Driver().c
    resource, part = ctypes.create_string_buffer(1024), ctypes.create_string_buffer(1024)
    groups = ctypes.c_uint(1)
    description, green, context, stream = (ctypes.c_void_p() for _ in range(4))
    assert c.cuDeviceGetDevResource(0, resource, 1) == 0
    assert c.cuDevSmResourceSplitByCount(part, ctypes.byref(groups), resource, None, 0, 16) == 0
    assert c.cuDevResourceGenerateDesc(ctypes.byref(description), part, 1) == 0
    assert c.cuGreenCtxCreate(ctypes.byref(green), description, 0, 1) == 0
    assert c.cuCtxFromGreenCtx(ctypes.byref(context), green) == 0
    assert c.cuGreenCtxStreamCreate(ctypes.byref(stream), green, 1, 0) == 0

    def work():
        assert c.cuCtxPushCurrent_v2(context) == 0
        statuses = [add(apex, x, 1, stream=stream.value), add(apex, x, 2, stream=stream.value)]
        return statuses, Driver().current(), c.cuStreamSynchronize(stream)

    assert in_thread(work) == ([OK, OK], context.value, 0), apex.last_error
    assert x.unique().tolist() == [3]
    assert add(apex, x, 4) == OK  # the primary context, after the first load was in a green one
    assert in_thread(work) == ([OK, OK], context.value, 0)
    assert x.unique().tolist() == [10]


@fresh_process()
def test_much_shared_memory(apex):
    """All that the device says a block may have works; a byte more is refused with both numbers."""
    torch = prepare(apex)
    _, info = apex.device_info(CUDA, 0)
    most = info.shared_bytes_per_block
    assert most == torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    x = torch.zeros(1, dtype=torch.int32, device="cuda")

    def launch(shared):
        arguments = [ctypes.c_uint64(x.data_ptr()), shared - 4, 77]
        return apex.launch(CUDA, 0, "probe/probe_shared", None, (1, 1, 1), (1, 1, 1), shared, arguments)

    assert launch(most) == OK, apex.last_error
    assert x.item() == 77
    assert launch(most + 4) == DRIVER
    assert str(most + 4) in apex.last_error and f"at most {most} bytes" in apex.last_error


@fresh_process()
def test_device_info(apex):
    """Against torch's."""
    torch = prepare(apex)
    for device in range(torch.cuda.device_count()):
        status, info = apex.device_info(CUDA, device)
        assert status == OK
        about = torch.cuda.get_device_properties(device)
        assert info.multiprocessors == about.multi_processor_count
        assert info.l2_bytes == about.L2_cache_size
        assert info.warp_size == about.warp_size
        assert info.arch.decode() == f"sm_{about.major}{about.minor}"
        assert info.driver_version >= 12000


@fresh_process()
def test_refusals(apex):
    """A missing kernel; text that is no code object; both leave torch as it was."""
    torch = prepare(apex)
    x = torch.zeros(8, dtype=torch.int32, device="cuda")
    assert apex.launch(CUDA, 0, "probe/probe_absent") == NO_KERNEL
    assert "probe_absent" in apex.last_error
    assert apex.register(CUDA, 0, "garbage", b"\x7fELF" + bytes(200)) == OK
    assert apex.launch(CUDA, 0, "garbage/garbage_f32") == DRIVER
    assert "CUDA_ERROR_" in apex.last_error and "cuda:0 (sm_" in apex.last_error
    assert apex.launch(CUDA, 0, "probe/probe_nothing", block=(4096, 1, 1)) == DRIVER
    assert "probe_nothing" in apex.last_error and "block (4096, 1, 1)" in apex.last_error
    assert apex.launch(CUDA, 99, "probe/probe_nothing") != OK
    assert add(apex, x, 1) == OK
    torch.cuda.synchronize()
    assert x.unique().tolist() == [1]


@fresh_process()
def test_cubin_of_another_architecture(apex):
    """Error 209, with the device's own architecture in the text."""
    torch = prepare(apex)
    if not shutil.which("ptxas"):
        print("not run: no ptxas is here to make a cubin")
        return
    other = "sm_80" if torch.cuda.get_device_capability()[0] != 8 else "sm_90"
    Path("probe.ptx").write_bytes(PTX)
    subprocess.run(["ptxas", f"-arch={other}", "probe.ptx", "-o", "probe.cubin"], check=True)
    assert apex.register(CUDA, 0, "other", Path("probe.cubin").read_bytes()) == OK
    assert apex.launch(CUDA, 0, "other/probe_add") == DRIVER
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU (209)" in apex.last_error and "(sm_" in apex.last_error


@fresh_process()
def test_an_earlier_kernels_fault(apex):
    """It comes up at a later launch, and is said to be an earlier kernel's."""
    torch = prepare(apex)
    x = torch.zeros(8, dtype=torch.int32, device="cuda")
    arguments = [ctypes.c_uint64(8), 1, 1]  # an address that is nobody's
    assert apex.launch(CUDA, 0, "probe/probe_add", None, (1, 1, 1), (32, 1, 1), 0, arguments) == OK
    Driver().c.cuCtxSynchronize()
    assert add(apex, x) == DRIVER
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in apex.last_error and "ran earlier" in apex.last_error


@fresh_process()
def test_fork(apex):
    """After a launch, and after torch alone used the device: one named error, and the parent goes on."""
    torch = prepare(apex)
    x = torch.zeros(8, dtype=torch.int32, device="cuda")

    def child():
        assert apex.launch(CUDA, 0, "probe/probe_nothing") == FORKED, apex.last_error
        assert "spawn" in apex.last_error
        assert apex.resolve(CUDA, 0, "probe") == KERNEL

    assert in_child(child) == 0  # torch alone
    assert add(apex, x) == OK
    assert in_child(child) == 0
    assert add(apex, x) == OK
    assert x.unique().tolist() == [2]


@fresh_process()
def test_fork_before_any_use(apex):
    """A child may be the first to use the device."""
    prepare(apex)

    def child():
        assert apex.launch(CUDA, 0, "probe/probe_nothing") == OK, apex.last_error

    assert in_child(child) == 0


@fresh_process()
def test_another_image_registered_later(apex):
    """It serves the launches after it, also those of a handle that had loaded the first."""
    torch = prepare(apex)
    x = torch.zeros(8, dtype=torch.int32, device="cuda")
    assert add(apex, x, 1) == OK
    assert (
        apex.register(CUDA, 0, "probe", PTX.replace(b"add.u32 %r6, %r6, %r7", b"sub.u32 %r6, %r6, %r7")) == OK
    )
    assert add(apex, x, 10) == OK
    assert x.unique().tolist() == [-9]


@fresh_process()
def test_overhead(apex):
    """apex_launch costs less than a microsecond over the driver's own launch; the figures are printed."""
    torch = prepare(apex)
    torch.zeros(1, device="cuda")
    c = Driver().c
    library, kernel, function = (ctypes.c_void_p() for _ in range(3))
    assert c.cuLibraryLoadData(ctypes.byref(library), PTX + b"\0", None, None, 0, None, None, 0) == 0
    assert c.cuLibraryGetKernel(ctypes.byref(kernel), library, b"probe_nothing") == 0
    assert c.cuKernelGetFunction(ctypes.byref(function), kernel) == 0
    timer = ctypes.CDLL(os.environ["APEX_LAUNCH_TIMER"])
    place = Place(CUDA, 0, torch.cuda.Stream().cuda_stream)
    handle = Kernel(b"probe", b"probe_nothing", 0)
    for name, launched in (("kernel", kernel), ("function", function)):
        best = (ctypes.c_double * 2)()
        status = timer.time_launches(
            apex.c.apex_launch, c.cuLaunchKernel, c.cuCtxSynchronize, launched, ctypes.byref(place),
            ctypes.byref(handle), None, 50, 200, best,
        )  # fmt: skip
        assert status == 0, apex.last_error
        print(f"microseconds per launch: driver ({name}) {best[0]:.3f}, apex_launch {best[1]:.3f}")
        assert best[1] - best[0] < 1


@pytest.fixture(scope="module", autouse=True)
def timer():
    """Where test_overhead finds its timer."""
    source = build.Path(__file__).with_name("launch_overhead.cpp")
    made = build.build_shared("liblaunch_overhead.so", source, ["-I", str(build.ROOT / "csrc")])
    os.environ["APEX_LAUNCH_TIMER"] = str(made)


@fresh_process(devices=2)
def test_device_0_current_and_tensor_on_device_1(apex):
    """Default and other streams, both ways; the current device stays, and no context is made on device 0."""
    torch = prepare(apex, devices=2)
    driver = Driver()
    x = torch.zeros(1000, dtype=torch.int32, device="cuda:1")
    torch.cuda.synchronize(1)

    # A new thread of torch's has device 0 current: what a worker that was handed a tensor of device 1 sees.
    def work():
        statuses = add(apex, x, 1, stream=0), add(apex, x, 2, stream=torch.cuda.Stream(1).cuda_stream)
        torch.cuda.synchronize(1)
        return statuses, torch.cuda.current_device()

    first = driver.active(0)
    assert in_thread(work) == ((OK, OK), 0), apex.last_error
    print(f"primary context of device 0 active before {first}, after {driver.active(0)}")
    assert x.unique().tolist() == [3]
    for current, other in ((0, 1), (1, 0)):
        torch.cuda.set_device(current)
        y = torch.zeros(1000, dtype=torch.int32, device=f"cuda:{other}")
        torch.cuda.synchronize(other)
        context = driver.current()
        assert add(apex, y, 7) == OK
        assert driver.current() == context and torch.cuda.current_device() == current
        assert y.unique().tolist() == [7]
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(other)
        with torch.cuda.device(other), torch.cuda.graph(graph, stream=side):
            stream = torch.cuda.current_stream().cuda_stream
            torch.cuda.set_device(current)
            status = apex.is_capturing(CUDA, other, stream), add(apex, y, 1, stream=stream)
            torch.cuda.set_device(other)
        assert status == (1, OK), apex.last_error
        graph.replay()
        torch.cuda.synchronize(other)
        assert y.unique().tolist() == [8]


@fresh_process(devices=2)
def test_untouched_device_stays_untouched(apex):
    """Launching on device 1 makes no context on device 0."""
    torch = prepare(apex, devices=2)
    driver = Driver()
    torch.cuda.set_device(1)
    x = torch.zeros(10, dtype=torch.int32, device="cuda:1")
    torch.cuda.synchronize()
    before = driver.active(0)
    assert in_thread(lambda: add(apex, x, 1, stream=0)) == OK
    assert add(apex, x, 1) == OK
    assert (before, driver.active(0)) == (False, False)
    assert x.unique().tolist() == [2]
