"""What each rank of test_peer_memory.py runs, on gloo: peer memory of the CPU, or of the GPU of each rank."""

from __future__ import annotations

import functools
import time

import lists
import pytest
import torch
import torch.distributed as dist
from lists import BF16, F16, F32, F64

from apex._legacy import peer_memory_cuda
from apex._loader.errors import ArgumentError, PeerMemoryError
from apex.contrib.bottleneck import HaloExchangerPeer
from apex.contrib.peer_memory import PeerHaloExchanger1d, PeerMemoryPool, _memory, peer_memory

NHWC, LAST, FIRST = "explicit_nhwc", torch.channels_last, torch.contiguous_format


def device():
    return _memory.current_device()


@functools.cache
def pool():
    return PeerMemoryPool(64 * 1024, 2 * 1024 * 1024, timeout=60)


def ranks():
    return list(range(dist.get_world_size()))


def _image(layout, by_height, half, dtype, seed, sizes=(1, 6, 5, 7)):
    """A padded image of this rank, whose halos hold 7; (image, axis)."""
    n, c, h, w = sizes
    shape = [n, c, h + 2 * half * by_height, w + 2 * half * (not by_height)]
    axis = 3 - by_height
    if dtype.is_floating_point:
        y = lists.random(dtype, "cpu", (shape,), seed=seed)[0]
    else:
        y = (
            torch.arange(n * shape[1] * shape[2] * shape[3], dtype=torch.int64, device="cpu").view(shape)
            + seed
        )
    y = y.to(device(), dtype)
    for begin in (0, y.shape[axis] - half):
        y.narrow(axis, begin, half).fill_(7)
    if layout == NHWC:
        return y.permute(0, 2, 3, 1).contiguous(), axis - 1
    return y.contiguous(memory_format=layout), axis


def _filled(layout, by_height, half, dtype, sizes=(1, 6, 5, 7)):
    """What the halos of this rank's image must be, by the images of its neighbours, which anybody can make."""
    rank, size = dist.get_rank(), dist.get_world_size()
    make = functools.partial(_image, layout, by_height, half, dtype, sizes=sizes)
    y, axis = make(rank)
    end = y.shape[axis] - half
    edge = torch.zeros_like(y.narrow(axis, 0, half))
    y.narrow(axis, 0, half).copy_(make(rank - 1)[0].narrow(axis, end - half, half) if rank else edge)
    y.narrow(axis, end, half).copy_(make(rank + 1)[0].narrow(axis, half, half) if rank < size - 1 else edge)
    return y


def exchanger_1d():
    """Every layout, split, width of halo and dtype; odd widths; halos of one strip and of several rounds."""
    rank = dist.get_rank()
    for half in (1, 2):
        exchanger = PeerHaloExchanger1d(ranks(), rank, pool(), half)
        for dtype in (F32, F16, BF16, F64, torch.int32, torch.uint8):
            for layout in (NHWC, LAST, FIRST):
                for by_height in (True, False):
                    y, _ = _image(layout, by_height, half, dtype, rank)
                    exchanger(y, by_height, layout == NHWC, 1)
                    lists.assert_same_bits([y], [_filled(layout, by_height, half, dtype)])
    sizes = (2, 130, 3, 301)  # 130 * 301 * 2 elements of 4 bytes: more than an inbox of 254 KiB holds at once
    for layout in (NHWC, LAST, FIRST):
        y, _ = _image(layout, True, 1, F32, rank, sizes)
        PeerHaloExchanger1d(ranks(), rank, pool(), 1)(y, True, layout == NHWC)
        lists.assert_same_bits([y], [_filled(layout, True, 1, F32, sizes)])


