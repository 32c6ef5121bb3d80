"""The executor itself: what it must run rightly, and the planted bugs that each build must name."""

from __future__ import annotations

import ctypes
import re

import numpy as np
import pytest

from simt.build import SELFTEST
from simt.device import Device, KernelFault
from simt.structs import make
from simt.targets import ORDERS, Target

BUILDS = ("plain", "asan", "race")
WIDTHS = (32, 64)


def _open(flavour: str, width: int, order: int = 0) -> Device:
    return Target(f"{flavour}-{width}", flavour, width, order).device(selftest=True)


@pytest.fixture(params=[(f, w) for f in BUILDS for w in WIDTHS], ids=lambda p: f"{p[0]}-{p[1]}")
def executor(request):
    """The self-test kernels on each build, threads ascending."""
    opened = _open(*request.param)
    yield opened
    opened.close()


def fault_of(device: Device, kernel: str, block, arguments, grid=1, shared: int = 0) -> str:
    """Launches a kernel that must not pass, returns what was said of it."""
    with pytest.raises(KernelFault) as caught:
        device.launch(kernel, grid, block, arguments, shared)
    return str(caught.value)


class TestSemantics:
    """Results that the executor, and the emulated machines, must produce."""

    def test_threads_leave_early(self, selftest_device):
        out = selftest_device.full(100, 0)
        selftest_device.launch("selftest_early_exit", 1, 100, [out, np.int32(77)], shared=77 * 4)
        t = np.arange(77)
        expected = np.zeros(100, np.float32)
        expected[:77] = 76 - t + np.where(t % 3 == 0, 0, 1000)
        np.testing.assert_array_equal(out.numpy(), expected)

    def test_shuffle(self, selftest_device):
        w = selftest_device.warp_size
        out = selftest_device.full(3 * w, 0, np.uint32)
        selftest_device.launch("selftest_shuffle", 1, 3 * w, [out])
        t = np.arange(3 * w)
        np.testing.assert_array_equal(out.numpy(), 1000 + (t ^ 1) + 10000 * ((t % w ^ 5) + 1))

    def test_atomics_count_every_thread_once(self, selftest_device):
        counter, seen = selftest_device.full(1, 0, np.uint32), selftest_device.full(300, 0, np.uint32)
        selftest_device.launch("selftest_count", 3, 100, [counter, seen])
        assert counter.numpy()[0] == 300
        np.testing.assert_array_equal(np.sort(seen.numpy()), np.arange(300))

    def test_one_last_block_at_every_launch(self, selftest_device):
        counter, total = selftest_device.full(1, 0, np.uint32), selftest_device.full(1, 0)
        for _ in range(2):
            numbers = selftest_device.full(3 * 128, -1)
            selftest_device.launch("selftest_last_block", 3, 128, [numbers, counter, total])
            assert counter.numpy()[0] == 0
        assert total.numpy()[0] == 2 * 3 * 128 * 129 / 2

    def test_block_sums(self, selftest_device):
        x, out = selftest_device.full(256, 1), selftest_device.full(1, 0)
        selftest_device.launch("selftest_totals", 1, 256, [x, out])
        assert out.numpy()[0] == 256 * 256

    def test_unset_shared_memory_is_nan(self, selftest_device):
        out = selftest_device.full(64, 0)
        selftest_device.launch("selftest_unset_shared", 1, 64, [out])
        np.testing.assert_array_equal(np.isnan(out.numpy()), np.arange(64) % 2 == 0)

    def test_addresses_in_structs_and_tables(self, selftest_device):
        sizes = np.array([5, 0, 300, 64], np.int64)
        lists = [
            selftest_device.put(np.arange(n, dtype=np.float32), offset=4 * k) for k, n in enumerate(sizes)
        ]
        table = make(
            "SelftestTable",
            SELFTEST.with_suffix(".h"),
            addresses=selftest_device.addresses(lists),
            sizes=selftest_device.put(sizes),
            count=len(sizes),
        )
        total = selftest_device.full(2, 0)
        selftest_device.launch("selftest_addresses", 1, 128, [table, 0.5, 3, total])
        for n, buffer in zip(sizes, lists, strict=False):
            np.testing.assert_array_equal(buffer.numpy(), np.arange(n, dtype=np.float32) * 0.5 + 3)
        np.testing.assert_array_equal(total.numpy(), [4, 0])

    def test_three_dimensions(self, executor):
        grid, block = (3, 2, 2), (4, 3, 5)
        out = executor.full(12 * 60, 0, np.uint32)
        executor.launch("selftest_where", grid, block, [out])
        k = np.arange(12 * 60)
        b, t = k // 60, k % 60
        expected = (
            t % 4
            + 10 * (t // 4 % 3)
            + 100 * (t // 12)
            + 1000 * (b % 3)
            + 10000 * (b // 3 % 2)
            + 100000 * (b // 6)
        )
        np.testing.assert_array_equal(out.numpy(), expected)

    @pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
    def test_ballot_of_a_partial_warp(self, order):
        for width in WIDTHS:
            device = _open("plain", width, order)
            n = width + 7
            out = device.full(n, 0, np.uint64)
            device.launch("selftest_ballot", 1, n, [out])
            holds = [
                sum(1 << (t - first) for t in range(first, min(first + width, n)) if t % 3 == 0)
                for first in (0, width)
            ]
            np.testing.assert_array_equal(out.numpy(), [holds[t // width] for t in range(n)])
            device.close()

    def test_absent_lanes_send_nan(self, executor):
        n = executor.warp_size + 1
        out = executor.full(n, 0, np.uint32)
        executor.launch("selftest_shuffle", 1, n, [out])
        # The last thread's partners are past the block's end: it received the low half of simt::absent.
        assert out.numpy()[n - 1] == (0x7FFB7FFB + 10000 * (0x7FFB7FFB + 1)) % 2**32

    def test_barrier_of_a_warp(self, executor):
        out = executor.full(128, 0, np.uint32)
        executor.launch("selftest_warp_barrier", 1, 128, [out])
        np.testing.assert_array_equal(out.numpy(), np.arange(128) ^ 1)

    def test_shared_atomics_are_no_race(self, executor):
        out = executor.full(1, 0, np.uint32)
        executor.launch("selftest_shared_atomics", 1, 128, [out])
        assert out.numpy()[0] == 256


class TestWhatCannotGoOn:
    """Errors that every build reports, and survives."""

    @pytest.fixture(autouse=True)
    def survives(self, executor):
        yield
        x, out = executor.full(64, 1), executor.full(1, 0)
        executor.launch("selftest_totals", 1, 64, [x, out])
        assert out.numpy()[0] == 64 * 64

    def test_divergent_barrier(self, executor):
        out = executor.full(64, 0)
        assert re.search(
            r"barrier divergence: .* lines \d+ and \d+",
            fault_of(executor, "selftest_divergent_barrier", 64, [out]),
        )

    def test_divergent_shuffle(self, executor):
        out = executor.full(64, 0, np.uint32)
        assert re.search(
            r"warp divergence: .* lines \d+ and \d+",
            fault_of(executor, "selftest_divergent_shuffle", 64, [out]),
        )

    def test_barrier_against_shuffle(self, executor):
        w = executor.warp_size
        out = executor.full(w, 0, np.uint32)
        said = fault_of(executor, "selftest_barrier_against_shuffle", w, [out])
        assert re.search(
            rf"deadlock: {w // 2} threads at barrier line \d+; {w // 2} threads at exchange line \d+", said
        )

    @pytest.mark.parametrize("kernel", ["selftest_spin", "selftest_spin_at_barrier"])
    def test_spinning(self, executor, kernel):
        executor.service.time_limit(0.2)
        said = fault_of(executor, kernel, 64, [executor.full(1, 0, np.uint32)], grid=2)
        executor.service.time_limit(120.0)
        assert "time limit: the launch took over 0.2 s" in said
        assert "thread (" in said and "of block (0,0,0)" in said

    @pytest.mark.parametrize(
        "grid, block", [(1, 2048), (0, 64), (1, (1, 1, 65)), ((1, 65536), 1), (2**23, 512)]
    )
    def test_bad_launches(self, executor, grid, block):
        assert "bad launch" in fault_of(executor, "selftest_spin", block, [None], grid=grid)

    def test_launch_of_more_threads_than_a_kernel_takes(self, executor):
        out = executor.full(96, 0, np.uint32)
        executor.launch("selftest_bounded", 1, 96, [out])
        assert out.numpy()[95] == 95
        said = fault_of(executor, "selftest_bounded", 97, [None])
        assert "block 97x1x1" in said and "at most 96 threads" in said

    def test_unknown_kernel(self, executor):
        assert "no kernel selftest_nowhere" in fault_of(executor, "selftest_nowhere", 1, [])

    def test_arguments_are_counted_and_measured(self, executor):
        with pytest.raises(TypeError, match="takes 2 arguments, 1 given"):
            executor.launch("selftest_past_tensor", 1, 1, [None])
        with pytest.raises(TypeError, match="8 bytes for a parameter of 4"):
            executor.launch("selftest_past_tensor", 1, 1, [None, np.int64(1)])


class TestPlantedMemoryBugs:
    """AddressSanitizer and UBSan name each, with file and line."""

    @pytest.fixture(params=WIDTHS)
    def asan(self, request):
        opened = _open("asan", request.param)
        yield opened
        opened.close()

    def test_one_past_a_tensor(self, asan):
        said = fault_of(asan, "selftest_past_tensor", 64, [asan.full(1000, 0), np.int32(1000)])
        assert "heap-buffer-overflow" in said and "selftest.cu:" in said

    def test_before_an_unaligned_tensor(self, asan):
        x = asan.full(4, 0)
        said = fault_of(asan, "selftest_misaligned", 1, [ctypes.c_uint64(x.address - 16), asan.full(4, 0)])
        assert "heap-buffer-overflow" in said

    def test_past_static_shared(self, asan):
        said = fault_of(asan, "selftest_past_static_shared", 64, [asan.full(64, 0)])
        assert "heap-buffer-overflow" in said and "selftest.cu:" in said

    def test_past_dynamic_shared(self, asan):
        said = fault_of(asan, "selftest_past_dynamic_shared", 64, [asan.full(64, 0)], shared=64 * 4)
        assert "heap-buffer-overflow" in said and "selftest.cu:" in said

    def test_past_registers(self, asan):
        said = fault_of(asan, "selftest_past_registers", 64, [asan.full(64, 0), np.int32(5)])
        assert re.search(r"selftest.cu:\d+.*(out of bounds|insufficient space)", said)

    def test_misaligned_vector(self, asan):
        said = fault_of(asan, "selftest_misaligned", 8, [asan.full(32, 1, offset=4), asan.full(32, 0)])
        assert re.search(r"selftest.cu:\d+.*misaligned address", said)

    def test_index_of_32_bits(self, asan):
        asan.service.only_block(599_997)
        said = fault_of(asan, "selftest_far_in_32_bits", 32, [None, np.int32(4096)], grid=600_000)
        assert "4096 * 599997 cannot be represented" in said or "599997 * 4096 cannot be represented" in said

    def test_division_by_zero(self, asan):
        assert "division by zero" in fault_of(
            asan, "selftest_divide", 1, [asan.full(1, 0, np.int32), np.int32(0)]
        )

    def test_a_new_child_follows_a_report(self, asan):
        fault_of(asan, "selftest_past_tensor", 64, [asan.full(64, 0), np.int32(64)])
        x, out = asan.full(64, 1), asan.full(1, 0)
        asan.launch("selftest_totals", 1, 64, [x, out])
        assert out.numpy()[0] == 64 * 64


class TestPlainBuild:
    """Without a sanitizer a bad access is an error text where the processor faults, and never a crash."""

    @pytest.fixture(
        params=[(f, w) for f in ("plain", "race") for w in WIDTHS], ids=lambda p: f"{p[0]}-{p[1]}"
    )
    def plain(self, request):
        opened = _open(*request.param)
        yield opened
        opened.close()

    def test_null(self, plain):
        assert "memory fault" in fault_of(plain, "selftest_past_tensor", 1, [None, np.int32(0)])

    def test_past_the_guard(self, plain):
        said = fault_of(plain, "selftest_past_tensor", 64, [plain.full(1000, 0), np.int32(1000)])
        assert (
            "memory fault" in said and "thread (40,0,0) of block (0,0,0)" in said and "selftest.cu:" in said
        )

    def test_misaligned_vector(self, plain):
        # Whether the processor faults is the compiler's choice of instruction; the result must not be wrong.
        x, out = plain.put(np.arange(32, dtype=np.float32), offset=4), plain.full(32, 0)
        try:
            plain.launch("selftest_misaligned", 1, 8, [x, out])
        except KernelFault as fault:
            assert "memory fault" in str(fault)
        else:
            np.testing.assert_array_equal(out.numpy(), np.arange(32))

    def test_stack_overflow(self, plain):
        assert "stack overflow of thread (0,0,0)" in fault_of(
            plain, "selftest_stack_overflow", 1, [plain.full(1, 0, np.uint8)]
        )

    def test_division_by_zero(self, plain):
        assert "division by zero" in fault_of(
            plain, "selftest_divide", 1, [plain.full(1, 0, np.int32), np.int32(0)]
        )

    def test_one_block_of_a_huge_grid(self, plain):
        row, blocks = 4096, 2**20
        x = plain.service.allocate(row * blocks, 0)  # 4 GiB that cost nothing until they are touched
        plain.service.only_block(blocks - 1)
        try:
            plain.launch("selftest_far", blocks, 32, [ctypes.c_uint64(x), np.int64(row)])
        finally:
            plain.service.only_block(-1)
        assert plain.service.read(x + row * blocks - 2, 2) == b"\0\7"
        plain.service.free(x)


class TestRaces:
    """The race build names a missing barrier in every schedule, whatever the result was."""

    @pytest.fixture(params=[(w, o) for w in WIDTHS for o in (*ORDERS.values(), 11)], ids=str)
    def racing(self, request):
        width, order = request.param
        opened = _open("race", width, order)
        yield opened
        opened.close()

    @pytest.mark.parametrize("kernel", ["selftest_missing_barrier", "selftest_reused_buffer"])
    def test_block_sum(self, racing, kernel):
        said = fault_of(racing, kernel, 256, [racing.full(256, 1), racing.full(1, 0)])
        assert "race: no barrier between two accesses" in said
        assert said.count("selftest.cu:") == 2

    def test_within_a_warp(self, racing):
        assert "race" in fault_of(racing, "selftest_no_warp_barrier", 64, [racing.full(64, 0, np.uint32)])

    def test_plain_read_beside_atomics(self, racing):
        assert "race" in fault_of(
            racing, "selftest_shared_atomics_and_read", 64, [racing.full(1, 0, np.uint32)]
        )

    def test_warp_greedy_orders_show_the_reused_buffer(self):
        """In the plain build the bug shows in a wrong sum, in some schedule: round robin hid it in all."""
        wrong = 0
        for order in ORDERS.values():
            device = _open("plain", 32, order)
            out = device.full(1, 0)
            device.launch("selftest_reused_buffer", 1, 256, [device.full(256, 1), out])
            wrong += out.numpy()[0] != 256 * 256
            device.close()
        assert wrong
