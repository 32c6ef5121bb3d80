"""The launch contract on HIP, against a fake runtime."""

import os
import threading

from .apex_library import DRIVER, FORKED, HIP, NO_DRIVER, NO_KERNEL, OK, image
from .fresh_process import fresh_process
from .test_cuda_launch import in_child

GFX942 = image("gfx942", "scale_f32")
GFX1100 = image("gfx1100", "scale_f32")
KERNEL_NAME = "scale/scale_f32"


def register(apex):
    assert apex.register(HIP, 0, "scale", GFX942) == OK
    assert apex.register(HIP, 1, "scale", GFX1100) == OK


def launched(device, stream="default"):
    return f"launch scale_f32 on {device}, grid 1 1 1, block 32 1 1, shared 0, stream {stream}, first 0"


@fresh_process("hip")
def test_the_right_device_is_current_already(apex, hip):
    """One load, one launch; the device is not touched."""
    register(apex)
    assert apex.launch(HIP, 0, KERNEL_NAME) == OK
    assert hip.log() == ["mode 2", "load on 0", "find scale_f32", "mode 0", launched(0)]
    assert apex.launch(HIP, 0, KERNEL_NAME, stream=hip.c.fake_stream(0)) == OK
    assert hip.log() == [launched(0, "given")]


@fresh_process("hip")
def test_another_device_is_current(apex, hip):
    """The tensor's device is set for the load and the launch, and the caller's comes back; both ways."""
    register(apex)
    for device in (1, 0):
        hip.c.fake_set_current(1 - device)
        assert apex.launch(HIP, device, KERNEL_NAME, stream=hip.c.fake_stream(device)) == OK
        set_and_back = [f"set {device}", f"set {1 - device}"]
        assert hip.log() == [
            set_and_back[0],
            "mode 2",
            f"load on {device}",
            "find scale_f32",
            "mode 0",
            set_and_back[1],
            set_and_back[0],
            launched(device, "given"),
            set_and_back[1],
        ]
        assert hip.c.fake_current() == 1 - device


@fresh_process("hip")
def test_first_launch_inside_a_capture(apex, hip):
    """The load runs in the relaxed mode; the thread's own mode comes back."""
    register(apex)
    stream = hip.c.fake_stream(1)
    hip.c.fake_set_capture_mode(1)
    hip.c.fake_begin_capture(stream)
    assert apex.is_capturing(HIP, 1, stream) == 1
    assert apex.is_capturing(HIP, 0) == 0
    assert apex.launch(HIP, 1, KERNEL_NAME, stream=stream) == OK, apex.last_error
    assert not any("broke" in line for line in hip.log())
    assert hip.c.fake_capture_mode() == 1 and hip.c.fake_current() == 0


@fresh_process("hip")
def test_sixteen_threads_at_once_load_once(apex, hip):
    """A load per device, every launch on its device, every thread's device as before."""
    register(apex)
    gate = threading.Barrier(16)
    results = []

    def work(device):
        gate.wait()
        results.append((apex.launch(HIP, device, KERNEL_NAME), hip.c.fake_current()))

    threads = [threading.Thread(target=work, args=(index % 2,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [(OK, 0)] * 16
    log = hip.log()
    assert sorted(line for line in log if line.startswith("load")) == ["load on 0", "load on 1"]
    assert log.count(launched(0)) == log.count(launched(1)) == 8


@fresh_process("hip")
def test_refusals_leave_nothing_behind(apex, hip):
    """The text has code and name; the runtime's "last error", which torch would raise later, is cleared."""
    register(apex)
    for call in (
        "hipGetDevice",
        "hipSetDevice",
        "hipModuleLoadData",
        "hipModuleGetFunction",
        "hipModuleLaunchKernel",
    ):
        hip.fail(call, 1)
        assert apex.launch(HIP, 1, KERNEL_NAME) == DRIVER, call
        assert "hipErrorInvalidValue (1), words of the runtime" in apex.last_error, call
        hip.fail(call, 0)
        assert (hip.c.fake_last_error(), hip.c.fake_current(), hip.c.fake_capture_mode()) == (0, 0, 0), call
    assert apex.launch(HIP, 0, "scale/scale_f64") == NO_KERNEL
    assert apex.last_error == "the code object registered for hip:0 has no kernel scale_f64"
    assert apex.launch(HIP, 0, KERNEL_NAME, shared=70000) == DRIVER
    assert "at most 65536 bytes" in apex.last_error
    assert apex.launch(HIP, 1, KERNEL_NAME, shared=70000) == OK
    assert hip.c.fake_last_error() == 0


@fresh_process("hip")
def test_code_object_of_another_architecture(apex, hip):
    """The device's own name is in the text."""
    assert apex.register(HIP, 0, "scale", GFX1100) == OK
    assert apex.launch(HIP, 0, KERNEL_NAME) == DRIVER
    for words in ("hip:0 (gfx942:sramecc+:xnack-)", "hipErrorNoBinaryForGpu (209)", "another architecture"):
        assert words in apex.last_error
    assert hip.c.fake_last_error() == 0


@fresh_process("hip")
def test_device_info_is_asked_per_device(apex, hip):
    """Wave size and shared memory differ within one process."""
    cases = ((0, 304, 64, 4, 65536, b"gfx942:sramecc+:xnack-"), (1, 305, 32, 5, 163840, b"gfx1100"))
    for device, multiprocessors, wave, megabytes, shared, arch in cases:
        status, info = apex.device_info(HIP, device)
        assert status == OK, apex.last_error
        assert (info.multiprocessors, info.warp_size, info.l2_bytes) == (
            multiprocessors,
            wave,
            megabytes << 20,
        )
        assert (info.shared_bytes_per_block, info.driver_version, info.arch) == (shared, 70253211, arch)
    assert apex.device_info(HIP, 2)[0] == DRIVER and "hipErrorInvalidDevice" in apex.last_error
    assert hip.c.fake_last_error() == 0


@fresh_process("hip")
def test_fork(apex, hip):
    """HIP's text says HIP."""
    register(apex)
    assert apex.launch(HIP, 0, KERNEL_NAME) == OK

    def child():
        assert apex.launch(HIP, 0, KERNEL_NAME) == FORKED
        assert apex.last_error.startswith("HIP was already in use")
        assert str(os.getppid()) in apex.last_error

    assert in_child(child) == 0


@fresh_process()
def test_no_runtime(apex):
    """Nothing mapped and no torch: said so."""
    register(apex)
    assert apex.launch(HIP, 0, KERNEL_NAME) == NO_DRIVER
    assert "no libamdhip64.so is mapped" in apex.last_error