def many_exchanges():
    """Two exchangers of one pool, sizes that change, and resets between: ranks stay in step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    one, other = (HaloExchangerPeer(ranks(), rank, pool(), True) for _ in range(2))
    for step in range(60):
        n = 1 + (step * 977) % 3000
        left, right = (
            torch.full((1, 1, 1, n), 10.0 * r + step, dtype=F32, device=device()) for r in (rank, rank + 0.5)
        )
        above, below = (one, other)[step % 2].left_right_halo_exchange(left, right)
        assert above.unique().tolist() == [10.0 * (rank - 0.5) + step if rank else 0.0]
        assert below.unique().tolist() == [10.0 * (rank + 1) + step if rank < size - 1 else 0.0]
        pool().reset()


def tensors_of_the_pool():
    """A tensor on each peer, the same in all processes, in every layout; the dynamic part begins anew."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = PeerMemoryPool(4000, 1024)
    assert own.static_size == 4096 and own.dynamic_size == 1024
    for dynamic in (False, True):
        for dtype, last in ((F16, False), (F32, True), (torch.int32, False), (F64, False)):
            own.reset()
            found = own.allocate_peer_tensors([1, 3, 2, 4], dtype, last, dynamic)
            assert [t.shape for t in found] == [(1, 3, 2, 4)] * size and found[0].dtype == dtype
            assert found[0].is_contiguous(memory_format=LAST if last else FIRST)
            dist.barrier()
            found[(rank + 1) % size].fill_(rank)
            _synchronize()
            dist.barrier()
            assert found[rank].unique().tolist() == [(rank - 1) % size]
            assert found[(rank + 1) % size].unique().tolist() == [rank]
            dist.barrier()
    own.reset()
    own.allocate_peer_tensors([1024], torch.uint8, False, True)  # all of it
    with pytest.raises(PeerMemoryError, match="Dynamic peer memory pool exhausted"):
        own.allocate_peer_tensors([1], F32, False, True)
    with pytest.raises(PeerMemoryError, match="Static peer memory pool exhausted"):
        own.allocate_peer_tensors([4096], F32, False, False)
    own.close()


def _synchronize():
    if device().type == "cuda":
        torch.cuda.synchronize()


def raw_functions(signature):
    """allocate_raw ... push_pull_halos_1d, as public apex's own Python calls them; here in a ring."""
    pm, rank, size = peer_memory_cuda, dist.get_rank(), dist.get_world_size()
    raw = pm.allocate_raw(1 << 16)
    mine = pm.get_raw_ipc_address(raw)
    assert mine.shape == (64,) and mine.dtype == torch.uint8 and mine.device.type == "cpu"
    handles = [None] * size
    dist.all_gather_object(handles, mine)
    peers = pm.get_raw_peers(torch.stack(handles), rank, raw)
    assert peers[rank] == raw and len(set(peers)) == size
    boxes = [[pm.blob_view_half(p + 8192 * i, [1, 1, 1, 4096], False) for p in peers] for i in range(2)]
    above, below = (rank - 1) % size, (rank + 1) % size
    for step in range(3):
        left, right = (
            torch.full((1, 3, 1, 5), v + step, dtype=F16, device=device()) for v in (rank, rank + 50)
        )
        into = [torch.empty_like(left) for _ in range(2)]
        top = (False, left, boxes[0][rank], boxes[1][above], into[0])
        bottom = (False, right, boxes[1][rank], boxes[0][below], into[1])
        start, signals = (False, False, 1), [pm.blob_view_int(p + 32768, [2, 4], False) for p in peers]
        if signature == "nvidia":
            assert pm.push_pull_halos_1d(*start, rank, *top, *bottom) is None
        else:
            pm.push_pull_halos_1d(*start, *top, *bottom, signals[above], signals[below], signals[rank])
        assert into[0].unique().tolist() == [above + 50 + step] and into[1].unique().tolist() == [
            below + step
        ]
    _synchronize()
    dist.barrier()
    floats, numbers = (
        pm.blob_view_float(raw + 40000, [4, 2], False),
        pm.blob_view_int(raw + 40000, [1, 2, 2, 2], True),
    )
    floats.fill_(1.0)
    assert numbers.unique().tolist() == [0x3F800000] and numbers.stride() == (8, 1, 4, 2)
    pm.zero(raw + 40000, 16)
    assert floats.tolist() == [[0.0, 0.0]] * 2 + [[1.0, 1.0]] * 2
    with pytest.raises(
        TypeError, match="takes 14 arguments as NVIDIA's apex has them, or 16 as ROCm's, not 13"
    ):
        pm.push_pull_halos_1d(*start, *top, *bottom)
    with pytest.raises(ValueError, match="must have one size"):
        pm.push_pull_halos_1d(*start, rank, *top, *bottom[:2], boxes[0][rank][..., :64], *bottom[3:])
    for call in (lambda: pm.blob_view_half(raw + 60000, [4096], False), lambda: pm.zero(raw, 1 << 17)):
        with pytest.raises(ValueError, match="beyond the 65536"):
            call()
    with pytest.raises(ValueError, match="no memory that was allocated or opened here"):
        pm.free_raw(raw + 8)
    dist.barrier()
    for peer in peers:
        pm.free_raw(peer)


