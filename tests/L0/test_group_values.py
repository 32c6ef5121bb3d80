"""What users put into the groups of optimizers: numbers and tensors of any dtype, parameters that leave."""

from __future__ import annotations

import pytest
import torch
from test_optimizer_tensors import OPTIMIZERS, give, parameters, plans  # noqa: F401  a fixture

F32 = torch.float32
COUNTING = ["Adam", "Adam, capturable", "LAMB", "NovoGrad", "MixedPrecisionLamb"]


def trained(name, change, steps=4):
    """Parameters after some steps; change(group, number) comes before each."""
    params = parameters()
    optimizer = OPTIMIZERS[name](params)
    for step in range(steps):
        give(params, 10 * step, lazy=False)
        change(optimizer.param_groups[0], step)
        optimizer.step()
    return params


def assert_same(found, expected, **bounds):
    for p, q in zip(found, expected, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), **bounds)


def of(value, dtype, *shape):
    return torch.full(shape, value, dtype=dtype, device="cpu")


KINDS = {
    "number": lambda count: int(count),
    "int64": lambda count: of(int(count), torch.int64),
    "int64 of one element": lambda count: of(int(count), torch.int64, 1),
    "float32": lambda count: of(float(count), F32),
    "int32": lambda count: of(int(count), torch.int32),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", COUNTING)
def test_a_step_count_of_any_kind(plans, name, kind):  # noqa: F811
    """torch keeps float32 tensors, public apex numbers."""

    def change(group, step):
        if step == 2:
            group["step"] = KINDS[kind](group["step"])

    assert_same(trained(name, change), trained(name, lambda *_: None), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, F32], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_of_any_dtype(plans, name, dtype):  # noqa: F811
    def change(group, step):
        if step == 1:
            group["lr"] = of(0.125, dtype)

    def number(group, step):
        if step == 1:
            group["lr"] = 0.125

    assert_same(trained(name, change), trained(name, number), rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_that_leaves_its_group(plans, name):  # noqa: F811
    """It stays as it is, and the others go on as if it had been alone all the time."""

    def change(group, step):
        if step == 2:
            del group["params"][0]

    params = trained(name, change)
    torch.testing.assert_close(params[0], trained(name, change, steps=2)[0], rtol=0, atol=0)
    if "LAMB" not in name and "Lamb" not in name:  # whose steps depend on all gradients
        assert_same(params[1:], trained(name, lambda *_: None)[1:], rtol=0, atol=0)
