"""Memory that processes share and NCCL's memory, on fakes: what a driver is asked, and what is said when it refuses."""

import ctypes
from ctypes import byref, c_char_p, c_int32, c_size_t, c_void_p

import pytest

from . import build
from .apex_library import CPU, CUDA, DRIVER, HIP, NO_DRIVER, OK, Apex, FakeDriver, Place
from .fresh_process import fresh_process, on_both
from .test_memory import allocations, settled, spoil, words

MIB = 1 << 20
ARGUMENT = 2
NAMES = {
    CUDA: ("cuIpcGetMemHandle", "cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle", "cuMemFree"),
    HIP: ("hipIpcGetMemHandle", "hipIpcOpenMemHandle", "hipIpcCloseMemHandle", "hipFree"),
}


class Peer:
    """The functions of peer_memory.h for one device."""

    def __init__(self, apex, platform, device=0, stream=None):
        self.c, self.place = apex.c, Place(platform, device, stream)

    def allocate(self, size):
        found = c_void_p()
        return self.c.apex_peer_allocate(byref(self.place), c_size_t(size), byref(found)), found.value

    def free(self, memory):
        return self.c.apex_peer_free(byref(self.place), c_void_p(memory))

    def handle(self, memory):
        made = ctypes.create_string_buffer(64)
        return self.c.apex_peer_handle(byref(self.place), c_void_p(memory), made), made.raw

    def open(self, handle):
        found = c_void_p()
        return self.c.apex_peer_open(byref(self.place), c_char_p(handle), byref(found)), found.value

    def close(self, memory):
        return self.c.apex_peer_close(byref(self.place), c_void_p(memory))

    def zero(self, memory, size):
        return self.c.apex_peer_zero(byref(self.place), c_void_p(memory), c_size_t(size))


@on_both
def test_shared(apex, driver, platform):
    """Zeroed, of whole 2 MiB, on the device that is named; a handle opens it on another one, and it is closed."""
    owner, other = Peer(apex, platform, 1), Peer(apex, platform, 0)
    status, memory = owner.allocate(100)
    assert status == OK and words(memory, 25) == [0] * 25, apex.last_error
    (made,) = allocations(driver.log())
    assert made.startswith(f"allocate {2 * MIB} ") and " 1" in made
    assert platform == CUDA or made.endswith("with 1")  # fine-grained
    status, handle = owner.handle(memory)
    assert status == OK and handle.startswith(b"a handle")
    status, seen = other.open(handle)
    assert (status, seen) == (OK, memory), apex.last_error
    assert any(line in ("open in primary 0", "open on 0") for line in driver.log())
    assert other.close(seen) == OK and driver.c.fake_opened() == 0
    assert owner.free(memory) == OK and driver.c.fake_live() == 0
    assert owner.allocate(2 * MIB + 1)[0] == OK
    assert allocations(driver.log())[0].startswith(f"allocate {4 * MIB} ")


@on_both
def test_zeroing_waits_its_turn(apex, driver, platform):
    """On the stream that is named: what was queued before may still write there."""
    stream = driver.c.fake_stream(0)
    peer = Peer(apex, platform, 0, stream)
    _, memory = peer.allocate(100)
    spoil(memory, 25)
    assert peer.zero(memory, 40) == OK
    assert words(memory, 10) == [0xFFFFFFFF] * 10
    driver.c.fake_run(stream)
    assert words(memory, 11) == [0] * 10 + [0xFFFFFFFF]


@on_both
def test_a_driver_that_refuses(apex, driver, platform):
    """The call and the driver's words; device and context are as before; the next try works."""
    peer = Peer(apex, platform, 1)
    _, memory = peer.allocate(1)
    _, handle = peer.handle(memory)
    get, opens, closes, frees = NAMES[platform]
    calls = {
        get: lambda: peer.handle(memory)[0],
        opens: lambda: peer.open(handle)[0],
        closes: lambda: peer.close(memory),
        frees: lambda: peer.free(memory),
    }
    for call, run in calls.items():
        driver.fail(call, 1)
        assert run() == DRIVER, call
        word = "cuda:1" if platform == CUDA else "hip:1"
        assert (
            f"{call} on {word}: " in apex.last_error
            and "INVALID_VALUE" in apex.last_error.upper().replace("ERRORINVALIDV", "INVALID_V")
        )
        driver.fail(call, 0)
        assert driver.c.fake_depth() == 0 if platform == CUDA else driver.c.fake_current() == 0
        if platform == HIP:
            assert driver.c.fake_last_error() == 0
    assert peer.open(bytes(64))[0] == DRIVER  # a handle of nobody
    assert peer.open(handle) == (OK, memory)
    assert peer.open(handle)[0] == DRIVER  # twice
    assert peer.close(memory) == OK and peer.free(memory) == OK