def a_silent_neighbour():
    """Nobody waits for ever: the error names the side, and what came instead is nan."""
    rank = dist.get_rank()
    own = PeerMemoryPool(0, 0, timeout=0.3)
    exchanger = HaloExchangerPeer(ranks(), rank, own, True)
    if rank == 0:
        y = [torch.zeros(1, 1, 1, 300, dtype=F32, device=device()) for _ in range(4)]
        begin = time.monotonic()
        with pytest.raises(
            PeerMemoryError, match=r"the right \(bottom\) neighbour did not answer within 0.3 s"
        ):
            exchanger.left_right_halo_exchange(*y)
            _synchronize()
            own.check()
        assert time.monotonic() - begin < 5
        assert y[2].eq(0).all() and y[3].isnan().all()
        own.check()  # once
    dist.barrier()
    own.close()


def shapes():
    """0 elements are a tensor; what is no shape, or does not fit, leaves the part as it was."""
    own = PeerMemoryPool(1024, 1024, device=device())
    for dynamic in (False, True):
        assert own.allocate_peer_tensors((0, 4), F32, False, dynamic)[0].shape == (0, 4)
        before = own.static_offset, own.dynamic_offset
        for shape, channels_last in (((-64,), False), ((4.0,), False), ((4,), True), ((4096,), False)):
            with pytest.raises((ArgumentError, PeerMemoryError)):
                own.allocate_peer_tensors(shape, F32, channels_last, dynamic)
            assert (own.static_offset, own.dynamic_offset) == before
    dist.barrier()
    own.close()


def after_close():
    """Its memory is gone: said, and nothing is read or written."""
    own = PeerMemoryPool(1024, 1024, device=device())
    exchanger = HaloExchangerPeer(ranks(), dist.get_rank(), own, True)
    y = torch.ones(1, 1, 1, 4, dtype=F32, device=device())
    exchanger.left_right_halo_exchange(y, y)
    _synchronize()
    dist.barrier()
    own.close()
    own.close()
    for use in (
        lambda: exchanger.left_right_halo_exchange(y, y),
        lambda: PeerHaloExchanger1d(ranks(), dist.get_rank(), own, 1)(
            torch.ones(1, 1, 6, 4, dtype=F32, device=device())
        ),
        lambda: own.allocate_peer_tensors((4,), F32, False, True),
    ):
        with pytest.raises(PeerMemoryError, match="it is closed"):
            use()


def one_that_cannot():
    """Whatever keeps a rank from sharing is told on every rank, and nobody waits for it; then it goes on."""
    allocate, last = _memory.allocate, dist.get_world_size() - 1

    def fails(*arguments):
        raise MemoryError("no room")

    _memory.allocate = fails if dist.get_rank() == last else allocate
    try:
        with pytest.raises(PeerMemoryError, match=f"rank {last}: MemoryError: no room"):
            PeerMemoryPool(64, 64, device=device())
    finally:
        _memory.allocate = allocate
    PeerMemoryPool(64, 64, device=device()).close()


