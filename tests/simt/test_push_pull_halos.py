"""The kernels that exchange halos, with the neighbour's part played by a model of the inbox in numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from simt.structs import make

HEADER, NOBODY = 16, (1 << 64) - 1
UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Case:
    """A halo of `sizes` elements, in an inbox of so many bytes. order: of its dimensions in memory, slowest first;
    turn: how often the strips were used before."""

    unit: int
    sizes: tuple[int, int, int, int]
    box: int
    order: tuple[int, int, int, int] = (0, 1, 2, 3)
    turn: int = 0
    blocks: int = 4

    @property
    def packets(self):
        return -(-int(np.prod(self.sizes)) * self.unit // 8)

    @property
    def cut(self):
        """What the host library computes (csrc/host/push_pull_halos.cpp)."""
        strip_bytes = min(4096, self.box // 16 * 16)
        slots = min(127, (strip_bytes - HEADER) // 32)
        strips = min(self.box // strip_bytes, -(-self.packets // slots))
        rounds = -(-self.packets // (strips * slots))
        return dict(slots=slots, strips=strips, strip_bytes=strip_bytes, rounds=rounds)


CASES = [
    Case(2, (1, 1, 1, 7), 4096),
    Case(2, (1, 2, 3, 5), 4096, order=(0, 3, 1, 2), turn=5),
    Case(4, (1, 1, 7, 37), 8192),
    Case(8, (1, 1, 1, 300), 4096 * 3, turn=1),
    Case(8, (1, 1, 2, 127), 4096, turn=(1 << 32) - 2),  # two rounds, in which the count of turns begins anew
    Case(1, (2, 3, 1, 11), 176, order=(3, 2, 1, 0)),  # five slots a strip, two rounds
    Case(8, (1, 1, 1, 1000), 4096 * 4, blocks=2),
]


def ids(case):
    return f"{case.unit}-{'x'.join(map(str, case.sizes))}-{case.box}"


def next_turn(turn):
    return 2 if turn == (1 << 32) - 1 else turn + 1


def strided(rng, case, kind):
    """(memory, strides in elements, the values in the halo's own order); every second element of it is a gap."""
    shape = [case.sizes[d] for d in case.order]
    strides, step = [0] * 4, 2 if case.order != (0, 1, 2, 3) else 1
    for d, size in zip(reversed(case.order), reversed(shape), strict=True):
        strides[d] = step
        step *= size
    memory = rng.integers(0, np.iinfo(kind).max, step, kind, endpoint=True)
    return memory, tuple(strides)


def view(memory, case, strides):
    bytes_ = [s * memory.itemsize for s in strides]
    return np.lib.stride_tricks.as_strided(memory, case.sizes, bytes_)


def payloads(case, values):
    """Eight bytes a packet, of all slots of all rounds; zeros where the halo ends."""
    cut = case.cut
    count = cut["rounds"] * cut["strips"] * cut["slots"]
    raw = np.zeros(count * 8, np.uint8)
    flat = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    raw[: flat.size] = flat
    return raw.view(np.uint64).reshape(cut["rounds"], cut["strips"], cut["slots"])


def fill(case, box, values):
    """What the neighbour writes into an inbox."""
    cut, turn = case.cut, case.turn
    for packets in payloads(case, values):
        turn = next_turn(turn)
        for strip in range(cut["strips"]):
            begin = strip * cut["strip_bytes"] + HEADER + (turn & 1) * cut["slots"] * 16
            words = box[begin : begin + cut["slots"] * 16].view(np.uint64).reshape(-1, 2)
            mark = np.uint64(turn << 32)
            words[:, 0] = packets[strip] & np.uint64(0xFFFFFFFF) | mark
            words[:, 1] = packets[strip] >> np.uint64(32) | mark
    return turn


def empty(case):
    """An inbox after `turn` turns."""
    box, cut = np.zeros(case.box, np.uint8), case.cut
    for strip in range(cut["strips"]):
        box[strip * cut["strip_bytes"] :][:4].view(np.uint32)[0] = case.turn
    return box


def launch(device, case, sides, fault, **more):
    fields = dict(fault=fault, limit=10**9, sizes=case.sizes, box_bytes=case.box, unit_bytes=case.unit)
    for name, side in sides.items():
        fields |= {f"{name}_{k}": v for k, v in side.items()}
    arguments = make("PushPullHalos", "push_pull_halos_arguments.h", **(fields | case.cut | more))
    device.launch(f"push_pull_halos_u{8 * case.unit}", case.blocks, 128, [arguments])


def side_of(device, case, rng, filled=True):
    """A side's buffers, and what they hold after the exchange."""
    kind = UNITS[case.unit]
    mine, strides = strided(rng, case, kind)
    gets, theirs = strided(rng, case, kind)
    other = rng.integers(0, np.iinfo(kind).max, case.sizes, kind, endpoint=True)
    box, out = empty(case), np.zeros(case.box, np.uint8)
    wanted = gets.copy()
    view(wanted, case, theirs)[...] = other
    wanted_box, wanted_out = box.copy(), out.copy()
    if filled:
        turn = fill(case, box, other)
        wanted_box = box.copy()
        for strip in range(case.cut["strips"]):
            wanted_box[strip * case.cut["strip_bytes"] :][:4].view(np.uint32)[0] = turn
    fill(case, wanted_out, view(mine, case, strides))
    buffers = dict(
        send=device.put(mine), receive=device.put(gets), inbox=device.put(box), outbox=device.put(out),
        send_strides=strides, receive_strides=theirs,
    )  # fmt: skip
    return buffers, dict(receive=wanted, inbox=wanted_box, outbox=wanted_out)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_both_neighbours(device, case):
    """What they had sent arrives, gaps stay; what is sent lies in their inboxes, word by word; turns are counted."""
    rng = np.random.default_rng(case.box + case.turn)
    fault = device.full(2, 0, np.int32)
    sides, wanted = {}, {}
    for name in ("top", "bottom"):
        sides[name], wanted[name] = side_of(device, case, rng)
    launch(device, case, sides, fault)
    for name, found in sides.items():
        for what, array in wanted[name].items():
            np.testing.assert_array_equal(found[what].numpy(), array, err_msg=f"{name} {what}")
    assert fault.numpy().tolist() == [0, 0]


@pytest.mark.parametrize("zero", ["top", "bottom"])
@pytest.mark.parametrize("case", CASES[:3], ids=ids)
def test_zeros_at_the_images_edge(device, case, zero):
    rng = np.random.default_rng(1)
    fault = device.full(2, 0, np.int32)
    sides, wanted = {}, {}
    for name in ("top", "bottom"):
        sides[name], wanted[name] = side_of(device, case, rng, name != zero)
    edge = wanted[zero]["receive"]
    view(edge, case, sides[zero]["receive_strides"])[...] = 0
    sides[zero] |= dict(inbox=None, outbox=None)
    launch(device, case, sides, fault, **{f"{zero}_zero": 1})
    for name in sides:
        np.testing.assert_array_equal(sides[name]["receive"].numpy(), wanted[name]["receive"])
    assert fault.numpy().tolist() == [0, 0]


def test_many_exchanges_with_itself(device):
    """A rank that is its own neighbour gets what it sent, however many turns the strips take and whatever size uses
    them next."""
    box, fault = device.put(np.zeros(8192, np.uint8)), device.full(2, 0, np.int32)
    other = device.put(np.zeros(8192, np.uint8))
    for turn, n in enumerate((3, 2000, 508, 5, 254, 1500)):
        case = Case(8, (1, 1, 1, n), 8192, blocks=2)
        sides, sent = {}, {}
        for name, own in (("top", box), ("bottom", other)):
            sent[name] = np.arange(n, dtype=np.uint64) * 977 + turn + (name == "top")
            sides[name] = dict(
                send=device.put(sent[name]), receive=device.full(n, 7, np.uint64), inbox=own, outbox=own,
                send_strides=(n, n, n, 1), receive_strides=(n, n, n, 1),
            )  # fmt: skip
        launch(device, case, sides, fault)
        for name in sides:
            np.testing.assert_array_equal(sides[name]["receive"].numpy(), sent[name])
    assert fault.numpy().tolist() == [0, 0]


@pytest.mark.parametrize("case", CASES[:1] + CASES[4:5], ids=ids)
def test_a_neighbour_that_does_not_answer(device, case):
    """The wait ends: what is received is nan in every floating-point type, and the fault is told."""
    if device.emulated:
        pytest.skip("the emulator has no clock: not run")
    rng = np.random.default_rng(3)
    fault = device.full(2, 0, np.int32)
    sides, wanted = {}, {}
    for name in ("top", "bottom"):
        sides[name], wanted[name] = side_of(device, case, rng, name == "top")
    launch(device, case, sides, fault, limit=2000)
    np.testing.assert_array_equal(sides["top"]["receive"].numpy(), wanted["top"]["receive"])
    gone = view(sides["bottom"]["receive"].numpy(), case, sides["bottom"]["receive_strides"])
    assert (gone == np.iinfo(UNITS[case.unit]).max).all()
    assert fault.numpy().tolist() == [0, 1]
    headers = sides["bottom"]["inbox"].numpy()[: HEADER // 2].view(np.uint32)
    assert headers.tolist()[1] == 1


def test_delay(device):
    if device.emulated:
        pytest.skip("the emulator has no clock: not run")
    device.launch(
        "push_pull_halos_delay", 1, 1, [make("Delay", "push_pull_halos_arguments.h", nanoseconds=5000)]
    )
