"""Tensors of more than 2^31 and 2^32 elements: every index and address past 32 bits.

Two ways. A table whose first chunk number wraps makes block 0 take a chunk that begins past 2^31 elements;
the tensors' addresses then point as far before small buffers, so nothing huge is needed and it runs on every
target. And real tensors of that size, in memory that costs nothing until touched, whose last block alone
is run.
"""

from __future__ import annotations

import numpy as np
import pytest

from simt.device import Buffer
from simt.element_types import DTYPES, decode, encode
from simt.multi_tensor import THREADS
from simt.structs import make
from simt.targets import Target

CHUNK = 1024
LENGTH = 700  # of the last chunk: vectors and a tail
FAR = [2**31, 2**33]  # first element of the chunk
BETA1, BETA2, EPS, LR = 0.9, 0.999, 1e-8, 1e-2


class Adam:
    """multi_tensor_adam with a model copy: five lists."""

    kernel = "multi_tensor_adam_bf16_master_bf16"
    types = ("bf16", "f32", "f32", "f32", "bf16")
    arguments = dict(lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, step=1, mode=1, bias_correction=0)

    @classmethod
    def parameters(cls, device):
        return make("AdamArguments", "multi_tensor_adam.h", **cls.arguments)

    @staticmethod
    def expected(g, p, m, v, model):
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g * g
        p = p - LR * m / (np.sqrt(v) + EPS)
        return g, p, m, v, p


class Scale:
    """multi_tensor_scale: vectors of eight halves, two stores each."""

    kernel = "multi_tensor_scale_f16_f32"
    types = ("f16", "f32")

    @staticmethod
    def parameters(device):
        return make("ScaleArguments", "multi_tensor_scale.h", scale=0.5)

    @staticmethod
    def expected(x, y):
        return x, x * 0.5


OPS = [Adam, Scale]


def _values(op) -> list[np.ndarray]:
    rng = np.random.default_rng(9)
    return [encode(np.abs(rng.standard_normal(LENGTH)), name) for name in op.types]


def _compare(op, before: list[np.ndarray], after: list[np.ndarray]) -> None:
    wanted = op.expected(*(decode(x, name) for x, name in zip(before, op.types, strict=True)))
    for found, value, name in zip(after, wanted, op.types, strict=True):
        tolerance = 2.0**-7 if name == "bf16" else 2.0**-20
        np.testing.assert_allclose(decode(found, name), value, rtol=tolerance, atol=1e-6)


def _table(device, addresses, size: int, first_chunk: int, chunks: int):
    return make(
        "TensorTable",
        "multi_tensor_table.h",
        addresses=device.put(np.array(addresses, np.uint64)),
        sizes=device.put(np.array([size], np.int64)),
        first_chunk=device.put(np.array([first_chunk, chunks], np.uint32)),
        tensors=1,
        chunks=chunks,
        chunk_size=CHUNK,
        tensors_with_chunks=1,
    )


def _far_table(device, buffers: list[Buffer], begin: int):
    """Block 0 takes the chunk that begins at element `begin`, which is each buffer's first."""
    addresses = [b.address - begin * b.dtype.itemsize for b in buffers]
    return _table(device, addresses, begin + LENGTH, 2**32 - begin // CHUNK, 1)


@pytest.mark.parametrize("begin", FAR)
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.kernel)
def test_far_chunk(device, op, begin):
    values = _values(op)
    buffers = [device.put(x) for x in values]
    device.launch(op.kernel, 1, THREADS, [_far_table(device, buffers, begin), op.parameters(device)])
    _compare(op, values, [b.numpy() for b in buffers])


@pytest.mark.parametrize("begin", FAR)
def test_norm_of_a_far_chunk(device, begin):
    """The partial result of that chunk; the other chunks never come, so there is no norm."""
    values = encode(np.random.default_rng(9).standard_normal(LENGTH), "f16")
    partials, total = device.full((1, 2), np.nan, np.float64), device.full(1, 7)
    scratch = make(
        "ReductionScratch",
        "multi_tensor_reduce.h",
        partials=partials,
        totals=device.full((1, 1), np.nan, np.float64),
        done=device.full(2, 0, np.uint32),
        run=1,
        runs=1,
    )
    arguments = make("NormArguments", "multi_tensor_l2norm.h", scale=1.0, first=1, last=1, total=total)
    table = _far_table(device, [device.put(values)], begin)
    device.launch("multi_tensor_l2norm_f16", 1, THREADS, [table, arguments, scratch])
    square = partials.numpy().view(np.float32)[0, 0]
    np.testing.assert_allclose(square, (decode(values, "f16") ** 2).sum(), rtol=1e-6)
    assert total.numpy()[0] == 7


# ---- real sizes --------------------------------------------------------------------------------------------

SIZE = 2**31 + LENGTH  # elements; the last chunk is not whole
CHUNKS = -(-SIZE // CHUNK)


class Huge:
    """Tensors of SIZE elements on one executor, of which the last chunk is written and read."""

    def __init__(self, device, types):
        self.device, self.types = device, types
        self.sizes = [DTYPES[name].itemsize for name in types]
        self.addresses = [device.service.allocate(SIZE * size, 0) for size in self.sizes]

    def __enter__(self):
        self.device.service.only_block(CHUNKS - 1)
        return self

    def __exit__(self, *error):
        self.device.service.only_block(-1)
        for address in self.addresses:
            self.device.service.free(address)

    def write(self, values) -> None:
        for address, size, x in zip(self.addresses, self.sizes, values, strict=True):
            self.device.service.write(address + (SIZE - LENGTH) * size, x.tobytes())

    def read(self) -> list[np.ndarray]:
        ends = ((a + (SIZE - LENGTH) * s, s) for a, s in zip(self.addresses, self.sizes, strict=True))
        data = [self.device.service.read(address, LENGTH * size) for address, size in ends]
        return [np.frombuffer(x, DTYPES[name]) for x, name in zip(data, self.types, strict=True)]


@pytest.fixture(params=[32, 64])
def plain(request):
    opened = Target(f"plain-{request.param}", "plain", request.param, 0).device()
    yield opened
    opened.close()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.kernel)
def test_last_block(plain, op):
    with Huge(plain, op.types) as huge:
        values = _values(op)
        huge.write(values)
        table = _table(plain, huge.addresses, SIZE, 0, CHUNKS)
        plain.launch(op.kernel, CHUNKS, THREADS, [table, op.parameters(plain)])
        _compare(op, values, huge.read())


def test_norm_by_the_last_block(plain):
    """All other blocks are taken to be done, with partial results of 0: the last one sums them all up."""
    with Huge(plain, ["f16"]) as huge:
        values = encode(np.random.default_rng(9).standard_normal(LENGTH), "f16")
        huge.write([values])
        partials = plain.service.allocate(8 * (CHUNKS + 1), 0)
        total = plain.full(1, 7)
        scratch = make(
            "ReductionScratch",
            "multi_tensor_reduce.h",
            partials=partials,
            totals=plain.full(1, np.nan, np.float64),
            done=plain.put(np.array([CHUNKS - 1, 0], np.uint32)),
            run=1,
            runs=CHUNKS,
        )
        arguments = make("NormArguments", "multi_tensor_l2norm.h", scale=1.0, first=1, last=1, total=total)
        table = _table(plain, huge.addresses, SIZE, 0, CHUNKS)
        plain.launch("multi_tensor_l2norm_f16", CHUNKS, THREADS, [table, arguments, scratch])
        plain.service.free(partials)
        np.testing.assert_allclose(total.numpy()[0], np.linalg.norm(decode(values, "f16")), rtol=1e-6)
