"""Which part of the collectives' time runs beside other kernels: from events of made-up traces."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

from _overlap import Kernel, Overlap, common, kernels, longest, merged  # noqa: E402


def event(name, begin, duration, stream=7, category="kernel", phase="X"):
    return {
        "ph": phase,
        "cat": category,
        "name": name,
        "ts": begin,
        "dur": duration,
        "args": {"stream": stream},
    }


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        ([], []),
        ([(3, 4), (0, 1)], [(0, 1), (3, 4)]),
        ([(0, 5), (1, 2)], [(0, 5)]),
        ([(0, 1), (1, 2), (1.5, 3)], [(0, 3)]),
    ],
)
def test_spans_that_touch_are_one(spans, found):
    assert merged(spans) == found


@pytest.mark.parametrize(
    ("first", "second", "time"),
    [
        ([(0, 10)], [], 0),
        ([(0, 10)], [(10, 20)], 0),
        ([(0, 10)], [(2, 4), (3, 5), (9, 30)], 4),
        ([(0, 4), (2, 6), (8, 9)], [(5, 20)], 2),  # time that two collectives share counts once
    ],
)
def test_common_time(first, second, time):
    assert common(first, second) == common(second, first) == time


def test_only_what_the_gpu_did_counts():
    found = kernels(
        [
            event("aten::mm", 0, 100, category="cpu_op"),
            event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)", 10, 5, stream=20),
            event("flow", 0, 1, phase="s"),
            event("nvjet_tst_128x256", 0, 12),
            event("Memcpy DtoD", 40, 2, category="gpu_memcpy"),
        ]
    )
    assert [(k.begin, k.end, k.stream, k.collective, k.product) for k in found] == [
        (0, 12, 7, False, True),
        (10, 15, 20, True, False),
        (40, 42, 7, False, False),
    ]


def test_overlap_of_a_trace():
    """Two collectives of 10 and 20: 4 of the first beside a product, 5 more of the second beside another kernel."""
    found = [
        Kernel("sm90_xmma_gemm_bf16", 7, 0, 104),
        Kernel("ncclDevKernel_ReduceScatter_Sum_bf16", 20, 100, 110),
        Kernel("elementwise_kernel", 7, 120, 125),
        Kernel("ncclDevKernel_AllGather_gemm", 20, 120, 140),  # a collective, whatever else its name holds
    ]
    overlap = Overlap.of(found)
    assert overlap == Overlap(collectives=30, beside_products=4, beside_any=9, others=109, elapsed=140)
    assert str(overlap) == (
        "collectives: 30 us, of which 4 us (13 %) beside products, 9 us (30 %) beside any kernel; other kernels "
        "109 us, all 140 us"
    )
    assert Overlap.of([]) == Overlap(0, 0, 0, 0, 0) and "-" in str(Overlap.of([]))


def test_the_longest_kernels_come_first():
    found = [Kernel("a", 7, 0, 3), Kernel("b", 7, 3, 5), Kernel("b", 7, 5, 8), Kernel("c", 7, 8, 9)]
    assert [line.split() for line in longest(found, 2)] == [
        ["5", "us", "2", "x", "b"],
        ["3", "us", "1", "x", "a"],
    ]