@on_both
def test_a_full_device(apex, driver, platform):
    driver.c.fake_set_room(MIB)
    assert Peer(apex, platform).allocate(1) == (OK, None)


@on_both
def test_while_another_thread_captures(apex, driver, platform):
    """A capture is not broken by memory that is made or opened meanwhile."""
    driver.c.fake_begin_capture(driver.c.fake_stream(0))
    peer = Peer(apex, platform, 1)
    status, memory = peer.allocate(1)
    assert status == OK and peer.open(peer.handle(memory)[1])[0] == OK, apex.last_error
    assert settled(driver.log()) and not any("broke" in line for line in driver.log())


@pytest.mark.parametrize("place", ((CPU, 0), (CUDA, 128), (7, 0)))
def test_no_such_gpu(library, place):
    apex = Apex(library)
    peer = Peer(apex, *place)
    for status in (
        peer.allocate(1)[0],
        peer.free(8),
        peer.handle(8)[0],
        peer.open(bytes(64))[0],
        peer.zero(8, 1),
    ):
        assert status == ARGUMENT and "no such GPU" in apex.last_error


# ---- NCCL's memory ---------------------------------------------------------------------------------------------------


class FakeNccl(FakeDriver):
    """A fake NCCL that this process has mapped, as torch maps the real one."""

    def __init__(self, name="libnccl.so.2", *flags):
        self.c = ctypes.CDLL(str(build.build_shared(name, build.FAKES / "fake_nccl.cpp", list(flags))))
        self.c.fake_log.restype = c_char_p


def functions(apex):
    c = apex.c
    c.apex_nccl_allocate.restype, c.apex_nccl_allocate.argtypes = c_void_p, [c_size_t, c_int32, c_void_p]
    c.apex_nccl_free.restype, c.apex_nccl_free.argtypes = None, [c_void_p, c_size_t, c_int32, c_void_p]
    return c


@fresh_process()
def test_without_nccl(apex):
    """Said by name; later, when torch has mapped one, it is used. An older one is no use."""
    c = functions(apex)
    assert c.apex_open_nccl() == NO_DRIVER
    assert (
        "there is no NCCL to use: no libnccl.so is mapped" in apex.last_error
        and "librccl.so" in apex.last_error
    )
    assert c.apex_nccl_allocate(64, 0, None) is None and "no NCCL" in apex.last_error
    nccl = FakeNccl("librccl.so.1")
    assert c.apex_open_nccl() == OK, apex.last_error
    memory = c.apex_nccl_allocate(4096, 0, None)
    c.apex_nccl_free(memory, 4096, 0, None)
    c.apex_nccl_free(None, 0, 0, None)
    assert memory and nccl.log() == ["allocate 4096", "free"]


@fresh_process()
def test_nccl_before_2_19(apex):
    FakeNccl("libnccl.so.2", "-DFAKE_OLD")
    assert apex.c.apex_open_nccl() == NO_DRIVER and "older than 2.19" in apex.last_error


@fresh_process()
def test_nccl_that_refuses(apex):
    nccl, c = FakeNccl(), functions(apex)
    nccl.fail("ncclMemAlloc", 2)
    assert c.apex_nccl_allocate(64, 0, None) is None
    assert apex.last_error == "ncclMemAlloc of 64 bytes: unhandled system error (2)"
    nccl.fail("ncclMemAlloc", 0)
    nccl.fail("ncclMemFree", 2)
    memory = c.apex_nccl_allocate(64, 0, None)
    c.apex_nccl_free(memory, 64, 0, None)
    assert apex.last_error == "ncclMemFree: unhandled system error (2)"