def refused():
    """Said on every rank, whichever has the reason."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for arguments, error, text in (
        ((64, 64, None if rank else [0]), ArgumentError, "must give the same peer_ranks"),
        ((64 + 256 * rank, 64), ArgumentError, "same peer_ranks, sizes and kind"),
        ((64, 64, [size]), ArgumentError, "ranks of the world, itself too"),
        ((64, 64, [rank, rank]), ArgumentError, "each once"),
        ((-256, 64), ArgumentError, "static_size must be a number of bytes, not -256"),
        ((64, 1.5), ArgumentError, "dynamic_size must be a number of bytes, not 1.5"),
    ):
        with pytest.raises(error, match=text):
            PeerMemoryPool(*arguments)
    machine, peer_memory._machine = peer_memory._machine, lambda: f"machine {min(rank, 1)}"
    try:
        with pytest.raises(
            PeerMemoryError, match="ranks 0 and 1 are on different machines(?s:.*)HaloExchangerSendRecv"
        ):
            PeerMemoryPool(64, 64, ranks())
        own = PeerMemoryPool(64, 64)  # each machine its own
        assert own.peer_ranks == ([0] if rank == 0 else ranks()[1:])
        if size > 2 or rank == 0:
            stranger = [0, 1] if rank < 2 else [0, rank]
            with pytest.raises(ArgumentError, match="is none of its peers"):
                HaloExchangerPeer(stranger, int(rank > 0), own, True)._exchange(
                    *[torch.zeros(1, 1, 1, dtype=F32, device=device())] * 4
                )
        dist.barrier()
        own.close()
    finally:
        peer_memory._machine = machine
    opened = _memory.opened

    def broken(*arguments):
        raise PeerMemoryError("the door is locked")

    _memory.opened = broken if rank == size - 1 else opened
    try:
        with pytest.raises(
            PeerMemoryError, match=rf"rank {size - 1}: the door is locked(?s:.*)HaloExchangerSendRecv"
        ):
            PeerMemoryPool(64, 64)
    finally:
        _memory.opened = opened


def arguments():
    """Halos and images that do not fit."""
    exchanger = HaloExchangerPeer(ranks(), dist.get_rank(), pool(), True)
    y = torch.zeros(1, 1, 1, 4, dtype=F32, device=device())
    for halo, error, text in (
        (torch.zeros(4, dtype=F32, device=device()), ArgumentError, "3 or 4 dimensions, not 1"),
        (y.to(torch.complex128), TypeError, "complex128 has 16"),
    ):
        with pytest.raises(error, match=text):
            exchanger.left_right_halo_exchange(halo, halo)
    with pytest.raises(ValueError, match="overlaps itself"):
        exchanger.left_right_halo_exchange(y, y, y[..., :1].expand(1, 1, 1, 4), y.clone())
    with pytest.raises(ValueError, match="rank_in_group is 9"):
        PeerHaloExchanger1d(ranks(), 9, pool(), 1)
    with pytest.raises(ValueError, match="2 \\* half_halo = 2"):
        PeerHaloExchanger1d(ranks(), 0, pool(), 1)(y)


def in_a_graph():
    """Replays exchange what is there then, between eager exchanges and a second graph, all in step."""
    if device().type == "cpu":
        return
    rank, size = dist.get_rank(), dist.get_world_size()
    exchanger = HaloExchangerPeer(ranks(), rank, pool(), True)
    halos = [torch.zeros(1, 1, 1, 3000, dtype=F16, device=device()) for _ in range(4)]

    def exchange():
        exchanger.left_right_halo_exchange(*halos)

    exchange()
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph):
            exchange()
    for step in range(12):
        halos[0].fill_(rank + step)
        halos[1].fill_(rank + step + 0.5)
        (exchange, graphs[0].replay, graphs[1].replay)[step % 3]()
        assert halos[2].unique().tolist() == [rank - 0.5 + step if rank else 0.0]
        assert halos[3].unique().tolist() == [rank + 1 + step if rank < size - 1 else 0.0]


CASES = {
    "exchanger_1d": lambda mesh: exchanger_1d(),
    "many_exchanges": lambda mesh: many_exchanges(),
    "tensors_of_the_pool": lambda mesh: tensors_of_the_pool(),
    "raw_functions-nvidia": lambda mesh: raw_functions("nvidia"),
    "raw_functions-rocm": lambda mesh: raw_functions("rocm"),
    "a_silent_neighbour": lambda mesh: a_silent_neighbour(),
    "in_a_graph": lambda mesh: in_a_graph(),
    "shapes": lambda mesh: shapes(),
    "one_that_cannot": lambda mesh: one_that_cannot(),
    "after_close": lambda mesh: after_close(),
    "refused": lambda mesh: refused(),
    "arguments": lambda mesh: arguments(),
}