# ---- nccl_p2p_cuda, whose tensors seem to lie on a GPU ---------------------------------------------------------------


def p2p():
    """(torch, nccl_p2p_cuda)"""
    from types import SimpleNamespace

    import torch

    from apex._legacy import nccl_p2p_cuda

    nccl_p2p_cuda._is_on_gpu = lambda tensor: True
    torch.cuda.current_stream = lambda device: SimpleNamespace(cuda_stream=None)
    return torch, nccl_p2p_cuda


@fresh_process()
def test_p2p(apex):
    """Ids go through whole; halos in any strides, in place and not; zeros where there is no neighbour."""
    nccl, (torch, module) = FakeNccl(), p2p()
    ids = module.get_unique_nccl_id(2)
    assert ids.shape == (2, 128) and ids.dtype == torch.uint8 and ids[1].unique().tolist() == [2]
    assert [module.init_nccl_comm(i, 0, 1) for i in ids] == [0, 1]
    assert nccl.log() == ["init 0 of 1 by 1 1", "init 0 of 1 by 2 2"]
    for dtype, number in ((torch.float16, 6), (torch.bfloat16, 9), (torch.int64, 4), (torch.bool, 1)):
        left, right = (torch.tensor([[v, 0], [0, v]], dtype=dtype, device="cpu").t() for v in (1, 0))
        found = module.left_right_halo_exchange(0, 0, 0, left, right)
        assert torch.equal(found[0], right) and torch.equal(found[1], left)
        send, receive = f"send 4 of {number} to 0", f"receive 4 of {number} from 0"
        assert nccl.log() == [send, receive, send, receive]
    into = [torch.full((2, 2), 7.0, dtype=torch.float32, device="cpu")[:, ::1] for _ in range(2)]
    x = torch.ones(2, 2, dtype=torch.float32, device="cpu")
    module.left_right_halo_exchange_inplace(1, -1, 0, x, 2 * x, *into)
    assert into[0].eq(0).all() and into[1].eq(2).all()
    module.left_right_halo_exchange_inplace(1, -1, -1, x, x, *into)
    assert into[1].eq(0).all()


@fresh_process()
def test_p2p_refusals(apex):
    """By name, before NCCL is asked; and what NCCL says."""
    nccl, (torch, module) = FakeNccl(), p2p()
    x = torch.ones(2, 2, dtype=torch.float32, device="cpu")
    id = module.get_unique_nccl_id(1)
    for call, error, text in (
        (lambda: module.init_nccl_comm(id[:, :64], 0, 1), ValueError, r"must be uint8 \[128\]"),
        (lambda: module.init_nccl_comm(id, 1, 1), ValueError, "my_rank is 1, of 1 ranks"),
        (lambda: module.left_right_halo_exchange(0, 0, 0, x, x), ValueError, "there is no communicator 0"),
    ):
        with pytest.raises(error, match=text):
            call()
    module.init_nccl_comm(id, 0, 1)
    for arguments, error, text in (
        ((0, 0, x, x.double()), TypeError, "must be alike"),
        ((0, 0, x, x[0]), ValueError, "must have one size"),
        ((3, 0, x, x), ValueError, "there is no rank 3 among 1"),
        ((0, 0, x.cfloat(), x.cfloat()), TypeError, "NCCL does not send torch.complex64"),
    ):
        with pytest.raises(error, match=text):
            module.left_right_halo_exchange(0, *arguments)
    nccl.fail("ncclSend", 2)
    with pytest.raises(RuntimeError, match=r"ncclSend: unhandled system error \(2\)"):
        module.left_right_halo_exchange(0, 0, 0, x, x)
    nccl.fail("ncclCommInitRank", 2)
    with pytest.raises(RuntimeError, match=r"ncclCommInitRank: unhandled system error \(2\)"):
        module.init_nccl_comm(id, 0, 1)


@fresh_process()
def test_p2p_without_nccl(apex):
    from apex._loader.errors import NoDriverError

    _, module = p2p()
    with pytest.raises(NoDriverError, match="there is no NCCL to use(?s:.*)HaloExchangerSendRecv"):
        module.get_unique_nccl_id(1)
